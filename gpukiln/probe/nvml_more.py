"""Gathers what NVML says of one GPU beyond what the suite judges: what people look at and choose by.

Runs on the machine beside `gpukiln.probe.nvml`, which asks it, and obeys the same rules.
"""

from __future__ import annotations

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
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive-process"}  # nvmlComputeMode_t; 1 is gone
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


def bad(value: Any) -> bool:
    """Whether an error stands in a value's place."""
    return isinstance(value, dict) and "_error" in value


def more(nvml: Any, handle: Any) -> dict[str, Any]:
    """What is shown of one GPU: memory in MiB, utilization in percent, energy in J since the driver's load.

    Args:
        nvml: What asks, see `gpukiln.probe.nvml`.
        handle: NVML's, of a GPU.
    """

    def get(name: str, *args: Any) -> Any:
        return nvml.ask(f"nvmlDeviceGet{name}", handle, *args)

    rates, encoder, decoder = (
        get("UtilizationRates"),
        get("EncoderUtilization"),
        get("DecoderUtilization"),
    )
    pci = get("PciInfo")
    energy, vbios, action = (
        get("TotalEnergyConsumption"),
        get("VbiosVersion"),
        nvml.field(handle, RECOVERY_ACTION, "uiVal"),
    )
    return {
        "minor": get("MinorNumber"),
        "pci_id": pci if pci is None or bad(pci) else f"0x{pci.pciDeviceId:08X}",
        "architecture": named(get("Architecture"), ARCHITECTURES),
        "compute_capability": capability(nvml, handle),
        "compute_mode": named(get("ComputeMode"), COMPUTE_MODES),
        "memory": memory(nvml, handle),
        "bar1": _bar1(get("BAR1MemoryInfo")),
        "utilization": {
            "gpu": rates if rates is None or bad(rates) else rates.gpu,
            "memory": rates if rates is None or bad(rates) else rates.memory,
            "encoder": _first(encoder),
            "decoder": _first(decoder),
        },
        "energy": energy if energy is None or bad(energy) else round(energy / 1000, 1),
        "numa_node": get("NumaNodeId"),
        "vbios": vbios,
        "board_part_number": get("BoardPartNumber"),
        "gsp_firmware": get("GspFirmwareVersion"),
        "recovery_action": named(action, RECOVERY_ACTIONS),
        "mig_devices": mig_devices(nvml, handle),
    }


def named(number: Any, names: dict[int, str]) -> Any:
    """A number of NVML by its name; one that has none as it is told."""
    return names.get(number, f"number {number}") if isinstance(number, int) else number


def capability(nvml: Any, handle: Any) -> Any:
    """The compute capability, such as 8.0."""
    told = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    return told if told is None or bad(told) else f"{told[0]}.{told[1]}"


def memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """{total, used, reserved, free} in MiB; reserved is the driver's own share and no part of used.

    A driver before branch 510 does not tell them apart: reserved is null there, and part of used.
    """
    said = nvml.ask("nvmlDeviceGetMemoryInfo", handle, nvml.pynvml.nvmlMemory_v2)
    older = said is None or (bad(said) and said["code"] == nvml.VERSION_MISMATCH)
    if older:
        said = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    if said is None or bad(said):
        return dict.fromkeys(("total", "used", "reserved", "free"), said)
    return {
        "total": said.total >> 20,
        "used": said.used >> 20,
        "reserved": None if older else said.reserved >> 20,
        "free": said.free >> 20,
    }


def _bar1(said: Any) -> dict[str, Any]:
    if said is None or bad(said):
        return dict.fromkeys(("total", "used"), said)
    return {"total": said.bar1Total >> 20, "used": said.bar1Used >> 20}


def _first(said: Any) -> Any:
    """Of a utilization and the microseconds that it was sampled for."""
    return said if said is None or bad(said) else said[0]


def mig_devices(nvml: Any, handle: Any) -> Any:
    """The MIG devices of a GPU: [{index, uuid, name, gpu_instance, compute_instance, slices, memory, ...}].

    Empty where MIG is off; memory as of `memory`, processes as of a GPU.
    """
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    if mode is None or bad(mode):
        return [] if mode is None else mode
    if not mode[0]:
        return []
    count = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    if not isinstance(count, int):
        return count or []
    found = []
    for index in range(count):
        device = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if device is None or (bad(device) and device["code"] == nvml.NOT_FOUND):
            continue
        found.append(
            {"index": index, **(_mig_device(nvml, device) if not bad(device) else {"error": device})}
        )
    return found


def _mig_device(nvml: Any, device: Any) -> dict[str, Any]:
    ask = nvml.ask
    name, attributes = ask("nvmlDeviceGetName", device), ask("nvmlDeviceGetAttributes_v2", device)
    known = attributes is not None and not bad(attributes)
    return {
        "error": None,
        "uuid": ask("nvmlDeviceGetUUID", device),
        "name": name,
        "profile": name.rpartition(" MIG ")[2] if isinstance(name, str) and " MIG " in name else None,
        "gpu_instance": ask("nvmlDeviceGetGpuInstanceId", device),
        "compute_instance": ask("nvmlDeviceGetComputeInstanceId", device),
        "slices": attributes.gpuInstanceSliceCount if known else attributes,
        "memory": memory(nvml, device),
        "processes": nvml.processes(device),
    }
