"""One sentence about the state of a machine's GPUs and their driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpukiln.probe.base import NOT_REACHED

# Xid 79 is 'GPU has fallen off the bus' (NVIDIA, XID Errors).
FALLEN = re.compile(r"fallen off the bus|Xid[^:]*: 79\b|Xid \(.*?\): 79\b")
# nvidia-smi(1), RETURN VALUE.
GPU_IS_LOST = 15  # nvidia-smi's exit code
MISMATCH = 18  # "NVML library version mismatch"


def diagnosis(facts: Mapping[str, Any]) -> str:
    """Name the problem that keeps the GPUs from working, or say that there is none.

    Args:
        facts: As in facts.json. Sections may be missing, or be `{"_error": ...}` or `{"_not_reached": ...}`.

    Returns:
        A sentence; where there are several problems, about the one to fix first.

    >>> diagnosis({"gpus": {"pci": []}})
    'No NVIDIA GPU is on the PCI bus, and no NVIDIA driver is installed: this is not a GPU machine (yet).'
    >>> diagnosis({"gpus": {"pci": [{"address": "0000:01:00.0"}]}, "driver": {}})
    '1 NVIDIA GPU on the PCI bus, and no NVIDIA driver is installed.'
    """
    look = _GpuFacts(facts)
    # In the order in which problems have to be fixed: each makes the later ones meaningless.
    for describe in (
        _hangs,
        _simulated,
        _lost,
        _nothing,
        _no_gpu,
        _taken,
        _not_installed,
        _not_loaded,
        _mismatch,
    ):
        if said := describe(look):
            return said
    if look.smi_code:
        return f"{look.gpus}; driver {look.loaded} is loaded, and nvidia-smi exits {look.smi_code}."
    return f"{look.gpus}, and driver {look.loaded} is loaded, in the version of its libraries."


class _GpuFacts:
    """The values on which the sentence depends.

    Args:
        facts: As `diagnosis` has them.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.pci: list[dict[str, Any]] = self.get("gpus", "pci") or []
        self.loaded: str | None = self.get("gpus", "module")
        self.nouveau = bool(self.get("gpus", "nouveau") or self.get("nouveau", "loaded"))
        self.smi_version: str | None = self.get("driver", "nvidia_smi", "version")
        self.smi_code: int | None = self.get("gpus", "smi", "rc")
        libraries = self.get("driver", "libraries") or {}
        self.libraries = sorted({version for copies in libraries.values() for version in copies})
        self.running: str = self.get("kernel", "running") or "the running kernel"
        self.modules = {
            kernel: (by_name or {}).get("nvidia") for kernel, by_name in (self.get("modules") or {}).items()
        }
        # nvidia-smi first: it is the user space that a user sees.
        versions = [
            self.smi_version,
            *self.libraries,
            *(m.get("version") for m in self.modules.values() if m),
        ]
        self.installed: str | None = next(filter(None, versions), None)

    def get(self, *path: str) -> Any:
        """A value; None where it is missing or nothing is known of it."""
        value: Any = self.facts
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        # A section that could not be gathered must not be read as `no GPU`.
        unknown = isinstance(value, Mapping) and (NOT_REACHED in value or "_error" in value)
        return None if unknown else value

    @property
    def gpus(self) -> str:
        return _gpus(self.pci)


