"""The disks of volumes: one raw file for each volume, with its description in `vol-….json`.

The descriptions are the only list of volumes, so no central list can be damaged. A disk with an unreadable
description is kept.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.disks.grow import fit_root, grow_file
from gpukiln.disks.sparse import copy_disk, used_bytes
from gpukiln.errors import UnavailableError
from gpukiln.files import remove_partial, write_atomic
from gpukiln.parsing import parse_json
from gpukiln.programs import require_space

log = logging.getLogger(__name__)
SPARE = 2 << 30  # bytes that have to stay free after a copy
UNTRUSTED_ATTRIBUTE = "user.gpukiln.outside"  # extended attribute of a disk's file


def make_disk(
    layout: Layout, volume_id: str, *, size_gib: int, source: Path | None, bootable: bool = False
) -> Path:
    """Create the disk of a new volume; a failure leaves nothing.

    Args:
        layout: The cloud's files.
        source: Disk of its snapshot; None: an empty disk.
        bootable: Whether to grow its root partition and file system.

    Raises:
        UnavailableError: The disk is full, or a tool failed.
    """
    disk = layout.volume(volume_id)
    if source is not None and not source.exists():
        raise UnavailableError(f"{source.stem} has no disk, so no volume can be created from it")
    require_space(layout.volumes, SPARE + (used_bytes(source) if source else 0))
    try:
        if source is None:
            # No size yet: grow_file makes it sparse.
            disk.touch()
        else:
            copy_disk(source, disk)
        grow_file(disk, size_gib)
        if bootable:
            fit_root(disk)
    # Ctrl-C, too: a disk without a description would be kept for ever.
    except BaseException:
        disk.unlink(missing_ok=True)
        raise
    return disk


def make_writable(disk: Path) -> None:
    """Copy a volume's disk where a snapshot has the same file.

    Args:
        disk: The volume's disk.

    Raises:
        UnavailableError: The disk has no space for a copy.
    """
    # A hard link is how a snapshot shares its disk with a volume.
    if disk.stat().st_nlink > 1:
        require_space(disk.parent, SPARE + used_bytes(disk))
        # Onto itself: the copy takes the name, and the snapshot keeps the old file.
        copy_disk(disk, disk)


def mark_untrusted(disk: Path) -> None:
    """Mark a disk whose content comes from outside this cloud; copies keep the mark.

    Raises:
        OSError: The file system has no user extended attributes.
    """
    os.setxattr(disk, UNTRUSTED_ATTRIBUTE, b"1")


def is_untrusted(disk: Path) -> bool:
    """Whether a disk, or one that it was copied from, was written from outside this cloud."""
    return disk.exists() and UNTRUSTED_ATTRIBUTE in os.listxattr(disk)


def write_description(layout: Layout, volume_id: str, description: dict[str, Any]) -> None:
    """Write a volume's description atomically, if it has changed.

    Args:
        layout: The cloud's files.
        description: A JSON document.
    """
    file, text = layout.volume(volume_id).with_suffix(".json"), json.dumps(description, indent=1)
    # Descriptions are written at each call that may change a volume; most change nothing.
    if file.exists() and file.read_text() == text:
        return
    write_atomic(file, text)


def read_description(file: Path) -> dict[str, Any] | None:
    """A volume's description; None where it can't be read."""
    try:
        description = parse_json(file.read_text())
        return description if isinstance(description["size_gib"], int) and description["region"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def descriptions(layout: Layout, region: str) -> dict[str, dict[str, Any]]:
    """The volumes of a region with a disk and a readable description.

    Args:
        layout: The cloud's files.
        region: Name of the region.

    Returns:
        Their descriptions by volume id.
    """
    known = {file.stem: read_description(file) for file in sorted(layout.volumes.glob("vol-*.json"))}
    return {
        volume_id: description
        for volume_id, description in known.items()
        if description and description["region"] == region and layout.volume(volume_id).exists()
    }


def remove(layout: Layout, volume_id: str) -> None:
    """Remove a volume's disk and description.

    Args:
        layout: The cloud's files.
    """
    # The disk first: a description without a disk is removed by the next start, a disk without one is kept.
    layout.volume(volume_id).unlink(missing_ok=True)
    layout.volume(volume_id).with_suffix(".json").unlink(missing_ok=True)


def sweep(layout: Layout) -> None:
    """Remove what a killed server left: partial files, and volumes that ended with their machine.

    Args:
        layout: The cloud's files; no server may run.
    """
    remove_partial(layout.volumes)
    for disk in sorted(layout.volumes.glob("vol-*.raw")):
        description = read_description(disk.with_suffix(".json"))
        if description is None:
            log.warning("%s is kept, but its description can't be read: %s", disk, disk.with_suffix(".json"))
        elif (attached := description.get("attachment")) and attached["delete_on_termination"]:
            log.info("removing %s: its machine %s has ended", disk.name, attached["instance_id"])
            remove(layout, disk.stem)
    for file in layout.volumes.glob("vol-*.json"):
        if not layout.volume(file.stem).exists() and read_description(file) is not None:
            file.unlink()  # its disk was never completed


def stored_volumes(layout: Layout) -> list[dict[str, Any]]:
    """All volumes with a disk, for the commands that show and remove them; needs no server.

    Args:
        layout: The cloud's files.

    Returns:
        For each volume its id, region, zone and size in GiB (None where the description can't be read), its
        instance or None, and its size on disk in MiB.
    """
    rows = []
    for disk in sorted(layout.volumes.glob("vol-*.raw")):
        known = read_description(disk.with_suffix(".json")) or {}
        rows.append(
            {
                "volume": disk.stem,
                "region": known.get("region"),
                "zone": known.get("zone"),
                "size_gib": known.get("size_gib"),
                "attached_to": (known.get("attachment") or {}).get("instance_id"),
                "mib": used_bytes(disk) >> 20,
            }
        )
    return rows
