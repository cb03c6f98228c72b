"""Partition tables of raw disks, read without a tool: damage is refused, not repaired on the way.

UEFI specification 2.10, 5.2 and 5.3 (MBR, GPT); the Discoverable Partitions Specification (types of
partitions); util-linux, libfdisk/src/dos.c (logical partitions).
"""

import struct
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpukiln.errors import IncompatibleError, UnavailableError

SECTOR = 512  # bytes
BOOT_CODE = 440  # bytes of the first sector; all zero where no BIOS finds a bootloader
ESP_TYPE, ESP_MBR = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B", "EF"
BIOS_BOOT_TYPE = "21686148-6449-6E6F-744E-656564454649"
LINUX_ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"  # of x86-64
# The likeliest first: of this architecture, any Linux, an MBR's.
ROOT_TYPES = (LINUX_ROOT_TYPE, "0FC63DAF-8483-4772-8E79-3D69D8477DE4", "83")
MBR_PROTECTIVE, MBR_EXTENDED = 0xEE, (0x05, 0x0F, 0x85)
SIGNATURE = b"\x55\xaa"
MOST_LOGICAL = 60  # of a disk whose chain of them leads back to its beginning


@dataclass(frozen=True)
class Partition:
    """A partition.

    Args:
        offset: Its first byte.
        size: Bytes.
        type: Of a GPT its type's GUID, of an MBR its number in hexadecimal, in capital letters.
    """

    number: int
    offset: int
    size: int
    type: str

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size

    @property
    def blocks_kib(self) -> int:
        """Its size in KiB, in whole 4 KiB blocks."""
        return self.size // 4096 * 4


@dataclass(frozen=True)
class PartitionTable:
    """The partition table of a disk.

    Args:
        label: gpt or dos, as sfdisk names them.
        boot_code: Whether the first sector has the code of a bootloader.
    """

    label: str
    boot_code: bool
    partitions: tuple[Partition, ...]

    @property
    def system_partitions(self) -> tuple[Partition, ...]:
        """EFI system partitions; a UEFI boots an MBR's too (UEFI 2.10, 5.2.2)."""
        esp_type = ESP_TYPE if self.label == "gpt" else ESP_MBR
        return tuple(part for part in self.partitions if part.type == esp_type)


def read_table(disk: Path) -> PartitionTable:
    """The partition table of a raw disk.

    Raises:
        IncompatibleError: It has none, or a damaged one.
    """
    size = disk.stat().st_size
    with disk.open("rb") as file:
        mbr = file.read(SECTOR)
        if len(mbr) < SECTOR or mbr[510:] != SIGNATURE:
            raise IncompatibleError(
                f"{disk} has no partition table, so it is no disk that boots",
                hint="wanted: a whole disk, as `qemu-img convert -O raw` or `dd` of a device gives it, not a"
                " partition or a file system",
            )
        gpt = any(kind == MBR_PROTECTIVE for kind, _, _ in _mbr_entries(mbr))
        parts = _gpt_partitions(file, disk, size) if gpt else _dos_partitions(file, mbr)
        return PartitionTable("gpt" if gpt else "dos", any(mbr[:BOOT_CODE]), tuple(parts))


def root_partition(disk: Path) -> Partition:
    """Where the root file system of a disk is.

    Returns:
        Of the partitions with the likeliest type the largest.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: The disk has none.
    """
    partitions = read_table(disk).partitions
    for root_type in ROOT_TYPES:
        if fitting := [part for part in partitions if part.type == root_type]:
            return max(fitting, key=lambda part: part.size)
    types = ", ".join(part.type for part in partitions) or "none"
    raise UnavailableError(
        f"{disk} has no partition of a Linux root file system: its partitions' types are {types}",
        hint="disks of LVM, ZFS or an encrypted root are not read",
    )


def _mbr_entries(sector: bytes) -> list[tuple[int, int, int]]:
    """Of an MBR or of a logical partition's: type, first sector and number of sectors."""
    return [(sector[at + 4], *struct.unpack_from("<II", sector, at + 8)) for at in range(446, 510, 16)]


def _dos_partitions(file: BinaryIO, mbr: bytes) -> Iterator[Partition]:
    for number, (kind, first, count) in enumerate(_mbr_entries(mbr), start=1):
        if kind and count:
            yield Partition(number, first * SECTOR, count * SECTOR, f"{kind:X}")
    begin = next((first for kind, first, count in _mbr_entries(mbr) if kind in MBR_EXTENDED and count), 0)
    at = begin
    for number in range(5, 5 + MOST_LOGICAL):
        file.seek(at * SECTOR)
        sector = file.read(SECTOR)
        if not at or len(sector) < SECTOR or sector[510:] != SIGNATURE:
            return
        (kind, first, count), (_, link, _) = _mbr_entries(sector)[:2]
        if kind and count:
            yield Partition(number, (at + first) * SECTOR, count * SECTOR, f"{kind:X}")
        at = link and begin + link


def _gpt_partitions(file: BinaryIO, disk: Path, size: int) -> Iterator[Partition]:
    file.seek(SECTOR)
    header = file.read(92)
    if len(header) < 92 or header[:8] != b"EFI PART":
        raise IncompatibleError(
            f"{disk} has a protective MBR and no GPT behind it", hint="it was cut or damaged"
        )
    given = struct.unpack_from("<I", header, 16)[0]
    if zlib.crc32(header[:16] + bytes(4) + header[20:92]) != given:
        raise IncompatibleError(f"the header of {disk}'s GPT is damaged", hint="`sgdisk --verify` knows more")
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
    for index, at in enumerate(range(0, len(entries), length), start=1):
        if entries[at : at + 16] == bytes(16):
            continue
        begin, last = struct.unpack_from("<QQ", entries, at + 32)
        if begin > last:
            raise IncompatibleError(
                f"a partition of {disk} begins at sector {begin} and ends at {last}",
                hint="`sgdisk --verify` knows more",
            )
        kind = str(uuid.UUID(bytes_le=entries[at : at + 16])).upper()
        yield Partition(index, begin * SECTOR, (last + 1 - begin) * SECTOR, kind)
