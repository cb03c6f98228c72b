"""Gathers what the PCI bus, the kernel and nvidia-smi report about the GPUs.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH110, PTH118, PTH119, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import os
import re
from typing import Any

from gpukiln.probe.base import (
    NOT_REACHED,
    PCI,
    NotReachedError,
    in_container,
    pci_gpus,
    read,
    read_evidence,
    run_unless_hung,
)
from gpukiln.probe.simulated import is_simulated
from gpukiln.probe.xids import xids

# The kernel does not know simulated GPUs.
NO_LOG: dict[str, Any] = {"xids": [], "log_gap": None, "log_lost": None}
CDI_GPUS = re.compile(r"(?m)^kind: *[\"']?nvidia\.com/gpu\b")


def gpus() -> dict[str, Any]:
    """{pci: [{address, device, driver, lost}], container, module: loaded version, nouveau: whether it is
    loaded, smi: {rc, out}, rows, xids, log_gap, log_lost, cdi: {path: {drivers: versions, nodes: paths}}}.

    driver is the kernel driver of the GPU; lost: the GPU no longer answers on the bus.
    xids, log_gap, log_lost: see `xids.xids`. Output and status of nvidia-smi are kept together: it
    prints its errors on stdout. The checks use its rows.
    """  # noqa: D205
    result = pci_facts()
    double = not result["pci"] and is_simulated()
    if not (result["pci"] or double):
        return result
    query = "--query-gpu=pci.bus_id,name,uuid,driver_version,persistence_mode"
    smi = run_unless_hung("nvidia-smi", query, "--format=csv,noheader", timeout=120)
    rows: Any = smi
    if NOT_REACHED not in smi:
        # noheader and csv: nvidia-smi separates fields by a comma and a blank.
        cells = [[c.strip() for c in line.split(",")] for line in smi["out"].splitlines()]
        names = ("bus_id", "name", "uuid", "driver", "persistence")
        rows = [dict(zip(names, row)) for row in cells if len(row) == len(names) and smi["rc"] == 0]
        smi = {"rc": smi["rc"], "out": (smi["out"] + smi["err"])[:2000]}
    cdi = {}
    for path in glob.glob("/etc/cdi/*.yaml") + glob.glob("/var/run/cdi/*.yaml"):
        text = read_evidence(path) or ""
        if CDI_GPUS.search(text):
            cdi[path] = {
                "drivers": sorted(set(re.findall(r"libcuda\.so\.(\d+\.\d[\d.]*\d)", text))),
                "nodes": sorted(set(re.findall(r"(?m)^\s*-? *path: *[\"']?(/dev/[\w/-]+)", text))),
            }
    result.update(smi=smi, rows=rows, cdi=cdi, **log_facts(result))
    return result


def pci_facts() -> dict[str, Any]:
    """The part of `gpus` from the bus and the kernel: {pci, container, module, nouveau}."""
    loaded = read("/sys/module/nvidia/version")
    return {
        "pci": [{**gpu, **pci_state(gpu["address"])} for gpu in pci_gpus()],
        "container": in_container(),
        "module": (loaded or "").strip() or None,
        "nouveau": os.path.exists("/sys/module/nouveau"),
    }


def log_facts(bus: dict[str, Any]) -> dict[str, Any]:
    """The part of `gpus` from the kernel's log, for GPUs of `pci_facts`: {xids, log_gap, log_lost}."""
    try:
        return xids() if bus["pci"] else dict(NO_LOG)
    except NotReachedError as error:
        return {"xids": {NOT_REACHED: str(error)}, "log_gap": None, "log_lost": None}


def pci_state(address: str) -> dict[str, Any]:
    """{driver, lost} of a PCI device; one that fell off the bus reads as ones everywhere."""
    folder = os.path.join(PCI, address)
    try:
        with open(os.path.join(folder, "config"), "rb") as file:
            # Vendor and device id; 0xffff is no vendor (PCI Local Bus Specification: a read without a target
            # returns ones).
            lost = file.read(4) == b"\xff" * 4
    except OSError:
        lost = False
    link = os.path.join(folder, "driver")
    return {
        "driver": os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None,
        "lost": lost,
    }
