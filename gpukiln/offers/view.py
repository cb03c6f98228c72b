"""Offers for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal

from rich.console import RenderableType

from gpukiln.findings import Finding
from gpukiln.offers.availability import ZoneAvailability
from gpukiln.offers.cost import Month
from gpukiln.offers.listing import FitReport, OfferDetails, OfferListing, OfferRow, RefusedOffer
from gpukiln.offers.model import Figure, NearMiss, Offer, SpotPrice
from gpukiln.offers.refresh import RefreshDocument
from gpukiln.offers.size import Size
from gpukiln.reports.tables import Rows
from gpukiln.units import Memory, Money

# What fits on a screen; --all shows the rest.
NEAR, OFFERS = 8, 20


def size_table(size: Size) -> list[RenderableType]:
    """The memory of a model, a term a line, and what was assumed."""
    table = Rows("term", "GiB", "formula", "source", first=2, right=("GiB",))
    for term in size.terms:
        table.add(term.name, f"{term.bytes / 2**30:.2f}", term.formula, term.source)
    table.add("all", f"{size.per_gpu_mib / 1024:.2f}", f"{size.per_gpu_mib} MiB on each GPU", "")
    return [table, *(f"assumed: {text}" for text in size.assumed)]


def offers_table(rows: Sequence[OfferRow], *, all: bool) -> Iterator[RenderableType]:
    """Offers in order, with what a month costs."""
    table = Rows(
        *("type", "region", "GPU", "GPU memory", "vCPU", "memory", "local", "USD/hour", "USD/month", "zones"),
        "notes",
        first=3,
        folds=True,
        right=("vCPU", "memory", "local", "USD/hour", "USD/month"),
    )
    shown = rows if all else rows[:OFFERS]
    for row in shown:
        offer = row.offer
        table.add(
            offer.instance_type,
            offer.region,
            _gpus(offer),
            f"{offer.gpu_memory_mib} MiB",
            str(offer.vcpu),
            Memory.of_mib(offer.memory_mib).shown,
            f"{offer.local_gb} GB" if offer.local_gb else "-",
            _price(offer),
            _month(row.month),
            "?" if offer.zones is None else str(len(offer.zones)),
            "; ".join(offer.notes),
        )
    yield table
    if len(shown) < len(rows):
        yield f"and {len(rows) - len(shown)} more: --all"
    # Sources once below the table: nearly all rows share one.
    if prices := sorted({_source(row.offer.price) for row in shown if row.offer.price}):
        yield "prices: " + "; ".join(prices)
    if guesses := sorted({_source(row.offer.estimate, mark="") for row in shown if row.offer.estimate}):
        yield "~ estimated, for no price is known: " + "; ".join(guesses)


def near_lines(near: Sequence[NearMiss], *, all: bool) -> Iterator[str]:
    """What came near, with what it lacks."""
    if not near:
        return
    yield "near, and not enough:"
    # A machine with the same mismatches in several regions is one line.
    same: dict[tuple[str, str], list[NearMiss]] = {}
    for miss in near:
        mismatches = "; ".join(lack.message for lack in miss.lacks)
        same.setdefault((miss.instance_type, mismatches), []).append(miss)
    for number, ((name, mismatches), rows) in enumerate(same.items()):
        if number == NEAR and not all:
            yield f"  and {len(same) - NEAR} more: --all"
            return
        prices = {str(miss.price.value) for miss in rows if miss.price}
        price = f" ({' or '.join(sorted(prices))} USD/hour)" if prices else ""
        yield f"  {name} in {', '.join(miss.region for miss in rows)}{price}: {mismatches}"


def refused_lines(refused: Iterable[RefusedOffer]) -> Iterator[str]:
    """What satisfies the request, and image or workload can't use."""
    for offer in refused:
        yield f"refused: {offer.instance_type} in {offer.region}"
        yield from finding_lines(offer.findings)
        if offer.image:
            yield f"  image: {offer.image.image_id or offer.image.name}"
            yield from (f"    {text}" for text in offer.image.why)


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """What rules found, each with its source."""
    for finding in findings:
        yield f"  {finding.severity} {finding.id}: {finding.message}" + (
            f" ({finding.source})" if finding.source else ""
        )
        if finding.remedy:
            yield f"    next: {finding.remedy}"


