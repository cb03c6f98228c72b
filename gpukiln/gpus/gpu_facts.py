"""Reads the section `nvml` of the facts, as the rules of the GPUs do.

gpukiln/probe/nvml.py makes the section. What NVML could not read is an error in the value's place:
reading it here fails the check. A value that the GPU doesn't have is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpukiln.probe.base import ERROR
from gpukiln.probe.nvml import address

Gpu = dict[str, Any]
Facts = Mapping[str, Any]

# nvmlGpuP2PStatus_t and nvmlGpuTopologyLevel_t, as nvidia-ml-py names them.
P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
    6: "unknown",
}
TOPOLOGY = {
    0: "one board",
    10: "one switch",
    20: "several switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "across NUMA nodes",
}
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReason*).
CLOCK_EVENTS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
FABRIC_COMPLETED = 3  # of a fabric's states
FABRIC_STATES = {0: "none", 1: "not started", 2: "in progress", FABRIC_COMPLETED: "completed"}
# A device's field and where the collector has it.
FIELDS = {
    "pci_id": "more.pci_id",
    "minor": "more.minor",
    "name": "name",
    "architecture": "more.architecture",
    "compute_capability": "more.compute_capability",
    "serial": "serial",
    "vbios": "more.vbios",
    "board_part_number": "more.board_part_number",
    "gsp_firmware": "more.gsp_firmware",
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "memory_reserved_mib": "memory.reserved",
    "memory_free_mib": "memory.free",
    "bar1_total_mib": "more.bar1.total",
    "bar1_used_mib": "more.bar1.used",
    "utilization_percent": "more.utilization.gpu",
    "memory_utilization_percent": "more.utilization.memory",
    "encoder_percent": "more.utilization.encoder",
    "decoder_percent": "more.utilization.decoder",
    "temperature_c": "temperature.gpu",
    "temperature_slowdown_c": "temperature.slowdown",
    "temperature_margin_c": "temperature.margin",
    "temperature_margin_slowdown_c": "temperature.tlimit.slowdown",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "energy_joules": "more.energy",
    "clock_sm_mhz": "clocks.sm",
    "clock_sm_max_mhz": "clocks.max_sm",
    "clock_memory_mhz": "clocks.mem",
    "clock_memory_max_mhz": "clocks.max_mem",
    "clock_events": "throttle.mask",
    "pcie_generation": "pcie.gen",
    "pcie_generation_max": "pcie.max_gen",
    "pcie_width": "pcie.width",
    "pcie_width_max": "pcie.max_width",
    "persistence": "persistence",
    "compute_mode": "more.compute_mode",
    "ecc_enabled": "ecc.current",
    "ecc_pending": "ecc.pending",
    "ecc_uncorrected": "ecc.volatile_uncorrected",
    "ecc_corrected": "ecc.volatile_corrected",
    "ecc_uncorrected_lifetime": "ecc.aggregate_uncorrected",
    "ecc_corrected_lifetime": "ecc.aggregate_corrected",
    "remapped_rows_correctable": "remapped_rows.correctable",
    "remapped_rows_uncorrectable": "remapped_rows.uncorrectable",
    "remap_pending": "remapped_rows.pending",
    "remap_failed": "remapped_rows.failed",
    "pages_pending": "retired_pages_pending",
    "recovery_action": "more.recovery_action",
    "mig_enabled": "mig.current",
    "mig_pending": "mig.pending",
}
FABRIC_FAULTS = {0: "degraded bandwidth", 4: "route unhealthy"}  # by the first of their bits


def label(gpu: Gpu) -> str:
    """Name a GPU for people: its index and its PCI address."""
    bus_id = gpu.get("bus_id")
    return f"GPU {gpu['index']}" + (f" ({bus_id})" if isinstance(bus_id, str) else "")


def title(gpu: Gpu) -> str:
    """Name a GPU as `Device.title` does: its UUID, or its index where that can't be read."""
    uuid = gpu.get("uuid")
    return uuid if isinstance(uuid, str) else f"GPU {gpu['index']}"


def nvml_gpus(facts: Facts) -> list[Gpu]:
    """The GPUs that NVML lists.

    Raises:
        AssertionError: NVML does not work, lists none, or can't reach one.
    """
    section = facts["nvml"]
    error = section["error"]
    if not section["available"]:
        raise AssertionError(f"NVML does not work: {error[ERROR] if error else 'it was not asked'}")
    if not section["gpus"]:
        raise AssertionError("NVML lists no GPU")
    gone = [f"{label(g)}: {g['error'][ERROR]}" for g in section["gpus"] if g["error"]]
    if gone:
        raise AssertionError(f"NVML can't reach {'; '.join(gone)}")
    return list(section["gpus"])


def read(gpu: Gpu, path: str) -> Any:
    """A value of a GPU.

    Args:
        gpu: One of `nvml_gpus`.
        path: Keys with dots between, such as `ecc.current`.

    Returns:
        The value; None where the GPU doesn't have it.

    Raises:
        AssertionError: NVML gave an error in its place.
    """
    value: Any = gpu
    for key in path.split("."):
        value = value[key]
        check_readable(gpu, value, path)
    return value


def check_readable(gpu: Gpu, value: Any, what: str) -> None:
    """Fail where NVML gave an error in a value's place.

    Args:
        value: What was gathered.
        what: What the value is, for the message.

    Raises:
        AssertionError: It is an error.
    """
    if isinstance(value, dict) and ERROR in value:
        raise AssertionError(f"{label(gpu)}: {what}: {value[ERROR]}")


