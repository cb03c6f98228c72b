"""What a region answered when it was asked: a document for each cloud and region, below $GPUKILN_HOME/offers.

Each part has the day of its answer, and keeps it until the region answers again: a part that could not be
asked for stays what it was, and as old. (SkyPilot 0.14 touches the files of its catalogue when a refresh
fails: old prices look new.)
"""

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gpukiln.errors import BusyError, UsageError
from gpukiln.files import write_atomic
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump, load, strict

# Another number refuses files of this version, with the command that writes them anew.
SCHEMA = 1
LOCK_S = 10.0  # writing takes milliseconds


@strict
class TypeDescription:
    """An instance type with an accelerator, as DescribeInstanceTypes gives it; fields as in the catalogue.

    Args:
        accelerator: The API's name of it, for example "RTX PRO Server 6000".
        max_pods: None where the answer says nothing of network cards.
    """

    manufacturer: str
    accelerator: str
    gpus: int
    gpu_fraction: float
    gpu_memory_mib: int
    vcpu: int
    memory_mib: int
    arch: Literal["x86_64", "arm64"]
    hypervisor: Literal["nitro", "xen", "none"]
    efa: int
    local_nvme_gb: int
    max_pods: int | None
    on_demand: bool
    spot: bool
    capacity_blocks: bool


@strict
class TypeList:
    """Every type with an accelerator that a region knows, by name."""

    as_of: date
    source: str
    types: dict[str, TypeDescription]


@strict
class ZoneOfferings:
    """The names of the zones that offer a type, of each that was asked for; none where no zone does."""

    as_of: date
    source: str
    zones: dict[str, tuple[str, ...]]


@strict
class HourlyPrices:
    """USD an hour by type."""

    as_of: date
    source: str
    usd_hour: dict[str, Decimal]


@strict
class ZonePrice:
    """A spot price of seven days until it was asked for; `mean` weighs each price by how long it held."""

    now: Decimal
    low: Decimal
    mean: Decimal
    high: Decimal


@strict
class SpotHistory:
    """Spot prices by type, of each that was asked for, and by name of the zone."""

    as_of: date
    source: str
    zones: dict[str, dict[str, ZonePrice]]


@strict
class UnitPrice:
    """USD of one thing."""

    as_of: date
    source: str
    usd: Decimal


@strict
class Quotas:
    """The account's quotas in virtual CPUs, by code."""

    as_of: date
    source: str
    vcpus: dict[str, int]


@strict
class CachedRegion:
    """What one region of one cloud answered; a part is None where it never did.

    Args:
        volume: Of a GB-month of gp3.
        public_ipv4: Of an hour of an address.
    """

    cloud: str
    region: str
    schema: int = SCHEMA
    types: TypeList | None = None
    offerings: ZoneOfferings | None = None
    on_demand: HourlyPrices | None = None
    spot: SpotHistory | None = None
    volume: UnitPrice | None = None
    public_ipv4: UnitPrice | None = None
    quotas: Quotas | None = None


def path(cloud: str, region: str) -> Path:
    """The file of a document."""
    return state_home() / "offers" / cloud / f"{region}.json"


def read(cloud: str, region: str) -> CachedRegion:
    """What a region answered; without any part where it was never asked.

    Raises:
        UsageError: The file is damaged.
    """
    file = path(cloud, region)
    try:
        # Inode and time are the cache key below: another process may have replaced the file.
        about = file.stat()
    except FileNotFoundError:
        return CachedRegion(cloud, region)
    return _read_document(file, cloud, region, about.st_ino, about.st_mtime_ns)


def update(cloud: str, region: str, parts: dict[str, Any]) -> CachedRegion:
    """Put answers in the place of older ones.

    Args:
        parts: By field of `CachedRegion`; what is not there stays.

    Returns:
        The document as it stands now.

    Raises:
        BusyError: Another process writes it.
        UsageError: The file that stands is damaged.
    """
    file = path(cloud, region)
    # The first refresh of a cloud creates its folder.
    file.parent.mkdir(parents=True, exist_ok=True)
    busy = BusyError(f"{file} is being written by another process", hint="run the same command again")
    # Read and written under one lock: two refreshes with other parts must not undo each other.
    with locked(file.with_suffix(".lock"), busy=busy, wait_s=LOCK_S):
        document = replace(read(cloud, region), **parts)
        write_atomic(file, json.dumps(dump(document), indent=1) + "\n")
    return document


@lru_cache(maxsize=32)  # a list asks for each type and region, and a file is read once
def _read_document(file: Path, cloud: str, region: str, _inode: int, _mtime_ns: int) -> CachedRegion:
    where, hint = (
        str(file),
        f"remove it, and ask again: `invoke offer.refresh --cloud {cloud} --region {region}`",
    )
    try:
        document = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise UsageError(f"{where} is no JSON: {error}", hint=hint) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{where} has schema {schema}, and this version reads {SCHEMA}", hint=hint)
    region_document = load(CachedRegion, document, where=where, hint=hint)
    # A file that was copied to another name would show prices of another region.
    if (region_document.cloud, region_document.region) != (cloud, region):
        raise UsageError(f"{where} is of {region_document.region} of {region_document.cloud}", hint=hint)
    return region_document
