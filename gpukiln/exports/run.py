"""Exports the disk of an image: read, prepared, converted, hashed, and renamed when all of it is written."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from gpukiln import programs
from gpukiln.clouds.base import Cloud
from gpukiln.clouds.tags import IMAGE_TAG, NOT_VERIFIED
from gpukiln.disks import sparse
from gpukiln.errors import BusyError, GpukilnError, RefusedError, UsageError
from gpukiln.exports import sidecars
from gpukiln.exports.firmware import BootSupport, find_boot_support
from gpukiln.exports.formats import FORMATS, format_of
from gpukiln.exports.prepare import check_options, prepare
from gpukiln.exports.source import Source, find_source, read_disk
from gpukiln.files import FULL, remove, remove_partial_of
from gpukiln.images.builds import Build
from gpukiln.locks import locked
from gpukiln.parsing import refuse_credentials
from gpukiln.pipeline.verdict_tags import summaries_from_tags
from gpukiln.progress import Meter, Progress
from gpukiln.state import state_home
from gpukiln.typed import dump

SCHEMA = 1


@dataclass(frozen=True)
class ExportOptions:
    """What to write.

    Args:
        output: The file, or the folder, of the result.
        to: One of `formats.FORMATS`; empty: by the ending of the file.
        unproven: Whether an image that was not verified is exported.
        force: Whether an existing output is replaced.
        datasource: nocloud or none: what cloud-init asks where there is no EC2; empty: as before.
        ssh_keys: Lines of an authorized_keys file, for the image's user.
        size_gib: The disk's size; None: as it is.
        url: Where the output will be served, for the formats that machines fetch; empty: see the format.
        direct: Whether a disk file of the embedded cloud is read in place, and not by the EBS direct APIs.
    """

    output: Path
    to: str = ""
    unproven: bool = False
    force: bool = False
    datasource: str = ""
    ssh_keys: tuple[str, ...] = ()
    size_gib: int | None = None
    url: str = ""
    direct: bool = True


@dataclass(frozen=True)
class ExportPlan:
    """What an export would do."""

    image_id: str
    output: Path
    to: str
    disk_bytes: int
    data_bytes: int | None
    verified: bool
    why_unverified: str
    missing: dict[str, str]
    others: tuple[str, ...]


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Args:
        bytes: The size of the file.
        virtual_bytes: The size of the disk that is in it.
        sha256: The digest of the file; of a folder the digest of its list of digests.
        files: The files next to it.
        missing: By the title of a document that was not written, the reason.
        boots_on: Firmware and devices that the disk boots on; None: unknown, see `boots_on_unknown`.
        blocks_read: Blocks that this run read by the EBS direct APIs; None: the disk is on this machine.
        blocks_kept: Blocks of an earlier run that was interrupted.
        durations_s: Seconds of each step.
    """

    schema: int = field(default=SCHEMA, kw_only=True)
    image_id: str
    output: Path
    to: str
    bytes: int
    virtual_bytes: int
    sha256: str
    verified: bool
    files: tuple[Path, ...]
    missing: dict[str, str]
    boots_on: BootSupport | None
    boots_on_unknown: str
    blocks_read: int | None
    blocks_kept: int | None
    durations_s: dict[str, float]


@dataclass(frozen=True)
class _WorkFiles:
    """Files that have no final name yet."""

    part: Path
    disk: Path
    journal: Path

    def remove(self, *, but: Path | None = None) -> None:
        for path in (self.part, self.disk, self.journal):
            if path != but:
                remove(path)


def plan(options: ExportOptions, cloud: Cloud, image_id: str, build: Build | None) -> ExportPlan:
    """Check everything that an export needs.

    Raises:
        UsageError: The image, the format, the folder or the size is wrong.
        RefusedError: The image was not verified, or the output exists.
    """
    source, to, _ = _check_request(options, cloud, image_id, build)
    why = _why_unverified(source, build)
    return ExportPlan(
        image_id=image_id,
        output=options.output,
        to=to,
        disk_bytes=(options.size_gib or source.size_gib) << 30,
        data_bytes=sparse.data_bytes(source.disk) if source.disk else None,
        verified=not why,
        why_unverified=why,
        missing=sidecars.find_sidecars(source, build).missing,
        others=source.others,
    )


