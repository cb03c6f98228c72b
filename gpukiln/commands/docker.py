"""Container images: plan, build, verify, look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import JsonOptions, print_document, results, say, words
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.docker.builds import ContainerBuilds, ContainerRecord
    from gpukiln.docker.plan import ContainerPlan
    from gpukiln.progress import Progress
    from gpukiln.verify.verdict import Verdict

CHANGES_PENDING = 10  # exit code of `plan --exit-code` when there is something to build


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


@dataclass(frozen=True)
class DockerPlan(ContainerOptions):
    """Show what a build would do, or why it can't work; starts nothing."""

    exit_code: bool = option("exit 10 when there is something to build, 0 when not", False)

    def run(self) -> int:
        from gpukiln.docker.build import find_existing_build, why_build
        from gpukiln.docker.engines import find_engine
        from gpukiln.docker.view import plan_table

        found = find_engine(self.engine)
        planned = _plan(self)
        built = find_existing_build(planned, _builds(), found)
        if self.json:
            print_document("docker.plan/1", dump(planned), built=built.read().reference if built else None)
        else:
            shown = results()
            shown.print(plan_table(planned))
            if built:
                shown.print_text(f"nothing to build: {built.read().reference} has this digest")
            else:
                shown.print_text("`invoke docker.build` would build it:")
                for line in why_build(planned, _builds()):
                    shown.print_text(f"  {line}")
        return CHANGES_PENDING if self.exit_code and not built else 0


@dataclass(frozen=True)
class DockerBuild(ContainerOptions):
    """Plan, build and judge a container image, and keep a record of all of it."""

    force: bool = option("build even when there is an image of this digest", False)
    dry_run: bool = option("stop after the plan", False)
    no_verify: bool = option("do not judge the image after the build", False)
    cache_from: str = option("where layers may be taken from, as the engine names it; separated by spaces")
    cache_to: str = option("where layers are kept, as the engine names it; separated by spaces")

    def run(self) -> int:
        from gpukiln.docker.build import build_container, find_existing_build, why_build
        from gpukiln.docker.engines import find_engine
        from gpukiln.docker.view import layer_table, plan_table
        from gpukiln.progress import Progress
        from gpukiln.units import Duration

        progress = Progress()
        with progress.step("plan"):
            found = find_engine(self.engine)
            planned = _plan(self)
        shown = results(json=self.json)
        shown.print(plan_table(planned))
        there = None if self.force else find_existing_build(planned, _builds(), found)
        if there:
            record = there.read()
            shown.print_text(
                f"nothing to build: {record.reference} has this digest, built {record.plan.created_at},"
                f" {'verified' if record.state == 'verified' else 'not verified'} (--force builds anyway)"
            )
        else:
            for line in why_build(planned, _builds()):
                shown.print_text(line)
        if self.dry_run:
            say("dry run: nothing was started")
            if self.json:
                print_document("docker.build.plan/1", dump(planned), built=False)
            return 0
        if there:
            folder, record = there, there.read()
        else:
            folder, record = build_container(
                planned,
                found,
                _builds(),
                progress,
                overrides=words(self.set),
                cache_from=self.cache_from.split(),
                cache_to=self.cache_to.split(),
            )
            if record.image:
                shown.print(layer_table(record.image))
            took = Duration(sum(record.durations_s.values())).shown
            shown.print_text(f"{record.reference}, also {planned.version}; built in {took}")
            shown.print_text(f"record: {folder.record_file}")
        verdict = None
        if not self.no_verify and record.state != "verified":  # also what an interrupted run has left to do
            record, verdict = _judge(folder.id, progress, json=self.json)
        if self.json:
            print_document("docker.build/1", dump(record), built=there is None)
        return int(verdict is not None and not verdict.passed)


@dataclass(frozen=True)
class DockerVerify(JsonOptions):
    """Judge a container image that was built here, inside a container of it, and update its record."""

    build: str = option("image name (its newest build) or build id", first=True, required=True)

    def run(self) -> int:
        from gpukiln.progress import Progress

        _record, verdict = _judge(self.build, Progress(), json=self.json)
        if self.json:
            print_document("docker.verify/1", verdict=dump(verdict))
        return int(not verdict.passed)


@dataclass(frozen=True)
class DockerList(JsonOptions):
    """List the container builds of this machine, newest first."""

    def run(self) -> None:
        from gpukiln.docker.build import is_build_running
        from gpukiln.reports.tables import Rows
        from gpukiln.units import Duration, Memory
        from gpukiln.verify.verdict import counts_text

        records = [build.read() for build in _builds().all()]
        running = "running" if is_build_running(_builds()) else "killed"
        if self.json:
            print_document("docker.list/1", builds=[dump(record) for record in records])
            return
        table = Rows("build", "image", "base", "state", "size", "checks", "took", first=2)
        for record in records:
            table.add(
                record.build_id,
                record.reference.rpartition("/")[2] or record.plan.image,
                record.plan.base_name,
                running if record.state == "running" else record.state,
                Memory(record.image.size).shown if record.image else "-",
                counts_text(record.verdict.checks) if record.verdict else "-",
                Duration(sum(record.durations_s.values())).shown,
            )
        if records:
            results().print(table)
        else:
            say("no container image was built here yet: `invoke docker.build runner-gpu` builds the first")


@dataclass(frozen=True)
class DockerShow(JsonOptions):
    """Show the record of a container build: plan, layers, verdict, durations."""

    build: str = option("image name (its newest build) or build id", first=True, required=True)

    def run(self) -> None:
        from gpukiln.docker.view import layer_table, plan_table
        from gpukiln.units import Duration
        from gpukiln.verify.report import render

        folder = _builds().find(self.build)
        record = folder.read()
        if self.json:
            print_document("docker.show/1", dump(record))
            return
        console = results()
        console.print(plan_table(record.plan))
        if record.image:
            console.print_text(f"\n{record.reference}  {record.image.id}\n")
            console.print(layer_table(record.image))
        if record.verdict:
            console.print(render(record.verdict))
        for step, seconds in record.durations_s.items():
            console.print_text(f"{step:40} {Duration(seconds).shown:>12}")
        console.print_text(
            f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {folder.folder}"
        )


def _judge(name: str, progress: Progress, *, json: bool) -> tuple[ContainerRecord, Verdict]:
    from gpukiln.docker.verify import verify_container
    from gpukiln.verify import report

    folder = _builds().find(name)
    record, verdict = verify_container(folder, progress)
    shown = results(json=json)
    shown.print(report.ending(verdict))
    shown.print_text(f"report: {folder.folder / 'verify' / 'report.html'}")
    return record, verdict


def _plan(wanted: ContainerOptions) -> ContainerPlan:
    from gpukiln.docker.plan import ContainerProbes, make_container_plan
    from gpukiln.state import state_home

    return make_container_plan(
        wanted.image,
        probes=ContainerProbes.real(state_home() / "apt", refresh=wanted.refresh),
        base=wanted.base,
        platform=wanted.platform,
        overrides=words(wanted.set),
    )


def _builds() -> ContainerBuilds:
    from gpukiln.docker.builds import ContainerBuilds
    from gpukiln.state import state_home

    return ContainerBuilds(state_home())