def _gpus(pci: list[dict[str, Any]]) -> str:
    names = ", ".join(dict.fromkeys(str(gpu["name"]) for gpu in pci if gpu.get("name")))
    return f"{len(pci)} NVIDIA GPU{'s' if len(pci) > 1 else ''} on the PCI bus" + (
        f" ({names})" if names else ""
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _hangs(look: _GpuFacts) -> str:
    tools = look.get("hung", "tools") or []
    kernel = look.get("hung", "kernel") or []
    said = f"; the last kernel message: {kernel[-1]}" if kernel else ""
    driver = [t for t in tools if t["tool"] in ("nvidia-smi", "NVML")]
    if driver:
        loaded = f"driver {look.loaded} is loaded" if look.loaded else "no driver is loaded"
        where = look.gpus if look.pci else "no NVIDIA GPU on the PCI bus"
        return f"{driver[0]['tool']} hangs ({driver[0]['reason']}): {where}, {loaded}{said}."
    if tools:
        names = _listed(t["tool"] for t in tools)
        return f"{names} hang{'s' if len(tools) == 1 else ''}: {tools[0]['reason']}{said}."
    return ""


def _simulated(look: _GpuFacts) -> str:
    if not look.get("simulated", "machine"):
        return ""
    error = (look.get("nvml", "error") or {}).get("_error")
    names = [str(gpu.get("name")) for gpu in look.get("nvml", "gpus") or []]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none is listed"
    return f"The GPUs of this machine are simulated ({error or listed}): no result here is about a real GPU."


def _lost(look: _GpuFacts) -> str:
    lost = [str(gpu.get("address")) for gpu in look.pci if gpu.get("lost")]
    xids = [line for line in look.get("gpus", "xids") or [] if FALLEN.search(line)]
    if lost:
        return f"A GPU fell off the bus: {_listed(lost)} no longer answers (of {look.gpus})."
    if xids or look.smi_code == GPU_IS_LOST:
        return (
            f"A GPU fell off the bus ({look.gpus}): {xids[-1].strip() if xids else 'nvidia-smi reports it'}."
        )
    return ""


def _nothing(look: _GpuFacts) -> str:
    if look.pci or look.loaded or look.installed:
        return ""
    if look.get("gpus") is None:
        return "It is not known which GPUs this machine has: the PCI bus could not be read."
    return (
        "No NVIDIA GPU is on the PCI bus, and no NVIDIA driver is installed: this is not a GPU machine (yet)."
    )


def _no_gpu(look: _GpuFacts) -> str:
    if look.pci:
        return ""
    state = f"driver {look.loaded} is loaded" if look.loaded else f"driver {look.installed} is installed"
    return f"No NVIDIA GPU is on the PCI bus, though {state}."


def _taken(look: _GpuFacts) -> str:
    drivers = {gpu["driver"] for gpu in look.pci if gpu.get("driver") not in (None, "nvidia")}
    if "nouveau" in drivers or (look.nouveau and not look.loaded):
        return (
            f"nouveau, the kernel's own driver, has claimed the GPU ({look.gpus}), so that NVIDIA's "
            "driver can't."
        )
    if drivers:
        return f"{_listed(sorted(drivers))} has claimed a GPU that NVIDIA's driver should have ({look.gpus})."
    return ""


def _not_installed(look: _GpuFacts) -> str:
    if look.loaded or look.installed:
        return ""
    if look.get("driver") is None:
        return f"{look.gpus}; which driver is installed could not be read."
    return f"{look.gpus}, and no NVIDIA driver is installed."


def _not_loaded(look: _GpuFacts) -> str:
    if look.loaded:
        return ""
    if look.modules and not look.modules.get(look.running):
        others = [kernel for kernel, module in look.modules.items() if module]
        more = f" (there is one for {_listed(others)})" if others else ""
        return f"{look.gpus}; driver {look.installed} is installed, with no module for {look.running}{more}."
    signature = look.get("signatures", look.running) or {}
    if signature.get("rc"):
        why = str(signature.get("out", "")).strip().rstrip(".")
        return f"{look.gpus}; the kernel refuses the module of driver {look.installed}: {why}."
    return f"{look.gpus}; driver {look.installed} is installed and not loaded."


def _mismatch(look: _GpuFacts) -> str:
    others = [v for v in (look.smi_version, *look.libraries) if v and v != look.loaded]
    if others:
        return (
            f"{look.gpus}; driver {look.loaded} is loaded, and its libraries are of version "
            f"{_listed(others)}: the machine was not rebooted after an upgrade, or the driver comes from "
            "several sources."
        )
    if look.smi_code == MISMATCH:
        return (
            f"{look.gpus}; driver {look.loaded} is loaded, and nvidia-smi finds libraries of another version."
        )
    if look.smi_version is None and not look.libraries and look.get("driver") is not None:
        return f"{look.gpus}; driver {look.loaded} is loaded, and its libraries and nvidia-smi are missing."
    return ""
