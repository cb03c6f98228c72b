"""Container images: push one to a registry."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.commands.cli import PlaceOptions, print_document
from gpukiln.options import option
from gpukiln.typed import dump


@dataclass(frozen=True)
class DockerPush(PlaceOptions):
    """Push a built image under tags that never move, and write its digest into the record of the build."""

    repository: str = option("name of a repository of ECR, or host:port/name of any registry")
    image: str = option("the container image", "runner-gpu")
    build: str = option("its build id; default: its newest build")
    region: str = option("AWS region of the repository, when its URI names none", also="regions")
    create: bool = option(
        "create a missing ECR repository: immutable tags, scan on push, untagged images expire", False
    )
    unverified: bool = option("push although no verification has passed", False)
    dry_run: bool = option("only say what would be created and pushed", False)

    def run(self) -> None:
        from contextlib import nullcontext
        from dataclasses import replace

        from gpukiln.docker import push as pushing
        from gpukiln.docker import repository as repositories
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.errors import RefusedError, UsageError
        from gpukiln.progress import Progress
        from gpukiln.state import state_home

        progress = Progress()
        address = repositories.parse(self.repository)
        if self.region and address.region not in ("", self.region):
            raise UsageError(
                f"--repository is in {address.region}, not in {self.region}", hint="leave out --region"
            )
        where = replace(self, region=address.region or self.region).where() if address.is_ecr else None
        folder = ContainerBuilds(state_home()).find(self.build or self.image)
        with nullcontext() if self.dry_run else folder.locked():
            record = folder.read()
            if not self.unverified and not (record.verdict and record.verdict.passed_without_simulation):
                simulated = record.verdict is not None and record.verdict.simulated
                state = f"is {record.state}, wanted a passed verification"
                if simulated:
                    state = "was judged on simulated GPUs, which proves nothing"
                raise RefusedError(
                    f"build {record.build_id} {state}",
                    hint=f"`invoke docker.verify {record.build_id}` judges it; --unverified pushes it anyway",
                )
            plan = record.plan
            built = pushing.Built(record.reference, record.engine, plan.version, plan.digest)
            with progress.step("push"):
                target = repositories.find(
                    address, where, create=self.create, dry_run=self.dry_run, say=progress.say
                )
                log = folder.folder / "push.log"
                pushed = pushing.push(built, target, log=log, say=progress.say, dry_run=self.dry_run)
            if pushed is not None and not self.dry_run:
                others = tuple(one for one in record.pushed if one.repository != pushed.repository)
                folder.write(replace(record, pushed=(*others, pushed)))
        if pushed is None:
            if self.json:
                print_document("docker.push.plan/1", repository=target.name, manifest_digest=None)
            else:
                print(f"would push {built.reference} to {target.name}")
            return
        if self.json:
            print_document("docker.push/1", dump(pushed), reference=pushed.reference)
        else:
            print(pushed.reference)
