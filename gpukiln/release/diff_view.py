"""Shows the differences of two images on a terminal or as Markdown, both from the same sections."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.release.diff import Diff, ValueChange
from gpukiln.release.vulnerabilities import Vulnerability
from gpukiln.reports.tables import Rows
from gpukiln.typed import unknown
from gpukiln.units import Duration

# Colours of a row by the text of its last cell.
STYLES = {
    "added": "cyan",
    "removed": "yellow",
    "upgraded": "green",
    "downgraded": "bold red",
    "changed": "magenta",
    "worse": "bold red",
    "better": "green",
}
NOTHING = "-"
SHOWN = 20  # of the vulnerabilities that both images have: an old distribution has hundreds
FORMATS = ("text", "markdown", "json")


def check_format(name: str) -> str:
    """The format of a command's answer.

    Args:
        name: What was typed.

    Returns:
        The same.

    Raises:
        UsageError: There is no such format.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return name


@dataclass(frozen=True)
class DiffSection:
    """A table with its title.

    Args:
        title: The heading.
        columns: The heads of the columns.
        rows: The cells; a last cell that is a key of STYLES colours its row.
        notes: Sentences below the table.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def sections(diff: Diff) -> list[DiffSection]:
    """All sections of a difference, the most important first; empty ones are included."""
    return [
        DiffSection(f"{diff.old} -> {diff.new}", ("", "old", "new", ""), tuple(map(_row, diff.facts))),
        *_vulnerabilities(diff),
        _checks(diff),
        _packages(diff.packages),
        _durations(diff),
        DiffSection("Changed inputs", notes=tuple(_inputs(diff.inputs)) or ("none: both are of the same",)),
    ]


def _inputs(lines: Iterable[str]) -> Iterator[str]:
    """The changed inputs; of files only their number in each folder, for the commits have the details."""
    files: Counter[str] = Counter()
    for line in lines:
        verb, _, what = line.partition(" ")
        # Lines of `explain_change` without a verb are values, which are shown as they are.
        if verb not in ("added", "removed", "changed") or what.startswith("in components.yaml"):
            yield line
        else:  # `explain_change` names a role's file `role NAME: FILE`
            owner, inside, _ = what.partition(": ")
            files[owner if inside else "/".join(what.split("/")[:2])] += 1
    for folder, count in files.items():
        yield f"{folder}: {count} file{'s' if count > 1 else ''}"


def _row(change: ValueChange) -> tuple[str, ...]:
    return (change.name, change.old or NOTHING, change.new or NOTHING, change.direction or "")


def _vulnerabilities(diff: Diff) -> Iterator[DiffSection]:
    yield _vulnerable("Known vulnerabilities fixed", diff.fixed)
    yield _vulnerable("Known vulnerabilities introduced", diff.introduced)
    left = _vulnerable("Known vulnerabilities that both have", diff.remaining)
    # --json has all of them: the limit is for people only.
    more = len(left.rows) - SHOWN
    notes = (f"and {more} more: --json lists them",) if more > 0 else ()
    yield DiffSection(left.title, left.columns, left.rows[:SHOWN], (*notes, *diff.vulnerability_notes))


def _vulnerable(title: str, rows: Iterable[Vulnerability]) -> DiffSection:
    cells = tuple(
        (_names(row), row.severity or NOTHING, row.package, row.version, row.fixed or "not yet", row.summary)
        for row in rows
    )
    columns = ("name", "severity", "in", "version", "fixed in", "about")
    return DiffSection(f"{title}: {len(cells)}", columns if cells else (), cells)


def _names(row: Vulnerability) -> str:
    return ", ".join((row.id, *(name for name in row.aliases if name not in row.id)))


def _checks(diff: Diff) -> DiffSection:
    rows = tuple(
        (
            check.id,
            (check.old or "absent").replace("_", " "),
            (check.new or "absent").replace("_", " "),
            check.reason or check.title,
            "worse" if check.is_worse else "better" if check.new == "passed" else "",
        )
        for check in diff.checks
    )
    title = f"Checks with another result: {len(rows)}"
    return DiffSection(title, ("check", "old", "new", "what it says", "") if rows else (), rows)


def _packages(changes: tuple[ValueChange, ...]) -> DiffSection:
    counts = Counter(change.direction for change in changes)
    summary = ", ".join(f"{n} {word}" for word, n in counts.items()) or "the same"
    rows = tuple(_row(change) for change in changes)
    return DiffSection(f"Packages: {summary}", ("package", "old", "new", "") if rows else (), rows)


def _durations(diff: Diff) -> DiffSection:
    rows = []
    for step, (old, new) in diff.durations.items():
        both = (Duration(seconds).shown if seconds is not None else NOTHING for seconds in (old, new))
        # Whole seconds: below a second the difference is noise of the machine.
        more = f"{new - old:+.0f} s" if old is not None and new is not None else ""
        rows.append((step, *both, more))
    return DiffSection("How long the build took", ("step", "old", "new", "difference"), tuple(rows))


def to_terminal(parts: Iterable[DiffSection]) -> RenderableType:
    """Sections for a rich console."""
    shown: list[RenderableType] = []
    for part in parts:
        shown += [Text(f"\n{part.title}" if shown else part.title, style="bold")]
        if part.rows:
            shown.append(_table(part))
        shown += [Text(f"  {note}", style="dim") for note in part.notes]
    return Group(*shown)


def _table(part: DiffSection) -> Rows:
    rows = Rows(*part.columns, first=1, folds=True)
    for row in part.rows:
        rows.add(*row, style=STYLES.get(row[-1], ""))
    return rows


def to_markdown(parts: Iterable[DiffSection], *, level: int = 2) -> str:
    """Sections as Markdown.

    Args:
        level: Level of their headings.

    Returns:
        The text, with an empty line after each section.
    """
    lines = []
    for part in parts:
        lines += [f"{'#' * level} {markdown(part.title)}", ""]
        if part.rows:
            lines += [_cells(part.columns), _cells("---" for _ in part.columns)]
            lines += [*(_cells(map(markdown, row)) for row in part.rows), ""]
        if part.notes:
            lines += [*(f"- {markdown(note)}" for note in part.notes), ""]
    return "\n".join(lines)


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(text: str) -> str:
    r"""Escape a text for Markdown.

    >>> markdown("a|b *c* snake_case")
    'a\\|b \\*c\\* snake_case'
    >>> markdown("two\nlines")
    'two lines'
    """
    for character in "\\`*<|":  # CommonMark takes an underscore within a word literally
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
