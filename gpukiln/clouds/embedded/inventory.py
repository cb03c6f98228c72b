"""What the embedded cloud keeps on disk, for the commands that show and remove it; needs no server."""

import contextlib
import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.base import current_base
from gpukiln.clouds.embedded.disk import used_bytes
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import RefusedError, UsageError


def _images(layout: Layout) -> dict[str, str]:
    """Names of images by the snapshot that they point at."""
    names: dict[str, str] = {}
    for file in layout.regions.glob("*.json"):
        # `cloud.clean --images` is the way out of a damaged file
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            for image_id, image in json.loads(file.read_text())["images"].items():
                names[image["snapshot"]] = f"{image_id} {image['name']} ({file.stem})"
    return names


def kept(layout: Layout) -> list[dict[str, Any]]:
    """Every disk that is kept.

    Args:
        layout: The cloud's files.

    Returns:
        Per disk the snapshot, the image that points at it or None, and the size in MiB.
    """
    names = _images(layout)
    return [
        {"snapshot": disk.stem, "image": names.get(disk.stem), "mib": used_bytes(disk) >> 20}
        for disk in sorted(layout.snapshots.glob("*.raw"))
    ]


def clean_disks(layout: Layout, *, images: bool, base: bool, dry_run: bool) -> list[str]:
    """Remove leftovers, and on request what is kept.

    Args:
        layout: The cloud's files; no server may run.
        images: Remove images and snapshots that were made here.
        base: Remove base images.
        dry_run: Only say what would be removed.

    Returns:
        What was removed.

    Raises:
        RefusedError: The server still runs.
    """
    if not layout.root.exists():
        return []
    if not dry_run and _server_runs(layout):
        raise RefusedError("the embedded cloud's server runs", hint="`invoke cloud.stop` first")
    base_disk = layout.snapshot(current_base(layout).snapshot_id)
    doomed: list[Path] = [*layout.machines.glob("*"), *layout.bases.glob("base-*")]
    doomed += layout.snapshots.glob("*.partial")
    names = _images(layout)
    for disk in layout.snapshots.glob("*.raw"):
        is_base = disk == base_disk or "debian-12-amd64-embedded-" in names.get(disk.stem, "")
        if base if is_base else (images or disk.stem not in names):
            doomed.append(disk)
    if images:
        doomed += layout.volumes.glob("vol-*")
        doomed += [*layout.regions.glob("*.json"), *layout.registry.parent.glob(layout.registry.name)]
    lines = []
    for path in doomed:
        lines.append(f"{path} {names.get(path.stem, '')}".rstrip())
        if not dry_run:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lines


def _server_runs(layout: Layout) -> bool:
    with layout.server_lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def console_file(layout: Layout, instance_id: str) -> Path:
    """The console log of a machine.

    Args:
        layout: The cloud's files.
        instance_id: The instance, or `last`.

    Returns:
        Its file.

    Raises:
        UsageError: There is none.
    """
    logs = sorted((layout.root / "consoles").glob("i-*.log"), key=lambda log: log.stat().st_mtime)
    chosen = [log for log in logs if instance_id in ("last", log.stem)]
    if not chosen:
        raise UsageError(
            f"no machine {instance_id!r} has written on a console" if logs else "no machine has run yet",
            hint="give an instance id or `last`" if logs else "",
            details=tuple(log.stem for log in logs[-5:]),
        )
    return chosen[-1]
