"""Where machines can be had: offered, quota, likelihood and reservation, for each type and zone.

The four are never mixed up, because each is an answer of its own to another question, and none promises a
machine. What could not be asked is unknown, with the reason; it is no "no", and it stops nothing else.

What counts against a quota: Amazon EC2 user guide, "On-Demand Instance quotas", "Spot Instance quotas",
"Reserve compute capacity with EC2 On-Demand Capacity Reservations", "Capacity Blocks for ML". Scores: "Spot
placement score", "How to check capacity".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, TypeVar

from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.quotas import Market, Quota, quota_of
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UnavailableError

T = TypeVar("T")
LEAST_TYPES = 3  # fewer always score low (botocore, GetSpotPlacementScores: InstanceTypes)
SCORED_ZONES, SCORED_TYPES = 10, 50  # most of one call (botocore, GetCapacityManagerSupportabilityScores)
PAGE = 1000
BLOCK_HOURS = 24  # the shortest capacity block
RESERVED_STATES = ("assessing", "scheduled", "pending", "active", "delayed")  # that count against the quota


@dataclass(frozen=True)
class Offered:
    """Whether the zone has the type at all; not whether one is free."""

    answer: Literal["yes", "no", "unknown"]
    reason: str = ""


@dataclass(frozen=True)
class QuotaLeft:
    """What the account may still start of the type's quota in the region, in virtual CPUs. None: unknown.

    Args:
        code: Of the quota; empty where no source names it.
        needed: By one machine of the type.
        used: By running instances of that bucket and market. Open spot requests count too; they are not seen.
        reserved: By capacity that the account has reserved on demand and does not use, which counts too.
        left: Not below 0; at most that where `reserved` is unknown. A machine that starts in a reservation
            needs none of it.
        reason: Why something is unknown.
    """

    code: str
    name: str
    needed: int | None
    limit: int | None
    used: int | None
    reserved: int | None
    left: int | None
    reason: str = ""


@dataclass(frozen=True)
class Likelihood:
    """How likely one machine starts now.

    Args:
        placement: AWS's spot placement score of the zone, 1 to 10, for all of `together`; None: unknown, as
            always on demand.
        together: The types that were scored as one request.
        capacity: The account's capacity score of this type, zone and market; None: unknown.
        reasons: Why what is unknown is.
    """

    placement: int | None
    together: tuple[str, ...]
    capacity: Literal["high", "medium", "low", "unsupported"] | None
    reasons: tuple[str, ...] = ()


NOT_THERE = Likelihood(None, (), None, ("the zone does not have it",))


@dataclass(frozen=True)
class CapacityReservation:
    """A capacity reservation of the account with instances that are free.

    Args:
        named: Whether a launch must name it; an open one is taken by every launch on demand that matches.
        block: Whether it is a capacity block.
    """

    reservation_id: str
    free: int
    named: bool
    block: bool


@dataclass(frozen=True)
class BlockOffer:
    """A capacity block of one machine for a day that can be bought; `fee` is for all of it."""

    offering_id: str
    starts: datetime
    hours: int
    fee: Decimal
    currency: str


@dataclass(frozen=True)
class Reservation:
    """Capacity that is reserved, or can be.

    Args:
        held: Empty: there is none; None: unknown.
        blocks: Empty: none is on sale, or the type has none; None: unknown.
        reasons: Why what is unknown is.
    """

    held: tuple[CapacityReservation, ...] | None
    blocks: tuple[BlockOffer, ...] | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZoneAvailability:
    """One type in one zone.

    Args:
        zone: Its name; empty where the region's zones are unknown.
        zone_id: The same zone in every account (usw2-az1); empty where it is unknown.
    """

    instance_type: str
    zone: str
    zone_id: str
    offered: Offered
    quota: QuotaLeft
    likelihood: Likelihood
    reservation: Reservation


@dataclass(frozen=True)
class Unknown:
    """No answer, and why."""

    reason: str


def availability(cloud: Cloud, names: Sequence[str], *, spot: bool) -> tuple[ZoneAvailability, ...]:
    """Where types can be had in the cloud's region.

    Args:
        names: Types, any of which would do; their order is that of the answer.
        spot: Whether spot instances are wanted: quota and likelihood are those of that market.

    Returns:
        For each type every zone of the region, also those that do not have it.
    """
    names = tuple(dict.fromkeys(names))
    if not names:
        return ()
    market: Market = "spot" if spot else "on-demand"
    asking = _Asking(cloud)
    zones = _zones(asking)
    offers = _offers(asking, names)
    ids = {} if isinstance(zones, Unknown) else zones
    places = sorted({*ids, *(() if isinstance(offers, Unknown) else (zone for _, zone in offers))}) or [""]
    reserved = _reserved(asking)
    quotas = _quotas(asking, names, market, reserved)
    likely = _likelihoods(asking, [one for one in names if _may_have(offers, one)], market, zones)
    sold = [name for name in names if name in instance_types() and instance_types()[name].capacity_blocks]
    blocks = {name: _blocks(asking, name) for name in sold}
    found = []
    for name in names:
        for zone in places:
            offered, zone_id = _offered(offers, name, zone), ids.get(zone, "")
            likelihood = NOT_THERE if offered.answer == "no" else likely(name, zone_id)
            reservation = _reservation(name, zone, reserved, blocks.get(name, ()))
            found.append(
                ZoneAvailability(name, zone, zone_id, offered, quotas[name], likelihood, reservation)
            )
    return tuple(found)


class _Asking:
    """Asks one service after the other; one that can't be reached is not tried again."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self._lost: dict[str, Unknown] = {}

    def ask(self, service: str, action: str, call: Callable[[Any], T]) -> T | Unknown:
        """What a service answers.

        Args:
            action: What is tried, for the reason of a failure.
            call: Given the client.
        """
        from botocore.exceptions import (  # noqa: PLC0415 - slow to import
            ConnectionError,
            HTTPClientError,
            NoCredentialsError,
            ProfileNotFound,
        )

        if service in self._lost:
            return self._lost[service]
        try:
            with explain_aws_errors(action):
                return call(self.cloud.client(service))
        except UnavailableError as error:
            unknown = Unknown(": ".join(filter(None, (error.message, error.hint))))
            lost = ConnectionError, HTTPClientError, NoCredentialsError, ProfileNotFound
            if isinstance(error.__cause__, lost):
                self._lost[service] = unknown
            return unknown


