"""What a disk is by its content: a partition table, the machines that boot it, the form of its file.

UEFI specification 2.10, 5.2 and 5.3 (MBR, GPT); the Discoverable Partitions Specification (types of
partitions); QEMU, docs/interop/qcow2.rst.
"""

import struct
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import IncompatibleError
from gpukiln.parsing import parse_json

SECTOR = 512  # bytes
MAGIC = {  # at the beginning of a file
    b"QFI\xfb": "qcow2",
    b"KDMV": "vmdk",
    b"conectix": "vhd",
    b"vhdxfile": "vhdx",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
}
ESP, BIOS_BOOT = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "21686148-6449-6e6f-744e-656564454649"
ROOTS = {
    "4f68bce3-e8cd-4db1-96e7-fbcaf984b709": "x86_64",
    "b921b045-1df0-41c3-af44-4c6f280d3fae": "arm64",
}
LOADERS = {b"BOOTX64 EFI": "x86_64", b"BOOTAA64EFI": "arm64"}  # names as FAT's directories hold them
MBR_ESP, MBR_PROTECTIVE = 0xEF, 0xEE
CHUNK = 4 << 20


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


@dataclass(frozen=True)
class _Part:
    kind: str
    begin: int
    end: int


def form_of(file: Path) -> str:
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
        told = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise IncompatibleError(
            f"{file} is no whole qcow2: {told[-1]}", hint="copy it again from where it came"
        )
    found = parse_json(done.stdout)
    data = found.get("format-specific", {}).get("data", {})
    for what, other in (
        ("backing file", found.get("backing-filename")),
        ("data file", data.get("data-file")),
    ):
        if other:
            raise IncompatibleError(
                f"{file} has a {what}, {other}: it is not whole without it",
                hint="where both are trusted, `qemu-img convert -O qcow2` makes one file of them",
            )
    if data.get("corrupt") or found.get("encrypted"):
        why = "encrypted" if found.get("encrypted") else "marked as corrupt"
        raise IncompatibleError(f"{file} is {why}", hint="`qemu-img check` and `qemu-img convert` know more")


def look(disk: Path) -> Disk:
    """What a raw disk is.

    Raises:
        IncompatibleError: It has no partition table, was cut, or nothing on it boots.
    """
    size = disk.stat().st_size
    with disk.open("rb") as file:
        mbr = file.read(SECTOR)
        if len(mbr) < SECTOR or mbr[510:] != b"\x55\xaa":
            raise IncompatibleError(
                f"{disk} has no partition table, so it is no disk that boots",
                hint="wanted: a whole disk, as `qemu-img convert -O raw` or `dd` of a device gives it, not a"
                " partition or a file system",
            )
        kinds = [mbr[at + 4] for at in range(446, 510, 16)]
        gpt = MBR_PROTECTIVE in kinds
        parts = _gpt(disk, size) if gpt else _dos(mbr)
        ends = max((one.end for one in parts), default=0)
        if not parts or ends > size:
            why = (
                f"a partition ends at {ends} and the disk at {size}"
                if parts
                else "its table has no partition"
            )
            raise IncompatibleError(
                f"{disk} was cut or is empty: {why}", hint="copy it again from where it came"
            )
        esp = next((one for one in parts if one.kind in (ESP, f"{MBR_ESP:02x}")), None)
        bios = not gpt or any(one.kind == BIOS_BOOT for one in parts) or any(mbr[:440])
        if gpt and not esp and not bios:
            raise IncompatibleError(
                f"nothing on {disk} boots: it has no EFI system partition and no BIOS boot loader",
                hint="install a boot loader on it first",
            )
        architecture = next((ROOTS[one.kind] for one in parts if one.kind in ROOTS), "")
        if not architecture and esp:
            architecture = _loader(disk, esp)
    if architecture == "arm64":
        bios = False  # it has no BIOS
    mode = "uefi-preferred" if esp and bios else "uefi" if esp else "legacy-bios"
    return Disk(size, "gpt" if gpt else "dos", architecture or "x86_64", mode)


def _dos(mbr: bytes) -> list[_Part]:
    found = []
    for at in range(446, 510, 16):
        kind, first, count = mbr[at + 4], *struct.unpack_from("<II", mbr, at + 8)
        if kind and count:
            found.append(_Part(f"{kind:02x}", first * SECTOR, (first + count) * SECTOR))
    return found


def _gpt(disk: Path, size: int) -> list[_Part]:
    with disk.open("rb") as file:
        file.seek(SECTOR)
        header = file.read(92)
        if len(header) < 92 or header[:8] != b"EFI PART":
            raise IncompatibleError(
                f"{disk} has a protective MBR and no GPT behind it", hint="it was cut or damaged"
            )
        given = struct.unpack_from("<I", header, 16)[0]
        if zlib.crc32(header[:16] + bytes(4) + header[20:92]) != given:
            raise IncompatibleError(
                f"the header of {disk}'s GPT is damaged", hint="`sgdisk --verify` knows more"
            )
        first, number, length = struct.unpack_from("<QII", header, 72)
        if not 128 <= length <= 4096 or number > 1024:
            raise IncompatibleError(
                f"the header of {disk}'s GPT has entries of {length} bytes", hint="see sgdisk"
            )
        end = first * SECTOR + number * length
        if end > size:  # before anything seeks: 2**60 sectors are no place in any file
            raise IncompatibleError(
                f"{disk} was cut within its GPT: its entries end at {end} and the disk at {size}",
                hint="copy it again from where it came",
            )
        file.seek(first * SECTOR)
        entries = file.read(number * length)
    found = []
    for at in range(0, len(entries), length):
        kind = str(uuid.UUID(bytes_le=entries[at : at + 16]))
        begin, last = struct.unpack_from("<QQ", entries, at + 32)
        if entries[at : at + 16] != bytes(16):
            if begin > last:
                raise IncompatibleError(
                    f"a partition of {disk} begins at sector {begin} and ends at {last}",
                    hint="`sgdisk --verify` knows more",
                )
            found.append(_Part(kind, begin * SECTOR, (last + 1) * SECTOR))
    return found


def _loader(disk: Path, esp: _Part) -> str:
    """The architecture of the boot loader that firmware looks for, by its name in the ESP."""
    with disk.open("rb") as file:
        file.seek(esp.begin)
        left, before = esp.end - esp.begin, b""
        while left > 0 and (data := file.read(min(CHUNK, left))):
            for name, architecture in LOADERS.items():
                if name in before + data:
                    return architecture
            before, left = data[-16:], left - len(data)
    return ""
