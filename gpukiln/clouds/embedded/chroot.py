"""Runs file operations inside a machine's root, so that no link leads to this computer's files."""

import os
import threading
import time
from collections.abc import Callable
from ctypes import CDLL, get_errno
from pathlib import Path
from typing import TypeVar

CLONE_FS = 0x200  # linux/sched.h
T = TypeVar("T")


def in_root(root: Path, work: Callable[[], T]) -> T:
    """Call a function in a thread whose root is a machine's.

    A disk, or root of a running machine, can place a link to a file of this computer anywhere. The chroot
    applies to this thread alone (unshare(2), CLONE_FS; chroot(2)). The function must neither import nor start
    a program.

    Args:
        root: A mounted root file system, or /proc/PID/root.

    Returns:
        The function's result.

    Raises:
        OSError: The root can't be entered; and what the function raises.

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
            # chroot(2) keeps the working folder, from which ".." would lead out.
            os.chdir("/")
            results.append(work())
        except BaseException as error:
            # Raised below in the caller's thread.
            errors.append(error)

    # A new thread, because a thread can't leave its root again.
    thread = threading.Thread(target=enter_and_work)
    thread.start()
    number = thread.native_id
    thread.join()
    # Python's join returns before the kernel has ended the thread, whose root keeps the file system busy.
    while Path(f"/proc/self/task/{number}").exists():
        time.sleep(0.001)
    if errors:
        raise errors[0]
    return results[0]