def _zones(asking: _Asking) -> dict[str, str] | Unknown:
    """The ids of the region's zones by their names."""
    found = asking.ask(
        "ec2",
        "look up the region's zones",
        lambda ec2: {
            zone["ZoneName"]: zone["ZoneId"]
            for zone in ec2.describe_availability_zones()["AvailabilityZones"]
        },
    )
    return found or Unknown("EC2 named no zone of the region") if isinstance(found, dict) else found


def _offers(asking: _Asking, names: Sequence[str]) -> frozenset[tuple[str, str]] | Unknown:
    """The pairs of type and zone that there are."""
    return asking.ask(
        "ec2",
        "look up which zones have the types",
        lambda ec2: frozenset(
            (one["InstanceType"], one["Location"])
            for one in calls.pages(
                ec2,
                "describe_instance_type_offerings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": [*names]}],
                PaginationConfig={"PageSize": PAGE},
            )
        ),
    )


def _may_have(offers: frozenset[tuple[str, str]] | Unknown, name: str) -> bool:
    return isinstance(offers, Unknown) or any(one == name for one, _ in offers)


def _offered(offers: frozenset[tuple[str, str]] | Unknown, name: str, zone: str) -> Offered:
    if isinstance(offers, Unknown):
        return Offered("unknown", offers.reason)
    if not zone and _may_have(offers, name):
        return Offered("unknown", "the region's zones are unknown")
    return Offered("yes" if (name, zone) in offers else "no")


# --- quota ---


def _quotas(
    asking: _Asking, names: Sequence[str], market: Market, reserved: list[Any] | Unknown
) -> dict[str, QuotaLeft]:
    of_names = {name: quota_of(name, market) for name in names}
    wanted = {quota.code: quota for quota in of_names.values() if quota}
    limits = {code: _limit(asking, quota) for code, quota in wanted.items()}
    counted = tuple(wanted.values())
    used = _of_quotas(asking, _running(asking, market), counted) if wanted else {}
    held = _of_quotas(asking, _unused(asking, reserved), counted) if wanted and market == "on-demand" else {}
    found = {}
    for name, quota in of_names.items():
        facts = instance_types().get(name)
        needed = facts.vcpu if facts else None
        if quota is None:
            why = f"no source names the {market} quota of {name}"
            found[name] = QuotaLeft("", "", needed, None, None, None, None, why)
            continue
        limit = limits[quota.code]
        running = used if isinstance(used, Unknown) else used[quota.code]
        idle = held if isinstance(held, Unknown) else held.get(quota.code, 0)
        reasons = [one.reason for one in (limit, running, idle) if isinstance(one, Unknown)]
        if needed is None:
            reasons.append(f"the catalogue does not know how many virtual CPUs {name} has")
        left = None
        if isinstance(limit, int) and isinstance(running, int):
            left = max(0, limit - running - (idle if isinstance(idle, int) else 0))
        found[name] = QuotaLeft(
            quota.code,
            quota.name,
            needed,
            _number(limit),
            _number(running),
            _number(idle),
            left,
            "; ".join(dict.fromkeys(reasons)),
        )
    return found