def export(
    options: ExportOptions, cloud: Cloud, image_id: str, build: Build | None, progress: Progress
) -> ExportResult:
    """Write an image's disk and the files next to it; a file under the final name is always whole.

    An export by the EBS direct APIs that was interrupted resumes when it is called again.

    Raises:
        GpukilnError: See `plan`; or the disk is full, a tool failed, or EBS does not return the blocks.
    """
    source, to, work = _check_request(options, cloud, image_id, build)
    with _output_lock(options.output), _report_disk_full(options.output.parent):
        remove(work.part)
        for path in (
            work.part,
            work.journal,
            *sidecars.sidecar_paths(options.output),
        ):  # of a run that was killed
            remove_partial_of(path)
        moved, disk = None, source.disk
        try:
            if disk is None:
                with progress.step("read the disk"):
                    moved = _read(cloud, source, work, progress)
                disk = work.disk
            if options.datasource or options.ssh_keys or options.size_gib:
                with progress.step("prepare the disk"):
                    disk = _prepare_disk(options, disk, work, progress)
            # Before the conversion, which may rename the raw disk.
            virtual, (boots, why) = disk.stat().st_size, _boot_support(disk)
            with progress.step(f"write {to}"):
                digest, written = _write_output(options, to, disk, work, progress)
            with progress.step("checksum"), ThreadPoolExecutor(1) as pool:
                # The disk is slow, so hashing does not wait for it.
                synced = pool.submit(_sync_files, written)
                digests = _digests(options.output, written, digest, FORMATS[to].users, progress)
                synced.result()
        except BaseException as error:
            remove(work.part)
            # Only a disk read from EBS with its journal can be resumed.
            if source.disk is not None or not work.journal.exists():
                work.remove()
            else:
                note = f"the blocks that were read stay in {work.disk}: the next run reads only the rest"
                if isinstance(error, GpukilnError):
                    error.add_note(note)
                else:  # commands print no notes of KeyboardInterrupt
                    progress.show(Text(note))
            raise
        known = sidecars.find_sidecars(source, build)
        about = _about_document(source, options, to, written, virtual, digests, build)
        # The old output goes only when the new one is complete.
        if options.force:
            sidecars.remove_disk(options.output)
        files = sidecars.write(options.output, digests, about, known)
        work.remove(but=written)
        # Last: an output that exists is not written again, so everything else must be done before.
        written.replace(options.output)
        _sync(options.output.parent)
    return ExportResult(
        image_id=image_id,
        output=options.output,
        to=to,
        bytes=sum(file.stat().st_size for file in sidecars.files_below(options.output)),
        virtual_bytes=virtual,
        sha256=_overall_digest(digests),
        verified=not _why_unverified(source, build),
        files=tuple(files),
        missing=known.missing,
        boots_on=boots,
        boots_on_unknown=why,
        blocks_read=moved.moved if moved else None,
        blocks_kept=moved.kept if moved else None,
        durations_s=dict(progress.durations),
    )


def _check_request(
    options: ExportOptions, cloud: Cloud, image_id: str, build: Build | None
) -> tuple[Source, str, _WorkFiles]:
    to, output = format_of(options.to, options.output), options.output
    if options.url and not FORMATS[to].has_url:
        fetched = " and ".join(name for name, form in FORMATS.items() if form.has_url)
        raise UsageError(f"--url has no effect for {to}", hint=f"leave it out; it is for {fetched}")
    # The address is written into boot files, which every machine can read.
    refuse_credentials(options.url, "--url", where="the boot files")
    check_options(options.datasource, options.ssh_keys)
    if not output.parent.is_dir():
        raise UsageError(
            f"there is no folder {output.parent}", hint="make it, or name a file in another folder"
        )
    if (output.exists() or output.is_symlink()) and not options.force:
        raise RefusedError(f"{output} exists", hint="name another file, or replace it with --force")
    source = find_source(cloud, image_id, direct=options.direct)
    if options.size_gib is not None and options.size_gib < source.size_gib:
        raise UsageError(
            f"--size {options.size_gib} GiB is less than the disk's size, {source.size_gib} GiB",
            hint=f"--size {source.size_gib}GiB or more, or leave it out",
        )
    if (why := _why_unverified(source, build)) and not options.unproven:
        which = build.id if build else f"{image_id} --region {source.region} --cloud {source.cloud}"
        raise RefusedError(
            f"{image_id} was not verified: {why}",
            hint=f"`invoke ami.verify {which}` verifies it; --unproven exports it as it is",
        )
    name = output.name
    return (
        source,
        to,
        _WorkFiles(*(output.with_name(f".{name}.{end}") for end in ("part", "disk", "journal"))),
    )


def _why_unverified(source: Source, build: Build | None) -> str:
    """Why an image does not count as verified, by its tags and its build's record; empty: it does."""
    # Both are read: a failed verdict counts even where only one of them has it.
    verdicts = summaries_from_tags(source.image_id, source.tags)
    known = build.read().newest_verdicts if build else {}
    failed = [name for name, verdict in verdicts.items() if not verdict.passed]
    failed += [
        name
        for name, verdict in known.items()
        if not verdict.passed_without_simulation and name not in failed
    ]
    if failed:
        return f"it failed on {', '.join(failed)}"
    if not verdicts:
        return "it has no verdict of a machine"
    if source.tags.get(IMAGE_TAG, NOT_VERIFIED) == NOT_VERIFIED:
        return f"by its tag {IMAGE_TAG}"
    return ""


