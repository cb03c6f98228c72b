"""Disks with a partition table, as UEFI specification 2.10, 5.2 and 5.3 describe it."""

import struct
import uuid
import zlib
from pathlib import Path

from gpukiln.disks.table import ESP_TYPE, SECTOR

SIZE = 1 << 20


def gpt(
    folder: Path,
    at: int = 0,
    data: bytes = b"",
    *,
    sealed: bool = True,
    entries: int = 2,
    begin: int = 34,
    last: int = 2000,
) -> Path:
    """A disk of 1 MiB with one partition, an EFI system partition.

    Args:
        at: Where `data` is written over what is there.
        sealed: Whether the header's checksum is that of what stands there then.
        entries: Sector of the first entry.
        begin: First sector of the partition; last: its last one.
    """
    row = struct.pack("<B3sB3sII", 0, b"", 0xEE, b"", 1, SIZE // SECTOR - 1)
    protective = bytes(446) + row + bytes(48) + b"\x55\xaa"
    header = struct.pack(
        "<8sIIIIQQQQ16sQIII", b"EFI PART", 1 << 16, 92, 0, 0, 1, 2047, 34, 2014, bytes(16), entries, 1, 128, 0
    )
    entry = uuid.UUID(ESP_TYPE).bytes_le + bytes(range(16)) + struct.pack("<QQ", begin, last)
    content = bytearray((protective + header.ljust(SECTOR, b"\0") + entry).ljust(SIZE, b"\0"))
    content[at : at + len(data)] = data
    if sealed:
        whole = bytes(content[SECTOR : SECTOR + 16]) + bytes(4) + bytes(content[SECTOR + 20 : SECTOR + 92])
        content[SECTOR + 16 : SECTOR + 20] = struct.pack("<I", zlib.crc32(whole))
    (disk := folder / "disk.raw").write_bytes(content)
    return disk
