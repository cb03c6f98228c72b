"""The catalogue has every type with a GPU that EC2 has, as moto recorded DescribeInstanceTypes."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import pytest

from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import (
    InstanceType,
    every_instance_type,
    excluded_families,
    instance_type,
    instance_types,
)
from gpukiln.clouds.embedded.instance_types import describe_type
from gpukiln.errors import UsageError

OTHER_ACCELERATORS = ("FpgaInfo", "InferenceAcceleratorInfo", "MediaAcceleratorInfo", "NeuronInfo")
# What DescribeInstanceTypes calls a GPU -> what the catalogue calls it; the boards of A100 differ by size.
NAMES = {
    "T4": {"T4"},
    "T4g": {"T4G"},
    "V100": {"V100"},
    "A10G": {"A10G"},
    "A100": {"A100 40GB", "A100 80GB"},
    "L4": {"L4"},
    "L40S": {"L40S"},
    "H100": {"H100 SXM"},
    "H200": {"H200 SXM"},
    "B200": {"B200"},
    "B300": {"B300"},
    "RTX PRO 4500": {"RTX PRO 4500 Blackwell Server"},
    "RTX PRO Server 6000": {"RTX PRO 6000 Blackwell Server"},
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """moto's file, to whose table in memory the embedded cloud adds."""
    text = gzip.decompress(files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes())
    return {name: {"InstanceType": name, **row} for name, row in json.loads(text).items()}


def missing(recorded: Mapping[str, Mapping[str, Any]], known: Mapping[str, InstanceType]) -> Iterator[str]:
    """What EC2 has and the catalogue neither has nor leaves out, and what differs."""
    for name, row in recorded.items():
        if "GpuInfo" in row:
            yield from wrong(name, row, known[name]) if name in known else [f"{name}: not in the catalogue"]
        elif (
            any(kind in row for kind in OTHER_ACCELERATORS)
            and name.partition(".")[0] not in excluded_families()
        ):
            yield f"{name}: neither in the catalogue nor left out"


