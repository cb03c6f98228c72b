"""What an offer costs in a month: machine, volume and address, each with where its price is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal

from gpukiln.errors import RefusedError, UsageError
from gpukiln.offers import prices
from gpukiln.offers.model import Figure, Offer
from gpukiln.units import Memory

HOURS_PER_MONTH = 730
"""Hours of a month, as AWS's own calculator counts them: 365 * 24 / 12."""
# The longest month, for --hours.
MAX_HOURS_PER_MONTH = 31 * 24
# Bills are in cents; prices an hour have more digits.
CENT = Decimal("0.01")


class OverBudgetError(RefusedError):
    """Everything that satisfies a request costs more than the budget."""


@dataclass(frozen=True)
class MachineUsage:
    """How a machine is used.

    Args:
        hours: A month that it runs.
        volume_gb: Of gp3, which is there while it is stopped, too.
        address: Whether it has a public IPv4 address while it runs.
    """

    hours: int = HOURS_PER_MONTH
    volume_gb: int = 0
    address: bool = True

    @classmethod
    def parse(cls, hours: int, volume: str, *, address: bool) -> MachineUsage:
        """The usage from options.

        >>> MachineUsage.parse(730, "100GB", address=True)
        MachineUsage(hours=730, volume_gb=100, address=True)
        >>> MachineUsage.parse(160, "", address=False).volume_gb
        0

        Raises:
            UsageError: A month does not have so many hours, or the volume is no size.
        """
        if not 1 <= hours <= MAX_HOURS_PER_MONTH:
            raise UsageError(f"--hours {hours}, wanted hours of a month", hint=f"1 to {MAX_HOURS_PER_MONTH}")
        gb = Memory.parse(volume, "--volume", zero=True).gb if volume else 0
        return cls(hours, gb, address)


@dataclass(frozen=True)
class CostItem:
    """One thing that is paid for.

    Args:
        name: machine, volume, address.
        usd: A month; None where its price is not known.
        how: How it was computed, in words.
        price: Null where none is known.
        estimate: USD a month where only an estimate of its price is known, else None.
    """

    name: str
    usd: Decimal | None
    how: str
    price: Figure | None
    estimate: Decimal | None = None


@dataclass(frozen=True)
class Month:
    """What an offer costs in a month.

    Args:
        usd: Of all items; None where the price of one is not known.
        estimate: Of all items, with estimates where prices are not known; None where `usd` is known, or there
            is no estimate either.
    """

    usd: Decimal | None
    items: tuple[CostItem, ...]
    estimate: Decimal | None = None


def month(offer: Offer, use: MachineUsage, today: date, *, cloud: str = "aws") -> Month:
    """What an offer costs in a month. What leaves AWS's network, and snapshots, are not in it."""
    hours = f"{use.hours} hours, {offer.market}"
    items = [_item("machine", offer.price, Decimal(use.hours), hours, offer.estimate)]
    if use.volume_gb:
        price = prices.volume(offer.region, today, cloud=cloud)
        items.append(_item("volume", price, Decimal(use.volume_gb), f"{use.volume_gb} GB of gp3"))
    # AWS charges each public IPv4 address in use since 2024-02-01, also of a running instance.
    if use.address:
        price = prices.public_ipv4(offer.region, today, cloud=cloud)
        items.append(
            _item("address", price, Decimal(use.hours), f"{use.hours} hours of a public IPv4 address")
        )
    # The sum is unknown as soon as one item is: a partial sum would look cheaper than it is.
    usd = _sum(item.usd for item in items)
    about = _sum(item.estimate if item.usd is None else item.usd for item in items)
    return Month(usd, tuple(items), about if usd is None else None)


def _sum(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """None where one of them is not known.

    >>> _sum([Decimal(1), Decimal("0.5")])
    Decimal('1.5')
    >>> _sum([Decimal(1), None]) is None
    True
    """
    known = list(amounts)
    return None if None in known else sum((amount for amount in known if amount is not None), Decimal(0))


def _item(
    name: str, price: Figure | None, amount: Decimal, how: str, about: Figure | None = None
) -> CostItem:
    figure = price or about
    if figure is None:
        return CostItem(name, None, f"{how}: no price is known", None)
    usd = (figure.value * amount).quantize(CENT, ROUND_HALF_UP)
    if price is None:
        return CostItem(name, None, f"{how} at about {figure.value} {figure.unit}, estimated", None, usd)
    return CostItem(name, usd, f"{how} at {price.value} {price.unit}", price)


def within_budget(budget: Decimal, offers: Sequence[tuple[Offer, Month]]) -> tuple[tuple[Offer, Month], ...]:
    """The offers that cost no more than a budget a month.

    Raises:
        OverBudgetError: None of them does; names the cheapest.
    """
    # An unknown price is not within a budget: the caller lists these offers in a note.
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
