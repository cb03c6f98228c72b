"""In which zones EC2 has the types of the catalogue, as far as the shipped data knows.

`python -m gpukiln.catalog.offerings > gpukiln/catalog/data/offerings.yaml` makes it of what the installed
moto ships: answers of DescribeInstanceTypeOfferings, by ids of zones, which mean the same in every account.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import data
from gpukiln.typed import load, strict

ANSWERS = "instance_type_offerings/availability-zone-id"  # a file for each region, in moto
HEAD = """\
---
# Generated: python -m gpukiln.catalog.offerings > gpukiln/catalog/data/offerings.yaml
#
# By region, the ids of the zones that have a type. A family (g5) stands for all that the catalogue has of it.
# What a region does not list is not offered there; `unknown` is what the source has in no region at all.
"""


@strict
class _Offerings:
    as_of: str
    source: str
    unknown: tuple[str, ...]
    regions: dict[str, dict[str, tuple[str, ...]]]


@cache
def _offerings() -> _Offerings:
    return load(_Offerings, data("offerings"), where="offerings.yaml")


def regions() -> frozenset[str]:
    """The regions that the shipped data is about."""
    return frozenset(_offerings().regions)


def zone_ids(instance_type: str, region: str) -> tuple[str, ...] | None:
    """The ids of the zones of a region that have a type.

    Returns:
        Empty where the region does not offer it; None where that is not known.

    >>> zone_ids("g4dn.xlarge", "us-west-2")
    ('usw2-az1', 'usw2-az2', 'usw2-az3')
    >>> zone_ids("g99.xlarge", "us-west-2") is None
    True
    """
    shipped = _offerings()
    # A row of the file may stand for a whole family.
    family = instance_type.partition(".")[0]
    # A type newer than the source is unknown, not missing.
    unknown = instance_type not in instance_types() or {instance_type, family} & set(shipped.unknown)
    if unknown or region not in shipped.regions:
        return None
    listed = shipped.regions[region]
    return listed.get(instance_type, listed.get(family, ()))


def shipped() -> str:
    """The text of offerings.yaml."""
    families: dict[str, list[str]] = {}
    for name, machine in instance_types().items():
        if machine.status != "retired":
            families.setdefault(name.partition(".")[0], []).append(name)
    regions = {region: dict(_grouped(families, zones)) for region, zones in sorted(_answers().items())}
    seen = {name for zones in _answers().values() for name in zones}
    unknown = dict(_grouped(families, {name: ("yes",) for name in instance_types() if name not in seen}))
    release = version("moto")
    lines = [
        f"as_of: an unknown day before moto {release} was released",
        f'source: "DescribeInstanceTypeOfferings as moto {release} ships it: {ANSWERS}"',
        f"unknown: [{', '.join(unknown)}]",
        "regions:",
    ]
    for region, rows in regions.items():
        # An empty region is listed too: it is known to offer none of the types.
        lines.append(f"  {region}:" if rows else f"  {region}: {{}}")
        lines += [f"    {name}: [{', '.join(zones)}]" for name, zones in rows.items()]
    return HEAD + "\n".join(lines) + "\n"


def _answers() -> dict[str, dict[str, tuple[str, ...]]]:
    """Ids of zones by region and type; from moto's files, for the embedded cloud adds to its tables."""
    answers: dict[str, dict[str, tuple[str, ...]]] = {}
    for file in files("moto").joinpath("ec2/resources", ANSWERS).iterdir():
        zones: dict[str, list[str]] = {}
        for row in json.loads(gzip.decompress(file.read_bytes())):
            zones.setdefault(row["InstanceType"], []).append(row["Location"])
        answers[file.name.partition(".")[0]] = {name: tuple(sorted(set(ids))) for name, ids in zones.items()}
    return answers


def _grouped(
    families: dict[str, list[str]], zones: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A row for a family where all of its types agree, else one for each type that is somewhere."""
    for family, names in families.items():
        # A family whose types are in the same zones is one row.
        if len({zones.get(name, ()) for name in names}) == 1:
            if names[0] in zones:
                yield family, zones[names[0]]
        else:
            yield from ((name, zones[name]) for name in names if name in zones)


if __name__ == "__main__":
    sys.stdout.write(shipped())
