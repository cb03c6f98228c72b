"""Converts NVML's values, and gathers those of one GPU that only `gpukiln-gpu` shows.

Used by `gpukiln.probe.nvml`, by the same rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

# Field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (nvml.h), and nvmlDeviceGpuRecoveryAction_t.
RECOVERY_ACTION = 230
RECOVERY_ACTIONS = {
    0: "none",
    1: "gpu reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
# nvmlComputeMode_t; 1 is no longer used
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive-process"}
MAX_COUNT = 1024  # of GPUs, or of MIG devices of a GPU; a larger number is an error of NVML
# Words of 64 NUMA nodes, and NVML_AFFINITY_SCOPE_NODE.
NODE_WORDS, NODE_SCOPE = 4, 0
# nvmlDeviceArchitecture_t
ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
}


def is_error(value: Any) -> bool:
    """Whether a value is an error."""
    return isinstance(value, dict) and "_error" in value


def whole_number(returned: Any) -> int:
    """A whole number that NVML returned.

    Raises:
        TypeError: It has another type.

    >>> whole_number(3)
    3
    >>> whole_number("3")
    Traceback (most recent call last):
        ...
    TypeError: str '3', wanted a number
    """
    if isinstance(returned, bool) or not isinstance(returned, int):
        raise TypeError(f"{type(returned).__name__} {str(returned)[:80]!r}, wanted a number")
    return returned


def count(returned: Any) -> int:
    """A number of devices of one machine.

    Raises:
        TypeError: It is no number, or one that no machine has.
    """
    if not 0 <= whole_number(returned) <= MAX_COUNT:
        raise TypeError(f"{returned}, wanted a number up to {MAX_COUNT}")
    return whole_number(returned)


def thousandth(returned: Any) -> float:
    """A value in W or J, of NVML's mW or mJ."""
    return round(whole_number(returned) / 1000, 3)


def flag(returned: Any) -> bool:
    """A mode: 0 is off."""
    return bool(whole_number(returned))


def text(returned: Any) -> str:
    """Text that NVML returned; for nvmlDeviceGetGspFirmwareVersion the bindings return bytes.

    Raises:
        TypeError: It is neither text nor bytes.
    """
    if isinstance(returned, bytes):
        returned = returned.partition(b"\0")[0].decode("utf-8", "replace")
    if not isinstance(returned, str):
        raise TypeError(f"{type(returned).__name__} {str(returned)[:80]!r}, wanted text")
    return returned


def display_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    """The values of one GPU for display: memory in MiB, utilization and energy as of `usage`.

    Args:
        nvml: An `Nvml` of `gpukiln.probe.nvml`.
        handle: NVML's, of a GPU.
    """

    def sampled(returned: Any) -> int:  # a tuple of the utilization and the sampling period in microseconds
        return whole_number(returned[0])

    get, now = partial(nvml.get, handle), usage(nvml, handle)
    action = nvml.field(handle, RECOVERY_ACTION, "uiVal")
    return {
        "minor": get("MinorNumber"),
        "pci_id": get("PciInfo", read=lambda pci: f"0x{whole_number(pci.pciDeviceId):08X}"),
        "architecture": name_of_number(get("Architecture"), ARCHITECTURES),
        "compute_capability": capability(nvml, handle),
        "compute_mode": name_of_number(get("ComputeMode"), COMPUTE_MODES),
        "bar1": spread_values(get("BAR1MemoryInfo", read=_bar1), "total", "used"),
        "utilization": {
            **now["utilization"],
            "encoder": get("EncoderUtilization", read=sampled),
            "decoder": get("DecoderUtilization", read=sampled),
        },
        "energy": now["energy"],
        "memory_nodes": get("MemoryAffinity", NODE_WORDS, NODE_SCOPE, read=_nodes),
        "vbios": get("VbiosVersion", read=text),
        "board_part_number": get("BoardPartNumber", read=text),
        "gsp_firmware": get("GspFirmwareVersion", read=text),
        "recovery_action": name_of_number(action, RECOVERY_ACTIONS),
        "mig_devices": mig_devices(nvml, handle),
    }


def name_of_number(number: Any, names: dict[int, str]) -> Any:
    """The name of NVML's number; `number N` where it has none.

    >>> name_of_number(9, ARCHITECTURES), name_of_number(99, ARCHITECTURES)
    ('Hopper', 'number 99')
    >>> name_of_number({"_error": "GPU is lost"}, ARCHITECTURES)
    {'_error': 'GPU is lost'}
    """
    return names.get(number, f"number {number}") if isinstance(number, int) else number


