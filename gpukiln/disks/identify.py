"""Identifies a disk by its content: the format of its file and the firmware that boots it.

The Discoverable Partitions Specification (types of partitions); QEMU, docs/interop/qcow2.rst.
"""

from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.disks import qcow2, sparse
from gpukiln.disks.table import BIOS_BOOT_TYPE, LINUX_ROOT_TYPE, Partition, read_table
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.parsing import parse_json
from gpukiln.programs import tool

MAGIC = {  # at the beginning of a file
    qcow2.MAGIC: "qcow2",
    b"KDMV": "vmdk",
    b"conectix": "vhd",
    b"vhdxfile": "vhdx",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
}
ROOTS = {LINUX_ROOT_TYPE: "x86_64", "B921B045-1DF0-41C3-AF44-4C6F280D3FAE": "arm64"}
LOADERS = {b"BOOTX64 EFI": "x86_64", b"BOOTAA64EFI": "arm64"}  # names as FAT's directories hold them


@dataclass(frozen=True)
class Disk:
    """A raw disk.

    Args:
        bytes: Its size.
        table: gpt or dos.
        architecture: x86_64 or arm64, as EC2 names them.
        boot_mode: legacy-bios, uefi or uefi-preferred (boots both ways), as EC2 names them.
    """

    bytes: int
    table: str
    architecture: str
    boot_mode: str


def detect_format(file: Path) -> str:
    """The format of a file, raw or qcow2, by its first bytes.

    Raises:
        IncompatibleError: It has another format, or is a qcow2 that needs other files.
    """
    with file.open("rb") as opened:
        head = opened.read(16)
    form = next((name for magic, name in MAGIC.items() if head.startswith(magic)), "raw")
    if form == "raw":
        return form
    if form != "qcow2":
        # A compressed disk is decompressed first; any other format is qemu-img's to convert.
        ways = {"zstd": f"zstd -d {file.name}", "gzip": f"gzip -d {file.name}", "xz": f"xz -d {file.name}"}
        way = ways.get(form, f"qemu-img convert -O qcow2 {file.name} {file.stem}.qcow2")
        raise IncompatibleError(
            f"{file} has the format {form}, wanted raw or qcow2", hint=f"`{way}` converts it"
        )
    _require_whole(file)
    return form


def _require_whole(file: Path) -> None:
    """Refuse a qcow2 that refers to other files: an untrusted disk could name any file of this computer."""
    done = programs.run(
        # -f: with a guessed format, a raw disk whose guest wrote a qcow2 header would be opened as qcow2.
        ["qemu-img", "info", "--output=json", "-f", "qcow2", str(file)],
        limit_s=programs.QUICK_S,
    )
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip().splitlines() or ["without a message"]
        raise IncompatibleError(
            f"{file} is not a complete qcow2 file: {stderr[-1]}", hint="copy it again from its source"
        )
    info = parse_json(done.stdout)
    data = info.get("format-specific", {}).get("data", {})
    for what, other in (
        ("backing file", info.get("backing-filename")),
        ("data file", data.get("data-file")),
    ):
        if other:
            raise IncompatibleError(
                f"{file} needs its {what} {other}",
                hint="if you trust both, `qemu-img convert -O qcow2` makes one file of them",
            )
    if data.get("corrupt") or info.get("encrypted"):
        why = "encrypted" if info.get("encrypted") else "marked as corrupt"
        raise IncompatibleError(f"{file} is {why}", hint="see `qemu-img check` and `qemu-img convert`")


def inspect_disk(disk: Path) -> Disk:
    """Size, partition table, architecture and firmware of a raw disk.

    Raises:
        IncompatibleError: It has no partition table, is truncated, or has no boot loader.
    """
    table, size = read_table(disk), disk.stat().st_size
    ends = max((part.end for part in table.partitions), default=0)
    if not ends or ends > size:
        why = (
            f"a partition ends at byte {ends} and the disk at byte {size}"
            if ends
            else "its table has no partition"
        )
        raise IncompatibleError(f"{disk} is truncated or empty: {why}", hint="copy it again from its source")
    types = [part.type for part in table.partitions]
    esp = next(iter(table.system_partitions), None)
    # An MBR boots by BIOS; on a GPT there is boot code in the first sector or a BIOS boot partition.
    bios = table.label == "dos" or table.boot_code or BIOS_BOOT_TYPE in types
    if not esp and not bios:
        raise IncompatibleError(
            f"{disk} does not boot: it has no EFI system partition and no BIOS boot loader",
            hint="install a boot loader on it first",
        )
    architecture = next((ROOTS[name] for name in types if name in ROOTS), "")
    if not architecture and esp:
        architecture = _loader_architecture(disk, esp)
    if architecture == "arm64":
        bios = False  # arm64 has no BIOS
    mode = "uefi-preferred" if esp and bios else "uefi" if esp else "legacy-bios"
    return Disk(size, table.label, architecture or "x86_64", mode)


def has_file(disk: Path, part: Partition, name: str) -> bool:
    """Whether a file is in a FAT file system.

    Raises:
        UnavailableError: mtools is missing.
    """
    drive = f"{disk}@@{part.offset}"
    try:
        tool("mdir", "-b", "-i", drive, f"::{name}")
    except UnavailableError as error:
        if not error.details:
            raise  # mdir is not installed: a failed mdir has output
        return False
    return True


def _loader_architecture(disk: Path, esp: Partition) -> str:
    """The architecture of the boot loader that firmware looks for, by its name in the ESP."""
    with disk.open("rb") as file:
        file.seek(esp.offset)
        left, before = esp.size, b""
        while left > 0 and (data := file.read(min(sparse.CHUNK, left))):
            for name, architecture in LOADERS.items():
                if name in before + data:
                    return architecture
            # A name may lie across two chunks; it has 11 bytes.
            before, left = data[-16:], left - len(data)
    return ""
