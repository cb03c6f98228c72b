"""Records of releases and rollbacks in the state folder; other machines read the pointers' history."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from gpukiln.errors import BusyError, GpukilnError, PartialError, UnavailableError
from gpukiln.files import remove_partial, write_atomic
from gpukiln.images.pointer import Pointer
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump

log = logging.getLogger(__name__)
SCHEMA = 1


@dataclass(frozen=True)
class RegionResult:
    """The state of one region.

    Args:
        region: Its name.
        state: waiting, ready (image available, shared, protected), published, done, failed, or planned in a
            dry run.
        published: Whether the channel points at the image.
        image_id: The image there, or an empty string.
        replaces: The image that the channel pointed at before, or an empty string.
        error: Why it failed, or an empty string.
        hint: The next step after that failure.
    """

    region: str
    state: str = "waiting"
    published: bool = False
    image_id: str = ""
    replaces: str = ""
    error: str = ""
    hint: str = ""

    def failed(self, error: GpukilnError) -> RegionResult:
        """The same region after a failure."""
        return replace(self, state="failed", error=error.message, hint=error.hint)


@dataclass(frozen=True)
class Release:
    """One release or rollback.

    Args:
        action: release or rollback.
        pointer: The channel.
        build: The build it points at now.
        cloud: aws or embedded.
        state: running, done, partial, failed, interrupted, or planned.
        excused: Ids of the checks that the channel requires and that were excused, with the reason.
        not_run: How many checks of each layer were not run, `none`, or an empty string for a rollback.
        trust: Why the image is trusted, in words.
        started_at: UTC, ISO 8601.
        durations_s: Seconds of each step.
    """

    action: str
    pointer: Pointer
    build: str
    cloud: str
    regions: tuple[RegionResult, ...]
    state: str = "running"
    excused: dict[str, str] = field(default_factory=dict)
    not_run: str = ""
    trust: str = ""
    started_at: str = ""
    durations_s: dict[str, float] = field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _document(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"schema": SCHEMA, "parameter": self.pointer.path, **plain(self)}

    @property
    def failures(self) -> tuple[RegionResult, ...]:
        """The regions that failed."""
        return tuple(result for result in self.regions if result.state == "failed")

    def with_results(self, results: dict[str, RegionResult]) -> Release:
        """The same with other results of its regions."""
        return replace(self, regions=tuple(results[result.region] for result in self.regions))


@dataclass(frozen=True)
class UnfinishedRollback:
    """A rollback that was killed, or failed somewhere.

    Args:
        build: The build that it returns to.
        images: The images of that build, by region.
        replaces: The image that each region's channel pointed at before.
    """

    build: str
    images: dict[str, str]
    replaces: dict[str, str]


class ReleaseLog:
    """The releases and rollbacks of this machine.

    Args:
        home: The state folder; None: that of this user.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.folder = (home or state_home()) / "releases"

    def write(self, release: Release) -> Path:
        """Write the record of a release; a second run of the same release replaces it.

        Returns:
            Its file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # One file for channel, build and action: a second run replaces the record of the first.
        name = f"{release.pointer.kubernetes}-{release.pointer.channel}-{release.build}-{release.action}.json"
        file = self.folder / name
        # Written after each step: a kill leaves the state of the last finished step.
        write_atomic(file, json.dumps(dump(release), indent=2) + "\n")
        return file

    def unfinished_rollbacks(self, pointer: Pointer, cloud: str) -> list[UnfinishedRollback]:
        """Rollbacks of a channel that this machine started and did not finish, the newest first."""
        rollbacks: list[tuple[str, UnfinishedRollback]] = []
        # The state decides, not the time: a rollback of months ago may still be unfinished.
        for file in self.folder.glob(f"{pointer.kubernetes}-{pointer.channel}-*-rollback.json"):
            # A damaged record is skipped: the rollback then goes one release back, as if it were a new one.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                document = parse_json(file.read_text())
                same = (document["parameter"], document["cloud"]) == (pointer.path, cloud)
                if same and document["state"] != "done":
                    regions = {row["region"]: row for row in document["regions"]}
                    images, replaces = (
                        {region: str(row[key]) for region, row in regions.items()}
                        for key in ("image_id", "replaces")
                    )
                    began = str(document["started_at"])
                    rollbacks.append((began, UnfinishedRollback(str(document["build"]), images, replaces)))
        return [rollback for _, rollback in sorted(rollbacks, key=lambda pair: pair[0], reverse=True)]

    def regions(self, cloud: str) -> list[str]:
        """Every region that this machine has released to on a cloud.

        Args:
            cloud: aws or embedded.
        """
        names: dict[str, None] = {}
        for file in sorted(self.folder.glob("*.json")):
            try:
                document = parse_json(file.read_text())
                if document["cloud"] == cloud:
                    names.update(dict.fromkeys(result["region"] for result in document["regions"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("warning: %s can't be read, so its regions are skipped: %s", file, error)
        return list(names)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One release, rollback or prune of this machine at a time.

        Raises:
            BusyError: Another one runs.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = BusyError("another release, rollback or prune runs on this machine", hint="wait for its end")
        with locked(self.folder / "lock", busy=busy):
            # Under the lock: another process could be writing its record.
            remove_partial(self.folder)
            yield


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_complete(release: Release) -> None:
    """Raise an error for the regions that failed.

    Args:
        release: What was done.

    Raises:
        PartialError: Some regions failed.
        UnavailableError: All did.
    """
    if not release.failures:
        return
    published = [result.region for result in release.regions if result.published]
    # Nothing changed for users where no region was published: that is a failure, not a partial success.
    kind = (
        UnavailableError if not published and len(release.failures) == len(release.regions) else PartialError
    )
    total = len(release.regions)
    outcome = (
        f"the channel points at {release.build} in {', '.join(published)}"
        if published
        else ("the channel was not moved in any region")
    )
    # Regions often fail for the same reason: its hint is shown once.
    hints = dict.fromkeys(result.hint for result in release.failures if result.hint)
    raise kind(
        f"{len(release.failures)} of {total} regions failed; {outcome}",
        details=tuple(f"{result.region}: {result.error}" for result in release.failures),
        hint="; ".join(hints) or "run the same command again: it does what is missing and nothing twice",
    )