def places_table(places: Sequence[ZoneAvailability]) -> Iterator[RenderableType]:
    """Where types can be had: four answers that say different things."""
    table = Rows("type", "zones", "offered", "quota", "likelihood", "reserved", first=2)
    # A dict keeps the order and drops repetitions: every row of a failed service has the same reason.
    reasons: dict[str, None] = {}
    same: dict[tuple[str, ...], list[str]] = {}
    for place in places:
        quota, likely, held = place.quota, place.likelihood, place.reservation
        cells = (place.offered.answer, _quota(place), _likelihood(place), _reserved(place))
        same.setdefault((place.instance_type, *cells), []).append(place.zone or place.zone_id or "?")
        for what, said in (
            ("offered", (place.offered.reason,)),
            ("quota", (quota.reason,)),
            ("likelihood", likely.reasons),
            ("reserved", held.reasons),
        ):
            reasons |= {f"{what} unknown: {text}": None for text in said if text}
    # Zones with equal answers share a row, which is the usual case.
    for (name, *answers), zones in same.items():
        table.add(name, ", ".join(zones), *answers)
    yield table
    yield from reasons


def listing_parts(answer: OfferListing, *, all: bool) -> Iterator[RenderableType]:
    """The whole answer."""
    if answer.size:
        yield from size_table(answer.size)
    yield f"wanted: {answer.asked}, in {', '.join(answer.regions)}"
    if answer.offers:
        yield from offers_table(answer.offers, all=all)
        # Item by item for the best offer only; the table has the others' sums.
        yield from _month_lines(answer.offers[0])
    if chosen := [row for row in answer.offers if row.image]:
        yield from _image_lines(chosen)
    yield from _warning_lines(answer.offers)
    if places := [place for row in answer.offers for place in row.places]:
        yield from places_table(places)
    yield from refused_lines(answer.refused)
    yield from near_lines(answer.near, all=all)
    yield from answer.notes


def shown_parts(details: OfferDetails) -> Iterator[RenderableType]:
    """One machine in regions."""
    for row in details.offers:
        offer = row.offer
        yield f"{offer.instance_type} in {offer.region}: {_gpus(offer)} of {offer.gpu_memory_mib} MiB"
        yield (
            f"  {offer.vcpu} vCPU, {Memory.of_mib(offer.memory_mib).shown}, "
            f"{offer.local_gb} GB of local storage, {offer.efa} EFA, {offer.arch}"
        )
        yield f"  zones: {'not known' if offer.zones is None else ', '.join(offer.zones) or 'none'}"
        yield f"  on demand: {_figure(offer.on_demand)}"
        if offer.estimate:
            yield f"  estimated, for no price is known: {_figure(offer.estimate)}"
        yield from (f"  spot in {_spot(spot_price)}" for spot_price in offer.spot)
        yield from _month_lines(row)
        yield from (f"  {note}" for note in offer.notes)
        if row.places:
            yield from places_table(row.places)
    if details.alternatives:
        yield f"instead: {', '.join(details.alternatives)}"


def checked_parts(report: FitReport) -> Iterator[str]:
    """Whether image and workload fit machines."""
    for machine in report.machines:
        what = " and ".join(filter(None, (machine.image, machine.workload)))
        yield f"{machine.instance_type}: {what} {'fits' if machine.fits else 'does not fit'}"
        yield from finding_lines(machine.findings)


def refresh_parts(document: RefreshDocument) -> Iterator[RenderableType]:
    """What became of each question, and what the catalogue lacks."""
    table = Rows("asked for", "answers", "as of", "", first=2, folds=True, right=("answers",))
    for part in document.refreshed.parts:
        answers = "-" if part.answers is None else str(part.answers)
        table.add(part.name, answers, str(part.as_of or "-"), part.error)
    yield table
    if (difference := document.difference) is None:
        return
    # Changes always make a patch, so an empty one means that there is none.
    if not difference.patch:
        yield f"{difference.region} has what the shipped catalogue has"
        return
    for what, names in (("new", difference.new), ("retired", difference.retired)):
        if names:
            yield f"{what}: {', '.join(names)}"
    for change in difference.changed:
        yield f"changed: {change.instance_type}: {change.field} {change.catalogue} is {change.described}"
    yield from difference.notes
    yield difference.patch


