"""Machine images: plan, build, verify, look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import (
    SIGNERS,
    JsonOptions,
    MachineOptions,
    PlaceOptions,
    print_document,
    results,
    say,
    words,
)
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

    from gpukiln.clouds.base import Cloud
    from gpukiln.images.builds import Builds
    from gpukiln.images.modules import SigningPair
    from gpukiln.images.plan import ImagePlan
    from gpukiln.pipeline.verdict_tags import VerifiedAmi

CHANGES_PENDING = 10  # exit code of `plan --exit-code` when there is something to build


@dataclass(frozen=True)
class BuildOptions(PlaceOptions, MachineOptions):
    """What an image is made of."""

    image: str = option("a folder of ami/", "eks-gpu", setting="image")
    base: str = option("base image, see ami.bases; default: the cloud's")
    instance_types: str = option(
        "GPU machines the image must run on, separated by commas; default: the image's own"
    )
    set: str = option(
        "change a component for this build, NAME.FIELD=VALUE, separated by commas", setting="components"
    )
    also: str = option(
        "optional components that the image gets too, separated by commas: dcgm, dcgm_exporter, kasmvnc"
    )
    module_key: str = option("private key (PEM) that kernel modules are signed with, for Secure Boot")
    module_certificate: str = option("its certificate (DER), which stays in the image for enrolment")
    refresh: bool = option("fetch package lists again even when they are fresh", False)

    def where(self) -> Cloud:
        from gpukiln.clouds.select import make_cloud

        typed = self.pick("profile", "subnet_id", "ssh_cidr")
        return make_cloud(self.cloud, self.region, **{name: text or None for name, text in typed.items()})

    def plan(self, where: Cloud) -> tuple[ImagePlan, SigningPair | None]:
        """The plan, and what signs kernel modules."""
        from gpukiln.images.modules import signing_pair

        signing = signing_pair(self.module_key, self.module_certificate)
        return _plan(self, where, signing), signing


@dataclass(frozen=True)
class AmiPlan(BuildOptions):
    """Show what a build would do, or why it can't work; starts nothing."""

    exit_code: bool = option("exit 10 when there is something to build, 0 when not", False)

    def run(self) -> int:
        from gpukiln.images.cost import cost_lines, estimate
        from gpukiln.images.orphans import report_killed
        from gpukiln.images.plan_view import plan_table
        from gpukiln.pipeline import steps
        from gpukiln.pipeline.verdict_tags import find_verified
        from gpukiln.verify.digest import suite_digest

        where = self.where()
        report_killed(_builds(), say)
        planned, _ = self.plan(where)
        proven = find_verified(planned, where, suite_digest())
        is_current = proven is not None and proven.passed_suite(suite_digest())
        cost = estimate(planned, _builds().last_durations(planned))
        if self.json:
            why = [] if proven else steps.why_build(planned, _builds())
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
                shown.print_text(line)
            if proven:
                shown.print_text(_nothing_to_bake(proven, again="`invoke ami.build` would judge it again"))
            else:
                shown.print_text("`invoke ami.build` would bake it:")
                for line in steps.why_build(planned, _builds()):
                    shown.print_text(f"  {line}")
        return CHANGES_PENDING if self.exit_code and not is_current else 0


