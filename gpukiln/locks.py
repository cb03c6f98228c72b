"""File locks between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.errors import BusyError

if TYPE_CHECKING:
    from filelock import FileLock


def hold(path: Path, *, busy: BusyError | None = None, wait_s: float = 0) -> FileLock:
    """Take a lock; it is released with its last reference and when the process ends. The file stays.

    Args:
        busy: The error to raise where another process holds the lock; None: wait for it.
        wait_s: Seconds to wait before that error.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - slow to import, and few commands lock

    # filelock falls back to a marker file where a file system has no locks; that would outlive a killed
    # process
    lock = FileLock(path, timeout=wait_s if busy else -1, mode=0o600, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise busy or BusyError(f"{path} is held by another process") from None
    return lock


@contextlib.contextmanager
def locked(path: Path, *, busy: BusyError | None = None, wait_s: float = 0) -> Iterator[None]:
    """Hold a lock, see `hold`."""
    lock = hold(path, busy=busy, wait_s=wait_s)
    try:
        yield
    finally:
        lock.release()
