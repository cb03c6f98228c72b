"""Who a process is that the driver lists: by its number where that is ours, by what it has open elsewhere."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpukiln.gpus import processes
from gpukiln.gpus.processes import describe


@pytest.fixture
def sleeper() -> Iterator[Callable[[str], int]]:
    """Starts a process that has a file open; returns its number."""
    started: list[subprocess.Popen[bytes]] = []

    def start(path: str) -> int:
        code = "import sys, time; file = open(sys.argv[1], 'rb'); print('ready', flush=True); time.sleep(60)"
        job = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
        started.append(job)
        assert job.stdout
        assert job.stdout.readline() == b"ready\n"
        return job.pid

    yield start
    for job in started:
        job.kill()
        job.communicate()


def row(pid: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "GPU-1", {"pid": pid, "kind": "compute", "memory": 100, "name": None, **more}


def test_a_number_of_the_first_namespace_is_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_first_namespace", lambda: True)
    [one] = describe([row(os.getpid())])
    assert (one.state, one.uid) == ("running", os.getuid())
    [one] = describe([row(4_000_000)])
    assert one.state == "gone"


def test_elsewhere_a_number_that_exists_is_another_process(
    monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[str], int], tmp_path: Path
) -> None:
    """The host's number 77, told inside a container, is not the container's own process 77."""
    (tmp_path / "data").touch()
    monkeypatch.setattr(processes, "_first_namespace", lambda: False)
    [one] = describe([row(sleeper(str(tmp_path / "data")))])
    assert (one.state, one.user, one.command) == ("foreign", None, None)
    assert one.unavailable["user"] == "it is in another PID namespace"


def test_elsewhere_one_that_has_the_device_open_is_the_process(
    monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[str], int], tmp_path: Path
) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(processes, "_first_namespace", lambda: False)
    monkeypatch.setattr(processes, "DEVICE_NODES", (str(tmp_path / "nvidia"),))
    [one] = describe([row(sleeper(str(node)))])
    assert (one.state, one.uid) == ("running", os.getuid())


def test_a_double_names_the_processes_of_its_own_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_first_namespace", lambda: False)
    [named] = describe([row(os.getpid(), name="python3")], simulated=True)
    [unnamed] = describe([row(os.getpid())], simulated=True)
    assert (named.state, unnamed.state) == ("running", "foreign")
