"""Which nodes a job may run on: labels that somebody really sets, for GPUs that somebody really sells."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal, get_args

from gpukiln.catalog.boards import boards, divisions
from gpukiln.catalog.gpu_names import ec2_label, is_ambiguous, product
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import InstanceType, instance_type, instance_types
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.kubernetes.machines import ARCHES, INSTANCE_TYPE, PRODUCT, allocatable, mig_instances, sold
from gpukiln.offers.request import parse_request
from gpukiln.typed import unknown
from gpukiln.units import Memory

SelectBy = Literal["product", "instance-type", "karpenter", "auto-mode"]
Provider = Literal["karpenter", "auto-mode", "managed", "asg", "aks", "gke"]

# aws/karpenter-provider-aws:pkg/providers/instancetype/types.go (name in lower case, memory in MiB);
# docs.aws.amazon.com/eks/latest/userguide/create-node-pool.html for Auto Mode's
GPU_LABELS = {
    "karpenter": "karpenter.k8s.aws/instance-gpu-",
    "auto-mode": "eks.amazonaws.com/instance-gpu-",
}
# Label and value of a spot node; who sets them: reference of each provider's node groups.
SPOT: dict[str, tuple[str, str]] = {
    "karpenter": ("karpenter.sh/capacity-type", "spot"),  # karpenter.sh/docs/concepts/nodepools
    "auto-mode": ("karpenter.sh/capacity-type", "spot"),
    "managed": ("eks.amazonaws.com/capacityType", "SPOT"),  # EKS user guide, managed node groups
    "asg": ("node-lifecycle", "spot"),  # eksctl-io/eksctl:pkg/nodebootstrap
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),  # AKS, spot node pools
    "gke": ("cloud.google.com/gke-spot", "true"),  # GKE, spot VMs
}
SPOT_TAINTS = {"aks": {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot"}}

Expression = dict[str, Any]


def models_of(names: Sequence[str], option: str) -> tuple[str, ...]:
    """Keys of NVIDIA's GPUs in the catalogue; A100 is both boards of that name.

    Raises:
        UsageError: The catalogue does not know one, or the device plugin does not serve it.
    """
    found: list[str] = []
    for name in names:
        if ":" in name or not (keys := parse_request(name).gpus):
            raise UsageError(f"{option} {name!r} is no GPU", hint="for example T4, L4, A100-80GB; see --gpus")
        found += keys
    for key in found:
        if gpus()[key].manufacturer != "NVIDIA":
            raise UsageError(
                f"{gpus()[key].name} is no GPU of NVIDIA, which nvidia.com/gpu stands for",
                hint="its maker's plugin has a resource of its own",
            )
    return tuple(dict.fromkeys(found))


def candidates(models: Sequence[str], count: int, mig: str, arch: str) -> tuple[str, ...]:
    """Instance types that have so many of one of the models, smallest first.

    Args:
        models: Keys of the catalogue; none: any.
        mig: A profile of which `count` are wanted; empty: whole GPUs.
        arch: x86_64 or arm64; empty: either.

    Raises:
        IncompatibleError: None has; says what comes nearest.
    """
    for model in models:
        _require_sold(model, mig)
    able = {
        name: machine
        for name, machine in sold().items()
        if (not models or machine.gpu in models) and arch in ("", machine.arch)
    }
    fitting = [name for name, machine in able.items() if _room(machine, mig) >= count]
    if fitting:
        return tuple(sorted(fitting, key=lambda name: _size(able[name])))
    named = " or ".join(gpus()[model].name for model in models) or "GPU"
    if not able:
        other = next(iter(ARCHES.keys() - {arch}))
        raise IncompatibleError(f"no instance type with {named} is {arch}", hint=f"--arch {other}")
    most = max(able, key=lambda name: _room(able[name], mig))
    what = f"{mig} of {named}" if mig else named
    raise IncompatibleError(
        f"no instance type has {count} {what}: the most is {_room(able[most], mig)}, {most}",
        hint="fewer in a pod; --nodes N runs several pods that know each other",
    )


def named_types(names: Sequence[str], models: Sequence[str], count: int, mig: str) -> tuple[str, ...]:
    """Instance types that were named, each of which must do.

    Raises:
        UsageError: The catalogue does not know one.
        IncompatibleError: One has not what is wanted.
    """
    for name in names:
        machine = instance_type(name)
        if name not in sold():
            why = "is retired" if machine.status == "retired" else "has no whole GPU of NVIDIA"
            raise IncompatibleError(
                f"{name} {why}", hint=f"instead: {', '.join(machine.alternatives) or 'see offer.list'}"
            )
        if models and machine.gpu not in models:
            raise IncompatibleError(
                f"{name} has {gpus()[machine.gpu].name}, wanted {', '.join(gpus()[m].name for m in models)}",
                hint="another --instance-type, or another --gpu-model",
            )
        if _room(machine, mig) < count:
            raise IncompatibleError(
                f"{name} has {_room(machine, mig)} {mig or gpus()[machine.gpu].name}, wanted {count}",
                hint="a larger type, or fewer --gpus",
            )
    return tuple(dict.fromkeys(names))


def with_room(types: Sequence[str], cpu: Decimal, memory: Decimal) -> tuple[str, ...]:
    """Those of some instance types whose nodes can give a pod so many CPUs and so much memory, in bytes.

    DaemonSets take more, which only the cluster knows.

    Raises:
        IncompatibleError: None can.
    """
    found = tuple(name for name in types if cpu <= _cores(name) and memory <= _memory(name))
    if types and not found:
        most = max(types, key=lambda name: (_cores(name), _memory(name)))
        raise IncompatibleError(
            f"no such machine has room for {cpu.normalize():f} CPUs and {Memory(memory).shown}: a node of "
            f"{most} has {_cores(most)} CPUs and {Memory(_memory(most)).shown} for its pods",
            hint="less --cpu or --memory, or other GPUs",
        )
    return found


def check_mig(profile: str, models: Sequence[str]) -> None:
    """Refuse a MIG profile that no GPU has, or that the wanted ones don't.

    Raises:
        UsageError: It is none.
        IncompatibleError: A model has it not.
    """
    every = {row[2] for division in divisions().values() for row in division.profiles}
    if profile not in every:
        raise unknown("MIG profile", profile, every)
    for model in models:
        if profile not in (own := _profiles(model)):
            raise IncompatibleError(
                f"{gpus()[model].name} has no MIG profile {profile}",
                hint=f"it has {', '.join(own)}" if own else "it can't be divided by MIG",
            )


def expressions(
    select_by: SelectBy,
    models: Sequence[str],
    types: Sequence[str],
    *,
    products: Sequence[str] = (),
    mig: str = "",
    shared: bool = False,
) -> list[Expression]:
    """What a node's labels must say; none where any node with GPUs will do.

    Args:
        types: Candidates, of which those with one of the models are meant.
        products: Values of the product label that were typed.
        shared: Whether GPUs that are time-sliced or shared by MPS will do, too.
    """
    if products:
        return [_in(PRODUCT, products)]
    if select_by == "instance-type":
        mine = [name for name in types if not models or instance_type(name).gpu in models]
        return [_in(INSTANCE_TYPE, mine)]
    if not models:
        return []
    if select_by == "product":
        return [_product(models, mig, shared=shared)]
    begin = GPU_LABELS[select_by]
    found = [_in(f"{begin}name", [ec2_label(model) for model in models])]
    if any(is_ambiguous(model) for model in models):
        memory = {instance_type(name).gpu_memory_mib for name in types if instance_type(name).gpu in models}
        found.append(_in(f"{begin}memory", [str(mib) for mib in sorted(memory)]))
    return found


def _product(models: Sequence[str], mig: str, *, shared: bool) -> Expression:
    """By feature discovery, and how the GPU is divided or shared.

    NVIDIA/k8s-device-plugin:internal/lm/resource.go. GPUs that are shared bear another value, so that a whole
    GPU is not mistaken for a part of one.
    """
    names = []
    for model in models:
        if not (name := product(model)):
            raise UsageError(
                f"the catalogue does not know what feature discovery calls {gpus()[model].name}",
                hint=f"--product with the label of your nodes: `kubectl get nodes -L {PRODUCT}`",
            )
        names.append(name)
    if mig:
        part = mig.replace("+", ".")
        return _in(f"nvidia.com/mig-{part}.product", [f"{name}-MIG-{part}" for name in names])
    return _in(PRODUCT, [*names, *(f"{name}-SHARED" for name in names if shared)])


def idle(types: Sequence[str], count: int) -> tuple[str, int]:
    """The smallest of some instance types, and how many of its GPUs a pod leaves to others."""
    first = types[0]
    return first, instance_type(first).gpus - count


def arch_of(models: Sequence[str], types: Sequence[str]) -> str:
    """The architecture of the machines that have the models: arm64 where no other has them."""
    found = {instance_type(name).arch for name in types} if models else {"x86_64"}
    return "arm64" if found == {"arm64"} else "x86_64"


def check_choice(option: str, value: str, kind: Any) -> None:
    if value not in get_args(kind):
        raise unknown(option, value, [one for one in get_args(kind) if one])


def _in(key: str, values: Sequence[str]) -> Expression:
    return {"key": key, "operator": "In", "values": list(dict.fromkeys(values))}


def _cores(name: str) -> Decimal:
    return allocatable(name)["cpu"]


def _memory(name: str) -> Decimal:
    return allocatable(name)["memory"]


def _require_sold(model: str, mig: str) -> None:
    if mig:
        check_mig(mig, [model])
    if any(machine.gpu == model for machine in sold().values()):
        return
    retired = [name for name, machine in instance_types().items() if machine.gpu == model]
    if not retired:
        raise IncompatibleError(
            f"no instance type of EC2 has {gpus()[model].name}",
            hint=f"for nodes of your own: --product with the value of their label {PRODUCT}",
        )
    instead = next((one.alternatives for one in map(instance_type, retired) if one.alternatives), ())
    raise IncompatibleError(
        f"nobody sells {gpus()[model].name} any more: {', '.join(retired)} are retired",
        hint=f"instead: {', '.join(instead)}" if instead else "`invoke offer.list` shows what there is",
    )


def _profiles(model: str) -> list[str]:
    board = boards().get(model)
    return [row[2] for row in divisions()[board.mig].profiles] if board and board.mig else []


def _room(machine: InstanceType, mig: str) -> int:
    """GPUs of a machine, or instances of a MIG profile that it can have at once."""
    return mig_instances(machine).get(mig.replace("+", "."), 0) if mig else machine.gpus


def _size(machine: InstanceType) -> tuple[int, int, int]:
    return machine.gpus, machine.vcpu, machine.memory_mib
