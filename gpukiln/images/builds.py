"""The folder of each build and its record: what was planned, baked and found, and how long each step took."""

import contextlib
import fcntl
import json
import logging
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.errors import BusyError, UsageError
from gpukiln.images.plan import Plan
from gpukiln.verify.verdict import Verdict

log = logging.getLogger(__name__)
BUILD_TAG = "gpukiln:build"
STATES = ("running", "baked", "verified", "failed", "aborted")


@dataclass(frozen=True)
class Bake:
    """An image that was made.

    Args:
        image_id: The AMI.
        name: Its name.
        region: Its region.
        kernel: Release of the kernel that it boots.
        components: Per component the status and the version that was really installed.
        packages: Every package with its version.
    """

    image_id: str
    name: str
    region: str
    kernel: str
    components: dict[str, Any]
    packages: dict[str, str]


@dataclass(frozen=True)
class Record:
    """Everything that is known of one build.

    Args:
        build_id: Its name, which starts with the time.
        state: running, baked, verified, failed or aborted.
        plan: What was to be built.
        bake: What was made, or None.
        verdict: What the verification found, or None.
        durations_s: Seconds of each step.
        error: Why it failed, or an empty string.
        schema: Version of this document's form.
    """

    build_id: str
    state: str
    plan: Plan
    bake: Bake | None = None
    verdict: Verdict | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    error: str = ""
    schema: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": self.schema,
            "build_id": self.build_id,
            "state": self.state,
            "plan": self.plan.to_dict(),
            "bake": vars(self.bake) if self.bake else None,
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "durations_s": self.durations_s,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Record":
        """Read what `to_dict` wrote.

        Args:
            value: Plain data.
        """
        return cls(
            build_id=value["build_id"],
            state=value["state"],
            plan=Plan.from_dict(value["plan"]),
            bake=Bake(**value["bake"]) if value["bake"] else None,
            verdict=Verdict.from_dict(value["verdict"]) if value["verdict"] else None,
            durations_s=value["durations_s"],
            error=value["error"],
            schema=value["schema"],
        )


@dataclass(frozen=True)
class Build:
    """The folder of one build.

    Args:
        folder: Holds record.json, plan.json, the logs, and the report of the verification in verify/.
    """

    folder: Path

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def record_file(self) -> Path:
        """The record."""
        return self.folder / "record.json"

    def write(self, record: Record) -> None:
        """Write the record in one step.

        Args:
            record: The record.
        """
        partial = self.record_file.with_suffix(".partial")
        partial.write_text(json.dumps(record.to_dict(), indent=2) + "\n")
        partial.replace(self.record_file)

    def read(self) -> Record:
        """Read the record.

        Raises:
            UsageError: It is damaged, or of another version of gpukiln.
        """
        try:
            return Record.from_dict(json.loads(self.record_file.read_text()))
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise UsageError(
                f"{self.record_file} can't be read: {error}", hint="remove its folder when it is not needed"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the build; the lock goes with the process, however it ends.

        Raises:
            BusyError: Another process works on it.
        """
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"build {self.id} is being worked on by another process",
                    hint="wait for it; `fuser` on its lock file names the process",
                ) from None
            yield


class Builds:
    """Every build of this machine.

    Args:
        home: The state folder.
    """

    def __init__(self, home: Path) -> None:
        self.folder = home / "builds"

    def create(self, image: str) -> Build:
        """Make the folder of a new build.

        Args:
            image: Name of the image.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        folder = self.folder / f"{stamp}-{image}-{secrets.token_hex(2)}"
        folder.mkdir(parents=True)
        self.folder.chmod(0o700)  # logs, and for a while a private key
        return Build(folder)

    def all(self) -> list[Build]:
        """Every build with a readable record, newest first; of the others a warning names the file."""
        readable = []
        for folder in sorted(self.folder.glob("*"), reverse=True) if self.folder.exists() else ():
            build = Build(folder)
            if not build.record_file.exists():
                continue
            try:
                build.read()
            except UsageError as error:
                log.warning("warning: %s", error.message)
            else:
                readable.append(build)
        return readable

    def find(self, name: str) -> Build:
        """A build by its id, by its AMI's id, or `last`.

        Args:
            name: What was typed.

        Raises:
            UsageError: There is no such build.
        """
        builds = self.all()
        for build in builds:
            if name in ("last", build.id):
                return build
            if re.fullmatch(r"ami-[0-9a-f]+", name) and (bake := build.read().bake) and bake.image_id == name:
                return build
        known = tuple(build.id for build in builds[:5])
        raise UsageError(
            f"there is no build {name!r}" if builds else "nothing was built on this machine yet",
            hint="give a build id, an AMI id or `last`; `invoke ami.list` shows them",
            details=known,
        )

    def last_durations(self, plan: Plan) -> dict[str, float]:
        """Seconds of each step in the last finished build of the same image on the same cloud.

        Args:
            plan: The plan of the build that begins.
        """
        for build in self.all():
            record = build.read()
            same = (record.plan.image, record.plan.cloud) == (plan.image, plan.cloud)
            if same and record.state in ("verified", "baked"):
                return record.durations_s
        return {}
