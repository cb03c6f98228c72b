"""The files with a region's content: checked by digests, written atomically, and repaired from copies.

    regions/REGION.json              all of a region that outlives the server
    regions/REGION.json.last         a copy: the last valid content
    snapshots/SNAPSHOT.raw           a disk
    snapshots/SNAPSHOT.REGION.json   the disk's description: its snapshot, and the images that use it

Each JSON file has a digest of its content, so a truncated or changed file is detected. An unreadable file
never causes the removal of anything: it is repaired from the others, or the command ends with an error. A
disk is written before its descriptions, those before the region's file, and that before its copy.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.layout import Layout, write_in_place
from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic
from gpukiln.parsing import parse_json

changing = threading.Lock()
"""Held while a region is read from moto and written, and while a snapshot is removed: otherwise a concurrent
save could write the snapshot's description again, and a disk with a description is kept."""
MISSING = "is missing"
# The whole disk would take seconds to hash; a replaced or emptied disk differs at its beginning.
HEAD = 1 << 16  # bytes at the beginning of a disk whose digest is in its description
# us-west-2.json, us-west-2.json.last
_NAME = re.compile(r"(?P<region>[a-z]{2}(-[a-z0-9]+)+)\.json(\.last)?")
# snap-0123456789abcdef0.us-west-2.json
_DESCRIPTION = re.compile(r"(?P<snapshot>snap-[0-9a-f]+)\.(?P<region>[a-z0-9-]+)\.json")
_SNAPSHOT_ID = re.compile(r"snap-[0-9a-f]+")


class DamagedError(Exception):
    """A file that exists and has no valid content."""


@dataclass(frozen=True)
class StoredRegion:
    """A region's stored content.

    Args:
        region: Its name.
        document: What `dump_region` returned; None where it is lost.
        problems: One line for each damaged file, with what happens to it.
        descriptions: The readable descriptions, by snapshot.
    """

    region: str
    document: dict[str, Any] | None
    problems: tuple[str, ...] = ()
    descriptions: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def require(self, layout: Layout) -> dict[str, Any]:
        """The document.

        Raises:
            UnavailableError: It is lost; the message has the files.
        """
        if self.document is None:
            raise UnavailableError(
                f"{self.problems[0]}; no disk is touched",
                hint="restore one of them from a backup, or move both away: gpukiln then restores the images "
                f"from the descriptions in {layout.snapshots}, but not the parameters (the channels) and "
                "container images",
                details=self.problems[1:],
            )
        return self.document


def region_file(layout: Layout, region: str) -> Path:
    return layout.regions / f"{region}.json"


def copy_file(layout: Layout, region: str) -> Path:
    """The copy of a region's file."""
    return layout.regions / f"{region}.json.last"


def description_file(layout: Layout, snapshot_id: str, region: str) -> Path:
    """A region's description of a disk; a base image's disk has one for each region."""
    return layout.snapshots / f"{snapshot_id}.{region}.json"


def description_files(layout: Layout, snapshot_id: str) -> list[Path]:
    """All regions' descriptions of a disk."""
    return sorted(layout.snapshots.glob(f"{snapshot_id}.*.json"))


def empty_document() -> dict[str, Any]:
    """The document of an empty region."""
    return {"images": {}, "snapshots": {}, "parameters": {}}


def snapshots_of_image(image: Mapping[str, Any]) -> set[str]:
    """All snapshots that any field of an image has.

    >>> sorted(snapshots_of_image({"snapshot": "snap-0a", "devices": [{"Ebs": {"SnapshotId": "snap-0b"}}]}))
    ['snap-0a', 'snap-0b']
    >>> snapshots_of_image({"name": "empty"})
    set()
    """
    return set(_SNAPSHOT_ID.findall(json.dumps(image)))


def regions_on_disk(layout: Layout) -> list[str]:
    """All regions with any file, damaged or not."""
    names = {match["region"] for file in _entries(layout.regions) if (match := _NAME.fullmatch(file.name))}
    names |= {match["region"] for match in map(_match_description, _entries(layout.snapshots)) if match}
    return sorted(names)


def inspect_region(layout: Layout, region: str) -> StoredRegion:
    """A region's content, as far as its files can be read; changes nothing."""
    described, damaged = _descriptions(layout, region)
    file, copy = region_file(layout, region), copy_file(layout, region)
    document, wrong = _read_sealed(file)
    kept, copy_wrong = _read_sealed(copy)
    problems = []
    if document is not None:
        if copy_wrong:
            problems = [f"{copy} {copy_wrong}: it is restored from {file.name}"]
        damaged = {**_missing_descriptions(layout, region, document, described), **damaged}
    elif kept is not None:
        document = _merge_descriptions(kept, described)
        problems = [
            f"{file} {wrong}: it is restored from {copy.name} and from the descriptions next to the disks"
        ]
    # A region that was never used, or one that lost both files: then it has descriptions.
    elif wrong == copy_wrong == MISSING:
        document = _merge_descriptions(empty_document(), described)
        if described:
            problems = [
                f"{file} is missing, and so is {copy.name}: images are restored from the descriptions of "
                "their disks; parameters (the channels) and container images are lost"
            ]
    else:
        problems = [f"{file} {wrong}, and its copy {copy.name} {copy_wrong}"]
    known = document["snapshots"] if document else {}
    for snapshot_id, text in damaged.items():
        end = "it is restored" if snapshot_id in known else "its disk is kept, but nothing describes it"
        problems.append(f"{text}: {end}")
    return StoredRegion(region, document, tuple(problems), described)


