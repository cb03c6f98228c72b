"""Reads the section `nvml` of the facts, for snapshots and for the rules of the host suite.

gpukiln/probe/nvml.py gathers the section. Where NVML failed, an error takes the value's place: reading it
here fails the check. A value that the GPU does not have is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpukiln.probe.base import ERROR
from gpukiln.probe.nvml import address

Gpu = dict[str, Any]
Facts = Mapping[str, Any]

# nvmlGpuP2PStatus_t and nvmlGpuTopologyLevel_t (nvml.h); the numbers are those of nvidia-ml-py.
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
FABRIC_COMPLETED = 3  # nvmlGpuFabricState_t (nvml.h)
FABRIC_STATES = {0: "none", 1: "not started", 2: "in progress", FABRIC_COMPLETED: "completed"}
# A device's field -> its path in the collector's facts.
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
FABRIC_FAULTS = {0: "degraded bandwidth", 4: "route unhealthy"}  # by the lower of their two bits


def label(gpu: Gpu) -> str:
    """A GPU's name for people: its index and its PCI address.

    >>> label({"index": 0, "bus_id": "00000000:00:1E.0"})
    'GPU 0 (00000000:00:1E.0)'
    >>> label({"index": 1, "bus_id": {"_error": "GPU is lost"}})
    'GPU 1'
    """
    bus_id = gpu.get("bus_id")
    return f"GPU {gpu['index']}" + (f" ({bus_id})" if isinstance(bus_id, str) else "")


def title(gpu: Gpu) -> str:
    """A GPU's name as `Device.title` has it: its UUID, or its index where the UUID can't be read."""
    uuid = gpu.get("uuid")
    return uuid if isinstance(uuid, str) else f"GPU {gpu['index']}"


def nvml_gpus(facts: Facts) -> list[Gpu]:
    """The GPUs that NVML lists.

    Raises:
        AssertionError: NVML does not work, lists no GPU, or can't reach one.
    """
    section = facts["nvml"]
    error = section["error"]
    if not section["available"]:
        raise AssertionError(f"NVML does not work: {error[ERROR] if error else 'it was not called'}")
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
        AssertionError: NVML failed to read it.
    """
    value: Any = gpu
    for key in path.split("."):
        value = value[key]
        check_readable(gpu, value, path)
    return value


def check_readable(gpu: Gpu, value: Any, what: str) -> None:
    """Fail where NVML could not read a value.

    Args:
        value: What was gathered.
        what: What the value is, for the message.

    Raises:
        AssertionError: The value is an error.
    """
    if isinstance(value, dict) and ERROR in value:
        raise AssertionError(f"{label(gpu)}: {what}: {value[ERROR]}")


def links(gpu: Gpu) -> list[dict[str, Any]]:
    """The NVLinks of a GPU; empty where it has none.

    Raises:
        AssertionError: NVML could not read the state of a link.
    """
    nvlinks: list[dict[str, Any]] = read(gpu, "nvlinks") or []
    for link in nvlinks:
        check_readable(gpu, link["state"], f"NVLink {link['link']}")
    return nvlinks


def value(gpu: Gpu, name: str) -> Any:
    """A value of a GPU by the name of the `Device`'s field, as the conditions of faults read it."""
    # Not through a `Device`, in which an error of NVML is null: here it must fail a check of the host suite.
    if name == "fabric_state":
        return fabric_state(gpu)
    path = FIELDS[name]
    if path.startswith("more.") and "more" not in gpu:  # the host suite gathers no more than its rules read
        return None
    content = read(gpu, path)
    return clock_events(content) if name == "clock_events" else content


def clock_events(mask: int | None) -> tuple[str, ...] | None:
    """The reasons in NVML's mask why clocks are lowered.

    >>> clock_events(0x24)
    ('software power cap', 'software thermal slowdown')
    >>> clock_events(0)
    ()
    """
    return None if mask is None else tuple(name for bit, name in CLOCK_EVENTS.items() if mask & bit)


def fabric_state(gpu: Gpu) -> str | None:
    """A GPU's state in the NVLink fabric; None where the machine has none."""
    state, status = read(gpu, "fabric.state"), read(gpu, "fabric.status")
    if state == FABRIC_COMPLETED and status:
        return f"completed with status {status}"
    return None if state is None else FABRIC_STATES.get(state, f"state {state}")


def has_mig(gpu: Gpu) -> bool:
    """Whether MIG is on: such a GPU has no peers."""
    # On A100 its NVLinks are trained off, from H100 on they stay active (Fabric Manager user guide,
    # "Interoperability with MIG"); P2P works neither by NVLink nor by PCIe (NVIDIA/nccl#1716).
    return bool(read(gpu, "mig.current"))


def are_linked(first: Gpu, other: Gpu, gpus: Iterable[Gpu]) -> bool:
    """Whether active NVLinks join two GPUs, as `nvlinks_between` counts them.

    Raises:
        AssertionError: NVML failed to read a value that decides it.
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

    Args:
        gpus: All of the machine.
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
    # A GPU forwards nothing: two GPUs that are linked to the same third one are not linked (P3's mesh).
    own = {str(gpu["bus_id"]).lower() for gpu in gpus if not gpu["error"]}
    shared = set(ends(other)) - own
    if through := sum(end in shared for end in ends(first)):
        return through
    # NVML does not name a link's end where NVSwitches are no PCI devices (HGX B200): there the GPUs of one
    # cluster and clique reach each other (nvml.h, nvmlGpuFabricInfo_t).
    return len(active(first)) if fabric(first) is not None and fabric(first) == fabric(other) else 0


def fabric_faults(gpu: Gpu) -> list[str]:
    """What the GPU's fabric reports as unhealthy; empty for nothing."""
    # Two bits each: 1 is yes, 2 is no. Four bits for a wrong configuration: 0 is unknown, 1 is none (nvml.h,
    # NVML_GPU_FABRIC_HEALTH_MASK_*). The bits of recoveries that are under way are no fault.
    mask = read(gpu, "fabric.health") or 0
    wrong = [name for shift, name in FABRIC_FAULTS.items() if mask >> shift & 3 == 1]
    setup = mask >> 8 & 15
    return wrong + ([f"incorrect configuration {setup}"] if setup > 1 else [])


def copies_exceed_lanes(measured: Mapping[str, Any], bus_id: str, width: int) -> str:
    """A sentence where copies of a GPU were faster than a number of lanes allows; else empty.

    Args:
        measured: The section `cuda` of the facts; empty where nothing was copied.
        width: Lanes that the PCIe link shows.
    """
    for gpu in measured.get("gpus") or []:
        link = gpu.get("link") or {}
        if gpu["bus_id"] != address(bus_id) or not link.get("max_gb_s") or gpu["d2h_gb_s"] is None:
            continue
        fastest = max(gpu["h2d_gb_s"], gpu["d2h_gb_s"])
        if fastest > link["max_gb_s"] / int(link["max_width"]) * width:
            return f"{width} lanes are shown, but copies at {fastest} GB/s need more"
    return ""
