"""Container images: plan, build, verify, list, show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.cli.command import JsonOptions, say, words
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.docker.plan import ContainerPlan

CHANGES_PENDING = 10  # exit code of `plan --exit-code` when there is something to build
BUILD = option("image name (its newest build) or build id", first=True, required=True)


@dataclass(frozen=True)
class ContainerOptions(JsonOptions):
    """What a container image is made of."""

    image: str = option("a folder of docker/", first=True, required=True)
    base: str = option(
        "a base of its image.yaml; debian-12 needs no NVIDIA repository (default: ubuntu-22.04)"
    )
    platform: str = option("what it is built for: linux/amd64 or linux/arm64", "linux/amd64")
    set: str = option(
        "a mirror for this build, NAME.repository.apt.url=URL, separated by commas; versions are pinned"
    )
    engine: str = option("docker, podman or buildah; default: the first that works")
    refresh: bool = option("fetch package lists again even when they are fresh", False)

    def plan(self) -> ContainerPlan:
        """The plan of the image."""
        from gpukiln.docker.plan import ContainerProbes, make_container_plan
        from gpukiln.state import state_home

        return make_container_plan(
            self.image,
            probes=ContainerProbes.real(state_home() / "apt", refresh=self.refresh),
            base=self.base,
            platform=self.platform,
            overrides=words(self.set),
        )


@dataclass(frozen=True)
class DockerPlan(ContainerOptions):
    """Show what a build would do, or why it can't work; starts nothing."""

    exit_code: bool = option("exit 10 when there is something to build, 0 when not", False)

    def run(self) -> int:
        from gpukiln.docker.build import find_existing_build, why_build
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.engines import find_engine
        from gpukiln.docker.view import plan_table

        engine, plan, builds = find_engine(self.engine), self.plan(), ContainerBuilds()
        build = find_existing_build(plan, builds, engine)
        reference = build.read().reference if build else None
        if reference:
            lines = [f"nothing to build: {reference} has this digest"]
        else:
            reasons = why_build(plan, builds)
            lines = ["`invoke docker.build` would build it:", *(f"  {reason}" for reason in reasons)]
        self.report(plan, [plan_table(plan), *lines], schema="docker.plan/1", built=reference)
        return CHANGES_PENDING if self.exit_code and not build else 0


@dataclass(frozen=True)
class DockerBuild(ContainerOptions):
    """Plan, build and verify a container image, and keep a record of every step."""

    force: bool = option("build even when there is an image of this digest", False)
    dry_run: bool = option("stop after the plan", False)
    no_verify: bool = option("do not verify the image after the build", False)
    cache_from: str = option("where layers may be taken from, as the engine names it; separated by spaces")
    cache_to: str = option("where layers are kept, as the engine names it; separated by spaces")

    def run(self) -> int:
        from gpukiln.docker import view
        from gpukiln.docker.build import build_container, find_existing_build, why_build
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.engines import find_engine
        from gpukiln.docker.verify import verify_container
        from gpukiln.progress import Progress

        progress, builds = Progress(), ContainerBuilds()
        with progress.step("plan"):
            engine, plan = find_engine(self.engine), self.plan()
        # Shown before a build that takes minutes, so that a wrong plan can be interrupted.
        self.show(view.plan_table(plan))
        reused = None if self.force else find_existing_build(plan, builds, engine)
        self.show(*([view.reused_line(reused.read())] if reused else why_build(plan, builds)))
        if self.dry_run:
            say("dry run: nothing was started")
            self.report(plan, schema="docker.build.plan/1", built=False)
            return 0
        if reused:
            build, record = reused, reused.read()
        else:
            build, record = build_container(
                plan,
                engine,
                builds,
                progress,
                overrides=words(self.set),
                # At blanks: a value of BuildKit has commas in it, such as type=registry,ref=HOST/NAME.
                cache_from=self.cache_from.split(),
                cache_to=self.cache_to.split(),
            )
            self.show(*view.built_parts(build, record))
        passed = True
        if not self.no_verify and record.state != "verified":  # an interrupted run may have left that out
            record, verdict = verify_container(build, progress)
            passed = verdict.passed
            self.show(*view.verdict_parts(build, verdict))
        # Also of an image that failed: the exit code alone would not say which check did.
        self.report(record, schema="docker.build/1", built=reused is None)
        return int(not passed)


@dataclass(frozen=True)
class DockerVerify(JsonOptions):
    """Verify a container image that was built here, inside a container of it, and update its record."""

    build: str = BUILD

    def run(self) -> int:
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.verify import verify_container
        from gpukiln.docker.view import verdict_parts
        from gpukiln.progress import Progress

        build = ContainerBuilds().find(self.build)
        _, verdict = verify_container(build, Progress())
        self.show(*verdict_parts(build, verdict))
        self.report(None, schema="docker.verify/1", verdict=verdict)
        return int(not verdict.passed)


@dataclass(frozen=True)
class DockerList(JsonOptions):
    """List the container builds of this machine, newest first."""

    def run(self) -> None:
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.view import builds_table

        builds = ContainerBuilds()
        records = [build.read() for build in builds.all()]
        parts = [builds_table(builds, records)] if records else []
        self.report(None, parts, schema="docker.list/1", builds=records)
        if not records and not self.json:
            say("no container image was built here yet: `invoke docker.build runner-gpu` builds the first")


@dataclass(frozen=True)
class DockerShow(JsonOptions):
    """Show the record of a container build: plan, layers, verdict, durations."""

    build: str = BUILD

    def run(self) -> None:
        from gpukiln.docker.builds import ContainerBuilds
        from gpukiln.docker.view import record_parts

        build = ContainerBuilds().find(self.build)
        record = build.read()
        self.report(record, record_parts(build, record), schema="docker.show/1")
