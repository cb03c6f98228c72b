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
from gpukiln.gpus.faults import LOGGED
from gpukiln.probe.xids import XID, join_messages

OFF_THE_BUS, RECOVERY_ACTION = 79, 154
# An SXid is followed by lines of the same number that say more of it (NVIDIA Fabric Manager user guide, SXid
# errors): `28006, Severity 0 Engine instance 46 ...` and `28006, Data {0x00140004, ...}`.
MORE = re.compile(r",\s*(Severity \d|Data \{)")
# NVSwitch says of each SXid whether it is fatal, NVLink 5 of each of its Xids (144 to 150, `145, RLW_REMAP
# Nonfatal XC0 i0 Link 02`): NVIDIA/NVSentinel, tests of its syslog health monitor.
FATAL = re.compile(r"\b(?P<non>Non-?)?fatal\b", re.IGNORECASE)
# `154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)`: the action was carried out.
DONE = re.compile(r"\bto 0x0 \(None\)")
# What `gpukiln-gpu reset` writes to the kernel's log: drivers before branch 570 log no 154.
RESET_NOTE = "gpukiln: GPU {address} was reset"
RESET = re.compile(r"gpukiln: GPU (?P<device>[0-9a-f:.]+) was reset")
TIMES = re.compile(r" \((\d+) times\)$")
Table = Mapping[int, Mapping[str, Any]]
"""{number: {kind, blames_hardware, severity, reset, text, remedy}}: `gpukiln.catalog.xid.judged`."""


@dataclass(frozen=True)
class KernelEvent:
    """What the kernel's log says of one device and fault, however often.

    Args:
        device: PCI address without its function; empty where the line names none.
        kind: Xid, SXid, or the id of a fault of `faults.LOGGED`.
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
    def switch(self) -> bool:
        """Whether it is an NVSwitch's."""
        return self.kind == "SXid"

    def known(self, table: Table) -> bool:
        """Whether its meaning is known: an SXid's by its own word, an Xid's by NVIDIA's catalogue."""
        if self.kind == "Xid":
            return self.number in table
        return self.fatal is not None if self.switch else True

    def severity(self, table: Table) -> Severity:
        """error: the device should get no work; warning, or info."""
        if self.switch:
            return "error" if self.fatal else "info"
        if self.kind != "Xid":
            return LOGGED[self.kind].severity
        if self.fatal is False:
            return "info"
        severity: Severity = table[self.number]["severity"] if self.number in table else "warning"
        return severity

    def blames_hardware(self, table: Table) -> bool:
        """Whether the machine is to blame, and not what ran on it."""
        if self.kind == "Xid":
            return self.known(table) and table[self.number]["blames_hardware"] and self.fatal is not False
        return bool(self.fatal) if self.switch else True

    def ends_with_reset(self, table: Table) -> bool:
        """Whether a reset of the GPU is what ends it."""
        if self.kind == "Xid":
            return self.number == RECOVERY_ACTION or bool(self.known(table) and table[self.number]["reset"])
        return not self.switch and LOGGED[self.kind].reset

    def finding(self, table: Table) -> Finding:
        """What the rows of the log say: the line with its meaning, and what to do."""
        id, means, remedy, source = self.kind, "", "", "NVIDIA Fabric Manager user guide, SXid errors"
        if self.kind == "Xid" and self.number in table:
            row = table[self.number]
            means, remedy, source = row["text"], row["remedy"], "NVIDIA, XID Errors"
        elif self.kind == "Xid":
            means, source = f"Xid {self.number}: not in this version's table", ""
            remedy = "look it up in NVIDIA's Xid catalogue"
        elif self.switch:
            remedy = "look the number up in NVIDIA's Fabric Manager user guide" if self.fatal else ""
        else:
            fault = LOGGED[self.kind]
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

    def explained(self, table: Table) -> str:
        """Its line, with what it means and what to do."""
        found = self.finding(table)
        return f"{found.message}; {found.remedy}" if found.remedy else found.message


def events(lines: Iterable[str], table: Table) -> list[KernelEvent]:
    """What the lines of a kernel's log say, one event a device and fault.

    What a reset ends is gone once the driver says that no recovery action is left (Xid 154), or
    `gpukiln-gpu reset` notes the reset.

    Args:
        lines: Any lines, in their order; or those that `gpukiln.probe.xids.fold_faults` made of them.
    """
    found: dict[tuple[str, str, int], KernelEvent] = {}
    for line in (line.strip() for line in join_messages(lines)):
        if done := RESET.search(line):
            _end(found, _address(done["device"]), table)
            continue
        event = _event(line)
        if event is None:
            continue
        if (event.kind, event.number) == ("Xid", RECOVERY_ACTION) and DONE.search(line):
            _end(found, event.device, table)
            continue
        key = (event.device, event.kind, event.number)
        before, times = found.get(key), TIMES.search(line)
        count = int(times[1]) if times else 1
        if before is not None:
            count += before.count
            if _says_more(before, event):
                event = before
        found[key] = dataclasses.replace(event, count=count)
    return list(found.values())


def _says_more(one: KernelEvent, later: KernelEvent) -> bool:
    """Whether a later line of the same fault has less to say: the worst stays, and a line with a number."""
    return bool(one.fatal and not later.fatal) or (
        XID.search(one.line) is not None and XID.search(later.line) is None
    )


def _event(line: str) -> KernelEvent | None:
    if match := XID.search(line):
        if match["switch"] and MORE.match(match["text"]):
            return None
        said = FATAL.search(match["text"])
        kind, fatal = "SXid" if match["switch"] else "Xid", not said["non"] if said else None
        return KernelEvent(_address(match["device"]), kind, int(match["number"]), fatal, line)
    for id, fault in LOGGED.items():
        if found := fault.pattern.search(line):
            device = _address(found.groupdict().get("device") or "")
            if id == "off-the-bus":  # which does not always get its number
                return KernelEvent(device, "Xid", OFF_THE_BUS, None, line)
            return KernelEvent(device, id, 0, None, line)
    return None


def _end(found: dict[tuple[str, str, int], KernelEvent], device: str, table: Table) -> None:
    """Forget what the reset of a device has ended, and what named no device."""
    for key, event in list(found.items()):
        if event.device in (device, "") and event.ends_with_reset(table):
            del found[key]


def _address(text: str) -> str:
    """`0000:3b:00`, with and without the function."""
    return text.lower().partition(".")[0]
