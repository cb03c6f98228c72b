"""The disks of volumes: one raw file each, with its own description beside it, `vol-….json`.

A volume is told by its description alone, so no list of volumes can be damaged. What can't be read is kept.
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
SPARE = 2 << 30  # bytes to be free beyond a copy before a disk is copied
UNTRUSTED_ATTRIBUTE = "user.gpukiln.outside"  # extended attribute of a disk's file


def make_disk(
    layout: Layout, volume_id: str, *, size_gib: int, source: Path | None, bootable: bool = False
) -> Path:
    """Make the disk of a new volume; nothing is left of one that can't be made.

    Args:
        layout: The cloud's files.
        source: Disk of the snapshot it is made from; None makes an empty one.
        bootable: Whether its root partition and file system grow with it.

    Raises:
        UnavailableError: There is no room, or a tool failed.
    """
    disk = layout.volume(volume_id)
    if source is not None and not source.exists():
        raise UnavailableError(f"{source.stem} has no disk, so no volume can be made of it")
    require_space(layout.volumes, SPARE + (used_bytes(source) if source else 0))
    try:
        if source is None:
            disk.touch()
        else:
            copy_disk(source, disk)
        grow_file(disk, size_gib)
        if bootable:
            fit_root(disk)
    except BaseException:
        disk.unlink(missing_ok=True)
        raise
    return disk


def make_writable(disk: Path) -> None:
    """Give a volume a disk of its own where a snapshot has the same file.

    Args:
        disk: The volume's disk.

    Raises:
        UnavailableError: There is no room for a copy.
    """
    if disk.stat().st_nlink > 1:
        require_space(disk.parent, SPARE + used_bytes(disk))
        copy_disk(disk, disk)


def mark_untrusted(disk: Path) -> None:
    """Note on a disk that its content comes from outside this cloud; every copy of it says so too.

    Raises:
        OSError: The file system has no extended attributes of users.
    """
    os.setxattr(disk, UNTRUSTED_ATTRIBUTE, b"1")


def is_untrusted(disk: Path) -> bool:
    """Whether a disk, or one that it was copied from, was written from outside this cloud."""
    return disk.exists() and UNTRUSTED_ATTRIBUTE in os.listxattr(disk)


def write_description(layout: Layout, volume_id: str, description: dict[str, Any]) -> None:
    """Write what is known of a volume, in one step, only when it changed.

    Args:
        layout: The cloud's files.
        description: A JSON document.
    """
    file, text = layout.volume(volume_id).with_suffix(".json"), json.dumps(description, indent=1)
    if file.exists() and file.read_text() == text:
        return
    write_atomic(file, text)


def read_description(file: Path) -> dict[str, Any] | None:
    """What is known of a volume, or None where that can't be read."""
    try:
        description = parse_json(file.read_text())
        return description if isinstance(description["size_gib"], int) and description["region"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def descriptions(layout: Layout, region: str) -> dict[str, dict[str, Any]]:
    """Every volume of a region that has a disk and can be read.

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
    layout.volume(volume_id).unlink(missing_ok=True)
    layout.volume(volume_id).with_suffix(".json").unlink(missing_ok=True)


def sweep(layout: Layout) -> None:
    """Remove what a killed server left: half-written files, volumes that ended with their machine.

    Args:
        layout: The cloud's files; no server may run.
    """
    remove_partial(layout.volumes)
    for disk in sorted(layout.volumes.glob("vol-*.raw")):
        description = read_description(disk.with_suffix(".json"))
        if description is None:
            log.warning("%s is kept, but what it is can't be read: %s", disk, disk.with_suffix(".json"))
        elif (attached := description.get("attachment")) and attached["delete_on_termination"]:
            log.info("removing %s: its machine %s has ended", disk.name, attached["instance_id"])
            remove(layout, disk.stem)
    for file in layout.volumes.glob("vol-*.json"):
        if not layout.volume(file.stem).exists() and read_description(file) is not None:
            file.unlink()  # its disk was never finished


def stored_volumes(layout: Layout) -> list[dict[str, Any]]:
    """Every volume that has a disk, for the commands that show and remove them; needs no server.

    Args:
        layout: The cloud's files.

    Returns:
        Per volume its id, region, zone, size in GiB (null where its description can't be read), the instance
        that it is attached to or None, and the size on disk in MiB.
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
