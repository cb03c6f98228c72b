"""GPU faults in the kernel's log: Xids of GPUs, SXids of NVSwitches, and faults without a number.

An event is one fault of one device, with the number of its messages. Meaning and remedy are in the table of
faults (`gpukiln.gpus.faults`), those of Xids in NVIDIA's catalogue (gpukiln/catalog/data/xid.yaml).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.findings import Finding, Severity
from gpukiln.gpus.faults import LOG_FAULTS
from gpukiln.probe.xids import XID, join_messages

OFF_THE_BUS, RECOVERY_ACTION = 79, 154  # Xids
# An SXid is followed by lines of the same number with details (NVIDIA Fabric Manager user guide, SXid
# errors): `28006, Severity 0 Engine instance 46 ...` and `28006, Data {0x00140004, ...}`.
SXID_DETAIL = re.compile(r",\s*(Severity \d|Data \{)")
# The driver marks each SXid as fatal or not, and each Xid of NVLink 5 (144 to 150, `145, RLW_REMAP
# Nonfatal XC0 i0 Link 02`): NVIDIA/NVSentinel, tests of its syslog health monitor.
FATAL_WORD = re.compile(r"\b(?P<non>Non-?)?fatal\b", re.IGNORECASE)
# `154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)`: the action is done.
ACTION_DONE = re.compile(r"\bto 0x0 \(None\)")
# `gpukiln-gpu reset` writes this to the kernel's log, for drivers before branch 570 do not log Xid 154.
RESET_NOTE = "gpukiln: GPU {address} was reset"
RESET = re.compile(r"gpukiln: GPU (?P<device>[0-9a-f:.]+) was reset")
# `gpukiln.probe.xids.folded` appends the count to a repeated line.
REPEATED = re.compile(r" \((\d+) times\)$")
XidTable = Mapping[int, Mapping[str, Any]]
"""{number: {kind, blames_hardware, severity, reset, text, remedy}}: `gpukiln.catalog.xid.xid_rules`."""


@dataclass(frozen=True)
class KernelEvent:
    """A fault of one device in the kernel's log.

    Args:
        device: PCI address without its function; empty where the line names none.
        kind: Xid, SXid, or the id of a fault in `faults.LOG_FAULTS`.
        number: Of an Xid or SXid; 0 for other faults.
        fatal: Whether the line calls it fatal; None where the line does not say.
        line: Its last line.
        count: How many times it was logged.
    """

    device: str
    kind: str
    number: int
    fatal: bool | None
    line: str
    count: int = 1

    @property
    def is_switch(self) -> bool:
        """Whether the device is an NVSwitch."""
        return self.kind == "SXid"

    def is_known(self, table: XidTable) -> bool:
        """Whether its meaning is known: of an SXid from its line, of an Xid from NVIDIA's catalogue."""
        if self.kind == "Xid":
            return self.number in table
        return self.fatal is not None if self.is_switch else True

    def severity(self, table: XidTable) -> Severity:
        """error: the device should get no work; warning; or info."""
        if self.is_switch:
            return "error" if self.fatal else "info"
        if self.kind != "Xid":
            return LOG_FAULTS[self.kind].severity
        if self.fatal is False:
            return "info"
        severity: Severity = table[self.number]["severity"] if self.number in table else "warning"
        return severity

    def blames_hardware(self, table: XidTable) -> bool:
        """Whether the machine caused it, and not the program that ran on it."""
        if self.kind == "Xid":
            return self.is_known(table) and table[self.number]["blames_hardware"] and self.fatal is not False
        return bool(self.fatal) if self.is_switch else True

    def ends_with_reset(self, table: XidTable) -> bool:
        """Whether a reset of the GPU clears it."""
        if self.kind == "Xid":
            return self.number == RECOVERY_ACTION or bool(
                self.is_known(table) and table[self.number]["reset"]
            )
        return not self.is_switch and LOG_FAULTS[self.kind].reset

    def finding(self, table: XidTable) -> Finding:
        """The event as a finding: its line with the meaning, and the remedy."""
        id, means, remedy, source = self.kind, "", "", "NVIDIA Fabric Manager user guide, SXid errors"
        if self.kind == "Xid" and self.number in table:
            row = table[self.number]
            means, remedy, source = row["text"], row["remedy"], "NVIDIA, XID Errors"
        elif self.kind == "Xid":
            means, source = f"Xid {self.number}: not in this version's table", ""
            remedy = "look it up in NVIDIA's Xid catalogue"
        elif self.is_switch:
            remedy = "look the number up in NVIDIA's Fabric Manager user guide" if self.fatal else ""
        else:
            fault = LOG_FAULTS[self.kind]
            means, remedy, source = fault.text, fault.remedy, fault.source
        return Finding(
            id=f"{id.lower()}-{self.number}" if self.number else id,
            severity=self.severity(table),
            message=f"{self.line} = {means}" if means else self.line,
            object=self.device,
            evidence={
                "kind": self.kind,
                "number": self.number,
                "count": self.count,
                "blames_hardware": self.blames_hardware(table),
            },
            remedy=remedy,
            source=source,
        )

    def explain(self, table: XidTable) -> str:
        """The line with its meaning and its remedy."""
        finding = self.finding(table)
        return f"{finding.message}; {finding.remedy}" if finding.remedy else finding.message


