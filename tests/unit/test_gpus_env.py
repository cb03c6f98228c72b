"""`gpukiln-gpu env`: chosen by the driver, leased, started and proven; what is not proven is taken away."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.catalog.components import load_environments
from gpukiln.errors import CheckFailedError, IncompatibleError, UnavailableError, UsageError
from gpukiln.gpus.config import Config
from gpukiln.gpus.environments import IMAGE, WHEELS, EnvironmentChoice, choose, start_container, start_wheels
from gpukiln.gpus.leases import CONTAINER, DETACHED, LeaseHolder, Leases
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support import nvml_double
from tests.support.gpus import device, double, snapshot, uuid


def told_to_nobody(_: str) -> None:
    """Notices for people."""


OLD, NEW = "535.309.01", "580.95.05"
AMPERE = [device(0, architecture="Ampere")]


@pytest.mark.parametrize(
    ("framework", "kind", "cuda", "driver", "version", "word"),
    [
        ("pytorch", IMAGE, "auto", NEW, "2.10.0", "runs"),
        ("pytorch", IMAGE, "auto", OLD, "2.5.1", "runs"),
        ("pytorch", IMAGE, "12.8", OLD, "2.8.0", "runs-with-limits"),
        ("pytorch", WHEELS, "auto", OLD, "2.4.1", "runs"),
        ("tensorflow", WHEELS, "auto", OLD, "2.18.0", "runs-with-limits"),
        ("jax", WHEELS, "auto", NEW, "0.4.38", "runs"),
    ],
)
def test_the_driver_decides(
    framework: str, kind: str, cuda: str, driver: str, version: str, word: str
) -> None:
    choice = choose(framework, kind, cuda, driver, AMPERE)
    assert (choice.version, choice.verdict.word) == (version, word)
    assert bool(choice.image) == (kind == IMAGE)
    if choice.image:
        assert "@sha256:" in choice.image
        assert ":" not in choice.image.partition("@")[0]


@pytest.mark.parametrize(
    ("framework", "kind", "cuda", "driver", "gpus", "told"),
    [
        (
            "pytorch",
            IMAGE,
            "13.0",
            OLD,
            AMPERE,
            "CUDA 13.0 needs driver 580.65.06 or later, found 535.309.01",
        ),
        ("pytorch", IMAGE, "11.8", OLD, AMPERE, "wanted CUDA 11.8"),
        ("jax", IMAGE, "auto", NEW, AMPERE, "it has no image"),
        ("pytorch", IMAGE, "auto", "470.256.02", AMPERE, "CUDA 12.1 needs driver 525.60.13"),
        (
            "pytorch",
            IMAGE,
            "13.0",
            NEW,
            [device(0, architecture="Volta")],
            "Volta wants CUDA 12.x or earlier",
        ),
        (
            "tensorflow",
            WHEELS,
            "auto",
            NEW,
            [device(0, architecture="Blackwell")],
            "Blackwell wants CUDA 12.8",
        ),
    ],
)
def test_what_can_not_run_here_is_refused_with_the_reason_of_each(
    framework: str, kind: str, cuda: str, driver: str, gpus: Any, told: str
) -> None:
    with pytest.raises(IncompatibleError) as error:
        choose(framework, kind, cuda, driver, gpus)
    assert told in "\n".join(error.value.details)


def test_an_unknown_framework_is_told() -> None:
    with pytest.raises(UsageError, match="--framework 'torch'"):
        choose("torch", IMAGE, "auto", OLD, AMPERE)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("image: x:1", "an image needs its digest"),
        ("digest: sha256:0", "has neither an image nor wheels"),
        ("wheels: [a], cuda: '99.1'", "unknown CUDA version"),
        ("wheels: [a], colour: red", "colour"),
    ],
)
def test_a_wrong_row_of_the_table_is_told(tmp_path: Path, line: str, told: str) -> None:
    row = {"version": "'1'", "cuda": "'12.1'", "least_driver": "'525.60.13'", "source": "x", "reason": "x"}
    row |= {"review": "2027-01-15"}
    for part in line.split(", "):
        name, _, value = part.partition(": ")
        row[name] = value
    file = tmp_path / "components.yaml"
    lines = "".join(f"      {name}: {value}\n" for name, value in row.items())
    file.write_text(f"components: {{}}\nenvironments:\n  pytorch:\n    -\n{lines}")
    with pytest.raises(UsageError, match=told):
        load_environments(file)


# An engine that keeps containers as files and runs what is to be run in one as SCRIPT says.
ENGINE = """#!/bin/bash
echo "$*" >>"{folder}/calls"
case "$1 $2" in
  "info --format") echo '{info}' ;;
  "image inspect") {inspect} ;;
  "pull --quiet") {pull} ;;
  "run --detach") touch "{folder}/container"; {run} ;;
  cp\\ *) ;;
  exec\\ *) shift 2; if [ "$2" = /gpukiln-gpu ]; then {compute}; else {count}; fi ;;
  "rm --force") rm -f "{folder}/container" ;;
  "ps --quiet") test ! -e "{folder}/container" || echo abc ;;
