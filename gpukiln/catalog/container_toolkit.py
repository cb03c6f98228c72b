"""Security advisories of NVIDIA's container toolkit."""

from functools import cache

from gpukiln.catalog.load import data, version_key
from gpukiln.typed import load, strict


@strict
class Advisory:
    """A flaw of the container toolkit.

    Args:
        cve: Its CVE number.
        bulletin: NVIDIA's bulletin.
        fixed: The first release without it.
        severity: medium, high or critical.
        about: What it lets a container do.
        status: How well the facts are known: confirmed, secondary, memory.
    """

    cve: str
    bulletin: int
    fixed: str
    severity: str
    about: str
    status: str


@cache
def advisories() -> tuple[Advisory, ...]:
    """Every advisory of the catalogue."""
    rows = data("nvidia_matrix")["container_toolkit_advisories"]
    return load(tuple[Advisory, ...], rows, where="nvidia_matrix.yaml: container_toolkit_advisories")


def flaws(version: str) -> tuple[Advisory, ...]:
    """The known flaws of a release.

    Args:
        version: For example "1.17.8".

    Returns:
        The advisories whose fix came later.

    >>> flaws(first_safe())
    ()
    >>> [advisory.cve for advisory in flaws("1.17.7")][0]
    'CVE-2025-23266'
    """
    # A bulletin names the first fixed release; every earlier one has the flaw.
    return tuple(row for row in advisories() if version_key(version) < version_key(row.fixed))


def first_safe() -> str:
    """The first release without a known flaw."""
    # The latest fix covers the earlier ones: releases are one line.
    return max((row.fixed for row in advisories()), key=version_key)
