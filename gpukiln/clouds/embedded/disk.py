"""Raw GPT disks with a bootloader, made and mounted without partition nodes of loop devices.

A disk is: GRUB's first stage in the MBR, GRUB's core image in a BIOS boot partition (number 14, as in
Debian's cloud images), and the ext4 root file system in partition 1, last on the disk so that it can grow.
"""

import contextlib
import json
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from gpukiln.errors import UnavailableError
from gpukiln.files import whole_or_not

SECTOR = 512  # bytes
BIOS_BOOT_START = 2048  # sectors
ROOT_START = 4096  # sectors
ROOT_OFFSET = ROOT_START * SECTOR  # bytes
BIOS_BOOT_TYPE = "21686148-6449-6E6F-744E-656564454649"
LINUX_ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"
GROWTH = 64 << 20  # bytes behind the root partition that are worth to be taken; volumes grow by whole GiB
ROOM = 2 << 30  # bytes to be free beyond a copy before a disk is copied
GRUB_MODULES = [
    "biosdisk",
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
            f"14 : start={BIOS_BOOT_START}, size={ROOT_START - BIOS_BOOT_START}, type={BIOS_BOOT_TYPE}\n"
            f"1 : start={ROOT_START}, type={LINUX_ROOT_TYPE}\n"
        )
        run("sfdisk", "--quiet", "--no-reread", str(partial), stdin=table)
        run(
            *("mkfs.ext4", "-q", "-F", "-b", "4096", "-U", root_uuid, "-L", "root", "-d", str(root)),
            *("-E", f"offset={ROOT_OFFSET},lazy_itable_init=1", str(partial), f"{root_kib(partial)}k"),
        )
        _install_grub(partial)


def root_kib(disk: Path) -> int:
    """Size of the root partition in KiB, in whole 4 KiB blocks.

    Args:
        disk: A raw disk with a root.
    """
    table = json.loads(run("sfdisk", "--json", str(disk)))["partitiontable"]
    sectors = next(int(part["size"]) for part in table["partitions"] if part["start"] == ROOT_START)
    return sectors // 8 * 4


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
            *("-p", "(hd0,gpt1)/boot/grub", *GRUB_MODULES),
        )
        core = bytearray(core_file.read_bytes())
    boot = bytearray((modules / "boot.img").read_bytes()[:440])
    struct.pack_into("<Q", boot, 0x5C, BIOS_BOOT_START)
    struct.pack_into("<Q", core, 0x1F4, BIOS_BOOT_START + 1)
    if len(core) > (ROOT_START - BIOS_BOOT_START) * SECTOR:
        raise UnavailableError(f"GRUB's core image is {len(core)} bytes, more than its partition holds")
    with disk.open("r+b") as file:
        file.write(boot)
        file.seek(BIOS_BOOT_START * SECTOR)
        file.write(core)


def copy_disk(source: Path, target: Path) -> None:
    """Copy a disk and keep its holes; nothing half-written is left under the target's name.

    Args:
        source: A raw disk.
        target: Where the copy goes.

    Raises:
        UnavailableError: The copy failed, for example because the disk is full.
    """
    with whole_or_not(target) as partial:
        run("cp", "--sparse=auto", "--reflink=auto", str(source), str(partial))


def fit_root(disk: Path) -> None:
    """Let the root partition and its file system reach the end of a disk that has grown.

    Args:
        disk: A raw disk that is not in use.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    if disk.stat().st_size - (root_kib(disk) * 1024 + ROOT_OFFSET) < GROWTH:
        return
    run("sgdisk", "--move-second-header", str(disk))
    run("sfdisk", "--quiet", "--no-reread", "-N", "1", str(disk), stdin=", +\n")
    loop = run("losetup", "--find", "--show", "--offset", str(ROOT_OFFSET), str(disk)).strip()
    try:
        run("e2fsck", "-f", "-p", loop)
        run("resize2fs", loop, f"{root_kib(disk)}K")
    finally:
        run("losetup", "--detach", loop)


def mount_root(disk: Path, mountpoint: Path) -> None:
    """Mount the root file system of a disk.

    Args:
        disk: A raw disk.
        mountpoint: The folder to mount on; made when missing.

    Raises:
        UnavailableError: It could not be mounted.
    """
    mountpoint.mkdir(parents=True, exist_ok=True)
    run("mount", "-o", f"loop,offset={ROOT_OFFSET}", "-t", "ext4", str(disk), str(mountpoint))


@contextlib.contextmanager
def mounted_root(disk: Path) -> Iterator[Path]:
    """The root file system of a disk, mounted read-only for the length of a block.

    Args:
        disk: A raw disk.

    Yields:
        The folder it is mounted on.
    """
    with tempfile.TemporaryDirectory(prefix="gpukiln-") as folder:
        run("mount", "-o", f"ro,noload,loop,offset={ROOT_OFFSET}", "-t", "ext4", str(disk), folder)
        try:
            yield Path(folder)
        finally:
            run("umount", folder)


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
            f"{free >> 20} MiB are free in {folder}, {need >> 20} MiB are needed",
            hint="`invoke cloud.clean --images` shows images that can go",
        )


def free_bytes(folder: Path) -> int:
    """Bytes free where a folder lies.

    Args:
        folder: An existing folder.
    """
    return shutil.disk_usage(folder).free
