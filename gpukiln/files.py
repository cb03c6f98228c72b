"""Files that are whole or not there, and files that nobody else may read; sent to machines, Python 3.9."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FULL = (errno.ENOSPC, errno.EDQUOT)  # what the system says of a disk without room
PARTIAL = ".*.partial"  # what a killed process leaves: `.NAME.….partial`, a file or a folder


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Let a block make a file or a folder that becomes `path` at its end, and is removed where it fails.

    Yields:
        Where to make it; nothing is there yet.
    """
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
    """Let the error of a full disk name what a block writes.

    A write of an open file names none, and a copy (`shutil.copyfile`) may name its source.

    Args:
        made: Where the block writes it, where that is another place.
    """
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        of_block = not names or any(name.startswith(written_path or str(path)) for name in names)
        if error.errno in FULL and of_block:
            error.filename, error.filename2 = str(path), None
        raise


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file in one step: readers find the old content or the new, also after a loss of power.

    Raises:
        OSError: It could not be written; what stood there stands there still.
    """
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as partial, open_private(partial) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())  # before the rename, or the name may outlive what it names


def remove_partial(*folders: Path) -> list[Path]:
    """Remove what killed processes left in folders; nobody may write there.

    Returns:
        What was removed.
    """
    partial_files = [path for folder in folders for path in sorted(folder.glob(PARTIAL))]
    for path in partial_files:
        remove(path)
    return partial_files


def remove_partial_of(path: Path) -> None:
    """Remove what killed processes left of one file or folder, by `atomic_path`; nobody may write it now."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.????????.partial*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, where it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_private(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file for writing that nobody else may read, whatever the umask and whatever it was before."""

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        os.fchmod(number, 0o600)
        return number

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=opener)
