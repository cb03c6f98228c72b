"""What machines and snapshots cost on AWS, each price with the day and the source that it is from."""

from dataclasses import dataclass
from functools import cache

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict


@dataclass(frozen=True)
class Price:
    """One price.

    Args:
        usd: For an hour of a machine, or a month of one GB.
        as_of: The day it was true, or what is known of it.
        source: Who says so.
    """

    usd: float
    as_of: str
    source: str


@strict
class _Machines:
    region: str
    as_of: str
    source: str
    usd_hour: dict[str, float]


@strict
class _Snapshots:
    region: str
    as_of: str
    source: str
    usd_gb_month: float


@cache
def _machines() -> list[_Machines]:
    return load(list[_Machines], data("prices")["machines"], where="prices.yaml: machines")


@cache
def _snapshots() -> list[_Snapshots]:
    return load(list[_Snapshots], data("prices")["snapshots"], where="prices.yaml: snapshots")


def machine_price(instance_type: str, region: str) -> Price | None:
    """The price of a machine on demand, with Linux.

    Args:
        instance_type: For example m5.xlarge.

    Returns:
        USD an hour; None where the catalogue has no price.
    """
    for listed in _machines():
        if listed.region == region and instance_type in listed.usd_hour:
            return Price(listed.usd_hour[instance_type], listed.as_of, listed.source)
    return None


def snapshot_price(region: str) -> Price | None:
    """The price of a snapshot in the standard tier.

    Returns:
        USD for a month of one GB that was written; None where the catalogue has no price.
    """
    for listed in _snapshots():
        if listed.region == region:
            return Price(listed.usd_gb_month, listed.as_of, listed.source)
    return None
