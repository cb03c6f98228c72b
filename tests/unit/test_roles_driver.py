"""The driver's role where it must not go on: real Ansible on this machine, with files of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = ROOT / "scripts/bootstrap/nvidia-gpu-processes.sh"
PLAYBOOK = """\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: nvidia_driver, tasks_from: %s}
"""


@pytest.fixture
def job(tmp_path):
    """A process that has a "GPU" open."""
    (tmp_path / "nvidia0").touch()
    program = "import sys,time; f=open(sys.argv[1]); print('open',flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "nvidia0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def play(tmp_path, tasks, environment=None, **variables):
    (tmp_path / "site.yml").write_text(PLAYBOOK % tasks)
    values = {"nvidia_driver_branch": 535, "nvidia_driver_version": "535.309.01", **variables}
    return subprocess.run(
        ["ansible-playbook", tmp_path / "site.yml", "-e", json.dumps(values)],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(tmp_path),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_processes_that_have_a_gpu_open_are_listed(tmp_path, job):
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([PROCESSES], env=environment, capture_output=True, text=True, check=True)
    name = Path(f"/proc/{job.pid}/comm").read_text().strip()
    assert done.stdout == f"{job.pid} {name}\n"


def test_the_driver_is_not_replaced_under_running_work(tmp_path, job):
    loaded = tmp_path / "version"
    loaded.write_text("550.163.01\n")
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia")}
    done = play(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded))
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert f"Found driver 550.163.01 in use by {job.pid} " in said
    assert "Drain the node first" in said

    job.kill()
    job.wait()
    assert play(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded)).returncode == 0


@pytest.mark.parametrize("content", ["535.309.01\n", None])
def test_the_same_driver_and_none_disturb_nobody(tmp_path, job, content):  # noqa: ARG001 - the job runs
    loaded = tmp_path / "version"
    if content:
        loaded.write_text(content)
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia")}
    assert play(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded)).returncode == 0
