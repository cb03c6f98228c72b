"""Prepares a raw disk for a machine without EC2's metadata service; the disk is not booted."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpukiln.catalog.bases import EC2_CONFIG
from gpukiln.disks.grow import fit_table, grow_file
from gpukiln.disks.mount import mounted_root
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.files import atomic_path
from gpukiln.parsing import parse_json
from gpukiln.units import Memory

# `None` comes last: cloud-init then applies its own configuration where no seed is attached, without waiting.
DATASOURCES = {"nocloud": ["NoCloud", "None"], "none": ["None"]}
CONFIG = "etc/cloud/cloud.cfg.d/99_gpukiln_export.cfg"
"""Read last: `_` sorts after the `-` of other 99-….cfg files, and the last list of sources wins."""
FORCED = "etc/cloud/ds-identify.cfg"  # cloud-init's ds-identify prefers its `datasource:` to every list
RECORD = "etc/gpukiln/image.json"
SSH_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")  # how the types of ssh-keygen(1) begin


def prepare(
    disk: Path,
    *,
    datasource: str = "",
    size_gib: int | None = None,
    ssh_keys: Sequence[str] = (),
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Change a raw disk in place; after an error the caller discards the disk.

    Args:
        disk: A raw disk that is not in use.
        datasource: Key of `DATASOURCES`: what cloud-init asks; empty: what it asked before.
        size_gib: The new size of the disk; the root file system grows into it at the first boot.
        ssh_keys: Lines of an authorized_keys file, for the image's user.
        begin: Called before the first change, after every check.

    Raises:
        UsageError: The data source is unknown, the disk is larger than `size_gib`, a line is no public key,
            or no user could log in.
        IncompatibleError: The disk has no cloud-init, or a file to write leads out of the disk.
        UnavailableError: A tool is missing or failed, or the disk has no root file system.
    """
    keys = check_options(datasource, ssh_keys)
    if size_gib is not None:
        _require_smaller(disk, size_gib)
    if datasource or keys:
        with mounted_root(disk) as root:
            _require_cloud_init(root, disk, f"--datasource {datasource}" if datasource else "--ssh-key")
    begin()
    # A GPT's second copy is at the end of the disk, so the table follows the file's new size.
    if size_gib is not None:
        grow_file(disk, size_gib)
        fit_table(disk)
    if not datasource and not keys:
        return
    with mounted_root(disk, writable=True) as root:
        _write(root, CONFIG, _config(datasource, keys))
        if datasource:
            _remove(root, EC2_CONFIG)
            _remove(root, FORCED)
            _record(root, datasource)


def check_options(datasource: str, ssh_keys: Sequence[str]) -> list[str]:
    """Check data source and keys, before the disk is read.

    >>> check_options("nocloud", ["# my key", "ssh-ed25519 AAAAC3Nz me@example.org"])
    ['ssh-ed25519 AAAAC3Nz me@example.org']
    >>> check_options("", [])
    []

    Returns:
        The keys, without empty lines and comments.

    Raises:
        UsageError: See `prepare`.
    """
    if datasource and datasource not in DATASOURCES:
        raise UsageError(f"datasource {datasource!r} is not one of {', '.join(DATASOURCES)}")
    keys = [line.strip() for line in ssh_keys if line.strip() and not line.startswith("#")]
    for key in keys:
        if not key.startswith(SSH_KEY_TYPES) or "\n" in key:
            raise UsageError(
                f"{key[:40]!r} is no SSH public key", hint="name a file such as ~/.ssh/id_ed25519.pub"
            )
    if datasource == "none" and not keys:
        raise UsageError(
            "no user could log in: with the datasource none a machine gets neither a key nor a password",
            hint="--ssh-key FILE puts a public key on the disk; with nocloud the seed has the key",
        )
    return keys


def _require_smaller(disk: Path, size_gib: int) -> None:
    size = disk.stat().st_size
    if size_gib << 30 < size:
        raise UsageError(
            f"the disk has {Memory(size).shown}, and can't be shrunk to {size_gib} GiB",
            hint="name a larger size, or none",
        )


def _require_cloud_init(root: Path, disk: Path, option: str) -> None:
    if not (root / "etc/cloud").is_dir():
        raise IncompatibleError(
            f"{disk} has no cloud-init, which {option} configures",
            hint="export it as it is, without --datasource and --ssh-key",
        )
    for name in (CONFIG, EC2_CONFIG, FORCED, RECORD):
        _inside(root, name)


def _config(datasource: str, keys: Sequence[str]) -> str:
    settings: dict[str, Any] = {}
    if datasource:
        settings["datasource_list"] = DATASOURCES[datasource]
    if keys:
        settings["ssh_authorized_keys"] = list(keys)
    # Lists on one line: ds-identify (parse_yaml_array), a shell script, reads no other form and would turn
    # cloud-init off.
    text = yaml.safe_dump(settings, default_flow_style=None, width=1 << 16)
    return f"# Options of `ami.export`.\n{text}"


def _record(root: Path, datasource: str) -> None:
    """Add the export to the image's record; the digest of the record as it was verified stays in it."""
    file = _inside(root, RECORD)
    if not file.exists():
        return  # a disk that gpukiln did not bake
    content = file.read_bytes()
    try:
        document = parse_json(content)
        before = dict(document.get("exported", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise IncompatibleError(
            f"the record of this disk, {RECORD}, can't be read: {error}", hint="bake the image again"
        ) from error
    document["exported"] = {
        "datasource": datasource,
        # The provenance names this digest; a disk that is exported a second time keeps the first one.
        "record_sha256": before.get("record_sha256", hashlib.sha256(content).hexdigest()),
    }
    _write(root, RECORD, json.dumps(document, indent=4, ensure_ascii=False) + "\n")


def _write(root: Path, name: str, text: str) -> None:
    file = _inside(root, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file) as partial:
        partial.write_text(text, encoding="utf-8")
        partial.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)


def _remove(root: Path, name: str) -> None:
    _inside(root, name).unlink(missing_ok=True)


def _inside(root: Path, name: str) -> Path:
    """A file of the disk."""
    file = root / name
    # A link on a disk from elsewhere could lead to a file of this computer.
    if not file.resolve().is_relative_to(root.resolve()):
        raise IncompatibleError(f"/{name} on the disk leads out of it: {file.resolve()}")
    return file
