"""One process at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gpukiln.errors import BusyError


@contextlib.contextmanager
def locked(path: Path, *, busy: BusyError | None = None, wait_s: float = 0) -> Iterator[None]:
    """Hold a lock; it goes with the process, however that ends, and the file stays.

    Args:
        busy: What is raised where another process holds it; without it the others are waited for.
        wait_s: For so long they are waited for before that.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - slow to import, and few commands lock

    lock = FileLock(path, timeout=wait_s if busy else -1)
    try:
        lock.acquire()
    except Timeout:
        raise busy or BusyError(f"{path} is held by another process") from None
    try:
        yield
    finally:
        lock.release()