def events(lines: Iterable[str], table: XidTable) -> list[KernelEvent]:
    """The events in the lines of a kernel's log, one for each device and fault.

    >>> [event] = events(["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."] * 2, {})
    >>> event.device, event.kind, event.number, event.count
    ('0000:3b:00', 'Xid', 79, 2)
    >>> events(["usb 1-1: new high-speed USB device"], {})
    []

    Args:
        lines: Lines of the log in their order, or the output of `gpukiln.probe.xids.fold_faults`.
    """
    latest: dict[tuple[str, str, int], KernelEvent] = {}
    for line in (line.strip() for line in join_messages(lines)):
        # A reset clears faults: the log's older messages no longer describe the GPU.
        if done := RESET.search(line):
            _forget_reset(latest, _address(done["device"]), table)
            continue
        event = _event(line)
        if event is None:
            continue
        if (event.kind, event.number) == ("Xid", RECOVERY_ACTION) and ACTION_DONE.search(line):
            _forget_reset(latest, event.device, table)
            continue
        key = (event.device, event.kind, event.number)
        before, times = latest.get(key), REPEATED.search(line)
        count = int(times[1]) if times else 1
        if before is not None:
            count += before.count
            if _says_more(before, event):
                event = before
        latest[key] = dataclasses.replace(event, count=count)
    return list(latest.values())


def _says_more(earlier: KernelEvent, later: KernelEvent) -> bool:
    """Whether an earlier line of the same fault is kept: the fatal one, and one with an Xid number."""
    return bool(earlier.fatal and not later.fatal) or (
        XID.search(earlier.line) is not None and XID.search(later.line) is None
    )


def _event(line: str) -> KernelEvent | None:
    if match := XID.search(line):
        if match["switch"] and SXID_DETAIL.match(match["text"]):
            return None
        word = FATAL_WORD.search(match["text"])
        kind, fatal = "SXid" if match["switch"] else "Xid", not word["non"] if word else None
        return KernelEvent(_address(match["device"]), kind, int(match["number"]), fatal, line)
    for id, fault in LOG_FAULTS.items():
        if logged := fault.pattern.search(line):
            device = _address(logged.groupdict().get("device") or "")
            if id == "off-the-bus":  # the driver logs the message with or without Xid 79
                return KernelEvent(device, "Xid", OFF_THE_BUS, None, line)
            return KernelEvent(device, id, 0, None, line)
    return None


def _forget_reset(latest: dict[tuple[str, str, int], KernelEvent], device: str, table: XidTable) -> None:
    """Remove the events that a device's reset has cleared, and those without a device."""
    for key, event in list(latest.items()):
        if event.device in (device, "") and event.ends_with_reset(table):
            del latest[key]


def _address(text: str) -> str:
    """A PCI address without its function.

    >>> _address("0000:3B:00.0"), _address("0000:3b:00")
    ('0000:3b:00', '0000:3b:00')
    """
    return text.lower().partition(".")[0]
