"""Writes a raw disk as qcow2 from the first byte to the last, so that one pass writes and hashes it.

qemu-img writes the tables at the beginning of the file last, so its file has to be read again for a digest.
Here the holes of the disk say which clusters have data, so the tables are known first. Format: QEMU,
docs/interop/qcow2.rst.
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
MOST = sparse.CHUNK // CLUSTER  # clusters in one call of copy_file_range
PIECE = 4 * CLUSTER  # bytes in one update of the digest: they fit into the processor's cache
USED_ONCE = 1 << 63  # in a table's entry: reference count 1, may be written in place (QCOW_OFLAG_COPIED)
# magic, version, backing file (2), cluster bits, size, encryption, L1 (2), refcount table (2), snapshots (2),
# features (3), refcount order, length of this header; then that no extension follows
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII 8x")
HEADER_LENGTH = 104


@dataclass(frozen=True)
class Qcow2Layout:
    """The parts of the file in their order, counted in clusters.

    Args:
        size: Bytes of the disk, whole sectors.
        data: Numbers of the disk's clusters that have data.
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
        """Plan a file.

        >>> layout = Qcow2Layout.of(1 << 30, (0, 1, 9000))
        >>> layout.l1, layout.l2, layout.refcount_blocks, layout.clusters
        (1, 2, 1, 9)
        """
        l1 = _divide_up(_divide_up(_divide_up(size, CLUSTER), ENTRIES), ENTRIES)
        l2 = len({cluster // ENTRIES for cluster in data})
        # The refcount blocks count their own clusters and those of their table: repeat until nothing changes.
        table = blocks = 0
        while True:
            all_of_it = 1 + table + blocks + l1 + l2 + len(data)
            needed = _divide_up(all_of_it, REFCOUNTS)
            if (_divide_up(needed, ENTRIES), needed) == (table, blocks):
                return cls(size, data, table, blocks, l1, l2)
            table, blocks = _divide_up(needed, ENTRIES), needed

    @property
    def clusters(self) -> int:
        """Number of clusters of the whole file."""
        return 1 + self.refcount_table + self.refcount_blocks + self.l1 + self.l2 + len(self.data)

    def tables(self) -> Iterator[bytes]:
        """Header, refcount table and blocks, L1 and L2 tables: everything before the data."""
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
        # Each cluster is used once; refcount order 4 is 16 bits, big endian.
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
    """The virtual size of a qcow2 file, in bytes."""
    with file.open("rb") as opened:
        return int(HEADER.unpack(opened.read(HEADER.size))[5])


def write(disk: Path, part: Path, progress: Progress) -> str:
    """Write a raw disk as qcow2 without its holes; no process may write to the disk meanwhile.

    Returns:
        The SHA-256 of the file.
    """
    with sparse.opened(disk) as number, part.open("wb") as file:
        size = os.fstat(number).st_size
        layout = Qcow2Layout.of(_divide_up(size, SECTOR) * SECTOR, tuple(sparse.blocks(number, CLUSTER)))
        meter = Meter(progress, len(layout.data) * CLUSTER)
        tables = b"".join(layout.tables())
        # Hashing takes as long as the rest, so a thread hashes the source's data while this one writes.
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
    """SHA-256 of the tables and the data; the last cluster is padded with zeros behind the disk's end."""
    digest = hashlib.sha256(tables)
    piece = memoryview(bytearray(PIECE))
    for begin, count in _runs(clusters):
        for at in range(begin, begin + count, PIECE):
            length = min(PIECE, begin + count - at)
            read = os.preadv(source, [piece[:length]], at)
            # The disk may end inside the last cluster, but a short read before that means it was truncated.
            if read < min(length, size - at):
                raise OSError(sparse.SHORTER)
            digest.update(piece[:read])
            digest.update(bytes(length - read))
        moved(count)
    return digest.hexdigest()


def _runs(clusters: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of adjacent clusters: byte offset in the disk and number of bytes."""
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
    """Division, rounded up.

    >>> _divide_up(65537, 65536)
    2
    >>> _divide_up(65536, 65536)
    1
    """
    return -(-amount // of)