def read_region(layout: Layout, region: str) -> dict[str, Any]:
    """A region's document.

    Raises:
        UnavailableError: Its files are damaged and can't be repaired.
    """
    return inspect_region(layout, region).require(layout)


def write_region(layout: Layout, region: str, document: dict[str, Any]) -> None:
    """Write those of a region's files whose content differs, damaged ones included.

    Raises:
        OSError: A write failed.
    """
    for snapshot_id, fields in document["snapshots"].items():
        disk = layout.snapshot(snapshot_id)
        if not disk.is_file():
            continue
        file = description_file(layout, snapshot_id, region)
        before, _ = _read_sealed(file)
        description = {
            "snapshot": fields,
            "images": {
                image_id: image
                for image_id, image in document["images"].items()
                if snapshot_id in snapshots_of_image(image)
            },
            "disk": (before or {}).get("disk") or disk_facts(disk),
        }
        _write_sealed(file, description)
    _write_sealed(region_file(layout, region), document)
    _write_sealed(copy_file(layout, region), document)


def repair_files(layout: Layout) -> list[str]:
    """Repair damaged files while no server runs; a damaged file is set aside, not removed.

    Returns:
        A line for each repair.

    Raises:
        UnavailableError: A region can't be repaired; nothing was changed.
    """
    stored = [inspect_region(layout, name) for name in regions_on_disk(layout)]
    for region in stored:
        region.require(layout)
    problems: list[str] = []
    for region in stored:
        if region.problems:
            write_region(layout, region.region, region.require(layout))
            problems += region.problems
    return problems


def disk_facts(disk: Path) -> dict[str, Any]:
    """Size and digest of a disk's beginning, by which a changed disk is detected later."""
    with disk.open("rb") as file:
        head = hashlib.sha256(file.read(HEAD)).hexdigest()
    return {"bytes": disk.stat().st_size, "head": head}


def disk_problem(layout: Layout, snapshot_id: str, recorded: Mapping[str, Any]) -> str:
    """The problem of a snapshot's disk, or an empty string.

    Args:
        layout: The cloud's files.
        recorded: `disk_facts` when it was written.
    """
    disk = layout.snapshot(snapshot_id)
    try:
        size = disk.stat().st_size
        if size == recorded["bytes"]:
            return (
                ""
                if disk_facts(disk) == recorded
                else f"{disk} has changed: its beginning differs from what was written"
            )
    except FileNotFoundError:
        return f"{disk} is missing"
    except OSError as error:
        return f"{disk} can't be read: {error.strerror}"
    return f"{disk} has {size} bytes, and {recorded['bytes']} were written"


def _read_sealed(file: Path) -> tuple[dict[str, Any] | None, str]:
    """A file's document and an empty text; or None and what is wrong."""
    try:
        return _unseal(file.read_bytes()), ""
    except FileNotFoundError:
        return None, MISSING if not file.is_symlink() else "is damaged (it is a dangling link)"
    except OSError as error:
        return None, f"can't be read ({error.strerror})"
    except DamagedError as error:
        return None, f"is damaged ({error})"


def _unseal(content: bytes) -> dict[str, Any]:
    if not content:
        raise DamagedError("it is empty")
    try:
        sealed = parse_json(content)
    except ValueError as error:
        raise DamagedError(f"it is not JSON: {str(error)[:80]}") from error
    # Other keys: not a file that this version wrote.
    if not isinstance(sealed, dict) or set(sealed) != {"sha256", "document"}:
        raise DamagedError("it has another format, possibly of another version of gpukiln")
    if sealed["sha256"] != _digest(sealed["document"]):
        raise DamagedError("its digest does not match its content")
    document: dict[str, Any] = sealed["document"]
    return document


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _write_sealed(file: Path, document: dict[str, Any]) -> None:
    document = json.loads(json.dumps(document))  # as a reader gets it: all keys are text
    text = json.dumps({"sha256": _digest(document), "document": document}, indent=1)
    current, wrong = _read_sealed(file)
    # Unchanged files are not written: a request would otherwise write every region.
    if current == document:
        return
    if current is None and wrong != MISSING:
        write_in_place(file, text)
    else:
        write_atomic(file, text)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _match_description(file: Path) -> re.Match[str] | None:
    return _DESCRIPTION.fullmatch(file.name)


def _descriptions(layout: Layout, region: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The readable descriptions by snapshot, and the problems of the others."""
    described: dict[str, dict[str, Any]] = {}
    damaged: dict[str, str] = {}
    for file in _entries(layout.snapshots):
        match = _match_description(file)
        if match and match["region"] == region:
            document, wrong = _read_sealed(file)
            if document is None:
                damaged[match["snapshot"]] = f"{file} {wrong}"
            else:
                described[match["snapshot"]] = document
    return described, damaged


def _missing_descriptions(
    layout: Layout, region: str, document: Mapping[str, Any], described: Mapping[str, Any]
) -> dict[str, str]:
    """The problem of each snapshot that has a disk but no description."""
    return {
        name: f"{description_file(layout, name, region)} is missing"
        for name in document["snapshots"]
        if name not in described and layout.snapshot(name).is_file()
    }


def _merge_descriptions(kept: dict[str, Any], described: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A region's document from its copy, updated from the descriptions, which are as new or newer."""
    images = {
        image_id: image
        for image_id, image in kept["images"].items()
        if not snapshots_of_image(image) & set(described)
    }
    for description in described.values():
        images.update(description["images"])
    snapshots = {
        **kept["snapshots"],
        **{name: description["snapshot"] for name, description in described.items()},
    }
    return {**kept, "images": images, "snapshots": snapshots}
