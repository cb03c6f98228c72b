"""What this computer knows of workspaces: a view of what the clouds' tags say, and of how long machines ran.

The cloud is the truth: every command that asks it writes here what it saw, and nothing is decided by this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.files import remove_partial_of, write_atomic
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump, load, strict
from gpukiln.workspaces.lifecycle import ExistingWorkspace, find_workspaces

# A record of another version is read as if the region was never asked: the next refresh writes it anew.
RECORD_SCHEMA = "workspaces/1"


@strict
class RunInterval:
    """A time that a machine ran.

    Args:
        usd_hour: The price at launch; empty: not known.
        started: ISO 8601.
        seen: When it was last seen running, or ended, ISO 8601.
        ended: Whether it has ended.
    """

    name: str
    owner: str
    cloud: str
    region: str
    instance_id: str
    instance_type: str
    usd_hour: str
    started: str
    seen: str
    ended: bool


@strict
class RegionRecord:
    """What a region had when it was asked.

    Args:
        at: When, ISO 8601.
        spans: Of its machines, the oldest first.
    """

    form: str
    cloud: str
    region: str
    at: str
    workspaces: tuple[ExistingWorkspace, ...]
    spans: tuple[RunInterval, ...]


def refresh(cloud: Cloud) -> RegionRecord:
    """Ask a region what it has, and write it down.

    Raises:
        UnavailableError: The cloud can't be asked.
    """
    workspaces, now = find_workspaces(cloud), datetime.now(UTC).isoformat(timespec="seconds")
    file = _file(cloud.name, cloud.region)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Two commands at once would lose intervals: each merges what it saw into the file.
    with locked(file.with_suffix(".lock")):
        # What a killed command left half-written; `glob` in `regions` must not find it.
        remove_partial_of(file)
        before = _read(file)
        spans = merge(before.spans if before else (), cloud, workspaces, now)
        region = RegionRecord(RECORD_SCHEMA, cloud.name, cloud.region, now, workspaces, spans)
        write_atomic(file, json.dumps(dump(region), indent=1) + "\n")
    return region


def regions() -> tuple[RegionRecord, ...]:
    """What is known, by cloud and region; what can't be read is as if it was never asked."""
    # The folder keeps its first name: renaming it would lose the hours that `workspace.usage` sums.
    folder = state_home() / "workspaces" / "known"
    return tuple(record for file in sorted(folder.glob("*.json")) if (record := _read(file)))


def regions_with(name: str) -> tuple[RegionRecord, ...]:
    """The regions that had a workspace of a name."""
    return tuple(
        record for record in regions() if any(workspace.name == name for workspace in record.workspaces)
    )


def merge(
    old: Sequence[RunInterval], cloud: Cloud, workspaces: Sequence[ExistingWorkspace], now: str
) -> tuple[RunInterval, ...]:
    """Times that machines ran, with what is seen now.

    A machine that is gone counts until it was last seen running.
    """
    spans = {(span.instance_id, span.started): replace(span, ended=True) for span in old}
    for workspace in workspaces:
        for machine in workspace.machines:
            running = machine.state in ("pending", "running")
            # A stopped and started machine keeps its id, so only the launch time distinguishes its intervals.
            key = (machine.instance_id, machine.launched_at)
            seen = now if running else (machine.ended_at or (spans[key].seen if key in spans else now))
            spans[key] = RunInterval(
                name=workspace.name,
                owner=workspace.owner,
                cloud=cloud.name,
                region=cloud.region,
                instance_id=machine.instance_id,
                instance_type=machine.instance_type,
                usd_hour=machine.usd_hour,
                started=machine.launched_at,
                # EC2's clock and this one differ by seconds: an interval never ends before it begins.
                seen=max(seen, machine.launched_at),
                ended=not running,
            )
    return tuple(sorted(spans.values(), key=lambda span: (span.started, span.instance_id)))


def _file(cloud: str, region: str) -> Path:
    return state_home() / "workspaces" / "known" / f"{cloud}-{region}.json"


def _read(file: Path) -> RegionRecord | None:
    try:
        record = load(RegionRecord, parse_json(file.read_bytes()), where=str(file))
    except (OSError, ValueError, UsageError):
        return None
    return record if record.form == RECORD_SCHEMA else None
