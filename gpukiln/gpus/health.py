"""The health of one GPU, from what its driver says of it; who leases, lists and watches asks here."""

from __future__ import annotations

import dataclasses

from gpukiln.gpus.model import Device, Finding

SICK, WARNING = "sick", "warning"
LOST_CODES = ("GPU_IS_LOST", "GPU_NOT_FOUND")
REBOOT = ("node reboot", "system reboot")


def judged(device: Device) -> Device:
    """The device with its health and findings."""
    if device.kind == "mig":
        return dataclasses.replace(device, health="ok")
    if device.error:
        hung = "HUNG" in device.unavailable.get("name", "")
        word = "hung" if hung else "lost"
        finding = Finding(word, SICK, device.error)
        return dataclasses.replace(device, health=word, findings=(finding,))
    found = tuple(findings(device))
    word = SICK if any(one.level == SICK for one in found) else WARNING if found else "ok"
    return dataclasses.replace(device, health=word, findings=found)


def findings(device: Device) -> list[Finding]:
    """What speaks against a GPU that answers."""
    found = []

    def add(id: str, level: str, text: str) -> None:
        found.append(Finding(id, level, text))

    if device.recovery_action not in (None, "none"):
        add("recovery-action", SICK, f"the driver asks for: {device.recovery_action}")
    if device.remap_failed:
        add("remap-failed", SICK, "rows of its memory could not be remapped: replace the GPU")
    if device.ecc_uncorrected:
        add(
            "ecc-uncorrected",
            SICK,
            f"{device.ecc_uncorrected} uncorrected memory errors since the last reset",
        )
    if device.remap_pending:
        add("remap-pending", WARNING, "rows of its memory wait to be remapped by a reset")
    if device.pages_pending:
        add("pages-pending", WARNING, "pages of its memory wait to be retired by a reset")
    for event in device.clock_events or ():
        if "thermal" in event:
            add("thermal-slowdown", WARNING, f"{event}: {device.temperature_c} degrees Celsius")
        elif event in ("hardware slowdown", "hardware power brake"):
            add("hardware-slowdown", WARNING, f"{event}: power or heat")
    if (
        device.mig_pending is not None
        and device.mig_enabled is not None
        and device.mig_pending != device.mig_enabled
    ):
        add("mig-pending", WARNING, f"MIG is to be {'on' if device.mig_pending else 'off'} after a reset")
    return found
