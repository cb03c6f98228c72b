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
MOUNT, VOLUME = "disks", "disks.xfs"
VOLUME_GIB = 100  # at most; its file has what is in use


@contextlib.contextmanager
def disks(run: Path, parent: Path = PARENT) -> Iterator[Path]:
    """A folder for the disks of all processes of a run, on a file system of its own.

    It is XFS, where a copy of a disk shares its blocks: without 0.7 GiB to copy and to write, a machine costs
    0.9 s of a processor less than on ext4. The last process of the run removes it.

    Args:
        run: What the processes of the run share.
    """
    lock, note = FileLock(run / "disks.lock"), run / "disks"
    with lock:
        path = Path(note.read_text()) if note.exists() else None
        if path and path.exists():
            held = _lock(path, fcntl.LOCK_SH)
        else:
            path, held = _create_volume(parent)
            note.write_text(str(path))
    try:
        yield path / MOUNT
    finally:
        with lock:
            with contextlib.suppress(BlockingIOError):  # another process still uses it
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # lazily: a machine that still stops has files there
                subprocess.run(["umount", "--lazy", path / MOUNT], check=True)
                shutil.rmtree(path)
            os.close(held)


def _create_volume(parent: Path) -> tuple[Path, int]:
    """A new folder with a file system in a file, mounted in it; and the file descriptor that locks it."""
    with FileLock(parent / f"{PREFIX[:-1]}.lock"):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = _lock(path, fcntl.LOCK_SH)
    path.chmod(0o755)
    volume, mount = path / VOLUME, path / MOUNT
    mount.mkdir()
    volume.touch()
    os.truncate(volume, VOLUME_GIB << 30)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", volume], check=True)
    # discard: what is removed there is free here
    subprocess.run(["mount", "-o", "loop,discard", volume, mount], check=True)
    return path, held


def _lock(path: Path, kind: int) -> int:
    """Lock a folder until this process ends or closes the number that is returned."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, kind)
    return held


@contextlib.contextmanager
def folder(parent: Path = PARENT) -> Iterator[Path]:
    """A folder that is removed at the end, or by `remove_abandoned` of a later run where this one is killed.

    Its lock ends with this process, in whichever process namespace that runs: a number of a process
    would mean another one there.
    """
    with FileLock(parent / f"{PREFIX[:-1]}.lock"):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = _lock(path, fcntl.LOCK_EX)
    path.chmod(0o755)  # apt reads its lists there as another user
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a machine that still stops writes there
        os.close(held)


def remove_abandoned(parent: Path = PARENT) -> list[Path]:
    """Remove the folders whose process has ended, but for those with something mounted below.

    A file system of `disks` is unmounted, unless something still uses it.
    """
    removed = []
    with FileLock(parent / f"{PREFIX[:-1]}.lock"):
        for path in parent.glob(f"{PREFIX}*/"):
            if not _abandoned(path):
                continue
            if (path / MOUNT).is_mount():
                subprocess.run(["umount", path / MOUNT], check=False, stderr=subprocess.DEVNULL)  # in use
            if f" {path}/" in Path("/proc/self/mounts").read_text():
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
