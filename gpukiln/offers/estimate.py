"""What a machine probably costs where no price is known: for the order of offers, and marked as estimated.

The best that is known, in this order: the price of the same type in another region; that of another size of
its family; and for spot the price on demand, above which no spot instance is charged unless somebody allows
more (EC2 user guide, "Spot Instances": the default maximum price is the on-demand price).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from statistics import median

from gpukiln.catalog.instance_types import InstanceType, instance_types
from gpukiln.catalog.prices import priced_regions
from gpukiln.errors import UsageError
from gpukiln.offers import prices
from gpukiln.offers.model import Figure

DIGITS = Decimal("0.0001")
PriceLookup = Callable[[str, str], Figure | None]  # what is known of a type in a region


def estimate(name: str, region: str, today: date, *, spot: bool = False, cloud: str = "aws") -> Figure | None:
    """What a machine of the catalogue probably costs an hour, with what that is derived from as its source.

    Args:
        spot: Of a spot instance, in the cheapest zone.

    Returns:
        None where nothing of its family is known in any region.
    """

    def on_demand(of: str, where: str) -> Figure | None:
        return prices.on_demand(of, where, today, cloud=cloud)

    def cheapest(of: str, where: str) -> Figure | None:
        figures = [spot_price.now for spot_price in prices.spot(of, where, today, cloud=cloud)]
        return min(figures, key=lambda figure: figure.value, default=None)

    def larger(of: str, than: str) -> Decimal | None:
        """How much dearer one is than the other on demand, which spot prices follow better than vCPUs."""
        price, other = on_demand(of, region), on_demand(than, region)
        return price.value / other.value if price and other else None

    known = cheapest if spot else on_demand
    figure = _from_other_region(name, region, known) or _in_family(name, region, known, larger)
    if figure is None and spot:
        most = on_demand(name, region) or estimate(name, region, today, cloud=cloud)
        return replace(most, source=f"at most the price on demand ({most.source})") if most else None
    return figure


def _from_other_region(name: str, region: str, known: PriceLookup) -> Figure | None:
    """The newest price of the type in another region, at the level of prices of this one."""
    figures: list[tuple[str, Figure]] = []
    for other in priced_regions():
        if other == region:
            continue
        try:
            price = known(name, other)
        except UsageError:  # what that region answered is damaged: it is no reason to refuse this one
            continue
        if price:
            figures.append((other, price))
    if not figures:
        return None
    never = max((price.age_days or 0) for _, price in figures) + 1  # of words: older than what has a day
    there, price = min(figures, key=lambda row: never if row[1].age_days is None else row[1].age_days)
    # A region's list prices differ from another's by nearly the same factor for all types.
    level = _level(name, region, there, known)
    if level == 1:
        return replace(price, source=f"as in {there} ({price.source})")
    value = (price.value * level).quantize(DIGITS)
    return replace(price, value=value, source=f"{level.normalize():f} times {there} ({price.source})")


def _level(name: str, here: str, there: str, known: PriceLookup) -> Decimal:
    """How prices of a region compare with those of another: the median, of the family where it has any."""
    ratios: dict[str, Decimal] = {}
    for other in instance_types():
        if (price_here := known(other, here)) and (price_there := known(other, there)):
            ratios[other] = price_here.value / price_there.value
    family = [ratio for other, ratio in ratios.items() if _family(other) == _family(name)]
    return median(family or list(ratios.values()) or [Decimal(1)]).quantize(DIGITS)


def _in_family(
    name: str, region: str, known: PriceLookup, larger: Callable[[str, str], Decimal | None]
) -> Figure | None:
    """The price of the nearest size of the family: of those with as many GPUs, the nearest in vCPUs."""
    machine = instance_types()[name]
    gpus = machine.gpus * machine.gpu_fraction

    def far(row: tuple[str, InstanceType, Figure]) -> tuple[bool, int, str]:
        other, has, _ = row
        return has.gpus * has.gpu_fraction != gpus, abs(has.vcpu - machine.vcpu), other

    sizes = [
        (other, has, price)
        for other, has in instance_types().items()
        if other != name and _family(other) == _family(name)
        if (price := known(other, region) or _from_other_region(other, region, known))
    ]
    if not sizes:
        return None
    other, has, price = min(sizes, key=far)
    # Prices on demand of two sizes are known more often than their spot prices.
    ratio = larger(name, other)
    value = (price.value * (ratio or Decimal(machine.vcpu) / has.vcpu)).quantize(DIGITS)
    how = "price on demand" if ratio else "vCPU"
    return replace(price, value=value, source=f"by {how} from {other} ({price.source})")


def _family(name: str) -> str:
    return name.partition(".")[0]
