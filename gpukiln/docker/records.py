"""The folder of each build of a container image, and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.docker.engine import ImageInfo, Layer
from gpukiln.docker.plan import ContainerPlan
from gpukiln.docker.push import Pushed
from gpukiln.errors import UsageError
from gpukiln.records import RecordFolder, RecordFolders
from gpukiln.verify.verdict import Verdict


@dataclass(frozen=True)
class ContainerRecord:
    """Everything that is known of one build of a container image.

    Args:
        build_id: Its name, which starts with the time.
        state: running, built, verified, failed or aborted.
        plan: What was to be built.
        engine: What built it: docker, podman or buildah; empty before.
        reference: What the engine calls it; empty before it was built.
        image: What was made, or None.
        verdict: What the verification found, or None.
        pushed: Where it was pushed to, one a repository.
        durations_s: Seconds of each step.
        error: Why it failed, or an empty string.
        schema: Version of this document's form.
    """

    build_id: str
    state: str
    plan: ContainerPlan
    engine: str = ""
    reference: str = ""
    image: ImageInfo | None = None
    verdict: Verdict | None = None
    pushed: tuple[Pushed, ...] = ()
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
            "engine": self.engine,
            "reference": self.reference,
            "image": asdict(self.image) if self.image else None,
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "pushed": [asdict(one) for one in self.pushed],
            "durations_s": self.durations_s,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ContainerRecord:
        """Read what `to_dict` wrote."""
        image = value["image"]
        return cls(
            build_id=value["build_id"],
            state=value["state"],
            plan=ContainerPlan.from_dict(value["plan"]),
            engine=value["engine"],
            reference=value["reference"],
            image=ImageInfo(
                **{
                    **image,
                    "layers": tuple(Layer(**layer) for layer in image["layers"]),
                    "entrypoint": tuple(image["entrypoint"]),
                }
            )
            if image
            else None,
            verdict=Verdict.from_dict(value["verdict"]) if value["verdict"] else None,
            pushed=tuple(Pushed(**{**one, "tags": tuple(one["tags"])}) for one in value["pushed"]),
            durations_s={step: float(seconds) for step, seconds in value["durations_s"].items()},
            error=value["error"],
            schema=value["schema"],
        )


@dataclass(frozen=True)
class ContainerBuild(RecordFolder[ContainerRecord]):
    """The folder of one build."""

    @staticmethod
    def parse(document: Mapping[str, Any]) -> ContainerRecord:
        """See `RecordFolder.parse`."""
        return ContainerRecord.from_dict(document)


class ContainerBuilds(RecordFolders[ContainerBuild]):
    """Every build of a container image on this machine.

    Args:
        home: The state folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home / "docker"
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
                if name and name in build.id:  # the one before it is not what was meant
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
