"""MIG layouts in mig-parted's format: read, written, and compared with the GPUs of a machine.

    version: v1
    mig-configs:
      half:
      - devices: [0, 1]              # indices of GPUs, or all
        device-filter: 0x20B010DE    # only GPUs of this PCI id, or of a list of them
        mig-enabled: true
        mig-devices: {1g.5gb: 2, 3g.20gb: 1, 1c.2g.10gb: 2}

The last entry for a GPU applies. A GPU without an entry is not changed, and `assert` reports it as a
difference. Source: NVIDIA/mig-parted, README.md, api/spec/v1, cmd/nvidia-mig-parted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.parsing import LimitError, parse_json, parse_yaml, read_text

VERSION = "v1"
MAX_CONFIG_BYTES = 1 << 20  # mig-parted's own file for all GPUs has 20 KiB
# 1c.3g.20gb is a compute instance of 1 slice in a GPU instance of 3 slices and 20 GB; +me and such are media
# extensions.
PROFILE = re.compile(r"(?:(?P<part>\d{1,3})c\.)?(?P<gpu>(?P<slices>\d{1,3})g\.\d{1,6}gb(?:[+-][a-z.,+-]+)?)")


@dataclass(frozen=True)
class MigLayout:
    """The MIG layout of one GPU.

    Args:
        enabled: Whether MIG is on.
        devices: The number of MIG devices of each profile.
    """

    enabled: bool
    devices: Mapping[str, int]

    def __str__(self) -> str:
        if not self.enabled:
            return "MIG off"
        return ", ".join(f"{many} x {name}" for name, many in self.devices.items()) or "MIG on, no device"


@dataclass(frozen=True)
class MigConfigEntry:
    """The layout for some GPUs.

    Args:
        devices: Indices of GPUs; None for all.
        pci_ids: PCI ids such as 0x20b010de; empty for any.
    """

    devices: tuple[int, ...] | None
    pci_ids: tuple[str, ...]
    layout: MigLayout

    def applies_to(self, gpu: Device) -> bool:
        """Whether the entry is for a GPU."""
        if self.pci_ids and (gpu.pci_id or "").lower() not in self.pci_ids:
            return False
        return self.devices is None or gpu.index in self.devices


def read_config(path: Path, name: str) -> tuple[MigConfigEntry, ...]:
    """Read a configuration from a file in YAML or JSON.

    Args:
        name: Of the configuration; may be empty where the file has one.

    Raises:
        UsageError: The file or the configuration is missing, or has a wrong format.
        UnavailableError: The file is YAML, and PyYAML is missing.
    """
    try:
        document = _parse_text(read_text(path, largest=MAX_CONFIG_BYTES), path)
    except (OSError, UnicodeDecodeError, LimitError) as error:
        raise UsageError(f"--config {path}: {error}", hint="pass a file in mig-parted's format") from error
    # The only version of mig-parted's format (api/spec/v1).
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise UsageError(
            f"{path} is not of version {VERSION}", hint="write `version: v1`, then `mig-configs:`"
        )
    _check_keys(document, ("version", "mig-configs"), str(path))
    configs = document.get("mig-configs")
    if not isinstance(configs, dict) or not configs:
        raise UsageError(f"{path} has no mig-configs", hint="write at least one configuration under its name")
    if not name and len(configs) == 1:
        name = str(next(iter(configs)))
    if name not in configs:
        raise UsageError(
            f"{path} has no configuration {name!r}",
            details=tuple(sorted(map(str, configs))),
            hint="pass one of these with --select",
        )
    rows = configs[name]
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: {name} is empty", hint="write a list of devices, mig-enabled, mig-devices")
    return tuple(_entry(row, f"{path}: {name}[{number}]") for number, row in enumerate(rows))


def _parse_text(text: str, path: Path) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return parse_json(text)
        except ValueError:
            pass  # a flow mapping of YAML begins with { too
    try:
        import yaml  # noqa: PLC0415 - only this verb needs it
    except ImportError as error:
        raise UnavailableError(
            f"{path} is YAML, and this gpukiln-gpu has no PyYAML", hint="write the same file as JSON"
        ) from error
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path} is not YAML: {error}", hint="pass a file in mig-parted's format") from error


def _check_keys(data: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    if strange := [key for key in data if key not in known]:
        raise UsageError(f"{where} has {strange[0]!r}", hint=f"known are {', '.join(known)}")


def _entry(row: Any, where: str) -> MigConfigEntry:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {row!r}", hint="wanted: devices, mig-enabled, mig-devices")
    _check_keys(row, ("device-filter", "devices", "mig-enabled", "mig-devices"), where)
    for needed in ("devices", "mig-enabled"):
        if needed not in row:
            raise UsageError(f"{where} lacks {needed}", hint="devices and mig-enabled are required")
    devices, enabled, only = row["devices"], row["mig-enabled"], row.get("device-filter", [])
    if devices != "all" and not (
        isinstance(devices, list) and all(type(device) is int for device in devices)
    ):
        raise UsageError(f"{where}: devices is {devices!r}", hint="wanted: all, or a list of indices")
    if not isinstance(enabled, bool):
        raise UsageError(f"{where}: mig-enabled is {enabled!r}", hint="wanted: true or false")
    only = [only] if isinstance(only, (str, int)) else only
    if not isinstance(only, list) or not all(isinstance(pci_id, (str, int)) for pci_id in only):
        raise UsageError(
            f"{where}: device-filter is {only!r}", hint="wanted: such as 0x20B010DE, or a list of such"
        )
    # A YAML parser reads 0x20B010DE as an integer.
    ids = tuple(
        (f"0x{pci_id:08x}" if isinstance(pci_id, int) else pci_id.lower()) for pci_id in only if pci_id != ""
    )
    parts = row.get("mig-devices")
    if enabled and parts is None:
        raise UsageError(
            f"{where} lacks mig-devices", hint="where mig-enabled is true, write {} for no device"
        )
    if not enabled and parts:
        raise UsageError(f"{where} has mig-devices, but mig-enabled is false", hint="correct one of the two")
    return MigConfigEntry(
        None if devices == "all" else tuple(devices), ids, MigLayout(enabled, _parts(parts or {}, where))
    )


def _parts(parts: Any, where: str) -> dict[str, int]:
    if not isinstance(parts, dict):
        raise UsageError(f"{where}: mig-devices is {parts!r}", hint='wanted: such as {"1g.5gb": 7}')
    for name, many in parts.items():
        match = PROFILE.fullmatch(str(name))
        if match is None or int(match["part"] or 1) > int(match["slices"]):
            raise UsageError(
                f"{where}: {name!r} is not a profile", hint="wanted: such as 1g.5gb, 1g.5gb+me, 1c.3g.20gb"
            )
        # type(), not isinstance(): bool is a subclass of int, and `true` is no count.
        if type(many) is not int or many < 0:
            raise UsageError(f"{where}: {name} is {many!r}", hint="wanted: a number of 0 or more")
    return _sorted({str(name): many for name, many in parts.items() if many})


def _sorted(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: parts[name] for name in sorted(parts)}


def current_layout(snapshot: Snapshot, gpu: Device) -> MigLayout:
    """The current layout of a GPU."""
    parts = Counter(
        device.profile or "-" for device in snapshot.devices if device.parent and device.parent == gpu.uuid
    )
    return MigLayout(bool(gpu.mig_enabled), _sorted(parts))


def desired_layout(entries: Sequence[MigConfigEntry], gpu: Device) -> MigLayout | None:
    """The desired layout of a GPU, by its last entry; None where it has no entry."""
    # mig-parted applies the entries in their order, so the last one decides.
    return next((entry.layout for entry in reversed(entries) if entry.applies_to(gpu)), None)


def layout_difference(snapshot: Snapshot, gpu: Device, cut: MigLayout) -> str:
    """The difference between current and desired layout in words; empty for none."""
    now = current_layout(snapshot, gpu)
    if now != cut:
        return f"GPU {gpu.index} {gpu.title}: {now}; wanted {cut}"
    # The mode of the layout may be pending only: instances can't be created before the reset.
    if gpu.mig_pending is not None and gpu.mig_pending != cut.enabled:
        return f"GPU {gpu.index} {gpu.title}: {now}, and the other mode is pending until a reset"
    return ""


def export_config(snapshot: Snapshot, gpus: Sequence[Device], name: str) -> dict[str, Any]:
    """The current layouts as a document of mig-parted."""
    # GPUs with the same layout share an entry, in the order of their first index.
    same: list[tuple[MigLayout, list[int]]] = []
    for gpu in gpus:
        cut = current_layout(snapshot, gpu)
        row = next((row for row in same if row[0] == cut), None)
        if row is None:
            same.append((cut, [gpu.index]))
        else:
            row[1].append(gpu.index)
    rows = [
        {
            "devices": "all" if len(same) == 1 else indices,
            "mig-enabled": cut.enabled,
            "mig-devices": dict(cut.devices),
        }
        for cut, indices in same
    ]
    return {"version": VERSION, "mig-configs": {name: rows}}


def config_yaml(document: Mapping[str, Any]) -> str:
    """A document of mig-parted as YAML."""
    # JSON is YAML for these names, numbers and flags; so no PyYAML is needed.
    lines = [f"version: {document['version']}", "mig-configs:"]
    for name, rows in document["mig-configs"].items():
        lines.append(f"  {json.dumps(name)}:")
        for row in rows:
            lines.append(
                f"  - devices: {row['devices'] if row['devices'] == 'all' else json.dumps(row['devices'])}"
            )
            lines.append(f"    mig-enabled: {json.dumps(row['mig-enabled'])}")
            lines.append(f"    mig-devices: {json.dumps(row['mig-devices'])}")
    return "\n".join(lines)
