"""Reads the section `nvml` of the facts, as the checks of the GPUs do.

gpukiln/verify/gather_nvml.py makes the section. What NVML could not read is an error in the value's place:
reading it here fails the check. A value that the GPU doesn't have is None.
"""

from __future__ import annotations

import re
from typing import Any

from gpukiln.verify.facts import ERROR, Facts

Gpu = dict[str, Any]

# nvmlGpuP2PStatus_t and nvmlGpuTopologyLevel_t, as nvidia-ml-py names them.
P2P_STATUS = {
    0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "topology not supported",
    4: "disabled by registry key", 5: "not supported", 6: "unknown",
}  # fmt: skip
TOPOLOGY = {0: "one board", 10: "one switch", 20: "several switches", 30: "one host bridge",
            40: "one NUMA node", 50: "across NUMA nodes"}  # fmt: skip
# Boards whose NVLinks end at a bridge that may be absent; the others are wired.
_BRIDGED = re.compile(r"(?i)pcie|\bNVL\b|\bA30\b|\bA40\b|RTX|Quadro|Titan|GeForce")


def label(gpu: Gpu) -> str:
    """Name a GPU for people: its index and its PCI address."""
    bus_id = gpu.get("bus_id")
    return f"GPU {gpu['index']}" + (f" ({bus_id})" if isinstance(bus_id, str) else "")


def nvml_gpus(facts: Facts) -> list[Gpu]:
    """The GPUs that NVML lists.

    Args:
        facts: The facts of the machine.

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
        gpu: The GPU.
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


def linked(one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs are joined by active NVLinks: directly, or through a switch that both reach."""

    def ends(gpu: Gpu) -> set[str]:
        far = [link["remote_bus_id"] for link in links(gpu) if link["state"]]
        return {end.lower() for end in far if isinstance(end, str)}

    return str(read(other, "bus_id")).lower() in ends(one) or bool(ends(one) & ends(other))
