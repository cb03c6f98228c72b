"""Push the image of a build, and write its digest into the build's record."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from gpukiln.clouds.base import Cloud
from gpukiln.docker.builds import ContainerBuild, ContainerRecord
from gpukiln.docker.push import Built, PushedImage, push
from gpukiln.docker.repository import Address, find
from gpukiln.errors import RefusedError
from gpukiln.progress import Progress


def push_build(
    build: ContainerBuild,
    address: Address,
    cloud: Cloud | None,
    progress: Progress,
    *,
    unverified: bool,
    create: bool,
    dry_run: bool,
) -> tuple[Built, str, PushedImage | None]:
    """Push the image of a build; the build is locked, so that its record has every push.

    Args:
        cloud: Where the registry is; None: it is not ECR.
        unverified: Whether an image is pushed that no verification passed.
        create: Whether a missing repository of ECR is created.

    Returns:
        The image, the name of the repository, and the image there; None in a dry run that would push.

    Raises:
        RefusedError: No verification passed.
        GpukilnError: It can't be pushed, see `push`.
    """
    # A dry run writes nothing, and must not wait for a build.
    with nullcontext() if dry_run else build.locked():
        record = build.read()
        if not unverified:
            _require_verified(record)
        built = Built(record.reference, record.engine, record.plan.version, record.plan.digest)
        with progress.step("push"):
            target = find(address, cloud, create=create, dry_run=dry_run, say=progress.say)
            log = build.folder / "push.log"
            pushed = push(built, target, log=log, say=progress.say, dry_run=dry_run)
        if pushed is not None and not dry_run:
            # One entry a repository: its tags never move, so that the last push has the digest that counts.
            others = tuple(push for push in record.pushed if push.repository != pushed.repository)
            build.write(replace(record, pushed=(*others, pushed)))
    return built, target.name, pushed


def _require_verified(record: ContainerRecord) -> None:
    if record.verdict and record.verdict.passed_without_simulation:
        return
    state = f"is {record.state}, wanted a passed verification"
    # It has passed all the same, so the reason must name the simulation and not the state.
    if record.verdict and record.verdict.simulated:
        state = "was verified on simulated GPUs, which does not count"
    raise RefusedError(
        f"build {record.build_id} {state}",
        hint=f"`invoke docker.verify {record.build_id}` verifies it; --unverified pushes it anyway",
    )
