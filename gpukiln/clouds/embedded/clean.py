"""What `invoke cloud.clean` removes: first a list, then, when somebody said yes, the things on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded import regions, scarcity
from gpukiln.clouds.embedded.base import BASE_NAME, current_base
from gpukiln.clouds.embedded.client import server_runs
from gpukiln.clouds.embedded.inventory import every_region, image_names
from gpukiln.clouds.embedded.layout import DAMAGED, Layout
from gpukiln.disks.sparse import used_bytes
from gpukiln.errors import RefusedError, UnavailableError
from gpukiln.files import PARTIAL, remove
from gpukiln.units import Memory


@dataclass
class CleaningPlan:
    """What goes and what stays.

    Args:
        files: Files and folders to be removed, with what each of them is.
        documents: Per region its document without what goes.
        kept: What was asked for and stays, with the reason.
        changes: What goes that is no file.
    """

    files: dict[Path, str] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Everything that goes."""
        return [*(f"{path}  {what}".rstrip() for path, what in self.files.items()), *self.changes]


def plan_cleaning(
    layout: Layout, *, images: bool, base: bool, released: bool, volumes: bool = False
) -> CleaningPlan:
    """Find what can go; changes nothing.

    Args:
        layout: The cloud's files.
        images: Images, snapshots and container images that were made here.
        base: Base images.
        released: Also images that a parameter names, as a channel does, with the parameters.
        volumes: Volumes, with what somebody wrote on them.

    Raises:
        UnavailableError: A region's files are damaged, so nothing says which of its images a channel needs.
    """
    done = CleaningPlan()
    if not layout.root.exists():
        return done
    done.files |= dict.fromkeys(_orphaned_files(layout), "")
    if layout.scarcity.exists():
        done.files[layout.scarcity] = f"scarcity: {_scarcity_text(layout)}"
    if volumes:
        done.files |= {
            file: f"volume, {Memory(used_bytes(file)).shown}" if file.suffix == ".raw" else ""
            for file in sorted(layout.volumes.glob("vol-*"))
        }
    if not (images or base):
        return done
    stored = every_region(layout)
    names = image_names(stored)
    needed: set[str] = set()
    for region in stored:
        if region.document is None and released and images:
            document = regions.empty_document()
            done.changes.append(f"region {region.region}: everything; {region.problems[0]}")
            done.documents[region.region] = document
        else:
            document = region.require(layout)
            if region.problems:
                done.documents[region.region] = document  # made again, whatever else goes
            _plan_region(done, region.region, document, images=images, base=base, released=released)
        needed |= set(done.documents.get(region.region, document)["snapshots"])
    current = layout.snapshot(current_base(layout).snapshot_id)
    bases = {name for name, text in names.items() if BASE_NAME in text} | {current.stem}
    for disk in sorted(layout.snapshots.glob("*.raw")):
        selected = base if disk.stem in bases else images
        if selected and disk.stem not in needed:
            size = Memory(used_bytes(disk) if disk.is_file() else 0).shown
            done.files[disk] = f"{names.get(disk.stem, 'no image')}, {size}"
    if images and layout.registry.exists():
        done.files[layout.registry] = "container images"
    return done


def carry_out(layout: Layout, cleaning: CleaningPlan) -> None:
    """Remove it. A region's file forgets an image before its disk goes.

    Raises:
        RefusedError: The server still runs.
    """
    if server_runs(layout):
        raise RefusedError("the embedded cloud's server runs", hint="`invoke cloud.stop` first")
    for region, document in cleaning.documents.items():
        regions.write_region(layout, region, document)
    for path in cleaning.files:
        for file in (*(regions.description_files(layout, path.stem) if path.suffix == ".raw" else ()), path):
            remove(file)


def _scarcity_text(layout: Layout) -> str:
    try:
        return ", ".join(map(str, scarcity.script(layout).lines))
    except UnavailableError:
        return "damaged"


def _orphaned_files(layout: Layout) -> Iterator[Path]:
    """What a killed server or build left, and what was set aside as damaged."""
    yield from sorted(layout.machines.glob("*"))
    yield from sorted(layout.bases.glob("base-*"))
    for folder in (layout.root, layout.regions, layout.snapshots, layout.volumes, layout.bases):
        yield from sorted({*folder.glob(PARTIAL), *folder.glob(f"*{DAMAGED}*")})


def _plan_region(
    done: CleaningPlan, region: str, document: dict[str, Any], *, images: bool, base: bool, released: bool
) -> None:
    pointers = _parameters_by_image(document["parameters"])
    stay: dict[str, Any] = {}
    for image_id, image in document["images"].items():
        selected = base if BASE_NAME in image["name"] else images
        if selected and image_id in pointers and not released:
            named = ", ".join(pointers[image_id])
            done.kept.append(
                f"{image_id} {image['name']} ({region}): {named} names it; --released removes it too"
            )
        if not selected or (image_id in pointers and not released):
            stay[image_id] = image
    used = {name for image in stay.values() for name in regions.snapshots_of_image(image)}
    pointed = {name for image in document["images"].values() for name in regions.snapshots_of_image(image)}
    snapshots = {
        name: fields
        for name, fields in document["snapshots"].items()
        if name in used or (name not in pointed and not images)
    }
    left = {**document, "images": stay, "snapshots": snapshots}
    if images:
        if document.get("repositories"):
            done.changes.append(
                f"region {region}: container repositories {', '.join(document['repositories'])}"
            )
        left["repositories"] = {}
        if released and document["parameters"]:
            done.changes.append(f"region {region}: parameters {', '.join(document['parameters'])}")
            left |= {"parameters": {}, "parameter_tags": {}}
    if left != document:
        done.documents[region] = left
        gone = [
            f"{name} {document['images'][name]['name']}" for name in document["images"] if name not in stay
        ]
        done.changes += [f"image {text} ({region})" for text in gone]


def _parameters_by_image(parameters: Mapping[str, Any]) -> dict[str, list[str]]:
    """Per image the parameters whose value it is, in any case a channel's."""
    named: dict[str, list[str]] = {}
    for name, versions in parameters.items():
        if versions:
            named.setdefault(versions[-1]["value"], []).append(name)
    return named
