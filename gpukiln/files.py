"""Atomic writes of files and folders, and files for their owner alone; sent to machines, so Python 3.9."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import select
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, or of a used-up disk quota
PARTIAL = ".*.partial"  # what a killed process leaves: `.NAME.….partial`, a file or a folder


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path` at the block's end, and removed where the block fails.

    Yields:
        The temporary path; nothing exists there yet.
    """
    # In the same folder, because a rename works only within a file system; hidden from globs like *.json.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with name_full_disk_error(path, str(partial)):
            yield partial
            partial.replace(path)
    except BaseException:
        remove(partial)
        raise


@contextlib.contextmanager
def name_full_disk_error(path: Path, written_path: str = "") -> Iterator[None]:
    """Make the error of a full disk name the path that a block writes.

    The error of a write has no path, and that of a copy (`shutil.copyfile`) may have the source's.

    Args:
        written_path: The path that the block really writes, where it is another one.
    """
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        # An error about another file (the source of a copy) keeps its name.
        of_block = not names or any(name.startswith(written_path or str(path)) for name in names)
        if error.errno in FULL and of_block:
            error.filename, error.filename2 = str(path), None
        raise


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically: readers get the old content or the new, also after a power failure.

    Raises:
        OSError: The write failed; the old content is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as partial, open_private(partial) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fdatasync(
            file.fileno()
        )  # before the rename: after a power failure the new name could have no content


def remove_partial(*folders: Path) -> list[Path]:
    """Remove the partial files that killed processes left in folders; no process may be writing there.

    Returns:
        The removed paths.
    """
    partial_files = [path for folder in folders for path in sorted(folder.glob(PARTIAL))]
    for path in partial_files:
        remove(path)
    return partial_files


def remove_partial_of(path: Path) -> None:
    """Remove the partial files that killed processes left of one path; no process may be writing it."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.????????.partial*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    # rmtree refuses a link to a folder; the link alone is removed.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_private(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file for writing with mode 0600, whatever the umask and the mode of an existing file are."""

    # The mode of os.open applies to new files alone, hence fchmod.
    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        os.fchmod(number, 0o600)
        return number

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=opener)


def reader_has_ended(file: Any) -> bool:
    """Whether a stream, such as standard output, is a pipe that nobody reads any more (poll(2), POLLERR)."""
    try:
        poll = select.poll()
        poll.register(file.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # it is closed, or is no file
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
