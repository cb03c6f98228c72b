"""File work in the root of a machine, where no link leads to this computer."""

import os
import threading
from collections.abc import Callable
from ctypes import CDLL, get_errno
from pathlib import Path
from typing import TypeVar

CLONE_FS = 0x200  # linux/sched.h
T = TypeVar("T")


def in_root(root: Path, work: Callable[[], T]) -> T:
    """Call a function whose paths begin at a machine's root, however its links lead.

    A disk, and who is root on a running machine, can put a link to a file of this computer at any place. The
    kernel resolves paths of the calling thread alone anew (unshare(2), CLONE_FS; chroot(2)), so that other
    threads notice nothing; the function imports nothing and starts no program.

    Args:
        root: A mounted root file system, or /proc/PID/root.

    Returns:
        What the function returns.

    Raises:
        OSError: The root can't be entered; whatever the function raises.

    Example:
        `in_root(Path("/mnt"), lambda: Path("/etc/hostname").read_text())`
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            if CDLL(None, use_errno=True).unshare(CLONE_FS):
                raise OSError(get_errno(), "unshare")
            os.chroot(root)
            os.chdir("/")
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter_and_work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
