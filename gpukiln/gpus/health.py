"""The health of one GPU, from what its driver says of it; who leases, lists and watches asks here."""

from __future__ import annotations

import dataclasses

from gpukiln.gpus.faults import FAULTS, NOTE, SICK, found_on
from gpukiln.gpus.model import Device, Finding
from gpukiln.probe.nvml import HUNG, SLOW

UNREADABLE = {HUNG: "hung", SLOW: "slow"}  # by the reason of a row; else it is lost


def judged(device: Device) -> Device:
    """The device with its health and findings."""
    if device.kind == "mig":
        return dataclasses.replace(device, health="ok")
    if device.error:
        fault = FAULTS[UNREADABLE.get(device.unavailable.get("name", ""), "lost")]
        finding = Finding(fault.id, fault.severity, device.error, fault.remedy)
        word = fault.id if fault.severity == SICK else "unknown"
        return dataclasses.replace(device, health=word, findings=(finding,))
    found = tuple(findings(device))
    word = next((one.level for one in found if one.level != NOTE), "ok")
    return dataclasses.replace(device, health=word, findings=found)


def findings(device: Device) -> list[Finding]:
    """The faults that a GPU has which answers, the worst first; notes are left to `watch`."""
    found = found_on(lambda name: getattr(device, name))
    return [
        Finding(fault.id, fault.severity, evidence, fault.remedy)
        for fault, evidence in sorted(found, key=lambda one: one[0].severity != SICK)
        if fault.severity != NOTE
    ]
