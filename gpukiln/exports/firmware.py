"""Boot support of a disk: the firmware that finds its bootloader, the devices that its kernel can drive."""

import re
from dataclasses import dataclass
from pathlib import Path

from gpukiln.disks.build import EFI_FILE
from gpukiln.disks.identify import has_file
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.table import read_table

# Names of hypervisors' devices (QEMU's, VMware's) and the kernel modules that drive them, with underscores as
# modules.dep has some of them with dashes.
DRIVERS = {
    "disks": {"virtio": "virtio_blk", "scsi": "virtio_scsi", "sata": "ahci", "nvme": "nvme"},
    "networks": {"virtio": "virtio_net", "e1000e": "e1000e", "vmxnet3": "vmxnet3"},
}


@dataclass(frozen=True)
class BootSupport:
    """Firmware and devices that a disk can boot on.

    Args:
        kernel: Release of its newest kernel; empty where it has none.
        firmware: bios, uefi.
        disks: Keys of `DRIVERS["disks"]`: the buses that the disk may be attached to.
        networks: Keys of `DRIVERS["networks"]`: the hypervisors' network cards that the kernel drives.
    """

    kernel: str
    firmware: tuple[str, ...]
    disks: tuple[str, ...]
    networks: tuple[str, ...]


def find_boot_support(disk: Path) -> BootSupport:
    """Read partition table, bootloaders and drivers of a raw disk.

    A driver counts when the kernel has it. Whether the initramfs has it is not checked: it has on Debian and
    Ubuntu (MODULES=most), and need not where dracut packs the drivers of one machine only (`hostonly`).

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: The disk has no root file system, or a tool is missing or failed.
    """
    table = read_table(disk)
    # BIOS runs the boot code of the first sector, UEFI a file of fixed name on the EFI system partition.
    firmware: tuple[str, ...] = ("bios",) if table.boot_code else ()
    if any(has_file(disk, part, EFI_FILE) for part in table.system_partitions):
        firmware += ("uefi",)
    with mounted_root(disk) as root:
        # lib is a folder of its own, or a link; an absolute link to /usr/lib would lead to this computer's.
        lib = root / ("usr/lib" if (root / "lib").is_symlink() else "lib")
        kernels = [path.parent for path in lib.glob("modules/*/modules.dep")]
        if not kernels:
            return BootSupport("", firmware, (), ())
        # numbers, not text: 6.1.0-9 is older than 6.1.0-10
        newest = max(kernels, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
        drivers = _drivers(newest)
    supported = {
        kind: tuple(name for name, driver in modules.items() if driver in drivers)
        for kind, modules in DRIVERS.items()
    }
    return BootSupport(newest.name, firmware, supported["disks"], supported["networks"])


def _drivers(modules: Path) -> set[str]:
    """Names of the modules of a kernel, with those that are compiled into it."""
    # kmod writes both: modules.dep lists the files, modules.builtin what is in the kernel's image.
    lines = [
        line.partition(":")[0]
        for name in ("modules.dep", "modules.builtin")
        for line in (modules / name).read_text().splitlines()
    ]
    return {Path(line).name.partition(".")[0].replace("-", "_") for line in lines}
