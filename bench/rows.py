"""What `bench.bake` compares: its rows, what each is held against, and how that is printed."""

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

FLOOR = "floor"


@dataclass(frozen=True)
class Row:
    """One thing that is measured.

    Args:
        needs: The row whose result it goes on from.
        mkosi: The row of mkosi that it is compared with.
        at_most: Highest ratio that reaches the bar, by the row that it is a ratio to.
        below: The same, for a ratio that has to be below it.
        at_most_s: Highest number of seconds that reaches the bar.
    """

    what: str
    needs: str = ""
    mkosi: str = ""
    at_most: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, float] = field(default_factory=dict)
    at_most_s: float | None = None


# In this order, so that what is compared is measured one after the other: the load of the machine changes.
ROWS = {
    FLOOR: Row("by hand: mmdebstrap, DKMS, packing"),
    "mkosi-cold": Row("mkosi, nothing kept"),
    "cold": Row("gpukiln, nothing kept", mkosi="mkosi-cold", at_most={"mkosi-cold": 1.0, FLOOR: 1.2}),
    "every-role": Row(
        "gpukiln, modules kept, every role again", "cold", "mkosi-cold", at_most={"mkosi-cold": 0.35}
    ),
    "mkosi-file": Row("mkosi -i, one file changed", "mkosi-cold"),
    "late-role": Row("gpukiln, a late role changed", "cold", "mkosi-file", below={"mkosi-file": 1.0}),
    "mkosi-package": Row("mkosi -i, one package more", "mkosi-cold"),
    "package": Row("gpukiln, one package more", "cold", "mkosi-package", at_most={"mkosi-package": 0.25}),
    "nothing": Row("gpukiln, nothing changed", "cold", at_most_s=1.5),
    "dib-cold": Row("diskimage-builder, nothing kept"),
    "dib-warm": Row("diskimage-builder, its caches kept", "dib-cold"),
}


@dataclass(frozen=True)
class Measured:
    """What a row took.

    Args:
        seconds: From start to end, without what is counted apart.
        cpu_s: Processor seconds; None where they can't be told.
        apart_s: Seconds of booting the image and judging it, which nobody does by hand.
        note: By which release of a tool, or from where it went on.
    """

    seconds: float
    cpu_s: float | None = None
    apart_s: float | None = None
    note: str = ""


class VoidError(Exception):
    """A row that measured nothing: a tool is missing or failed, or what it made is not the image."""


@contextmanager
def stopwatch() -> Iterator[list[Measured]]:
    """Measure a block.

    Yields:
        A list that gets the result when the block ends. The processor seconds are those of the programs
        that it waited for, and of theirs.
    """
    result: list[Measured] = []
    before, started = _cpu(), time.monotonic()
    yield result
    result.append(Measured(time.monotonic() - started, _cpu() - before))


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def chosen(only: str) -> list[str]:
    """The rows to measure, in order, with those that they go on from.

    Args:
        only: Names, separated by commas; empty: all.

    Returns:
        Their names.

    Raises:
        ValueError: There is no row of that name.
    """
    names = {name.strip() for name in only.split(",") if name.strip()} or set(ROWS)
    if wrong := sorted(names - set(ROWS)):
        raise ValueError(f"no row is called {', '.join(wrong)}; there are {', '.join(ROWS)}")
    for name in list(names):
        if needed := ROWS[name].needs:
            names.add(needed)
    return [name for name in ROWS if name in names]


def verdict(name: str, done: Mapping[str, Measured]) -> str:
    """Whether a row reaches its bars, in words.

    Args:
        name: The row.
        done: What was measured, by row.

    Returns:
        For example `<= 1.2 of floor: reached`, one a bar; empty for a row without one.
    """
    row, own = ROWS[name], done[name]
    bars = [(other, limit, "<=") for other, limit in row.at_most.items()]
    bars += [(other, limit, "<") for other, limit in row.below.items()]
    words = []
    for other, limit, sign in bars:
        if other not in done:
            words.append(f"{sign} {limit:g} of {other}: not measured")
            continue
        ratio = own.seconds / done[other].seconds
        reached = ratio < limit if sign == "<" else ratio <= limit
        words.append(f"{sign} {limit:g} of {other}: {'reached' if reached else 'not reached'}")
    if row.at_most_s is not None:
        reached = own.seconds <= row.at_most_s
        words.append(f"<= {row.at_most_s:g} s: {'reached' if reached else 'not reached'}")
    return "; ".join(words)


def table(names: Iterable[str], done: Mapping[str, Measured], void: Mapping[str, str]) -> str:
    """Everything that was measured, as a table in Markdown.

    Args:
        names: The rows that were asked for, in order.
        done: What was measured, by row.
        void: Why nothing was, by row.

    Returns:
        One line a row, with two for the head.
    """
    lines = [
        "| row | what | seconds | CPU s | of the floor | of mkosi | bar | boot and proof |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        if name in done:
            lines.append(_line(name, done))
        else:
            lines.append(f"| {name} | {ROWS[name].what} | void: {void[name]} | | | | | |")
    return "\n".join(lines)


def _line(name: str, done: Mapping[str, Measured]) -> str:
    row, own = ROWS[name], done[name]
    cells = [
        *(name, f"{row.what} ({own.note})" if own.note else row.what),
        *(f"{own.seconds:.1f}", _number(own.cpu_s)),
        *(_ratio(own, done.get(FLOOR)), _ratio(own, done.get(row.mkosi))),
        *(verdict(name, done), _number(own.apart_s)),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _ratio(own: Measured, other: Measured | None) -> str:
    return f"{own.seconds / other.seconds:.3f}" if other else "-"
