"""plan -> bake -> verify, with a record of all of it, whatever happens."""

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
from gpukiln.images.bake import Saved, bake, finish
from gpukiln.images.builds import Bake, Build, Builds, Record
from gpukiln.images.cost import spent
from gpukiln.images.digest import explain_change
from gpukiln.images.killed import scratch
from gpukiln.images.plan import ImagePlan
from gpukiln.images.subject import Subject, subject_of
from gpukiln.instances.access import access_line, machine_from_image
from gpukiln.instances.launch import Launched
from gpukiln.instances.leftovers import remove_unrecorded
from gpukiln.progress import Progress
from gpukiln.proof.signed import sign_verdict
from gpukiln.proof.tags import write_proof
from gpukiln.units import Duration
from gpukiln.verify.report import Live, ending
from gpukiln.verify.suite import run_suite
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer


def why_build(plan: ImagePlan, builds: Builds) -> list[str]:
    """What changed since the last image that was proven.

    Returns:
        A line that names the image, and one line a change; only one when there was none.
    """
    for build in builds.all():
        old = build.read()
        same = (old.plan.image, old.plan.cloud, old.plan.base.name) == (
            plan.image,
            plan.cloud,
            plan.base.name,
        )
        if same and old.verdict and old.verdict.proves:
            image = f"{old.bake.image_id if old.bake else 'the image'} of build {old.build_id}"
            changes = explain_change(old.plan.inputs, plan.inputs)
            if not changes:
                return [f"{image} had this digest, and is not there any more"]
            return [f"since {image}, verified on {old.verdict.started_at[:10]}:", *changes]
    return ["no image of it was proven on this machine yet"]


def build_image(
    plan: ImagePlan,
    cloud: Cloud,
    builds: Builds,
    progress: Progress,
    saved: Saved,
    signer: Signer | None = None,
) -> tuple[Build, Record]:
    """Bake an image, verify it on a machine booted from it, and write its SBOM and provenance.

    Args:
        builds: Where the record goes.
        saved: What it may take from earlier builds, and keeps for later ones.
        signer: The key to sign provenance and verdict with, or None.

    Returns:
        The build and its record; a failed check is in the verdict, not an exception.

    Raises:
        GpukilnError: It could not be baked or verified.
    """
    progress.show(Text(access_line(cloud)))  # or it can't be said: nothing is started then
    stage = saved.stages.newest() if saved.stages else None
    progress = Progress(builds.last_durations(plan, stage), console=progress.console)
    build = builds.create(plan.image)
    with build.locked(), scratch(build):
        record = Record(build.id, "running", plan)
        build.write(record)

        def made(image: Bake) -> None:
            nonlocal record
            record = replace(record, state="baked", bake=image)
            build.write(record)

        try:
            baked = bake(plan, cloud, build, progress, saved, stage, made=made)
            finish(cloud, baked.image_id)
            record = replace(record, durations_s=dict(progress.durations))
            build.write(record)
            subject = subject_of(plan, baked.image_id, build.id)
            verdict, machine = verify_image(subject, cloud, build.report_folder(1), progress)
            record = replace(
                record,
                state="verified",
                verdicts=(verdict,),
                durations_s=dict(progress.durations),  # what comes after is not in the record
                cost=spent(plan, progress.durations, machine),
            )
        except BaseException as error:
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "failed"
            message = error.message if isinstance(error, GpukilnError) else repr(error)
            if record.bake is None:
                _remove_unrecorded(cloud, build, error)
            on_demand = Launched("", plan.instance_types[0], "", spot=False)
            build.write(
                replace(
                    record,
                    state=state,
                    error=message,
                    durations_s=progress.durations,
                    cost=spent(
                        plan, progress.durations, on_demand if "verify" in progress.durations else None
                    ),
                )
            )
            if record.bake and isinstance(error, UnavailableError):
                # it may be for what the stages hold that the image does not boot or can't be reached
                _end_stages(saved, build, record.bake, progress, proven=False)
            raise
        build.write(record)
        try:
            write_proof(cloud, subject, verdict)
            attest(build, record, cloud, progress, signer)
            sign_verdict(cloud, subject, verdict, build.report_folder(1), signer, build)
        finally:
            _end_stages(saved, build, baked, progress, proven=verdict.proves)
    return build, record


def _remove_unrecorded(cloud: Cloud, build: Build, error: BaseException) -> None:
    """The bake may have ended while its AMI was made; what can't be removed is told beside the error."""
    try:
        remove_unrecorded(cloud, build.id)
    except GpukilnError as left:
        error.add_note(f"an AMI that no record knows may be left: {left.message}")


def _end_stages(saved: Saved, build: Build, baked: Bake, progress: Progress, *, proven: bool) -> None:
    """Remove the stages that no build shall go on from; what can't be removed is told and fails no build."""
    if saved.stages is None:
        return
    try:
        if proven:
            saved.stages.tidy()
        else:
            saved.stages.drop(build.id, baked.stage)
    except GpukilnError as error:
        progress.show(Text(f"{error.message}; what is left of stages is not used with `--stages off`"))


def attest(
    build: Build, record: Record, cloud: Cloud, progress: Progress, signer: Signer | None = None
) -> None:
    """Write SBOM and provenance of a judged image beside its record; what is there already stays.

    Args:
        build: Its folder, locked.
        record: Its record, written.
        cloud: Where the image is.
        signer: The key to sign the provenance with, or None.

    Raises:
        GpukilnError: They could not be written; image, record and verdict stay as they are.
    """
    from gpukiln.attest.attestation import STATEMENT, write_attestation  # noqa: PLC0415 - slow to import

    if (build.folder / STATEMENT).exists():
        return
    try:
        with progress.step("SBOM and provenance"):
            write_attestation(build, record, cloud, signer)
    except GpukilnError as error:
        error.add_note(
            f"the image is judged and recorded; `invoke ami.attest {build.id}` writes what is missing"
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
) -> tuple[Verdict, Launched]:
    """Boot a new machine from an image and judge it; the verdict is the caller's to keep.

    Args:
        folder: For the report.
        instance_types: The types to try, the best first; the first that it was built for when empty.
        spot: Whether the machine may be a spot instance.
        simulated: Whether it gets simulated GPUs, which are judged as far as that makes sense.

    Returns:
        The verdict, and the machine that it is about.

    Raises:
        BusyError: There is no capacity for any of the types now.
        IncompatibleError: The account's quota is too low, or the region has none of the types.
        UnavailableError: No machine could be started, or it could not be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
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
        live = Live(progress)
        with progress.step("verify"):
            verdict = run_suite(
                target,
                profile=subject.profile,
                out_dir=folder,
                on_start=live.start,
                on_check=live.check,
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
    """Turn failed checks into the command's failure.

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
