"""Mounts the root file system of a raw disk, by a loop device at the partition's offset."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpukiln.disks.loop import LoopDevice
from gpukiln.disks.table import root_partition
from gpukiln.errors import BusyError, UnavailableError
from gpukiln.locks import hold, locked
from gpukiln.programs import tool

MOUNTS = Path("/run/gpukiln-mounts")  # only root mounts, and a boot empties it


def mount_root(disk: Path, mountpoint: Path, *, devices: bool = False, read_only: bool = False) -> None:
    """Mount the root file system of a disk.

    Args:
        disk: A raw disk.
        mountpoint: The folder to mount on; created when missing.
        devices: Whether its device nodes work (without: nodev).
        read_only: Mounts without replaying the journal, so that not a byte changes.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: The mount failed.
    """
    part = root_partition(disk)
    # norecovery: ext4 replays its journal even on a read-only mount (ext4(5)).
    options = [*([] if devices else ["nodev"]), *(["ro", "norecovery"] if read_only else [])]
    mountpoint.mkdir(parents=True, exist_ok=True)
    # Not mount's own `-o loop`: it refuses a file that has a loop device already, and one that was let go
    # lives on for a moment when another process, as every such mount does, looks through all of them.
    loop = LoopDevice(disk, offset=part.offset, size=part.size, read_only=read_only)
    with contextlib.closing(loop):
        tool("mount", *(["--options", ",".join(options)] if options else []), str(loop.path), str(mountpoint))


@contextlib.contextmanager
def mounted_root(disk: Path, *, writable: bool = False) -> Iterator[Path]:
    """The root file system of a disk, mounted for the length of a block.

    The block's end unmounts it. Where this process is killed, the next call in any process does.

    Args:
        disk: A raw disk.

    Yields:
        The folder it is mounted on.

    Raises:
        IncompatibleError: The disk has no partition table, or a damaged one.
        UnavailableError: It can't be mounted, or unmounted.
    """
    try:
        MOUNTS.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"no folder to mount on: {error}", hint="mounting needs root") from error
    # One at a time: else another process could take the new folder for one whose owner was killed.
    with locked(MOUNTS / "lock"):
        # A lock that can be taken belongs to a process that was killed: its mount is removed here.
        for lock in MOUNTS.glob("*.lock"):
            with contextlib.suppress(BusyError, UnavailableError), locked(lock, busy=BusyError("it is used")):
                _unmount(lock)
        folder = Path(tempfile.mkdtemp(dir=MOUNTS))
        held = hold(folder.with_suffix(".lock"))
    try:
        mount_root(disk, folder, read_only=not writable)
        yield folder
    finally:
        try:
            _unmount(folder.with_suffix(".lock"))
        finally:
            held.release()


def _unmount(lock: Path) -> None:
    """Unmount and remove a folder of MOUNTS, and its lock, which the caller holds."""
    folder = lock.with_suffix("")
    if folder.is_mount():
        tool("umount", str(folder))
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
    lock.unlink(missing_ok=True)