def _number(value: int | Unknown) -> int | None:
    return None if isinstance(value, Unknown) else value


def _limit(asking: _Asking, quota: Quota) -> int | Unknown:
    found = asking.ask(
        "service-quotas",
        f"look up the quota {quota.code}",
        lambda quotas: quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)["Quota"].get(
            "Value"
        ),
    )
    if found is None:
        return Unknown(f"Service Quotas gave no value of {quota.code}")
    return found if isinstance(found, Unknown) else int(found)


def _running(asking: _Asking, market: Market) -> list[tuple[str, int]] | Unknown:
    """The types of the running instances, each with 1."""
    found = asking.ask(
        "ec2",
        "count the running instances",
        lambda ec2: list(
            calls.pages(
                ec2,
                "describe_instances",
                "Reservations",
                Filters=[{"Name": "instance-state-name", "Values": ["running"]}],
                PaginationConfig={"PageSize": PAGE},
            )
        ),
    )
    if isinstance(found, Unknown):
        return found
    return [
        (one["InstanceType"], 1)
        for group in found
        for one in group["Instances"]
        # a dedicated host and a capacity block have quotas of their own
        if one.get("InstanceLifecycle", "on-demand") == market
        and one.get("Placement", {}).get("Tenancy") != "host"
    ]


def _unused(asking: _Asking, reserved: list[Any] | Unknown) -> list[tuple[str, int]] | Unknown:
    """Types with how many instances of them the account has reserved and does not run."""
    if isinstance(reserved, Unknown):
        return reserved
    counted = [one for one in reserved if one.get("ReservationType") != "capacity-block"]
    if not counted:
        return []
    account = asking.ask("sts", "look up the account", lambda sts: sts.get_caller_identity()["Account"])
    if isinstance(account, Unknown):
        return account
    return [
        (
            one["InstanceType"],
            one["AvailableInstanceCount" if one["State"] == "active" else "TotalInstanceCount"],
        )
        for one in counted
        if one["OwnerId"] == account  # one that is shared counts against its owner's quota
    ]


def _of_quotas(
    asking: _Asking, counted: list[tuple[str, int]] | Unknown, quotas: Sequence[Quota]
) -> dict[str, int] | Unknown:
    """The virtual CPUs of instances, by the codes of the quotas that they count against."""
    if isinstance(counted, Unknown):
        return counted
    by_quota = [
        (quota, name, count)
        for quota in quotas
        for name, count in counted
        if quota_of(name, quota.market) == quota
    ]
    sizes = _sizes(asking, {name for _, name, _ in by_quota})
    if isinstance(sizes, Unknown):
        return sizes
    found = dict.fromkeys((quota.code for quota in quotas), 0)
    for quota, name, count in by_quota:
        found[quota.code] += sizes[name] * count
    return found


def _sizes(asking: _Asking, names: Iterable[str]) -> dict[str, int] | Unknown:
    """The virtual CPUs of types; the catalogue lacks those without a GPU that share a quota with some."""
    known = {name: instance_types()[name].vcpu for name in names if name in instance_types()}
    others = sorted(set(names) - set(known))
    if not others:
        return known
    asked = asking.ask(
        "ec2",
        "look up the sizes of the running types",
        lambda ec2: ec2.describe_instance_types(InstanceTypes=others)["InstanceTypes"],
    )
    if isinstance(asked, Unknown):
        return asked
    return known | {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in asked}


# --- likelihood ---


def _likelihoods(
    asking: _Asking, names: Sequence[str], market: Market, zones: dict[str, str] | Unknown
) -> Callable[[str, str], Likelihood]:
    """What says how likely a type is in a zone, by the zone's id."""
    placements = (
        _placements(asking, names) if market == "spot" else Unknown("on demand has no placement score")
    )
    capacities = _capacities(asking, names, market, zones)

    def of(name: str, zone_id: str) -> Likelihood:
        placement = capacity = None
        if isinstance(zones, Unknown):  # scores name zones by their ids
            return Likelihood(None, (), None, (zones.reason,))
        reasons = []
        if isinstance(placements, Unknown):
            reasons.append(placements.reason)
        elif (placement := placements.get(zone_id)) is None:
            reasons.append("AWS gave no placement score of the zone")
        if isinstance(capacities, Unknown):
            reasons.append(capacities.reason)
        elif (capacity := capacities.get((name, zone_id))) is None:
            reasons.append("AWS gave no capacity score of the type in the zone")
        together = tuple(names) if placement is not None else ()
        return Likelihood(placement, together, capacity, tuple(dict.fromkeys(reasons)))

    return of


