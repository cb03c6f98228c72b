"""The folder of each build of a container image, and its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpukiln.docker.engine import ImageInfo
from gpukiln.docker.plan import ContainerPlan
from gpukiln.docker.push import PushedImage
from gpukiln.errors import UsageError
from gpukiln.records import SCHEMA, RecordFolder, RecordFolders
from gpukiln.state import state_home
from gpukiln.verify.verdict import Verdict


@dataclass(frozen=True)
class ContainerRecord:
    """Everything that is known of one build of a container image.

    Args:
        schema: Version of this document's form.
        build_id: Its name, which starts with the time.
        state: running, built, verified, failed or aborted.
        plan: The plan of the image.
        engine: The engine that builds it: docker, podman or buildah; empty before.
        reference: The engine's name of the image; empty before it was built.
        image: What the engine built; None before.
        verdict: The verdict of its verification, or None.
        pushed: The images in registries, one a repository.
        durations_s: Seconds of each step.
        error: Why it failed, or an empty string.
    """

    schema: int = field(default=SCHEMA, kw_only=True)
    build_id: str
    state: str
    plan: ContainerPlan
    engine: str = ""
    reference: str = ""
    image: ImageInfo | None = None
    verdict: Verdict | None = None
    pushed: tuple[PushedImage, ...] = ()
    durations_s: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ContainerBuild(RecordFolder[ContainerRecord]):
    """The folder of one build."""

    @staticmethod
    def kind() -> type[ContainerRecord]:
        """See `RecordFolder.kind`."""
        return ContainerRecord


class ContainerBuilds(RecordFolders[ContainerBuild]):
    """Every build of a container image on this machine.

    Args:
        home: The state folder; None: that of this user.
    """

    def __init__(self, home: Path | None = None) -> None:
        # Apart from machine images: both have records, of other forms.
        self.home = (home or state_home()) / "docker"
        super().__init__(self.home / "builds", ContainerBuild)

    def of(self, image: str) -> list[ContainerBuild]:
        """The builds of one image, newest first.

        Args:
            image: Its name.
        """
        return [build for build in self.all() if build.read().plan.image == image]

    def find(self, name: str) -> ContainerBuild:
        """A build by its id, or the newest one of an image by the image's name.

        Args:
            name: What was typed.

        Raises:
            UsageError: There is no such build, or its record is damaged.
        """
        for build in self.folders():
            try:
                record = build.read()
            except UsageError:
                if name and name in build.id:  # an error, for an older build is another image
                    raise
                continue
            if name == build.id or (name == record.plan.image and record.image):
                return build
        builds = self.all()
        raise UsageError(
            f"there is no build {name!r}" if builds else "no container image was built on this machine yet",
            hint="`invoke docker.build runner-gpu` builds one; `invoke docker.list` shows them",
            details=tuple(build.id for build in builds[:5]),
        )