@dataclass(frozen=True)
class AmiBuild(BuildOptions):
    """Plan, bake, boot the image in a new machine, judge it, and keep a record of all of it."""

    force: bool = option("build even when a proven image has this digest", False)
    sign_key: str = option(f"signs provenance and verdict: {SIGNERS}")
    dry_run: bool = option("stop after the plan", False)
    module_cache: str = option("keeps compiled kernel modules: a folder, s3://BUCKET/PREFIX or none")
    stages: str = option(
        "on: go on from the last stage that is unchanged, and keep new ones; off: every role runs; "
        "default: on where snapshots cost nothing, off on aws"
    )

    def run(self) -> int:
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.bake import BakeResources
        from gpukiln.images.module_store import open_store
        from gpukiln.images.orphans import remove_orphans, report_killed
        from gpukiln.images.plan_view import plan_table
        from gpukiln.images.stages import stages_enabled, stages_of
        from gpukiln.pipeline import steps
        from gpukiln.pipeline.verdict_tags import find_verified
        from gpukiln.progress import Progress
        from gpukiln.state import state_home
        from gpukiln.units import Duration
        from gpukiln.verify import report
        from gpukiln.verify.digest import suite_digest

        progress = Progress()
        with progress.step("plan"):
            where = self.where()
            signer = signer_of(self.sign_key, where)
            if self.dry_run:
                report_killed(_builds(), say)
            else:
                remove_orphans(where, _builds(), say)
            wanted = stages_enabled(where, self.stages)
            planned, signing = self.plan(where)
            kept = stages_of(planned, where) if wanted else None
        shown = results(json=self.json)
        shown.print(plan_table(planned))
        if not self.force and (proven := find_verified(planned, where, suite_digest())):
            shown.print_text(
                f"{_nothing_to_bake(proven, again='it is judged again')} (--force builds anyway)"
            )
            return _proven(proven, planned, where, dry_run=self.dry_run, signer=signer, json=self.json)
        if not self.force:
            for line in steps.why_build(planned, _builds()):
                shown.print_text(f"  {line}")
        if self.dry_run:
            say("dry run: nothing was started")
            if self.json:
                print_document("ami.build.plan/1", dump(planned), built=False)
            return 0
        saved = BakeResources(open_store(self.module_cache, state_home(), where), kept, signing)
        folder, record = steps.build_image(planned, where, _builds(), progress, saved, signer)
        if record.verdict and record.bake:
            shown.print(report.ending(record.verdict))
            shown.print_text(
                f"{record.bake.image_id} {record.bake.name}\n"
                f"built and verified in {Duration(sum(record.durations_s.values())).shown}\n"
                f"record: {folder.record_file}\n"
                f"report: {folder.report_folder(1) / 'report.html'}"
            )
        if self.json:
            image_id = record.bake.image_id if record.bake else None
            print_document("ami.build/1", dump(record), image_id=image_id, built=True)
        if record.verdict:
            steps.require_passed(record.verdict, folder.id)
        return 0


def _proven(
    proven: VerifiedAmi, planned: ImagePlan, where: Cloud, *, dry_run: bool, signer: Signer | None, json: bool
) -> int:
    """End a build whose image is there: at once, or with a verdict of this suite."""
    from gpukiln.errors import UsageError
    from gpukiln.images.subject import subject_from_tags
    from gpukiln.instances.access import access_line
    from gpukiln.instances.tags import tags_of
    from gpukiln.pipeline import steps
    from gpukiln.pipeline.verify import verify_again
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
        shown.print_text(f"report: {folder / 'report.html'}")
    if json:
        print_document("ami.build.found/1", document, verdict=dump(verdict) if verdict else None)
    if verdict:
        steps.require_passed(verdict, proven.build_id)
    return 0


@dataclass(frozen=True)
class AmiList(JsonOptions):
    """List the builds of this machine, newest first."""

    def run(self) -> None:
        from gpukiln.images.orphans import killed_builds, report_killed
        from gpukiln.reports.tables import Rows
        from gpukiln.units import Duration
        from gpukiln.verify.verdict import counts_text

        records = [build.read() for build in _builds().all()]
        killed = {build.id for build in killed_builds(_builds())}
        report_killed(_builds(), say)
        if self.json:
            print_document("ami.list/1", builds=[dump(record) for record in records])
            return
        rows = Rows("build", "AMI", "cloud", "driver", "state", "checks", "took", first=2)
        for record in records:
            checks = counts_text(record.verdict.checks) if record.verdict and record.verdict.checks else "-"
            simulated = " (simulated)" if record.verdict and record.verdict.simulated else ""
            rows.add(
                record.build_id,
                record.bake.image_id if record.bake else "-",
                f"{record.plan.cloud} {record.plan.region}",
                record.plan.component("nvidia_driver").version or "-",
                "killed" if record.build_id in killed else record.state,
                checks + simulated * (checks != "-"),
                Duration(sum(record.durations_s.values())).shown,
            )
        if records:
            results().print(rows)
        else:
            say("no build yet: `invoke ami.build --region us-west-2` makes the first")


