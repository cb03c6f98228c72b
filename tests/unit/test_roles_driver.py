"""The scripts that the driver's role asks: who uses the GPUs, and whether the kernel takes a module."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT

PROCESSES = ROOT / "scripts/bootstrap/nvidia-gpu-processes.sh"


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


def test_processes_that_have_a_gpu_open_are_listed(tmp_path, job):
    environment = {"GPUKILN_DEVICES": str(tmp_path / "nvidia"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([PROCESSES], env=environment, capture_output=True, text=True, check=True)
    name = Path(f"/proc/{job.pid}/comm").read_text().strip()
    assert done.stdout == f"{job.pid} {name}\n"


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
