"""Machine images: plan, build, verify, look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import SIGNERS, command, print_document, results, say, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

    from gpukiln.clouds.base import Cloud
    from gpukiln.images.builds import Builds
    from gpukiln.images.modules import SigningPair
    from gpukiln.images.plan import ImagePlan
    from gpukiln.proof.tags import ProvenAmi

CHANGES_PENDING = 10  # exit code of `plan --exit-code` when there is something to build
COMMON = {
    "region": "AWS region, for example us-west-2",
    "cloud": "embedded (this machine, the default) or aws (your account)",
    "image": "a folder of ami/",
    "base": "base image, see ami.bases; default: the cloud's",
    "instance_types": "GPU machines the image must run on, separated by commas; default: the image's own",
    "set": "change a component for this build, NAME.FIELD=VALUE, separated by commas",
    "also": "optional components that the image gets too, separated by commas: dcgm, dcgm_exporter, kasmvnc",
    "profile": "AWS profile (aws only)",
    "subnet_id": "subnet of the machines that bake and verify (aws only)",
    "ssh_cidr": "who may reach SSH of those machines, for example 203.0.113.7/32; default: this machine's "
    "public address (aws only)",
    "module_key": "private key (PEM) that kernel modules are signed with, for Secure Boot",
    "module_certificate": "its certificate (DER), which stays in the image for enrolment",
    "refresh": "fetch package lists again even when they are fresh",
    "json": "print one JSON document to standard output",
}


def _some(*names: str, **more: str) -> dict[str, str]:
    return {**{name: COMMON[name] for name in names}, **more}


@command(help=_some(*COMMON, exit_code="exit 10 when there is something to build, 0 when not"))
def plan(
    _: Any,
    region: str = "",
    cloud: str = "embedded",
    image: str = "eks-gpu",
    base: str = "",
    instance_types: str = "",
    set: str = "",
    also: str = "",
    profile: str = "",
    subnet_id: str = "",
    ssh_cidr: str = "",
    module_key: str = "",
    module_certificate: str = "",
    refresh: bool = False,
    json: bool = False,
    exit_code: bool = False,
) -> int:
    """Show what a build would do, or why it can't work; starts nothing."""
    from gpukiln.images.cost import cost_lines, estimate
    from gpukiln.images.killed import tell_killed
    from gpukiln.images.modules import signing_pair
    from gpukiln.images.plan_view import plan_table
    from gpukiln.proof import pipeline
    from gpukiln.proof.tags import find_proven
    from gpukiln.verify.digest import suite_digest

    where = _cloud(cloud, region, profile, subnet_id, ssh_cidr)
    tell_killed(_builds(), say)
    signing = signing_pair(module_key, module_certificate)
    planned = _plan(where, image, base, instance_types, set, also, refresh=refresh, signing=signing)
    proven = find_proven(planned, where, suite_digest())
    is_current = proven is not None and proven.passed_suite(suite_digest())
    cost = estimate(planned, _builds().last_durations(planned))
    if json:
        why = [] if proven else pipeline.why_build(planned, _builds())
        print_document(
            "ami.plan/1",
            dump(planned),
            proven_image=proven.image_id if proven and is_current else None,
            proven_by_another_suite=proven.image_id if proven and not is_current else None,
            why_build=why,
            cost_estimate={**dump(cost), "usd": cost.usd} if cost else None,
        )
    else:
        shown = results()
        shown.print(plan_table(planned))
        for line in cost_lines(cost):
            shown.tell(line)
        if proven:
            shown.tell(_nothing_to_bake(proven, again="`invoke ami.build` would judge it again"))
        else:
            shown.tell("`invoke ami.build` would bake it:")
            for line in pipeline.why_build(planned, _builds()):
                shown.tell(f"  {line}")
    return CHANGES_PENDING if exit_code and not is_current else 0


