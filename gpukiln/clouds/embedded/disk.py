"""Raw GPT disks with a bootloader, made and mounted without partition nodes of loop devices.

A disk is: GRUB's first stage in the MBR, GRUB's core image in a BIOS boot partition, GRUB for UEFI in an EFI
system partition (numbers 14 and 15, as in Debian's cloud images), and the ext4 root file system in partition
1, last on the disk so that it can grow. Disks of before the EFI system partition, and other people's, have
their root elsewhere: where it is, the partition table says.
"""

import contextlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.loop import LoopDevice
from gpukiln.errors import BusyError, UnavailableError
from gpukiln.files import whole_or_not
from gpukiln.locks import hold, locked
from gpukiln.parsing import parse_json
from gpukiln.units import Memory

MOUNTS = Path("/run/gpukiln-mounts")  # only root mounts, and a boot empties it
SECTOR = 512  # bytes
BIOS_BOOT_START = 2048  # sectors
ESP_START = 4096  # sectors
ESP_SECTORS = 64 << 11  # FAT32, which UEFI asks for on a fixed disk (2.10, 13.3), begins at 33 MiB
ROOT_START = ESP_START + ESP_SECTORS
BIOS_BOOT_TYPE = "21686148-6449-6E6F-744E-656564454649"
ESP_TYPE = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
LINUX_ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"
# The likeliest first: of this architecture (Discoverable Partitions Specification), any Linux, an MBR's.
ROOT_TYPES = (
    LINUX_ROOT_TYPE,
    "0FC63DAF-8483-4772-8E79-3D69D8477DE4",
    "83",
)
GROWTH = 64 << 20  # bytes behind the root partition that are worth to be taken; volumes grow by whole GiB
ROOM = 2 << 30  # bytes to be free beyond a copy before a disk is copied
GRUB_MODULES = [
    "part_gpt",
    "ext2",
    "linux",
    "normal",
    "configfile",
    "search",
    "search_fs_uuid",
    "serial",
    "terminal",
    "gzio",
    "echo",
    "test",
]
BIOS_MODULES = [*GRUB_MODULES, "biosdisk"]
EFI_MODULES = [*GRUB_MODULES, "fat", "all_video"]
EFI_FILE = "EFI/BOOT/BOOTX64.EFI"  # what a firmware starts that was told nothing (UEFI 2.10, 3.5.1.1)
OUTSIDE = "user.gpukiln.outside"  # extended attribute of a disk's file
LAYOUT = (BIOS_BOOT_START, ESP_START, ROOT_START, *BIOS_MODULES, *EFI_MODULES)
"""What of this module can change a disk."""


@dataclass(frozen=True)
class Partition:
    """A partition.

    Args:
        offset: Its first byte.
        size: Bytes.
        type: Of a GPT its type's GUID in capital letters, of an MBR its number.
    """

    number: int
    offset: int
    size: int
    type: str


