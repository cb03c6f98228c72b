"""The files that say what this cloud has: read with care, written whole, made again from what lies beside.

    regions/REGION.json              everything of a region that outlives the server
    regions/REGION.json.last         the same once more: the last good copy
    snapshots/SNAPSHOT.raw           a disk
    snapshots/SNAPSHOT.REGION.json   what the disk is: its snapshot, and the images that name it

Each JSON file carries a digest of what it says, so one that was cut, emptied or scribbled on is known. A
file that can't be read is never a reason to remove anything: it is made again from the others, or the command
ends. Disks are written before their descriptions, those before the region's file, and that before its copy.
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
"""Held from when what a region has is read until it is written, and while a snapshot is removed: else it is
described once more, and a disk that somebody describes stays."""
MISSING = "is missing"
HEAD = 1 << 16  # bytes of a disk whose digest its description keeps
_NAME = re.compile(r"(?P<region>[a-z]{2}(-[a-z0-9]+)+)\.json(\.last)?")
_DESCRIPTION = re.compile(r"(?P<snapshot>snap-[0-9a-f]+)\.(?P<region>[a-z0-9-]+)\.json")
_SNAPSHOT_ID = re.compile(r"snap-[0-9a-f]+")


class DamagedError(Exception):
    """A file that is there and does not say what it should."""


@dataclass(frozen=True)
class StoredRegion:
    """What is known of a region.

    Args:
        region: Its name.
        document: What `dump_region` returned; None where it can't be had.
        problems: What is wrong, each with the file and with what becomes of it.
        descriptions: Per snapshot its description, of those that can be read.
    """

    region: str
    document: dict[str, Any] | None
    problems: tuple[str, ...] = ()
    descriptions: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def require(self, layout: Layout) -> dict[str, Any]:
        """The document.

        Raises:
            UnavailableError: It can't be had; the message names the files.
        """
        if self.document is None:
            raise UnavailableError(
                f"{self.problems[0]}; no disk is touched",
                hint="put one of them back from a backup, or move both away: the region's images are then "
                f"made again from what lies beside their disks in {layout.snapshots}; its parameters (the "
                "channels) and container images are not",
                details=self.problems[1:],
            )
        return self.document


def region_file(layout: Layout, region: str) -> Path:
    return layout.regions / f"{region}.json"


def copy_file(layout: Layout, region: str) -> Path:
    """The last good copy of a region's file."""
    return layout.regions / f"{region}.json.last"


def description_file(layout: Layout, snapshot_id: str, region: str) -> Path:
    """What a region says of a disk, beside the disk: a base image's disk belongs to several regions."""
    return layout.snapshots / f"{snapshot_id}.{region}.json"


def description_files(layout: Layout, snapshot_id: str) -> list[Path]:
    """What all regions say of a disk."""
    return sorted(layout.snapshots.glob(f"{snapshot_id}.*.json"))


def empty_document() -> dict[str, Any]:
    """The document of a region that has nothing."""
    return {"images": {}, "snapshots": {}, "parameters": {}}


def snapshots_of_image(image: Mapping[str, Any]) -> set[str]:
    """Every snapshot that an image names, in whatever field."""
    return set(_SNAPSHOT_ID.findall(json.dumps(image)))


def regions_on_disk(layout: Layout) -> list[str]:
    """Every region of which there is any file, damaged or not."""
    names = {match["region"] for file in _entries(layout.regions) if (match := _NAME.fullmatch(file.name))}
    names |= {match["region"] for match in map(_match_description, _entries(layout.snapshots)) if match}
    return sorted(names)