def _gpus(offer: Offer) -> str:
    # An eighth of a GPU is not shown as one GPU.
    if offer.gpu_fraction < 1:
        return f"{offer.gpu_fraction:g} {offer.gpu}"
    return f"{offer.gpus} {offer.gpu}"


def _price(offer: Offer) -> str:
    # Only spot is marked: on demand is the default.
    market = " spot" if offer.market == "spot" else ""
    if offer.price is None:
        return f"~{offer.estimate.value}{market}" if offer.estimate else "?"
    return f"{offer.price.value}{'*' if offer.price.stale else ''}{market}"


def _usd(usd: Decimal | None) -> str:
    return "?" if usd is None else Money(usd).shown


def _month(month: Month) -> str:
    return _usd(month.usd) if month.estimate is None else f"~{_usd(month.estimate)}"


def _source(price: Figure | None, mark: str = "* old, ") -> str:
    return f"{mark if price and price.stale else ''}{price.source} as of {price.as_of}" if price else ""


def _figure(price: Figure | None) -> str:
    if price is None:
        return "not known"
    age = "age not known" if price.age_days is None else f"{price.age_days} days old"
    stale = ", old: `invoke offer.refresh` asks anew" if price.stale else ""
    return f"{price.value} {price.unit} ({price.source}, as of {price.as_of}, {age}{stale})"


def _spot(price: SpotPrice) -> str:
    said = f"{price.zone}: {_figure(price.now)}"
    # Shipped data has no history of seven days.
    if price.low is not None:
        said += f"; 7 days: {price.low} to {price.high}, mean {price.mean}"
    return said + (f"; saves {price.saving:.0%}" if price.saving is not None else "")


def _month_lines(row: OfferRow) -> Iterator[str]:
    yield f"a month of {row.offer.instance_type}: {_month(row.month)} USD"
    for item in row.month.items:
        usd = _usd(item.usd) if item.estimate is None else f"~{_usd(item.estimate)}"
        yield f"  {item.name} {usd}: {item.how}"


# One block for all machines that would get the same image for the same reasons.
def _image_lines(rows: Iterable[OfferRow]) -> Iterator[str]:
    said: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.image:
            name = f"image: {row.image.image_id or row.image.name} ({row.image.kind}, {row.image.name})"
            said.setdefault((name, *row.image.why), []).append(row.offer.instance_type)
    for (name, *why), types in said.items():
        yield f"{name} for {', '.join(dict.fromkeys(types))}"
        yield from (f"  {text}" for text in why)


def _warning_lines(rows: Iterable[OfferRow]) -> Iterator[str]:
    """What image and workload have to say of offers that they can use, each once."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for finding in row.offer.findings:
            said.setdefault(f"{finding.severity} {finding.id}: {finding.message}", []).append(
                row.offer.instance_type
            )
    # One warning usually concerns a whole family.
    for text, types in said.items():
        yield f"{text} [{', '.join(dict.fromkeys(types))}]"


def _quota(place: ZoneAvailability) -> str:
    quota = place.quota
    if quota.left is None:
        return "unknown"
    needs = "?" if quota.needed is None else str(quota.needed)
    return f"{needs} of {quota.left} left ({quota.code})"


def _likelihood(place: ZoneAvailability) -> str:
    likelihood = place.likelihood
    said = [f"{likelihood.placement}/10"] if likelihood.placement is not None else []
    said += [likelihood.capacity] if likelihood.capacity is not None else []
    return ", ".join(said) or "unknown"


def _reserved(place: ZoneAvailability) -> str:
    reservation = place.reservation
    if reservation.held is None and reservation.blocks is None:
        return "unknown"
    said = [f"{held.free} free in {held.reservation_id}" for held in reservation.held or ()]
    said += [
        f"block from {block.starts:%Y-%m-%d} for {block.fee} {block.currency}"
        for block in reservation.blocks or ()
    ]
    return ", ".join(said) or "none"
