"""What an offer costs in a month: machine, volume and address, each with where its price is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal

from gpukiln.errors import RefusedError
from gpukiln.offers import prices
from gpukiln.offers.model import Figure, Offer

HOURS = 730
"""Hours of a month, as AWS's own calculator counts them: 365 * 24 / 12."""
HOURS_MOST = 31 * 24
CENT = Decimal("0.01")


class OverBudgetError(RefusedError):
    """Everything that satisfies a request costs more than the budget."""


@dataclass(frozen=True)
class Use:
    """How a machine is used.

    Args:
        hours: A month that it runs.
        volume_gb: Of gp3, which is there while it is stopped, too.
        address: Whether it has a public IPv4 address while it runs.
    """

    hours: int = HOURS
    volume_gb: int = 0
    address: bool = True


@dataclass(frozen=True)
class Item:
    """One thing that is paid for.

    Args:
        name: machine, volume, address.
        usd: A month; None where its price is not known.
        how: How it was computed, in words.
        price: Null where none is known.
    """

    name: str
    usd: Decimal | None
    how: str
    price: Figure | None


@dataclass(frozen=True)
class Month:
    """What an offer costs in a month.

    Args:
        usd: Of all items; None where the price of one is not known.
    """

    usd: Decimal | None
    items: tuple[Item, ...]


def month(offer: Offer, use: Use, today: date, *, cloud: str = "aws") -> Month:
    """What an offer costs in a month. What leaves AWS's network, and snapshots, are not in it."""
    items = [_item("machine", offer.price, Decimal(use.hours), f"{use.hours} hours, {offer.market}")]
    if use.volume_gb:
        price = prices.volume(offer.region, today, cloud=cloud)
        items.append(_item("volume", price, Decimal(use.volume_gb), f"{use.volume_gb} GB of gp3"))
    if use.address:
        price = prices.public_ipv4(offer.region, today, cloud=cloud)
        items.append(
            _item("address", price, Decimal(use.hours), f"{use.hours} hours of a public IPv4 address")
        )
    known = [one.usd for one in items if one.usd is not None]
    return Month(sum(known, Decimal(0)) if len(known) == len(items) else None, tuple(items))


def _item(name: str, price: Figure | None, amount: Decimal, how: str) -> Item:
    if price is None:
        return Item(name, None, f"{how}: no price is known", None)
    usd = (price.value * amount).quantize(CENT, ROUND_HALF_UP)
    return Item(name, usd, f"{how} at {price.value} {price.unit}", price)


def within(budget: Decimal, offers: Sequence[tuple[Offer, Month]]) -> tuple[tuple[Offer, Month], ...]:
    """The offers that cost no more than a budget a month.

    Raises:
        OverBudgetError: None of them does; names the cheapest.
    """
    fitting = tuple(row for row in offers if row[1].usd is not None and row[1].usd <= budget)
    if offers and not fitting:
        known = [(row[1].usd, row[0]) for row in offers if row[1].usd is not None]
        usd, cheapest = min(known, key=lambda row: row[0], default=(None, None))
        least = (
            f"the cheapest, {cheapest.instance_type} in {cheapest.region}, costs {usd}"
            if cheapest
            else "no price is known"
        )
        raise OverBudgetError(
            f"no machine costs at most {budget} USD a month: {least}",
            hint="--hours says how long it runs a month, --spot auto takes spot prices, too",
        )
    return fitting
