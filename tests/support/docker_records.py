"""Plans and records of container images, made without a network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpukiln.docker.builds import ContainerBuild, ContainerRecord
from gpukiln.docker.engine import ImageInfo, Layer
from gpukiln.docker.plan import ContainerPlan, ContainerProbes, make_container_plan
from gpukiln.verify.verdict import CheckResult, Verdict

PROBES = ContainerProbes(lambda _: None, lambda names: dict.fromkeys(names, "1.2-3"))
CUT_OFF = ContainerProbes(lambda url: f"{url} can't be reached", lambda names: dict.fromkeys(names, "1.2-3"))


def a_plan(base: str = "debian-12", probes: ContainerProbes = PROBES, **options: Any) -> ContainerPlan:
    """The plan of this checkout's runner-gpu."""
    return make_container_plan("runner-gpu", probes=probes, base=base, **options)


def a_verdict(*, passed: bool = True) -> Verdict:
    """One check."""
    outcome = "passed" if passed else "failed"
    check = CheckResult(id="hygiene.x", title="t", layer="hygiene", outcome=outcome)
    return Verdict("c", "runner", "2026-01-01T00:00:00+00:00", 1.0, (check,))


def a_build(folder: Path, reference: str = "localhost/t:one", **changes: Any) -> ContainerBuild:
    """A build that was verified."""
    folder.mkdir(parents=True)
    build = ContainerBuild(folder)
    image = ImageInfo("sha256:0", 3, (Layer("", 1), Layer("COPY", 2)), "runner", ("/usr/bin/tini", "--"))
    values = {"engine": "buildah", "reference": reference, "image": image, "verdict": a_verdict(), **changes}
    build.write(ContainerRecord(folder.name, "verified", a_plan(), **values))
    return build


def as_json(build: ContainerBuild) -> Any:
    """Its record as it lies on the disk."""
    return json.loads(build.record_file.read_text())


def names(parts: Sequence[Any], status: str) -> list[str]:
    """The components with a status."""
    return [part.name for part in parts if part.status == status]
