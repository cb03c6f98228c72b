"""Enlarges a raw disk, its partition table and its root file system."""

import contextlib
from pathlib import Path

from gpukiln.disks.loop import LoopDevice
from gpukiln.disks.table import read_table, root_partition
from gpukiln.programs import tool

GROWTH = 64 << 20  # bytes: less free space behind the root partition is left alone; volumes grow by whole GiB


def grow_file(disk: Path, size_gib: int) -> None:
    """Enlarge a raw disk; its partitions stay as they are, and a larger disk keeps its size.

    Args:
        size_gib: The new size in GiB.
    """
    with disk.open("r+b") as file:
        file.truncate(max(size_gib << 30, disk.stat().st_size))


def fit_table(disk: Path) -> None:
    """Move a GPT's second copy to the new end of a disk that has grown."""
    if read_table(disk).label == "gpt":
        tool("sgdisk", "--move-second-header", str(disk))


def fit_root(disk: Path) -> None:
    """Grow the root partition and its file system to the end of a disk that has grown.

    Args:
        disk: A raw disk that is not in use.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    part = root_partition(disk)
    if disk.stat().st_size - part.end < GROWTH:
        return
    fit_table(disk)
    # ", +": the same start, up to the end (sfdisk(8), Input formats).
    tool("sfdisk", "--quiet", "--no-reread", "-N", str(part.number), str(disk), stdin=", +\n")
    with contextlib.closing(LoopDevice(disk, offset=part.offset)) as loop:
        # resize2fs refuses a file system that was not checked (resize2fs(8)).
        tool("e2fsck", "-f", "-p", str(loop.path))
        tool("resize2fs", str(loop.path), f"{root_partition(disk).blocks_kib}K")
