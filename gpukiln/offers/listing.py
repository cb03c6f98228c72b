"""What the commands of offers answer: one document each, whatever was asked."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.catalog.compat import Finding
from gpukiln.offers.availability import Place
from gpukiln.offers.cost import Month
from gpukiln.offers.image import Choice
from gpukiln.offers.model import NearMiss, Offer, Request
from gpukiln.offers.size import Size


@dataclass(frozen=True)
class Row:
    """An offer with what it costs and where it can be had.

    Args:
        places: A zone each; empty where no cloud was asked.
        image: What it would run; null where none was asked for.
    """

    offer: Offer
    month: Month
    places: tuple[Place, ...]
    image: Choice | None


@dataclass(frozen=True)
class Refused:
    """A machine that satisfies the request and that image or workload can't use.

    Args:
        findings: Why.
    """

    instance_type: str
    region: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Listing:
    """What offer.list and offer.size print with --json.

    Args:
        asked: The request in words.
        size: What was computed for a model; null where none was named.
        offers: The best first.
        refused: Those that satisfy the request, and that image or workload can't use.
        near: The nearest first.
        notes: What could not be asked, and why.
    """

    schema: str
    asked: str
    request: Request
    regions: tuple[str, ...]
    size: Size | None
    offers: tuple[Row, ...]
    refused: tuple[Refused, ...]
    near: tuple[NearMiss, ...]
    notes: tuple[str, ...]
