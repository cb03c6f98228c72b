"""The steps bake, verify and attest of a build, with a record of each, also where one fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from gpukiln.catalog.bases import base as find_base
from gpukiln.catalog.instance_types import instance_type
from gpukiln.clouds.base import Cloud
from gpukiln.errors import CheckFailedError, GpukilnError, UnavailableError
from gpukiln.images.bake import BakeResources, bake, finish
from gpukiln.images.builds import Bake, Build, Builds, Record
from gpukiln.images.cost import measured_cost
from gpukiln.images.digest import explain_change
from gpukiln.images.orphans import scratch_folder
from gpukiln.images.plan import ImagePlan
from gpukiln.images.subject import Subject, subject_of
from gpukiln.instances.access import access_line, machine_from_image
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.instances.orphans import remove_unrecorded
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.pipeline.verdict_tags import write_verdict_tags
from gpukiln.progress import Progress
from gpukiln.units import Duration
from gpukiln.verify.report import LiveReport, ending
from gpukiln.verify.suite import run_suite
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer


def why_build(plan: ImagePlan, builds: Builds) -> list[str]:
    """What changed since the last image that was verified.

    Returns:
        A line that names the image, and one line for each change; one line where there is no such image.
    """
    for build in builds.all():
        old = build.read()
        same = (old.plan.image, old.plan.cloud, old.plan.base.name) == (
            plan.image,
            plan.cloud,
            plan.base.name,
        )
        if same and old.verdict and old.verdict.passed_without_simulation:
            image = f"{old.bake.image_id if old.bake else 'the image'} of build {old.build_id}"
            changes = explain_change(old.plan.inputs, plan.inputs)
            # The digest is the same, so that find_verified would have found the image if it still existed.
            if not changes:
                return [f"{image} had this digest, and does not exist any more"]
            return [f"since {image}, verified on {old.verdict.started_at[:10]}:", *changes]
    return ["no image of it was verified on this machine yet"]


def build_image(
    plan: ImagePlan,
    cloud: Cloud,
    builds: Builds,
    progress: Progress,
    saved: BakeResources,
    signer: Signer | None = None,
) -> tuple[Build, Record]:
    """Bake an image, verify it on a machine booted from it, and write its SBOM and provenance.

    Args:
        builds: Where the record goes.
        saved: Files and stages of earlier builds that it may use, and keeps for later ones.
        signer: The key to sign provenance and verdict with, or None.

    Returns:
        The build and its record. A failed check is in the verdict and raises nothing.

    Raises:
        GpukilnError: The image could not be baked or verified.
    """
    progress.show(Text(access_line(cloud)))  # first: where it can't be printed, no machine is started
    # Before the build's own folder exists, so that the durations are those of builds from the same stage.
    stage = saved.stages.newest() if saved.stages else None
    progress = Progress(builds.last_durations(plan, stage), console=progress.console)
    build = builds.create(plan.image)
    # The lock shows other commands that this build runs; scratch has the temporary files of Packer, Ansible
    # and the suite, which a killed build would leave.
    with build.locked(), scratch_folder(build):
        # Written before any work, so that a killed build can be found and cleaned up by its record.
        record = Record(build.id, "running", plan)
        build.write(record)

        def record_image(image: Bake) -> None:
            nonlocal record
            # As soon as the AMI exists: from now on its removal needs the record.
            record = replace(record, state="baked", bake=image)
            build.write(record)

        try:
            baked = bake(plan, cloud, build, progress, saved, stage, on_image=record_image)
            # CreateImage has no argument for it: machines of the AMI accept IMDSv2 only.
            finish(cloud, baked.image_id)
            record = replace(record, durations_s=dict(progress.durations))
            build.write(record)
            subject = subject_of(plan, baked.image_id, build.id)
            verdict, machine = verify_image(subject, cloud, build.report_folder(1), progress)
            record = replace(
                record,
                state="verified",
                verdicts=(verdict,),
                durations_s=dict(progress.durations),  # the steps after this one are not in the record
                cost=measured_cost(plan, progress.durations, machine),
            )
        # KeyboardInterrupt included: Ctrl-C must leave a record with state and cost too.
        except BaseException as error:
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "failed"
            message = error.message if isinstance(error, GpukilnError) else repr(error)
            if record.bake is None:
                _remove_unrecorded(cloud, build, error)
            # The price of a verification that failed is unknown; on-demand is the upper limit.
            on_demand = LaunchedMachine("", plan.instance_types[0], "", spot=False)
            build.write(
                replace(
                    record,
                    state=state,
                    error=message,
                    durations_s=progress.durations,
                    cost=measured_cost(
                        plan, progress.durations, on_demand if "verify" in progress.durations else None
                    ),
                )
            )
            # A failed check leaves stages alone; an image that does not boot does not.
            if record.bake and isinstance(error, UnavailableError):
                # the content of the stages may be why the image does not boot or can't be reached
                _remove_stages(saved, build, record.bake, progress, verified=False)
            raise
        build.write(record)
        try:
            # Tags, attestation and signature come after the record: if one of them fails, `ami.verify` or
            # `ami.attest` repeats it.
            write_verdict_tags(cloud, subject, verdict)
            attest(build, record, cloud, progress, signer)
            sign_verdict(cloud, subject, verdict, build.report_folder(1), signer, build)
        finally:
            _remove_stages(saved, build, baked, progress, verified=verdict.passed_without_simulation)
    return build, record


def _remove_unrecorded(cloud: Cloud, build: Build, error: BaseException) -> None:
    """Remove an AMI that EC2 made after the bake failed; a note of the error names what can't be removed."""
    try:
        remove_unrecorded(cloud, build.id)
    # The first error is the one to report.
    except GpukilnError as problem:
        error.add_note(f"an AMI without a record may exist: {problem.message}")


