"""Releases, channels and prunes as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpukiln.release.log import Release
from gpukiln.release.overview import Row
from gpukiln.release.prune import RegionPrune

COLOURS = {
    "done": "green",
    "published": "green",
    "failed": "red",
    "planned": "cyan",
    "remove": "yellow",
    "removed": "green",
}


class Rows:
    """A table that is never cut: where it is wider than the terminal, each row becomes a few lines.

    Rich leaves out whole columns of what does not wrap, and an id that is wrapped can't be copied.

    Args:
        titles: Of the columns; the last may be empty.
        first: Columns that stand in the first line of a row that has several.
    """

    def __init__(self, *titles: str, first: int) -> None:
        self._titles, self._first = titles, first
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Add a row; cells may have Rich's markup."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See Rich, Console Protocol."""
        widths = [
            max(Text.from_markup(cell).cell_len for cell in cells)
            for cells in zip(self._titles, *self._rows, strict=True)
        ]
        wide = sum(widths) + 2 * len(widths)
        if wide <= options.max_width or not console.is_terminal:
            made = Table(box=None, pad_edge=False)
            for title, width in zip(self._titles, widths, strict=True):
                made.add_column(title, no_wrap=True, min_width=width)
            for row in self._rows:
                made.add_row(*row)
            yield from console.render(made, options.update_width(max(wide, options.max_width)))
            return
        for row in self._rows:
            yield Text.from_markup("  ".join(cell for cell in row[: self._first] if cell))
            for title, cell in zip(self._titles[self._first :], row[self._first :], strict=True):
                if cell:
                    yield Padding(Text.from_markup(f"{title}: {cell}" if title else cell), (0, 0, 0, 4))


def _coloured(state: str) -> str:
    return f"[{COLOURS.get(state, 'default')}]{state}[/]"


def release_table(release: Release) -> Rows:
    """One row a region.

    Args:
        release: A release or rollback.
    """
    planned = release.state == "planned"
    made = Rows("region", "state", "image", "replaces", first=2)
    for result in release.regions:
        state = _coloured(result.state)
        unchanged = result.image_id and result.image_id == result.replaces
        if result.state == "planned":
            state = "nothing to move" if unchanged else "would be moved"
        if result.state == "failed" and result.published:
            state += " after the channel was moved"
        image = result.image_id or ("a new copy" if planned else "-")
        made.add(result.region, state, image, "-" if unchanged else result.replaces or "-")
    return made


def channels_table(rows: Iterable[Row]) -> Rows:
    """One row a channel and region.

    Args:
        rows: What was found.
    """
    made = Rows(
        "channel", "region", "points at", "image", "kubernetes", "build", "since", "before", "", first=3
    )
    for row in rows:
        made.add(
            row.pointer.channel,
            row.region,
            row.image_id or "-",
            row.pointer.image,
            row.pointer.kubernetes,
            row.build or "-",
            row.since[:16],
            row.previous or "-",
            f"[red]{'; '.join(row.problems)}[/]" if row.problems else "",
        )
    return made


def prune_table(regions: Iterable[RegionPrune]) -> Rows:
    """One row an image, and one for every snapshot that an earlier run left.

    Args:
        regions: What was found and done.
    """
    made = Rows("", "region", "image", "created", "reason", "name", first=4)
    for one in regions:
        for item in one.items:
            made.add(
                _coloured(item.action),
                one.region,
                item.image_id,
                item.created[:10],
                item.reason,
                item.name,
            )
        for snapshot_id, action in one.leftovers.items():
            reason = "left by an earlier prune: its image is gone"
            made.add(_coloured(action), one.region, snapshot_id, "", reason, "")
    return made
