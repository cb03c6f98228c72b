"""The folder of each build and its record: what was planned, baked and found, and how long each step took."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.images.cost import Cost
from gpukiln.images.modules import ModuleUse
from gpukiln.images.plan import Plan
from gpukiln.records import RecordFolder, RecordFolders
from gpukiln.verify.verdict import Verdict

STATES = ("running", "baked", "verified", "failed", "aborted")


@dataclass(frozen=True)
class StageUse:
    """The stage of an earlier build that a bake went on from.

    Args:
        stage: driver or runtime.
        image_id: Its AMI.
        build_id: The build that kept it.
    """

    stage: str
    image_id: str
    build_id: str


@dataclass(frozen=True)
class Bake:
    """An image that was made.

    Args:
        image_id: The AMI.
        kernel: Release of the kernel that it boots.
        components: Per component the status and the version that was really installed.
        packages: Every package with its version.
        modules: Where the kernel modules came from, one a kernel; empty where a stage brought them.
        stage: What it went on from; None: from the base.
    """

    image_id: str
    name: str
    region: str
    kernel: str
    components: dict[str, Any]
    packages: dict[str, str]
    modules: tuple[ModuleUse, ...] = ()
    stage: StageUse | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            **vars(self),
            "modules": [vars(use) for use in self.modules],
            "stage": vars(self.stage) if self.stage else None,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Bake":
        """Read what `to_dict` wrote, or a version of gpukiln without `modules` or `stage`.

        Args:
            value: Plain data.
        """
        modules = tuple(ModuleUse(**use) for use in value.get("modules", ()))
        stage = StageUse(**value["stage"]) if value.get("stage") else None
        return cls(**{**value, "modules": modules, "stage": stage})


@dataclass(frozen=True)
class Record:
    """Everything that is known of one build.

    Args:
        build_id: Its name, which starts with the time.
        state: running, baked, verified, failed or aborted.
        plan: What was to be built.
        bake: What was made, or None.
        verdicts: Every verdict on it, the newest last; the report of the first is in verify/1.
        durations_s: Seconds of each step.
        error: Why it failed, or an empty string.
        cost: What it cost so far; None where it costs nothing.
        schema: Version of this document's form.
    """

    build_id: str
    state: str
    plan: Plan
    bake: Bake | None = None
    verdicts: tuple[Verdict, ...] = ()
    durations_s: dict[str, float] = field(default_factory=dict)
    error: str = ""
    cost: Cost | None = None
    schema: int = 1

    @property
    def judged(self) -> dict[str, Verdict]:
        """The newest verdict of each instance type, in the order in which they came."""
        newest: dict[str, Verdict] = {}
        for verdict in self.verdicts:
            newest.pop(verdict.instance_type, None)
            newest[verdict.instance_type] = verdict
        return newest

    @property
    def verdict(self) -> Verdict | None:
        """The one to show: the newest of a type on which it fails, else the newest of all."""
        newest = list(self.judged.values())
        return next((one for one in reversed(newest) if not one.passed), newest[-1] if newest else None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": self.schema,
            "build_id": self.build_id,
            "state": self.state,
            "plan": self.plan.to_dict(),
            "bake": self.bake.to_dict() if self.bake else None,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "durations_s": self.durations_s,
            "error": self.error,
            "cost": self.cost.to_dict() if self.cost else None,
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
            bake=Bake.from_dict(value["bake"]) if value["bake"] else None,
            verdicts=tuple(Verdict.from_dict(one) for one in value["verdicts"]),
            durations_s={step: float(seconds) for step, seconds in value["durations_s"].items()},
            error=value["error"],
            cost=Cost.from_dict(value["cost"]) if value.get("cost") else None,
            schema=value["schema"],
        )


@dataclass(frozen=True)
class Build(RecordFolder[Record]):
    """The folder of one build; it holds plan.json, too."""

    def report_folder(self, number: int) -> Path:
        """Where the report of a verdict is.

        Args:
            number: 1 for the first; a record's `len(verdicts)` for the newest.
        """
        return self.folder / "verify" / str(number)

    @staticmethod
    def parse(document: Mapping[str, Any]) -> Record:
        """See `RecordFolder.parse`."""
        return Record.from_dict(dict(document))


class Builds(RecordFolders[Build]):
    """Every build of this machine.

    Args:
        home: The state folder.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(home / "builds", Build)

    def find(self, name: str) -> Build:
        """A build by its id, by its AMI's id, or `last`.

        Args:
            name: What was typed.

        Raises:
            UsageError: There is no such build, or its record is damaged.
        """
        for build in self.folders():
            if name in ("last", build.id):
                build.read()  # where the last one is damaged, the one before is not what was meant
                return build
        builds = self.all()
        if re.fullmatch(r"ami-[0-9a-f]+", name):
            for build in builds:
                if (bake := build.read().bake) and bake.image_id == name:
                    return build
        known = tuple(build.id for build in builds[:5])
        raise UsageError(
            f"there is no build {name!r}" if builds else "nothing was built on this machine yet",
            hint="give a build id, an AMI id or `last`; `invoke ami.list` shows them"
            if builds
            else "`invoke ami.build --region us-west-2` makes the first",
            details=known,
        )

    def last_durations(self, plan: Plan, stage: StageUse | None = None) -> dict[str, float]:
        """Seconds of each step in the last finished build of the same image on the same cloud.

        Args:
            plan: The plan of the build that begins.
            stage: What it goes on from; a build that went on from the same stage says more than a later one.
        """
        found: dict[str, float] = {}
        for build in self.all():
            record = build.read()
            same = (record.plan.image, record.plan.cloud) == (plan.image, plan.cloud)
            if not same or record.bake is None or record.state not in ("verified", "baked"):
                continue
            found = found or record.durations_s
            if (record.bake.stage and record.bake.stage.stage) == (stage and stage.stage):
                return record.durations_s
        return found
