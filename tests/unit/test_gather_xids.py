"""What the kernel's log says of the GPUs: wherever it can be read, and none behind others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.probe import base, child, gather, gpus, xids
from gpukiln.probe.base import watch
from tests.support.host_evaluate import evaluate_check
from tests.support.host_machine import machine

PCI = [{"address": "0000:3b:00.0", "device": "0x20b0"}]
BOOT = "Linux version 6.1.0\n"
XID = "NVRM: Xid (PCI:0000:3b:00): {}\n"
LOST = XID.format("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
FAULTS = "".join(XID.format(f"31, pid={1000 + n}, name=train, MMU Fault") for n in range(40))
Tool = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("nothing_hangs")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Have a machine with one GPU and no tool but those that this makes, which say a text or run a script."""
    monkeypatch.setattr(base, "PATH", str(tmp_path))
    for module in (gpus, xids):
        monkeypatch.setattr(module, "pci_gpus", lambda: PCI)
        monkeypatch.setattr(module, "bus_gpus", lambda: PCI, raising=False)

    def make(name: str, text: str = "", *, script: str = "") -> Path:
        said = tmp_path / f"{name}.out"
        said.write_text(text)
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script or f'exec /bin/cat {said}'}\n")
        path.chmod(0o755)
        return said

    make("nvidia-smi", "")
    return make


def found(*, container: bool = False, profile: str = "node") -> tuple[Any, str, str]:
    """The lines that were gathered, and what the check says of them."""
    data = machine()
    data["gpus"] |= {**gpus.gpus(), "container": container}
    return data["gpus"]["xids"], *evaluate_check("gpu.xid", json.loads(json.dumps(data)), profile=profile)


def test_a_hardware_fault_does_not_hide_behind_others(tool: Tool) -> None:
    tool("journalctl", BOOT + FAULTS + LOST)
    lines, outcome, reason = found()
    assert outcome == "failed"
    assert "Xid 79" in reason
    assert [line.partition(",")[0][-2:] for line in lines] == ["31", "79"]
    assert "pid=1039" in lines[0], "the last one"
    assert lines[0].endswith("MMU Fault (40 times)")


def test_what_was_mended_stays_mended_and_the_fatal_one_of_a_switch_stays() -> None:
    action = "154, GPU recovery action changed from 0x{} to 0x{}"
    switch = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, {}"
    lines = [
        XID.format(action.format("0 (None)", "1 (GPU Reset Required)")),
        XID.format(action.format("1 (GPU Reset Required)", "0 (None)")),
        switch.format("Fatal, Link 46 MC TS crumbstore MCTO (First)"),
        switch.format("Non-fatal, Link 46 MC TS crumbstore MCTO (First)"),
        switch.format("Severity 0 Engine instance 46 Sub-engine instance 00"),
        switch.format("Data {0x00140004, 0x00100000}"),
    ]
    data = machine()
    data["gpus"]["xids"] = xids.fold_faults(line.strip() for line in lines * 2)
    assert len(data["gpus"]["xids"]) == 5
    outcome, reason = evaluate_check("gpu.xid", data, profile="node")
    assert outcome == "failed"
    assert reason.startswith("1 kinds of faults in the kernel's log, wanted none: nvidia-nvswitch3: SXid")


def test_without_a_journal_the_kernel_s_own_buffer_is_read(tool: Tool) -> None:
    tool("dmesg", f"[    0.000000] {BOOT}[   12.5] {LOST}")
    assert found()[1] == "failed"
    tool("dmesg", f"[    0.000000] {BOOT}")
    assert found()[1] == "passed"


@pytest.mark.parametrize(
    ("journal", "why"),
    [
        (None, "journalctl: not found; dmesg: not found"),
        ("-- No entries --\n", "journalctl has nothing of this boot; dmesg: not found"),
    ],
)
def test_a_log_that_nobody_reads_is_neither_fine_nor_an_error(
    tool: Tool, journal: str | None, why: str
) -> None:
    if journal is not None:
        tool("journalctl", journal)
    assert found(container=True) == (
        [],
        "not_run",
        f"this container can't read all of the kernel's log: {why}",
    )
    assert found()[1:] == (
        "not_reached",
        f"found no serious Xid in the readable part of the kernel's log: {why}",
    )


def test_a_log_that_has_lost_its_beginning_says_so_and_hides_no_fault(tool: Tool) -> None:
    """As after 200 days: the journal has a largest size, and the kernel's buffer too."""
    tool("journalctl", "a\n" * 9)
    tool("dmesg", "[ 99.1] b\n")
    lost = "journalctl has lost this boot's beginning; dmesg has lost this boot's beginning"
    assert found() == ([], "passed", lost)
    tool("dmesg", "[ 99.1] b\n" + "c\n" * 30 + LOST)
    assert found()[1] == "failed"
    tool("journalctl", "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.309.01\n")
    assert found() == ([], "passed", ""), "before the driver there was none"


