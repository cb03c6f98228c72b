"""Reads a hypervisor's PCI devices from sysfs and procfs: drivers, IOMMU groups, users of NVIDIA GPUs.

It is sent to the host as one file (`python3 - /`), so that it imports nothing of gpukiln.
"""

# ruff: noqa: PTH110, PTH115, PTH118, PTH119, PTH120, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import socket
import sys
from typing import Any


def read_host(root: str = "/") -> dict[str, Any]:
    """Read sysfs and procfs below a root; changes nothing.

    Returns:
        {host, kernel, cmdline, groups: how many IOMMU groups there are, devices: {ADDRESS: {vendor, device,
        class, driver, group, boot_vga, bridge}}, gpus: {GPU-UUID: ADDRESS} of the loaded NVIDIA driver,
        users: {ADDRESS: ["PID NAME"]} of the processes that have such a GPU open; only root sees all}.
    """
    gpus, minors = _nvidia(root)
    return {
        "host": socket.gethostname().partition(".")[0],
        "kernel": _read(root, "proc/sys/kernel/osrelease"),
        "cmdline": _read(root, "proc/cmdline"),
        "groups": len(glob.glob(os.path.join(root, "sys/kernel/iommu_groups/*"))),
        "devices": {os.path.basename(path): _device(path) for path in _devices(root)},
        "gpus": gpus,
        "users": _users(root, minors),
    }


def _read(*path: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _devices(root: str) -> list[str]:
    return sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*")))


def _device(path: str) -> dict[str, Any]:
    group = _link(path, "iommu_group")
    return {
        "vendor": _read(path, "vendor"),
        "device": _read(path, "device"),
        "class": _read(path, "class"),
        "driver": _link(path, "driver"),
        "group": int(group) if group else None,
        "boot_vga": _read(path, "boot_vga") == "1",
        # Bridges and root ports have it; Proxmox VE knows them by it, too, in
        # PVE::SysFSTools::pci_dev_group_bind_to_vfio.
        "bridge": os.path.exists(os.path.join(path, "pci_bus")),
    }


def _link(*path: str) -> str | None:
    try:
        return os.path.basename(os.readlink(os.path.join(*path)))
    except OSError:
        return None


def _nvidia(root: str) -> tuple[dict[str, str], dict[str, str]]:
    """The addresses by UUID, and by the name of the device node."""
    gpus, minors = {}, {}
    for path in glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information")):
        address = os.path.basename(os.path.dirname(path)).lower()
        text = _read(path)
        for uuid in re.findall(r"GPU UUID:\s*(GPU-\S+)", text):
            gpus[uuid] = address
        for minor in re.findall(r"Device Minor:\s*(\d+)", text):
            minors[f"/dev/nvidia{minor}"] = address
    return gpus, minors


def _users(root: str, minors: dict[str, str]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for path in glob.glob(os.path.join(root, "proc/[0-9]*/fd/*")) if minors else ():
        with contextlib.suppress(OSError):  # the process ended, or belongs to another user
            address = minors.get(os.readlink(path))
            process = os.path.dirname(os.path.dirname(path))
            process_name = f"{os.path.basename(process)} {_read(process, 'comm')}"
            if address and process_name not in users.setdefault(address, []):
                users[address].append(process_name)
    return users


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_host(*sys.argv[1:2])))
