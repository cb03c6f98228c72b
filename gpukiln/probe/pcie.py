"""Reads a GPU's PCIe link and its local processors from sysfs.

Runs on the machine that is verified, see gpukiln/probe/gather.py.
"""

# ruff: noqa: PTH118
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from gpukiln.probe.base import PCI, read

LANES = (1, 2, 4, 8, 12, 16, 32)  # of a PCIe link


def pin_to_local_cpus(bus_id: str) -> None:
    """Pin this process, and so its memory, to the processors of the GPU's NUMA node."""
    listed = re.findall(r"(\d+)(?:-(\d+))?", read(os.path.join(PCI, bus_id, "local_cpulist")) or "")
    near = {number for low, high in listed for number in range(int(low), int(high or low) + 1)}
    # A container or cgroup may not allow any of these processors.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, near or range(os.cpu_count() or 1))


def link(bus_id: str) -> dict[str, Any]:
    """{speed, width, max_speed, max_width: as in sysfs; gb_s, max_gb_s: rate of one direction}.

    A rate is null where the values are no link, or a faster one than the GPU's maximum: a virtual machine's
    PCIe is emulated by its hypervisor, and often shows `Unknown`, width 0 or 63 (NCCL, src/graph/topo.cc,
    "cases where speed was not indicated in /sys").
    """
    folder = os.path.join(PCI, bus_id)
    said: dict[str, Any] = {
        key: (read(os.path.join(folder, f"{prefix}_link_{name}")) or "").strip()
        for key, prefix, name in (
            ("speed", "current", "speed"),
            ("width", "current", "width"),
            ("max_speed", "max", "speed"),
            ("max_width", "max", "width"),
        )
    }
    now, most = _rate_of(said["speed"], said["width"]), _rate_of(said["max_speed"], said["max_width"])
    if now and most:
        wider = int(said["width"]) > int(said["max_width"])
        now = None if wider or _transfers(said["speed"]) > _transfers(said["max_speed"]) else now
    return {**said, "gb_s": now, "max_gb_s": most}


def _transfers(speed: str) -> float:
    match = re.match(r"([\d.]+) GT/s", speed)
    return float(match.group(1)) if match else 0.0


def _rate_of(speed: str, width: str) -> float | None:
    """GB/s of one direction of a link; None where the values are no link.

    PCIe up to 5 GT/s sends 10 bits for 8, from 8 GT/s on 130 for 128, and from 64 GT/s on no overhead
    (Linux, drivers/pci/pci.h, PCIE_SPEED2MBS_ENC).

    >>> _rate_of("8.0 GT/s PCIe", "16")
    15.75
    >>> _rate_of("Unknown", "0") is None
    True
    """
    rate = _transfers(speed)
    if not rate or not width.isdigit() or int(width) not in LANES:
        return None
    # Encoding 8b/10b, 128b/130b, and FLIT mode.
    payload = 0.8 if rate <= 5 else 128 / 130 if rate < 64 else 1.0
    return round(rate * payload * int(width) / 8, 2)
