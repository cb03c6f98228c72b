"""Verifies a container image: runs the host suite inside a container of it."""

from __future__ import annotations

from dataclasses import replace

from gpukiln.docker.builds import ContainerBuild, ContainerRecord
from gpukiln.docker.engine import VERIFY_PREFIX, has_gpu
from gpukiln.docker.engines import find_engine
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.progress import Progress
from gpukiln.verify.report import LiveReport
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import Verdict

PROFILE = "runner"


def verify_container(build: ContainerBuild, progress: Progress) -> tuple[ContainerRecord, Verdict]:
    """Verify the image of a build, and write the verdict into its record.

    Raises:
        UsageError: The build has no image.
        UnavailableError: Its engine no longer works, or no longer has the image.
        BusyError: Another process verifies or pushes it.
    """
    with build.locked():
        return _verify(build, progress)


def _verify(build: ContainerBuild, progress: Progress) -> tuple[ContainerRecord, Verdict]:
    record = build.read()
    if record.image is None:
        raise UsageError(f"build {build.id} has no image: it is {record.state}")
    engine = find_engine(record.engine)
    if engine.inspect(record.reference) is None:
        raise UnavailableError(
            f"{engine.name} no longer has the image {record.reference}",
            hint=f"`invoke docker.build {record.plan.image}` builds it; each user of buildah and podman has"
            " images of its own",
        )
    live, before = LiveReport(progress), dict(progress.durations)
    gpus = has_gpu() and engine.name != "buildah"
    name = f"{VERIFY_PREFIX}{build.id}"
    with progress.step("verify"), engine.container(record.reference, name=name, gpus=gpus) as hostspec:
        verdict = run_suite(
            Target(record.reference, hostspec),
            profile=PROFILE,
            out_dir=build.folder / "verify",
            on_start=live.start,
            on_check=live.check,
        )
        if not verdict.passed:
            progress.fail()
    # A record keeps the durations of the build; only this run's steps are added.
    took = {name: seconds for name, seconds in progress.durations.items() if name not in before}
    record = replace(
        record,
        state="verified" if verdict.passed else "failed",
        verdict=verdict,
        durations_s={**record.durations_s, **took},
    )
    build.write(record)
    return record, verdict
