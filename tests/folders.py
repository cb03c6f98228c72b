"""Folders of a test run that take gigabytes: those of runs that were killed are removed by the next run."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

PREFIX = "gpukiln-tests-"
# not below /tmp, which may be memory: a build takes several GiB
PARENT = Path("/var/tmp")  # noqa: S108 - names below it are made by mkdtemp


@contextlib.contextmanager
def folder(parent: Path = PARENT) -> Iterator[Path]:
    """A folder that is removed at the end, or by `remove_abandoned` of a later run where this one is killed.

    Its lock ends with this process, in whichever process namespace that runs: a number of a process
    would mean another one there.
    """
    with FileLock(parent / f"{PREFIX[:-1]}.lock"):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX)
    path.chmod(0o755)  # apt reads its lists there as another user
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a machine that still stops writes there
        os.close(held)


def remove_abandoned(parent: Path = PARENT) -> list[Path]:
    """Remove the folders whose process has ended, but for those with something mounted below."""
    removed = []
    mounts = Path("/proc/self/mounts").read_text()
    with FileLock(parent / f"{PREFIX[:-1]}.lock"):
        for path in parent.glob(f"{PREFIX}*/"):
            if f" {path}/" in mounts or not _abandoned(path):
                continue
            # a mount in the middle of the removal is left alone
            subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)
            removed.append(path)
    return removed


def _abandoned(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def too_full(needed_gib: float, parent: Path = PARENT) -> str | None:
    """Why a run can't have its disks there, None where it can."""
    free_gib = shutil.disk_usage(parent).free / 2**30
    if free_gib >= needed_gib:
        return None
    return (
        f"{parent} has {free_gib:.1f} GiB free, the tests on machines take up to {needed_gib:g} GiB: "
        f"free some, or run `scripts/run pytest tests/unit`"
    )
