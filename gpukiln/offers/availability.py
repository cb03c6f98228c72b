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
class OfferedAnswer:
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


# Shared by all zones without the type: no score of them is asked for.
NOT_OFFERED = Likelihood(None, (), None, ("the zone does not have it",))


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
    offered: OfferedAnswer
    quota: QuotaLeft
    likelihood: Likelihood
    reservation: Reservation


@dataclass(frozen=True)
class UnknownAnswer:
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
    asking = _ServiceQueries(cloud)
    zones = _zones(asking)
    offers = _offers(asking, names)
    ids = {} if isinstance(zones, UnknownAnswer) else zones
    # Zones of the offerings, too: where DescribeAvailabilityZones failed the offerings still name zones.
    places = sorted({*ids, *(() if isinstance(offers, UnknownAnswer) else (zone for _, zone in offers))}) or [
        ""
    ]
    reserved = _reserved(asking)
    quotas = _quotas(asking, names, market, reserved)
    likely = _likelihoods(asking, [name for name in names if _may_have(offers, name)], market, zones)
    # Asked only for the types that the catalogue lists with capacity blocks.
    sold = [name for name in names if name in instance_types() and instance_types()[name].capacity_blocks]
    blocks = {name: _blocks(asking, name) for name in sold}
    rows = []
    for name in names:
        for zone in places:
            offered, zone_id = _offered(offers, name, zone), ids.get(zone, "")
            likelihood = NOT_OFFERED if offered.answer == "no" else likely(name, zone_id)
            reservation = _reservation(name, zone, reserved, blocks.get(name, ()))
            rows.append(ZoneAvailability(name, zone, zone_id, offered, quotas[name], likelihood, reservation))
    return tuple(rows)


class _ServiceQueries:
    """Asks one service after the other; one that can't be reached is not tried again."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self._lost: dict[str, UnknownAnswer] = {}

    def ask(self, service: str, action: str, call: Callable[[Any], T]) -> T | UnknownAnswer:
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

        # Without this each question to an unreachable endpoint would wait for its timeout.
        if service in self._lost:
            return self._lost[service]
        try:
            with explain_aws_errors(action):
                return call(self.cloud.client(service))
        except UnavailableError as error:
            unknown = UnknownAnswer(": ".join(filter(None, (error.message, error.hint))))
            # Only these concern every later call of the service; a denied action concerns itself alone.
            lost = ConnectionError, HTTPClientError, NoCredentialsError, ProfileNotFound
            if isinstance(error.__cause__, lost):
                self._lost[service] = unknown
            return unknown


def _zones(asking: _ServiceQueries) -> dict[str, str] | UnknownAnswer:
    """The ids of the region's zones by their names."""
    zones = asking.ask(
        "ec2",
        "look up the region's zones",
        lambda ec2: {
            zone["ZoneName"]: zone["ZoneId"]
            for zone in ec2.describe_availability_zones()["AvailabilityZones"]
        },
    )
    return zones or UnknownAnswer("EC2 named no zone of the region") if isinstance(zones, dict) else zones


def _offers(asking: _ServiceQueries, names: Sequence[str]) -> frozenset[tuple[str, str]] | UnknownAnswer:
    """The pairs of type and zone that there are."""
    return asking.ask(
        "ec2",
        "look up which zones have the types",
        lambda ec2: frozenset(
            (offering["InstanceType"], offering["Location"])
            for offering in calls.pages(
                ec2,
                "describe_instance_type_offerings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": [*names]}],
                PaginationConfig={"PageSize": PAGE},
            )
        ),
    )


def _may_have(offers: frozenset[tuple[str, str]] | UnknownAnswer, name: str) -> bool:
    return isinstance(offers, UnknownAnswer) or any(offered_name == name for offered_name, _ in offers)


def _offered(offers: frozenset[tuple[str, str]] | UnknownAnswer, name: str, zone: str) -> OfferedAnswer:
    if isinstance(offers, UnknownAnswer):
        return OfferedAnswer("unknown", offers.reason)
    if not zone and _may_have(offers, name):
        return OfferedAnswer("unknown", "the region's zones are unknown")
    return OfferedAnswer("yes" if (name, zone) in offers else "no")


# --- quota ---


