"""Releases, channels and prunes as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from gpukiln.release.log import Release
from gpukiln.release.overview import ChannelRow
from gpukiln.release.prune import PruneResult
from gpukiln.reports.tables import Rows

COLOURS = {
    "done": "green",
    "published": "green",
    "failed": "red",
    "planned": "cyan",
    "remove": "yellow",
    "removed": "green",
}


def _coloured(state: str) -> Text:
    return Text(state, style=COLOURS.get(state, ""))


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
            state = Text("nothing to move" if unchanged else "would be moved")
        if result.state == "failed" and result.published:
            state.append(" after the channel was moved")
        image = result.image_id or ("a new copy" if planned else "-")
        made.add(result.region, state, image, "-" if unchanged else result.replaces or "-")
    return made


def channels_table(rows: Iterable[ChannelRow]) -> Rows:
    """One row a channel and region.

    Args:
        rows: What was found.
    """
    titles = ("channel", "region", "points at", "image", "kubernetes", "build", "since", "before", "")
    made = Rows(*titles, first=3, folds=True)
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
            Text("; ".join(row.problems), style="red"),
        )
    return made


def prune_table(regions: Iterable[PruneResult]) -> Rows:
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
        for snapshot_id, action in one.orphaned_snapshots.items():
            reason = "left by an earlier prune: its image is gone"
            made.add(_coloured(action), one.region, snapshot_id, "", reason, "")
    return made
