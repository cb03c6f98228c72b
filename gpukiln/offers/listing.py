"""What the commands of offers answer: a request with all that is known of what satisfies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING

from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.workloads import WorkloadRequirements
from gpukiln.clouds.base import Cloud
from gpukiln.errors import GpukilnError, IncompatibleError, RefusedError
from gpukiln.findings import Finding
from gpukiln.offers.availability import ZoneAvailability, availability
from gpukiln.offers.cost import MachineUsage, Month, month, within_budget
from gpukiln.offers.fit import fit
from gpukiln.offers.model import ImageChoice, NearMiss, Offer, Request
from gpukiln.offers.select import describe_request, no_match_error, offers_of, select
from gpukiln.offers.size import Size

if TYPE_CHECKING:
    from gpukiln.images.subject import Subject
    from gpukiln.offers.image import Images

LIST, SHOW, CHECK = "offer.list/1", "offer.show/1", "offer.check/1"


@dataclass(frozen=True)
class RunSpec:
    """What is to run on a machine.

    Args:
        image: The image that it is started from; None: not named.
        choose: Whether the image is chosen as a deploy would.
        workload: What runs on it; None: not named.
    """

    image: Subject | None = None
    choose: bool = False
    workload: WorkloadRequirements | None = None


@dataclass(frozen=True)
class OfferRow:
    """An offer with what it costs and where it can be had.

    Args:
        places: A zone each; empty where no cloud was asked.
        image: What it would be started from; null where none was asked for.
    """

    offer: Offer
    month: Month
    places: tuple[ZoneAvailability, ...]
    image: ImageChoice | None


@dataclass(frozen=True)
class RefusedOffer:
    """A machine that satisfies the request, and that image or workload can't use.

    Args:
        findings: Why; the errors among them.
        image: What it would be started from; null where none was asked for.
    """

    instance_type: str
    region: str
    findings: tuple[Finding, ...]
    image: ImageChoice | None


@dataclass(frozen=True)
class OfferListing:
    """What offer.list and offer.size print with --json.

    Args:
        asked: The request in words.
        size: What was computed for a model; null where none was named.
        offers: The best first.
        refused: What satisfies the request, and image or workload can't use.
        near: The nearest first.
        notes: What could not be asked, and why.
    """

    schema: str
    asked: str
    request: Request
    regions: tuple[str, ...]
    size: Size | None
    offers: tuple[OfferRow, ...]
    refused: tuple[RefusedOffer, ...]
    near: tuple[NearMiss, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OfferDetails:
    """What offer.show prints with --json.

    Args:
        offers: A region each.
        alternatives: What to take instead of what is retired or old, the best first.
    """

    schema: str
    instance_type: str
    offers: tuple[OfferRow, ...]
    alternatives: tuple[str, ...]


@dataclass(frozen=True)
class FitResult:
    """Whether an image and a workload fit a machine.

    Args:
        fits: Whether no finding is an error.
        findings: What is to be known, each with its rule and source.
    """

    instance_type: str
    image: str
    workload: str
    fits: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class FitReport:
    """What offer.check prints with --json."""

    schema: str
    machines: tuple[FitResult, ...]


def require_fits(check: FitReport) -> None:
    """Raises IncompatibleError where image and workload do not fit the first machine."""
    for machine in check.machines:
        if not machine.fits:
            error = next(finding for finding in machine.findings if finding.severity == "error")
            raise IncompatibleError(f"{machine.instance_type}: {error.message}", hint=error.remedy)


def show_offer(
    name: str, regions: Sequence[str], today: date, *, use: MachineUsage, cloud: Cloud | None, spot: bool
) -> OfferDetails:
    """One machine in regions.

    Raises:
        UsageError: The catalogue does not know it.
    """
    offers = offers_of(name, regions, today, spot=spot, cloud=source_of(cloud))
    places = _places(cloud, offers)
    rows = tuple(
        OfferRow(
            offer,
            month(offer, use, today, cloud=source_of(cloud)),
            places.get((name, offer.region), ()),
            None,
        )
        for offer in offers
    )
    return OfferDetails(SHOW, name, rows, instance_type(name).alternatives)


def check_machines(machines: Sequence[str], runs: RunSpec, today: date) -> FitReport:
    """Whether image and workload fit machines.

    Raises:
        UsageError: The catalogue does not know one.
    """
    results = []
    for name in machines:
        findings = fit(name, image=runs.image, workload=runs.workload, today=today)
        fits = not any(finding.severity == "error" for finding in findings)
        image = runs.image.image_id if runs.image else ""
        results.append(FitResult(name, image, runs.workload.title if runs.workload else "", fits, findings))
    return FitReport(CHECK, tuple(results))


def list_offers(
    request: Request,
    regions: Sequence[str],
    today: date,
    *,
    use: MachineUsage,
    runs: RunSpec,
    cloud: Cloud | None,
    size: Size | None = None,
    budget: Decimal | None = None,
) -> tuple[OfferListing, GpukilnError | None]:
    """What satisfies a request, and why nothing does where that is so.

    Args:
        cloud: Asked for zones and images, in each region; None: no cloud is asked.
        budget: USD a month.

    Returns:
        The answer, and the error that a command ends with.
    """
    # Without a cloud the shipped data answers: offer.list works without an account.
    matching = select(request, regions, today, cloud=source_of(cloud))
    # Returned, not raised: the answer with its near misses is printed in any case.
    error: GpukilnError | None = None
    if not matching.offers:
        error = no_match_error(request, matching, regions)
    notes: list[str] = []
    # One look a region: an answer with holes is not cached, and would be asked for again for each offer.
    seen: dict[str, Images] = {}
    fitting: list[tuple[Offer, ImageChoice | None]] = []
    refused: list[RefusedOffer] = []
    for offer in matching.offers:
        choice, findings = _fit(offer, runs, cloud, today, seen)
        # What can never work is shown apart with its reason, and not dropped: the user may have an older
        # image.
        if wrong := tuple(row for row in findings if row.severity == "error"):
            refused.append(RefusedOffer(offer.instance_type, offer.region, wrong, choice))
        else:
            fitting.append((replace(offer, findings=findings), choice))
    notes += [f"{region}: {note}" for region, images in seen.items() for note in images.notes]
    notes += [f"{choice.image_id}: {choice.trust}" for _, choice in fitting if choice and choice.trust]
    # Two kinds of empty answers: no machine has it, or machines have it and can't run the image.
    if matching.offers and not fitting:
        error = _nothing_fits(refused)
    costs_of = tuple((offer, month(offer, use, today, cloud=source_of(cloud))) for offer, _ in fitting)
    priced = costs_of
    if budget is not None:
        try:
            priced = within_budget(budget, priced)
        # An earlier error counts more: without a fitting machine the budget does not matter.
        except RefusedError as too_dear:
            error = error or too_dear
        else:
            notes += _of_no_price(costs_of)
    # Prices and zones are looked up only for offers that are shown.
    choices = {(offer.instance_type, offer.region): choice for offer, choice in fitting}
    places = _places(cloud, [offer for offer, _ in priced])
    rows = tuple(
        OfferRow(
            offer,
            costs,
            places.get((offer.instance_type, offer.region), ()),
            choices[offer.instance_type, offer.region],
        )
        for offer, costs in priced
    )
    answer = OfferListing(
        LIST,
        describe_request(request),
        request,
        tuple(regions),
        size,
        rows,
        tuple(refused),
        matching.near,
        tuple(dict.fromkeys(notes)),
    )
    return answer, error


def _fit(
    offer: Offer, runs: RunSpec, cloud: Cloud | None, today: date, seen: dict[str, Images]
) -> tuple[ImageChoice | None, tuple[Finding, ...]]:
    """What it would be started from, and what is to be known of that.

    Args:
        seen: The images of each region that was looked at, which this adds to: an answer that could not be
            kept is not asked for again for each offer.
    """
    name = offer.instance_type
    # An image can only be chosen in a region that is asked.
    if runs.choose and cloud is not None:
        from gpukiln.offers.image import choose_image, images_of  # noqa: PLC0415 - slow to import, and rarely needed

        if offer.region not in seen:
            seen[offer.region] = images_of(cloud.in_region(offer.region))
        choice = choose_image(seen[offer.region], cloud, name, runs.workload, today)
        return choice, choice.findings
    # Nothing to check: the machine alone was requested.
    if runs.image is None and runs.workload is None:
        return None, ()
    return None, fit(name, image=runs.image, workload=runs.workload, today=today)


def _of_no_price(offers: Sequence[tuple[Offer, Month]]) -> list[str]:
    """What a budget leaves out though it may cost less."""
    names = [f"{offer.instance_type} in {offer.region}" for offer, costs in offers if costs.usd is None]
    return [f"not in the budget, for their prices are not known: {', '.join(names)}"] if names else []


def _nothing_fits(refused: Sequence[RefusedOffer]) -> IncompatibleError:
    # Six are enough to see the common reason; --json has all.
    rows = tuple(f"{offer.instance_type}: {offer.findings[0].message}" for offer in refused[:6])
    hints = dict.fromkeys(offer.findings[0].remedy for offer in refused if offer.findings[0].remedy)
    return IncompatibleError(
        f"{len(refused)} machines satisfy the request, and none of them can run it",
        details=rows,
        hint=next(iter(hints), "another image or another GPU"),
    )


def source_of(cloud: Cloud | None) -> str:
    """Whose prices count: those of the cloud that is asked, AWS's where none is."""
    return cloud.name if cloud else "aws"


def _places(
    cloud: Cloud | None, offers: Sequence[Offer]
) -> dict[tuple[str, str], tuple[ZoneAvailability, ...]]:
    """Where offers can be had, by type and region.

    A region is asked once a market, for all types that are offered of it together.
    """
    by_offer: dict[tuple[str, str], tuple[ZoneAvailability, ...]] = {}
    # No cloud is asked without --cloud: the catalogue and the cache answer.
    if cloud is None:
        return by_offer
    # By market: a spot request has another quota and a placement score.
    for region, market in dict.fromkeys((offer.region, offer.market) for offer in offers):
        names = [offer.instance_type for offer in offers if (offer.region, offer.market) == (region, market)]
        there = availability(cloud.in_region(region), names, spot=market == "spot")
        for name in names:
            by_offer[name, region] = tuple(place for place in there if place.instance_type == name)
    return by_offer
