"""A container sees the GPU."""

from gpukiln.verify.checks import check


@check(
    id="container.docker-gpu",
    title="nvidia-smi in a Docker container lists every GPU",
    layer="container",
    profiles=("image", "node", "eks-node"),
    needs=("gpu", "component:docker", "component:nvidia_container_toolkit"),
    fix="Run `docker run --rm --gpus all IMAGE nvidia-smi -L` and `nvidia-ctk cdi list` on the machine.",
)
def test_docker_gpu(facts):
    found = facts["container"]
    assert found["ran"], "nvidia-ctk or docker is missing, wanted a container to be started"
    assert found["rc"] == 0, f"nvidia-smi in the container exits {found['rc']}: {found['out'].strip()[:300]}"
    listed, wanted = found["out"].count("UUID: GPU-"), len(facts["gpus"]["pci"])
    assert listed == wanted, f"the container sees {listed} GPUs, the machine has {wanted}"
