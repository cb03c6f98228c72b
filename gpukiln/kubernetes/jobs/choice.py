"""Which nodes a job may run on: labels that exist on nodes, and instance types that AWS launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from gpukiln.catalog.boards import boards, divisions
from gpukiln.catalog.gpu_names import ec2_label, is_ambiguous, product
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import InstanceType, instance_type, instance_types
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.kubernetes.check.formats import LABEL_VALUE
from gpukiln.kubernetes.jobs.options import JobOptions
from gpukiln.kubernetes.jobs.values import pairs, texts
from gpukiln.kubernetes.machines import (
    ARCHES,
    INSTANCE_TYPE,
    PRODUCT,
    allocatable,
    launchable_types,
    mig_instances,
)
from gpukiln.offers.request import parse_request
from gpukiln.typed import unknown
from gpukiln.units import Memory, is_whole

SelectBy = Literal["product", "instance-type", "karpenter", "auto-mode"]
Provider = Literal["karpenter", "auto-mode", "managed", "asg", "aks", "gke"]

# aws/karpenter-provider-aws:pkg/providers/instancetype/types.go (name in lower case, memory in MiB);
# docs.aws.amazon.com/eks/latest/userguide/create-node-pool.html for Auto Mode's
GPU_LABELS = {
    "karpenter": "karpenter.k8s.aws/instance-gpu-",
    "auto-mode": "eks.amazonaws.com/instance-gpu-",
}
# Provider -> label and value of its spot nodes; sources: the providers' references for node groups.
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
WEIGHTS = range(1, 101)  # k8s.io/api/core/v1, PreferredSchedulingTerm


def models_of(names: Sequence[str], option: str) -> tuple[str, ...]:
    """Catalogue keys of NVIDIA GPUs; A100 means both boards of that name.

    >>> models_of(["T4", "L4"], "--gpu-model")
    ('t4', 'l4')

    Raises:
        UsageError: A GPU is unknown, or is not an NVIDIA GPU.
    """
    keys_of_models: list[str] = []
    for name in names:
        # T4:2 is the syntax of offers; here --gpus is the number.
        if ":" in name or not (keys := parse_request(name).gpus):
            raise UsageError(
                f"{option} {name!r} is no GPU", hint="for example T4, L4 or A100-80GB; --gpus is the number"
            )
        keys_of_models += keys
    for key in keys_of_models:
        if gpus()[key].manufacturer != "NVIDIA":
            raise UsageError(
                f"{gpus()[key].name} is no NVIDIA GPU, and nvidia.com/gpu offers only these",
                hint="request the resource of the vendor's device plugin",
            )
    return tuple(dict.fromkeys(keys_of_models))


def candidates(models: Sequence[str], count: int, mig: str, arch: str) -> tuple[str, ...]:
    """Instance types with at least `count` GPUs of one of the models, smallest first.

    Args:
        models: Catalogue keys; none: any GPU.
        mig: MIG profile that `count` counts; empty: whole GPUs.
        arch: x86_64 or arm64; empty: either.

    Raises:
        IncompatibleError: No type has them; the message names the nearest type.
    """
    for model in models:
        _require_launchable(model, mig)
    able = {
        name: machine
        for name, machine in launchable_types().items()
        if (not models or machine.gpu in models) and arch in ("", machine.arch)
    }
    fitting = [name for name, machine in able.items() if _gpu_capacity(machine, mig) >= count]
    if fitting:
        return tuple(sorted(fitting, key=lambda name: _size(able[name])))
    named = " or ".join(gpus()[model].name for model in models) or "GPU"
    if not able:
        other = next(iter(ARCHES.keys() - {arch}))
        raise IncompatibleError(f"no instance type with {named} is {arch}", hint=f"--arch {other}")
    # Named in the error, so that the user sees how far the request is off.
    most = max(able, key=lambda name: _gpu_capacity(able[name], mig))
    what = f"{mig} of {named}" if mig else named
    raise IncompatibleError(
        f"no instance type has {count} {what}: {most} has the most, {_gpu_capacity(able[most], mig)}",
        hint="use fewer --gpus; --nodes N runs several pods that can reach each other",
    )


def named_types(names: Sequence[str], models: Sequence[str], count: int, mig: str) -> tuple[str, ...]:
    """The named instance types; each of them must fit.

    Raises:
        UsageError: A type is unknown.
        IncompatibleError: A type does not have the GPUs.
    """
    for name in names:
        machine = instance_type(name)
        if name not in launchable_types():
            why = "is retired" if machine.status == "retired" else "has no whole NVIDIA GPU"
            raise IncompatibleError(
                f"{name} {why}", hint=f"instead: {', '.join(machine.alternatives) or 'see offer.list'}"
            )
        if models and machine.gpu not in models:
            raise IncompatibleError(
                f"{name} has {gpus()[machine.gpu].name}, wanted {', '.join(gpus()[m].name for m in models)}",
                hint="change --instance-type or --gpu-model",
            )
        if _gpu_capacity(machine, mig) < count:
            raise IncompatibleError(
                f"{name} has {_gpu_capacity(machine, mig)} {mig or gpus()[machine.gpu].name}, wanted {count}",
                hint="use a larger type, or fewer --gpus",
            )
    return tuple(dict.fromkeys(names))


def types_with_capacity(types: Sequence[str], cpu: Decimal, memory: Decimal) -> tuple[str, ...]:
    """The instance types whose nodes have enough allocatable CPUs and memory (in bytes) for a pod.

    DaemonSets of the cluster need more; they are unknown here.

    Raises:
        IncompatibleError: No type has enough.
    """
    fitting = tuple(name for name in types if cpu <= _cores(name) and memory <= _memory(name))
    if types and not fitting:
        most = max(types, key=lambda name: (_cores(name), _memory(name)))
        raise IncompatibleError(
            f"no such machine has {cpu.normalize():f} CPUs and {Memory(memory).shown} for a pod: a node of "
            f"{most} has {_cores(most)} CPUs and {Memory(_memory(most)).shown} for its pods",
            hint="use less --cpu or --memory, or other GPUs",
        )
    return fitting


def check_mig(profile: str, models: Sequence[str]) -> None:
    """Refuse a MIG profile that no GPU has, or that one of the models does not have.

    Raises:
        UsageError: No GPU has the profile.
        IncompatibleError: A model does not have it.
    """
    every = {row[2] for division in divisions().values() for row in division.profiles}
    if profile not in every:
        raise unknown("MIG profile", profile, every)
    for model in models:
        if profile not in (own := _profiles(model)):
            raise IncompatibleError(
                f"{gpus()[model].name} has no MIG profile {profile}",
                hint=f"it has {', '.join(own)}" if own else "it does not support MIG",
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
    """Node affinity expressions; none if any node with GPUs is accepted.

    Args:
        types: Candidates; those with one of the models are used.
        products: Values of the product label from --product.
        shared: Whether GPUs that are shared by time slicing or MPS are accepted.
    """
    # A product label that the catalogue lacks, for nodes outside EC2: there is no type to compare with.
    if products:
        return [_in_expression(PRODUCT, products)]
    if select_by == "instance-type":
        mine = [name for name in types if not models or instance_type(name).gpu in models]
        return [_in_expression(INSTANCE_TYPE, mine)]
    if not models:
        return []
    if select_by == "product":
        return [_product(models, mig, shared=shared)]
    begin = GPU_LABELS[select_by]
    terms = [_in_expression(f"{begin}name", [ec2_label(model) for model in models])]
    # Two boards have the same name at EC2; their memory differs.
    if any(is_ambiguous(model) for model in models):
        memory = {instance_type(name).gpu_memory_mib for name in types if instance_type(name).gpu in models}
        terms.append(_in_expression(f"{begin}memory", [str(mib) for mib in sorted(memory)]))
    return terms


def _product(models: Sequence[str], mig: str, *, shared: bool) -> Expression:
    """The product label of feature discovery, which depends on how the GPU is divided or shared.

    NVIDIA/k8s-device-plugin:internal/lm/resource.go. Shared GPUs have another value, so that a pod which
    selects a whole GPU never gets a share of one.
    """
    names = []
    for model in models:
        if not (name := product(model)):
            raise UsageError(
                f"the product label of {gpus()[model].name} is unknown",
                hint=f"use --product with the label of your nodes: `kubectl get nodes -L {PRODUCT}`",
            )
        names.append(name)
    if mig:
        # 1g.10gb+me: a + is not allowed in names of resources and in keys of labels.
        part = mig.replace("+", ".")
        return _in_expression(f"nvidia.com/mig-{part}.product", [f"{name}-MIG-{part}" for name in names])
    return _in_expression(PRODUCT, [*names, *(f"{name}-SHARED" for name in names if shared)])


def unused_gpus(types: Sequence[str], count: int) -> tuple[str, int]:
    """The first instance type, and how many of its GPUs a pod does not use."""
    first = types[0]
    return first, instance_type(first).gpus - count


def arch_of(models: Sequence[str], types: Sequence[str]) -> str:
    """The architecture of machines with the models: arm64 only if no x86 machine has them."""
    arches = {instance_type(name).arch for name in types} if models else {"x86_64"}
    return "arm64" if arches == {"arm64"} else "x86_64"


def check_choice(option: str, value: str, kind: Any) -> None:
    if value not in get_args(kind):
        raise unknown(option, value, [choice for choice in get_args(kind) if choice])


@dataclass(frozen=True)
class MachineChoice:
    """The nodes of a job; the fields are those of `GpuJob`."""

    models: tuple[str, ...]
    products: tuple[str, ...]
    prefer: tuple[tuple[str, int], ...]
    select_by: SelectBy
    types: tuple[str, ...]
    arch: str


def choose_machines(options: JobOptions, cpu: Decimal, memory: Decimal) -> MachineChoice:
    """The nodes that can run a job.

    Args:
        cpu: Cores of a pod.
        memory: Bytes of a pod.

    Raises:
        UsageError: An option is wrong, or options exclude each other.
        IncompatibleError: No machine can run it.
    """
    models = models_of(texts(options.gpu_model), "--gpu-model")
    products, named = texts(options.product), texts(options.instance_type)
    by: Any = options.select_by or ("instance-type" if named else "product")
    check_choice("--select-by", by, SelectBy)
    _check_exclusions(options, by)
    prefer = _weights(options, models)
    arch = options.arch
    if arch and arch not in ARCHES:
        raise UsageError(f"--arch {arch!r}", hint=f"wanted: {' or '.join(ARCHES)}")
    if options.mig:
        check_mig(options.mig, models)
    types: tuple[str, ...] = ()
    if named:
        types = named_types(named, models, options.gpus, options.mig)
        for name in types:  # one by one: each named type must be large enough, not just one of them
            types_with_capacity([name], cpu, memory)
    elif not products:
        types = candidates(models, options.gpus, options.mig, arch)
    arch = arch or arch_of(models or named, types)
    matching = tuple(name for name in types if instance_type(name).arch == arch)
    if named and not matching:
        raise UsageError(f"--instance-type {', '.join(named)} and --arch {arch} exclude each other")
    types = types_with_capacity(matching, cpu, memory)
    existing = {instance_type(name).gpu for name in types}
    for model, _ in prefer:
        if model not in existing:
            raise IncompatibleError(
                f"--prefer {model}: none of the machines that can run it has {options.gpus} of that GPU",
                hint=f"they have {', '.join(sorted(existing))}",
            )
    return MachineChoice(models, products, prefer, by, types, arch)


def _check_exclusions(options: JobOptions, by: str) -> None:
    products = texts(options.product)
    for value, other, first, second in (
        (products, options.gpu_model, "--product", "--gpu-model"),
        (products, options.instance_type, "--product", "--instance-type"),
        (products, options.mig, "--product", "--mig"),
        (products, options.shared, "--product", "--shared"),
        (options.mig, options.shared, "--mig", "--shared"),
        (products, by != "product", "--product", f"--select-by {by}"),
        (options.instance_type, by != "instance-type", "--instance-type", f"--select-by {by}"),
    ):
        if value and other:
            raise UsageError(f"{first} and {second} exclude each other", hint="remove one of them")
    for label in products:
        if not LABEL_VALUE.fullmatch(label):
            raise UsageError(
                f"--product {label!r} is no value of a label",
                hint=f"did you mean {label.replace(' ', '-')}?" if " " in label else "such as Tesla-T4",
            )


def _weights(options: JobOptions, models: Sequence[str]) -> tuple[tuple[str, int], ...]:
    weights: dict[str, int] = {}
    for name, weight in pairs(options.prefer, "--prefer", "L4=80"):
        if options.product:
            raise UsageError("--prefer and --product exclude each other", hint="--gpu-model names models")
        if not is_whole(str(weight)) or int(weight) not in WEIGHTS:
            raise UsageError(f"--prefer {name}={weight}: {weight!r} is no weight", hint="wanted: 1 to 100")
        for key in models_of([name], "--prefer"):
            if models and key not in models:
                raise UsageError(
                    f"--prefer {name}: --gpu-model excludes it", hint=f"add {name} to --gpu-model"
                )
            weights[key] = int(weight)
    return tuple(weights.items())


def _in_expression(key: str, values: Sequence[str]) -> Expression:
    return {"key": key, "operator": "In", "values": list(dict.fromkeys(values))}


def _cores(name: str) -> Decimal:
    return allocatable(name)["cpu"]


def _memory(name: str) -> Decimal:
    return allocatable(name)["memory"]


def _require_launchable(model: str, mig: str) -> None:
    if mig:
        check_mig(mig, [model])
    if any(machine.gpu == model for machine in launchable_types().values()):
        return
    retired = [name for name, machine in instance_types().items() if machine.gpu == model]
    if not retired:
        raise IncompatibleError(
            f"no instance type of EC2 has {gpus()[model].name}",
            hint=f"for nodes outside EC2, use --product with the value of their label {PRODUCT}",
        )
    instead = next(
        (machine.alternatives for machine in map(instance_type, retired) if machine.alternatives), ()
    )
    raise IncompatibleError(
        f"EC2 launches no machine with {gpus()[model].name} any more: {', '.join(retired)} are retired",
        hint=f"instead: {', '.join(instead)}" if instead else "`invoke offer.list` shows the available types",
    )


def _profiles(model: str) -> list[str]:
    board = boards().get(model)
    return [row[2] for row in divisions()[board.mig].profiles] if board and board.mig else []


def _gpu_capacity(machine: InstanceType, mig: str) -> int:
    """GPUs of a machine, or instances of a MIG profile that fit on it at once."""
    return mig_instances(machine).get(mig.replace("+", "."), 0) if mig else machine.gpus


def _size(machine: InstanceType) -> tuple[int, int, int]:
    return machine.gpus, machine.vcpu, machine.memory_mib
