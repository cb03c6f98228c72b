"""Rules on how a container gets its GPUs: only by the device plugin, never by a variable or a path."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import PodContainer, Violation, Workload, mapping, sequence
from gpukiln.kubernetes.quantity import quantity
from gpukiln.units import is_whole

# Values that hide all GPUs: none and void are the container toolkit's, NoDevFiles is Slurm's.
NO_DEVICES = ("", "none", "void", "-1", "NoDevFiles")
# Images that manage GPUs and must see all of them. NVIDIA reserves its variable for these
# (NVIDIA/cloud-native-docs:gpu-operator/cdi.rst).
NODE_AGENTS = re.compile(
    r"k8s-device-plugin|gpu-feature-discovery|dcgm|gpu-operator|container-toolkit|mig-manager|k8s-driver-manager"
    r"|node-monitoring|node-problem-detector|nvidia-driver|kata-manager|gpukiln|vgpu|k8s-dra-driver|dra-driver"
)
DEVICE_PATHS = re.compile(
    r"/dev/nvidia|/proc/driver/nvidia|/usr/local/nvidia|/usr/lib(?:64|/x86_64-linux-gnu|/aarch64-linux-gnu)?/?"
    r"(?:lib)?(?:nvidia|cuda)|/usr/bin/nvidia|/dev/dri"
)


def is_node_agent(workload: Workload, container: PodContainer) -> bool:
    """Whether a container is an agent of the node: of NVIDIA or of a DaemonSet."""
    return workload.kind == "DaemonSet" or bool(NODE_AGENTS.search(container.image))


@rule(
    "cuda-visible-devices",
    "warning",
    Workload,
    title="CUDA_VISIBLE_DEVICES is not set together with the device plugin",
    reason="in a container GPUs are numbered from 0, independent of the host: the variable has no effect "
    "or hides GPUs that are paid for; with MIG, whose ids are UUIDs, it hides all",
    source="NVIDIA/k8s-device-plugin:README.md; its --device-id-strategy is uuid",
    fix="remove it: the container sees exactly the GPUs that it was given",
)
def cuda_visible_devices(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        for index, name, value in container.env:
            if (
                name == "CUDA_VISIBLE_DEVICES"
                and value not in NO_DEVICES
                # In a fragment the limits may be in a part that was left out.
                and (container.gpu_keys or not workload.whole)
            ):
                yield Violation(f"{name}={value}", workload.at(*container.where, "env", index))


@rule(
    "cuda-device-beyond",
    "error",
    Workload,
    title="CUDA_VISIBLE_DEVICES names only GPUs that the container has",
    reason="CUDA stops at the first number that does not exist, and with MIG at any number: it finds no GPU",
    source="docs.nvidia.com/cuda/cuda-c-programming-guide, environment variables",
    fix="remove it",
)
def cuda_device_beyond(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        if not container.gpu_keys:
            continue
        mig = any("mig-" in key for key in container.gpu_keys)
        amounts = [quantity(container.limits.get(key)) for key in container.gpu_keys]
        many = sum(amount for amount in amounts if amount is not None)
        for index, name, value in container.env:
            numbers = [number.strip() for number in str(value or "").split(",")]
            # UUIDs can't be compared with the number of GPUs.
            if name != "CUDA_VISIBLE_DEVICES" or not all(is_whole(number) for number in numbers):
                continue
            if mig or any(int(number) >= many for number in numbers):
                why = "MIG devices have no numbers" if mig else f"the container has {many}"
                yield Violation(f"{name}={value}, and {why}", workload.at(*container.where, "env", index))


@rule(
    "nvidia-visible-devices",
    "error",
    Workload,
    title="NVIDIA_VISIBLE_DEVICES is not set in pods",
    reason="the device plugin sets it to the allocated GPUs; the pod's own value may take precedence and "
    "show "
    "GPUs of others; without a request it takes GPUs that the scheduler gives to other pods",
    source="NVIDIA/k8s-device-plugin:README.md; NVIDIA/cloud-native-docs:gpu-operator/cdi.rst",
    fix="remove it and request nvidia.com/gpu in limits; `void` hides all GPUs",
)
def nvidia_visible_devices(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        for index, name, value in container.env:
            if name != "NVIDIA_VISIBLE_DEVICES" or value in NO_DEVICES:
                continue
            if not is_node_agent(workload, container):
                yield Violation(f"{name}={value}", workload.at(*container.where, "env", index))


@rule(
    "mig-several",
    "warning",
    Workload,
    title="A container has one MIG device",
    reason="a CUDA process uses only the first MIG device that it sees: the others are idle, unless each has "
    "its own process",
    source="docs.nvidia.com/datacenter/tesla/mig-user-guide, CUDA Device Enumeration",
    fix="one container or pod per MIG device, or one device of a larger profile; where a container starts a "
    "process per device, each with CUDA_VISIBLE_DEVICES=<UUID>, skip the rule by its annotation",
)
def mig_several(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        amounts = {
            key: number
            for key, value in container.limits.items()
            if key.startswith("nvidia.com/mig-") and (number := quantity(value)) is not None
        }
        if sum(amounts.values()) >= 2:
            listed = ", ".join(f"{key}: {number}" for key, number in amounts.items())
            yield Violation(listed, workload.at(*container.where, "resources", "limits", next(iter(amounts))))


@rule(
    "gpu-privileged",
    "warning",
    Workload,
    title="A container with GPUs is not privileged",
    reason="a privileged container sees every GPU of the node, not only those that it was given",
    source="NVIDIA/k8s-device-plugin:README.md",
    fix="remove privileged; for profiling use capabilities: {add: [SYS_ADMIN]}",
)
def gpu_privileged(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        privileged = mapping(container.spec.get("securityContext")).get("privileged")
        if privileged is True and container.gpu_keys:
            path = workload.at(*container.where, "securityContext", "privileged")
            yield Violation(f"{container.name} asks for {container.gpu_keys[0]} and is privileged", path)


@rule(
    "gpu-host-path",
    "error",
    Workload,
    title="GPUs are not mounted by hostPath",
    reason="the scheduler does not know that the GPU is used and gives it to another pod; mounted libraries "
    "of the node break with its next driver",
    source="kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus; NVIDIA/nvidia-container-toolkit",
    fix="request nvidia.com/gpu in limits; the container toolkit adds device files and libraries",
)
def gpu_host_path(workload: Workload, _: Context) -> Iterator[Violation]:
    # Agents manage the GPUs of the node, and need its files.
    if all(is_node_agent(workload, container) for container in workload.containers) and workload.containers:
        return
    for index, volume in enumerate(sequence(workload.pod.get("volumes"))):
        path = mapping(mapping(volume).get("hostPath")).get("path")
        if isinstance(path, str) and DEVICE_PATHS.match(path):
            yield Violation(f"hostPath {path}", workload.at("volumes", index))


@rule(
    "runtime-class-without-gpu",
    "warning",
    Workload,
    title="A pod without a GPU does not use NVIDIA's runtime",
    reason="CUDA images set NVIDIA_VISIBLE_DEVICES=all: with that runtime the pod sees every GPU of the node "
    "without a request",
    source="NVIDIA/k8s-device-plugin:README.md",
    fix="request nvidia.com/gpu in limits, or remove runtimeClassName",
    fragments=False,
)
def runtime_class_without_gpu(workload: Workload, _: Context) -> Iterator[Violation]:
    name = workload.pod.get("runtimeClassName")
    agents = workload.containers and all(
        is_node_agent(workload, container) for container in workload.containers
    )
    # A claim may be for a GPU, by NVIDIA's DRA driver.
    asks = workload.wants_gpus or workload.pod.get("resourceClaims")
    if isinstance(name, str) and name.startswith("nvidia") and not asks and not agents:
        yield Violation(f"runtimeClassName {name}, and no GPU is requested", workload.at("runtimeClassName"))
