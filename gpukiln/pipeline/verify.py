"""Verifies an image that exists already, with its build on this computer or by its tags only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.bake import finish
from gpukiln.images.builds import Build
from gpukiln.images.cost import measured_cost
from gpukiln.images.orphans import scratch_folder
from gpukiln.images.subject import Subject, subject_of
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.locks import locked
from gpukiln.pipeline import steps
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.pipeline.verdict_tags import write_verdict_tags
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
        GpukilnError: The image could not be verified.
    """
    with ExitStack() as held:
        if build:
            # A second verification of the same build would overwrite the record's verdicts.
            held.enter_context(build.locked())
            held.enter_context(scratch_folder(build))
            record, subject = build.read(), subject_of_build(build)
            finish(cloud, subject.image_id)  # the build may have ended before it did that
            # The earlier durations are the estimate for this run.
            progress, folder = Progress(record.durations_s), build.report_folder(len(record.verdicts) + 1)
        else:
            progress, folder = Progress(), _new_folder(home, subject)
            # Commands that remove old report folders leave locked ones alone.
            held.enter_context(locked(folder / "lock"))
        verdict, machine = steps.verify_image(
            subject, cloud, folder, progress, instance_types=instance_types, spot=spot, simulated=simulated
        )
        if build:
            record = replace(
                record,
                state="verified",
                verdicts=(*record.verdicts, verdict),
                error="",
                durations_s={**record.durations_s, **progress.durations},
                cost=measured_cost(record.plan, progress.durations, machine, record.cost),
            )
            build.write(record)
        write_verdict_tags(cloud, subject, verdict)
        if build and not verdict.simulated:  # SBOM and provenance are for images that real machines verified
            steps.attest(build, record, cloud, progress, signer)
        sign_verdict(cloud, subject, verdict, folder, signer, build)
    return verdict, machine, folder


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
