"""A container of each container engine sees the GPUs."""

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check

ALL = ("image", "node", "eks-node", "workspace")
TOOLKIT = "component:nvidia_container_toolkit"
AFTER = ("gpu.driver-loaded", "gpu.nvml")
CAUSES = (
    "the CDI specification or the runtime's configuration was written for another driver version",
    "the engine was not restarted after its configuration was written",
)


def check_listed_gpus(facts, engine):
    """Fail where nvidia-smi in a container of the engine does not list every GPU of the machine."""
    answer = require_reached(facts["container"][engine])
    assert answer["rc"] == 0, (
        f"nvidia-smi in the container exits {answer['rc']}: {answer['out'].strip()[:300]}"
    )
    # MIG instances are listed as MIG-...: only whole GPUs are counted.
    listed, expected = answer["out"].count("UUID: GPU-"), len(facts["gpus"]["pci"])
    assert listed == expected, f"the container sees {listed} GPUs, the machine has {expected}"


@check(
    id="container.docker-gpu",
    title="nvidia-smi in a Docker container lists every GPU",
    layer="container",
    profiles=ALL,
    needs=("gpu", "real-gpu", "component:docker", TOOLKIT),
    causes=("Docker does not run", *CAUSES),
    after=(*AFTER, "runtime.docker", "runtime.docker-nvidia"),
    fix="Run `docker run --rm --gpus all IMAGE nvidia-smi -L` and `nvidia-ctk cdi list` on the machine.",
)
def test_docker_gpu(facts):
    assert "docker" in facts["container"], "no container was started: nvidia-ctk or docker is missing"
    check_listed_gpus(facts, "docker")


@check(
    id="container.containerd-gpu",
    title="nvidia-smi in a container of containerd lists every GPU",
    layer="container",
    profiles=ALL,
    needs=("gpu", "real-gpu", "component:containerd", TOOLKIT),
    causes=("nvidia-container-runtime is not on containerd's PATH", *CAUSES),
    after=(*AFTER, "runtime.containerd", "runtime.containerd-nvidia"),
    fix="`nvidia-container-runtime --version` and `nvidia-ctk config` on the machine; `nvidia-ctk runtime "
    "configure --runtime=containerd`, then restart containerd.",
)
def test_containerd_gpu(facts):
    assert "containerd" in facts["container"], "no container was started: nvidia-ctk or ctr is missing"
    check_listed_gpus(facts, "containerd")


@check(
    id="container.podman-cdi",
    title="nvidia-smi in a Podman container lists every GPU, by CDI",
    layer="container",
    profiles=ALL,
    needs=("gpu", "real-gpu", TOOLKIT),
    causes=CAUSES,
    after=(*AFTER, "runtime.cdi"),
    fix="`nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml`, then `nvidia-ctk cdi list`.",
)
def test_podman_cdi(facts):
    # Podman is no component of an image; users may install it.
    if "podman" not in facts["container"]:
        pytest.skip("Podman is not installed")
    check_listed_gpus(facts, "podman")