def wrong(name: str, row: Mapping[str, Any], machine: InstanceType) -> Iterator[str]:
    """What differs between an answer of EC2 and the catalogue; a fraction of a GPU has a Count of 0."""
    [device] = row["GpuInfo"]["Gpus"]
    said = {
        "GPU": gpu(machine.gpu).name in NAMES.get(device["Name"], {device["Name"]}),
        "manufacturer": gpu(machine.gpu).manufacturer == device["Manufacturer"],
        "whole": (machine.gpu_fraction == 1) == (device["Count"] > 0),
    }
    yield from (f"{name}: {what}: {device}" for what, right in said.items() if not right)
    pairs = {
        "GPUs": (device["Count"] or device["LogicalGpuCount"], machine.gpus),
        "fraction": (device["GpuPartitionSize"], machine.gpu_fraction),
        "GPU memory": (device["MemoryInfo"]["SizeInMiB"], machine.gpu_memory_mib),
        "all GPUs' memory": (row["GpuInfo"]["TotalGpuMemoryInMiB"], machine.gpus * machine.gpu_memory_mib),
        "vCPU": (row["VCpuInfo"]["DefaultVCpus"], machine.vcpu),
        "memory": (row["MemoryInfo"]["SizeInMiB"], machine.memory_mib),
        "local storage": (row.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0), machine.local_nvme_gb),
        "EFA": (row["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), machine.efa),
        "architecture": (row["ProcessorInfo"]["SupportedArchitectures"], [machine.arch]),
        "hypervisor": (row.get("Hypervisor", "none"), machine.hypervisor),
        "usage": (sorted(row["SupportedUsageClasses"]), sorted(usage(machine))),
    }
    for what, (theirs, ours) in pairs.items():
        if theirs != ours:
            yield f"{name}: {what}: EC2 has {theirs}, the catalogue {ours}"
    if machine.status == "retired":
        yield f"{name}: EC2 has it, the catalogue says retired"


def usage(machine: InstanceType) -> Iterator[str]:
    if machine.capacity_blocks:
        yield "capacity-block"
    if machine.on_demand:
        yield "on-demand"
    if machine.spot:
        yield "spot"


def test_every_type_with_an_accelerator_is_known_as_ec2_says_it(recorded: dict[str, dict[str, Any]]) -> None:
    assert sum("GpuInfo" in row for row in recorded.values()) >= 65, f"moto {version('moto')} has lost some"
    assert list(missing(recorded, instance_types())) == []


def test_every_living_type_of_the_catalogue_is_one_of_ec2(recorded: dict[str, dict[str, Any]]) -> None:
    living = {name for name, machine in instance_types().items() if machine.status != "retired"}
    assert living <= {name for name, row in recorded.items() if "GpuInfo" in row}


def test_a_type_that_nobody_knows_is_told(recorded: dict[str, dict[str, Any]]) -> None:
    invented = {"g9.xlarge": recorded["g6.xlarge"], "trn9.3xlarge": recorded["trn2.3xlarge"]}
    assert list(missing(invented, instance_types())) == [
        "g9.xlarge: not in the catalogue",
        "trn9.3xlarge: neither in the catalogue nor left out",
    ]


@pytest.mark.parametrize(
    ("name", "path", "value", "told"),
    [
        ("g6.xlarge", "VCpuInfo DefaultVCpus", 6, "vCPU: EC2 has 6, the catalogue 4"),
        ("g6.xlarge", "MemoryInfo SizeInMiB", 1, "memory: EC2 has 1, the catalogue 16384"),
        ("g6.xlarge", "InstanceStorageInfo TotalSizeInGB", 251, "local storage: EC2 has 251"),
        ("g6.xlarge", "ProcessorInfo SupportedArchitectures", ["arm64"], "architecture: EC2 has ['arm64']"),
        ("g6.xlarge", "SupportedUsageClasses", ["on-demand"], "usage: EC2 has ['on-demand'], the catalogue"),
        ("g6.xlarge", "GpuInfo Gpus 0 Name", "L5", "GPU: {"),
        ("g6.xlarge", "GpuInfo Gpus 0 MemoryInfo SizeInMiB", 24576, "GPU memory: EC2 has 24576"),
        ("g6.xlarge", "GpuInfo Gpus 0 Count", 2, "GPUs: EC2 has 2, the catalogue 1"),
        ("g6f.large", "GpuInfo Gpus 0 GpuPartitionSize", 0.25, "fraction: EC2 has 0.25, the catalogue 0.125"),
        ("p5.4xlarge", "NetworkInfo EfaInfo MaximumEfaInterfaces", 2, "EFA: EC2 has 2, the catalogue 1"),
    ],
)
def test_a_size_that_changed_is_told(
    recorded: dict[str, dict[str, Any]], name: str, path: str, value: object, told: str
) -> None:
    row = json.loads(json.dumps(recorded[name]))
    *way, last = path.split()
    place = row
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    assert told in "\n".join(missing({name: row}, instance_types()))


def test_a_type_that_came_back_is_told(recorded: dict[str, dict[str, Any]]) -> None:
    known = {"g6.xlarge": replace(instance_type("g6.xlarge"), status="retired")}
    assert list(missing({"g6.xlarge": recorded["g6.xlarge"]}, known)) == [
        "g6.xlarge: EC2 has it, the catalogue says retired"
    ]


def test_the_embedded_cloud_describes_a_type_as_ec2_does() -> None:
    living = {name: machine for name, machine in instance_types().items() if machine.status != "retired"}
    for name, machine in living.items():
        row = describe_type(name, machine)
        assert list(wrong(name, row, machine)) == []


def test_what_is_left_out_says_why() -> None:
    with pytest.raises(UsageError, match=r"trn2\.48xlarge is not in the catalogue: no GPU, but AWS's"):
        instance_type("trn2.48xlarge")
    with pytest.raises(UsageError, match=r"p6e-gb200\.36xlarge is not in .* by capacity blocks"):
        instance_type("p6e-gb200.36xlarge")
    with pytest.raises(UsageError, match=r"unknown GPU instance type 'g6\.xlarg'"):
        instance_type("g6.xlarg")
    assert not {name.partition(".")[0] for name in instance_types()} & set(excluded_families())


def test_every_name_of_ec2_in_a_family_of_accelerators_is_known() -> None:
    """botocore's list of names has those that are gone, and those that moto has not seen yet."""
    kinds = ("dl", "f1", "f2", "g2", "g3", "g4", "g5", "g6", "g7", "gr", "inf", "p2", "p3", "p4", "p5", "p6")
    names = {name for name in every_instance_type() if name.startswith((*kinds, "trn", "vt"))}
    unknown = names - set(instance_types())
    assert {name for name in unknown if name.partition(".")[0] not in excluded_families()} == set()


def test_a_retired_type_says_since_when_and_no_other_does() -> None:
    for name, machine in instance_types().items():
        assert bool(machine.retired_since) == (machine.status == "retired"), name
        assert machine.retired_since.startswith(("by ", "between ")) or machine.status != "retired", name


def test_every_gpu_says_what_it_is_sold_as() -> None:
    """Within a tenth of what the API counts, in GiB: a B300 of 288 GB has 268.6."""
    for name, machine in instance_types().items():
        sold = gpu(machine.gpu).memory_gb
        assert sold, name
        if machine.gpu_fraction == 1:
            assert any(abs(machine.gpu_memory_mib / 1024 / gb - 1) < 0.1 for gb in sold), (name, sold)
