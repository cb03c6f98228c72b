"""EC2 instance types with an accelerator."""

from collections.abc import Iterable
from functools import cache
from typing import Literal

from gpukiln.catalog.load import data
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict, unknown


@strict
class InstanceType:
    """An EC2 instance type with an accelerator.

    Args:
        gpu: Key of the GPU in `gpus`.
        gpus: How many GPUs, or fractions of one where gpu_fraction is below 1.
        gpu_memory_mib: Memory of one GPU or fraction, in MiB, as the EC2 API says it.
        vcpu: Virtual CPUs.
        memory_mib: Main memory in MiB.
        max_pods: How many pods its network interfaces allow.
        gpu_fraction: Part of a GPU that one of them is.
        hypervisor: nitro, xen, or none on bare metal.
        interconnect: How its GPUs are linked; nvswitch needs the fabric manager.
        efa: Largest number of EFA interfaces.
        local_nvme_gb: Local storage in GB.
        driver: datacenter, or grid for a vGPU guest that only NVIDIA's GRID driver can drive.
        status: current, previous (launchable, older generation) or retired (gone from the API).
        retired_since: When, as far as known: `by 2025-10-31`, or `between` two days.
        on_demand: Whether it can be had on demand; spot: as spot; capacity_blocks: by a capacity block.
        alternatives: What to take instead, best first.
    """

    gpu: str
    gpus: int
    gpu_memory_mib: int
    vcpu: int
    memory_mib: int
    max_pods: int
    # g6f and gr6f: a vGPU of an eighth, a quarter or half of an L4.
    gpu_fraction: float = 1.0
    arch: Literal["x86_64", "arm64"] = "x86_64"
    hypervisor: Literal["nitro", "xen", "none"] = "nitro"
    interconnect: Literal["none", "nvlink", "nvswitch"] = "none"
    efa: int = 0
    # GB, as EC2's InstanceStorageInfo counts, not GiB.
    local_nvme_gb: int = 0
    driver: Literal["datacenter", "grid"] = "datacenter"
    # Retired types stay: users name them, and the error then names alternatives.
    status: Literal["current", "previous", "retired"] = "current"
    retired_since: str = ""
    on_demand: bool = True
    spot: bool = True
    capacity_blocks: bool = False
    alternatives: tuple[str, ...] = ()


@cache
def instance_types() -> dict[str, InstanceType]:
    """Every instance type of the catalogue by its name."""
    return load(dict[str, InstanceType], data("gpu_instances")["instance_types"], where="gpu_instances.yaml")


def instance_type(name: str) -> InstanceType:
    """One instance type.

    Args:
        name: For example g5.xlarge.

    Returns:
        Its facts.

    Raises:
        UsageError: The catalogue does not know it; says which are near, or why it was left out.
    """
    if known_type := instance_types().get(name):
        return known_type
    # Explained before a suggestion of similar names: trn1 is no typo of t1.
    if reason := excluded_families().get(name.partition(".")[0]):
        raise UsageError(
            f"{name} is not in the catalogue: {reason}", hint="`invoke offer.list` shows what there is"
        )
    raise unknown("GPU instance type", name, instance_types())


@cache
def excluded_families() -> dict[str, str]:
    """Families of EC2 with an accelerator that the catalogue leaves out, such as trn2, and why."""
    return load(dict[str, str], data("gpu_instances")["left_out"], where="gpu_instances.yaml: left_out")


@cache
def every_instance_type() -> frozenset[str]:
    """The names of all that EC2 has, with a GPU and without, as this botocore's model of it lists them."""
    from botocore.loaders import create_loader  # noqa: PLC0415 - slow to import, and rarely needed

    model = create_loader().load_service_model("ec2", "service-2")
    return frozenset(model["shapes"]["InstanceType"]["enum"]) | set(instance_types())


def gpus_of(names: Iterable[str]) -> tuple[list[str], bool]:
    """What the machines have that an image is for.

    Args:
        names: Instance types.

    Returns:
        The models of their GPUs, sorted, and whether any of them links its GPUs with NVSwitch.

    Raises:
        UsageError: The catalogue does not know one.

    >>> gpus_of(["p5.48xlarge", "g5.xlarge"])
    (['a10g', 'h100'], True)
    >>> gpus_of(["g4dn.xlarge"])
    (['t4'], False)
    """
    machines = [instance_type(name) for name in names]
    # Such machines need the fabric manager, which an image must then contain.
    switched = any(machine.interconnect == "nvswitch" for machine in machines)
    return sorted({machine.gpu for machine in machines}), switched
