"""Container images: push one to a registry."""

from __future__ import annotations

from typing import Any

from gpukiln.commands.cli import command, print_document
from gpukiln.typed import dump


@command(
    help={
        "repository": "name of a repository of ECR, or host:port/name of any registry",
        "image": "the container image",
        "build": "its build id; default: its newest build",
        "region": "AWS region of the repository, when its URI names none",
        "cloud": "where ECR is: embedded (this machine, the default) or aws (your account)",
        "profile": "AWS profile (aws only)",
        "create": "create a missing ECR repository: immutable tags, scan on push, untagged images expire",
        "unverified": "push although no verification has passed",
        "dry_run": "only say what would be created and pushed",
        "json": "print one JSON document to standard output",
    }
)
def push(
    _: Any,
    repository: str = "",
    image: str = "runner-gpu",
    build: str = "",
    region: str = "",
    cloud: str = "embedded",
    profile: str = "",
    create: bool = False,
    unverified: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Push a built image under tags that never move, and write its digest into the record of the build."""
    from contextlib import nullcontext
    from dataclasses import replace

    from gpukiln.clouds.select import make_cloud
    from gpukiln.docker import push as pushing
    from gpukiln.docker import repository as repositories
    from gpukiln.docker.builds import ContainerBuilds
    from gpukiln.errors import RefusedError, UsageError
    from gpukiln.progress import Progress
    from gpukiln.state import state_home

    progress = Progress()
    address = repositories.parse(repository)
    if region and address.region not in ("", region):
        raise UsageError(f"--repository is in {address.region}, not in {region}", hint="leave out --region")
    where = make_cloud(cloud, address.region or region, profile=profile or None) if address.is_ecr else None
    folder = ContainerBuilds(state_home()).find(build or image)
    with nullcontext() if dry_run else folder.locked():
        record = folder.read()
        if not unverified and not (record.verdict and record.verdict.proves):
            simulated = record.verdict is not None and record.verdict.simulated
            raise RefusedError(
                f"build {record.build_id} was judged on simulated GPUs, which proves nothing"
                if simulated
                else f"build {record.build_id} is {record.state}, wanted a passed verification",
                hint=f"`invoke docker.verify {record.build_id}` judges it; --unverified pushes it as it is",
            )
        plan = record.plan
        built = pushing.Built(record.reference, record.engine, plan.version, plan.digest)
        with progress.step("push"):
            target = repositories.find(address, where, create=create, dry_run=dry_run, say=progress.say)
            log = folder.folder / "push.log"
            pushed = pushing.push(built, target, log=log, say=progress.say, dry_run=dry_run)
        if pushed is not None and not dry_run:
            others = tuple(one for one in record.pushed if one.repository != pushed.repository)
            folder.write(replace(record, pushed=(*others, pushed)))
    if pushed is None:
        if json:
            print_document("docker.push.plan/1", repository=target.name, manifest_digest=None)
        else:
            print(f"would push {built.reference} to {target.name}")
        return
    if json:
        print_document("docker.push/1", dump(pushed), reference=pushed.reference)
    else:
        print(pushed.reference)
