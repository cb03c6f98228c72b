"""Adds the catalogue's instance types that moto lacks to DescribeInstanceTypes and the offerings."""

from typing import Any

from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.instance_types import (
    INSTANCE_TYPE_OFFERINGS,
    INSTANCE_TYPES,
    InstanceType,
    InstanceTypeBackend,
)

from gpukiln.catalog import instance_types as catalog
from gpukiln.catalog.gpu_names import ec2_name
from gpukiln.catalog.gpus import gpu

LOCATIONS = {"region": "region_name", "availability-zone": "name", "availability-zone-id": "zone_id"}


def extend_instance_types() -> None:
    """Add every type that can be launched and that moto lacks. Call once.

    moto's offerings have the zones of a type; a type without offerings is offered in every zone.
    """
    for name, facts in catalog.instance_types().items():
        if facts.status == "retired":
            continue
        if name not in INSTANCE_TYPES:
            INSTANCE_TYPES[name] = describe_type(name, facts)
            InstanceTypeBackend.instance_types.append(InstanceType(name))
        if not any(
            offer["InstanceType"] == name
            for offers in INSTANCE_TYPE_OFFERINGS["region"].values()
            for offer in offers
        ):
            _offer_everywhere(name)


def describe_type(name: str, facts: catalog.InstanceType) -> dict[str, Any]:
    """A type in the form of DescribeInstanceTypes, without the fields that the catalogue does not have."""
    accelerator = gpu(facts.gpu)
    device = {
        "Name": ec2_name(facts.gpu),
        "Manufacturer": accelerator.manufacturer,
        "Count": facts.gpus if facts.gpu_fraction == 1 else 0,  # EC2 counts whole GPUs
        "LogicalGpuCount": facts.gpus,
        "GpuPartitionSize": facts.gpu_fraction,
        "MemoryInfo": {"SizeInMiB": facts.gpu_memory_mib},
    }
    local = {}
    if facts.local_nvme_gb:
        local = {"InstanceStorageInfo": {"TotalSizeInGB": facts.local_nvme_gb, "NvmeSupport": "required"}}
    efa = {"EfaInfo": {"MaximumEfaInterfaces": facts.efa}} if facts.efa else {}
    usage = {"capacity-block": facts.capacity_blocks, "on-demand": facts.on_demand, "spot": facts.spot}
    return {
        "InstanceType": name,
        "CurrentGeneration": facts.status == "current",
        "BareMetal": facts.hypervisor == "none",
        **({"Hypervisor": facts.hypervisor} if facts.hypervisor != "none" else {}),
        "ProcessorInfo": {"SupportedArchitectures": [facts.arch]},
        "VCpuInfo": {"DefaultVCpus": facts.vcpu},
        "MemoryInfo": {"SizeInMiB": facts.memory_mib},
        "GpuInfo": {"Gpus": [device], "TotalGpuMemoryInMiB": facts.gpus * facts.gpu_memory_mib},
        "InstanceStorageSupported": bool(facts.local_nvme_gb),
        **local,
        "NetworkInfo": {"EfaSupported": bool(facts.efa), **efa},
        "SupportedRootDeviceTypes": ["ebs"],
        "SupportedUsageClasses": [name for name, sold in usage.items() if sold],
        "SupportedVirtualizationTypes": ["hvm"],
    }


def _offer_everywhere(name: str) -> None:
    for region, zones in RegionsAndZonesBackend.zones.items():
        for kind, attribute in LOCATIONS.items():
            places = sorted({getattr(zone, attribute) for zone in zones})
            INSTANCE_TYPE_OFFERINGS[kind].setdefault(region, []).extend(
                {"InstanceType": name, "Location": place, "LocationType": kind} for place in places
            )