def _quotas(
    asking: _ServiceQueries, names: Sequence[str], market: Market, reserved: list[Any] | UnknownAnswer
) -> dict[str, QuotaLeft]:
    of_names = {name: quota_of(name, market) for name in names}
    quotas = {quota.code: quota for quota in of_names.values() if quota}
    limits = {code: _limit(asking, quota) for code, quota in quotas.items()}
    # Of several types many share a quota, so that usage is counted by quota and not by type.
    counted = tuple(quotas.values())
    # On demand, unused reservations count as well (EC2 user guide, capacity reservations).
    used = _of_quotas(asking, _running(asking, market), counted) if quotas else {}
    held = _of_quotas(asking, _unused(asking, reserved), counted) if quotas and market == "on-demand" else {}
    quotas_left = {}
    for name, quota in of_names.items():
        facts = instance_types().get(name)
        needed = facts.vcpu if facts else None
        if quota is None:
            why = f"no source names the {market} quota of {name}"
            quotas_left[name] = QuotaLeft("", "", needed, None, None, None, None, why)
            continue
        limit = limits[quota.code]
        running = used if isinstance(used, UnknownAnswer) else used[quota.code]
        idle = held if isinstance(held, UnknownAnswer) else held.get(quota.code, 0)
        reasons = [answer.reason for answer in (limit, running, idle) if isinstance(answer, UnknownAnswer)]
        if needed is None:
            reasons.append(f"the catalogue does not know how many virtual CPUs {name} has")
        left = None
        if isinstance(limit, int) and isinstance(running, int):
            left = max(0, limit - running - (idle if isinstance(idle, int) else 0))
        quotas_left[name] = QuotaLeft(
            quota.code,
            quota.name,
            needed,
            _number(limit),
            _number(running),
            _number(idle),
            left,
            "; ".join(dict.fromkeys(reasons)),
        )
    return quotas_left


def _number(value: int | UnknownAnswer) -> int | None:
    return None if isinstance(value, UnknownAnswer) else value


def _limit(asking: _ServiceQueries, quota: Quota) -> int | UnknownAnswer:
    value = asking.ask(
        "service-quotas",
        f"look up the quota {quota.code}",
        lambda quotas: quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)["Quota"].get(
            "Value"
        ),
    )
    if value is None:
        return UnknownAnswer(f"Service Quotas gave no value of {quota.code}")
    return value if isinstance(value, UnknownAnswer) else int(value)


