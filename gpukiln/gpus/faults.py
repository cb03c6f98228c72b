"""What a kernel's log says of faults, Xids of GPUs and SXids of NVSwitches: an event a device and number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LINE = re.compile(
    r"(?:NVRM: Xid|nvidia-nvswitch\d*: (?P<switch>SXid)) \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): "
    r"(?P<number>\d+)(?P<text>.*)"
)
LOST = re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?(?P<device>[0-9A-Fa-f:.]*[0-9A-Fa-f]).*fallen off the bus")
OFF_THE_BUS, RECOVERY_ACTION = 79, 154
# An SXid is followed by lines of the same number that say more of it (NVIDIA Fabric Manager user guide, SXid
# errors): `28006, Severity 0 Engine instance 46 ...` and `28006, Data {0x00140004, ...}`.
MORE = re.compile(r",\s*(Severity \d|Data \{)")
# NVSwitch says of each SXid whether it is fatal, NVLink 5 of each of its Xids (144 to 150, `145, RLW_REMAP
# Nonfatal XC0 i0 Link 02`): NVIDIA/NVSentinel, tests of its syslog health monitor.
FATAL = re.compile(r"\b(?P<non>Non-?)?fatal\b", re.IGNORECASE)
# `154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)`: what was wanted was done.
CLEARED = re.compile(r"\bto 0x0 \(None\)")
TIMES = re.compile(r" \((\d+) times\)$")
Table = Mapping[int, Mapping[str, Any]]
"""{number: {kind, blames_hardware, text}}, as `gpukiln.catalog.xid.judged` makes it and facts.json has it."""


@dataclass(frozen=True)
class Event:
    """What the kernel's log says of one device and number, however often.

    Args:
        device: PCI address as the line has it.
        switch: Whether it is an NVSwitch's SXid.
        fatal: What the line itself says; None where it says nothing.
        line: The last line of it.
    """

    device: str
    number: int
    switch: bool
    fatal: bool | None
    line: str

    def known(self, table: Table) -> bool:
        """Whether it can be judged: an SXid by its own word, an Xid by NVIDIA's catalogue."""
        return self.fatal is not None if self.switch else self.number in table

    def blames_hardware(self, table: Table) -> bool:
        """Whether the machine is to blame, and not what ran on it."""
        if self.switch:
            return bool(self.fatal)
        return self.known(table) and table[self.number]["blames_hardware"] and self.fatal is not False

    def told(self, table: Table) -> str:
        """Its line, with what it means and what to do."""
        if self.switch:
            return self.line
        unknown = f"Xid {self.number}: not in this version's table, look it up in NVIDIA's Xid catalogue"
        return f"{self.line} = {table[self.number]['text'] if self.number in table else unknown}"


def events(lines: Iterable[str]) -> list[Event]:
    """What the lines of a kernel's log say, one event a device and number.

    Args:
        lines: Any lines, in their order. The driver does not always give a GPU that fell off the bus its
            number, 79. A recovery action (154) that was carried out since is none.
    """
    found: dict[tuple[str, int, bool], Event] = {}
    for line in (line.strip() for line in lines):
        if not (match := LINE.search(line)):
            if lost := LOST.search(line):
                key = (_address(lost["device"]), OFF_THE_BUS, False)
                found.setdefault(key, Event(*key, None, line))
            continue
        key = (_address(match["device"]), int(match["number"]), bool(match["switch"]))
        text = match["text"]
        if match["switch"] and MORE.match(text):
            continue
        said = FATAL.search(text)
        event = Event(*key, not said["non"] if said else None, line)
        if key[1] == RECOVERY_ACTION and CLEARED.search(text):
            found.pop(key, None)
        elif not (key in found and found[key].fatal and not event.fatal):  # the worst of a number stays
            found[key] = event
    return list(found.values())


def _address(text: str) -> str:
    """`0000:3b:00`, with and without the function."""
    return text.lower().partition(".")[0]


def counts(lines: Iterable[str]) -> dict[tuple[str, int, bool], int]:
    """How often each was logged, by device, number, and whether it is an SXid.

    Args:
        lines: As `gpukiln.probe.xids.folded` returns them.
    """
    found: dict[tuple[str, int, bool], int] = {}
    for line in lines:
        match, lost, many = LINE.search(line), LOST.search(line), TIMES.search(line)
        if match and not (match["switch"] and MORE.match(match["text"])):
            key = (_address(match["device"]), int(match["number"]), bool(match["switch"]))
        elif lost and not match:
            key = (_address(lost["device"]), OFF_THE_BUS, False)
        else:
            continue
        found[key] = found.get(key, 0) + (int(many[1]) if many else 1)
    return found
