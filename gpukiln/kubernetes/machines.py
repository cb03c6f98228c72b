"""An EKS node of each instance type before one exists: its allocatable resources and its labels."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from functools import cache

from gpukiln.catalog.boards import boards, divisions
from gpukiln.catalog.gpu_names import ec2_label, product
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import InstanceType, instance_type, instance_types
from gpukiln.units import MIB

GPU = "nvidia.com/gpu"
# On every node with a GPU, by nodeadm, node pools and feature discovery.
GPU_PRESENT = "nvidia.com/gpu.present"
PRODUCT = "nvidia.com/gpu.product"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ARCHES = {"x86_64": "amd64", "arm64": "arm64"}
# Share of a machine's memory that the hypervisor and the kernel take: Karpenter's assumption before it has
# seen a node of the type (aws/karpenter-provider-aws, VM_MEMORY_OVERHEAD_PERCENT).
MEMORY_OVERHEAD = Decimal("0.075")
EVICTION_THRESHOLD = Decimal(100 * MIB)  # free memory below which the kubelet evicts pods
UNLIMITED = Decimal("Infinity")  # for resources whose size the node group decides, such as the root volume


@cache
def launchable_types() -> dict[str, InstanceType]:
    """Instance types that AWS still launches and that have whole GPUs for NVIDIA's device plugin."""
    return {
        name: machine
        for name, machine in instance_types().items()
        if machine.status != "retired"
        and machine.driver == "datacenter"
        and machine.gpu_fraction == 1
        and gpus()[machine.gpu].manufacturer == "NVIDIA"
    }


def capacity(name: str) -> tuple[Decimal, Decimal]:
    """Cores and bytes of memory of a node, reserved parts included."""
    machine = instance_type(name)
    return Decimal(machine.vcpu), Decimal(int(machine.memory_mib * (1 - MEMORY_OVERHEAD)) * MIB)


def reserved_memory(pods: int) -> Decimal:
    """Bytes of memory that EKS reserves for the kubelet, by the maximum number of pods."""
    return Decimal((11 * pods + 255) * MIB)


@cache
def allocatable(name: str) -> dict[str, Decimal]:
    """Allocatable resources of an EKS node: cores, bytes, counts.

    awslabs/amazon-eks-ami:nodeadm/internal/kubelet/config.go reserves 11 MiB for each pod and 255, evicts at
    100, and keeps 6 % of the first core, 1 % of the second, 0.5 % of the next two and 0.25 % of the others.
    The number of pods is limited by the addresses of the network interfaces (without prefix delegation).

    >>> allocatable("g4dn.xlarge")["cpu"]
    Decimal('3.92')
    """
    machine = instance_type(name)
    cores, (_, memory) = machine.vcpu, capacity(name)
    # Millicores: 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the rest.
    kept = 60 + 10 * (cores > 1) + 5 * max(min(cores, 4) - 2, 0) + Decimal("2.5") * max(cores - 4, 0)
    return {
        "cpu": cores - Decimal(math.ceil(kept)) / 1000,
        "memory": memory - reserved_memory(machine.max_pods) - EVICTION_THRESHOLD,
        "pods": Decimal(machine.max_pods),
        "ephemeral-storage": UNLIMITED,
        GPU: Decimal(machine.gpus),
        "vpc.amazonaws.com/efa": Decimal(machine.efa),
        f"{GPU}.shared": UNLIMITED,  # the plugin's configuration decides how many
        **{f"nvidia.com/mig-{profile}": Decimal(count) for profile, count in mig_instances(machine).items()},
    }


@cache
def labels(name: str) -> dict[str, str]:
    """Labels that kubelet, EKS, Karpenter and feature discovery set on a node of a type.

    Karpenter: aws/karpenter-provider-aws:pkg/providers/instancetype/types.go. Feature discovery:
    NVIDIA/k8s-device-plugin:internal/lm/resource.go.
    """
    machine = instance_type(name)
    board, family, size = boards().get(machine.gpu), *name.split(".", 1)
    category = re.match(r"[a-z]+", family)
    generation = re.search(r"\d+", family)
    arch, capability = ARCHES[machine.arch], (gpus()[machine.gpu].cc or "0.0").split(".")
    return {
        INSTANCE_TYPE: name,
        "beta.kubernetes.io/instance-type": name,
        "kubernetes.io/arch": arch,
        "beta.kubernetes.io/arch": arch,
        "kubernetes.io/os": "linux",
        "beta.kubernetes.io/os": "linux",
        "karpenter.k8s.aws/instance-family": family,
        "karpenter.k8s.aws/instance-category": category[0] if category else "",
        "karpenter.k8s.aws/instance-generation": generation[0] if generation else "",
        "karpenter.k8s.aws/instance-size": size,
        "karpenter.k8s.aws/instance-cpu": str(machine.vcpu),
        "karpenter.k8s.aws/instance-memory": str(machine.memory_mib),
        # Karpenter has an empty value for bare metal.
        "karpenter.k8s.aws/instance-hypervisor": machine.hypervisor if machine.hypervisor != "none" else "",
        "karpenter.k8s.aws/instance-gpu-name": ec2_label(machine.gpu),
        "karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia",
        "karpenter.k8s.aws/instance-gpu-count": str(machine.gpus),
        "karpenter.k8s.aws/instance-gpu-memory": str(machine.gpu_memory_mib),
        "eks.amazonaws.com/instance-gpu-name": ec2_label(machine.gpu),
        "eks.amazonaws.com/instance-gpu-count": str(machine.gpus),
        "eks.amazonaws.com/instance-family": family,
        f"{GPU}.present": "true",
        f"{GPU}.count": str(machine.gpus),
        **(
            {"karpenter.k8s.aws/instance-local-nvme": str(machine.local_nvme_gb)}
            if machine.local_nvme_gb
            else {}
        ),
        **(
            {
                PRODUCT: product(machine.gpu),
                f"{GPU}.memory": str(board.memory_mib),
                f"{GPU}.compute.major": capability[0],
                f"{GPU}.compute.minor": capability[1],
            }
            if board
            else {}
        ),
    }


def is_outside_ec2(label: str) -> bool:
    """Whether a value of the product label may belong to a machine outside EC2.

    NVML's board names begin with NVIDIA- or Tesla-. A short form of an EC2 board, such as NVIDIA-T4 for
    Tesla-T4, is a mistake and no board outside EC2.

    >>> is_outside_ec2("NVIDIA-GeForce-RTX-4090"), is_outside_ec2("NVIDIA-T4")
    (True, False)
    """
    short = {gpus()[machine.gpu].name.replace(" ", "-") for machine in launchable_types().values()}
    # T4 for Tesla-T4, A100 for A100-SXM4-40GB.
    short |= {name.split("-")[0] for name in short}
    bare = label.removeprefix("NVIDIA-").removeprefix("Tesla-")
    known = {product(machine.gpu) for machine in launchable_types().values()}
    return bare != label and bare not in short and label not in known


def mig_instances(machine: InstanceType) -> dict[str, int]:
    """MIG profile, as in the name of the plugin's resource -> how many instances the machine can have."""
    board = boards().get(machine.gpu)
    if not board or not board.mig:
        return {}
    return {row[2].replace("+", "."): machine.gpus * row[7] for row in divisions()[board.mig].profiles}
