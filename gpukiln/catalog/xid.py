"""NVIDIA's Xid errors: what a number in the kernel's log means, and what to do."""

import re
from functools import cache

from gpukiln.catalog.load import data, record, validate

LINE = re.compile(r"NVRM: Xid \((?:PCI:)?[0-9A-Fa-f:.]+\): (?P<xid>\d+)")
OFF_THE_BUS = 79
HARMLESS = ("app", "secondary", "info")


@record
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
    return validate(dict[int, Xid], data("xid")["xid"], where="xid")


def number(line: str) -> int | None:
    """The number in a line of the kernel's log.

    Args:
        line: A line with `NVRM: Xid`, or one that says a GPU has fallen off the bus: the driver does not
            always give that one its number, 79.

    Returns:
        The number; None for a line without one, such as an NVSwitch's SXid.
    """
    found = LINE.search(line)
    if found:
        return int(found["xid"])
    return OFF_THE_BUS if "fallen off the bus" in line else None


def explain(value: int) -> str:
    """Say what a number means and what to do.

    Args:
        value: The number.

    Returns:
        One line for people.
    """
    known = xids().get(value)
    if known is None:
        return f"Xid {value}: not in this version's table, look it up in NVIDIA's Xid catalogue"
    words = data("xid")["actions"]
    action = words.get(known.now, known.now) if known.now else "NVIDIA's catalogue names no action"
    return f"Xid {value} {known.mnemonic}: {known.meaning}; {action}"
