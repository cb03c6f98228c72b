"""Reads the section `nvml` of the facts, as the rules of the GPUs do.

gpukiln/probe/nvml.py makes the section. What NVML could not read is an error in the value's place:
reading it here fails the check. A value that the GPU doesn't have is None.
"""

from __future__ import annotations

import re
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
COMPLETED = 3  # of a fabric's states
FABRIC_TROUBLES = {0: "degraded bandwidth", 4: "route unhealthy"}  # by the first of their bits
# Boards whose NVLinks end at a bridge that may be absent; the others are wired.
_BRIDGED = re.compile(r"(?i)pcie|\bNVL\b|\bA30\b|\bA40\b|RTX|Quadro|Titan|GeForce")


def label(gpu: Gpu) -> str:
    """Name a GPU for people: its index and its PCI address."""
    bus_id = gpu.get("bus_id")
    return f"GPU {gpu['index']}" + (f" ({bus_id})" if isinstance(bus_id, str) else "")


def nvml_gpus(facts: Facts) -> list[Gpu]:
    """The GPUs that NVML lists.

    Raises:
        AssertionError: NVML does not work, lists none, or can't reach one.
    """
    found = facts["nvml"]
    error = found["error"]
    if not found["available"]:
        raise AssertionError(f"NVML does not work: {error[ERROR] if error else 'it was not asked'}")
    if not found["gpus"]:
        raise AssertionError("NVML lists no GPU")
    gone = [f"{label(g)}: {g['error'][ERROR]}" for g in found["gpus"] if g["error"]]
    if gone:
        raise AssertionError(f"NVML can't reach {'; '.join(gone)}")
    return list(found["gpus"])


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
    found: list[dict[str, Any]] = read(gpu, "nvlinks") or []
    for link in found:
        check_readable(gpu, link["state"], f"NVLink {link['link']}")
    return found


def is_bridged(gpu: Gpu) -> bool:
    """Whether the GPU is of a kind whose NVLinks end at a bridge, which need not be fitted."""
    return _BRIDGED.search(str(read(gpu, "name"))) is not None


def heat(gpu: Gpu) -> tuple[int, str] | None:
    """By how many degrees a GPU is cooler than where it slows down, and how that was told; None: it was not.

    T.Limit, where a GPU has it: the margin at which it slows down is negative (NVIDIA/NVSentinel#1371: -2 on
    H100), and below it is too hot. Else the absolute threshold, at which it is too hot.
    """
    margin, slowdown = read(gpu, "temperature.margin"), read(gpu, "temperature.tlimit.slowdown")
    if margin is not None and slowdown is not None:
        return margin - slowdown + 1, f"a margin of {margin} degrees, wanted at least {slowdown}"
    now, limit = read(gpu, "temperature.gpu"), read(gpu, "temperature.slowdown")
    if now is not None and limit is not None:
        return limit - now, f"{now} degrees, wanted less than {limit}"
    return None


def is_divided(gpu: Gpu) -> bool:
    """Whether MIG is on.

    Such a GPU reaches no other and is reached by none: on A100 its NVLinks are trained off, from H100 on they
    stay active (Fabric Manager user guide, "Interoperability with MIG"), and P2P is there neither by NVLink
    nor by PCIe (NVIDIA/nccl#1716).
    """
    return bool(read(gpu, "mig.current"))


def linked(one: Gpu, other: Gpu, gpus: Iterable[Gpu]) -> bool:
    """Whether active NVLinks join two GPUs: directly, through a switch that both reach, or by a fabric.

    What is at a link's end is not told where NVSwitches are no PCI devices (HGX B200): there the GPUs of one
    cluster and clique reach each other (nvml.h, nvmlGpuFabricInfo_t).

    Args:
        gpus: All of the machine: one that two others are linked to passes nothing on (P3's mesh).
    """
    own = {str(read(gpu, "bus_id")).lower() for gpu in gpus}

    def ends(gpu: Gpu) -> set[str]:
        far = [link["remote_bus_id"] for link in links(gpu) if link["state"]]
        return {end.lower() for end in far if isinstance(end, str)}

    def fabric(gpu: Gpu) -> tuple[Any, ...] | None:
        joined = read(gpu, "fabric.state") == COMPLETED and any(link["state"] for link in links(gpu))
        return (read(gpu, "fabric.cluster"), read(gpu, "fabric.clique")) if joined else None

    if str(read(other, "bus_id")).lower() in ends(one) or (ends(one) & ends(other)) - own:
        return True
    return fabric(one) is not None and fabric(one) == fabric(other)


def fabric_troubles(gpu: Gpu) -> list[str]:
    """What the GPU's fabric itself calls unhealthy; empty where it says nothing.

    Two bits each, 1 is yes and 2 no, and four for a wrong configuration, 0 unknown and 1 none (nvml.h,
    NVML_GPU_FABRIC_HEALTH_MASK_*). Recoveries that go on are no trouble yet.
    """
    mask = read(gpu, "fabric.health") or 0
    wrong = [name for shift, name in FABRIC_TROUBLES.items() if mask >> shift & 3 == 1]
    setup = mask >> 8 & 15
    return wrong + ([f"incorrect configuration {setup}"] if setup > 1 else [])


def lanes_refuted(found: Mapping[str, Any], bus_id: str, width: int) -> str:
    """That copies of a GPU were faster than so many lanes can be, for people; empty where they were not.

    Args:
        found: The section `cuda`; empty where nothing was copied.
    """
    for gpu in found.get("gpus") or []:
        link = gpu.get("link") or {}
        if gpu["bus_id"] != address(bus_id) or not link.get("max_gb_s") or gpu["d2h_gb_s"] is None:
            continue
        fastest = max(gpu["h2d_gb_s"], gpu["d2h_gb_s"])
        if fastest > link["max_gb_s"] / int(link["max_width"]) * width:
            return f"{width} lanes are shown, and copies at {fastest} GB/s need more"
    return ""
