"""What `invoke cloud.clean` removes: a plan first, then, with --yes, its execution."""

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
    """What is removed and what stays.

    Args:
        files: Files and folders to remove, each with a description.
        documents: The new document of each changed region.
        kept: What was requested and stays, with the reason.
        changes: Removed entries that are no files.
    """

    files: dict[Path, str] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """A line for everything that is removed."""
        return [*(f"{path}  {what}".rstrip() for path, what in self.files.items()), *self.changes]


def plan_cleaning(
    layout: Layout, *, images: bool, base: bool, released: bool, volumes: bool = False
) -> CleaningPlan:
    """Plan the removal; changes nothing.

    Args:
        layout: The cloud's files.
        images: Images, snapshots and container images that were created here.
        base: Base images.
        released: Also images that a parameter (a channel) names, with the parameters.
        volumes: Volumes, with the data on them.

    Raises:
        UnavailableError: A region's files are damaged, so the images that its channels need are unknown.
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
        # A damaged region is emptied only where everything of it was asked for: its channels can't be read,
        # so that nothing says which images are needed.
        if region.document is None and released and images:
            document = regions.empty_document()
            done.changes.append(f"region {region.region}: everything; {region.problems[0]}")
            done.documents[region.region] = document
        else:
            document = region.require(layout)
            if region.problems:
                done.documents[region.region] = document  # repaired, whatever else is removed
            _plan_region(done, region.region, document, images=images, base=base, released=released)
        needed |= set(done.documents.get(region.region, document)["snapshots"])
    current = layout.snapshot(current_base(layout).snapshot_id)
    # The current base image may have a disk that no region mentions yet.
    bases = {name for name, text in names.items() if BASE_NAME in text} | {current.stem}
    for disk in sorted(layout.snapshots.glob("*.raw")):
        # Disks that no document mentions are removed with the rest of their kind.
        selected = base if disk.stem in bases else images
        if selected and disk.stem not in needed:
            size = Memory(used_bytes(disk) if disk.is_file() else 0).shown
            done.files[disk] = f"{names.get(disk.stem, 'no image')}, {size}"
    if images and layout.registry.exists():
        done.files[layout.registry] = "container images"
    return done


def carry_out(layout: Layout, cleaning: CleaningPlan) -> None:
    """Remove what the plan has. A region's file is written before the disks of its images are removed.

    Raises:
        RefusedError: The server is running.
    """
    # The server has the regions in memory, and would write their files again.
    if server_runs(layout):
        raise RefusedError(
            "the embedded cloud's server is running", hint="stop it first: `invoke cloud.stop`"
        )
    for region, document in cleaning.documents.items():
        regions.write_region(layout, region, document)
    for path in cleaning.files:
        # The descriptions first: a disk without one is kept and shown, a description without its disk is
        # damage.
        for file in (*(regions.description_files(layout, path.stem) if path.suffix == ".raw" else ()), path):
            remove(file)


def _scarcity_text(layout: Layout) -> str:
    try:
        return ", ".join(map(str, scarcity.script(layout).lines))
    except UnavailableError:
        # It is removed all the same, so its text is not needed.
        return "damaged"


def _orphaned_files(layout: Layout) -> Iterator[Path]:
    """Files that a killed server or build left, and damaged files that were set aside."""
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
        # What a channel points at is what machines start from; it goes only when that is said.
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
    """For each image the parameters (channels) whose value is the image."""
    named: dict[str, list[str]] = {}
    for name, versions in parameters.items():
        if versions:
            named.setdefault(versions[-1]["value"], []).append(name)
    return named
