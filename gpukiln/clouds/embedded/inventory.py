"""What the embedded cloud has on disk, for the commands that show it; needs no server."""

from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.base import check_generation, current_base
from gpukiln.clouds.embedded.layout import DAMAGED, Layout, read_endpoint
from gpukiln.disks.sparse import used_bytes
from gpukiln.errors import UnavailableError, UsageError


def every_region(layout: Layout) -> list[regions.StoredRegion]:
    """Each region's content, as far as its files can be read."""
    return [regions.inspect_region(layout, region) for region in regions.regions_on_disk(layout)]


def image_names(stored: list[regions.StoredRegion]) -> dict[str, str]:
    """Names of images by their snapshots; for an unreadable region from the descriptions of its disks."""
    names: dict[str, str] = {}
    for region in stored:
        # A damaged region file has copies: each disk's description names its images, too.
        described = [description["images"] for description in region.descriptions.values()]
        for images in [region.document["images"]] if region.document else described:
            for image_id, image in images.items():
                for snapshot in regions.snapshots_of_image(image):
                    names[snapshot] = f"{image_id} {image['name']} ({region.region})"
    return names


def stored_disks(layout: Layout) -> list[dict[str, Any]]:
    """Every disk of a snapshot that exists, or that a description has.

    Returns:
        For each disk the snapshot, its image or None, the size in MiB, and the problem or "".
    """
    stored = every_region(layout)
    names, known = image_names(stored), known_snapshots(stored)
    facts = {name: said["disk"] for region in stored for name, said in region.descriptions.items()}
    disks = {disk.stem: disk for disk in layout.snapshots.glob("*.raw")}
    return [
        {
            "snapshot": name,
            "image": names.get(name),
            # Blocks in use, not the size: disks are sparse files.
            "mib": used_bytes(disks[name]) >> 20 if name in disks and disks[name].is_file() else 0,
            "problem": (name in facts and regions.disk_problem(layout, name, facts[name]))
            or _unknown_problem(layout, layout.snapshot(name), known),
        }
        # Both: a disk without a description and a description without its disk are problems.
        for name in sorted({*disks, *facts})
    ]


def known_snapshots(stored: list[regions.StoredRegion]) -> set[str]:
    """All snapshots in documents and, for unreadable regions, in descriptions."""
    of_documents = {name for region in stored if region.document for name in region.document["snapshots"]}
    return of_documents | {name for region in stored if not region.document for name in region.descriptions}


def _unknown_problem(layout: Layout, disk: Path, known: set[str]) -> str:
    if not disk.is_file():
        return f"{disk} can't be read"
    # The current base image may have its disk before any region was used.
    if disk.stem in known or disk == layout.snapshot(current_base(layout).snapshot_id):
        return ""
    return "it belongs to no region; `invoke cloud.clean --images --yes` removes it"


def problems(layout: Layout) -> list[str]:
    """Problems of the cloud's files, each with what the next start does about it."""
    lines = [text for region in every_region(layout) for text in region.problems]
    if not layout.root.exists():
        return lines
    home, last = layout.identity(), read_endpoint(layout)
    # The folder's device and inode are in the file: they differ after `cp -a`.
    if last and last.get("home") != home:
        lines.append(f"{layout.home} is a copy: the next start gives it its own server, port and access key")
    elif not last and (layout.endpoint.exists() or layout.endpoint.is_symlink()):
        lines.append(f"{layout.endpoint} is damaged: the server writes it again when it runs")
    # Each alone: the first damaged file must not hide the others.
    for check in (lambda: layout.access_key, lambda: check_generation(layout)):
        try:
            check()
        except UnavailableError as error:
            lines.append(f"{error.message}: {error.hint}")
    for folder in (layout.root, layout.regions, layout.snapshots, layout.bases):
        lines += [
            f"{file} is a damaged file that was set aside; remove it if you don't need it"
            for file in _set_aside(folder)
        ]
    return lines


def _set_aside(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{DAMAGED}*"))


def console_file(layout: Layout, instance_id: str) -> Path:
    """The console log of a machine.

    Args:
        layout: The cloud's files.
        instance_id: The instance, or `last`.

    Raises:
        UsageError: There is no such log.
    """
    # By time and not by name, because ids of instances are random.
    logs = sorted((layout.root / "consoles").glob("i-*.log"), key=lambda log: log.stat().st_mtime)
    chosen = [log for log in logs if instance_id in ("last", log.stem)]
    if not chosen:
        raise UsageError(
            f"no console log of a machine {instance_id!r}" if logs else "no machine has run yet",
            hint="give an instance id or `last`" if logs else "",
            details=tuple(log.stem for log in logs[-5:]),
        )
    return chosen[-1]
