"""The health of one GPU, from what its driver says of it; leases, lists and watches ask here."""

from __future__ import annotations

import dataclasses
from functools import partial

from gpukiln.findings import SEVERITIES
from gpukiln.gpus.faults import FAULTS, device_faults
from gpukiln.gpus.model import Device
from gpukiln.probe.nvml import HUNG, SLOW

UNREADABLE = {HUNG: "hung", SLOW: "slow"}  # by the reason of a row; else it is lost


def with_health(device: Device) -> Device:
    """The device with its health and findings, the worst first; infos are left to `watch`."""
    if device.kind == "mig":
        return dataclasses.replace(device, health="ok")
    if device.error:
        fault = FAULTS[UNREADABLE.get(device.unavailable.get("name", ""), "lost")]
        state = fault.id if fault.severity == "error" else "unknown"
        finding = fault.finding(device.title, device.error)
        return dataclasses.replace(device, health=state, findings=(finding,))
    findings = device_faults(partial(getattr, device), device.title)
    findings = [finding for finding in findings if finding.severity != "info"]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    state = {"error": "sick", "warning": "warning"}[findings[0].severity] if findings else "ok"
    return dataclasses.replace(device, health=state, findings=tuple(findings))
