"""Checks whether an image and a workload fit a machine, before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from gpukiln.catalog import compat, cuda
from gpukiln.catalog.gpus import Gpu, gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.load import version_key
from gpukiln.catalog.workloads import WorkloadRequirements
from gpukiln.clouds.base import Cloud
from gpukiln.clouds.ec2 import require_image
from gpukiln.compatibility import GUIDE
from gpukiln.errors import UsageError
from gpukiln.findings import Finding, Severity

if TYPE_CHECKING:  # slow to import, and only images need it
    from gpukiln.images.builds import Record
    from gpukiln.images.subject import Subject

BINARY = "CUDA C++ Programming Guide, Binary Compatibility"


def subject_of_record(record: Record) -> Subject:
    """The contents of the image that a build made.

    Raises:
        UsageError: It made no image.
    """
    from gpukiln.images.subject import subject_of  # noqa: PLC0415 - see above

    if record.bake is None:
        raise UsageError(f"build {record.build_id} has no image: {record.state}")
    return subject_of(record.plan, record.bake.image_id, record.build_id)


def subject_of_ami(cloud: Cloud, image_id: str) -> Subject:
    """The contents of an AMI that gpukiln built, from its tags.

    Raises:
        UsageError: There is no such AMI, or gpukiln did not build it.
        UnavailableError: The cloud can't be asked.
    """
    from gpukiln.images.subject import subject_from_tags  # noqa: PLC0415 - see above
    from gpukiln.instances.tags import tags_of  # noqa: PLC0415

    return subject_from_tags(image_id, tags_of(describe_ami(cloud, image_id)))


def describe_ami(cloud: Cloud, image_id: str) -> dict[str, Any]:
    """An AMI as DescribeImages gives it.

    Raises:
        UsageError: There is no such AMI.
        UnavailableError: The cloud can't be asked.
    """
    return require_image(cloud, image_id, hint="--cloud and --regions say where to look")


def fit(
    machine: str, *, image: Subject | None, workload: WorkloadRequirements | None, today: date
) -> tuple[Finding, ...]:
    """The findings about an image and a workload on a machine; an error can never work.

    Args:
        image: None: not known, so nothing is said of it.
        workload: None: none was named.

    Raises:
        UsageError: The catalogue does not know the machine.
    """
    findings: list[Finding] = []
    if image is None:
        alone = compat.check_instance_type(machine, architecture=instance_type(machine).arch)
        for finding in alone:  # whether it has the GRID driver, an image says
            severity: Severity = "warning" if finding.id == "grid-only" else finding.severity
            findings.append(replace(finding, severity=severity, object=machine))
    else:
        from gpukiln.images.subject import machine_findings  # noqa: PLC0415 - see above

        findings += machine_findings(image, [machine])
        findings += compat.check_driver(image.driver, image.modules, today=today)
    if workload is not None:
        findings += (
            replace(finding, object=machine) for finding in _workload_findings(workload, machine, image)
        )
    return tuple(dict.fromkeys(findings))


def _workload_findings(
    workload: WorkloadRequirements, machine: str, image: Subject | None
) -> Iterator[Finding]:
    facts = instance_type(machine)
    board = gpu(facts.gpu)
    title, source = workload.title, workload.source
    if facts.arch not in workload.arch:
        message = f"{title} is built for {' and '.join(workload.arch)}, and {machine} is {facts.arch}"
        hint = "a machine of that architecture"
        yield Finding("workload-architecture", "error", message, remedy=hint, source=source)
    if board.cc is None:
        message = f"{title} runs on NVIDIA's GPUs, and {machine} has a {board.manufacturer} {board.name}"
        yield Finding("not-nvidia", "error", message, remedy="a machine with an NVIDIA GPU", source=source)
        return
    # Compared as numbers: as text 10.0 would be less than 9.0.
    if workload.least_cc and version_key(board.cc) < version_key(workload.least_cc):
        message = f"{title} needs compute capability {workload.least_cc}, {board.name} has {board.cc}"
        hint = "a newer GPU, or an older release of it"
        yield Finding("workload-capability", "error", message, remedy=hint, source=source)
    built_for = (facts.arch == "arm64" and workload.built_for_arm64) or workload.built_for
    if built_for and not _has_code(built_for, workload.ptx, board):
        message = f"{title} for {facts.arch} has no code for {board.name} (compute capability {board.cc})"
        hint = f"it is built for {', '.join(built_for)}: another build, or another GPU"
        yield Finding("workload-build", "error", message, remedy=hint, source=f"{source}; {BINARY}")
    if workload.cuda and not built_for and (image is None or workload.cuda != image.cuda):
        yield from compat.check_cuda_gpu(workload.cuda, machine)
    yield from _driver_findings(workload, machine, image)


def _driver_findings(
    workload: WorkloadRequirements, machine: str, image: Subject | None
) -> Iterator[Finding]:
    least = workload.least_driver
    if image is None:
        # Without an image only the requirement can be shown: which driver there is, the image says.
        floors = {cuda.needs(workload.cuda).first: GUIDE} if workload.cuda else {}
        if least:
            floors[least] = workload.source
        needed = max(floors, key=version_key)
        message = f"{workload.title} needs driver {needed} or later"
        hint = "--image says which driver there is"
        yield Finding("workload-driver", "warning", message, remedy=hint, source=floors[needed])
        return
    if least and version_key(image.driver) < version_key(least):
        message = f"{workload.title} needs driver {least} or later, {image.image_id} has {image.driver}"
        hint = f"{compat.branch_hint(least)} when the image is built, or an older release of it"
        yield Finding("workload-driver", "error", message, remedy=hint, source=workload.source)
    if workload.cuda and workload.cuda != image.cuda:  # the image's own version is checked with the image
        yield from compat.check_cuda(workload.cuda, image.driver, [machine])


def _has_code(built_for: tuple[str, ...], ptx: str | None, board: Gpu) -> bool:
    """Whether machine code runs on a GPU, or PTX is compiled there."""
    major, minor = version_key(board.cc or "0.0")
    for capability in built_for:
        built_major, built_minor = version_key(capability)
        if built_major == major and built_minor <= minor:
            return True
    # PTX is compiled by the driver for the same and for newer compute capabilities.
    return ptx is not None and (major, minor) >= version_key(ptx)
