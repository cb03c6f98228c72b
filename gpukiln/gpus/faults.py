"""The table of GPU faults: severity, meaning, remedy and source of each.

Everything that examines a GPU reads the table: the host suite (`rules`), `list` and leases (`health`), node
health, `watch` (`insights`), and the alerts of the monitoring add-on. A fault of a device is a condition on
the
device's fields, the same function for a snapshot and for the facts of the host suite; a fault of the kernel's
log is a pattern. Xids have a table of their own, made from NVIDIA's catalogue: gpukiln/catalog/data/xid.yaml.

Severities: error, the GPU should get no new work, and its state is sick; warning, it works, and an
administrator should examine it; info, worth knowing and no fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.findings import Finding, Severity
from gpukiln.probe import xids

FieldReader = Callable[[str], Any]
"""Returns a field of a device by its name in `gpukiln.gpus.model.Device`; None where it is not known."""

# Sources of the rows; findings print them.
MEMORY_GUIDE = "docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
NVML_H = "nvml.h"


@dataclass(frozen=True)
class GpuFault:
    """One fault of a GPU.

    Args:
        id: Its name in every report.
        text: What it means.
        remedy: The next step, which follows from this fault alone.
        condition: Given a device's fields, what was found; None where the device does not have the fault.
            Faults that need more than one device have no condition; the table says which module finds them.
    """

    id: str
    severity: Severity
    text: str
    remedy: str
    source: str
    condition: Callable[[FieldReader], str | None] = lambda _: None

    def finding(self, object: str, message: str) -> Finding:
        """This fault on a device.

        Args:
            object: The device, as `Finding` has it.
            message: What was found.
        """
        return Finding(self.id, self.severity, message, object, remedy=self.remedy, source=self.source)


@dataclass(frozen=True)
class LogFault:
    """A fault in the kernel's log that has no Xid number.

    Args:
        pattern: With a group `device` where the line names the device.
        reset: Whether a reset of the GPU ends it.
    """

    severity: Severity
    text: str
    remedy: str
    source: str
    pattern: re.Pattern[str]
    reset: bool = False


# Recovery actions that the driver requests (nvml.h, nvmlDeviceGpuRecoveryAction_t), and how to carry them
# out.
ACTIONS: Mapping[str, str] = {
    "gpu reset": "end the work on it, then `gpukiln-gpu reset`",
    "drain and reset": "end the work on it and on the GPUs that reach its memory, then `gpukiln-gpu reset`",
    "node reboot": "drain the node and reboot it: systemctl reboot",
    "system reboot": "drain the node and reboot it: systemctl reboot",
    "drain P2P": "end the work on it and on the GPUs that reach its memory; wait until the action is none",
    "recover IMEX domain": "restart nvidia-imex on every node of its domain",
    "bus reset": "drain the node and reboot it, with the power off in between",
}


def _recovery_action(value: FieldReader) -> str | None:
    action = value("recovery_action")
    # Older drivers do not report the field: null is no fault.
    if action in (None, "none"):
        return None
    how = ACTIONS.get(action)
    return f"the driver requests: {action}" + (f" ({how})" if how else "")


def _if_set(name: str, text: str) -> Callable[[FieldReader], str | None]:
    return lambda value: text if value(name) else None


def _ecc_uncorrected(value: FieldReader) -> str | None:
    errors = value("ecc_uncorrected")
    return f"{errors} uncorrected ECC errors since the last reset" if errors else None


def _pending(now: str, later: str, mode: str) -> Callable[[FieldReader], str | None]:
    """A mode that changes with the next reset."""

    def evidence(value: FieldReader) -> str | None:
        current, pending = value(now), value(later)
        if current is None or pending is None or current == pending:
            return None
        return f"{mode} is {onoff(current)}, and will be {onoff(pending)} after a reset"

    return evidence


def onoff(value: bool | None) -> str:
    """A mode in words.

    >>> onoff(True), onoff(False), onoff(None)
    ('on', 'off', 'unsupported')
    """
    return "unsupported" if value is None else "on" if value else "off"


# Names of `gpu_facts.CLOCK_EVENTS`. NVML sets "hardware slowdown" for power, power brake and heat alike.
THERMAL_EVENTS = ("software thermal slowdown", "hardware thermal slowdown")
HARDWARE_EVENTS = ("hardware slowdown", "hardware power brake")


def _slowed_by(*events: str) -> Callable[[FieldReader], str | None]:
    def evidence(value: FieldReader) -> str | None:
        hit = [name for name in value("clock_events") or () if name in events]
        if not hit:
            return None
        now = value("temperature_c")
        return ", ".join(hit) + (f" at {now} degrees Celsius" if now is not None else "")

    return evidence


def thermal_margin(value: FieldReader) -> tuple[int, str] | None:
    """Degrees below the slowdown temperature, and the numbers in words; None where they are not known.

    >>> thermal_margin({"temperature_c": 91, "temperature_slowdown_c": 90}.get)
    (-1, '91 degrees, wanted less than 90')
    >>> thermal_margin({"temperature_margin_c": 5, "temperature_margin_slowdown_c": -2}.get)
    (8, 'a margin of 5 degrees, wanted at least -2')
    """
    # T.Limit, where a GPU has it: the margin of the slowdown is negative (-2 on H100,
    # NVIDIA/NVSentinel#1371), and a smaller margin is too hot. Other GPUs have an absolute threshold, at
    # which they are too hot.
    margin, slowdown = value("temperature_margin_c"), value("temperature_margin_slowdown_c")
    if margin is not None and slowdown is not None:
        return margin - slowdown + 1, f"a margin of {margin} degrees, wanted at least {slowdown}"
    now, limit = value("temperature_c"), value("temperature_slowdown_c")
    if now is not None and limit is not None:
        return limit - now, f"{now} degrees, wanted less than {limit}"
    return None


def _too_hot(value: FieldReader) -> str | None:
    margin = thermal_margin(value)
    return margin[1] if margin is not None and margin[0] <= 0 else None


def _no_clock(value: FieldReader) -> str | None:
    top = value("clock_sm_max_mhz")
    return "the highest SM clock is 0 MHz, wanted more than 0" if top is not None and top <= 0 else None


def _persistence_off(value: FieldReader) -> str | None:
    return "persistence mode is off" if value("persistence") is False else None


def _fabric(value: FieldReader) -> str | None:
    state = value("fabric_state")
    return f"its state in the fabric is: {state}" if state not in (None, "none", "completed") else None


def lanes_missing(width: int | None, widest: int | None) -> str | None:
    """The missing lanes of a PCIe link in words; None where none is missing, or the numbers are not known.

    >>> lanes_missing(8, 16)
    'a PCIe link of 8 lanes, wanted 16'
    >>> lanes_missing(16, 16)
    """
    if width is None or widest is None or width >= widest:
        return None
    return f"a PCIe link of {width} lanes, wanted {widest}"


DEVICE_FAULTS: tuple[GpuFault, ...] = (
    # The first three are for a GPU that can't be read at all: gpukiln.gpus.health finds them.
    GpuFault(
        "lost",
        "error",
        "NVML can't read it",
        "`dmesg` says why (Xid 79, RmInitAdapter); `gpukiln-gpu health` names the fault and its remedy",
        "nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_GPU_NOT_FOUND",
    ),
    GpuFault(
        "hung",
        "error",
        "processes that query it wait in the kernel without progress",
        "`dmesg` shows what the driver waits for; end its processes, and follow the remedy of that fault",
        "proc_pid_stat(5): state D",
    ),
    GpuFault(
        "slow",
        "warning",
        "it has not answered yet; the driver is still working",
        "try again in some minutes; with persistence mode the GPU does not start for each program",
        "Azure/AgentBaker#2829: 25 s and more without persistence mode",
    ),
    GpuFault(
        "recovery-action",
        "error",
        "its driver requests an action before new work",
        "carry out the action that `gpukiln-gpu show` names",
        f"{NVML_H}: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        _recovery_action,
    ),
    GpuFault(
        "remap-failed",
        "error",
        "rows of its memory could not be remapped",
        "take it out of service and have it replaced",
        f"{MEMORY_GUIDE}: RMA Policy Thresholds for Row-Remapping",
        _if_set("remap_failed", "a remapping of memory rows failed"),
    ),
    GpuFault(
        # The volatile counter: a reset clears it, so a repaired GPU becomes healthy again. The lifetime
        # counter is no fault.
        "ecc-uncorrected",
        "error",
        "its memory had errors that could not be corrected",
        "drain it, reset it (`gpukiln-gpu reset`), and check it again: `gpukiln-gpu health`",
        "DCGM, modules/health: any volatile double-bit error fails the memory watch",
        _ecc_uncorrected,
    ),
    GpuFault(
        # A warning, not an error: NVIDIA's flow keeps the GPU in service until a reset is convenient.
        "remap-pending",
        "warning",
        "rows of its memory are remapped at the next reset; running and new work are not affected",
        "reset it when no work runs on it: `gpukiln-gpu reset`",
        f"{MEMORY_GUIDE}: Error Recovery and Response Flags",
        _if_set("remap_pending", "a remapping of memory rows is pending"),
    ),
    GpuFault(
        "pages-pending",
        "warning",
        "pages of its memory are retired at the next reset; running work is not affected",
        "reset it when no work runs on it: `gpukiln-gpu reset`",
        "NVIDIA, Dynamic Page Retirement",
        _if_set("pages_pending", "memory pages wait to be retired"),
    ),
    GpuFault(
        "ecc-pending",
        "warning",
        "the next reset changes its ECC mode",
        "reset it when no work runs on it: `gpukiln-gpu reset`, or set the mode back with `nvidia-smi -e`",
        f"{NVML_H}: nvmlDeviceGetEccMode",
        _pending("ecc_enabled", "ecc_pending", "ECC"),
    ),
    GpuFault(
        "mig-pending",
        "warning",
        "the next reset changes its MIG mode",
        "reset it when no work runs on it: `gpukiln-gpu reset`, or set the mode back with `nvidia-smi -mig`",
        f"{NVML_H}: nvmlDeviceGetMigMode",
        _pending("mig_enabled", "mig_pending", "MIG"),
    ),
    GpuFault(
        "thermal-slowdown",
        "warning",
        "heat slows it down",
        "check fans, air flow and inlet temperature; until then a lower power limit helps",
        f"{NVML_H}: nvmlClocksEventReason*ThermalSlowdown",
        _slowed_by(*THERMAL_EVENTS),
    ),
    GpuFault(
        "hardware-slowdown",
        "warning",
        "its hardware slows it down: power supply, power brake, or heat",
        "check power cables and supplies, then cooling: `nvidia-smi -q -d PERFORMANCE,POWER`",
        f"{NVML_H}: nvmlClocksEventReasonHwSlowdown, HwPowerBrakeSlowdown",
        _slowed_by(*HARDWARE_EVENTS),
    ),
    GpuFault(
        "temperature-margin",
        "warning",
        "it has reached the temperature at which it slows down",
        "check fans, air flow and inlet temperature: `nvidia-smi -q -d CLOCK,TEMPERATURE`",
        f"{NVML_H}: NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, nvmlDeviceGetTemperatureThreshold",
        _too_hot,
    ),
    GpuFault(
        "no-clock",
        "warning",
        "it reports no clock: its firmware started only in part",
        "reset it when no work runs on it: `gpukiln-gpu reset`",
        f"{NVML_H}: nvmlDeviceGetMaxClockInfo",
        _no_clock,
    ),
    GpuFault(
        # An error: on an NVSwitch machine cuInit fails with 802 (system not yet initialized) until the fabric
        # manager has trained the links.
        "fabric-not-joined",
        "error",
        "it has not joined the NVLink fabric: CUDA does not start on it",
        "check `systemctl status nvidia-fabricmanager`: it must have the driver's exact version",
        f"{NVML_H}: nvmlGpuFabricInfo_t",
        _fabric,
    ),
    GpuFault(
        # An info: without persistence mode everything works, only the first program waits for the GPU's
        # start.
        "persistence-off",
        "info",
        "persistence mode is off: the driver unloads the GPU's state whenever no program uses it",
        "enable nvidia-persistenced with `--persistence-mode`: Ubuntu's unit starts it with persistence off",
        "NVIDIA, Driver Persistence",
        _persistence_off,
    ),
    # These need several devices or samples, so they have no condition: `lanes_missing`, gpukiln.gpus.nvlinks.
    GpuFault(
        "pcie-narrow",
        "warning",
        "its PCIe link is narrower or slower than it could be",
        "reseat the card; `lspci -vv` shows LnkCap and LnkSta of every bridge above it",
        f"{NVML_H}: nvmlDeviceGetCurrPcieLinkWidth",
    ),
    GpuFault(
        "nvlink-down",
        "error",
        "it has fewer active NVLinks than the GPUs that it is linked to",
        "run `nvidia-smi nvlink -s`; reset the GPUs, reseat the bridge, look for Xid 74 in the kernel's log",
        "NVIDIA Fabric Manager user guide, NVLink errors",
    ),
)
# Rows of the table by id: rules and alerts name faults by their id.
FAULTS: Mapping[str, GpuFault] = {fault.id: fault for fault in DEVICE_FAULTS}

# Messages of the driver without an Xid, in the formats of its sources and of public logs.
LOG_FAULTS: Mapping[str, LogFault] = {
    "off-the-bus": LogFault(
        "error",
        "the GPU no longer answers on PCIe",
        "restart the machine; replace the GPU if it happens again",
        "NVIDIA/NVSentinel#155",
        xids.OFF_THE_BUS,
    ),
    "unsupported": LogFault(
        "error",
        "this driver does not support the GPU",
        "install the branch and kind of module that the line names: the role nvidia_driver",
        "NVIDIA/open-gpu-kernel-modules: kernel-open/nvidia/nv-pci.c",
        xids.UNSUPPORTED,
    ),
    "init-failed": LogFault(
        "error",
        "the driver could not start the GPU",
        "reset the GPU (`nvidia-smi --gpu-reset`); if that fails, power the machine off and on",
        "NVIDIA/cuda-samples#104",
        xids.INIT_FAILED,
        reset=True,
    ),
    "reset-required": LogFault(
        "error",
        "the driver refuses new work on a GPU until it is reset",
        "reset the GPU (`nvidia-smi --gpu-reset`); `gpukiln-gpu list` names it",
        "NVIDIA/open-gpu-kernel-modules#446",
        xids.RESET_REQUIRED,
        reset=True,
    ),
    "gsp-heartbeat": LogFault(
        "warning",
        "the GPU's firmware did not answer in time",
        "look for Xid 119 or 120; reset the GPU when no work runs on it",
        "ublue-os/bazzite#4449",
        xids.HEARTBEAT,
        reset=True,
    ),
}


def device_faults(value: FieldReader, object: str, ids: Iterable[str] | None = None) -> list[Finding]:
    """The faults of a device.

    Args:
        object: The device, as `Finding` has it.
        ids: Only these.
    """
    chosen = DEVICE_FAULTS if ids is None else [FAULTS[id] for id in ids]
    messages = ((fault, fault.condition(value)) for fault in chosen)
    return [fault.finding(object, message) for fault, message in messages if message is not None]
