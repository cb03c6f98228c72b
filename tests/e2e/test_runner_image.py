"""The container image for GPU jobs, built for real from this machine's mirror and judged inside."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import Target
from tests.support.harness import Here

BUILD = ("docker.build", "runner-gpu", "--base", "debian-12", "--engine", "buildah")
LEFT_OUT = {"versions.actions-runner", "compute.runner-nvcc"}  # no source of them can be reached
NEEDS_GPU = {"compute.kernel", "compute.bandwidth", "multi-gpu.all-reduce"}
# Shell text that root runs in a container of the image -> the checks that must notice it.
FAULTS = {
    "rm /usr/local/cuda/lib64/libcudnn.so.8 && ldconfig": ["versions.runner-cudnn"],
    "cp /usr/local/cuda/lib64/libcublas.so.12 /usr/local/cuda/lib64/libnccl.so.2": ["versions.runner-nccl"],
    "rm /usr/local/cuda/bin/ptxas": ["compute.runner-nvrtc"],
    "chown -R root /home/runner/.cache/ccache": ["runtime.ccache"],
    "sed -i '2i exit 3' /opt/gpukiln/hooks/gpu-job-started.sh": ["runtime.job-hooks"],
    "chown runner /opt/gpukiln/hooks/gpu-job-completed.sh": ["hygiene.runner-writable"],
    "mkdir -p /var/lib/apt/lists && touch /var/lib/apt/lists/x_Packages": ["hygiene.runner-build-files"],
    "echo 'machine a login b password c' >/home/runner/.netrc": ["hygiene.runner-credentials"],
    "rm /opt/venv/bin/cmake": ["versions.runner-tools"],
    "rm -r /opt/venv/lib/python3*/site-packages/mpmath": ["versions.runner-python"],
    'sed -i \'s/"size_budget_gib": 6/"size_budget_gib": 1/\' /etc/gpukiln/image.json': [
        "hygiene.runner-size"
    ],
}


@pytest.fixture(scope="module")
def storage(here: Here) -> Iterator[None]:
    """A container storage of its own, beside the tests' state: the image takes some GiB."""
    folder = here.home / "containers"
    folder.mkdir()
    file = folder / "storage.conf"
    file.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(file))
        here.environment["CONTAINERS_STORAGE_CONF"] = str(file)
        try:
            yield
        finally:
            subprocess.run(["buildah", "rm", "--all"], check=True, capture_output=True)
            del here.environment["CONTAINERS_STORAGE_CONF"]
    # The overlay driver binds this folder onto itself; a Buildah that was killed leaves it so.
    subprocess.run(["umount", str(folder / "root/overlay")], check=False, capture_output=True)
    # What it was made of goes, too: nothing else of this run needs it.
    subprocess.run(["rm", "-rf", str(folder), str(here.home / "docker")], check=True)


@pytest.fixture(scope="module")
def built(here: Here, storage: None) -> dict:  # noqa: ARG001 - where the image lies
    return json.loads(here.invoke(*BUILD, "--json").stdout)


def test_the_image_is_built_and_proven(built: dict) -> None:
    assert built["built"] is True
    assert built["state"] == "verified"
    assert built["image"]["user"] == "1001:1001"
    assert built["image"]["entrypoint"][0] == "/usr/bin/tini"
    outcomes = {check["id"]: check["outcome"] for check in built["verdict"]["checks"]}
    not_run = {name for name, outcome in outcomes.items() if outcome == "not_run"}
    assert set(outcomes.values()) == {"passed", "not_run"}
    assert not_run == LEFT_OUT | NEEDS_GPU | {"runtime.runner-init"}
    reasons = {part["name"]: part["reason"] for part in built["plan"]["components"]}
    assert "no Python index has nvcc" in reasons["cuda_nvcc"]


def test_a_second_build_of_the_same_does_nothing_and_says_why(here: Here, built: dict) -> None:
    again = here.invoke(*BUILD, "--json")
    assert f"nothing to build: {built['reference']} has this digest" in again.stderr
    answer = json.loads(again.stdout)
    assert (answer["built"], answer["build_id"]) == (False, built["build_id"])
    assert here.invoke("docker.plan", *BUILD[1:], "--exit-code").returncode == 0


def test_what_is_broken_in_a_container_is_found(built: dict, tmp_path: Path) -> None:
    container = subprocess.run(
        ["buildah", "from", built["reference"]], check=True, capture_output=True, text=True
    ).stdout.strip()
    for fault in FAULTS:
        shell = ["buildah", "run", "--isolation=chroot", "--user=root", container, "--", "sh", "-ec", fault]
        subprocess.run(shell, check=True)
    verdict = run_suite(Target("broken", f"buildah://{container}"), profile="runner", out_dir=tmp_path)
    assert {check.id for check in verdict.failures} == {name for names in FAULTS.values() for name in names}
    reasons = {check.id: check.reason for check in verdict.failures}
    assert "libcudnn.so.8" in reasons["versions.runner-cudnn"]
    assert "mpmath" in reasons["versions.runner-python"]


@pytest.mark.usefixtures("built")
def test_ctrl_c_in_the_middle_leaves_no_context_and_the_record_says_so(here: Here) -> None:
    process = here.start(*BUILD, "--force")
    deadline = time.monotonic() + 120
    while not (found := list((here.home / "docker").glob("context-*"))):
        assert time.monotonic() < deadline, "no build began"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(2)
    assert process.wait(60) == 130
    assert not found[0].exists()
    listed = json.loads(here.invoke("docker.list", "--json").stdout)
    assert [record["state"] for record in listed["builds"][:2]] == ["aborted", "verified"]
