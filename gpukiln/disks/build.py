"""Raw GPT disks with a bootloader, made without device nodes.

A disk is: GRUB's first stage in the MBR, GRUB's core image in a BIOS boot partition, GRUB for UEFI in an EFI
system partition (numbers 14 and 15, as in Debian's cloud images), and the ext4 root file system in partition
1, last on the disk so that it can grow. Disks that gpukiln built before it
added the EFI system partition, and imported disks, have their root elsewhere: the partition table says where.
"""

import struct
import tempfile
import uuid
from pathlib import Path

from gpukiln.disks.table import BIOS_BOOT_TYPE, ESP_TYPE, LINUX_ROOT_TYPE, SECTOR, root_partition
from gpukiln.errors import UnavailableError
from gpukiln.files import atomic_path
from gpukiln.programs import tool

# 1 MiB, the alignment that partitioning tools use.
BIOS_BOOT_START = 2048  # sectors
ESP_START = 4096  # sectors
ESP_SECTORS = 64 << 11  # FAT32, which UEFI asks for on a fixed disk (2.10, 13.3), begins at 33 MiB
ROOT_START = ESP_START + ESP_SECTORS
# What grub.cfg below uses, plus ext2 (which reads ext4) and part_gpt to find it.
GRUB_MODULES = [
    *("part_gpt", "ext2", "linux", "normal", "configfile", "search", "search_fs_uuid"),
    *("serial", "terminal", "gzio", "echo", "test"),
]
BIOS_MODULES = [*GRUB_MODULES, "biosdisk"]
# fat reads the ESP; all_video because a kernel without a video mode shows no console under UEFI.
EFI_MODULES = [*GRUB_MODULES, "fat", "all_video"]
EFI_FILE = "EFI/BOOT/BOOTX64.EFI"  # what firmware without a boot entry starts (UEFI 2.10, 3.5.1.1)
LAYOUT = (BIOS_BOOT_START, ESP_START, ROOT_START, *BIOS_MODULES, *EFI_MODULES)
"""The constants that change the disk: part of the base image's key, so that a change builds a new one."""


def build_disk(root: Path, disk: Path, *, size_gib: int) -> None:
    """Pack a root file system into a bootable disk.

    The root must hold kernels reached by /vmlinuz and /initrd.img, as Debian's kernel packages arrange.

    Args:
        root: The folder that becomes the root file system; its grub.cfg and fstab are written here.
        disk: The raw disk to create (sparse); it must not exist.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    root_uuid = str(uuid.uuid4())
    _write_boot_files(root, root_uuid)
    with atomic_path(disk) as partial:
        with partial.open("wb") as file:
            file.truncate(size_gib << 30)
        table = (
            "label: gpt\n"
            f"14 : start={BIOS_BOOT_START}, size={ESP_START - BIOS_BOOT_START}, type={BIOS_BOOT_TYPE}\n"
            f"15 : start={ESP_START}, size={ESP_SECTORS}, type={ESP_TYPE}\n"
            f"1 : start={ROOT_START}, type={LINUX_ROOT_TYPE}\n"
        )
        # --no-reread: the file is no block device, so there is no kernel to inform.
        tool("sfdisk", "--quiet", "--no-reread", str(partial), stdin=table)
        part = root_partition(partial)
        tool(
            # -d fills the file system from the folder, so that nothing is mounted. lazy_itable_init leaves
            # the inode tables sparse.
            *("mkfs.ext4", "-q", "-F", "-b", "4096", "-U", root_uuid, "-L", "root", "-d", str(root)),
            *("-E", f"offset={part.offset},lazy_itable_init=1", str(partial), f"{part.blocks_kib}k"),
        )
        _install_grub(partial)
        _install_grub_efi(partial, root_uuid)


def _write_boot_files(root: Path, root_uuid: str) -> None:
    (root / "etc/fstab").write_text(f"UUID={root_uuid} / ext4 rw,discard,errors=remount-ro 0 1\n")
    grub = root / "boot/grub"
    grub.mkdir(parents=True, exist_ok=True)
    (grub / "grub.cfg").write_text(
        "# Boots what /vmlinuz points at; `update-grub` on a running node replaces this file.\n"
        "serial --unit=0 --speed=115200\nterminal_input console serial\nterminal_output console serial\n"
        "set timeout=0\n"
        f"menuentry 'Debian' {{\n  search --no-floppy --fs-uuid --set=root {root_uuid}\n"
        f"  linux /vmlinuz root=UUID={root_uuid} ro console=tty0 console=ttyS0,115200\n"
        "  initrd /initrd.img\n}\n"
    )


def _install_grub(disk: Path) -> None:
    """Write GRUB's boot and core image to the disk; grub-install would need a device node.

    Offsets are GRUB's own (grub-core/boot/i386/pc/boot.S, diskboot.S): the first stage holds the sector of
    the core image at 0x5c; the core's first sector holds the sector of its second at 0x1f4.
    """
    modules = Path("/usr/lib/grub/i386-pc")
    with tempfile.TemporaryDirectory() as folder:
        core_file = Path(folder) / "core.img"
        tool(
            *("grub-mkimage", "-O", "i386-pc", "-d", str(modules), "-o", str(core_file)),
            *("-p", "(hd0,gpt1)/boot/grub", *BIOS_MODULES),
        )
        core = bytearray(core_file.read_bytes())
    # 440 bytes: behind them are the disk signature and the partition entries.
    boot = bytearray((modules / "boot.img").read_bytes()[:440])
    struct.pack_into("<Q", boot, 0x5C, BIOS_BOOT_START)
    struct.pack_into("<Q", core, 0x1F4, BIOS_BOOT_START + 1)
    if len(core) > (ESP_START - BIOS_BOOT_START) * SECTOR:
        raise UnavailableError(f"GRUB's core image has {len(core)} bytes, more than its partition")
    with disk.open("r+b") as file:
        file.write(boot)
        file.seek(BIOS_BOOT_START * SECTOR)
        file.write(core)


def _install_grub_efi(disk: Path, root_uuid: str) -> None:
    """Make the EFI system partition, with a GRUB that loads the configuration on the root file system.

    GRUB searches the root by its UUID, because the order of disks depends on the firmware.
    """
    with tempfile.TemporaryDirectory() as folder:
        # early.cfg is embedded into the image, because the ESP has no grub.cfg of its own.
        early, image = Path(folder) / "early.cfg", Path(folder) / "grub.efi"
        early.write_text(
            f"search --no-floppy --fs-uuid --set=root {root_uuid}\n"
            "set prefix=($root)/boot/grub\nconfigfile $prefix/grub.cfg\n"
        )
        tool(
            *("grub-mkimage", "-O", "x86_64-efi", "-d", "/usr/lib/grub/x86_64-efi", "-o", str(image)),
            *("-c", str(early), "-p", "/EFI/BOOT", *EFI_MODULES),
        )
        tool(
            # Without -s and -g mkfs.fat takes clusters and geometry from the size of the whole disk.
            *("mkfs.fat", "-F", "32", "-s", "1", "-g", "64/32", "-n", "EFI", "--offset", str(ESP_START)),
            *(str(disk), str(ESP_SECTORS * SECTOR >> 10)),
        )
        drive = f"{disk}@@{ESP_START * SECTOR}"
        target, folders = f"::{EFI_FILE}", [f"::{parent}" for parent in reversed(Path(EFI_FILE).parents[:-1])]
        tool("mmd", "-i", drive, *folders)
        tool("mcopy", "-i", drive, str(image), target)
