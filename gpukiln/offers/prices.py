"""What machines cost, as far as the shipped data knows."""

from datetime import date
from decimal import Decimal

from gpukiln.catalog.prices import machine_price
from gpukiln.offers.model import Figure, SpotPrice


def on_demand(name: str, region: str, today: date) -> Figure | None:
    """USD an hour on demand, with Linux; None where it is not known."""
    found = machine_price(name, region)
    return found and Figure(Decimal(str(found.usd)), "USD/hour", found.source, found.as_of, None, True)


def spot(name: str, region: str, today: date) -> tuple[SpotPrice, ...]:
    """By zone; empty where it is not known."""
    return ()


def offerings(name: str, region: str) -> tuple[str, ...] | None:
    """Where it is offered; None where that is not known."""
    return None
