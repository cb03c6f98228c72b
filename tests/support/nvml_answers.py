"""What NVML says of the first GPU, by the names of tests/support/captures; run where NVML is the double's.

The probe's words for what the probe reads, and NVML's for what it does not. Structures that pynvml of one
version has and of another lacks are read as words, as nvml.h declares them.
"""

import ctypes
import json
from typing import Any

import pynvml

from gpukiln.probe.nvml import Nvml, gpu_facts
from gpukiln.probe.nvml_values import display_facts

FUNCTION_NOT_FOUND, DEPRECATED = 13, 26


def read() -> dict[str, Any]:
    """{name: value, null where the GPU or the driver's branch does not have it}."""
    nvml = Nvml()
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    probe = {**gpu_facts(nvml, 0, gpu), "more": display_facts(nvml, gpu)}

    def get(name: str, *args: int) -> Any:
        try:
            value = getattr(pynvml, name)(gpu, *args)
        except pynvml.NVMLError_NotSupported:
            return None
        except pynvml.NVMLError as error:
            if error.value in (FUNCTION_NOT_FOUND, DEPRECATED):
                return None
            raise
        return value.decode() if isinstance(value, bytes) else value

    def field(number: int, kind: str, scope: int = 0) -> Any:
        [value] = pynvml.nvmlDeviceGetFieldValues(gpu, [(number, scope)])
        return getattr(value.value, kind) if value.nvmlReturn == 0 else None

    def words(name: str, size: int, version: int = 1) -> list[int] | None:
        """A structure of so many bytes, as 32-bit words; a version stands in the first of them."""
        buffer = (ctypes.c_uint * (size // 4))()
        buffer[0] = size | version << 24 if version else 0
        try:
            status = pynvml._nvmlGetFunctionPointer(name)(gpu, buffer)
        except pynvml.NVMLError_FunctionNotFound:
            return None
        return None if status else list(buffer)

    def errors(kind: int, counter: int, location: int) -> Any:
        return get("nvmlDeviceGetMemoryErrorCounter", kind, counter, location)

    shown, memory = probe["more"], probe["memory"]
    row, limits = probe["remapped_rows"], get("nvmlDeviceGetPowerManagementLimitConstraints")
    banks = get("nvmlDeviceGetRowRemapperHistogram")
    sessions, fbc = get("nvmlDeviceGetEncoderStats"), get("nvmlDeviceGetFBCStats")
    repair = words("nvmlDeviceGetRepairStatus", 12)
    pci = words("nvmlDeviceGetPciInfoExt", 64)
    pages = get("nvmlDeviceGetRetiredPages", 0)
    answers = {
        "name": probe["name"],
        "architecture": shown["architecture"],
        "persistence": probe["persistence"],
        "accounting": get("nvmlDeviceGetAccountingMode"),
        "accounting_buffer": get("nvmlDeviceGetAccountingBufferSize"),
        "mig": probe["mig"]["current"],
        "minor": shown["minor"],
        "vbios": shown["vbios"],
        "multi_gpu_board": get("nvmlDeviceGetMultiGpuBoard"),
        "part_number": shown["board_part_number"],
        "module_id": get("nvmlDeviceGetModuleId"),
        "inforom.image": get("nvmlDeviceGetInforomImageVersion"),
        "inforom.oem": get("nvmlDeviceGetInforomVersion", 0),
        "inforom.ecc": get("nvmlDeviceGetInforomVersion", 1),
        "inforom.power": get("nvmlDeviceGetInforomVersion", 2),
        "c2c": part(words("nvmlDeviceGetC2cModeInfoV", 4, version=0), 0),
        "addressing": part(words("nvmlDeviceGetAddressingMode", 8), 1),
        "recovery_action": shown["recovery_action"],
        "gsp_firmware": get("nvmlDeviceGetGspFirmwareVersion"),
        "pci_id": shown["pci_id"],
        "subsystem": None if pci is None else f"0x{pci[5]:08X}",
        "pci_class": part(pci, 7),
        "pcie.max_gen": probe["pcie"]["max_gen"],
        "pcie.gen": probe["pcie"]["gen"],
        "pcie.board_max_gen": get("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        "pcie.max_width": probe["pcie"]["max_width"],
        "pcie.width": probe["pcie"]["width"],
        "pcie.replays": get("nvmlDeviceGetPcieReplayCounter"),
        "pcie.rollovers": field(95, "uiVal"),
        "fan": get("nvmlDeviceGetFanSpeed"),
        "pstate": get("nvmlDeviceGetPerformanceState"),
        "idle": bool(probe["throttle"]["mask"] & 1),
        "held_down": field(269, "ullVal"),
        "edpp": field(274, "uiVal"),
        "memory.total": memory["total"],
        "memory.reserved": memory["reserved"],
        "memory.used": memory["used"],
        "memory.free": memory["free"],
        "bar1.total": shown["bar1"]["total"],
        "bar1.used": shown["bar1"]["used"],
        "protected_memory": part(words("nvmlDeviceGetConfComputeProtectedMemoryUsage", 24, version=0), 0),
        "compute_mode": shown["compute_mode"],
        "utilization.jpeg": part(get("nvmlDeviceGetJpgUtilization"), 0),
        "utilization.ofa": part(get("nvmlDeviceGetOfaUtilization"), 0),
        "encoder_sessions": part(sessions, 0),
        "fbc_sessions": None if fbc is None else fbc.sessionsCount,
        "ecc.current": probe["ecc"]["current"],
        "ecc.pending": probe["ecc"]["pending"],
        "ecc.volatile.dram_corrected": errors(0, 0, 2),
        "ecc.volatile.dram_uncorrected": errors(1, 0, 2),
        "ecc.volatile.sram_corrected": errors(0, 0, 7),
        "ecc.aggregate.dram_corrected": errors(0, 1, 2),
        "ecc.aggregate.dram_uncorrected": errors(1, 1, 2),
        "ecc.aggregate.sram_corrected": errors(0, 1, 7),
        "ecc.sram_threshold": part(words("nvmlDeviceGetSramEccErrorStatus", 104), 24),
        "repair.channel": part(repair, 1),
        "repair.tpc": part(repair, 2),
        "retired.single": None if pages is None else len(pages),
        "retired.pending": probe["retired_pages_pending"],
        "rows.correctable": row["correctable"],
        "rows.uncorrectable": row["uncorrectable"],
        "rows.pending": row["pending"],
        "rows.failed": row["failed"],
        "rows.banks": None if banks is None else banks.max,
        "temperature.gpu": probe["temperature"]["gpu"],
        "temperature.margin": probe["temperature"]["margin"],
        "temperature.shutdown": get("nvmlDeviceGetTemperatureThreshold", 0) or None,
        "temperature.slowdown": probe["temperature"]["slowdown"],
        "temperature.memory_max": get("nvmlDeviceGetTemperatureThreshold", 2) or None,
        "temperature.gpu_max": get("nvmlDeviceGetTemperatureThreshold", 3) or None,
        "temperature.target": get("nvmlDeviceGetTemperatureThreshold", 5) or None,
        "temperature.memory": field(82, "uiVal"),
        "power.average": milli(field(185, "uiVal")),
        "power.instant": probe["power"]["draw"],
        "power.limit": probe["power"]["limit"],
        "power.default": milli(get("nvmlDeviceGetPowerManagementDefaultLimit")),
        "power.min": milli(part(limits, 0)),
        "power.max": milli(part(limits, 1)),
        "power.memory": milli(field(185, "uiVal", 2)),
        "power.module": milli(field(186, "uiVal", 1)),
        "power.module_limit": milli(field(190, "uiVal", 1)),
        "power.module_min": milli(field(187, "uiVal", 1)),
        "clocks.graphics": get("nvmlDeviceGetClockInfo", 0),
        "clocks.sm": probe["clocks"]["sm"],
        "clocks.mem": probe["clocks"]["mem"],
        "clocks.video": get("nvmlDeviceGetClockInfo", 3),
        "clocks.app_sm": get("nvmlDeviceGetApplicationsClock", 0),
        "clocks.app_mem": get("nvmlDeviceGetApplicationsClock", 2),
        "clocks.max_sm": probe["clocks"]["max_sm"],
        "clocks.max_mem": probe["clocks"]["max_mem"],
        "clocks.max_video": get("nvmlDeviceGetMaxClockInfo", 3),
        "clocks.boost": get("nvmlDeviceGetMaxCustomerBoostClock", 0),
        "fabric.state": probe["fabric"]["state"],
        "fabric.status": probe["fabric"]["status"],
    }
    answers.update({f"utilization.{name}": value for name, value in shown["utilization"].items()})
    answers.update({f"tlimit.{name}": value for name, value in probe["temperature"]["tlimit"].items()})
    return answers


def milli(value: float | None) -> float | None:
    """In thousandths."""
    return None if value is None else value / 1000


def part(value: Any, at: int) -> Any:
    """One of several, null where there is none."""
    return None if value is None else value[at]


if __name__ == "__main__":
    print(json.dumps(read()))