def test_a_slow_journal_is_no_tool_that_hangs(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xids, "JOURNAL_S", 0.5, raising=False)
    monkeypatch.setattr(base, "HUNG_S", 0)
    tool("journalctl", script="exec /bin/sleep 300")
    tool("dmesg", BOOT + LOST)
    assert found()[1] == "failed"
    for text in ("[ 99.1] the buffer has lost its beginning\n", ""):
        tool("dmesg", text)
        _, outcome, reason = found()
        assert outcome == "not_reached"
        assert "journalctl: no answer in 0 s; process" in reason
    assert not watch.hung


def test_of_a_service_s_long_message_the_end_is_kept(tool: Tool) -> None:
    """It carries the cause, as of an error of containerd that wraps others."""
    message = f"failed to create task: {'wrapped: ' * 60}nvml error: driver not loaded"
    tool("journalctl", json.dumps({"UNIT": "docker.service", "MESSAGE": message}) + "\n")
    [found] = gather.errors_of([])
    assert found["message"] == f"...{message[-300:]}"
    assert base.tail("short", 300) == "short"


def test_a_slow_journal_leaves_the_boot_s_other_facts(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "JOURNAL_S", 0.5, raising=False)
    monkeypatch.setattr(gather, "SYSTEMD", "/", raising=False)
    tool("journalctl", script="exec /bin/sleep 300")
    for name in ("systemctl", "systemd-analyze", "systemd-detect-virt"):
        tool(name, "running\n")
    data = machine()
    data["boot"] = {**gather.boot(), "failed": [], "startup_s": 9.0}
    outcome, reason = evaluate_check("boot.journal", data)
    assert (outcome, reason) == ("not_reached", "the journal gave no answer in 0 s")
    assert evaluate_check("boot.state", data)[0] == "passed"
    assert not watch.hung


def test_another_gpu_of_the_host_is_no_concern_of_a_container(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xids, "bus_gpus", lambda: [*PCI, {"address": "0000:86:00.0"}])
    tool("dmesg", BOOT + LOST.replace("3b", "86"))
    assert found(container=True)[:2] == ([], "passed")
    tool("dmesg", BOOT + LOST.replace("3b", "86") + LOST)
    assert found(container=True)[1] == "failed"


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("", "", ""),
        ("", "ab", "ab"),
        ("ab", "ab", ""),
        ("ab", "abc", "c"),
        ("abc", "bcd", "d"),
        ("aab", "abaab", "aab"),
        ("abc", "xyz", "xyz"),
        ("abab", "ababab", "ab"),
        ("abc", "", ""),
    ],
)
def test_what_a_buffer_got_is_told_from_what_it_had(before: str, after: str, new: str) -> None:
    assert xids.new_lines(list(before), list(after)) == list(new)


@pytest.mark.parametrize(
    ("xid", "profile", "outcome"),
    [
        ("31, pid=4242, name=python3", "node", "failed"),
        ("31, pid=7, name=train", "node", "passed"),
        ("31, pid=7, name=train", "image", "failed"),
        ("13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception", "node", "passed"),
        ("48, pid=7, name=train", "node", "failed"),
        ("37, pid=4242, name=python3", "node", "passed"),
        ("9999, pid=7, new", "node", "passed"),
    ],
)
def test_another_job_s_fault_is_not_this_gpu_s(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, xid: str, profile: str, outcome: str
) -> None:
    said = tool("dmesg", BOOT + XID.format("31, pid=4242, name=before"))
    before = xids.kernel_buffer()
    said.write_text(said.read_text() + FAULTS.replace("31,", "8,") + XID.format(xid))
    monkeypatch.setattr(xids, "pids", [4242])  # those of earlier tests may be numbers that are used here
    data = machine()
    data["cuda"] |= xids.faults_since(before)
    if Path("/proc/self/ns/pid").stat().st_ino != xids.INITIAL_PIDS:
        assert data["cuda"]["pids"] == []
        data["cuda"]["pids"] = [4242]
    if profile == "image":
        data["cuda"]["xids"] = data["cuda"]["xids"][-1:]
    found, reason = evaluate_check("compute.kernel", data, profile=profile)
    assert found == outcome, reason
    assert XID.format(xid).strip() in reason
    if profile == "node":
        assert ("no fault of the machine: " in reason) == (outcome == "passed")


@pytest.mark.usefixtures("tool")
def test_what_computed_is_not_doubted_for_a_log_that_nobody_reads() -> None:
    data = machine()
    data["cuda"] |= xids.faults_since(xids.kernel_buffer())
    outcome, reason = evaluate_check("compute.kernel", data, profile="runner")
    assert outcome == "passed"
    assert reason.endswith("; the kernel's log was not read: dmesg: not found")


def test_our_children_are_known_by_their_ids() -> None:
    assert child.call(lambda: {"pid": os.getpid()}, 10)["pid"] == child.pids[-1]