@command(
    help=_some(
        *COMMON,
        force="build even when a proven image has this digest",
        sign_key=f"signs provenance and verdict: {SIGNERS}",
        dry_run="stop after the plan",
        module_cache="keeps compiled kernel modules: a folder, s3://BUCKET/PREFIX or none",
        stages="on: go on from the last stage that is unchanged, and keep new ones; off: every role runs; "
        "default: on where snapshots cost nothing, off on aws",
    )
)
def build(
    _: Any,
    region: str = "",
    cloud: str = "embedded",
    image: str = "eks-gpu",
    base: str = "",
    instance_types: str = "",
    set: str = "",
    also: str = "",
    profile: str = "",
    subnet_id: str = "",
    ssh_cidr: str = "",
    module_key: str = "",
    module_certificate: str = "",
    refresh: bool = False,
    force: bool = False,
    sign_key: str = "",
    dry_run: bool = False,
    module_cache: str = "",
    stages: str = "",
    json: bool = False,
) -> int:
    """Plan, bake, boot the image in a new machine, judge it, and keep a record of all of it."""
    from gpukiln.attest.signing import signer_of
    from gpukiln.images.bake import Saved
    from gpukiln.images.killed import clean_up_after_killed, tell_killed
    from gpukiln.images.module_store import open_store
    from gpukiln.images.modules import signing_pair
    from gpukiln.images.plan_view import plan_table
    from gpukiln.images.stages import stages_of, wants_stages
    from gpukiln.progress import Progress
    from gpukiln.proof import pipeline
    from gpukiln.proof.tags import find_proven
    from gpukiln.state import state_home
    from gpukiln.units import Duration
    from gpukiln.verify import report
    from gpukiln.verify.digest import suite_digest

    progress = Progress()
    with progress.step("plan"):
        where = _cloud(cloud, region, profile, subnet_id, ssh_cidr)
        signer = signer_of(sign_key, where)
        if dry_run:
            tell_killed(_builds(), say)
        else:
            clean_up_after_killed(where, _builds(), say)
        wanted = wants_stages(where, stages)
        signing = signing_pair(module_key, module_certificate)
        planned = _plan(where, image, base, instance_types, set, also, refresh=refresh, signing=signing)
        kept = stages_of(planned, where) if wanted else None
    shown = results(json=json)
    shown.print(plan_table(planned))
    if not force and (proven := find_proven(planned, where, suite_digest())):
        shown.tell(f"{_nothing_to_bake(proven, again='it is judged again')} (--force builds anyway)")
        return _proven(proven, planned, where, dry_run=dry_run, signer=signer, json=json)
    if not force:
        for line in pipeline.why_build(planned, _builds()):
            shown.tell(f"  {line}")
    if dry_run:
        say("dry run: nothing was started")
        if json:
            print_document("ami.build.plan/1", dump(planned), built=False)
        return 0
    saved = Saved(open_store(module_cache, state_home(), where), kept, signing)
    folder, record = pipeline.build_image(planned, where, _builds(), progress, saved, signer)
    if record.verdict and record.bake:
        shown.print(report.ending(record.verdict))
        shown.tell(
            f"{record.bake.image_id} {record.bake.name}\n"
            f"built and verified in {Duration(sum(record.durations_s.values())).shown}\n"
            f"record: {folder.record_file}\n"
            f"report: {folder.report_folder(1) / 'report.html'}"
        )
    if json:
        image_id = record.bake.image_id if record.bake else None
        print_document("ami.build/1", dump(record), image_id=image_id, built=True)
    if record.verdict:
        pipeline.require_passed(record.verdict, folder.id)
    return 0


def _proven(
    proven: ProvenAmi, planned: ImagePlan, where: Cloud, *, dry_run: bool, signer: Signer | None, json: bool
) -> int:
    """End a build whose image is there: at once, or with a verdict of this suite."""
    from gpukiln.errors import UsageError
    from gpukiln.images.subject import subject_from_tags
    from gpukiln.instances.access import access_line
    from gpukiln.instances.tags import tags_of
    from gpukiln.proof import pipeline
    from gpukiln.proof.verify import verify_again
    from gpukiln.state import state_home
    from gpukiln.verify import report
    from gpukiln.verify.digest import suite_digest

    document = {
        "image_id": proven.image_id,
        "build_id": proven.build_id,
        "built": False,
        "digest": planned.digest,
    }
    verdict = None
    if dry_run or proven.passed_suite(suite_digest()):
        if dry_run:
            say("dry run: nothing was started")
    else:
        try:
            known = _builds().find(proven.image_id)
        except UsageError:  # another machine built it
            known = None
        say(access_line(where))
        subject = subject_from_tags(proven.image_id, tags_of(proven.image))
        types = planned.instance_types[:1]
        verdict, _, folder = verify_again(
            subject, where, known, state_home(), instance_types=types, signer=signer
        )
        shown = results(json=json)
        shown.print(report.ending(verdict))
        shown.tell(f"report: {folder / 'report.html'}")
    if json:
        print_document("ami.build.found/1", document, verdict=dump(verdict) if verdict else None)
    if verdict:
        pipeline.require_passed(verdict, proven.build_id)
    return 0


@command(name="list", help=_some("json"))
def list_(_: Any, json: bool = False) -> None:
    """List the builds of this machine, newest first."""
    from gpukiln.images.killed import killed_builds, tell_killed
    from gpukiln.reports.tables import Rows
    from gpukiln.units import Duration
    from gpukiln.verify.verdict import counts_text

    records = [build.read() for build in _builds().all()]
    killed = {build.id for build in killed_builds(_builds())}
    tell_killed(_builds(), say)
    if json:
        print_document("ami.list/1", builds=[dump(record) for record in records])
        return
    rows = Rows("build", "AMI", "cloud", "driver", "state", "checks", "took", first=2)
    for record in records:
        checks = record.verdict.checks if record.verdict else ()
        rows.add(
            record.build_id,
            record.bake.image_id if record.bake else "-",
            f"{record.plan.cloud} {record.plan.region}",
            record.plan.component("nvidia_driver").version or "-",
            "killed" if record.build_id in killed else record.state,
            f"{counts_text(checks)}{' (simulated)' if record.verdict and record.verdict.simulated else ''}"
            if checks
            else "-",
            Duration(sum(record.durations_s.values())).shown,
        )
    if records:
        results().print(rows)
    else:
        say("no build yet: `invoke ami.build --region us-west-2` makes the first")


