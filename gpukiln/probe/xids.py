"""Gathers messages about faults of GPUs and NVSwitches from the kernel's log.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH116
# See gpukiln/probe/gather.py.

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from typing import Any

from gpukiln.probe.base import (
    TIMED_OUT,
    HungError,
    NotReachedError,
    bus_gpus,
    pci_gpus,
    run,
    run_unrecorded,
)
from gpukiln.probe.child import pids

# The driver's faults are Xids, NVSwitch's are SXids.
XID = re.compile(
    r"(?:NVRM: Xid|nvidia-nvswitch\d*: (?P<switch>SXid)) \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): "
    r"(?P<number>\d+)(?P<text>.*)"
)
# Faults without a number; the beginning of the line names the device, where there is one.
DEVICE = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)"
OFF_THE_BUS = re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{DEVICE}.*fallen off the bus")
UNSUPPORTED = re.compile(
    rf"NVRM: The NVIDIA GPU {DEVICE}.*(?:is not supported by|is supported through|requires use of the)"
)
INIT_FAILED = re.compile(rf"NVRM: (?:GPU {DEVICE}: )?RmInitAdapter failed!")
RESET_REQUIRED = re.compile(r"NVRM: .*\[NV_ERR_RESET_REQUIRED\]")
HEARTBEAT = re.compile(r"NVRM: .*GSP RM heartbeat timed out")
LOGGED = (OFF_THE_BUS, UNSUPPORTED, INIT_FAILED, RESET_REQUIRED, HEARTBEAT)
# The driver's message about a GPU that it can't start has several lines; only the first has the address.
MESSAGE_START = re.compile(rf"NVRM: The NVIDIA GPU {DEVICE}")
CONTINUATION = re.compile(r"^(?:\[[^\]]*\])?\s*NVRM: (?P<text>.*)$")
MAX_LINES = 8
RESET_NOTE = "gpukiln: GPU "  # `gpukiln-gpu reset` writes it to the log
# Lines of one number differ in whether the fault was fatal, and in the kind of an SXid's line.
KIND = re.compile(r"(?i)\b(?:non-?)?fatal\b|, *(?:severity|data)\b")
# `pid=1234, name=python3`, or `pid='<unknown>'` (NVIDIA, "XID Errors"; seen with number and quotes too).
OWNER = re.compile(r"\bpid='?(\d+)")
JOURNAL = ("journalctl", "-k", "-b", "-o", "cat", "--no-pager")
JOURNAL_S = 60.0
# The first message of a boot (Linux, init/main.c), and of the driver, before which there is no fault.
BOOT_STARTS = ("Linux version ", "NVRM: loading ")
NO_ENTRIES = "-- No entries --"  # journalctl's output without entries
LINE_CHARS = 300
INITIAL_PIDS = 0xEFFFFFFC  # inode of the first namespace (Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO)


def xids() -> dict[str, Any]:
    """{xids: this boot's lines about faults, see `folded`, log_gap, log_lost: see `kernel_log`}."""
    log, gap, lost = kernel_log()
    return {"xids": fold_faults(log.splitlines()), "log_gap": gap, "log_lost": lost}


def join_messages(lines: Iterable[str]) -> list[str]:
    """Lines of the kernel's log, with each message about a GPU that the driver can't start on one line.

    >>> join_messages(["NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:20b0)", "NVRM: fallen off the bus"])
    ['NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:20b0) fallen off the bus']
    >>> join_messages(["NVRM: loading", "usb 1-1: new device"])
    ['NVRM: loading', 'usb 1-1: new device']
    """
    messages: list[str] = []
    more = 0
    for line in lines:
        part = CONTINUATION.match(line) if more else None
        if part and not MESSAGE_START.search(line) and not XID.search(line):
            messages[-1] += f" {part['text'].strip()}"
            more = 0 if OFF_THE_BUS.search(messages[-1]) or UNSUPPORTED.search(messages[-1]) else more - 1
            continue
        complete = OFF_THE_BUS.search(line) or UNSUPPORTED.search(line)
        more = MAX_LINES if MESSAGE_START.search(line) and not complete else 0
        messages.append(line)
    return messages


def _kind(line: str) -> tuple[str, str] | None:
    """The kind and device of a fault; None for a line about no fault."""
    if match := XID.search(line):
        start = match[0][: match.start("text") - match.start()]
        said = KIND.search(line, match.start("text"))
        return start, said[0].lower() if said else ""
    for at, pattern in enumerate(LOGGED):
        if match := pattern.search(line):
            return f"{at} {match.groupdict().get('device')}", ""
    return (line[line.index(RESET_NOTE) :], "") if RESET_NOTE in line else None


def fold_faults(lines: Iterable[str], own: Collection[int] = ()) -> list[str]:
    """The last line for each device and fault, with its count, so that many lines of one hide no other.

    Args:
        lines: Of the kernel's log, in their order.
        own: Process ids of the probe, whose faults are listed separately.
    """
    had = {gpu["address"] for gpu in pci_gpus()}
    # A container sees the host's log, also of GPUs that belong to others.
    hidden = [gpu["address"].rpartition(".")[0] for gpu in bus_gpus() if gpu["address"] not in had]
    counts: dict[Any, tuple[int, str]] = {}
    for line in join_messages(lines):
        kind = _kind(line)
        if kind is None or any(address in line.lower() for address in hidden):
            continue
        owner = OWNER.search(line)
        key = (kind, bool(owner and int(owner[1]) in own))
        counts[key] = (counts.pop(key, (0, ""))[0] + 1, line)
    return [line[:LINE_CHARS] + (f" ({n} times)" if n > 1 else "") for n, line in counts.values()]


def kernel_log() -> tuple[str, str | None, str | None]:
    """The kernel's log of this boot; why it could not be read; why its beginning is missing.

    The journal has all of it until it is rotated. Without a journal, or one that answers in time, the
    kernel's own ring buffer is read, whose oldest lines are overwritten. Where all was read, both reasons are
    null.
    """
    most, late, why = "", False, []
    for command in (JOURNAL, ("dmesg",)):
        try:
            said = run(*command, timeout=JOURNAL_S, waits=True)
        except HungError as error:
            said = {"rc": TIMED_OUT, "err": str(error)}
        late = late or said["rc"] == TIMED_OUT
        if said["rc"] != 0:
            why.append(said["err"] or f"{command[0]} exits {said['rc']}")
        elif any(words in said["out"] for words in BOOT_STARTS):
            return said["out"], None, None
        elif said["out"].strip() in ("", NO_ENTRIES):
            why.append(f"{command[0]} has nothing of this boot")
        else:
            why.append(f"{command[0]} has lost this boot's beginning")
            # Both sources may be incomplete: the longer one has more of the boot.
            most = max(most, said["out"], key=len)
    reason = "; ".join(why)
    return (most, reason, None) if late or not most else (most, None, reason)


def kernel_buffer() -> tuple[list[str], str | None]:
    """The current lines of the kernel's ring buffer, and why they can't be read, or null."""
    try:
        said = run_unrecorded("dmesg", timeout=JOURNAL_S, waits=True)
    except NotReachedError as error:
        return [], str(error)
    return said["out"].splitlines(), None if said["rc"] == 0 else said["err"] or f"dmesg exits {said['rc']}"


def faults_since(before: tuple[list[str], str | None]) -> dict[str, Any]:
    """The faults since `kernel_buffer` was read: {xids, log_gap, pids}.

    Returns:
        pids are those of the probe's children in the first namespace, as the kernel's log has them
        (NVIDIA/open-gpu-kernel-modules: os_get_current_process is current->tgid). In another namespace they
        are unknown, and the list is empty.
    """
    lines, gap = kernel_buffer()
    own = pids if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PIDS else []
    return {
        "xids": fold_faults(new_lines(before[0], lines), own),
        "log_gap": before[1] or gap,
        "pids": list(own),
    }


def new_lines(before: list[str], after: list[str]) -> list[str]:
    """The new lines of a buffer that drops its oldest lines.

    >>> new_lines(["a", "b"], ["b", "c"])
    ['c']
    >>> new_lines([], ["a"])
    ['a']
    """
    for start, line in enumerate(before):
        kept = len(before) - start
        if after[:1] == [line] and before[start:] == after[:kept]:
            return after[kept:]
    return after
