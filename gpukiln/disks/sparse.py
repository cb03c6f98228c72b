"""Sparse files: finds their data, and copies and hashes it without reading the holes."""

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
# One buffer of zeros for all holes.
_ZEROS = bytes(CHUNK)


def extents(number: int) -> Iterator[tuple[int, int]]:
    """The data of an open file: begin and end of each extent in bytes. Holes are between them."""
    at, end = 0, os.fstat(number).st_size
    while at < end:
        try:
            at = os.lseek(number, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no data behind this offset (lseek(2))
            return
        hole = os.lseek(number, at, os.SEEK_HOLE)
        yield at, hole
        at = hole


def blocks(number: int, size: int) -> Iterator[int]:
    """Numbers of the blocks of an open file that have any data, in ascending order.

    Args:
        size: Bytes of a block.
    """
    behind = 0
    for begin, end in extents(number):
        # Two extents may share a block: `behind` is the first block that was not yielded yet.
        yield from range(max(begin // size, behind), behind := -(-end // size))


def used_bytes(disk: Path) -> int:
    """Bytes that a disk occupies on its file system."""
    return disk.stat().st_blocks * 512  # st_blocks counts 512 bytes whatever the block size is (stat(2))


def data_bytes(disk: Path) -> int:
    """Bytes of a disk that are data, not holes."""
    with opened(disk) as number:
        return sum(end - begin for begin, end in extents(number))


def pieces(disk: Path) -> Iterator[bytes | memoryview]:
    """The content of a disk in order; for holes zeros, which are not read from the file."""
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
        moved: Called with the number of bytes of each piece.
    """
    digest = hashlib.sha256()
    for piece in pieces(disk):
        digest.update(piece)
        moved(len(piece))
    return digest.hexdigest()


def copy_disk(source: Path, target: Path) -> None:
    """Copy a disk with its holes and its user attributes; the target's name appears only with the whole copy.

    Args:
        target: May be the source: it then gets a file of its own, no longer hard-linked with other names.

    Raises:
        UnavailableError: The copy failed, for example because the disk is full.
    """
    try:
        with atomic_path(target) as partial:
            copy(source, partial)
            for name in os.listxattr(source):
                # Other namespaces (security, trusted) belong to this computer; `user.gpukiln.outside` marks
                # untrusted disks.
                if name.startswith("user."):
                    os.setxattr(partial, name, os.getxattr(source, name))
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(target.parent) from error
        raise UnavailableError(f"{source} can't be copied to {target}: {error}") from error


def copy(source: Path, target: Path, moved: Callable[[int], None] = lambda _: None) -> None:
    """Copy the data; holes stay holes.

    Args:
        moved: Called with the number of bytes of each piece.
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
    """Copy a range of an open file into another; file systems such as XFS and Btrfs share the blocks."""
    while begin < end:
        # Pieces: a call that copies gigabytes can be neither interrupted nor shown.
        count = min(8 * CHUNK, end - begin)
        try:
            copied = os.copy_file_range(source, target, count, begin, at)
        except OSError as error:
            # EXDEV: kernels before 5.3 refuse two file systems; EOPNOTSUPP: the file system has no such copy
            # (copy_file_range(2)).
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
    """Run work in a thread while the block runs; where the block fails, the work ends at its next piece.

    Args:
        work: Called with the arguments and a function that it calls with the bytes of each piece.
    """
    failed = threading.Event()

    def report(count: int) -> None:
        if failed.is_set():
            raise CancelledError
        moved(count)

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(work, *arguments, report)
        except BaseException:
            failed.set()
            raise


@contextlib.contextmanager
def opened(disk: Path) -> Iterator[int]:
    """The file descriptor of a file that is open for reading."""
    number = os.open(disk, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)