def spread_values(returned: Any, *names: str) -> dict[str, Any]:
    """Values of one call by name; null or the error for each where the call failed."""
    return dict.fromkeys(names, returned) if returned is None or is_error(returned) else dict(returned)


def usage(nvml: Any, handle: Any) -> dict[str, Any]:
    """{utilization: {gpu, memory} in percent, energy: in J since the driver was loaded}."""

    def rates(returned: Any) -> dict[str, int]:
        return {"gpu": whole_number(returned.gpu), "memory": whole_number(returned.memory)}

    get = partial(nvml.get, handle)
    return {
        "utilization": spread_values(get("UtilizationRates", read=rates), "gpu", "memory"),
        "energy": get("TotalEnergyConsumption", read=thousandth),
    }


def _nodes(words: Any) -> list[int]:
    """The NUMA nodes of a bit set, 64 bits in each word."""
    return [
        64 * at + bit for at, word in enumerate(words) for bit in range(64) if whole_number(word) >> bit & 1
    ]


def capability(nvml: Any, handle: Any) -> Any:
    """The compute capability, such as 8.0."""

    def read(returned: Any) -> str:
        return f"{whole_number(returned[0])}.{whole_number(returned[1])}"

    return nvml.ask("nvmlDeviceGetCudaComputeCapability", handle, read=read)


def memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """{total, used, reserved, free} in MiB; reserved is the driver's own memory and not part of used.

    Before driver branch 510 reserved is null, and its memory is part of used.
    """

    def read(returned: Any) -> dict[str, Any]:
        names = ("total", "used", "free")
        reserved = getattr(returned, "reserved", None)  # the older layout does not have it
        sizes = {name: whole_number(getattr(returned, name)) >> 20 for name in names}
        return {**sizes, "reserved": None if reserved is None else whole_number(reserved) >> 20}

    layout = getattr(nvml.pynvml, "nvmlMemory_v2", None)
    said = nvml.ask("nvmlDeviceGetMemoryInfo", handle, layout, read=read) if layout else None
    if said is None or (is_error(said) and said["code"] == nvml.VERSION_MISMATCH):
        said = nvml.ask("nvmlDeviceGetMemoryInfo", handle, read=read)
    return spread_values(said, "total", "used", "reserved", "free")


def _bar1(returned: Any) -> dict[str, int]:
    return {"total": whole_number(returned.bar1Total) >> 20, "used": whole_number(returned.bar1Used) >> 20}


def mig_devices(nvml: Any, handle: Any) -> Any:
    """The MIG devices of a GPU: [{index, uuid, name, gpu_instance, compute_instance, slices, memory, ...}].

    Empty where MIG is off; memory as of `memory`, processes as of a GPU.
    """
    enabled = nvml.ask("nvmlDeviceGetMigMode", handle, read=lambda returned: flag(returned[0]))
    if enabled is not True:
        return enabled or []
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle, read=count)
    if not isinstance(most, int):
        return most or []
    devices = []
    for index in range(most):
        device = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, read=lambda handle: handle)
        if device is None or (is_error(device) and device["code"] == nvml.NOT_FOUND):
            continue
        devices.append(
            {"index": index, **(_mig_device(nvml, device) if not is_error(device) else {"error": device})}
        )
    return devices


def _mig_device(nvml: Any, device: Any) -> dict[str, Any]:
    ask = nvml.ask
    name = ask("nvmlDeviceGetName", device, read=text)
    return {
        "error": None,
        "uuid": ask("nvmlDeviceGetUUID", device, read=text),
        "name": name,
        "profile": name.rpartition(" MIG ")[2] if isinstance(name, str) and " MIG " in name else None,
        "gpu_instance": ask("nvmlDeviceGetGpuInstanceId", device, read=whole_number),
        "compute_instance": ask("nvmlDeviceGetComputeInstanceId", device, read=whole_number),
        "slices": ask(
            "nvmlDeviceGetAttributes_v2",
            device,
            read=lambda returned: whole_number(returned.gpuInstanceSliceCount),
        ),
        "memory": memory(nvml, device),
        "processes": nvml.processes(device),
    }
