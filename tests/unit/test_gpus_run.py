"""`gpukiln-gpu run`: the command has its GPUs, its signals and its exit code, and leaves nothing leased."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import settings
from tests.support import nvml_double
from tests.support.gpus import Double, double


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_double.build(tmp_path_factory.mktemp("nvml"), branch=535)


@pytest.fixture
def node(built: Path, tmp_path: Path) -> Double:
    return double(built, tmp_path, "p4d.24xlarge")


def start(node: Double, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpukiln.gpus", *words],
        env=node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def typed(node: Double, *words: str) -> tuple[int, str, str]:
    process = start(node, *words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def leases(node: Double) -> list[dict[str, object]]:
    code, out, err = typed(node, "leases", "--json")
    assert code == 0, err
    found: list[dict[str, object]] = json.loads(out)["nodes"][0]["leases"]
    return found


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_command_gets_its_words_as_they_are_and_its_gpus_by_uuid(node: Double) -> None:
    words = ("a b", "--x", "", "$HOME", "'\"", "\n", "--")
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    done, out, err = typed(
        node, "run", "-n", "2", "--memory", "24GiB", "--", sys.executable, "-c", code, *words
    )
    assert done == 0, err
    argv, environment = json.loads(out)
    assert tuple(argv) == words
    visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(visible) == 2
    assert all(one.startswith("GPU-") and len(one) == 40 for one in visible)
    assert environment["GPUKILN_LEASE"] == "L-1"
    assert leases(node) == []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program"], 127),
        (["/etc/hostname"], 126),
    ],
)
def test_its_exit_code_is_that_of_the_command(node: Double, command: list[str], code: int) -> None:
    assert typed(node, "run", "--", *command)[0] == code
    assert leases(node) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_reach_the_command_which_decides(node: Double, number: signal.Signals) -> None:
    script = f"trap 'exit {40 + number}' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    process = start(node, "run", "--", "bash", "-c", script)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 40 + number
    assert leases(node) == []


def test_the_job_of_a_killed_wrapper_keeps_its_gpus(node: Double) -> None:
    process = start(node, "run", "-n", "8", "--", "sh", "-c", "echo $$; exec sleep 60")
    assert process.stdout
    job = int(process.stdout.readline())
    try:
        until(lambda: leases(node)[0]["job_pid"] == job)
        process.kill()
        process.wait()
        [lease] = leases(node)
        assert lease["job_pid"] == job
        code, _, err = typed(node, "run", "--", "true")
        assert (code, "leased: L-1 of root" in err) == (75, True), err
    finally:
        os.kill(job, signal.SIGKILL)
    until(lambda: leases(node) == [])
    assert typed(node, "run", "-n", "8", "--", "true")[0] == 0


SINGLE = "a CUDA process uses one MIG device"  # NVIDIA, MIG User Guide, "CUDA Device Enumeration"


def test_several_mig_devices_come_with_the_words_that_use_each(node: Double) -> None:
    node.state.change(lambda rows: settings.play_scenario(rows, "mig-mixed"))
    show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    code, out, err = typed(node, "run", "-n", "2", "--mig", "any", "--", *show)
    assert code == 0, err
    devices = out.strip().split(",")
    assert len(devices) == 2
    assert err.startswith(f"warning: {SINGLE}")
    assert [line.strip() for line in err.splitlines()[1:]] == [
        f"CUDA_VISIBLE_DEVICES={one} COMMAND" for one in devices
    ]
    code, out, err = typed(node, "lease", "-n", "2", "--mig", "1g.5gb", "--for", "1h", "--json")
    assert code == 0, err
    grant = json.loads(out)["nodes"][0]
    assert SINGLE in err
    assert all(f"CUDA_VISIBLE_DEVICES={one} COMMAND" in err for one in grant["devices"])
    code, out, err = typed(node, "run", "--lease", grant["lease"]["id"], "--", *show)
    assert (code, out.strip().split(","), SINGLE in err) == (0, grant["devices"], True)
    for words in (("--dry-run",), ("--dry-run", "--json"), ("--for", "1h")):
        code, _, err = typed(node, "lease", "-n", "2", "--mig", "1g.5gb", *words)
        assert (code, err.count(SINGLE)) == (0, 1), words
    assert SINGLE not in typed(node, "renew", grant["lease"]["id"])[2]


@pytest.mark.parametrize("words", [("--mig", "any"), ("-n", "2")])
def test_one_mig_device_and_whole_gpus_come_without_a_warning(node: Double, words: tuple[str, ...]) -> None:
    node.state.change(lambda rows: settings.play_scenario(rows, "mig-mixed"))
    assert typed(node, "run", *words, "--", "true") == (0, "", "")


def test_what_the_command_leaves_behind_keeps_its_gpu_until_it_ends(node: Double) -> None:
    # As a daemon that was started with what the command inherited.
    code = "import subprocess; p = subprocess.Popen(['sleep', '60'], close_fds=False, start_new_session=True,"
    code += " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid)"
    done, out, err = typed(node, "run", "--", sys.executable, "-c", code)
    try:
        assert (done, "L-1 stays active: a process that the command started still runs" in err) == (
            0,
            True,
        ), err
        assert len(leases(node)) == 1
    finally:
        os.kill(int(out), signal.SIGKILL)
    until(lambda: leases(node) == [])


def test_a_job_whose_time_is_up_is_ended(node: Double) -> None:
    code, _, err = typed(node, "run", "--for", "1s", "--", "sleep", "60")
    assert (code, "time of the lease is over" in err) == (124, True)
    assert leases(node) == []


def test_who_waits_is_told_why_and_runs_when_it_can(node: Double) -> None:
    first = start(node, "run", "-n", "8", "--", "sh", "-c", "echo ready; sleep 1")
    assert first.stdout
    assert first.stdout.readline() == "ready\n"
    code, out, err = typed(node, "run", "--wait", "30s", "--", "echo", "ran")
    assert (code, out) == (0, "ran\n")
    assert "waiting: 0 of 8 devices that can serve it are free" in err
    first.communicate(timeout=30)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")])
def test_who_is_ended_while_it_waits_says_by_which_signal(
    node: Double, number: signal.Signals, said: str
) -> None:
    assert typed(node, "lease", "-n", "8")[0] == 0
    process = start(node, "run", "--wait", "5m", "--", "true")
    assert process.stderr
    assert process.stderr.readline().startswith("waiting: ")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, f"terminated by {said}\n")
    code, out, _ = typed(node, "leases", "--json")
    assert (code, json.loads(out)["nodes"][0]["waiting"]) == (0, [])


def test_gpus_are_named_by_number_to_who_reads_numbers(node: Double) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"
    code, out, err = typed(node, "run", "-n", "2", "--gpu", "3,5", "--ids", "index", "--", "sh", "-c", show)
    assert (code, out) == (0, "3,5 PCI_BUS_ID\n"), err
    code, out, _ = typed(node, "lease", "--gpu", "6", "--ids", "index")
    assert "export CUDA_VISIBLE_DEVICES=6" in out
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in out
    code, out, _ = typed(node, "run", "--lease", "L-2", "--ids", "index", "--", "sh", "-c", show)
    assert (code, out) == (0, "6 PCI_BUS_ID\n")
    assert typed(node, "run", "--ids", "number", "--", "true")[0] == 2
    assert typed(node, "run", "--ids", "index", "--mig", "any", "--", "true")[0] == 2
    assert typed(node, "run", "--ids", "index", "--docker", "image")[0] == 2


def test_ctrl_c_while_it_waits_leaves_nothing(node: Double) -> None:
    assert typed(node, "lease", "-n", "8")[0] == 0
    process = start(node, "run", "--wait", "5m", "--", "true")
    assert process.stderr
    assert process.stderr.readline().startswith("waiting: ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
    code, out, _ = typed(node, "leases", "--json")
    assert (code, json.loads(out)["nodes"][0]["waiting"]) == (0, [])


def test_several_commands_run_under_one_lease_which_stays(node: Double) -> None:
    code, out, _ = typed(node, "lease", "-n", "2", "--for", "2h", "--json")
    [granted] = json.loads(out)["nodes"]
    assert code == 0
    for _ in range(2):
        code, out, err = typed(node, "run", "--lease", "L-1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert (code, out.strip()) == (0, granted["environment"]["CUDA_VISIBLE_DEVICES"]), err
    assert [one["id"] for one in leases(node)] == ["L-1"]
    assert typed(node, "release", "L-1")[0] == 0
    assert typed(node, "release", "L-1")[:2] == (0, "released: nothing, there is no such lease\n")
    assert typed(node, "run", "--lease", "L-1", "--", "true")[0] == 2


def test_a_container_is_not_run_under_a_lease_as_if_it_were_a_command(node: Double) -> None:
    [grant] = json.loads(typed(node, "lease", "--json")[1])["nodes"]
    name = grant["lease"]["id"]
    for words in (["--docker", "image"], ["--podman", "image", "--", "/bin/echo", "on the host"]):
        code, out, err = typed(node, "run", "--lease", name, *words)
        assert (code, out) == (2, "")
        assert f"gpukiln-gpu args {name}" in err


def test_a_rehearsal_leases_nothing_and_says_why_of_each(node: Double) -> None:
    code, out, _ = typed(node, "lease", "--model", "H100", "--dry-run")
    assert code == 3
    assert out.count("it is NVIDIA A100-SXM4-40GB, wanted H100") == 8
    code, out, _ = typed(node, "lease", "-n", "3", "--cuda", ">=12.1", "--dry-run")
    assert (code, out.count(": taken"), out.count(": not needed")) == (0, 3, 5)
    assert leases(node) == []


def test_limits_and_the_ledger_go_by_the_file(node: Double) -> None:
    config = Path(node.environment["GPUKILN_GPUS_CONFIG"])
    config.write_text('[limits]\ngpus = 2\n[limits.projects.big]\ngpus = 8\nmembers = ["root"]\n')
    code, _, err = typed(node, "lease", "-n", "3")
    assert (code, "the limit of everybody is 2" in err) == (6, True)
    assert typed(node, "lease", "-n", "3", "--project", "big")[0] == 0
    config.write_text("[limits]\ngpu = 2\n")
    code, _, err = typed(node, "leases")
    assert (code, "[limits] has 'gpu'" in err, "wanted: gpus, hours, users, projects" in err) == (
        2,
        True,
        True,
    )


def test_it_works_as_a_library(node: Double) -> None:
    code = """
import os, subprocess
from gpukiln.gpus import lease, snapshot
print(len(snapshot().devices))
with lease(1, memory_mib=8192) as gpus:
    print(gpus.environment["CUDA_VISIBLE_DEVICES"] == gpus.uuids[0])
    print(sum(1 for one in snapshot().devices if one.allocatable))
print(sum(1 for one in snapshot().devices if one.allocatable))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=node.environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["8", "True", "7", "8"], done.stderr
