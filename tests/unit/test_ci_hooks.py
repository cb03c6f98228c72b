"""The hooks of a CI runner, with real processes that hold files of this test's own for NVIDIA devices."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS, OTHERS = "github_ours", "github_another_job"
HOLD = """
import os, signal, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
device = open(sys.argv[1])
print("holds it", flush=True)
time.sleep(600)
"""
# Holds nothing itself, and starts what does anew as soon as it ends.
SUPERVISE = """
import os, sys
# several, so that one is back in time on a busy machine
loop = 'for i in 1 2 3; do while :; do sleep 600 <"$0"; done & done; sleep 1; echo "holds it"; wait'
os.execvp("bash", ["bash", "-c", loop, sys.argv[1]])
"""
IDLE = "0, GPU-aaaa, 3, 0, No, No"


class Machine:
    """GPUs made of files, an nvidia-smi that says what it is told, and jobs that are real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.device = folder / "nvidia0"
        self.device.touch()
        self.processes: list[subprocess.Popen[str]] = []
        (self.bin / "nvidia-gpu-processes").symlink_to(SCRIPTS / "bootstrap" / "nvidia-gpu-processes.sh")
        self.smi(IDLE)

    def smi(self, gpus: str, apps: str = "", code: int = 0) -> None:
        (self.folder / "gpus").write_text(f"{gpus}\n")
        (self.folder / "apps").write_text(f"{apps}\n")
        answer = f'case $* in *query-gpu*) cat "{self.folder}/gpus" ;; *) cat "{self.folder}/apps" ;; esac'
        self.command("nvidia-smi", f"{answer}; exit {code}")

    def command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def hold(
        self, *, job: str | None = None, code: str = HOLD, how: str = "", uid: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a process that has the device open; returns when it has."""
        environment = {**os.environ, **({} if job is None else {"RUNNER_TRACKING_ID": job})}
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.device), how],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=None if uid is None else lambda: os.setuid(uid),  # noqa: PLW1509 - nothing else runs
        )
        self.processes.append(process)
        assert process.stdout
        assert process.stdout.readline() == "holds it\n"
        return process

    def hook(self, name: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", str(SCRIPTS / "hooks" / f"gpu-job-{name}.sh")],
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "HOME": str(self.folder),
                "RUNNER_TEMP": str(self.folder),
                "RUNNER_TRACKING_ID": OURS,
                "GPUKILN_DEVICES": str(self.folder / "nvidia"),
                "GPUKILN_GPU_PRESENT": str(self.folder / "present"),
                "GPUKILN_JOURNAL": str(self.folder / "journal"),
                "GPU_JOB_GRACE_S": "1",
                **settings,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def survives(process: subprocess.Popen[str]) -> bool:
    time.sleep(0.1)
    return process.poll() is None


# --- after the job --------------------------------------------------------------------------------------


def test_nothing_left(machine: Machine) -> None:
    machine.hook("started")
    done = machine.hook("completed")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gpukiln: the job left nothing on the GPU\n"


@pytest.mark.parametrize("job", [OURS, "", "0", None], ids=repr)
def test_what_the_job_left_is_ended_and_told(machine: Machine, job: str | None) -> None:
    """Its tracking id, or none: jobs take it away to outlive themselves."""
    assert machine.hook("started").returncode == 0
    left = machine.hold(job=job)
    machine.smi(IDLE, f"{left.pid}, 2048\n{left.pid}, 1024\n1, 500")
    done = machine.hook("completed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert left.wait(5) == -15
    assert f"::warning title=GPU::Ended {left.pid} python" in done.stdout
    assert "with SIGTERM: the job left it on the GPU with 3072 MiB." in done.stdout


def test_what_ignores_sigterm_is_killed(machine: Machine) -> None:
    machine.hook("started")
    left = machine.hold(job=OURS, how="stubborn")
    done = machine.hook("completed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert left.wait(5) == -9
    assert "with SIGKILL: the job left it on the GPU." in done.stdout


def of_another_job(machine: Machine) -> subprocess.Popen[str]:
    machine.hook("started")
    return machine.hold(job=OTHERS)


def begun_before_the_job(machine: Machine) -> subprocess.Popen[str]:
    process = machine.hold()
    time.sleep(0.05)  # more than one of the kernel's clock ticks
    machine.hook("started")
    return process


def without_a_noted_start(machine: Machine) -> subprocess.Popen[str]:
    return machine.hold()


def of_another_user(machine: Machine) -> subprocess.Popen[str]:
    if os.geteuid() != 0:
        pytest.skip("starting a process of another user needs root")
    for folder in (machine.folder, *machine.folder.parents):
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:  # pytest's own folders; the process keeps the group
            folder.chmod(stat.S_IMODE(mode) | 0o055)
    machine.hook("started")
    return machine.hold(job=OURS, uid=65534)


@pytest.mark.parametrize(
    "begin", [of_another_job, begun_before_the_job, without_a_noted_start, of_another_user]
)
def test_what_is_not_the_jobs_is_left_alone(
    machine: Machine, begin: Callable[[Machine], subprocess.Popen[str]]
) -> None:
    other = begin(machine)
    done = machine.hook("completed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"left alone, not the job's: {other.pid} python" in done.stdout
    assert "::" not in done.stdout
    assert survives(other)


def test_what_holds_no_device_is_left_alone(machine: Machine) -> None:
    machine.hook("started")
    machine.device.rename(machine.folder / "file")
    machine.device, device = machine.folder / "file", machine.device
    other = machine.hold(job=OURS)
    device.touch()
    assert machine.hook("completed").returncode == 0
    assert survives(other)


def test_a_tracking_id_needs_no_noted_start(machine: Machine) -> None:
    left = machine.hold(job=OURS)
    done = machine.hook("completed")
    assert "nobody noted when the job began" in done.stdout
    assert left.wait(5) == -15


def test_what_can_not_be_ended_fails(machine: Machine) -> None:
    machine.hook("started")
    machine.hold(job=OURS, code=SUPERVISE)
    done = machine.hook("completed")
    assert done.returncode == 1
    assert done.stdout.count("::warning title=GPU::Ended ") >= 3
    assert re.search(
        r"::error title=GPU::Found \d processes of the job on the GPU, and could not", done.stdout
    )


def test_a_name_can_not_speak_to_the_runner(machine: Machine) -> None:
    machine.hook("started")
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'x%0A::error::y');" + HOLD
    left = machine.hold(job=OURS, code=code)
    done = machine.hook("completed")
    assert left.wait(5) == -15
    assert f"::warning title=GPU::Ended {left.pid} x%250A::error::y with SIGTERM" in done.stdout
    assert "\n::error" not in done.stdout


def test_the_machine_keeps_its_own_log(machine: Machine) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(machine.folder / "journal"))
        journal.settimeout(5)
        machine.hook("completed", RUNNER_NAME="gpu-7")
        said = journal.recv(4096).decode()
    assert "gpukiln-ci: gpu-7: nobody noted when the job began" in said


def test_a_gpu_that_broke_is_told_and_does_not_fail_the_job(machine: Machine) -> None:
    machine.hook("started")
    machine.smi("", "Unable to determine the device handle for GPU 0", code=15)
    done = machine.hook("completed")
    assert done.returncode == 0
    assert "::warning title=GPU::Found a GPU that nvidia-smi can't use after the job: Unable" in done.stdout


def test_a_missing_helper_is_not_taken_for_a_clean_gpu(machine: Machine) -> None:
    (machine.bin / "nvidia-gpu-processes").unlink()
    assert machine.hook("completed").returncode == 127


@pytest.mark.parametrize("name", ["started", "completed"])
def test_without_a_gpu(machine: Machine, name: str) -> None:
    machine.device.unlink()
    machine.command("nvidia-smi", "exit 12")
    done = machine.hook(name)
    assert done.returncode == 0, done.stderr
    assert "no GPU" in done.stdout


# --- before the job -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [IDLE, "0, GPU-aaaa, 1024, [N/A], [N/A], No", "0, GPU-aaaa, [Not Supported], N/A, N/A, [N/A]"]
)
def test_a_sound_gpu_is_used(machine: Machine, row: str) -> None:
    machine.smi(row)
    done = machine.hook("started")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "::" not in done.stdout
    ticks = int((machine.folder / "gpukiln-job-started").read_text())
    began = ticks / os.sysconf("SC_CLK_TCK")
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - began) < 30


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0, GPU-aaaa, 20480, 0, No, No", "Found GPU 0 with 20480 MiB in use by"),
        ("0, GPU-aaaa, 3, 2, No, No", "Found GPU 0 with 2 uncorrected memory errors"),
        ("0, GPU-aaaa, 3, 2, Yes, No", "Found GPU 0 in need of a reset"),
        ("0, GPU-aaaa, 3, 0, No, Yes", "Found GPU 0 in need of a reset"),
        ("0, GPU-aaaa, [GPU requires reset], 0, No, No", "Found GPU 0 in need of a reset"),
        ("0, GPU-aaaa, [GPU is lost], 0, No, No", "Found GPU 0 lost"),
        (f"{IDLE}\n1, GPU-bbbb, 20480, 0, No, No", "Found GPU 1 with 20480 MiB"),
    ],
)
def test_a_gpu_that_can_not_be_used_is_refused(machine: Machine, row: str, reason: str) -> None:
    machine.smi(row)
    done = machine.hook("started")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"::error title=GPU::{reason}" in done.stdout
    assert "Drain" in done.stdout or "Reboot" in done.stdout or "End that" in done.stdout


def test_who_uses_the_memory_is_named(machine: Machine) -> None:
    machine.smi(
        "0, GPU-aaaa, 20480, 0, No, No",
        f"GPU-aaaa, {os.getpid()}, 20000, python3\nGPU-bbbb, 7, 1, xorg\nGPU-aaaa, 999999999, 480, train",
    )
    done = machine.hook("started")
    assert f"{os.getpid()} python3 (user " in done.stdout
    assert "999999999 train (user not seen from here) with 480 MiB, wanted at most 1024" in done.stdout
    assert "xorg" not in done.stdout


@pytest.mark.parametrize(("allowed", "code"), [("20480", 0), ("20479", 1)])
def test_what_may_be_in_use_is_a_choice(machine: Machine, allowed: str, code: int) -> None:
    machine.smi("0, GPU-aaaa, 20480, 0, No, No")
    assert machine.hook("started", GPU_JOB_MAX_MEMORY_MIB=allowed).returncode == code


@pytest.mark.parametrize(
    ("visible", "code", "said"),
    [
        ("0", 0, "GPU 0: 3 MiB"),
        ("GPU-aaaa", 0, "GPU 0: 3 MiB"),
        ("0,1", 1, "Found GPU 1"),
        ("GPU-b", 1, "Found GPU 1"),
        ("5", 1, "Found no GPU of CUDA_VISIBLE_DEVICES=5"),
        ("", 0, "no GPU for this runner"),
        ("MIG-aaaa", 0, "only the driver is checked"),
    ],
)
def test_only_the_runners_own_gpus_are_judged(machine: Machine, visible: str, code: int, said: str) -> None:
    machine.smi(f"{IDLE}\n1, GPU-bbbb, 20480, 0, No, No")
    done = machine.hook("started", CUDA_VISIBLE_DEVICES=visible)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


def test_a_driver_that_does_not_answer_is_refused(machine: Machine) -> None:
    machine.smi("NVIDIA-SMI has failed", code=9)
    done = machine.hook("started")
    assert done.returncode == 1
    assert "::error title=GPU::Found a GPU that nvidia-smi can't use: NVIDIA-SMI has failed" in done.stdout


def test_a_driver_that_hangs_is_refused(machine: Machine) -> None:
    machine.command("timeout", "exit 124")
    done = machine.hook("started")
    assert done.returncode == 1
    assert "can't use: no answer in 60 s" in done.stdout


def test_a_host_whose_driver_did_not_load_is_refused(machine: Machine) -> None:
    """It has no device nodes; it was marked at boot."""
    machine.device.unlink()
    (machine.folder / "present").touch()
    machine.smi("NVIDIA-SMI has failed because it couldn't communicate with the driver", code=9)
    assert machine.hook("started").returncode == 1
