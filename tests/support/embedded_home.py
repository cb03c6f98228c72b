"""A state folder of the embedded cloud with images in two regions, and ways to damage one of its files."""

import json
import shutil
from pathlib import Path

from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.base import current_base
from gpukiln.clouds.embedded.layout import Layout

CHANNEL = "/gpukiln/eks-gpu/1.35/stable/image_id"
HERE, THERE = "us-west-2", "us-east-1"
SIZE = 1 << 20  # bytes of a disk
REPOSITORY = {
    "image_tag_mutability": "MUTABLE",
    "image_tag_mutability_exclusion_filters": None,
    "image_scan_config": None,
    "encryption_config": None,
    "tags": [],
    "policies": {},
    "images": [],
}
DAMAGES = ("truncated", "empty", "garbage", "missing", "unreadable")


def image_id(number: int) -> str:
    return f"ami-{number:017x}"


def snapshot_id(number: int) -> str:
    return f"snap-{number:017x}"


def make_home(folder: Path) -> Layout:
    """Images 1 and 2 here, a channel names 1; image 3 there; the base image everywhere; a repository."""
    layout = Layout(folder)
    layout.create()
    base = current_base(layout)
    for region, numbers in ((HERE, (1, 2)), (THERE, (3,))):
        names = {image_id(number): (snapshot_id(number), f"image-{number}") for number in numbers}
        names[base.image_id] = (base.snapshot_id, base.name)
        for snapshot, _ in names.values():
            layout.snapshot(snapshot).write_bytes(snapshot.encode() * (SIZE // len(snapshot.encode()) + 1))
        document = {
            "images": {
                name: {"name": text, "snapshot": snapshot, "tags": {}}
                for name, (snapshot, text) in names.items()
            },
            "snapshots": {snapshot: {"size_gib": 1, "shared_with": []} for snapshot, _ in names.values()},
            "parameters": {},
            "repositories": {},
        }
        if region == HERE:
            history = [{"name": CHANNEL, "value": image_id(number)} for number in (2, 1)]
            document["parameters"] = {CHANNEL: history}
            document["repositories"] = {"runner": REPOSITORY}
        regions.write_region(layout, region, document)
    layout.registry.mkdir()
    return layout


def damage(file: Path, how: str) -> None:
    """Make a file unfit in one of DAMAGES' ways, as root sees it, whom no permission stops."""
    content = file.read_bytes()
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "garbage":
        file.write_bytes(bytes(255 - byte for byte in content))
    else:
        file.unlink()
        if how == "unreadable":
            file.mkdir()


def damage_meaning(file: Path) -> None:
    """Change one digit of a text, so that it can be read as before and says something else."""
    text = json.loads(file.read_text())
    text["document"]["images" if "images" in text["document"] else "snapshot"]["x"] = {}
    file.write_text(json.dumps(text))


def everything(layout: Layout) -> dict[str, dict]:
    """What each region has."""
    return {region: regions.read_region(layout, region) for region in regions.regions_on_disk(layout)}


def disks(layout: Layout) -> set[str]:
    return {disk.stem for disk in layout.snapshots.glob("*.raw")}


def copy_home(layout: Layout, folder: Path) -> Layout:
    shutil.copytree(layout.home, folder)
    return Layout(folder)
