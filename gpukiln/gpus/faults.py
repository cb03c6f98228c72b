"""The table of GPU faults: what speaks against a GPU, how much, what to do, and who says so.

Everything that examines a GPU reads it: the suite (`rules`), `list` and leases (`health`), node health,
`watch` (`insights`), and the alerts of the monitoring add-on. A fault on a device is a condition on the
device's fields, the same function for a snapshot and for the facts of the suite; a fault of the kernel's log
is a pattern. Xids are not here: gpukiln/catalog/data/xid.yaml has a row for each, made of NVIDIA's catalogue.

Severities of a GPU's faults: error, the GPU should get no new work, its state is sick; warning, it works and
somebody should look; info, worth knowing and no fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.findings import Finding, Severity
from gpukiln.probe import xids

FieldReader = Callable[[str], Any]
"""Returns a field of a device by its name in `gpukiln.gpus.model.Device`, None where it is not known."""

MEMORY_GUIDE = "docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
NVML_H = "nvml.h"


@dataclass(frozen=True)
class GpuFault:
    """One fault of a GPU.

    Args:
        id: Names it everywhere.
        text: What it means.
        remedy: The next step, established by this fault alone.
        condition: Given a device's fields, what was found; None where the device has not got it. A fault
            without is found elsewhere, as the comment says.
    """

    id: str
    severity: Severity
    text: str
    remedy: str
    source: str
    condition: Callable[[FieldReader], str | None] = lambda _: None

    def finding(self, object: str, message: str) -> Finding:
        """This fault of one device.

        Args:
            object: The device, as `Finding` has it.
            message: What was found.
        """
        return Finding(self.id, self.severity, message, object, remedy=self.remedy, source=self.source)


@dataclass(frozen=True)
class LogFault:
    """A fault of the kernel's log that has no number.

    Args:
        pattern: With a group `device` where the line names it.
        reset: Whether a reset of the GPU ends it.
    """

    severity: Severity
    text: str
    remedy: str
    source: str
    pattern: re.Pattern[str]
    reset: bool = False


# What the driver asks for (nvml.h, nvmlDeviceGpuRecoveryAction_t), and how it is done.
ACTIONS: Mapping[str, str] = {
    "gpu reset": "end the work on it, then `gpukiln-gpu reset`",
    "drain and reset": "end the work on it, then `gpukiln-gpu reset`; GPUs that reach its memory too",
    "node reboot": "drain the node and reboot it: systemctl reboot",
    "system reboot": "drain the node and reboot it: systemctl reboot",
    "drain P2P": "end the work on it and on the GPUs that reach its memory; no new one until it says none",
    "recover IMEX domain": "restart nvidia-imex on every node of its domain",
    "bus reset": "drain the node and reboot it, with the power off in between",
}


def _recovery_action(value: FieldReader) -> str | None:
    action = value("recovery_action")
    if action in (None, "none"):
        return None
    how = ACTIONS.get(action)
    return f"the driver asks for: {action}" + (f" ({how})" if how else "")


def _if_set(name: str, text: str) -> Callable[[FieldReader], str | None]:
    return lambda value: text if value(name) else None


def _ecc_uncorrected(value: FieldReader) -> str | None:
    errors = value("ecc_uncorrected")
    return f"{errors} uncorrected ECC errors since the last reset" if errors else None


def _pending(now: str, later: str, mode: str) -> Callable[[FieldReader], str | None]:
    """A mode that will be another one after a reset."""

    def evidence(value: FieldReader) -> str | None:
        current, pending = value(now), value(later)
        if current is None or pending is None or current == pending:
            return None
        return f"{mode} is {onoff(current)}, and {onoff(pending)} after a reset"

    return evidence


def onoff(value: bool | None) -> str:
    """A mode, for people."""
    return "unsupported" if value is None else "on" if value else "off"


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
    """By how many degrees a GPU is cooler than where it slows down, and by which numbers; None: not known.

    T.Limit, where a GPU has it: the margin at which it slows down is negative (NVIDIA/NVSentinel#1371: -2 on
    H100), and below it is too hot. Else the absolute threshold, at which it is too hot.
    """
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
    """That a PCIe link has fewer lanes than the GPU has; None where it has them all, or nobody says."""
    if width is None or widest is None or width >= widest:
        return None
    return f"a PCIe link of {width} lanes, wanted {widest}"


DEVICE_FAULTS: tuple[GpuFault, ...] = (
    # Of a GPU that can't be read at all: gpukiln.gpus.health.
    GpuFault(
        "lost",
        "error",
        "NVML can't read it",
        "`dmesg` says why (Xid 79, RmInitAdapter); `gpukiln-gpu health` names the fault and what it asks for",
        "nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_GPU_NOT_FOUND",
    ),
    GpuFault(
        "hung",
        "error",
        "whoever asks it waits in the kernel, and makes no progress",
        "`dmesg` says what the driver waits for; end what can be ended, and do what the fault there asks for",
        "proc_pid_stat(5): state D",
    ),
    GpuFault(
        "slow",
        "warning",
        "it has not answered yet, and the driver is still at work",
        "look again in some minutes; persistence mode spares each program the GPU's start",
        "Azure/AgentBaker#2829: 25 s and more without persistence mode",
    ),
    GpuFault(
        "recovery-action",
        "error",
        "its driver asks for an action before new work",
        "do what it asks for: `gpukiln-gpu show` names the action",
        f"{NVML_H}: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        _recovery_action,
    ),
    GpuFault(
        "remap-failed",
        "error",
        "rows of its memory could not be remapped",
        "take it out of work, and have it replaced",
        f"{MEMORY_GUIDE}: RMA Policy Thresholds for Row-Remapping",
        _if_set("remap_failed", "a remapping of memory rows failed"),
    ),
    GpuFault(
        "ecc-uncorrected",
        "error",
        "its memory had errors that could not be corrected",
        "drain it, reset it (`gpukiln-gpu reset`), and look at it again: `gpukiln-gpu health`",
        "DCGM, modules/health: any volatile double-bit error fails the memory watch",
        _ecc_uncorrected,
    ),
    GpuFault(
        "remap-pending",
        "warning",
        "rows of its memory are remapped at the next reset; work goes on, and new work may start",
        "reset it when it is free: `gpukiln-gpu reset`",
        f"{MEMORY_GUIDE}: Error Recovery and Response Flags",
        _if_set("remap_pending", "a remapping of memory rows is pending"),
    ),
    GpuFault(
        "pages-pending",
        "warning",
        "pages of its memory are retired at the next reset; work goes on",
        "reset it when it is free: `gpukiln-gpu reset`",
        "NVIDIA, Dynamic Page Retirement",
        _if_set("pages_pending", "memory pages wait to be retired"),
    ),
    GpuFault(
        "ecc-pending",
        "warning",
        "another ECC mode holds after the next reset",
        "reset it when it is free: `gpukiln-gpu reset`, or set the mode back with `nvidia-smi -e`",
        f"{NVML_H}: nvmlDeviceGetEccMode",
        _pending("ecc_enabled", "ecc_pending", "ECC"),
    ),
    GpuFault(
        "mig-pending",
        "warning",
        "another MIG mode holds after the next reset",
        "reset it when it is free: `gpukiln-gpu reset`, or set the mode back with `nvidia-smi -mig`",
        f"{NVML_H}: nvmlDeviceGetMigMode",
        _pending("mig_enabled", "mig_pending", "MIG"),
    ),
    GpuFault(
        "thermal-slowdown",
        "warning",
        "it is slowed down by heat",
        "look at fans, air flow and inlet temperature; until then a lower power limit helps",
        f"{NVML_H}: nvmlClocksEventReason*ThermalSlowdown",
        _slowed_by(*THERMAL_EVENTS),
    ),
    GpuFault(
        "hardware-slowdown",
        "warning",
        "its hardware slows it down: power supply, power brake, or heat",
        "look at power cables and supplies, then at cooling: `nvidia-smi -q -d PERFORMANCE,POWER`",
        f"{NVML_H}: nvmlClocksEventReasonHwSlowdown, HwPowerBrakeSlowdown",
        _slowed_by(*HARDWARE_EVENTS),
    ),
    GpuFault(
        "temperature-margin",
        "warning",
        "it is as hot as where it slows down",
        "look at fans, air flow and inlet temperature: `nvidia-smi -q -d CLOCK,TEMPERATURE`",
        f"{NVML_H}: NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, nvmlDeviceGetTemperatureThreshold",
        _too_hot,
    ),
    GpuFault(
        "no-clock",
        "warning",
        "it reports no clock: its firmware came up in part",
        "reset it when it is free: `gpukiln-gpu reset`",
        f"{NVML_H}: nvmlDeviceGetMaxClockInfo",
        _no_clock,
    ),
    GpuFault(
        "fabric-not-joined",
        "error",
        "it has not joined the NVLink fabric: CUDA does not start on it",
        "`systemctl status nvidia-fabricmanager`: it must have the driver's exact version",
        f"{NVML_H}: nvmlGpuFabricInfo_t",
        _fabric,
    ),
    GpuFault(
        "persistence-off",
        "info",
        "persistence mode is off: the driver lets go of it whenever nobody uses it",
        "enable nvidia-persistenced with `--persistence-mode`: Ubuntu's unit starts it with persistence off",
        "NVIDIA, Driver Persistence",
        _persistence_off,
    ),
    # These take more than one device or look: `lanes_missing`, gpukiln.gpus.nvlinks.
    GpuFault(
        "pcie-narrow",
        "warning",
        "its PCIe link is narrower or slower than it could be",
        "seat the card again; `lspci -vv` shows LnkCap and LnkSta of every bridge on the way",
        f"{NVML_H}: nvmlDeviceGetCurrPcieLinkWidth",
    ),
    GpuFault(
        "nvlink-down",
        "error",
        "it has fewer active NVLinks than the GPUs that it is linked with",
        "`nvidia-smi nvlink -s`; reset the GPUs, seat the bridge again, look for Xid 74 in the kernel's log",
        "NVIDIA Fabric Manager user guide, NVLink errors",
    ),
)
FAULTS: Mapping[str, GpuFault] = {fault.id: fault for fault in DEVICE_FAULTS}

# What the driver logs without an Xid. Formats as the driver's sources and public logs have them.
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
        "this driver does not drive the GPU",
        "install the branch and kind of module that the line asks for: the role nvidia_driver",
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
        "look for Xid 119 or 120; reset the GPU when it is free",
        "ublue-os/bazzite#4449",
        xids.HEARTBEAT,
        reset=True,
    ),
}


def device_faults(value: FieldReader, object: str, ids: Iterable[str] | None = None) -> list[Finding]:
    """The faults that a device has.

    Args:
        object: The device, as `Finding` has it.
        ids: Only these.
    """
    chosen = DEVICE_FAULTS if ids is None else [FAULTS[id] for id in ids]
    messages = ((fault, fault.condition(value)) for fault in chosen)
    return [fault.finding(object, message) for fault, message in messages if message is not None]