@command(help=_some("json", last="how many builds are compared"))
def timings(_: Any, last: int = 4, json: bool = False) -> None:
    """Compare how long each step of the last builds took, newest first."""
    from gpukiln.images.timings import timings as compare
    from gpukiln.images.timings import timings_table

    records = (build.read() for build in _builds().all())
    rows = compare([record for record in records if record.durations_s][: max(last, 1)])
    if json:
        print_document("ami.timings/1", builds=rows)
    elif rows:
        results().print(timings_table(rows))
    else:
        say("no build has ended yet: `invoke ami.build --region us-west-2` makes the first")


@command(help=_some("json", build="build id, AMI id or `last`"))
def show(_: Any, build: str, json: bool = False) -> None:
    """Show the record of a build: plan, image, verdict, durations."""
    from gpukiln.images.cost import cost_lines
    from gpukiln.images.killed import tell_killed
    from gpukiln.images.modules import module_line
    from gpukiln.images.plan_view import plan_table
    from gpukiln.images.stages import stage_line
    from gpukiln.units import Duration
    from gpukiln.verify.report import render
    from gpukiln.verify.verdict import counts_text

    folder = _builds().find(build)
    record = folder.read()
    tell_killed(_builds(), say)
    if json:
        print_document("ami.show/1", dump(record))
        return
    console = results()
    console.print(plan_table(record.plan))
    if record.bake:
        console.tell(f"\n{record.bake.image_id}  {record.bake.name}")
        console.tell(f"kernel {record.bake.kernel}, {len(record.bake.packages)} packages\n")
        if record.bake.stage:
            console.tell(f"{stage_line(record.bake.stage)}\n")
        for use in record.bake.modules:
            console.tell(f"{module_line(use)}\n")
    if record.verdict:
        console.print(render(record.verdict))
        for name, verdict in record.judged.items():
            said = "passed" if verdict.passed else "FAILED"
            console.tell(
                f"{name}: {said} on {verdict.started_at}, {counts_text(verdict.checks)}, "
                f"suite {verdict.suite_version[:12]}",
            )
        if record.simulated:
            console.tell(f"on simulated GPUs, which proves nothing: {', '.join(record.simulated)}")
        console.tell(f"{len(record.verdicts)} verdicts, reports: {folder.report_folder(1).parent}\n")
    for step, seconds in record.durations_s.items():
        console.tell(f"{step:24} {Duration(seconds).shown:>12}")
    if record.cost or record.plan.cloud == "embedded":
        console.tell("\n" + "\n".join(cost_lines(record.cost)))
    console.tell(
        f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {folder.folder}"
    )


def _cloud(name: str, region: str, profile: str, subnet_id: str, ssh_cidr: str) -> Cloud:
    from gpukiln.clouds.select import make_cloud

    return make_cloud(
        name, region, profile=profile or None, subnet_id=subnet_id or None, ssh_cidr=ssh_cidr or None
    )


def _plan(
    where: Cloud,
    image: str,
    base: str,
    instance_types: str,
    overrides: str,
    also: str,
    *,
    refresh: bool,
    signing: SigningPair | None,
) -> ImagePlan:
    from gpukiln.images.bake import tool_versions
    from gpukiln.images.plan import make_plan
    from gpukiln.sources.available import Probes
    from gpukiln.state import state_home

    return make_plan(
        image,
        where,
        probes=Probes.real(state_home() / "apt", refresh=refresh),
        base=base or None,
        instance_types=words(instance_types),
        overrides=words(overrides),
        also=words(also),
        tools=tool_versions(),
        signer=signing.sha256 if signing else "",
    )


def _builds() -> Builds:
    from gpukiln.images.builds import Builds
    from gpukiln.state import state_home

    return Builds(state_home())


def _nothing_to_bake(proven: ProvenAmi, *, again: str) -> str:
    from gpukiln.verify.digest import suite_digest

    when = proven.verified_at
    verified = f"verified on {when[:10]} at {when[11:16]} UTC" if when else "and was verified"
    text = f"nothing to bake: {proven.image_id} has this digest, {verified}"
    if proven.passed_suite(suite_digest()):
        return text
    suites = ", ".join(sorted(suite[:12] for suite in proven.suites))
    return f"{text} by the suite {suites or 'unknown'}, today's is {suite_digest()[:12]}: {again}"
