"""The driver's role where it must not go on: real Ansible on this machine, with files of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from tests.support.roles import play

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


def run_tasks(folder, tasks, environment=None, **variables):
    """Run one file of the role's tasks."""
    values = {"nvidia_driver_branch": 535, "nvidia_driver_version": "535.309.01", **variables}
    return play(folder, PLAYBOOK % tasks, values, environment)


def test_processes_that_have_a_gpu_open_are_listed(tmp_path, job):
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([PROCESSES], env=environment, capture_output=True, text=True, check=True)
    name = Path(f"/proc/{job.pid}/comm").read_text().strip()
    assert done.stdout == f"{job.pid} {name}\n"


def test_the_driver_is_not_replaced_under_running_work(tmp_path, job):
    loaded = tmp_path / "version"
    loaded.write_text("550.163.01\n")
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia")}
    done = run_tasks(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded))
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert f"Found driver 550.163.01 in use by {job.pid} " in said
    assert "Drain the node first" in said

    job.kill()
    job.wait()
    assert run_tasks(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded)).returncode == 0


@pytest.mark.parametrize("content", ["535.309.01\n", None])
def test_the_same_driver_and_none_disturb_nobody(tmp_path, job, content):  # noqa: ARG001 - the job runs
    loaded = tmp_path / "version"
    if content:
        loaded.write_text(content)
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia")}
    assert run_tasks(tmp_path, "guard", environment, nvidia_driver_loaded_file=str(loaded)).returncode == 0


@pytest.mark.parametrize(("allowed", "content"), [(True, "550.163.01\n"), (False, None)])
def test_a_driver_that_is_not_the_wanted_one_fails_after_a_reboot_too(tmp_path, allowed, content):
    loaded = tmp_path / "version"
    variables = {"nvidia_driver_loaded_file": str(loaded), "nvidia_driver_reboot_allowed": allowed}
    if content:
        loaded.write_text(content)
    done = run_tasks(tmp_path, "loaded", **variables)
    said = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert f"Found {(content or 'no NVIDIA driver').strip()} loaded, wanted 535.309.01." in said
    assert ("another driver came up" if allowed else "Reboot the machine") in said
    if content:
        loaded.write_text("535.309.01\n")
        assert run_tasks(tmp_path, "loaded", **variables).returncode == 0


def test_what_is_loaded_is_read_after_the_reboot():
    tasks = yaml.safe_load((ROOT / "roles/nvidia_driver/tasks/load.yml").read_text())
    names = [task["name"] for task in tasks]
    assert names.index("Reboot into the right driver") < names.index("Check what is loaded now")


def request(tmp_path, **variables):
    """What the role says of a request, with a distribution's facts."""
    facts = {
        "distribution": "Debian",
        "distribution_version": "12",
        "os_family": "Debian",
        **variables.pop("facts", {}),
    }
    components = {"nvidia_driver": {"branch": 535, "version": "535.309.01"}}
    (tmp_path / "facts.yml").write_text(json.dumps({"components": components}))
    done = run_tasks(tmp_path, "request", ansible_facts=facts, components=components, **variables)
    return done.returncode, " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"nvidia_driver_branch": 536, "nvidia_driver_version": ""},
            "Found nvidia_driver_branch 536, wanted one of 470, 515",
        ),
        (
            {"nvidia_driver_branch": 550},
            "Found nvidia_driver_version '535.309.01' and nvidia_driver_branch 550",
        ),
        ({"nvidia_driver_source": "runfile"}, "Found nvidia_driver_runfile '' with SHA-256 ''"),
        ({"nvidia_driver_signing_key": "/k"}, "wanted both, or neither for a generated pair"),
        (
            {
                "facts": {"distribution": "Rocky", "os_family": "RedHat"},
                "nvidia_driver_source": "distribution",
            },
            "Found Rocky 12 and nvidia_driver_source distribution; wanted Debian or Ubuntu",
        ),
    ],
)
def test_wrong_requests_are_refused(tmp_path, variables, said):
    code, text = request(tmp_path, **variables)
    assert code == 2
    assert said in text


def test_a_right_request_is_taken(tmp_path):
    assert request(tmp_path)[0] == 0


SIGNED = """#!/bin/sh
case $* in *signer*) printf '%s\n' "$SIGNER" ;; esac
"""


@pytest.fixture
def kernel(tmp_path):
    """A kernel made of files: what it enforces, its keys, and a modinfo that names a signer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/modinfo").write_text(SIGNED)
    (tmp_path / "bin/modinfo").chmod(0o755)
    lockdown = tmp_path / "sys/kernel/security/lockdown"
    lockdown.parent.mkdir(parents=True)
    variable = tmp_path / "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    variable.parent.mkdir(parents=True)
    keys = tmp_path / "keys"
    keys.write_text(
        "1e3a1a38 I------     1 perm 1f030000     0     0 asymmetri Example Key: 0a1b2c3d: X509.rsa []\n"
    )

    def judge(signer, *, enforced):
        lockdown.write_text("none [integrity] confidentiality\n" if enforced else "[none] integrity\n")
        variable.write_bytes(b"\x06\x00\x00\x00" + (b"\x01" if enforced else b"\x00"))
        environment = {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "SIGNER": signer,
            "GPUKILN_SYS": str(tmp_path / "sys"),
            "GPUKILN_KEYS": str(keys),
        }
        script = ROOT / "scripts/bootstrap/nvidia-module-signature.sh"
        done = subprocess.run(
            [script, "nvidia"], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    return judge


@pytest.mark.parametrize(
    ("signer", "enforced", "code", "said"),
    [
        ("", False, 0, "Secure Boot is off and the kernel takes every module; nvidia is signed by 'nobody'"),
        ("Other Key", False, 0, "takes every module"),
        ("", True, 1, "Found no signature on nvidia"),
        ("Other Key", True, 1, "signed by 'Other Key', which is not enrolled, and Secure Boot on"),
        ("Example Key", True, 0, "signed by 'Example Key', which the kernel trusts; Secure Boot is on"),
    ],
)
def test_whether_the_kernel_would_load_the_module(kernel, signer, enforced, code, said):
    found, text = kernel(signer, enforced=enforced)
    assert (found, said in text) == (code, True), text