def inspect_region(layout: Layout, region: str) -> StoredRegion:
    """What a region has, as far as it can be known; changes nothing."""
    described, damaged = _descriptions(layout, region)
    file, copy = region_file(layout, region), copy_file(layout, region)
    document, wrong = _read_sealed(file)
    kept, copy_wrong = _read_sealed(copy)
    problems = []
    if document is not None:
        if copy_wrong:
            problems = [f"{copy} {copy_wrong}: it is written again from {file.name}"]
        damaged = {**_missing_descriptions(layout, region, document, described), **damaged}
    elif kept is not None:
        document = _merge_descriptions(kept, described)
        problems = [f"{file} {wrong}: it is made again from {copy.name} and from what lies beside the disks"]
    elif wrong == copy_wrong == MISSING:
        document = _merge_descriptions(empty_document(), described)
        if described:
            problems = [
                f"{file} is missing, and so is {copy.name}: images are made again from what lies beside "
                "their disks; parameters (the channels) and container images were in these files alone"
            ]
    else:
        problems = [f"{file} {wrong}, and its copy {copy.name} {copy_wrong}"]
    known = document["snapshots"] if document else {}
    for snapshot_id, text in damaged.items():
        end = (
            "it is written again"
            if snapshot_id in known
            else "its disk stays, though nothing says what it is"
        )
        problems.append(f"{text}: {end}")
    return StoredRegion(region, document, tuple(problems), described)


def read_region(layout: Layout, region: str) -> dict[str, Any]:
    """What a region has.

    Raises:
        UnavailableError: Its files are damaged, and nothing says what was in them.
    """
    return inspect_region(layout, region).require(layout)


def write_region(layout: Layout, region: str, document: dict[str, Any]) -> None:
    """Write what differs of a region's files: a change is in all of them, and so is what somebody damaged.

    Raises:
        OSError: One could not be written.
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
    """Make again what can be made again, while no server runs; what was damaged is set aside, not removed.

    Returns:
        What was wrong and what was done.

    Raises:
        UnavailableError: Something can't be made again; nothing was changed.
    """
    stored = [inspect_region(layout, region) for region in regions_on_disk(layout)]
    for one in stored:
        one.require(layout)
    problems: list[str] = []
    for one in stored:
        if one.problems:
            write_region(layout, one.region, one.require(layout))
            problems += one.problems
    return problems


def disk_facts(disk: Path) -> dict[str, Any]:
    """What tells later whether a disk is still the one that was written."""
    with disk.open("rb") as file:
        head = hashlib.sha256(file.read(HEAD)).hexdigest()
    return {"bytes": disk.stat().st_size, "head": head}


def disk_problem(layout: Layout, snapshot_id: str, recorded: Mapping[str, Any]) -> str:
    """What is wrong with a snapshot's disk, or an empty string.

    Args:
        layout: The cloud's files.
        wanted: `disk_facts` when it was written.
    """
    disk = layout.snapshot(snapshot_id)
    try:
        size = disk.stat().st_size
        if size == recorded["bytes"]:
            return (
                ""
                if disk_facts(disk) == recorded
                else f"{disk} is not what was written: its beginning differs"
            )
    except FileNotFoundError:
        return f"{disk} is missing"
    except OSError as error:
        return f"{disk} can't be read: {error.strerror}"
    return f"{disk} is {size} bytes long, {recorded['bytes']} were written"


def _read_sealed(file: Path) -> tuple[dict[str, Any] | None, str]:
    """What a file says; or None, and what is wrong with it."""
    try:
        return _unseal(file.read_bytes()), ""
    except FileNotFoundError:
        return None, MISSING if not file.is_symlink() else "is damaged (it is a link to nothing)"
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
        raise DamagedError(f"it is no JSON: {str(error)[:80]}") from error
    if not isinstance(sealed, dict) or set(sealed) != {"sha256", "document"}:
        raise DamagedError("it has another form, perhaps of another version of gpukiln")
    if sealed["sha256"] != _digest(sealed["document"]):
        raise DamagedError("its content does not have its digest")
    document: dict[str, Any] = sealed["document"]
    return document


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _write_sealed(file: Path, document: dict[str, Any]) -> None:
    document = json.loads(json.dumps(document))  # as a reader finds it: keys are text
    text = json.dumps({"sha256": _digest(document), "document": document}, indent=1)
    current, wrong = _read_sealed(file)
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
    """Per snapshot what lies beside its disk; and of those that can't be read what is wrong."""
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
    """Per snapshot that has a disk and no description what is missing."""
    return {
        name: f"{description_file(layout, name, region)} is missing"
        for name in document["snapshots"]
        if name not in described and layout.snapshot(name).is_file()
    }


def _merge_descriptions(kept: dict[str, Any], described: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A copy of a region's document with what lies beside the disks, which is as new or newer."""
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
