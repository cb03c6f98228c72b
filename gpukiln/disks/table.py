"""Reads the partition tables of raw disks; a damaged one is refused, where tools would use a second copy.

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
BOOT_CODE = 440  # bytes of the first sector; all zero where there is no bootloader for BIOS
ESP_TYPE, ESP_MBR = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B", "EF"
BIOS_BOOT_TYPE = "21686148-6449-6E6F-744E-656564454649"
LINUX_ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"  # for x86-64
# In order of preference: the root of x86-64 (only a root file system has that type), any Linux file system,
# Linux on an MBR.
ROOT_TYPES = (LINUX_ROOT_TYPE, "0FC63DAF-8483-4772-8E79-3D69D8477DE4", "83")
MBR_PROTECTIVE, MBR_EXTENDED = 0xEE, (0x05, 0x0F, 0x85)
SIGNATURE = b"\x55\xaa"
MOST_LOGICAL = 60  # logical partitions: a damaged chain can lead back to its beginning


@dataclass(frozen=True)
class Partition:
    """A partition.

    Args:
        offset: Its first byte.
        size: Bytes.
        type: GPT: the type's GUID; MBR: the type's number in hexadecimal; in capital letters.
    """

    number: int
    offset: int
    size: int
    type: str

    @property
    def end(self) -> int:
        """The first byte behind the partition."""
        return self.offset + self.size

    @property
    def blocks_kib(self) -> int:
        """Its size in KiB, rounded down to whole 4 KiB blocks of ext4.

        >>> Partition(1, 0, 10_000, "83").blocks_kib
        8
        """
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
        """EFI system partitions, of an MBR too: UEFI boots those as well (UEFI 2.10, 5.2.2)."""
        esp_type = ESP_TYPE if self.label == "gpt" else ESP_MBR
        return tuple(part for part in self.partitions if part.type == esp_type)


def read_table(disk: Path) -> PartitionTable:
    """The partition table of a raw disk.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
    """
    size = disk.stat().st_size
    with disk.open("rb") as file:
        mbr = file.read(SECTOR)
        if len(mbr) < SECTOR or mbr[510:] != SIGNATURE:
            raise IncompatibleError(
                f"{disk} has no partition table, so it can't boot",
                hint="give a whole disk, as `qemu-img convert -O raw` or `dd` of a device writes it, not a"
                " partition or a file system",
            )
        # A hybrid MBR has other entries next to the protective one.
        gpt = any(kind == MBR_PROTECTIVE for kind, _, _ in _mbr_entries(mbr))
        parts = _gpt_partitions(file, disk, size) if gpt else _dos_partitions(file, mbr)
        return PartitionTable("gpt" if gpt else "dos", any(mbr[:BOOT_CODE]), tuple(parts))


def root_partition(disk: Path) -> Partition:
    """The partition with the root file system of a disk.

    Returns:
        The largest partition of the first type of `ROOT_TYPES` that the disk has.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: No partition has such a type.
    """
    partitions = read_table(disk).partitions
    for root_type in ROOT_TYPES:
        if fitting := [part for part in partitions if part.type == root_type]:
            return max(fitting, key=lambda part: part.size)
    types = ", ".join(part.type for part in partitions) or "none"
    raise UnavailableError(
        f"{disk} has no partition of a Linux root file system: its partitions' types are {types}",
        hint="gpukiln does not read LVM, ZFS or an encrypted root",
    )


def _mbr_entries(sector: bytes) -> list[tuple[int, int, int]]:
    """The entries of an MBR or of a logical partition's sector: type, first sector, number of sectors."""
    return [(sector[at + 4], *struct.unpack_from("<II", sector, at + 8)) for at in range(446, 510, 16)]


def _dos_partitions(file: BinaryIO, mbr: bytes) -> Iterator[Partition]:
    for number, (kind, first, count) in enumerate(_mbr_entries(mbr), start=1):
        if kind and count:
            yield Partition(number, first * SECTOR, count * SECTOR, f"{kind:X}")
    # Links of logical partitions are relative to the extended partition, their starts to their own sector.
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
        # Link 0 ends the chain.
        at = link and begin + link


def _gpt_partitions(file: BinaryIO, disk: Path, size: int) -> Iterator[Partition]:
    file.seek(SECTOR)
    header = file.read(92)
    if len(header) < 92 or header[:8] != b"EFI PART":
        raise IncompatibleError(
            f"{disk} has a protective MBR and no GPT", hint="it is truncated or damaged: copy it again"
        )
    given = struct.unpack_from("<I", header, 16)[0]
    # The checksum is computed with its own field set to zero.
    if zlib.crc32(header[:16] + bytes(4) + header[20:92]) != given:
        raise IncompatibleError(f"the header of {disk}'s GPT is damaged", hint="see `sgdisk --verify`")
    first, number, length = struct.unpack_from("<QII", header, 72)
    # The specification has entries of 128 bytes times a power of two; the limits bound what is read.
    if not 128 <= length <= 4096 or number > 1024:
        raise IncompatibleError(
            f"the header of {disk}'s GPT has entries of {length} bytes", hint="see `sgdisk --verify`"
        )
    end = first * SECTOR + number * length
    if end > size:  # before anything seeks: 2**60 sectors are no place in any file
        raise IncompatibleError(
            f"{disk} is truncated within its GPT: its entries end at byte {end} and the disk at byte {size}",
            hint="copy it again from its source",
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
                hint="see `sgdisk --verify`",
            )
        # GUIDs on disk are mixed-endian (UEFI 2.10, appendix A).
        kind = str(uuid.UUID(bytes_le=entries[at : at + 16])).upper()
        yield Partition(index, begin * SECTOR, (last + 1 - begin) * SECTOR, kind)