def _running(asking: _ServiceQueries, market: Market) -> list[tuple[str, int]] | UnknownAnswer:
    """The types of the running instances, each with 1."""
    reservations = asking.ask(
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
    if isinstance(reservations, UnknownAnswer):
        return reservations
    return [
        (instance["InstanceType"], 1)
        for group in reservations
        for instance in group["Instances"]
        # a dedicated host and a capacity block have quotas of their own
        if instance.get("InstanceLifecycle", "on-demand") == market
        and instance.get("Placement", {}).get("Tenancy") != "host"
    ]


def _unused(
    asking: _ServiceQueries, reserved: list[Any] | UnknownAnswer
) -> list[tuple[str, int]] | UnknownAnswer:
    """Types with how many instances of them the account has reserved and does not run."""
    if isinstance(reserved, UnknownAnswer):
        return reserved
    counted = [
        reservation for reservation in reserved if reservation.get("ReservationType") != "capacity-block"
    ]
    if not counted:
        return []
    account = asking.ask("sts", "look up the account", lambda sts: sts.get_caller_identity()["Account"])
    if isinstance(account, UnknownAnswer):
        return account
    return [
        (
            reservation["InstanceType"],
            reservation[
                "AvailableInstanceCount" if reservation["State"] == "active" else "TotalInstanceCount"
            ],
        )
        for reservation in counted
        if reservation["OwnerId"] == account  # one that is shared counts against its owner's quota
    ]


def _of_quotas(
    asking: _ServiceQueries, counted: list[tuple[str, int]] | UnknownAnswer, quotas: Sequence[Quota]
) -> dict[str, int] | UnknownAnswer:
    """The virtual CPUs of instances, by the codes of the quotas that they count against."""
    if isinstance(counted, UnknownAnswer):
        return counted
    # A quota counts vCPUs, not instances: g5.48xlarge needs 192 of it.
    by_quota = [
        (quota, name, count)
        for quota in quotas
        for name, count in counted
        if quota_of(name, quota.market) == quota
    ]
    sizes = _sizes(asking, {name for _, name, _ in by_quota})
    if isinstance(sizes, UnknownAnswer):
        return sizes
    quotas_left = dict.fromkeys((quota.code for quota in quotas), 0)
    for quota, name, count in by_quota:
        quotas_left[quota.code] += sizes[name] * count
    return quotas_left


def _sizes(asking: _ServiceQueries, names: Iterable[str]) -> dict[str, int] | UnknownAnswer:
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
    if isinstance(asked, UnknownAnswer):
        return asked
    return known | {row["InstanceType"]: row["VCpuInfo"]["DefaultVCpus"] for row in asked}


# --- likelihood ---


def _likelihoods(
    asking: _ServiceQueries, names: Sequence[str], market: Market, zones: dict[str, str] | UnknownAnswer
) -> Callable[[str, str], Likelihood]:
    """What says how likely a type is in a zone, by the zone's id."""
    placements = (
        _placements(asking, names) if market == "spot" else UnknownAnswer("on demand has no placement score")
    )
    capacities = _capacities(asking, names, market, zones)

    def of(name: str, zone_id: str) -> Likelihood:
        placement = capacity = None
        if isinstance(zones, UnknownAnswer):  # scores name zones by their ids
            return Likelihood(None, (), None, (zones.reason,))
        reasons = []
        if isinstance(placements, UnknownAnswer):
            reasons.append(placements.reason)
        elif (placement := placements.get(zone_id)) is None:
            reasons.append("AWS gave no placement score of the zone")
        if isinstance(capacities, UnknownAnswer):
            reasons.append(capacities.reason)
        elif (capacity := capacities.get((name, zone_id))) is None:
            reasons.append("AWS gave no capacity score of the type in the zone")
        together = tuple(names) if placement is not None else ()
        return Likelihood(placement, together, capacity, tuple(dict.fromkeys(reasons)))

    return of


def _placements(asking: _ServiceQueries, names: Sequence[str]) -> dict[str, int] | UnknownAnswer:
    """Spot placement scores by the ids of zones."""
    # Said here, because AWS answers with a low score and no reason.
    if len(names) < LEAST_TYPES:
        return UnknownAnswer(
            f"AWS scores {LEAST_TYPES} types together and calls fewer always low; of those that would do the "
            f"region has {len(names)}"
        )
    return asking.ask(
        "ec2",
        "ask for spot placement scores",
        lambda ec2: {
            row["AvailabilityZoneId"]: row["Score"]
            for row in calls.pages(
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
    asking: _ServiceQueries, names: Sequence[str], market: Market, zones: dict[str, str] | UnknownAnswer
) -> dict[tuple[str, str], Any] | UnknownAnswer:
    """Capacity scores by type and id of the zone: with the support plan Unified Operations alone."""
    if isinstance(zones, UnknownAnswer):
        return zones
    ids = sorted(zones.values())

    def scores(ec2: Any) -> dict[tuple[str, str], Any] | UnknownAnswer:
        # The installed botocore decides: a project may pin an older one.
        if not hasattr(ec2, "get_capacity_manager_supportability_scores"):
            return UnknownAnswer("this boto3 knows no capacity scores; one of 1.44.5 does")
        return {
            (row["InstanceType"], row["AvailabilityZoneId"]): row["Score"]
            # In batches, since one call takes so many zones and types.
            for first in range(0, len(ids), SCORED_ZONES)
            for some in range(0, len(names), SCORED_TYPES)
            for row in ec2.get_capacity_manager_supportability_scores(
                MarketType=market,
                CapacityAmount=1,
                CapacityUnit="instances",
                CapacityAvailabilityZoneIds=ids[first : first + SCORED_ZONES],
                InstanceTypes=[*names[some : some + SCORED_TYPES]],
            ).get("CapacityManagerSupportabilityScores", ())
        }

    return asking.ask("ec2", "ask for capacity scores", scores)


# --- reservation ---


def _reserved(asking: _ServiceQueries) -> list[Any] | UnknownAnswer:
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


def _blocks(asking: _ServiceQueries, name: str) -> tuple[tuple[str, BlockOffer], ...] | UnknownAnswer:
    """Capacity blocks of a type on sale, each with the name of its zone."""
    return asking.ask(
        "ec2",
        f"look up capacity blocks of {name}",
        lambda ec2: tuple(
            (
                block["AvailabilityZone"],
                BlockOffer(
                    block["CapacityBlockOfferingId"],
                    block["StartDate"],
                    block["CapacityBlockDurationHours"],
                    Decimal(block["UpfrontFee"]),
                    block["CurrencyCode"],
                ),
            )
            for block in calls.pages(
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
    reserved: list[Any] | UnknownAnswer,
    blocks: tuple[tuple[str, BlockOffer], ...] | UnknownAnswer,
) -> Reservation:
    reasons = [answer.reason for answer in (reserved, blocks) if isinstance(answer, UnknownAnswer)]
    held = None
    if not isinstance(reserved, UnknownAnswer):
        # A reservation for Windows or for dedicated tenancy starts no machine of gpukiln.
        held = tuple(
            CapacityReservation(
                reservation["CapacityReservationId"],
                reservation["AvailableInstanceCount"],
                reservation["InstanceMatchCriteria"] == "targeted",
                reservation.get("ReservationType") == "capacity-block",
            )
            for reservation in reserved
            if (reservation["InstanceType"], reservation["AvailabilityZone"], reservation["State"])
            == (name, zone, "active")
            and (reservation["InstancePlatform"], reservation["Tenancy"]) == ("Linux/UNIX", "default")
            and reservation["AvailableInstanceCount"]
        )
    on_sale = None
    if not isinstance(blocks, UnknownAnswer):
        on_sale = tuple(block for of_zone, block in blocks if of_zone == zone)
    return Reservation(held, on_sale, tuple(reasons))
