"""Releases, channels and prunes as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from gpukiln.release.overview import Row
from gpukiln.release.prune import RegionPrune
from gpukiln.release.record import Release

COLOURS = {
    "done": "green",
    "published": "green",
    "failed": "red",
    "planned": "cyan",
    "remove": "yellow",
    "removed": "green",
}


def _table(*titles: str) -> Table:
    """An empty table in the style of the other commands; ids are never cut."""
    made = Table(box=None, pad_edge=False)
    for title in titles:
        made.add_column(title, no_wrap=True)
    return made


def _coloured(state: str) -> str:
    return f"[{COLOURS.get(state, 'default')}]{state}[/]"


def release_table(release: Release) -> Table:
    """One row a region.

    Args:
        release: A release or rollback.
    """
    planned = release.state == "planned"
    made = _table("region", "image", "replaces", "state")
    for result in release.regions:
        state = _coloured(result.state)
        unchanged = result.image_id and result.image_id == result.replaces
        if result.state == "planned":
            state = "nothing to move" if unchanged else "would be moved"
        if result.state == "failed" and result.published:
            state += " after the channel was moved"
        image = result.image_id or ("a new copy" if planned else "-")
        made.add_row(result.region, image, "-" if unchanged else result.replaces or "-", state)
    return made


def channels_table(rows: Iterable[Row]) -> Table:
    """One row a channel and region.

    Args:
        rows: What was found.
    """
    made = _table("image", "kubernetes", "channel", "region", "points at", "build", "since", "before", "")
    for row in rows:
        made.add_row(
            *(row.pointer.image, row.pointer.kubernetes, row.pointer.channel, row.region),
            *(row.image_id or "-", row.build or "-", row.since[:16], row.previous or "-"),
            f"[red]{'; '.join(row.problems)}[/]" if row.problems else "",
        )
    return made


def prune_table(regions: Iterable[RegionPrune]) -> Table:
    """One row an image, and one for every snapshot that an earlier run left.

    Args:
        regions: What was found and done.
    """
    made = _table("region", "image", "created", "", "reason", "name")
    for one in regions:
        for item in one.items:
            made.add_row(
                *(one.region, item.image_id, item.created[:10], _coloured(item.action)),
                *(item.reason, item.name),
            )
        for snapshot_id, action in one.leftovers.items():
            reason = "left by an earlier prune: its image is gone"
            made.add_row(one.region, snapshot_id, "", _coloured(action), reason, "")
    return made
