"""What device plugins, kubelets and programs say when a GPU does not work, and what is behind it.

The first pattern that matches counts. The words are those of k8s-device-plugin (cmd/nvidia-device-plugin,
internal/rm, internal/plugin), kubelet and containerd, libnvidia-container, CUDA, PyTorch and NCCL.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Symptom(NamedTuple):
    """A pattern in what something says.

    Args:
        rule: What the finding is called.
    """

    pattern: str
    rule: str
    cause: str
    fix: str


def symptom_in(text: str, table: tuple[Symptom, ...]) -> tuple[Symptom, str] | None:
    """The first symptom of a text that is known, and the last line that shows it."""
    for one in table:
        lines = [line for line in text.splitlines() if re.search(one.pattern, line)]
        if lines:
            return one, lines[-1]
    return None


DRIVER_TOO_OLD = Symptom(
    r"(?i)CUDA driver version is insufficient|unsatisfied condition: cuda|"
    r"forward compatibility was attempted|The NVIDIA driver on your system is too old",
    "driver-too-old",
    "the image was built with a newer CUDA than the node's driver runs",
    "an image with an older CUDA, or nodes with a newer driver: `invoke docker.check` compares them",
)

PLUGIN = (
    Symptom(
        r"(?i)could not load NVML|libnvidia-ml\.so\.1|ERROR_LIBRARY_NOT_FOUND|No valid resources detected|"
        r"Incompatible (platform|strategy) detected",
        "device-plugin-no-driver",
        "no driver reaches the plugin's container: nvidia is not the default runtime there, the pod names "
        "no runtimeClassName, or the node has no driver",
        "make nvidia containerd's default runtime or set runtimeClassName: nvidia; `invoke node.doctor` "
        "looks at the node",
    ),
    Symptom(
        r"(?i)(device-plugins/kubelet\.sock|registration\.k8s|could not register device plugin|dial unix).*"
        r"(refused|no such file|deadline|denied|failed)|Could not contact Kubelet",
        "device-plugin-no-kubelet",
        "the plugin does not reach the kubelet's socket: /var/lib/kubelet/device-plugins is not mounted, or "
        "the kubelet has another root folder",
        "mount the folder device-plugins of the kubelet's --root-dir; restart the plugin after the kubelet",
    ),
    Symptom(
        r"(?i)xid",
        "device-plugin-xid",
        "an Xid made the plugin mark a GPU unhealthy, which only its restart undoes",
        "look at the GPU with `invoke node.doctor`; restart the plugin's pod when it is well",
    ),
)

CONTAINER = (
    Symptom(
        r"(?i)CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "gpu-out-of-memory",
        "the model does not fit the GPU's memory; the pod's memory limit has nothing to do with it",
        "a smaller batch, a GPU with more memory or several; `invoke offer.size` computes what it needs",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        r"(?i)Bus error|No space left on device.*shm|unable to (open|allocate|mmap) shared memory|"
        r"NCCL.*(/dev/shm|shared memory)",
        "shm-too-small",
        "the memory that processes share has 64 MiB unless the pod mounts more",
        "mount an emptyDir of medium Memory with a sizeLimit at /dev/shm; `invoke k8s.job --shm SIZE` does",
    ),
    Symptom(
        r"(?i)Failed to initialize NVML: Unknown Error",
        "device-lost",
        "systemd was reloaded on the node and took the device away from the running container",
        "start the pod again; CDI (deviceListStrategy cdi-cri) keeps it from coming back",
    ),
    Symptom(
        r"(?i)nvidia-smi: (command )?not found|lib(cuda|nvidia-ml)\.so\.1: cannot open|"
        r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|"
        r"NVIDIA Driver was not detected",
        "gpu-not-in-container",
        "no GPU came into the container: it asked for none, or the runtime did not inject it",
        "ask for nvidia.com/gpu in limits; set no NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES; where "
        "nvidia is not the default runtime, set runtimeClassName: nvidia",
    ),
)

WAITING = (
    Symptom(
        r"(?i)unauthorized|access denied|denied:|forbidden|no basic auth|authentication required|\b40[13]\b",
        "image-pull-denied",
        "nobody may pull it with what the node or the pod has",
        "imagePullSecrets of the pod; on EKS the node's role needs AmazonEC2ContainerRegistryPullOnly",
    ),
    Symptom(
        r"(?i)no match for platform|exec format error",
        "image-architecture",
        "the image is of another architecture than the node",
        "an image for it, or the selector kubernetes.io/arch",
    ),
    Symptom(
        r"(?i)toomanyrequests|rate limit|\b429\b",
        "image-rate-limit",
        "the registry limits how often it is pulled from",
        "mirror the image into a registry of your own",
    ),
    Symptom(
        r"(?i)no runtime for|runtime handler",
        "no-runtime",
        "the node's containerd has no runtime of the pod's runtimeClassName",
        "install the NVIDIA container toolkit there; where nvidia is the default leave runtimeClassName out",
    ),
    Symptom(
        r"(?i)unresolvable CDI|CDI device injection failed",
        "no-cdi",
        "the node has no CDI specification of the GPU",
        "`nvidia-ctk cdi generate` writes it; the unit nvidia-cdi-refresh does at each boot",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        r"(?i)manifest unknown|: not found|does not exist|name unknown",
        "image-not-there",
        "no such tag: mistyped, deleted after its end of life as CUDA's images are, or pushed elsewhere",
        "name it by digest; `invoke docker.push` prints ours",
    ),
    Symptom(
        r"ErrImagePull|ImagePullBackOff|InvalidImageName",
        "image-pull",
        "the image can't be pulled",
        "`kubectl describe pod` has the registry's words; can the node reach it?",
    ),
)
