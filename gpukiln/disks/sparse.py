"""Raw disks with holes: where their data is, copied and hashed without reading the holes."""

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpukiln.errors import UnavailableError
from gpukiln.files import FULL, atomic_path
from gpukiln.programs import disk_full

CHUNK = 4 << 20  # bytes
SHORTER = "the disk became shorter while it was read"
_ZEROS = bytes(CHUNK)


def extents(number: int) -> Iterator[tuple[int, int]]:
    """The parts of an open file that are no hole: begin and end in bytes."""
    at, end = 0, os.fstat(number).st_size
    while at < end:
        try:
            at = os.lseek(number, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        hole = os.lseek(number, at, os.SEEK_HOLE)
        yield at, hole
        at = hole


def blocks(number: int, size: int) -> Iterator[int]:
    """The blocks of an open file that are not only a hole, in ascending order.

    Args:
        size: Bytes of a block.
    """
    behind = 0
    for begin, end in extents(number):
        yield from range(max(begin // size, behind), behind := -(-end // size))


def used_bytes(disk: Path) -> int:
    """Bytes that a disk takes of the file system that it lies on."""
    return disk.stat().st_blocks * 512  # stat(2): whatever the block size is


def data_bytes(disk: Path) -> int:
    """What a disk really holds."""
    with opened(disk) as number:
        return sum(end - begin for begin, end in extents(number))


def pieces(disk: Path) -> Iterator[bytes | memoryview]:
    """All of a disk, in order; holes are zeros that nobody reads."""
    view = memoryview(_ZEROS)
    with opened(disk) as number:
        at, size = 0, os.fstat(number).st_size
        for begin, end in [*extents(number), (size, size)]:
            while at < begin:
                count = min(CHUNK, begin - at)
                yield view[:count]
                at += count
            while at < end:
                data = os.pread(number, min(CHUNK, end - at), at)
                if not data:
                    raise OSError(SHORTER)
                yield data
                at += len(data)


def sha256(disk: Path, moved: Callable[[int], None] = lambda _: None) -> str:
    """The digest of a file, holes included.

    Args:
        moved: Told of each piece's bytes.
    """
    digest = hashlib.sha256()
    for piece in pieces(disk):
        digest.update(piece)
        moved(len(piece))
    return digest.hexdigest()


def copy_disk(source: Path, target: Path) -> None:
    """Copy a disk with its holes and its user attributes; nothing half-written has the target's name.

    Args:
        target: May be the source, which then shares its file with no other name.

    Raises:
        UnavailableError: The copy failed, for example because there is no room.
    """
    try:
        with atomic_path(target) as partial:
            copy(source, partial)
            for name in os.listxattr(source):
                if name.startswith("user."):
                    os.setxattr(partial, name, os.getxattr(source, name))
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(target.parent) from error
        raise UnavailableError(f"{source} can't be copied to {target}: {error}") from error


def copy(source: Path, target: Path, moved: Callable[[int], None] = lambda _: None) -> None:
    """Copy what is no hole.

    Args:
        moved: Told of each piece's bytes.
    """
    with opened(source) as number, target.open("wb") as file:
        file.truncate(os.fstat(number).st_size)
        for begin, end in extents(number):
            copy_part(number, file.fileno(), begin, end, begin, moved)


def copy_part(
    source: int,
    target: int,
    begin: int,
    end: int,
    at: int,
    moved: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy a part of an open file to a place in another; the kernel shares it where the file system can."""
    while begin < end:
        count = min(8 * CHUNK, end - begin)
        try:
            copied = os.copy_file_range(source, target, count, begin, at)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP):
                raise
            os.lseek(target, at, os.SEEK_SET)  # two file systems
            copied = os.sendfile(target, source, begin, count)
        if not copied:
            raise OSError(SHORTER)
        begin += copied
        at += copied
        moved(copied)


@contextlib.contextmanager
def run_alongside(
    work: Callable[..., str], *arguments: Any, moved: Callable[[int], None]
) -> Iterator[Future[str]]:
    """Work that is done beside a block; where the block fails, it ends at its next piece.

    Args:
        work: Is given the arguments, and what to tell of each piece's bytes.
    """
    failed = threading.Event()

    def tell(count: int) -> None:
        if failed.is_set():
            raise CancelledError
        moved(count)

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(work, *arguments, tell)
        except BaseException:
            failed.set()
            raise


@contextlib.contextmanager
def opened(disk: Path) -> Iterator[int]:
    """A file that is read by its number."""
    number = os.open(disk, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)
