"""What a disk is by its content: the machines that boot it, the form of its file.

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
    """Whether a file is raw or qcow2, by its content.

    Raises:
        IncompatibleError: It is neither, or a qcow2 that is not whole without other files.
    """
    with file.open("rb") as opened:
        head = opened.read(16)
    form = next((name for magic, name in MAGIC.items() if head.startswith(magic)), "raw")
    if form == "raw":
        return form
    if form != "qcow2":
        ways = {"zstd": f"zstd -d {file.name}", "gzip": f"gzip -d {file.name}", "xz": f"xz -d {file.name}"}
        way = ways.get(form, f"qemu-img convert -O qcow2 {file.name} {file.stem}.qcow2")
        raise IncompatibleError(
            f"{file} is a file of {form}, wanted a raw or a qcow2 disk", hint=f"`{way}` makes one of it"
        )
    _require_whole(file)
    return form


def _require_whole(file: Path) -> None:
    """Refuse what would have qemu-img read other files: somebody's disk may name any of this machine."""
    done = programs.run(
        ["qemu-img", "info", "--output=json", "-f", "qcow2", str(file)], limit_s=programs.QUICK_S
    )
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise IncompatibleError(
            f"{file} is no whole qcow2: {stderr[-1]}", hint="copy it again from where it came"
        )
    info = parse_json(done.stdout)
    data = info.get("format-specific", {}).get("data", {})
    for what, other in (
        ("backing file", info.get("backing-filename")),
        ("data file", data.get("data-file")),
    ):
        if other:
            raise IncompatibleError(
                f"{file} has a {what}, {other}: it is not whole without it",
                hint="where both are trusted, `qemu-img convert -O qcow2` makes one file of them",
            )
    if data.get("corrupt") or info.get("encrypted"):
        why = "encrypted" if info.get("encrypted") else "marked as corrupt"
        raise IncompatibleError(f"{file} is {why}", hint="`qemu-img check` and `qemu-img convert` know more")


def inspect_disk(disk: Path) -> Disk:
    """What a raw disk is.

    Raises:
        IncompatibleError: It has no partition table, was cut, or nothing on it boots.
    """
    table, size = read_table(disk), disk.stat().st_size
    ends = max((part.end for part in table.partitions), default=0)
    if not ends or ends > size:
        why = f"a partition ends at {ends} and the disk at {size}" if ends else "its table has no partition"
        raise IncompatibleError(f"{disk} was cut or is empty: {why}", hint="copy it again from where it came")
    types = [part.type for part in table.partitions]
    esp = next(iter(table.system_partitions), None)
    bios = table.label == "dos" or table.boot_code or BIOS_BOOT_TYPE in types
    if not esp and not bios:
        raise IncompatibleError(
            f"nothing on {disk} boots: it has no EFI system partition and no BIOS boot loader",
            hint="install a boot loader on it first",
        )
    architecture = next((ROOTS[name] for name in types if name in ROOTS), "")
    if not architecture and esp:
        architecture = _loader_architecture(disk, esp)
    if architecture == "arm64":
        bios = False  # it has no BIOS
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
            raise  # there is no mdir to say anything
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
            before, left = data[-16:], left - len(data)
    return ""
