"""Container images: push one to a registry."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import PlaceOptions
from gpukiln.errors import UsageError
from gpukiln.options import option


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
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.push_build import push_build
        from gpukiln.docker.repository import parse
        from gpukiln.progress import Progress

        address = parse(self.repository)
        if self.region and address.region not in ("", self.region):
            raise UsageError(
                f"--repository is in {address.region}, not in {self.region}", hint="leave out --region"
            )
        # A registry that is not ECR needs no account of AWS; the engine has its login.
        cloud = self.connect_to(self.cloud, address.region or self.region) if address.is_ecr else None
        build = ContainerBuilds().find(self.build or self.image)
        options = self.pick("unverified", "create", "dry_run")
        built, repository, pushed = push_build(build, address, cloud, Progress(), **options)
        if pushed is None:
            line = f"would push {built.reference} to {repository}"
            fields = {"repository": repository, "manifest_digest": None}
            self.report(fields, [line], schema="docker.push.plan/1")
        else:
            reference = pushed.reference
            self.report(pushed, [reference], schema="docker.push/1", reference=reference)
