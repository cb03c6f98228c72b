"""Gathers what the bus, the kernel and nvidia-smi say of the GPUs.

Runs on the judged machine beside `gpukiln.verify.gather`, and obeys the same rules.
"""

# ruff: noqa: PTH110, PTH118, PTH119, PTH123, PTH207
# See gpukiln/verify/gather.py.

from __future__ import annotations

import glob
import os
import re
from typing import Any

from gpukiln.verify.gather_base import (
    NOT_REACHED,
    PCI,
    NotReachedError,
    need,
    pci_gpus,
    read,
    show,
    unless_hung,
)

# A GPU can fall off the bus without a number; NVSwitch's faults are SXids.
XID = re.compile(r"NVRM: Xid|nvidia-nvswitch\d*: SXid|NVRM: .*fallen off the bus")


def gpus() -> dict[str, Any]:
    """{pci: [{address, device, driver, lost}], module: loaded version, nouveau: whether it is loaded,
    smi: {rc, out}, rows, xids, cdi: {path: versions}}.

    driver is the kernel driver that has the GPU; lost: the GPU does not answer on the bus any more.
    Output and status of nvidia-smi are kept together: it prints its errors on stdout.
    """  # noqa: D205
    pci = [{**gpu, **on_the_bus(gpu["address"])} for gpu in pci_gpus()]
    loaded = read("/sys/module/nvidia/version")
    result: dict[str, Any] = {"pci": pci, "module": loaded.strip() if loaded else None,
                              "nouveau": os.path.exists("/sys/module/nouveau")}  # fmt: skip
    if not pci:
        return result
    query = "--query-gpu=pci.bus_id,name,uuid,driver_version,persistence_mode"
    smi = unless_hung("nvidia-smi", query, "--format=csv,noheader", timeout=120)
    rows: Any = smi
    if NOT_REACHED not in smi:
        cells = [[c.strip() for c in line.split(",")] for line in smi["out"].splitlines()]
        names = ("bus_id", "name", "uuid", "driver", "persistence")
        rows = [dict(zip(names, row)) for row in cells if len(row) == len(names) and smi["rc"] == 0]  # noqa: B905
        smi = {"rc": smi["rc"], "out": (smi["out"] + smi["err"])[:2000]}
    cdi = {}
    for path in glob.glob("/etc/cdi/*.yaml") + glob.glob("/var/run/cdi/*.yaml"):
        text = show(path) or ""
        if "nvidia.com/gpu" in text:
            cdi[path] = sorted(set(re.findall(r"libcuda\.so\.(\d+\.\d[\d.]*\d)", text)))
    result.update(smi=smi, rows=rows, xids=xids(), cdi=cdi)
    return result


def on_the_bus(address: str) -> dict[str, Any]:
    """{driver, lost} of a PCI device; one that is gone reads as ones everywhere, its folder stays."""
    folder = os.path.join(PCI, address)
    try:
        with open(os.path.join(folder, "config"), "rb") as file:
            lost = file.read(4) == b"\xff" * 4
    except OSError:
        lost = False
    link = os.path.join(folder, "driver")
    return {"driver": os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None,
            "lost": lost}  # fmt: skip


def xids() -> Any:
    """The kernel log's messages of faults, of this boot."""
    try:
        log = need("journalctl", "-k", "-b", "-o", "cat", "--no-pager")
    except NotReachedError as error:
        return {NOT_REACHED: str(error)}
    return [line[:300] for line in log.splitlines() if XID.search(line)][:20]
