"""Verifies an image that exists already, with its build on this computer or by its tags only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.bake import finish
from gpukiln.images.builds import Build, Record
from gpukiln.images.cost import measured_cost
from gpukiln.images.orphans import scratch_folder
from gpukiln.images.subject import Subject, subject_of
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.locks import locked
from gpukiln.pipeline import steps
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.pipeline.verdict_tags import require_tag_space, write_verdict_tags
from gpukiln.progress import Progress
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

FOLDER = "verify"


def subject_of_build(build: Build) -> Subject:
    """The image of a build.

    Raises:
        UsageError: The build has no image.
    """
    record = build.read()
    if record.bake is None:
        raise UsageError(
            f"build {build.id} has no image: it is {record.state}", hint="`invoke ami.list` shows others"
        )
    return subject_of(record.plan, record.bake.image_id, build.id)


def verify_again(
    subject: Subject,
    cloud: Cloud,
    build: Build | None,
    home: Path,
    *,
    instance_types: Sequence[str] = (),
    spot: bool = False,
    simulated: bool = False,
    signer: Signer | None = None,
) -> tuple[Verdict, LaunchedMachine, Path]:
    """Verify an image on the first of these instance types with capacity, and tag it with the verdict.

    Args:
        build: Its build, whose record gets the verdict; None: only tags and report have the verdict.
        home: The state folder.
        instance_types: The types to try, the best first; the first that it was built for when empty.
        spot: Whether the machine may be a spot instance.
        simulated: Whether the machine gets simulated GPUs: a rehearsal that changes no tag of the image.
        signer: The key to sign the verdict with; None: it is not signed.

    Returns:
        The verdict, its machine, and the folder of its report.

    Raises:
        RefusedError: The image has too many tags.
        GpukilnError: The image could not be verified.
    """
    if not simulated:
        # Before a machine is started, whose verdict could not be written.
        require_tag_space(cloud, subject.image_id, instance_types or subject.instance_types[:1])
    with verification_run(subject, cloud, build, home) as run:
        verdict, machine = steps.verify_image(
            run.subject,
            cloud,
            run.folder,
            run.progress,
            instance_types=instance_types,
            spot=spot,
            simulated=simulated,
        )
        if build and run.record:
            record = replace(
                run.record,
                state="verified",
                verdicts=(*run.record.verdicts, verdict),
                error="",
                durations_s={**run.record.durations_s, **run.progress.durations},
                cost=measured_cost(run.record.plan, run.progress.durations, machine, run.record.cost),
            )
            build.write(record)
        write_verdict_tags(cloud, run.subject, verdict)
        # SBOM and provenance are for images that real machines verified.
        if build and run.record and not verdict.simulated:
            steps.attest(build, record, cloud, run.progress, signer)
        sign_verdict(cloud, run.subject, verdict, run.folder, signer, build)
    return verdict, machine, run.folder


@dataclass(frozen=True)
class VerificationRun:
    """The verification of an image that exists already, while it runs.

    Args:
        record: Of its build; None: another computer built it.
        folder: For the report.
    """

    subject: Subject
    record: Record | None
    progress: Progress
    folder: Path


@contextmanager
def verification_run(
    subject: Subject, cloud: Cloud, build: Build | None, home: Path, *, in_cluster: bool = False
) -> Iterator[VerificationRun]:
    """Lock the build, or the folder of the report where another computer built the image.

    Args:
        home: The state folder.
        in_cluster: Whether the image is verified as a node of a cluster, which has reports of its own.
    """
    with ExitStack() as held:
        if build is None:
            folder = _new_folder(home, subject)
            # Commands that remove old report folders leave locked ones alone.
            held.enter_context(locked(folder / "lock"))
            yield VerificationRun(subject, None, Progress(), folder)
            return
        # A second verification of the same build would overwrite the record's verdicts.
        held.enter_context(build.locked())
        held.enter_context(scratch_folder(build))
        record, subject = build.read(), subject_of_build(build)
        finish(cloud, subject.image_id)  # the build may have ended before it did that
        folder = (
            build.cluster_report_folder(len(record.cluster_verdicts) + 1)
            if in_cluster
            else build.report_folder(len(record.verdicts) + 1)
        )
        # The earlier durations are the estimate for this run.
        yield VerificationRun(subject, record, Progress(record.durations_s), folder)


def _new_folder(home: Path, subject: Subject) -> Path:
    reports = home / FOLDER / subject.image_id
    reports.mkdir(parents=True, exist_ok=True)
    # Reports have names and addresses of machines.
    reports.parent.chmod(0o700)
    folder = reports / str(max((int(report.name) for report in reports.glob("[0-9]*")), default=0) + 1)
    folder.mkdir()
    return folder


def report_folders(home: Path) -> list[Path]:
    """Folders of the reports on images that other computers built."""
    return [folder for folder in (home / FOLDER).glob("ami-*/*") if folder.is_dir()]
