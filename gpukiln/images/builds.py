"""The folder of each build and its record: what was planned, baked and found, and how long each step took."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.images.cost import Cost
from gpukiln.images.modules import ModuleUse
from gpukiln.images.plan import ImagePlan
from gpukiln.records import SCHEMA, RecordFolder, RecordFolders
from gpukiln.state import state_home
from gpukiln.verify.verdict import Verdict

# baked: the image exists and is not verified; aborted: the process was killed
STATES = ("running", "baked", "verified", "failed", "aborted")


@dataclass(frozen=True)
class StageUse:
    """The stage of an earlier build that a bake started from.

    Args:
        stage: driver or runtime.
        image_id: The stage's AMI.
        build_id: The build that kept it.
    """

    stage: str
    image_id: str
    build_id: str


@dataclass(frozen=True)
class Bake:
    """A baked image.

    Args:
        image_id: The AMI.
        kernel: Release of the kernel that it boots.
        components: By component the status and the version that was installed.
        packages: Versions by package name.
        modules: Origin of the kernel modules, one a kernel; empty where a stage had them.
        stage: The stage that it started from; None: from the base.
    """

    image_id: str
    name: str
    region: str
    kernel: str
    components: dict[str, Any]
    packages: dict[str, str]
    modules: tuple[ModuleUse, ...] = ()
    stage: StageUse | None = None


@dataclass(frozen=True)
class Record:
    """Everything that is known of one build.

    Args:
        schema: Version of this document's form.
        build_id: Its name, which starts with the time.
        state: running, baked, verified, failed or aborted.
        bake: The image, or None.
        verdicts: Every verdict on it, the newest last; the report of the first is in verify/1.
        cluster_verdicts: Every verdict on it as a node of a cluster, the newest last; the report of the first
            is in cluster/1.
        durations_s: Seconds of each step.
        error: Why it failed, or an empty string.
        cost: Its cost so far; None where it costs nothing.
    """

    # First in the document, though it has a default: readers look at it before the rest.
    schema: int = field(default=SCHEMA, kw_only=True)
    build_id: str
    state: str
    plan: ImagePlan
    bake: Bake | None = None
    verdicts: tuple[Verdict, ...] = ()
    durations_s: dict[str, float] = field(default_factory=dict)
    error: str = ""
    cost: Cost | None = None
    cluster_verdicts: tuple[Verdict, ...] = ()

    @property
    def newest_verdicts(self) -> dict[str, Verdict]:
        """The newest verdict of each instance type, the oldest first.

        Verdicts on simulated GPUs do not count, and replace no other.
        """
        newest: dict[str, Verdict] = {}
        for verdict in (verdict for verdict in self.verdicts if not verdict.simulated):
            newest.pop(verdict.instance_type, None)  # a dictionary keeps the place of the first entry
            newest[verdict.instance_type] = verdict
        return newest

    @property
    def simulated(self) -> tuple[str, ...]:
        """The instance types on whose simulated GPUs it was verified."""
        return tuple(dict.fromkeys(verdict.instance_type for verdict in self.verdicts if verdict.simulated))

    @property
    def verdict(self) -> Verdict | None:
        """The verdict to show: the newest of a type on which it fails, else the newest of all.

        One on simulated GPUs only where there is no other.
        """
        # A failure is shown before a later success on another type: the image is not fit for both.
        newest = list(self.newest_verdicts.values()) or list(self.verdicts[-1:])
        return next(
            (verdict for verdict in reversed(newest) if not verdict.passed), newest[-1] if newest else None
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

    def cluster_report_folder(self, number: int) -> Path:
        """Where the report of a verdict on the image as a node is.

        Args:
            number: 1 for the first.
        """
        return self.folder / "cluster" / str(number)

    @staticmethod
    def kind() -> type[Record]:
        """See `RecordFolder.kind`."""
        return Record


class Builds(RecordFolders[Build]):
    """Every build of this machine.

    Args:
        home: The state folder; None: that of this user.
    """

    def __init__(self, home: Path | None = None) -> None:
        super().__init__((home or state_home()) / "builds", Build)

    def find(self, name: str) -> Build:
        """A build by its id, by its AMI's id, or `last`.

        Args:
            name: What was typed.

        Raises:
            UsageError: There is no such build, or its record is damaged.
        """
        for build in self.folders():
            # `folders` is sorted by id, which begins with the time: the first one is the last build.
            if name in ("last", build.id):
                build.read()  # a damaged `last` is an error: the build before it is another image
                return build
        # Only now are all records read, which takes a while with many builds.
        if re.fullmatch(r"ami-[0-9a-f]+", name) and (of_image := self.of_image(name)):
            return of_image
        builds = self.all()
        known = tuple(build.id for build in builds[:5])
        raise UsageError(
            f"there is no build {name!r}" if builds else "nothing was built on this machine yet",
            hint="name a build id, an AMI id or `last`; `invoke ami.list` shows them"
            if builds
            else "`invoke ami.build --region us-west-2` makes the first",
            details=known,
        )

    def of_image(self, image_id: str) -> Build | None:
        """The build that made an AMI; None: none of this machine did."""
        for build in self.all():
            if (bake := build.read().bake) and bake.image_id == image_id:
                return build
        return None

    def last_durations(self, plan: ImagePlan, stage: StageUse | None = None) -> dict[str, float]:
        """Seconds of each step in the last finished build of the same image on the same cloud.

        Args:
            plan: The plan of the build that begins.
            stage: The stage that it starts from. A build from the same stage is preferred to a later one, for
                it skipped the same roles.
        """
        durations_s: dict[str, float] = {}
        for build in self.all():
            record = build.read()
            # Another cloud has other machines, whose times say nothing.
            same = (record.plan.image, record.plan.cloud) == (plan.image, plan.cloud)
            if not same or record.bake is None or record.state not in ("verified", "baked"):
                continue
            durations_s = durations_s or record.durations_s
            if (record.bake.stage and record.bake.stage.stage) == (stage and stage.stage):
                return record.durations_s
        return durations_s