def links(gpu: Gpu) -> list[dict[str, Any]]:
    """The NVLinks of a GPU; empty where it has none.

    Raises:
        AssertionError: NVML could not read the state of one.
    """
    nvlinks: list[dict[str, Any]] = read(gpu, "nvlinks") or []
    for link in nvlinks:
        check_readable(gpu, link["state"], f"NVLink {link['link']}")
    return nvlinks


def value(gpu: Gpu, name: str) -> Any:
    """A value of a GPU by the name of the `Device`'s field, as the conditions of faults read both.

    Not through a `Device`, in which an error of NVML is a null: here it fails a check of the suite.
    """
    if name == "fabric_state":
        return fabric_state(gpu)
    path = FIELDS[name]
    if path.startswith("more.") and "more" not in gpu:  # only a snapshot has what is shown
        return None
    content = read(gpu, path)
    return clock_events(content) if name == "clock_events" else content


def clock_events(mask: int | None) -> tuple[str, ...] | None:
    """Why clocks are lower than they could be, by NVML's mask."""
    return None if mask is None else tuple(name for bit, name in CLOCK_EVENTS.items() if mask & bit)


def fabric_state(gpu: Gpu) -> str | None:
    """How far a GPU has joined the NVLink fabric; None where it has none to join."""
    state, status = read(gpu, "fabric.state"), read(gpu, "fabric.status")
    if state == FABRIC_COMPLETED and status:
        return f"completed with status {status}"
    return None if state is None else FABRIC_STATES.get(state, f"state {state}")


def has_mig(gpu: Gpu) -> bool:
    """Whether MIG is on.

    Such a GPU reaches no other and is reached by none: on A100 its NVLinks are trained off, from H100 on they
    stay active (Fabric Manager user guide, "Interoperability with MIG"), and P2P is there neither by NVLink
    nor by PCIe (NVIDIA/nccl#1716).
    """
    return bool(read(gpu, "mig.current"))


def are_linked(first: Gpu, other: Gpu, gpus: Iterable[Gpu]) -> bool:
    """Whether active NVLinks join two GPUs, as `nvlinks_between` counts them.

    Raises:
        AssertionError: NVML gave an error in the place of what says it.
    """
    everyone = list(gpus)
    for gpu in everyone:
        read(gpu, "bus_id")
    for gpu in (first, other):
        links(gpu)
        read(gpu, "fabric.state")  # its other values are of the same call
    return nvlinks_between(first, other, everyone) > 0


def nvlinks_between(first: Gpu, other: Gpu, gpus: Iterable[Gpu]) -> int:
    """Active NVLinks from one GPU towards another: directly, to a switch that both reach, or into a fabric.

    What is at a link's end is not told where NVSwitches are no PCI devices (HGX B200): there the GPUs of one
    cluster and clique reach each other (nvml.h, nvmlGpuFabricInfo_t).

    Args:
        gpus: All of the machine: one that two others are linked to passes nothing on (P3's mesh).
    """

    def active(gpu: Gpu) -> list[dict[str, Any]]:
        nvlinks = gpu["nvlinks"] if isinstance(gpu["nvlinks"], list) else []
        return [link for link in nvlinks if link["state"] is True]

    def ends(gpu: Gpu) -> list[str]:
        far = [link["remote_bus_id"] for link in active(gpu)]
        return [end.lower() for end in far if isinstance(end, str)]

    def fabric(gpu: Gpu) -> tuple[Any, ...] | None:
        joined = gpu["fabric"]["state"] == FABRIC_COMPLETED and active(gpu)
        return (gpu["fabric"]["cluster"], gpu["fabric"]["clique"]) if joined else None

    if direct := ends(first).count(str(other["bus_id"]).lower()):
        return direct
    own = {str(gpu["bus_id"]).lower() for gpu in gpus if not gpu["error"]}
    shared = set(ends(other)) - own
    if through := sum(end in shared for end in ends(first)):
        return through
    return len(active(first)) if fabric(first) is not None and fabric(first) == fabric(other) else 0


def fabric_faults(gpu: Gpu) -> list[str]:
    """What the GPU's fabric itself calls unhealthy; empty where it says nothing.

    Two bits each, 1 is yes and 2 no, and four for a wrong configuration, 0 unknown and 1 none (nvml.h,
    NVML_GPU_FABRIC_HEALTH_MASK_*). Recoveries that go on are no trouble yet.
    """
    mask = read(gpu, "fabric.health") or 0
    wrong = [name for shift, name in FABRIC_FAULTS.items() if mask >> shift & 3 == 1]
    setup = mask >> 8 & 15
    return wrong + ([f"incorrect configuration {setup}"] if setup > 1 else [])


def copies_exceed_lanes(measured: Mapping[str, Any], bus_id: str, width: int) -> str:
    """That copies of a GPU were faster than so many lanes can be, for people; empty where they were not.

    Args:
        found: The section `cuda`; empty where nothing was copied.
    """
    for gpu in measured.get("gpus") or []:
        link = gpu.get("link") or {}
        if gpu["bus_id"] != address(bus_id) or not link.get("max_gb_s") or gpu["d2h_gb_s"] is None:
            continue
        fastest = max(gpu["h2d_gb_s"], gpu["d2h_gb_s"])
        if fastest > link["max_gb_s"] / int(link["max_width"]) * width:
            return f"{width} lanes are shown, and copies at {fastest} GB/s need more"
    return ""
