"""Who holds dpkg's lock while a task of apt waits for it: the look at a host, and what is told of it."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible_runner
import pytest

from gpukiln.nodes import apt_lock
from gpukiln.nodes.apt_lock import LockWatch, find_lock_holders, parse_lock_holders, script
from gpukiln.nodes.playbook import PlaybookRequest, run_playbook

# As apt and dpkg lock: fcntl(2), on the whole file
HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
)
HOLDER = "process 4711 (`/usr/bin/unattended-upgrade`), which has /var/lib/dpkg/lock-frontend"
# ansible-core, modules/apt.py
FAILED = "Failed to lock apt for exclusive operation: Failed to lock directory /var/lib/apt/lists/"


@pytest.fixture
def hold() -> Iterator[Callable[..., int]]:
    """Lock a file in another process; its id."""
    held = []

    def lock(file: Path, *words: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(file), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        held.append(process)
        assert process.stdout
        process.stdout.readline()
        return process.pid

    yield lock
    for process in held:
        process.communicate(b"\n")


def _said(*files: Path) -> str:
    text = script(tuple(map(str, files)))
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout


def test_the_process_that_holds_a_lock_is_found(tmp_path: Path, hold: Callable[..., int]) -> None:
    file, free = tmp_path / "lock-frontend", tmp_path / "lock"
    free.touch()
    pid = hold(file, "unattended-upgrade")
    [line] = _said(tmp_path / "missing", free, file).splitlines()
    assert line.startswith(f"gpukiln-lock {file} {pid} {sys.executable} -c ")
    assert line.rstrip().endswith("unattended-upgrade")


@pytest.mark.parametrize("word", ["/root/.ansible/tmp/ansible-tmp-1/AnsiballZ_apt.py", "BECOME-SUCCESS-abc"])
def test_ansibles_own_lock_is_nobody_to_wait_for(tmp_path: Path, hold: Callable[..., int], word: str) -> None:
    hold(tmp_path / "lock", word)
    assert _said(tmp_path / "lock") == ""


def test_hosts_are_told_apart() -> None:
    said = (
        "gpu-1 | CHANGED | rc=0 >>\n"
        "gpukiln-lock /var/lib/dpkg/lock-frontend 4711 /usr/bin/unattended-upgrade \n"
        "gpukiln-lock /var/lib/dpkg/lock 4712 dpkg --token=hunter2 \n"
        "gpu-2 | CHANGED | rc=0 >>\n\n"
        "gpu-3 | UNREACHABLE! => {\n"
    )
    assert parse_lock_holders(said) == {"gpu-1": HOLDER}


def test_ansible_carries_the_script_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=b"gpu-1 | CHANGED | rc=0 >>\n")

    monkeypatch.setattr("gpukiln.programs.run", run)
    assert find_lock_holders("hosts.yml", ["gpu-1", "gpu-2"], {}) == {}
    [command] = asked
    assert command[:4] == ["ansible", "gpu-1,gpu-2", "-i", "hosts.yml"]
    carried = command[-1].removesuffix(" | sh")
    done = subprocess.run(["sh", "-c", carried], capture_output=True, text=True, check=True)
    assert done.stdout == script()


def _event(kind: str, host: str, **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"host": host, "task": "Install", "role": "nvtop", **data}}


class Told:
    """A watch with a clock of the test's own."""

    def __init__(self, holders: dict[str, str]) -> None:
        self.now, self.said, self.asked = 0.0, [], list[list[str]]()
        self.said = list[tuple[str, str]]()
        self.watch = LockWatch(self._look, lambda *words: self.said.append(words), lambda: self.now)
        self.holders = holders

    def _look(self, hosts: list[str]) -> dict[str, str]:
        self.asked.append(hosts)
        return {host: holder for host, holder in self.holders.items() if host in hosts}


def test_a_task_of_apt_that_waits_names_the_holder_once() -> None:
    told = Told({"a": HOLDER})
    for host in ("a", "b"):
        told.watch.take(_event("runner_on_start", host, task_action="ansible.builtin.apt"))
    told.watch.take(_event("runner_on_start", "c", task_action="ansible.builtin.command"))
    for told.now in (14.0, 16.0, 70.0, 77.0):
        told.watch.check_due_hosts()
    assert told.asked == [["a", "b"], ["a", "b"]]
    assert told.said == [("a", f"nvtop : Install waits for {HOLDER}")]
    told.watch.take(_event("runner_on_ok", "a"))
    told.now = 200.0
    told.watch.check_due_hosts()
    assert told.asked[2:] == [["b"]]


def test_the_failure_names_who_held_the_lock() -> None:
    told = Told({"a": HOLDER})
    assert told.watch.explain("a", FAILED) == f"{FAILED}\nthe lock is held by {HOLDER}"
    assert told.watch.explain("b", FAILED) == FAILED
    assert told.watch.explain("a", "no such package") == "no such package"


def test_a_run_tells_it_while_it_waits_and_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    waits = threading.Event()

    def tell(*words: str) -> None:
        said.append((words[0], words[1]))
        waits.set()

    def run(*, event_handler: Callable[[dict[str, Any]], bool], **_: Any) -> SimpleNamespace:
        event_handler(_event("runner_on_start", "a", task_action="ansible.builtin.apt"))
        assert waits.wait(20)
        event_handler(_event("runner_on_failed", "a", res={"msg": FAILED}))
        return SimpleNamespace(rc=2, status="failed")

    monkeypatch.setattr(ansible_runner, "run", run)
    monkeypatch.setattr(apt_lock, "find_lock_holders", lambda *_: {"a": HOLDER})
    monkeypatch.setattr(apt_lock, "FIRST_S", 0.0)
    monkeypatch.setattr(apt_lock, "POLL_S", 0.01)
    result = run_playbook(PlaybookRequest("node.yml", tmp_path / "hosts.yml"), ["a"], tmp_path, tell)
    assert said == [("a", f"nvtop : Install waits for {HOLDER}"), ("a", "failed: nvtop : Install")]
    assert f"the lock is held by {HOLDER}" in result.hosts["a"].failure
