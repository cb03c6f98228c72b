"""Writes a raw disk as qcow2 from its first byte to its last, so that its digest is known when it is written.

qemu-img writes the tables at the file's beginning when it ends, and what is hashed after that is read twice.
Here they are known before: where the disk has data, its holes say. The format: QEMU, docs/interop/qcow2.rst.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpukiln.disks import sparse
from gpukiln.disks.table import SECTOR
from gpukiln.progress import Meter, Progress

MAGIC = b"QFI\xfb"
CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS  # bytes, as qemu-img's
ENTRIES = CLUSTER // 8  # of a table in one cluster
REFCOUNTS = CLUSTER // 2  # 16 bits each
MOST = sparse.CHUNK // CLUSTER  # clusters that are copied at once
PIECE = 4 * CLUSTER  # bytes that are hashed at once: the processor's own cache has room for them
USED_ONCE = 1 << 63  # of a table's entry: it may be written in place (QCOW_OFLAG_COPIED)
# magic, version, backing file (2), cluster bits, size, encryption, L1 (2), refcount table (2), snapshots (2),
# features (3), refcount order, length of this header; then that no extension follows
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII 8x")
HEADER_LENGTH = 104


@dataclass(frozen=True)
class Qcow2Layout:
    """Where everything is, in clusters of the file, in this order.

    Args:
        size: Bytes of the disk, whole sectors.
        data: Clusters of the disk that are no hole.
        refcount_blocks: Clusters of reference counts, behind their table.
    """

    size: int
    data: tuple[int, ...]
    refcount_table: int
    refcount_blocks: int
    l1: int
    l2: int

    @classmethod
    def of(cls, size: int, data: tuple[int, ...]) -> Self:
        """Plan a file; the reference counts count the clusters that they lie in too."""
        l1 = _divide_up(_divide_up(_divide_up(size, CLUSTER), ENTRIES), ENTRIES)
        l2 = len({cluster // ENTRIES for cluster in data})
        table = blocks = 0
        while True:
            all_of_it = 1 + table + blocks + l1 + l2 + len(data)
            needed = _divide_up(all_of_it, REFCOUNTS)
            if (_divide_up(needed, ENTRIES), needed) == (table, blocks):
                return cls(size, data, table, blocks, l1, l2)
            table, blocks = _divide_up(needed, ENTRIES), needed

    @property
    def clusters(self) -> int:
        """Of the whole file."""
        return 1 + self.refcount_table + self.refcount_blocks + self.l1 + self.l2 + len(self.data)

    def tables(self) -> Iterator[bytes]:
        """All that is before the data."""
        l1_at = 1 + self.refcount_table + self.refcount_blocks
        l2_at = l1_at + self.l1
        data_at = l2_at + self.l2
        l1_entries = _divide_up(_divide_up(self.size, CLUSTER), ENTRIES)
        header = HEADER.pack(
            *(MAGIC, 3, 0, 0, CLUSTER_BITS, self.size, 0),
            *(l1_entries, l1_at * CLUSTER, CLUSTER, self.refcount_table),
            *(0, 0, 0, 0, 0, 4, HEADER_LENGTH),
        )
        yield header.ljust(CLUSTER, b"\0")
        yield _table(
            range((1 + self.refcount_table) * CLUSTER, l1_at * CLUSTER, CLUSTER), self.refcount_table
        )
        yield (b"\0\1" * self.clusters).ljust(self.refcount_blocks * CLUSTER, b"\0")
        l2: dict[int, list[int]] = {}
        for place, cluster in enumerate(self.data, start=data_at):
            entries = l2.setdefault(cluster // ENTRIES, [0] * ENTRIES)
            entries[cluster % ENTRIES] = place * CLUSTER | USED_ONCE
        l1 = [0] * l1_entries
        for place, number in enumerate(l2, start=l2_at):
            l1[number] = place * CLUSTER | USED_ONCE
        yield _table(l1, self.l1)
        for entries in l2.values():
            yield _table(entries, 1)


def virtual_bytes(file: Path) -> int:
    """The size of the disk that is in a qcow2 file."""
    with file.open("rb") as opened:
        return int(HEADER.unpack(opened.read(HEADER.size))[5])


def write(disk: Path, part: Path, progress: Progress) -> str:
    """Write a raw disk that nobody writes to; clusters that are holes are left out.

    Returns:
        The SHA-256 of the file.
    """
    with sparse.opened(disk) as number, part.open("wb") as file:
        size = os.fstat(number).st_size
        layout = Qcow2Layout.of(_divide_up(size, SECTOR) * SECTOR, tuple(sparse.blocks(number, CLUSTER)))
        meter = Meter(progress, len(layout.data) * CLUSTER)
        tables = b"".join(layout.tables())
        # Hashing takes as long as all the rest: it runs beside that, over what the file is made of.
        hashing = sparse.run_alongside(_digest, number, tables, layout.data, size, moved=meter.add)
        with hashing as digest:
            file.write(tables)
            file.flush()
            at = len(tables)
            for begin, count in _runs(layout.data):
                sparse.copy_part(number, file.fileno(), begin, min(begin + count, size), at)
                at += count
            file.truncate(layout.clusters * CLUSTER)
            os.fsync(file.fileno())
            return digest.result()


def _digest(
    source: int, tables: bytes, clusters: Sequence[int], size: int, moved: Callable[[int], None]
) -> str:
    """Of the tables and the data behind them; the last cluster may end behind the disk's end."""
    digest = hashlib.sha256(tables)
    piece = memoryview(bytearray(PIECE))
    for begin, count in _runs(clusters):
        for at in range(begin, begin + count, PIECE):
            length = min(PIECE, begin + count - at)
            read = os.preadv(source, [piece[:length]], at)
            if read < min(length, size - at):
                raise OSError(sparse.SHORTER)
            digest.update(piece[:read])
            digest.update(bytes(length - read))
        moved(count)
    return digest.hexdigest()


def _runs(clusters: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours: the first one's place in the disk, and how many bytes."""
    at = 0
    while at < len(clusters):
        count = 1
        while count < MOST and at + count < len(clusters) and clusters[at + count] == clusters[at] + count:
            count += 1
        yield clusters[at] * CLUSTER, count * CLUSTER
        at += count


def _table(entries: Sequence[int], clusters: int) -> bytes:
    return struct.pack(f">{len(entries)}Q", *entries).ljust(clusters * CLUSTER, b"\0")


def _divide_up(amount: int, of: int) -> int:
    """How many of a size hold an amount."""
    return -(-amount // of)
