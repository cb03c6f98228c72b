"""NVIDIA's Xid errors: what a number in the kernel's log means, and what to do."""

from functools import cache
from typing import Any

from gpukiln.catalog.load import data
from gpukiln.findings import Severity
from gpukiln.typed import load, strict

# Kinds whose cause is the application, or another error that has a number of its own.
HARMLESS = ("app", "secondary", "info")
# What NVIDIA's immediate action says of a GPU. Those that let it go on are an info where the application is
# to blame, or nothing is to be done.
CONTINUE_ACTIONS = (
    "IGNORE",
    "CHECK_APP",
    "XID_137_FLOW",
    "WORKFLOW_XID_13",
    "WORKFLOW_XID_31",
    "WORKFLOW_XID_45",
)
INVESTIGATE_ACTIONS = ("UPDATE_SWFW", "CHECK_UVM", None)
RESET_ACTIONS = ("RESET_GPU", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR")


@strict
class Xid:
    """One number.

    Args:
        mnemonic: Its name in the driver's sources.
        meaning: In words.
        now: NVIDIA's immediate action, a key of the actions; None where its catalogue has none.
        then: The action if it comes again.
        kind: app, secondary, info, reset, memory, hardware, nvlink, software, reboot, action.
        plugin_ignores: Whether NVIDIA's Kubernetes device plugin keeps the GPU in use after it.
        level: Of a number for which the catalogue has no action: error, where its name alone says that the
            GPU can't go on.
    """

    mnemonic: str
    meaning: str
    now: str | None
    then: str | None
    kind: str
    plugin_ignores: bool = False
    level: Severity | None = None

    @property
    def severity(self) -> Severity:
        """What the number's own action says: error, the GPU should get no new work; warning, or info."""
        # NVIDIA's catalogue has no action for these numbers; their name alone says that the GPU can't go on.
        if self.level:
            return self.level
        if self.now in CONTINUE_ACTIONS or self.kind == "info":
            return "info"
        # To restart the program is enough for the job, but says nothing of a board that caused the error.
        if self.now == "RESTART_APP":
            return "warning" if self.blames_hardware else "info"
        return "warning" if self.now in INVESTIGATE_ACTIONS else "error"

    @property
    def reset(self) -> bool:
        """Whether a reset of the GPU is what NVIDIA asks for."""
        return self.now in RESET_ACTIONS

    @property
    def blames_hardware(self) -> bool:
        """Whether the GPU, its board or its driver is to blame, and not what ran on it."""
        return self.kind not in HARMLESS


@cache
def xids() -> dict[int, Xid]:
    """Every number of the catalogue."""
    return load(dict[int, Xid], data("xid")["xid"], where="xid.yaml")


def explain(value: int) -> str:
    """What a number of the catalogue means and what to do, in one line for people.

    >>> explain(79)
    'Xid 79 GPU_HAS_FALLEN_OFF_THE_BUS: device no longer answers on PCIe; restart the machine'
    >>> xids()[79].severity
    'error'
    """
    return f"{_meaning(value)}; {_action(value)}"


def _meaning(value: int) -> str:
    return f"Xid {value} {xids()[value].mnemonic}: {xids()[value].meaning}"


def _action(value: int) -> str:
    now = xids()[value].now
    return str(data("xid")["actions"].get(now, now)) if now else "NVIDIA's catalogue names no action"


def xid_rules() -> dict[int, dict[str, Any]]:
    """Every number in the form that evaluates a kernel's log (`gpukiln.gpus.faults`).

    Returns:
        {number: {kind, blames_hardware, severity, reset, text, remedy}}.
    """
    return {
        number: {
            "kind": row.kind,
            "blames_hardware": row.blames_hardware,
            "severity": row.severity,
            "reset": row.reset,
            "text": _meaning(number),
            "remedy": _action(number),
        }
        for number, row in xids().items()
    }
