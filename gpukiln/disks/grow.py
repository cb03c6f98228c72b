"""A raw disk, its partition table and its root file system reach a new end."""

import contextlib
from pathlib import Path

from gpukiln.disks.loop import LoopDevice
from gpukiln.disks.table import read_table, root_partition
from gpukiln.programs import tool

GROWTH = 64 << 20  # bytes behind the root partition that are worth to be taken; volumes grow by whole GiB


def grow_file(disk: Path, size_gib: int) -> None:
    """Enlarge a raw disk, whose partitions stay as they are; a larger one keeps its size.

    Args:
        size_gib: The size wanted in GiB.
    """
    with disk.open("r+b") as file:
        file.truncate(max(size_gib << 30, disk.stat().st_size))


def fit_table(disk: Path) -> None:
    """Let the partition table know that a disk has grown: a GPT's second copy is at the end."""
    if read_table(disk).label == "gpt":
        tool("sgdisk", "--move-second-header", str(disk))


def fit_root(disk: Path) -> None:
    """Let the root partition and its file system reach the end of a disk that has grown.

    Args:
        disk: A raw disk that is not in use.

    Raises:
        UnavailableError: A tool is missing or failed.
    """
    part = root_partition(disk)
    if disk.stat().st_size - part.end < GROWTH:
        return
    fit_table(disk)
    tool("sfdisk", "--quiet", "--no-reread", "-N", str(part.number), str(disk), stdin=", +\n")
    with contextlib.closing(LoopDevice(disk, offset=part.offset)) as loop:
        tool("e2fsck", "-f", "-p", str(loop.path))
        tool("resize2fs", str(loop.path), f"{root_partition(disk).blocks_kib}K")
