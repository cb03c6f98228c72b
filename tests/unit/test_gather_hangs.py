"""Tools that give no answer: they are named, ended with all that they started, and asked once."""

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.probe import base, gather, sections
from gpukiln.probe.base import NOT_REACHED, HungError, NotReachedError, run_unless_hung, run_unrecorded, watch

Tool = Callable[..., str]
pytestmark = pytest.mark.usefixtures("nothing_hangs")


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Write a program; its process ids are in the file `pids`."""

    def write(text: str, name: str = "nvidia-smi") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho $$ >>{tmp_path}/pids\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


def is_gone(pid: int) -> bool:
    """Also where nobody has waited for it."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    """A killed process is gone when the kernel gets to it."""
    deadline = time.monotonic() + 30
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def test_a_hanging_tool_is_named_with_its_state_and_ended_with_its_children(
    tool: Tool, tmp_path: Path
) -> None:
    smi = tool(f"sh -c 'echo $$ >>{tmp_path}/pids; exec sleep 3000' &\nexec sleep 3000")
    with pytest.raises(HungError) as caught:
        base.run(smi, "-h", timeout=1)
    assert re.search(
        r"^nvidia-smi hangs: `.*/nvidia-smi -h`: no answer in 1 s; "
        r"process \d+ \(sleep\) is in state S \(sleeps\).*, and was killed$",
        str(caught.value),
    )
    assert len(pids(tmp_path)) == 2
    wait_until_gone(pids(tmp_path))
    [row] = base.evidence
    assert (row["rc"], row["command"]) == (124, f"{smi} -h")
    assert "no answer in 1 s" in row["err"]


def test_a_tool_that_hung_is_not_asked_again_under_any_of_its_names(tool: Tool, tmp_path: Path) -> None:
    kmod = tool("exec sleep 3000", "kmod")
    (tmp_path / "modprobe").symlink_to(kmod)
    with pytest.raises(HungError, match="kmod hangs"):
        run_unrecorded(kmod, timeout=0.5)
    started = time.monotonic()
    with pytest.raises(HungError, match=r"kmod hangs .*, and was not run again"):
        run_unrecorded("env", "A=b", str(tmp_path / "modprobe"), "--showconfig", timeout=60)
    assert "not run again" in run_unless_hung(kmod)[NOT_REACHED]
    assert time.monotonic() - started < 5
    assert len(pids(tmp_path)) == 1
    assert [one["tool"] for one in watch.hung.values()] == ["kmod"]


def test_an_answer_of_124_or_a_missing_tool_is_no_hang(tool: Tool) -> None:
    assert run_unrecorded(tool("exit 124"))["rc"] == 124
    assert run_unrecorded("no-such-tool")["rc"] == 127
    assert not watch.hung


def test_waiting_in_vain_is_no_hang(tool: Tool) -> None:
    assert run_unrecorded(tool("exec sleep 3000"), timeout=0.5, waits=True)["rc"] == 124
    assert not watch.hung


def test_a_tool_whose_time_was_cut_short_is_not_called_hung(tool: Tool) -> None:
    watch.start(0.5)
    with pytest.raises(NotReachedError, match="facts may take were up") as caught:
        run_unrecorded(tool("exec sleep 3000"), timeout=60)
    assert not isinstance(caught.value, HungError)
    assert not watch.hung
    with pytest.raises(NotReachedError):
        run_unrecorded("true")


def test_what_cannot_be_killed_is_not_waited_for(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits in the kernel takes no signal; here it is not sent one."""
    kill = os.killpg
    monkeypatch.setattr(base.os, "killpg", lambda *_: None)
    started = time.monotonic()
    with pytest.raises(HungError, match="and can't be killed"):
        run_unrecorded(tool("echo so far\nexec sleep 3000"), timeout=0.5)
    assert time.monotonic() - started < 10
    [pid] = pids(tmp_path)
    kill(pid, signal.SIGKILL)


def test_a_section_that_waits_in_the_kernel_is_given_up_and_the_others_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sections, "SECTION_S", 1)
    facts = sections.gather({"a": lambda: 1, "nfs": lambda: time.sleep(3000), "b": lambda: {"x": 2}})
    assert (facts["a"], facts["b"]) == (1, {"x": 2})
    assert facts["nfs"][NOT_REACHED].startswith("gathering nfs does not return in 1 s, killed: process ")
    [hung] = facts["hung"]["tools"]
    assert hung["command"] == "gathering nfs"


def test_all_ends_in_its_time_and_what_was_found_before_is_kept(tool: Tool, tmp_path: Path) -> None:
    slow = tool("exec sleep 3000")
    watch.start(2)
    started = time.monotonic()
    facts = sections.gather(
        {
            "a": lambda: 1,
            "b": lambda: run_unrecorded(slow),
            "c": lambda: run_unrecorded("true"),
            "d": lambda: time.sleep(3000),
        }
    )
    assert time.monotonic() - started < 10
    assert facts["a"] == 1
    up = {NOT_REACHED: "the 2 s that gathering facts may take were up"}
    assert [facts[name] for name in "bcd"] == [up, up, up]
    assert facts["hung"]["tools"] == []
    wait_until_gone(pids(tmp_path))
    json.dumps(facts)


def test_a_section_that_ends_its_process_is_an_error_and_the_others_are_gathered() -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    facts = sections.gather({"a": crash, "b": lambda: 1})
    assert "status -9" in facts["a"]["_error"]
    assert facts["b"] == 1


def test_what_goes_through_a_driver_that_hangs_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    watch.hung["/usr/bin/nvidia-smi"] = {"tool": "nvidia-smi", "command": "nvidia-smi -h", "reason": "-"}
    monkeypatch.setattr(gather, "nvml_facts", lambda *_: pytest.fail("NVML was asked"))
    for section in (gather.nvml, gather.cuda, gather.container):
        with pytest.raises(HungError, match="nvidia-smi hangs, so that this was not tried"):
            section()


def test_a_tool_that_hung_in_one_section_is_not_asked_in_a_later_one(tool: Tool, tmp_path: Path) -> None:
    smi = tool("exec sleep 3000")
    facts = sections.gather(
        {
            "driver": lambda: run_unless_hung(smi, "-h", timeout=1),
            "gpus": lambda: run_unrecorded(smi, "-q", timeout=60),
        }
    )
    assert "no answer in 1 s" in facts["driver"][NOT_REACHED]
    assert "not run again" in facts["gpus"][NOT_REACHED]
    assert len(pids(tmp_path)) == 1
    assert [one["tool"] for one in facts["hung"]["tools"]] == ["nvidia-smi"]
    assert facts["evidence"]["driver"][0]["rc"] == 124


@pytest.mark.parametrize("ended", [False, True])
def test_cloud_init_is_waited_for_until_it_has_written_its_result(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(base, "PATH", f"{tmp_path}:{base.PATH}")
    monkeypatch.setattr(sections, "PATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{base.PATH}")
    result = tmp_path / "result.json"
    monkeypatch.setattr(sections, "CLOUD_INIT_RESULT", str(result))
    for name in ("systemctl", "cloud-init"):
        tool(f'echo {name} "$@" >>{tmp_path}/calls', name)
    if ended:
        result.write_text("{}")
    sections.wait_for_boot()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["systemctl is-system-running --wait", "cloud-init status --wait"][: 1 if ended else 2]
