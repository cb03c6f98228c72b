"""NVIDIA's Xid errors: what a number in the kernel's log means, and what to do."""

from functools import cache
from typing import Any

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict

HARMLESS = ("app", "secondary", "info")


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
    """

    mnemonic: str
    meaning: str
    now: str | None
    then: str | None
    kind: str
    plugin_ignores: bool = False

    @property
    def blames_hardware(self) -> bool:
        """Whether the GPU, its board or its driver is to blame, and not what ran on it."""
        return self.kind not in HARMLESS


@cache
def xids() -> dict[int, Xid]:
    """Every number of the catalogue."""
    return load(dict[int, Xid], data("xid")["xid"], where="xid.yaml")


def explain(value: int) -> str:
    """What a number of the catalogue means and what to do, in one line for people."""
    known = xids()[value]
    words = data("xid")["actions"]
    action = words.get(known.now, known.now) if known.now else "NVIDIA's catalogue names no action"
    return f"Xid {value} {known.mnemonic}: {known.meaning}; {action}"


def judged() -> dict[int, dict[str, Any]]:
    """Every number as those judge by it who read a kernel's log (`gpukiln.gpus.faults`).

    Returns:
        {number: {kind, blames_hardware, text}}; text is what `explain` says.
    """
    return {
        number: {"kind": row.kind, "blames_hardware": row.blames_hardware, "text": explain(number)}
        for number, row in xids().items()
    }
