"""Raw disks with holes: where their data is, copied and hashed without reading what is not there."""

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def copy(source: Path, target: Path, moved: Callable[[int], None]) -> None:
    """Copy what is no hole.

    Args:
        moved: Told of each piece's bytes.
    """
    with opened(source) as wanted, target.open("wb") as file:
        file.truncate(os.fstat(wanted).st_size)
        for begin, end in extents(wanted):
            copy_part(wanted, file.fileno(), begin, end, begin, moved)


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
def meanwhile(
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