@dataclass(frozen=True)
class AmiTimings(JsonOptions):
    """Compare how long each step of the last builds took, newest first."""

    last: int = option("how many builds are compared", 4)

    def run(self) -> None:
        from gpukiln.images.timings import timings as compare
        from gpukiln.images.timings import timings_table

        records = (build.read() for build in _builds().all())
        rows = compare([record for record in records if record.durations_s][: max(self.last, 1)])
        if self.json:
            print_document("ami.timings/1", builds=rows)
        elif rows:
            results().print(timings_table(rows))
        else:
            say("no build has ended yet: `invoke ami.build --region us-west-2` makes the first")


@dataclass(frozen=True)
class AmiShow(JsonOptions):
    """Show the record of a build: plan, image, verdict, durations."""

    build: str = option("build id, AMI id or `last`", first=True, required=True)

    def run(self) -> None:
        from gpukiln.images.cost import cost_lines
        from gpukiln.images.modules import module_line
        from gpukiln.images.orphans import report_killed
        from gpukiln.images.plan_view import plan_table
        from gpukiln.images.stages import stage_line
        from gpukiln.units import Duration
        from gpukiln.verify.report import render
        from gpukiln.verify.verdict import counts_text

        folder = _builds().find(self.build)
        record = folder.read()
        report_killed(_builds(), say)
        if self.json:
            print_document("ami.show/1", dump(record))
            return
        console = results()
        console.print(plan_table(record.plan))
        if record.bake:
            console.print_text(f"\n{record.bake.image_id}  {record.bake.name}")
            console.print_text(f"kernel {record.bake.kernel}, {len(record.bake.packages)} packages\n")
            if record.bake.stage:
                console.print_text(f"{stage_line(record.bake.stage)}\n")
            for use in record.bake.modules:
                console.print_text(f"{module_line(use)}\n")
        if record.verdict:
            console.print(render(record.verdict))
            for name, verdict in record.newest_verdicts.items():
                said = "passed" if verdict.passed else "FAILED"
                console.print_text(
                    f"{name}: {said} on {verdict.started_at}, {counts_text(verdict.checks)}, "
                    f"suite {verdict.suite_version[:12]}",
                )
            if record.simulated:
                console.print_text(f"on simulated GPUs, which proves nothing: {', '.join(record.simulated)}")
            console.print_text(
                f"{len(record.verdicts)} verdicts, reports: {folder.report_folder(1).parent}\n"
            )
        for step, seconds in record.durations_s.items():
            console.print_text(f"{step:24} {Duration(seconds).shown:>12}")
        if record.cost or record.plan.cloud == "embedded":
            console.print_text("\n" + "\n".join(cost_lines(record.cost)))
        console.print_text(
            f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {folder.folder}"
        )


def _plan(wanted: BuildOptions, where: Cloud, signing: SigningPair | None) -> ImagePlan:
    from gpukiln.images.bake import tool_versions
    from gpukiln.images.plan import make_plan
    from gpukiln.sources.decisions import Probes
    from gpukiln.state import state_home

    return make_plan(
        wanted.image,
        where,
        probes=Probes.real(state_home() / "apt", refresh=wanted.refresh),
        base=wanted.base or None,
        instance_types=words(wanted.instance_types),
        overrides=words(wanted.set),
        also=words(wanted.also),
        tools=tool_versions(),
        signer=signing.sha256 if signing else "",
    )


def _builds() -> Builds:
    from gpukiln.images.builds import Builds
    from gpukiln.state import state_home

    return Builds(state_home())


def _nothing_to_bake(proven: VerifiedAmi, *, again: str) -> str:
    from gpukiln.verify.digest import suite_digest

    when = proven.verified_at
    verified = f"verified on {when[:10]} at {when[11:16]} UTC" if when else "and was verified"
    text = f"nothing to bake: {proven.image_id} has this digest, {verified}"
    if proven.passed_suite(suite_digest()):
        return text
    suites = ", ".join(sorted(suite[:12] for suite in proven.suites))
    return f"{text} by the suite {suites or 'unknown'}, today's is {suite_digest()[:12]}: {again}"
