"""What machines and what belongs to them cost: as the region last said, or the shipped data if that is newer.

No number is made newer than it is: each has the day that it was asked for, and is stale when it is older than
such numbers last. Only `gpukiln.offers.refresh` asks again.
"""

from datetime import date
from decimal import Decimal

from gpukiln.catalog import offerings as shipped
from gpukiln.catalog.prices import DatedPrice, address_price, machine_price, spot_range, volume_price
from gpukiln.offers import cache
from gpukiln.offers.model import Figure, SpotPrice

LIST_DAYS = 30
"""List prices stand for months, and then fall by a third (p4d and p5: prices.yaml); a month is what
a bill is made for."""
SPOT_DAYS = 1
"""EC2 sets spot prices by supply and demand and moves them gradually (EC2 user guide, "Spot Instances"):
yesterday's is near, last week's need not be."""
HOUR, GB_MONTH = "USD/hour", "USD/GB-month"
CHEAPEST, DEAREST = "the cheapest zone", "the dearest zone"
SHARE = Decimal("0.0001")


def on_demand(name: str, region: str, today: date, *, cloud: str = "aws") -> Figure | None:
    """What a machine with Linux costs on demand, in USD/hour; None where it is not known.

    Raises:
        UsageError: The document of the region is damaged; so do all of these functions.
    """
    part = cache.read(cloud, region).on_demand
    asked = None
    if part and name in part.usd_hour:
        asked = DatedPrice(part.usd_hour[name], str(part.as_of), part.source)
    return _newer(asked, machine_price(name, region), HOUR, today)


def volume(region: str, today: date, *, cloud: str = "aws") -> Figure | None:
    """What a GB of a gp3 volume costs in a month, in USD/GB-month; None where it is not known."""
    return _amount(cache.read(cloud, region).volume, volume_price(region), GB_MONTH, today)


def public_ipv4(region: str, today: date, *, cloud: str = "aws") -> Figure | None:
    """What a public IPv4 address costs, in USD/hour; None where it is not known."""
    return _amount(cache.read(cloud, region).public_ipv4, address_price(region), HOUR, today)


def spot(name: str, region: str, today: date, *, cloud: str = "aws") -> tuple[SpotPrice, ...]:
    """What a spot instance costs by zone, the cheapest first; empty where it is not known.

    The shipped data knows the cheapest and the dearest zone of a region and not their names.
    """
    # For the saving: spot prices are read as a share of it.
    dear = on_demand(name, region, today, cloud=cloud)
    part = cache.read(cloud, region).spot
    if part and name in part.zones:
        rows = sorted(part.zones[name].items(), key=lambda row: (row[1].now, row[0]))
        last = {zone: DatedPrice(row.now, str(part.as_of), part.source) for zone, row in rows}
        return tuple(_spot(zone, last[zone], today, dear, row.low, row.mean, row.high) for zone, row in rows)
    if not (ends := spot_range(name, region)):
        return ()
    cheapest, dearest = ends
    # One row where both ends are equal: the region may have one zone with the type.
    rows_shipped = [(CHEAPEST, cheapest)] + [(DEAREST, dearest)] * (dearest.usd != cheapest.usd)
    return tuple(_spot(zone, price, today, dear) for zone, price in rows_shipped)


def offerings(name: str, region: str, *, cloud: str = "aws") -> tuple[str, ...] | None:
    """The zones that offer a type: names where the region was asked, ids as shipped.

    Returns:
        None where it is not known.
    """
    part = cache.read(cloud, region).offerings
    if part and name in part.zones:
        return part.zones[name]
    return shipped.zone_ids(name, region)


def _spot(
    zone: str,
    price: DatedPrice,
    today: date,
    dear: Figure | None,
    low: Decimal | None = None,
    mean: Decimal | None = None,
    high: Decimal | None = None,
) -> SpotPrice:
    saving = (1 - price.usd / dear.value).quantize(SHARE) if dear else None
    return SpotPrice(zone, _figure(price, HOUR, SPOT_DAYS, today), low, mean, high, saving)


def _amount(part: cache.UnitPrice | None, listed: DatedPrice | None, unit: str, today: date) -> Figure | None:
    asked = DatedPrice(part.usd, str(part.as_of), part.source) if part else None
    return _newer(asked, listed, unit, today)


def _newer(asked: DatedPrice | None, listed: DatedPrice | None, unit: str, today: date) -> Figure | None:
    """The one of the later day; what the region said where the list's day is not known."""
    known = [price for price in (asked, listed) if price]
    if not known:
        return None
    return _figure(max(known, key=lambda price: _day(price) or date.min), unit, LIST_DAYS, today)


def _figure(price: DatedPrice, unit: str, lasts_days: int, today: date) -> Figure:
    day = _day(price)
    age = (today - day).days if day else None
    # Without a day it may be of any age.
    stale = age is None or not 0 <= age <= lasts_days  # of tomorrow: a clock is wrong
    return Figure(price.usd, unit, price.source, price.as_of, age, stale)


def _day(price: DatedPrice) -> date | None:
    try:
        return date.fromisoformat(price.as_of)
    except ValueError:  # words
        return None
