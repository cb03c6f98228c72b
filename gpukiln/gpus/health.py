"""The health of one GPU from the fields of its device, for leases, lists and watches."""

from __future__ import annotations

import dataclasses
from functools import partial

from gpukiln.findings import SEVERITIES
from gpukiln.gpus.faults import FAULTS, device_faults
from gpukiln.gpus.model import Device
from gpukiln.probe.nvml import HUNG, SLOW

# The reason why a row has an error -> the fault; every other reason is the fault `lost`.
UNREADABLE = {HUNG: "hung", SLOW: "slow"}


def with_health(device: Device) -> Device:
    """The device with its health and its findings, the most severe first; `watch` reports those of info."""
    if device.kind == "mig":
        # A MIG device has no sensors or counters of its own: its GPU has the findings.
        return dataclasses.replace(device, health="ok")
    if device.error:
        fault = FAULTS[UNREADABLE.get(device.unavailable.get("name", ""), "lost")]
        state = fault.id if fault.severity == "error" else "unknown"
        finding = fault.finding(device.title, device.error)
        return dataclasses.replace(device, health=state, findings=(finding,))
    findings = device_faults(partial(getattr, device), device.title)
    findings = [finding for finding in findings if finding.severity != "info"]
    # The state of the GPU is that of its worst finding.
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    state = {"error": "sick", "warning": "warning"}[findings[0].severity] if findings else "ok"
    return dataclasses.replace(device, health=state, findings=tuple(findings))
