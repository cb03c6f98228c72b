"""The formats of an exported disk: the table that `--to` names."""

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
    """A format.

    Args:
        title: Who uses it.
        endings: Endings of file names; a file with another format's ending is refused.
        make: Writes a raw disk in this format. Its arguments: the disk, the output, the progress, and `url`
            where `has_url` is set. It returns the SHA-256 of the output where it computed one, else an empty
            string; the output may be a file or a folder.
        is_disk: Whether it is the raw disk itself: a temporary raw disk is renamed instead of copied.
        smaller: Whether the output is smaller than the data of the disk, so that the free space for that is
            not checked.
        has_url: Whether a machine fetches a part of it over HTTP.
        users: A folder in it that its user changes; it is left out of the digests.
    """

    title: str
    endings: tuple[str, ...]
    make: Callable[..., str]
    is_disk: bool = False
    smaller: bool = False
    has_url: bool = False
    users: str = ""


def format_of(to: str, output: Path) -> str:
    """The format that is named, or that the file's ending implies.

    >>> format_of("", Path("gpu.raw.zst"))
    'raw.zst'
    >>> format_of("netboot", Path("/srv/http/gpu"))
    'netboot'

    Raises:
        UsageError: There is no such format, or name and ending contradict each other.
    """
    table = [f"{name}: {', '.join(form.endings)} ({form.title})" for name, form in FORMATS.items()]
    if to and to not in FORMATS:
        raise UsageError(
            f"--to {to}: there is no such format", details=tuple(table), hint=f"--to {'|'.join(FORMATS)}"
        )
    lengths = {ending: name for name, form in FORMATS.items() for ending in form.endings}
    # the longest: .raw.zst ends with .zst too
    ending = max((known for known in lengths if output.name.endswith(known)), key=len, default="")
    if not to and not ending:
        raise UsageError(
            f"{output.name} has no ending of a known format",
            details=tuple(table),
            hint=f"--to {'|'.join(FORMATS)}",
        )
    if to and ending and lengths[ending] != to:
        right_ending = next(iter(FORMATS[to].endings), "")
        raise UsageError(
            f"--to {to}, and {output.name} has the ending of {lengths[ending]}",
            hint=f"name it {output.name.removesuffix(ending)}{right_ending}, or leave out --to",
        )
    return to or lengths[ending]


def _raw(disk: Path, part: Path, progress: Progress) -> str:
    """Copy the disk with its holes, and hash it meanwhile."""
    # In a second thread: the kernel copies (copy_file_range), which leaves this process idle.
    meter = Meter(progress, disk.stat().st_size)
    with sparse.run_alongside(sparse.sha256, disk, moved=meter.add) as digest:
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
    # the folder's final name, which its files contain
    name = part.name.removeprefix(".").removesuffix(".part")
    netboot = write_netboot(disk, part, url=url or None, name=name, say=progress.say)
    progress.show(
        Text(f"     a machine needs at least {netboot.memory_mib} MiB of memory, which holds the root")
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
            Text(f"     its kernel lacks {', '.join(drivers)}: machines that need these drivers do not start")
        )


FORMATS = {
    "qcow2": ExportFormat("QEMU, KVM, Proxmox, OpenStack", (".qcow2",), qcow2.write),
    "raw": ExportFormat("a disk as it is, with holes", (".raw", ".img"), _raw, is_disk=True),
    "raw.zst": ExportFormat("the same, compressed", (".raw.zst", ".img.zst", ".zst"), _zstd, smaller=True),
    # VMware's servers import no other kind of vmdk (vmware/govmomi: govc/USAGE.md, import.vmdk)
    "vmdk": ExportFormat(
        "VMware", (".vmdk",), _qemu_img("vmdk", "-o", "subformat=streamOptimized"), smaller=True
    ),
    # without force_size QEMU rounds the size to cylinders, heads and sectors (QEMU, block/vpc.c)
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
