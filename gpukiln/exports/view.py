"""Exports and imports for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpukiln.exports.import_disk import DiskFile, ImportResult
from gpukiln.exports.run import ExportPlan, ExportResult
from gpukiln.units import Memory


def plan_lines(plan: ExportPlan) -> Iterator[str]:
    """What an export would write."""
    data = "" if plan.data_bytes is None else f", {Memory(plan.data_bytes).shown} of it data"
    yield f"{plan.image_id} -> {plan.output} ({plan.to})"
    yield f"a disk of {Memory(plan.disk_bytes).shown}{data}"
    yield "verified" if plan.verified else f"not verified: {plan.why_unverified}"
    yield from (f"will be missing: {line}" for line in _by_reason(plan.missing))
    for device in plan.others:
        yield f"not exported: the image's disk {device}, which is not its root"


def export_lines(export: ExportResult) -> Iterator[str]:
    """What an export wrote."""
    size, disk = Memory(export.bytes).shown, Memory(export.virtual_bytes).shown
    yield f"{export.output}: {export.to}, {size}, a disk of {disk}"
    yield f"SHA-256 {export.sha256}"
    if boots := export.boots_on:
        yield (
            f"boots by {', '.join(boots.firmware) or 'nothing'} "
            f"from {', '.join(boots.disks) or 'nothing'}: kernel {boots.kernel or 'none'}, "
            f"network cards {', '.join(boots.networks) or 'none'}"
        )
    else:
        yield f"what it boots on is not known: {export.boots_on_unknown}"
    yield from (f"with it: {file.name}" for file in export.files)
    yield from (f"missing: {line}" for line in _by_reason(export.missing))
    if not export.verified:
        yield "the image was not verified"


def _by_reason(missing: Mapping[str, str]) -> list[str]:
    """One line a reason."""
    reasons: dict[str, list[str]] = {}
    for file, reason in missing.items():
        reasons.setdefault(reason, []).append(file)
    return [f"{', '.join(files)}: {reason}" for reason, files in reasons.items()]


def import_plan_line(disk: DiskFile, region: str) -> str:
    """What an import would make."""
    return f"{disk.file}: {disk.form}, {disk.size_gib} GiB -> {disk.name} in {region}"


def import_lines(image: ImportResult) -> Iterator[str]:
    """What an import made."""
    yield f"{image.image_id} {image.name}{' (exists already)' if image.found else ''}"
    yield f"{image.architecture}, {image.boot_mode}, {image.size_gib} GiB, {image.snapshot_id}"
    where = f"{image.image_id} --region {image.region} --cloud {image.cloud}"
    yield f"not verified: `invoke ami.verify {where}` verifies it"