def _read(cloud: Cloud, source: Source, work: _WorkFiles, progress: Progress) -> Any:
    meters: list[Meter] = []

    def begin(count: int) -> None:
        programs.require_space(work.disk.parent, count)
        meters.append(Meter(progress, count))

    return read_disk(
        cloud,
        source,
        work.disk,
        work.journal,
        begin=begin,
        moved=lambda count: meters[0].add(count),  # noqa: PLW0108 - it is there later
    )


def _prepare_disk(options: ExportOptions, disk: Path, work: _WorkFiles, progress: Progress) -> Path:
    """A changed copy of the disk; after the first change the read from EBS can't be resumed."""
    if disk != work.disk:
        programs.require_space(work.disk.parent, sparse.data_bytes(disk))
        meter = Meter(progress, sparse.data_bytes(disk))
        remove(work.disk)  # a killed run may still have the old file mounted
        sparse.copy(disk, work.disk, meter.add)
    prepare(
        work.disk,
        datasource=options.datasource,
        size_gib=options.size_gib,
        ssh_keys=options.ssh_keys,
        begin=lambda: work.journal.unlink(missing_ok=True),
    )
    return work.disk


def _boot_support(disk: Path) -> tuple[BootSupport | None, str]:
    """Boot support of a disk, or why it is unknown."""
    # An imported disk may have a layout that gpukiln can't read; that stops no export.
    try:
        return find_boot_support(disk), ""
    except GpukilnError as error:
        return None, str(error)


def _write_output(
    options: ExportOptions, to: str, disk: Path, work: _WorkFiles, progress: Progress
) -> tuple[str, Path]:
    """Write the output; return its digest, where it is known already, and its temporary path."""
    form = FORMATS[to]
    if form.is_disk and disk == work.disk:
        return "", disk
    # Holes are kept, so only the data of the disk needs space.
    if not form.smaller:
        programs.require_space(work.part.parent, sparse.data_bytes(disk))
    address = {"url": options.url} if form.has_url else {}
    return form.make(disk, work.part, progress, **address), work.part


def _digests(output: Path, part: Path, digest: str, users: str, progress: Progress) -> dict[str, str]:
    """SHA-256 by final file name.

    Args:
        users: A folder that users change, which is left out.
    """
    if digest:
        return {output.name: digest}
    files = [file for file in sidecars.files_below(part) if not users or (part / users) not in file.parents]
    meter = Meter(progress, sum(file.stat().st_size for file in files))
    return {
        str(Path(output.name) / file.relative_to(part)) if file != part else output.name: sparse.sha256(
            file, meter.add
        )
        for file in files
    }


def _overall_digest(digests: dict[str, str]) -> str:
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256(
        "".join(f"{file_digest}  {name}\n" for name, file_digest in digests.items()).encode()
    ).hexdigest()


def _about_document(
    source: Source,
    options: ExportOptions,
    to: str,
    part: Path,
    virtual: int,
    digests: dict[str, str],
    build: Build | None,
) -> dict[str, Any]:
    """The document of FILE.json, which `ami.import` reads too."""
    verdicts = summaries_from_tags(source.image_id, source.tags)
    return {
        "schema": SCHEMA,
        "file": options.output.name,
        "to": to,
        "bytes": sum(file.stat().st_size for file in sidecars.files_below(part)),
        "virtual_bytes": virtual,
        "sha256": _overall_digest(digests),
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "image": {
            name: value
            for name, value in dump(source).items()
            if name in ("image_id", "name", "region", "cloud", "architecture", "boot_mode", "snapshot_id")
        },
        "verified": not _why_unverified(source, build),
        "verdicts": [dump(verdict) for verdict in verdicts.values()],
        "changed": {  # differences from the disk that was verified
            **({"datasource": options.datasource} if options.datasource else {}),
            **({"ssh_keys": len(options.ssh_keys)} if options.ssh_keys else {}),
            **({"size_gib": options.size_gib} if options.size_gib else {}),
        },
        "tags": {name: value for name, value in source.tags.items() if name.startswith("gpukiln:")},
    }


def _sync_files(output: Path) -> None:
    for file in sidecars.files_below(output):
        _sync(file)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _output_lock(output: Path) -> Iterator[None]:
    folder = state_home() / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:16]

    busy = BusyError(f"another process writes {output}", hint="wait for it, or name another file")
    with locked(folder / f"{name}.lock", busy=busy):
        yield


@contextmanager
def _report_disk_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise programs.disk_full(folder) from error
        raise
