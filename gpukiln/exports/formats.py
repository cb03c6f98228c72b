"""The forms in which a disk leaves: a table, which `--to` names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from gpukiln.disks import qcow2, sparse
from gpukiln.disks.convert import compress, convert
from gpukiln.errors import UsageError
from gpukiln.exports.installer import write_installer
from gpukiln.exports.netboot import SEED, write_netboot
from gpukiln.progress import Meter, Progress


@dataclass(frozen=True)
class ExportFormat:
    """One form.

    Args:
        title: For whom it is.
        endings: Of file names; a file with another form's ending is refused.
        make: Makes it of a raw disk: the disk, where to write, the progress, `url` where it has one. It
            returns the SHA-256 of what it wrote where it knows it, else an empty string; what it writes may
            be a file or a folder.
        is_disk: Whether it is the raw disk itself: one of our own is taken as it is.
        smaller: Whether it is smaller than what the disk holds, so that room for that is not asked for.
        has_url: Whether a machine fetches something of it over HTTP.
        users: A folder in it that its user changes, of which no digest is kept.
    """

    title: str
    endings: tuple[str, ...]
    make: Callable[..., str]
    is_disk: bool = False
    smaller: bool = False
    has_url: bool = False
    users: str = ""


def format_of(to: str, output: Path) -> str:
    """The form that was asked for, by name or by the file's ending.

    Raises:
        UsageError: There is no such form, or the name says another one than the ending.
    """
    table = [f"{name}: {', '.join(form.endings)} ({form.title})" for name, form in FORMATS.items()]
    if to and to not in FORMATS:
        raise UsageError(
            f"--to {to}: there is no such form", details=tuple(table), hint=f"--to {'|'.join(FORMATS)}"
        )
    lengths = {ending: name for name, form in FORMATS.items() for ending in form.endings}
    ending = max((known for known in lengths if output.name.endswith(known)), key=len, default="")
    if not to and not ending:
        raise UsageError(
            f"{output.name} has no ending that says its form",
            details=tuple(table),
            hint=f"--to {'|'.join(FORMATS)}",
        )
    if to and ending and lengths[ending] != to:
        right_ending = next(iter(FORMATS[to].endings), "")
        raise UsageError(
            f"--to {to}, and {output.name} has the ending of {lengths[ending]}",
            hint=f"call it {output.name.removesuffix(ending)}{right_ending}, or leave out --to",
        )
    return to or lengths[ending]


def _raw(disk: Path, part: Path, progress: Progress) -> str:
    """A copy with the same holes; the digest of what is copied is made beside it."""
    meter = Meter(progress, disk.stat().st_size)
    with sparse.meanwhile(sparse.sha256, disk, moved=meter.add) as digest:
        sparse.copy(disk, part, lambda _: None)
        return digest.result()


def _zstd(disk: Path, part: Path, progress: Progress) -> str:
    return compress(disk, part, Meter(progress, disk.stat().st_size).add)


def _qemu_img(form: str, *options: str) -> Callable[[Path, Path, Progress], str]:
    def make(disk: Path, part: Path, progress: Progress) -> str:
        convert(disk, part, "raw", form, progress, *options)
        return ""

    return make


def _netboot(disk: Path, part: Path, progress: Progress, url: str) -> str:
    name = part.name.removeprefix(".").removesuffix(".part")  # what the folder is going to be called
    netboot = write_netboot(disk, part, url=url or None, name=name, say=progress.say)
    progress.show(
        Text(f"     a machine needs {netboot.memory_mib} MiB of memory at least: the root lies in it")
    )
    _show_lacks(netboot.missing_drivers, progress)
    return ""


def _installer(disk: Path, part: Path, progress: Progress, url: str) -> str:
    installer = write_installer(disk, part, url=url or None, say=progress.say)
    _show_lacks(installer.missing_drivers, progress)
    return installer.sha256


def _show_lacks(drivers: tuple[str, ...], progress: Progress) -> None:
    if drivers:
        progress.show(
            Text(f"     its kernel has no {', '.join(drivers)}: machines that need these do not start")
        )


FORMATS = {
    "qcow2": ExportFormat("QEMU, KVM, Proxmox, OpenStack", (".qcow2",), qcow2.write),
    "raw": ExportFormat("a disk as it is, with holes", (".raw", ".img"), _raw, is_disk=True),
    "raw.zst": ExportFormat("the same, compressed", (".raw.zst", ".img.zst", ".zst"), _zstd, smaller=True),
    # VMware's servers import no other form of it (vmware/govmomi: govc/USAGE.md, import.vmdk)
    "vmdk": ExportFormat(
        "VMware", (".vmdk",), _qemu_img("vmdk", "-o", "subformat=streamOptimized"), smaller=True
    ),
    # without force_size the size is one that cylinders, heads and sectors can tell (QEMU, block/vpc.c)
    "vhd": ExportFormat(
        "Hyper-V", (".vhd", ".vpc"), _qemu_img("vpc", "-o", "subformat=dynamic,force_size=on")
    ),
    "netboot": ExportFormat(
        "machines that boot from HTTP: a folder", (), _netboot, smaller=True, has_url=True, users=SEED
    ),
    "installer": ExportFormat(
        "a medium that writes the disk of a machine", (".iso",), _installer, smaller=True, has_url=True
    ),
}
