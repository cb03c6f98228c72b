"""One process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.errors import BusyError

if TYPE_CHECKING:
    from filelock import FileLock


def hold(path: Path, *, busy: BusyError | None = None, wait_s: float = 0) -> FileLock:
    """Take a lock; it goes with its last reference and with the process, however that ends. The file stays.

    Args:
        busy: What is raised where another process holds it; without it the others are waited for.
        wait_s: For so long they are waited for before that.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - slow to import, and few commands lock

    # a marker file, to which it falls back where a file system has no locks, would outlive its process
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