esac
"""
GPU = {
    "index": 0,
    "name": "A100",
    "ok": True,
    "elements": 1,
    "kernel_ms": 1.0,
    "h2d_gb_s": 1.0,
    "d2h_gb_s": 1.0,
}
WRONG = json.dumps({"nodes": [{"gpus": [], "problems": ["wrong sum"]}]})
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts PyTorch on a leased GPU with an engine that behaves as is said; returns what came."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    info = {"DiscoveredDevices": [{"Source": "cdi", "ID": f"nvidia.com/gpu={uuid(0)}"}]}
    found = snapshot(device(0))
    leases = Leases(LeaseStore(tmp_path / "state"), take_snapshot=lambda: found, config=Config(Path("none")))

    def run(hours: float | None = None, **behaviour: str) -> Any:
        document = {"schema": "gpu.compute/1", "nodes": [{"gpus": [GPU], "problems": []}], "failed": []}
        values = {
            **{
                "folder": tmp_path,
                "info": json.dumps(info),
                "inspect": "true",
                "pull": "true",
                "run": "true",
            },
            **{"compute": f"echo '{json.dumps(document)}'", "count": "echo noise; echo 1", **behaviour},
        }
        engine = tmp_path / "bin/docker"
        engine.write_text(ENGINE.format(**values))
        engine.chmod(0o755)
        granted = leases.acquire(
            DeviceRequest(), LeaseHolder("ann", 1001), kind=CONTAINER, hours=hours, engine="docker"
        )
        choice = choose("pytorch", IMAGE, "auto", OLD, AMPERE)
        try:
            return start_container(choice, granted, "docker", told_to_nobody)
        finally:
            for number in granted.descriptors:
                os.close(number)

    yield run
    leases.store.close()


def test_a_container_is_handed_over_when_it_is_proven(start: Start, tmp_path: Path) -> None:
    started = start(inspect="false")
    assert started.evidence == ("computes on A100", "pytorch 2.5.1 counts 1 of 1 GPUs")
    assert started.enter == ("docker", "exec", "-it", "gpukiln-l-1", "bash")
    calls = (tmp_path / "calls").read_text()
    assert "pull --quiet pytorch/pytorch@sha256:831247" in calls
    assert "--label gpukiln.lease=L-1 --ipc host" in calls
    assert f"--device nvidia.com/gpu={uuid(0)}" in calls
    assert (tmp_path / "container").exists()
    assert calls.count("infinity\n") == 1


def test_a_container_ends_with_the_time_of_its_lease(start: Start, tmp_path: Path) -> None:
    start(hours=2.0)
    [seconds] = re.findall(r"--entrypoint sleep .* (\d+)\n", (tmp_path / "calls").read_text())
    assert 7100 < int(seconds) <= 7200


@pytest.mark.parametrize(
    ("behaviour", "error", "told"),
    [
        ({"compute": "echo 'python3: not found' >&2; exit 127"}, CheckFailedError, "did not run"),
        (
            {"compute": f"echo '{WRONG}'; exit 1"},
            CheckFailedError,
            "compute check of the host suite fails",
        ),
        ({"count": "echo 0"}, CheckFailedError, "pytorch counts 0 of 1 GPUs"),
        ({"count": "echo 'No module named torch' >&2; exit 1"}, CheckFailedError, "counts none of 1"),
        ({"inspect": "false", "pull": "echo 'denied' >&2; exit 1"}, UnavailableError, "docker pull --quiet"),
        # Docker keeps a container that it made and could not start.
        (
            {"run": "echo 'could not select device driver' >&2; exit 125"},
            UnavailableError,
            "docker run --det.*(?s:.*)restart docker",
        ),
    ],
)
def test_what_is_not_proven_is_taken_away(
    start: Start, tmp_path: Path, behaviour: dict[str, str], error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        start(**behaviour)
    assert re.search(told, f"{caught.value}\n{caught.value.hint}")
    assert not (tmp_path / "container").exists()


def test_wheels_that_do_not_compute_leave_no_folder(tmp_path: Path) -> None:
    """There is no CUDA on this machine: the check is the real one, and says so."""
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(
            "thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("thing-1.0.dist-info/RECORD", "")
    found = snapshot(device(0))
    leases = Leases(LeaseStore(tmp_path / "state"), take_snapshot=lambda: found, config=Config(Path("none")))
    granted = leases.acquire(DeviceRequest(), LeaseHolder("ann", 1001), kind=DETACHED)
    verdict = choose("jax", WHEELS, "auto", NEW, AMPERE).verdict
    choice = EnvironmentChoice("jax", "1.0", WHEELS, "12.6", None, (str(wheel),), verdict)
    with pytest.raises(CheckFailedError) as error:
        start_wheels(choice, granted, tmp_path / "env", told_to_nobody)
    assert "no NVIDIA GPU on the PCI bus" in "\n".join(error.value.details)
    assert not (tmp_path / "env").exists()
    (tmp_path / "env").mkdir()
    with pytest.raises(UsageError, match="exists"):
        start_wheels(choice, granted, tmp_path / "env", told_to_nobody)
    leases.store.close()


def test_a_rehearsal_starts_nothing_and_a_failure_leaves_no_lease(tmp_path: Path) -> None:
    node = double(nvml_double.build(tmp_path, branch=535), tmp_path, "p4d.24xlarge")

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpukiln.gpus", *words]
        env = {**node.environment, "PATH": "/usr/bin:/bin", "DOCKER_HOST": "unix:///nowhere"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    done = typed("env", "--framework", "pytorch", "-n", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "pytorch 2.5.1, CUDA 12.1: driver 535.309.01 is as new as" in done.stdout
    assert typed("env", "--framework", "pytorch", "-n", "2").returncode == 4  # no engine answers
    assert json.loads(typed("leases", "--json").stdout)["nodes"][0]["leases"] == []
    done = typed("env", "--mig", "1g.5gb", "-n", "2", "--dry-run")
    assert (done.returncode, "2 MIG devices for one environment" in done.stderr) == (3, True)
    done = typed("compute")
    assert (done.returncode, done.stdout) == (4, "no NVIDIA GPU on the PCI bus\n")
