"""Container images: plan, build, verify, look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.docker.builds import ContainerBuilds, ContainerRecord
    from gpukiln.docker.plan import ContainerPlan
    from gpukiln.progress import Progress
    from gpukiln.verify.verdict import Verdict

CHANGES_PENDING = 10  # exit code of `plan --exit-code` when there is something to build
COMMON = {
    "image": "a folder of docker/",
    "base": "a base of its image.yaml; debian-12 needs no NVIDIA repository (default: ubuntu-22.04)",
    "platform": "what it is built for: linux/amd64 or linux/arm64",
    "set": "a mirror for this build, NAME.repository.apt.url=URL, separated by commas; versions are pinned",
    "engine": "docker, podman or buildah; default: the first that works",
    "refresh": "fetch package lists again even when they are fresh",
    "json": "print one JSON document to standard output",
}


def _some(*names: str, **more: str) -> dict[str, str]:
    return {**{name: COMMON[name] for name in names}, **more}


@command(
    help=_some(*COMMON, exit_code="exit 10 when there is something to build, 0 when not"),
)
def plan(
    _: Any,
    image: str,
    base: str = "",
    platform: str = "linux/amd64",
    set: str = "",
    engine: str = "",
    refresh: bool = False,
    json: bool = False,
    exit_code: bool = False,
) -> int:
    """Show what a build would do, or why it can't work; starts nothing."""
    from gpukiln.docker.build import find_built, why_build
    from gpukiln.docker.engines import find_engine
    from gpukiln.docker.view import plan_table

    found = find_engine(engine)
    planned = _plan(image, base, platform, set, refresh=refresh)
    built = find_built(planned, _builds(), found)
    if json:
        print_document("docker.plan/1", dump(planned), built=built.read().reference if built else None)
    else:
        shown = results()
        shown.print(plan_table(planned))
        if built:
            shown.tell(f"nothing to build: {built.read().reference} has this digest")
        else:
            shown.tell("`invoke docker.build` would build it:")
            for line in why_build(planned, _builds()):
                shown.tell(f"  {line}")
    return CHANGES_PENDING if exit_code and not built else 0


@command(
    help=_some(
        *COMMON,
        force="build even when there is an image of this digest",
        dry_run="stop after the plan",
        no_verify="do not judge the image after the build",
        cache_from="where layers may be taken from, as the engine names it; separated by spaces",
        cache_to="where layers are kept, as the engine names it; separated by spaces",
    ),
)
def build(
    _: Any,
    image: str,
    base: str = "",
    platform: str = "linux/amd64",
    set: str = "",
    engine: str = "",
    refresh: bool = False,
    force: bool = False,
    dry_run: bool = False,
    no_verify: bool = False,
    cache_from: str = "",
    cache_to: str = "",
    json: bool = False,
) -> int:
    """Plan, build and judge a container image, and keep a record of all of it."""
    from gpukiln.docker.build import build_container, find_built, why_build
    from gpukiln.docker.engines import find_engine
    from gpukiln.docker.view import layer_table, plan_table
    from gpukiln.progress import Progress
    from gpukiln.units import Duration

    progress = Progress()
    with progress.step("plan"):
        found = find_engine(engine)
        planned = _plan(image, base, platform, set, refresh=refresh)
    shown = results(json=json)
    shown.print(plan_table(planned))
    there = None if force else find_built(planned, _builds(), found)
    if there:
        record = there.read()
        shown.tell(
            f"nothing to build: {record.reference} has this digest, built {record.plan.created_at},"
            f" {'verified' if record.state == 'verified' else 'not verified'} (--force builds anyway)"
        )
    else:
        for line in why_build(planned, _builds()):
            shown.tell(line)
    if dry_run:
        say("dry run: nothing was started")
        if json:
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
            overrides=words(set),
            cache_from=cache_from.split(),
            cache_to=cache_to.split(),
        )
        if record.image:
            shown.print(layer_table(record.image))
        took = Duration(sum(record.durations_s.values())).shown
        shown.tell(f"{record.reference}, also {planned.version}; built in {took}")
        shown.tell(f"record: {folder.record_file}")
    verdict = None
    if not no_verify and record.state != "verified":  # also what an interrupted run has left to do
        record, verdict = _judge(folder.id, progress, json=json)
    if json:
        print_document("docker.build/1", dump(record), built=there is None)
    return int(verdict is not None and not verdict.passed)


@command(help=_some("json", build="image name (its newest build) or build id"))
def verify(_: Any, build: str, json: bool = False) -> int:
    """Judge a container image that was built here, inside a container of it, and update its record."""
    from gpukiln.progress import Progress

    _record, verdict = _judge(build, Progress(), json=json)
    if json:
        print_document("docker.verify/1", verdict=dump(verdict))
    return int(not verdict.passed)


@command(name="list", help=_some("json"))
def list_(_: Any, json: bool = False) -> None:
    """List the container builds of this machine, newest first."""
    from gpukiln.docker.build import is_under_way
    from gpukiln.reports.tables import Rows
    from gpukiln.units import Duration, Memory
    from gpukiln.verify.verdict import counts_text

    records = [build.read() for build in _builds().all()]
    running = "running" if is_under_way(_builds()) else "killed"
    if json:
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


@command(help=_some("json", build="image name (its newest build) or build id"))
def show(_: Any, build: str, json: bool = False) -> None:
    """Show the record of a container build: plan, layers, verdict, durations."""
    from gpukiln.docker.view import layer_table, plan_table
    from gpukiln.units import Duration
    from gpukiln.verify.report import render

    folder = _builds().find(build)
    record = folder.read()
    if json:
        print_document("docker.show/1", dump(record))
        return
    console = results()
    console.print(plan_table(record.plan))
    if record.image:
        console.tell(f"\n{record.reference}  {record.image.id}\n")
        console.print(layer_table(record.image))
    if record.verdict:
        console.print(render(record.verdict))
    for step, seconds in record.durations_s.items():
        console.tell(f"{step:40} {Duration(seconds).shown:>12}")
    console.tell(
        f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {folder.folder}"
    )


def _judge(name: str, progress: Progress, *, json: bool) -> tuple[ContainerRecord, Verdict]:
    from gpukiln.docker.verify import verify_container
    from gpukiln.verify import report

    folder = _builds().find(name)
    record, verdict = verify_container(folder, progress)
    shown = results(json=json)
    shown.print(report.ending(verdict))
    shown.tell(f"report: {folder.folder / 'verify' / 'report.html'}")
    return record, verdict


def _plan(image: str, base: str, platform: str, overrides: str, *, refresh: bool) -> ContainerPlan:
    from gpukiln.docker.plan import ContainerProbes, make_container_plan
    from gpukiln.state import state_home

    return make_container_plan(
        image,
        probes=ContainerProbes.real(state_home() / "apt", refresh=refresh),
        base=base,
        platform=platform,
        overrides=words(overrides),
    )


def _builds() -> ContainerBuilds:
    from gpukiln.docker.builds import ContainerBuilds
    from gpukiln.state import state_home

    return ContainerBuilds(state_home())
