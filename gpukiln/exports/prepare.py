"""Makes a raw disk ready for a machine that has none of EC2's metadata, without booting it."""

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
from gpukiln.files import whole_or_not
from gpukiln.parsing import parse_json
from gpukiln.units import Memory

DATASOURCES = {"nocloud": ["NoCloud", "None"], "none": ["None"]}
CONFIG = "etc/cloud/cloud.cfg.d/99_gpukiln_export.cfg"
"""Read last: `_` sorts behind the `-` of other people's 99-….cfg, and the last list of sources wins."""
FORCED = "etc/cloud/ds-identify.cfg"  # of cloud-init: names a source, whatever the list says
RECORD = "etc/gpukiln/image.json"
SSH_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")


def prepare(
    disk: Path,
    *,
    datasource: str = "",
    size_gib: int | None = None,
    ssh_keys: Sequence[str] = (),
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Change a raw disk in place; what is half changed after an error is the caller's to throw away.

    Args:
        disk: A raw disk that nobody uses.
        datasource: Key of `DATASOURCES`: what cloud-init asks; empty: what it asked before.
        size_gib: What the disk becomes; the root file system takes the room when it boots.
        ssh_keys: Lines of an authorized_keys file, for the image's user.
        begin: Called before the first change: what is refused is refused before it.

    Raises:
        UsageError: The source is unknown, the disk is larger than that, a line is no public key, or nobody
            could log in.
        IncompatibleError: The disk has no cloud-init, or is not to be written to.
        UnavailableError: A tool is missing or failed, or the disk has no root file system.
    """
    keys = check_options(datasource, ssh_keys)
    if size_gib is not None:
        _require_smaller(disk, size_gib)
    if datasource or keys:
        with mounted_root(disk) as root:
            _require_cloud_init(root, disk, f"--datasource {datasource}" if datasource else "--ssh-key")
    begin()
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
    """The keys, or the refusal of `prepare`, before anything is read for it."""
    if datasource and datasource not in DATASOURCES:
        raise UsageError(f"datasource {datasource!r} is none of {', '.join(DATASOURCES)}")
    keys = [line.strip() for line in ssh_keys if line.strip() and not line.startswith("#")]
    for key in keys:
        if not key.startswith(SSH_KEY_TYPES) or "\n" in key:
            raise UsageError(
                f"{key[:40]!r} is no SSH public key", hint="a file as ~/.ssh/id_ed25519.pub is wanted"
            )
    if datasource == "none" and not keys:
        raise UsageError(
            "nobody could log in: with the datasource none a machine is told no key and no password",
            hint="--ssh-key FILE puts a public key on the disk; with nocloud the seed brings it",
        )
    return keys


def _require_smaller(disk: Path, size_gib: int) -> None:
    size = disk.stat().st_size
    if size_gib << 30 < size:
        raise UsageError(
            f"the disk has {Memory(size).shown}, and can't become one of {size_gib} GiB",
            hint="a disk only grows",
        )


def _require_cloud_init(root: Path, disk: Path, option: str) -> None:
    if not (root / "etc/cloud").is_dir():
        raise IncompatibleError(
            f"{disk} has no cloud-init, which {option} is for",
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
    # lists on one line: cloud-init's ds-identify reads no others, and turns cloud-init off (parse_yaml_array)
    text = yaml.safe_dump(settings, default_flow_style=None, width=1 << 16)
    return f"# What `ami.export` was asked for.\n{text}"


def _record(root: Path, datasource: str) -> None:
    """Say in the image's record what this machine is; what was proven stays known by its digest."""
    file = _inside(root, RECORD)
    if not file.exists():
        return  # somebody's disk, not one that was baked here
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
        # as the provenance names the file, also where an exported disk is exported again
        "record_sha256": before.get("record_sha256", hashlib.sha256(content).hexdigest()),
    }
    _write(root, RECORD, json.dumps(document, indent=4, ensure_ascii=False) + "\n")


def _write(root: Path, name: str, text: str) -> None:
    file = _inside(root, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(file) as partial:
        partial.write_text(text, encoding="utf-8")
        partial.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)


def _remove(root: Path, name: str) -> None:
    _inside(root, name).unlink(missing_ok=True)


def _inside(root: Path, name: str) -> Path:
    """A file of the disk; a link on somebody's disk could lead to one of this computer."""
    file = root / name
    if not file.resolve().is_relative_to(root.resolve()):
        raise IncompatibleError(f"/{name} on the disk leads out of it: {file.resolve()}")
    return file