def run(*command: str, stdin: str | None = None) -> str:
    """Run a tool and return what it printed.

    Args:
        command: The tool and its arguments.
        stdin: Text for its standard input.

    Returns:
        Its standard output.

    Raises:
        UnavailableError: The tool is missing or failed; the details are the end of its output.
    """
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnavailableError(
            f"{command[0]} is not installed",
            hint="scripts/run installs what is missing: call it through that",
        ) from None
    if done.returncode:
        tail = tuple((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise UnavailableError(f"{command[0]} failed with exit code {done.returncode}", details=tail)
    return done.stdout


def build_disk(root: Path, disk: Path, *, size_gib: int) -> None:
    """Pack a root file system into a bootable disk.

    The root must hold kernels reached by /vmlinuz and /initrd.img, as Debian's kernel packages arrange.

    Args:
        root: The folder that becomes the root file system; its grub.cfg and fstab are written here.
        disk: The raw disk to make (sparse); it must not exist.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    root_uuid = str(uuid.uuid4())
    _write_boot_files(root, root_uuid)
    with whole_or_not(disk) as partial:
        with partial.open("wb") as file:
            file.truncate(size_gib << 30)
        table = (
            "label: gpt\n"
            f"14 : start={BIOS_BOOT_START}, size={ESP_START - BIOS_BOOT_START}, type={BIOS_BOOT_TYPE}\n"
            f"15 : start={ESP_START}, size={ESP_SECTORS}, type={ESP_TYPE}\n"
            f"1 : start={ROOT_START}, type={LINUX_ROOT_TYPE}\n"
        )
        run("sfdisk", "--quiet", "--no-reread", str(partial), stdin=table)
        part = root_partition(partial)
        run(
            *("mkfs.ext4", "-q", "-F", "-b", "4096", "-U", root_uuid, "-L", "root", "-d", str(root)),
            *("-E", f"offset={part.offset},lazy_itable_init=1", str(partial), f"{_blocks_kib(part)}k"),
        )
        _install_grub(partial)
        _install_grub_efi(partial, root_uuid)


def partitions(disk: Path) -> list[Partition]:
    """The partitions of a disk, in the order of its table.

    Raises:
        UnavailableError: It has no partition table that sfdisk knows.
    """
    table = _table(disk)
    sector = int(table.get("sectorsize", SECTOR))
    return [
        Partition(
            number=int(re.sub(r".*\D", "", part["node"])),
            offset=int(part["start"]) * sector,
            size=int(part["size"]) * sector,
            type=str(part["type"]).upper(),
        )
        for part in table.get("partitions", [])
    ]


def _table(disk: Path) -> dict[str, Any]:
    table: dict[str, Any] = parse_json(run("sfdisk", "--json", str(disk)))["partitiontable"]
    return table


def root_partition(disk: Path) -> Partition:
    """Where the root file system of a disk is.

    Returns:
        Of the partitions with the likeliest type the largest.

    Raises:
        UnavailableError: The disk has none.
    """
    found = partitions(disk)
    for wanted in ROOT_TYPES:
        if fitting := [part for part in found if part.type == wanted]:
            return max(fitting, key=lambda part: part.size)
    types = ", ".join(part.type for part in found) or "none"
    raise UnavailableError(
        f"{disk} has no partition of a Linux root file system: its partitions' types are {types}",
        hint="disks of LVM, ZFS or an encrypted root are not read",
    )


def _blocks_kib(part: Partition) -> int:
    """Size of a partition in KiB, in whole 4 KiB blocks."""
    return part.size // 4096 * 4


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
    """Embed GRUB by its documented block list, which needs no device nodes.

    Offsets are GRUB's own (grub-core/boot/i386/pc/boot.S, diskboot.S): the first stage holds the sector of
    the core image at 0x5c; the core's first sector holds the sector of its second at 0x1f4.
    """
    modules = Path("/usr/lib/grub/i386-pc")
    with tempfile.TemporaryDirectory() as folder:
        core_file = Path(folder) / "core.img"
        run(
            *("grub-mkimage", "-O", "i386-pc", "-d", str(modules), "-o", str(core_file)),
            *("-p", "(hd0,gpt1)/boot/grub", *BIOS_MODULES),
        )
        core = bytearray(core_file.read_bytes())
    boot = bytearray((modules / "boot.img").read_bytes()[:440])
    struct.pack_into("<Q", boot, 0x5C, BIOS_BOOT_START)
    struct.pack_into("<Q", core, 0x1F4, BIOS_BOOT_START + 1)
    if len(core) > (ESP_START - BIOS_BOOT_START) * SECTOR:
        raise UnavailableError(f"GRUB's core image is {len(core)} bytes, more than its partition holds")
    with disk.open("r+b") as file:
        file.write(boot)
        file.seek(BIOS_BOOT_START * SECTOR)
        file.write(core)


def _install_grub_efi(disk: Path, root_uuid: str) -> None:
    """Make the EFI system partition, with a GRUB that goes on with the configuration on the root.

    Which disk the root is on is looked for by its UUID: a firmware numbers its disks as it likes.
    """
    with tempfile.TemporaryDirectory() as folder:
        early, image = Path(folder) / "early.cfg", Path(folder) / "grub.efi"
        early.write_text(
            f"search --no-floppy --fs-uuid --set=root {root_uuid}\n"
            "set prefix=($root)/boot/grub\nconfigfile $prefix/grub.cfg\n"
        )
        run(
            *("grub-mkimage", "-O", "x86_64-efi", "-d", "/usr/lib/grub/x86_64-efi", "-o", str(image)),
            *("-c", str(early), "-p", "/EFI/BOOT", *EFI_MODULES),
        )
        run(
            # it would choose clusters and tracks by the size of the disk
            *("mkfs.fat", "-F", "32", "-s", "1", "-g", "64/32", "-n", "EFI", "--offset", str(ESP_START)),
            *(str(disk), str(ESP_SECTORS * SECTOR >> 10)),
        )
        drive = f"{disk}@@{ESP_START * SECTOR}"
        target, folders = f"::{EFI_FILE}", [f"::{parent}" for parent in reversed(Path(EFI_FILE).parents[:-1])]
        run("mmd", "-i", drive, *folders)
        run("mcopy", "-i", drive, str(image), target)


def has_file(disk: Path, part: Partition, name: str) -> bool:
    """Whether a file is in a FAT file system.

    Raises:
        UnavailableError: mtools is missing.
    """
    drive = f"{disk}@@{part.offset}"
    try:
        run("mdir", "-b", "-i", drive, f"::{name}")
    except UnavailableError as error:
        if not error.details:
            raise  # there is no mdir to say anything
        return False
    return True


def copy_disk(source: Path, target: Path) -> None:
    """Copy a disk and keep its holes; nothing half-written is left under the target's name.

    Args:
        source: A raw disk.
        target: Where the copy goes.

    Raises:
        UnavailableError: The copy failed, for example because the disk is full.
    """
    with whole_or_not(target) as partial:
        run("cp", "--sparse=auto", "--reflink=auto", "--preserve=xattr", str(source), str(partial))


def mark_outside(disk: Path) -> None:
    """Note on a disk that its content comes from outside this cloud; every copy of it says so too.

    Raises:
        OSError: The file system has no extended attributes of users.
    """
    os.setxattr(disk, OUTSIDE, b"1")


def is_outside(disk: Path) -> bool:
    """Whether a disk, or one that it was copied from, was written from outside this cloud."""
    return disk.exists() and OUTSIDE in os.listxattr(disk)


def fit_root(disk: Path) -> None:
    """Let the root partition and its file system reach the end of a disk that has grown.

    Args:
        disk: A raw disk that is not in use.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    part = root_partition(disk)
    if disk.stat().st_size - (part.offset + part.size) < GROWTH:
        return
    fit_table(disk)
    run("sfdisk", "--quiet", "--no-reread", "-N", str(part.number), str(disk), stdin=", +\n")
    with contextlib.closing(LoopDevice(disk, offset=part.offset)) as loop:
        run("e2fsck", "-f", "-p", str(loop.path))
        run("resize2fs", str(loop.path), f"{_blocks_kib(root_partition(disk))}K")


def fit_table(disk: Path) -> None:
    """Let the partition table know that a disk has grown: a GPT's second copy is at the end."""
    if _table(disk)["label"] == "gpt":
        run("sgdisk", "--move-second-header", str(disk))


def mount_root(disk: Path, mountpoint: Path, *, devices: bool = False) -> None:
    """Mount the root file system of a disk.

    Args:
        disk: A raw disk.
        mountpoint: The folder to mount on; made when missing.
        devices: Whether device nodes on it lead to this computer's devices.

    Raises:
        UnavailableError: It could not be mounted.
    """
    mountpoint.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(_device(root_partition(disk), disk)) as loop:
        run("mount", *([] if devices else ["--options=nodev"]), str(loop.path), str(mountpoint))


def _device(part: Partition, disk: Path, *, read_only: bool = False) -> LoopDevice:
    # Not mount's own `-o loop`: it refuses a file that has a loop device already, and one that was let go
    # lives on for a moment when another process, as every such mount does, looks through all of them.
    return LoopDevice(disk, offset=part.offset, size=part.size, read_only=read_only)


@contextlib.contextmanager
def mounted_root(disk: Path) -> Iterator[Path]:
    """The root file system of a disk, mounted read-only for the length of a block.

    Args:
        disk: A raw disk.

    Yields:
        The folder it is mounted on.
    """
    with mountpoint() as folder:
        with contextlib.closing(_device(root_partition(disk), disk, read_only=True)) as loop:
            run("mount", "-o", "ro,norecovery,nodev", str(loop.path), str(folder))
        yield folder


@contextlib.contextmanager
def mountpoint() -> Iterator[Path]:
    """A folder to mount on. Its end unmounts it, or the next process does, where this one is killed.

    Raises:
        UnavailableError: It can't be made, or unmounted.
    """
    try:
        MOUNTS.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"no folder to mount on: {error}", hint="mounting needs root") from error
    with locked(MOUNTS / "lock"):
        for lock in MOUNTS.glob("*.lock"):
            with contextlib.suppress(BusyError, UnavailableError), locked(lock, busy=BusyError("it is used")):
                _unmount(lock)
        folder = Path(tempfile.mkdtemp(dir=MOUNTS))
        held = hold(folder.with_suffix(".lock"))
    try:
        yield folder
    finally:
        try:
            _unmount(folder.with_suffix(".lock"))
        finally:
            held.release()


def _unmount(lock: Path) -> None:
    """Give back a folder of MOUNTS and its lock, which the caller holds."""
    folder = lock.with_suffix("")
    if folder.is_mount():
        run("umount", str(folder))
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
    lock.unlink(missing_ok=True)


def used_bytes(disk: Path) -> int:
    """Bytes that a sparse disk really takes.

    Args:
        disk: A raw disk.

    Returns:
        Allocated bytes.
    """
    return disk.stat().st_blocks * SECTOR


def require_room(folder: Path, need: int) -> None:
    """Refuse to write what would leave too little free.

    Args:
        folder: Where it would be written.
        need: Its bytes.

    Raises:
        UnavailableError: There is less.
    """
    need, free = need + ROOM, free_bytes(folder)
    if free < need:
        raise UnavailableError(
            f"{Memory(free).shown} are free in {folder}, {Memory(need).shown} are needed",
            hint="`invoke cloud.clean --images` shows images that can go",
        )


def free_bytes(folder: Path) -> int:
    """Bytes free where a folder lies.

    Args:
        folder: An existing folder.
    """
    return shutil.disk_usage(folder).free
