"""What a kernel's log says of GPU faults: Xids of GPUs, SXids of NVSwitches, and faults without a number.

An event is a device and what happened to it, however often. What each means and asks for is in the table of
faults (`gpukiln.gpus.faults`), of Xids in NVIDIA's catalogue (gpukiln/catalog/data/xid.yaml).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.findings import Finding, Severity
from gpukiln.gpus.faults import LOG_FAULTS
from gpukiln.probe.xids import XID, joined

OFF_THE_BUS, RECOVERY_ACTION = 79, 154
# An SXid is followed by lines of the same number that say more of it (NVIDIA Fabric Manager user guide, SXid
# errors): `28006, Severity 0 Engine instance 46 ...` and `28006, Data {0x00140004, ...}`.
SXID_DETAIL = re.compile(r",\s*(Severity \d|Data \{)")
# NVSwitch says of each SXid whether it is fatal, NVLink 5 of each of its Xids (144 to 150, `145, RLW_REMAP
# Nonfatal XC0 i0 Link 02`): NVIDIA/NVSentinel, tests of its syslog health monitor.
FATAL_WORD = re.compile(r"\b(?P<non>Non-?)?fatal\b", re.IGNORECASE)
# `154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)`: the action was carried out.
ACTION_DONE = re.compile(r"\bto 0x0 \(None\)")
# What `gpukiln-gpu reset` writes to the kernel's log: drivers before branch 570 log no 154.
RESET_NOTE = "gpukiln: GPU {address} was reset"
RESET = re.compile(r"gpukiln: GPU (?P<device>[0-9a-f:.]+) was reset")
REPEATED = re.compile(r" \((\d+) times\)$")
XidTable = Mapping[int, Mapping[str, Any]]
"""{number: {kind, blames_hardware, severity, reset, text, remedy}}: `gpukiln.catalog.xid.judged`."""


@dataclass(frozen=True)
class KernelEvent:
    """What the kernel's log says of one device and fault, however often.

    Args:
        device: PCI address without its function; empty where the line names none.
        kind: Xid, SXid, or the id of a fault of `faults.LOG_FAULTS`.
        number: Of an Xid or SXid; 0 for other faults.
        fatal: What the line itself says; None where it says nothing.
        line: The last line of it.
        count: How often it was logged.
    """

    device: str
    kind: str
    number: int
    fatal: bool | None
    line: str
    count: int = 1

    @property
    def is_switch(self) -> bool:
        """Whether it is an NVSwitch's."""
        return self.kind == "SXid"

    def is_known(self, table: XidTable) -> bool:
        """Whether its meaning is known: an SXid's by its own word, an Xid's by NVIDIA's catalogue."""
        if self.kind == "Xid":
            return self.number in table
        return self.fatal is not None if self.is_switch else True

    def severity(self, table: XidTable) -> Severity:
        """error: the device should get no work; warning, or info."""
        if self.is_switch:
            return "error" if self.fatal else "info"
        if self.kind != "Xid":
            return LOG_FAULTS[self.kind].severity
        if self.fatal is False:
            return "info"
        severity: Severity = table[self.number]["severity"] if self.number in table else "warning"
        return severity

    def blames_hardware(self, table: XidTable) -> bool:
        """Whether the machine is to blame, and not what ran on it."""
        if self.kind == "Xid":
            return self.is_known(table) and table[self.number]["blames_hardware"] and self.fatal is not False
        return bool(self.fatal) if self.is_switch else True

    def ends_with_reset(self, table: XidTable) -> bool:
        """Whether a reset of the GPU is what ends it."""
        if self.kind == "Xid":
            return self.number == RECOVERY_ACTION or bool(
                self.is_known(table) and table[self.number]["reset"]
            )
        return not self.is_switch and LOG_FAULTS[self.kind].reset

    def finding(self, table: XidTable) -> Finding:
        """What the rows of the log say: the line with its meaning, and what to do."""
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
        """Its line, with what it means and what to do."""
        finding = self.finding(table)
        return f"{finding.message}; {finding.remedy}" if finding.remedy else finding.message


def events(lines: Iterable[str], table: XidTable) -> list[KernelEvent]:
    """What the lines of a kernel's log say, one event a device and fault.

    What a reset ends is gone once the driver says that no recovery action is left (Xid 154), or
    `gpukiln-gpu reset` notes the reset.

    Args:
        lines: Any lines, in their order; or those that `gpukiln.probe.xids.folded` made of them.
    """
    latest: dict[tuple[str, str, int], KernelEvent] = {}
    for line in (line.strip() for line in joined(lines)):
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
    """Whether a later line of the same fault has less to say: the worst stays, and a line with a number."""
    return bool(earlier.fatal and not later.fatal) or (
        XID.search(earlier.line) is not None and XID.search(later.line) is None
    )


def _event(line: str) -> KernelEvent | None:
    if match := XID.search(line):
        if match["switch"] and SXID_DETAIL.match(match["text"]):
            return None
        said = FATAL_WORD.search(match["text"])
        kind, fatal = "SXid" if match["switch"] else "Xid", not said["non"] if said else None
        return KernelEvent(_address(match["device"]), kind, int(match["number"]), fatal, line)
    for id, fault in LOG_FAULTS.items():
        if logged := fault.pattern.search(line):
            device = _address(logged.groupdict().get("device") or "")
            if id == "off-the-bus":  # which does not always get its number
                return KernelEvent(device, "Xid", OFF_THE_BUS, None, line)
            return KernelEvent(device, id, 0, None, line)
    return None


def _forget_reset(latest: dict[tuple[str, str, int], KernelEvent], device: str, table: XidTable) -> None:
    """Forget what the reset of a device has ended, and what named no device."""
    for key, event in list(latest.items()):
        if event.device in (device, "") and event.ends_with_reset(table):
            del latest[key]


def _address(text: str) -> str:
    """`0000:3b:00`, with and without the function."""
    return text.lower().partition(".")[0]