def _remove_stages(
    saved: BakeResources, build: Build, baked: Bake, progress: Progress, *, verified: bool
) -> None:
    """Remove stages that no build may start from; a failure is printed and does not fail the build."""
    if saved.stages is None:
        return
    try:
        if verified:
            saved.stages.tidy()
        else:
            saved.stages.drop(build.id, baked.stage)
    except GpukilnError as error:
        progress.show(Text(f"{error.message}; with `--stages off` builds do not use the remaining stages"))


def attest(
    build: Build, record: Record, cloud: Cloud, progress: Progress, signer: Signer | None = None
) -> None:
    """Write SBOM and provenance of a verified image next to its record, unless they exist.

    Args:
        build: The build's folder, locked.
        record: The build's record, written.
        cloud: Where the image is.
        signer: The key to sign the provenance with, or None.

    Raises:
        GpukilnError: They could not be written; image, record and verdict stay as they are.
    """
    # cyclonedx and securesystemslib are slow to import.
    from gpukiln.attest.attestation import STATEMENT, write_attestation  # noqa: PLC0415 - slow to import

    if (build.folder / STATEMENT).exists():
        return
    try:
        with progress.step("SBOM and provenance"):
            write_attestation(build, record, cloud, signer)
    except GpukilnError as error:
        error.add_note(
            f"the image is verified and recorded; `invoke ami.attest {build.id}` writes the missing files"
        )
        raise


def verify_image(
    subject: Subject,
    cloud: Cloud,
    folder: Path,
    progress: Progress,
    *,
    instance_types: Sequence[str] = (),
    spot: bool = False,
    simulated: bool = False,
) -> tuple[Verdict, LaunchedMachine]:
    """Boot a new machine from an image and verify it; the caller keeps the verdict.

    Args:
        folder: For the report.
        instance_types: The types to try, the best first; where empty, the first type that the image was built
            for.
        spot: Whether the machine may be a spot instance.
        simulated: Whether the machine gets simulated GPUs, which are verified as far as possible.

    Returns:
        The verdict and its machine.

    Raises:
        BusyError: There is no capacity for any of the types now.
        IncompatibleError: The account's quota is too low, or the region has none of the types.
        UnavailableError: No machine could be started, or it could not be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The machine is removed on every path, also where the suite raises.
    with ExitStack() as machine:
        with progress.step("boot from the image"):
            target, launched = machine.enter_context(
                machine_from_image(
                    cloud,
                    subject.image_id,
                    build_id=subject.build_id,
                    instance_types=instance_types or subject.instance_types[:1],
                    spot=spot,
                    simulated=simulated,
                    rehearse_node=find_base(subject.base).has_nodeadm,
                    user=subject.ssh_user,
                    say=progress.say,
                )
            )
        live = LiveReport(progress)
        with progress.step("verify"):
            verdict = run_suite(
                target,
                profile=subject.profile,
                out_dir=folder,
                on_start=live.start,
                on_check=live.check,
                # The embedded cloud has no GPUs, unless simulated ones were asked for.
                expect_gpus=instance_type(launched.instance_type).gpus
                if cloud.has_gpus or simulated
                else None,
                simulated=simulated,
                instance_type=launched.instance_type,
            )
            if not verdict.passed:
                progress.fail()
        with progress.step("remove the machine"):
            machine.close()
    return verdict, launched


def built_parts(build: Build, record: Record) -> Iterator[RenderableType]:
    """What a build made, for people; nothing where it has no verdict."""
    if record.verdict and record.bake:
        yield ending(record.verdict)
        yield (
            f"{record.bake.image_id} {record.bake.name}\n"
            f"built and verified in {Duration(sum(record.durations_s.values())).shown}\n"
            f"record: {build.record_file}\n"
            f"report: {build.report_folder(1) / 'report.html'}"
        )


def require_passed(verdict: Verdict, build: str) -> None:
    """Fail the command where checks failed.

    Args:
        build: The build's name, for the hint.

    Raises:
        CheckFailedError: A check failed.
    """
    if not verdict.passed:
        raise CheckFailedError(
            f"{len(verdict.failures)} of {len(verdict.checks)} checks failed",
            hint=f"`invoke ami.show {build}` shows the report again",
            details=tuple(check.id for check in verdict.failures),
        )