def _placements(asking: _Asking, names: Sequence[str]) -> dict[str, int] | Unknown:
    """Spot placement scores by the ids of zones."""
    if len(names) < LEAST_TYPES:
        return Unknown(
            f"AWS scores {LEAST_TYPES} types together and calls fewer always low; of those that would do the "
            f"region has {len(names)}"
        )
    return asking.ask(
        "ec2",
        "ask for spot placement scores",
        lambda ec2: {
            one["AvailabilityZoneId"]: one["Score"]
            for one in calls.pages(
                ec2,
                "get_spot_placement_scores",
                "SpotPlacementScores",
                InstanceTypes=[*names],
                TargetCapacity=1,
                SingleAvailabilityZone=True,
                RegionNames=[asking.cloud.region],
            )
        },
    )


def _capacities(
    asking: _Asking, names: Sequence[str], market: Market, zones: dict[str, str] | Unknown
) -> dict[tuple[str, str], Any] | Unknown:
    """Capacity scores by type and id of the zone: with the support plan Unified Operations alone."""
    if isinstance(zones, Unknown):
        return zones
    ids = sorted(zones.values())

    def scores(ec2: Any) -> dict[tuple[str, str], Any] | Unknown:
        if not hasattr(ec2, "get_capacity_manager_supportability_scores"):
            return Unknown("this boto3 knows no capacity scores; one of 1.44.5 does")
        return {
            (one["InstanceType"], one["AvailabilityZoneId"]): one["Score"]
            for first in range(0, len(ids), SCORED_ZONES)
            for some in range(0, len(names), SCORED_TYPES)
            for one in ec2.get_capacity_manager_supportability_scores(
                MarketType=market,
                CapacityAmount=1,
                CapacityUnit="instances",
                CapacityAvailabilityZoneIds=ids[first : first + SCORED_ZONES],
                InstanceTypes=[*names[some : some + SCORED_TYPES]],
            ).get("CapacityManagerSupportabilityScores", ())
        }

    return asking.ask("ec2", "ask for capacity scores", scores)


# --- reservation ---


def _reserved(asking: _Asking) -> list[Any] | Unknown:
    """The account's capacity reservations that count, of any type, and those that are shared with it."""
    return asking.ask(
        "ec2",
        "look up capacity reservations",
        lambda ec2: list(
            calls.pages(
                ec2,
                "describe_capacity_reservations",
                "CapacityReservations",
                Filters=[{"Name": "state", "Values": [*RESERVED_STATES]}],
                PaginationConfig={"PageSize": PAGE},
            )
        ),
    )


def _blocks(asking: _Asking, name: str) -> tuple[tuple[str, BlockOffer], ...] | Unknown:
    """Capacity blocks of a type on sale, each with the name of its zone."""
    return asking.ask(
        "ec2",
        f"look up capacity blocks of {name}",
        lambda ec2: tuple(
            (
                one["AvailabilityZone"],
                BlockOffer(
                    one["CapacityBlockOfferingId"],
                    one["StartDate"],
                    one["CapacityBlockDurationHours"],
                    Decimal(one["UpfrontFee"]),
                    one["CurrencyCode"],
                ),
            )
            for one in calls.pages(
                ec2,
                "describe_capacity_block_offerings",
                "CapacityBlockOfferings",
                InstanceType=name,
                InstanceCount=1,
                CapacityDurationHours=BLOCK_HOURS,
            )
        ),
    )


def _reservation(
    name: str,
    zone: str,
    reserved: list[Any] | Unknown,
    blocks: tuple[tuple[str, BlockOffer], ...] | Unknown,
) -> Reservation:
    reasons = [one.reason for one in (reserved, blocks) if isinstance(one, Unknown)]
    held = None
    if not isinstance(reserved, Unknown):
        held = tuple(
            CapacityReservation(
                one["CapacityReservationId"],
                one["AvailableInstanceCount"],
                one["InstanceMatchCriteria"] == "targeted",
                one.get("ReservationType") == "capacity-block",
            )
            for one in reserved
            if (one["InstanceType"], one["AvailabilityZone"], one["State"]) == (name, zone, "active")
            and (one["InstancePlatform"], one["Tenancy"]) == ("Linux/UNIX", "default")
            and one["AvailableInstanceCount"]
        )
    on_sale = None
    if not isinstance(blocks, Unknown):
        on_sale = tuple(block for of_zone, block in blocks if of_zone == zone)
    return Reservation(held, on_sale, tuple(reasons))
