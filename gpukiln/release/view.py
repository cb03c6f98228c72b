"""Releases, channels and prunes as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
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


def release_parts(release: Release) -> Iterator[RenderableType]:
    """A release or rollback, with its regions."""
    preposition = "to" if release.action == "rollback" else "of"
    yield f"{release.pointer.path}: {release.action} {preposition} {release.build}"
    yield release_table(release)
    if release.not_run:
        yield f"checks not run: {release.not_run}"
    for check, reason in release.excused.items():
        yield Text.assemble(("not proven", "yellow"), f" {check}: {reason}")
    if release.state == "planned":
        yield "dry run: nothing was changed"


def trust_notes(rows: Sequence[ChannelRow]) -> Iterator[str]:
    """By what the images of channels are trusted, a line for each way."""
    for trust in dict.fromkeys(row.trust for row in rows if row.trust):
        channels = dict.fromkeys(row.pointer.channel for row in rows if row.trust == trust)
        yield f"note: {', '.join(channels)}: {trust}"


def prune_notice(regions: Sequence[PruneResult]) -> str:
    """What --yes would remove; empty where no region could be looked at."""
    if all(region.error for region in regions):
        return ""
    removable = any("remove" in region.actions for region in regions)
    return f"nothing was removed: {'--yes removes what says `remove`' if removable else 'nothing is to be'}"


def release_table(release: Release) -> Rows:
    """One row a region.

    Args:
        release: A release or rollback.
    """
    planned = release.state == "planned"
    table = Rows("region", "state", "image", "replaces", first=2)
    for result in release.regions:
        state = _coloured(result.state)
        # A second run of a release finds its own image: there is nothing to move.
        unchanged = result.image_id and result.image_id == result.replaces
        if result.state == "planned":
            state = Text("nothing to move" if unchanged else "would be moved")
        if result.state == "failed" and result.published:
            state.append(" after the channel was moved")
        image = result.image_id or ("a new copy" if planned else "-")
        table.add(result.region, state, image, "-" if unchanged else result.replaces or "-")
    return table


def channels_table(rows: Iterable[ChannelRow]) -> Rows:
    """One row a channel and region.

    Args:
        rows: The rows of an overview.
    """
    titles = ("channel", "region", "points at", "image", "kubernetes", "build", "since", "before", "")
    table = Rows(*titles, first=3, folds=True)
    for row in rows:
        table.add(
            row.pointer.channel,
            row.region,
            row.image_id or "-",
            row.pointer.image,
            row.pointer.kubernetes,
            row.build or "-",
            # minutes are enough for people; --json has seconds
            row.since[:16],
            row.previous or "-",
            Text("; ".join(row.problems), style="red"),
        )
    return table


def prune_table(regions: Iterable[PruneResult]) -> Rows:
    """One row an image, and one for every orphaned snapshot."""
    table = Rows("", "region", "image", "created", "reason", "name", first=4)
    for region in regions:
        for item in region.items:
            table.add(
                _coloured(item.action),
                region.region,
                item.image_id,
                item.created[:10],
                item.reason,
                item.name,
            )
        for snapshot_id, action in region.orphaned_snapshots.items():
            reason = "orphan of an earlier prune: its image is gone"
            table.add(_coloured(action), region.region, snapshot_id, "", reason, "")
    return table
