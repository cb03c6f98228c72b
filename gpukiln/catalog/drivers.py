"""NVIDIA driver branches: their kinds, last releases and ends of support."""

from datetime import date
from functools import cache
from typing import Literal

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict, unknown


@strict
class Branch:
    """A driver branch.

    Args:
        branch: Its number, for example 535.
        type: LTSB (long-term), PB (production), NFB (new feature) or unknown.
        latest: The last release seen, or None.
        latest_date: Its day.
        eol: The day support ends, or None when it is not known.
        native_cuda: The CUDA version that the branch brings.
        open_modules: Whether open kernel modules exist: none, optional, default, only.
        status: How well the facts are known: confirmed, secondary, memory.
        note: What else to know.
    """

    branch: int
    # NVIDIA's kinds: long-term support branch, production branch, new feature branch.
    type: Literal["LTSB", "PB", "NFB", "unknown"]
    native_cuda: str
    open_modules: Literal["none", "optional", "default", "only"]
    status: str
    latest: str | None = None
    latest_date: date | None = None
    eol: date | None = None
    note: str = ""


@strict
class Bulletin:
    """A security bulletin of NVIDIA about the driver.

    Args:
        bulletin: Its number.
        month: When it came out, as year-month.
        fixed: For each branch the first release with the fixes.
        cves: The gravest flaws.
    """

    bulletin: int
    month: str
    # A bulletin names the first fixed release of each branch.
    fixed: dict[int, str]
    cves: tuple[str, ...]


@cache
def branches() -> dict[int, Branch]:
    """Every branch of the catalogue by its number."""
    rows = load(
        tuple[Branch, ...],
        data("nvidia_matrix")["driver_branches"],
        where="nvidia_matrix.yaml: driver_branches",
    )
    # Rows in the file, so that it reads as a table; by number for look-ups.
    return {row.branch: row for row in rows}


@cache
def bulletins() -> tuple[Bulletin, ...]:
    """Every driver bulletin of the catalogue."""
    return load(
        tuple[Bulletin, ...],
        data("nvidia_matrix")["driver_advisories"],
        where="nvidia_matrix.yaml: driver_advisories",
    )


def branch(number: int) -> Branch:
    """One branch.

    Args:
        number: For example 535.

    Raises:
        UsageError: The catalogue does not know it.
    """
    if known_branch := branches().get(number):
        return known_branch
    raise unknown("driver branch", str(number), map(str, branches()))


def recommended_branch(today: date) -> Branch:
    """The long-term branch that is supported longest.

    Args:
        today: The day that ends of support are compared with.

    Returns:
        The branch to move to when another one ends.

    >>> recommended_branch(date(2026, 11, 1)).branch
    580
    >>> recommended_branch(date(2026, 11, 1)).type
    'LTSB'
    """
    # Without a known end a branch is no advice.
    long_term = [row for row in branches().values() if row.type == "LTSB" and row.eol]
    return max(long_term, key=lambda row: (row.eol or today, row.branch))
