"""What AWS asks for machines and what belongs to them: each price with its day and its source."""

from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict


@dataclass(frozen=True)
class DatedPrice:
    """One price.

    Args:
        usd: For an hour of a machine or an address, or a month of one GB.
        as_of: The day it was true, or what is known of it.
        source: Who says so.
    """

    # Decimal from the text of the file: prices have up to ten digits.
    usd: Decimal
    as_of: str
    source: str


@strict
class _Machines:
    region: str
    as_of: str
    source: str
    usd_hour: dict[str, Decimal]


@strict
class _Spot:
    region: str
    as_of: str
    source: str
    usd_hour: dict[str, tuple[Decimal, Decimal]]


@strict
class _Storage:
    region: str
    as_of: str
    source: str
    usd_gb_month: Decimal


@strict
class _Addresses:
    regions: tuple[str, ...]
    as_of: str
    source: str
    usd_hour: Decimal


@strict
class _Prices:
    machines: tuple[_Machines, ...]
    # In the order of the file; of two lists with a region the first one counts.
    snapshots: tuple[_Storage, ...]
    volumes: tuple[_Storage, ...]
    public_ipv4: tuple[_Addresses, ...]
    spot: tuple[_Spot, ...]


@cache
def _prices() -> _Prices:
    return load(_Prices, data("prices"), where="prices.yaml")


@cache
def _machines() -> dict[str, dict[str, DatedPrice]]:
    """By region and type; of two lists that have a type, the first one counts."""
    by_region: dict[str, dict[str, DatedPrice]] = {}
    # The newest list stands first in prices.yaml.
    for listed in _prices().machines:
        of_region = by_region.setdefault(listed.region, {})
        for name, usd in listed.usd_hour.items():
            of_region.setdefault(name, DatedPrice(usd, listed.as_of, listed.source))
    return by_region


def priced_regions() -> tuple[str, ...]:
    """The regions of which the catalogue has prices of machines; the one with the newest is first."""
    # A dict keeps the order of the file.
    return tuple(_machines())


def machine_price(instance_type: str, region: str) -> DatedPrice | None:
    """The price of a machine on demand, with Linux.

    Args:
        instance_type: For example m5.xlarge.

    Returns:
        USD an hour; None where the catalogue has no price.
    """
    return _machines().get(region, {}).get(instance_type)


def spot_range(instance_type: str, region: str) -> tuple[DatedPrice, DatedPrice] | None:
    """The price of a spot instance with Linux in the cheapest zone of a region and in the dearest one.

    Returns:
        USD an hour; None where the catalogue has no price.
    """
    for listed in _prices().spot:
        if listed.region == region and instance_type in listed.usd_hour:
            # The cheapest and the dearest zone, whose names the source does not give.
            ends = listed.usd_hour[instance_type]
            low, high = (DatedPrice(usd, listed.as_of, listed.source) for usd in ends)
            return low, high
    return None


def snapshot_price(region: str) -> DatedPrice | None:
    """The price of a snapshot in the standard tier.

    Returns:
        USD for a month of one GB that was written; None where the catalogue has no price.
    """
    return _storage(_prices().snapshots, region)


def volume_price(region: str) -> DatedPrice | None:
    """The price of a gp3 volume.

    Returns:
        USD for a month of one GB that is provisioned; None where the catalogue has no price.
    """
    return _storage(_prices().volumes, region)


def address_price(region: str) -> DatedPrice | None:
    """The price of a public IPv4 address.

    Returns:
        USD an hour; None where the catalogue has no price.
    """
    # One price for many regions, as AWS's page has it.
    for listed in _prices().public_ipv4:
        if region in listed.regions:
            return DatedPrice(listed.usd_hour, listed.as_of, listed.source)
    return None


def _storage(lists: tuple[_Storage, ...], region: str) -> DatedPrice | None:
    for listed in lists:
        if listed.region == region:
            return DatedPrice(listed.usd_gb_month, listed.as_of, listed.source)
    return None
