"""The values of offers: a request, what satisfies it, and what nearly does."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from gpukiln.findings import Finding
from gpukiln.units import Span

Spot = Literal["no", "auto", "only"]


@dataclass(frozen=True)
class Request:
    """What a machine has to have: all of it.

    Args:
        gpus: Keys of GPUs of the catalogue, one of which it has; empty: any.
        count: How many GPUs.
        gpu_memory_mib: Of one GPU, as EC2 and the driver count it; None: any.
        gpu_memory_gb: Of one GPU, as it is sold (an A10G is one of 24 GB and has 22,888 MiB); None: any.
        vcpu: At least.
        memory_mib: At least, of main memory.
        local_gb: At least, of local NVMe.
        efa: At least so many EFA interfaces.
        max_price: USD an hour.
        spot: no: on demand; only: spot; auto: whichever is cheaper.
        fractions: Whether a part of a GPU will do.
    """

    gpus: tuple[str, ...] = ()
    # One GPU or more, so that a request without a count also finds larger machines.
    count: Span = field(default_factory=lambda: Span(1))
    # Two fields, because an A10G that is sold with 24 GB has 22.35 GiB.
    gpu_memory_mib: Span | None = None
    gpu_memory_gb: Span | None = None
    vcpu: int = 0
    memory_mib: int = 0
    local_gb: int = 0
    # Most images, wheels and containers are for x86_64, so arm64 has to be asked for.
    arch: Literal["x86_64", "arm64", "any"] = "x86_64"
    efa: int = 0
    max_price: Decimal | None = None
    spot: Spot = "no"
    fractions: bool = False


@dataclass(frozen=True)
class Figure:
    """A number of money with where it is from.

    Args:
        value: In `unit`.
        unit: For example USD/hour, USD/GB-month.
        source: Who says so.
        as_of: The day it was true, as far as known: YYYY-MM-DD, or words.
        age_days: Since then; None where the day is not known.
        stale: Whether that is longer than such a number lasts, or not known.
    """

    # Decimal: binary floating point would show 0.1 USD as 0.1000000000000000055.
    value: Decimal
    unit: str
    source: str
    # Text: of some shipped prices only a month, or `before 2025`, is known.
    as_of: str
    age_days: int | None
    stale: bool


@dataclass(frozen=True)
class SpotPrice:
    """The price of spot instances of one type in one zone.

    Args:
        zone: Its name, or its id where the source names ids.
        now: The last one that was seen.
        low: The lowest of the last seven days; mean weighs each price by how long it held. None: not known.
        saving: 1 - spot / on demand; None where no price on demand is known.
    """

    zone: str
    now: Figure
    low: Decimal | None
    mean: Decimal | None
    high: Decimal | None
    saving: Decimal | None


@dataclass(frozen=True)
class Offer:
    """A machine that satisfies a request.

    Args:
        gpu: The GPU's name.
        gpus: How many, or how many fractions.
        gpu_fraction: Part of a GPU that one of them is.
        market: on-demand or spot: what `price` is.
        price: The one that counts in the order, an hour; None: not known.
        on_demand: USD an hour; None: not known.
        spot: By zone; empty: not known.
        zones: Where it is offered: names where the region was asked, ids where the shipped data says so;
            None: not known.
        notes: What else to know: previous generation, only by capacity blocks.
        findings: What image and workload have to say of it.
        estimate: What counts in the order where `price` is not known, an hour; its source says what it is
            derived from. None where the price is known, or there is nothing to derive it from.
    """

    instance_type: str
    region: str
    gpu: str
    gpus: int
    gpu_fraction: float
    gpu_memory_mib: int
    vcpu: int
    memory_mib: int
    local_gb: int
    arch: str
    efa: int
    market: Literal["on-demand", "spot"]
    price: Figure | None
    on_demand: Figure | None
    spot: tuple[SpotPrice, ...]
    # None and empty differ: nobody was asked, and no zone has it.
    zones: tuple[str, ...] | None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    estimate: Figure | None = None


@dataclass(frozen=True)
class NearMiss:
    """A machine that does not satisfy a request, though nearly.

    Args:
        lacks: What of it, each with what was found and what was wanted.
        price: USD an hour on demand; None: not known.
    """

    instance_type: str
    region: str
    lacks: tuple[Finding, ...]
    price: Figure | None


@dataclass(frozen=True)
class ImageChoice:
    """The image that a machine is started from.

    Args:
        image_id: Empty for a plain distribution image, which a bake looks up.
        kind: given: it was named; channel: a release; verified: a gpukiln image that
            passed; dlami: AWS's Deep Learning AMI; base: a plain
            distribution image, on which the roles install the driver.
        name: The parameter's, or the base's.
        why: Why this one, and why none before it.
        looked_up: When the region was asked, ISO 8601; empty where it was not.
        findings: What is wrong with it there; errors: it can't run.
        trust: Why a gpukiln image is trusted, in words; empty for other images.
    """

    image_id: str
    kind: Literal["given", "channel", "verified", "dlami", "base"]
    name: str
    why: tuple[str, ...]
    looked_up: str
    findings: tuple[Finding, ...]
    # A sentence, for the note of the listing: keys, identities or the account's tags.
    trust: str = ""
