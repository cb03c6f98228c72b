"""What a disk boots on: the firmware that finds a bootloader, the devices that its kernel has drivers for."""

import re
from dataclasses import dataclass
from pathlib import Path

from gpukiln.disks.build import EFI_FILE
from gpukiln.disks.identify import has_file
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.table import read_table

DRIVERS = {
    "disks": {"virtio": "virtio_blk", "scsi": "virtio_scsi", "sata": "ahci", "nvme": "nvme"},
    "networks": {"virtio": "virtio_net", "e1000e": "e1000e", "vmxnet3": "vmxnet3"},
}


@dataclass(frozen=True)
class BootSupport:
    """What a disk boots on.

    Args:
        kernel: Release of its newest kernel; empty where it has none.
        firmware: bios, uefi.
        disks: Keys of `DRIVERS["disks"]`: what it may be attached to.
        networks: Keys of `DRIVERS["networks"]`, of the cards that hypervisors give.
    """

    kernel: str
    firmware: tuple[str, ...]
    disks: tuple[str, ...]
    networks: tuple[str, ...]


def find_boot_support(disk: Path) -> BootSupport:
    """Look into a raw disk.

    A driver counts that the kernel has; that it is in the initramfs, which a disk's must be, is the
    distribution's default on Debian and Ubuntu (MODULES=most), not on those of dracut's `hostonly`.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: The disk has no root file system, or a tool is missing or failed.
    """
    table = read_table(disk)
    firmware: tuple[str, ...] = ("bios",) if table.boot_code else ()
    if any(has_file(disk, part, EFI_FILE) for part in table.system_partitions):
        firmware += ("uefi",)
    with mounted_root(disk) as root:
        # where lib is a folder of its own; a link to usr/lib could lead to this computer's
        lib = root / ("usr/lib" if (root / "lib").is_symlink() else "lib")
        kernels = [path.parent for path in lib.glob("modules/*/modules.dep")]
        if not kernels:
            return BootSupport("", firmware, (), ())
        newest = max(kernels, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
        drivers = _drivers(newest)
    supported = {
        kind: tuple(name for name, driver in modules.items() if driver in drivers)
        for kind, modules in DRIVERS.items()
    }
    return BootSupport(newest.name, firmware, supported["disks"], supported["networks"])


def _drivers(modules: Path) -> set[str]:
    """Modules that a kernel has, also those that are part of it (kmod, modules.builtin)."""
    lines = [
        line.partition(":")[0]
        for name in ("modules.dep", "modules.builtin")
        for line in (modules / name).read_text().splitlines()
    ]
    return {Path(line).name.partition(".")[0].replace("-", "_") for line in lines}
