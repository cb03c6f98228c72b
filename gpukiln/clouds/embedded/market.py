"""Quotas, prices and capacity, which moto does not answer: from the catalogue and from scripted shortages.

No value is measured. On-demand prices are the catalogue's, for a region without prices those of us-east-1; a
type without a price has none here. A spot price is a share of it (SPOT_SHARE) that changes every CHANGE_HOURS
and is a little higher in each further zone; a moment always has the same price. A placement score counts how
many of the requested types a zone offers and has. For scripted shortages see `scarcity.py`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

from botocore.loaders import create_loader
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ec2.responses import EC2Response

from gpukiln.catalog.instance_types import every_instance_type, instance_types
from gpukiln.catalog.prices import DatedPrice, address_price, machine_price, volume_price
from gpukiln.catalog.quotas import QUOTAS, Market, quota_of
from gpukiln.catalog.regions import regions
from gpukiln.clouds.embedded import scarcity
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.refusals import SCOPE, Refusal, refusal_of
from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json

LINUX = "Linux/UNIX"
SPOT_SHARE = tuple(
    map(Decimal, ("0.40", "0.46", "0.43", "0.49", "0.38"))
)  # shares of the on-demand price, one after the other
CHANGE_HOURS = 40  # hours between two spot prices: four or five changes a week
HISTORY_DAYS = 90  # botocore, DescribeSpotPriceHistory: StartTime
SPOT_PAGE = 1000
FEW_TYPES, FEW_SCORE, BEST_SCORE = 3, 3, 9  # botocore, GetSpotPlacementScores: fewer types score low
PRICING_REGIONS = (
    "us-east-1",
    "eu-central-1",
    "ap-south-1",
)  # AWS General Reference, "AWS Price List endpoints"
JSON = "application/x-amz-json-1.1"


# --- EC2: calls that botocore's model has and moto does not ---


def extend_market(layout: Layout) -> None:
    """Extend moto. Call once, after its types are those of the catalogue."""

    def with_script(answer: Callable[[Any, scarcity.Script], ActionResult]) -> Callable[[Any], ActionResult]:
        def call(self: Any) -> ActionResult:
            self.error_on_dryrun()
            return answer(self, _script(layout))

        return call

    for answer in (
        get_spot_placement_scores,
        get_capacity_manager_supportability_scores,
        describe_capacity_reservations,
        describe_capacity_block_offerings,
        describe_spot_price_history,
    ):
        setattr(EC2Response, answer.__name__, with_script(answer))


def refuse_beyond_quota(layout: Layout, ec2: Any, instance_type: str, market: Market, count: int) -> None:
    """Refuse a launch that exceeds a quota, as EC2 does.

    Raises:
        EC2ClientError: It exceeds one, or the script can't be read.
    """
    quota = quota_of(instance_type, market)
    if quota is None:
        return
    limit = _script(layout).limit(quota.code)
    running = [
        instance
        for instance in _running_instances(ec2)
        if quota_of(instance.instance_type, _market_of(instance)) == quota
    ]
    if sum(_vcpus(instance.instance_type) for instance in running) + count * _vcpus(instance_type) <= limit:
        return
    if market == "spot":
        raise EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    raise EC2ClientError(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def get_spot_placement_scores(self: Any, script: scarcity.Script) -> ActionResult:
    """GetSpotPlacementScores for types given by name."""
    names = _check_types(self, self._get_param("InstanceTypes", []))
    if not names:
        raise EC2ClientError("UnsupportedOperation", "The embedded EC2 scores only types given by name")
    rows = []
    for region in self._get_param("RegionNames", []) or [self.region]:
        scores = {zone: _placement_score(script, names, region, zone.name) for zone in _zones(region)}
        if self._get_param("SingleAvailabilityZone", False):
            rows += [
                {"Region": region, "AvailabilityZoneId": zone.zone_id, "Score": score}
                for zone, score in scores.items()
            ]
        else:
            rows.append({"Region": region, "Score": max(scores.values(), default=1)})
    # The API answers the ten best.
    rows.sort(key=lambda row: -row["Score"])
    return ActionResult({"SpotPlacementScores": rows[:10]})


def get_capacity_manager_supportability_scores(self: Any, script: scarcity.Script) -> ActionResult:
    """GetCapacityManagerSupportabilityScores, as for an account with the support plan that it requires."""
    market = self._get_param("MarketType")
    zone_ids = self._get_param("CapacityAvailabilityZoneIds", [])
    known = {zone.zone_id: (region, zone.name) for region in regions() for zone in _zones(region)}
    if wrong := [zone_id for zone_id in zone_ids if zone_id not in known]:
        raise EC2ClientError("InvalidParameterValue", f"Invalid availability zone ids: {wrong}")
    rows = []
    for zone_id in zone_ids:
        region, zone = known[zone_id]
        for name in _check_types(self, self._get_param("InstanceTypes", [])):
            launch = scarcity.Launch(name, market, 1)
            has = "low" if script.scarce(launch, zone) else "high"
            score = has if name in _offered_types(region, zone) else "unsupported"
            rows.append({"InstanceType": name, "AvailabilityZoneId": zone_id, "Score": score})
    best = next(
        (level for level in ("high", "low") if any(row["Score"] == level for row in rows)), "unsupported"
    )
    return ActionResult({"AggregateScore": best, "CapacityManagerSupportabilityScores": rows})


def describe_capacity_reservations(self: Any, script: scarcity.Script) -> ActionResult:
    """DescribeCapacityReservations: those of the script, open to every matching launch."""
    zones = {zone.name: zone.zone_id for zone in _zones(self.region)}
    rows = []
    for reservation in script.reserved:
        if reservation.zone not in zones:
            continue
        used = sum(
            running.instance_type == reservation.instance_type
            and running.availability_zone == reservation.zone
            and _market_of(running) == "on-demand"
            for running in _running_instances(self.ec2_backend)
        )
        rows.append(
            {
                "CapacityReservationId": _stable_id("cr", ":".join(reservation.key)),
                "OwnerId": self.current_account,
                "InstanceType": reservation.instance_type,
                "InstancePlatform": LINUX,
                "AvailabilityZone": reservation.zone,
                "AvailabilityZoneId": zones[reservation.zone],
                "Tenancy": "default",
                "TotalInstanceCount": reservation.count,
                "AvailableInstanceCount": max(0, reservation.count - used),
                "State": "active",
                "EndDateType": "unlimited",
                "InstanceMatchCriteria": "open",
                "ReservationType": "default",
            }
        )
    if ids := self._get_param("CapacityReservationIds", []):
        rows = [row for row in rows if row["CapacityReservationId"] in ids]
    fields = {
        "instance-type": "InstanceType",
        "availability-zone": "AvailabilityZone",
        "owner-id": "OwnerId",
        "instance-platform": "InstancePlatform",
        "tenancy": "Tenancy",
        "state": "State",
        "instance-match-criteria": "InstanceMatchCriteria",
    }
    return _page(self, "CapacityReservations", _apply_filters(self, rows, fields))


def describe_capacity_block_offerings(self: Any, script: scarcity.Script) -> ActionResult:
    """DescribeCapacityBlockOfferings: one for each zone that offers the type, at the on-demand price."""
    name, hours = self._get_param("InstanceType"), int(self._get_param("CapacityDurationHours") or 0)
    count = int(self._get_param("InstanceCount") or 1)
    facts = instance_types().get(name)
    if facts is None or not facts.capacity_blocks:
        raise EC2ClientError("InvalidParameterValue", f"Capacity Blocks are not available for '{name}'")
    days = hours / 24
    if not (days in range(1, 15) or (days % 7 == 0 and 0 < days <= 182)):  # botocore, CapacityDurationHours
        raise EC2ClientError("InvalidParameterValue", f"Invalid CapacityDurationHours: {hours}")
    earliest = max(_utc(self._get_param("StartDateRange"), _now()), _now()) + timedelta(minutes=30)
    begins = earliest.replace(hour=11, minute=30, second=0, microsecond=0)  # user guide, Considerations
    begins += timedelta(days=1) if begins < earliest else timedelta()
    latest = _utc(self._get_param("EndDateRange"), begins + timedelta(weeks=8))
    price = _on_demand_price(name, self.region)
    rows = [
        {
            "CapacityBlockOfferingId": _stable_id("cb", f"{zone.name} {name} {begins}"),
            "InstanceType": name,
            "AvailabilityZone": zone.name,
            "InstanceCount": count,
            "StartDate": begins,
            "EndDate": begins + timedelta(hours=hours),
            "CapacityBlockDurationHours": hours,
            "UpfrontFee": f"{price.usd * hours * count:.2f}",
            "CurrencyCode": "USD",
            "Tenancy": "default",
        }
        for zone in _zones(self.region)
        if price
        and begins <= latest
        and name in _offered_types(self.region, zone.name)
        and not script.scarce(scarcity.Launch(name, "on-demand", count), zone.name)
    ]
    return _page(self, "CapacityBlockOfferings", rows)


def describe_spot_price_history(self: Any, script: scarcity.Script) -> ActionResult:
    """DescribeSpotPriceHistory: the price at the start of the time and each change, the newest first."""
    del script  # a shortage does not change prices here
    end = min(_utc(self._get_param("EndTime"), _now()), _now())
    start = max(_utc(self._get_param("StartTime"), end), _now() - timedelta(days=HISTORY_DAYS))
    names = _check_types(self, self._get_param("InstanceTypes", []))
    zone_name, zone_id = self._get_param("AvailabilityZone"), self._get_param("AvailabilityZoneId")
    products = self._get_param("ProductDescriptions", [])
    rows = [
        {
            "InstanceType": name,
            "ProductDescription": LINUX,
            "SpotPrice": f"{usd:.6f}",
            "AvailabilityZone": zone.name,
            "AvailabilityZoneId": zone.zone_id,
            "Timestamp": when,
        }
        for zone in _zones(self.region)
        if zone_name in (None, zone.name) and zone_id in (None, zone.zone_id)
        for name in sorted(_offered_types(self.region, zone.name) & set(names or instance_types()))
        for when, usd in spot_prices(name, self.region, zone.name, start, end)
        if not products or LINUX in products
    ]
    fields = {
        "availability-zone": "AvailabilityZone",
        "availability-zone-id": "AvailabilityZoneId",
        "instance-type": "InstanceType",
        "product-description": "ProductDescription",
    }
    rows = _apply_filters(self, rows, fields)
    rows.sort(key=lambda row: row["Timestamp"], reverse=True)
    return _page(self, "SpotPriceHistory", rows, SPOT_PAGE)


def spot_prices(
    instance_type: str, region: str, zone: str, start: datetime, end: datetime
) -> list[tuple[datetime, Decimal]]:
    """The changes of a spot price, from the last one before `start`; the oldest first."""
    price = _on_demand_price(instance_type, region)
    if price is None:
        return []
    place = ord(zone[-1]) - ord("a")  # zones change at different hours and differ a little
    period, offset = CHANGE_HOURS * 3600, place * 3600
    first, last = (int((moment.timestamp() - offset) // period) for moment in (start, end))
    return [
        (
            datetime.fromtimestamp(number * period + offset, UTC),
            price.usd * SPOT_SHARE[(number + place) % len(SPOT_SHARE)] * (1 + Decimal(place) / 50),
        )
        for number in range(first, last + 1)
    ]


def _placement_score(script: scarcity.Script, names: Sequence[str], region: str, zone: str) -> int:
    has = [
        name
        for name in names
        if name in _offered_types(region, zone) and not script.scarce(scarcity.Launch(name, "spot", 1), zone)
    ]
    score = 1 + round((BEST_SCORE - 1) * len(has) / len(names))
    return score if len(names) >= FEW_TYPES else min(score, FEW_SCORE)


def _check_types(response: Any, names: Sequence[str]) -> list[str]:
    if wrong := [name for name in names if name not in every_instance_type()]:
        action = response._get_action()
        raise EC2ClientError("InvalidParameterValue", f"{action}: invalid instance types: {', '.join(wrong)}")
    return list(dict.fromkeys(names))


def _on_demand_price(instance_type: str, region: str) -> DatedPrice | None:
    return machine_price(instance_type, region) or machine_price(instance_type, "us-east-1")


def _zones(region: str) -> list[Any]:
    return list(RegionsAndZonesBackend.zones.get(region, ()))


@cache
def _offered_types(region: str, zone: str) -> frozenset[str]:
    """The types with an accelerator that a zone offers, from moto's offerings without retired types."""
    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ())
    here = {offer["InstanceType"] for offer in offers if offer["Location"] == zone}
    retired = {name for name, facts in instance_types().items() if facts.status == "retired"}
    return frozenset(here - retired)


def _running_instances(ec2: Any) -> Iterable[Any]:
    for reservation in list(ec2.reservations.values()):
        yield from (
            instance for instance in reservation.instances if instance.state in ("pending", "running")
        )


def _market_of(instance: Any) -> Market:
    return "spot" if instance.lifecycle == "spot" else "on-demand"


def _vcpus(instance_type: str) -> int:
    if known := instance_types().get(instance_type):
        return known.vcpu
    return int(INSTANCE_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"])


# The same reservation has the same id in each process.
def _stable_id(prefix: str, of: str) -> str:
    return f"{prefix}-{hashlib.sha256(of.encode()).hexdigest()[:17]}"


def _script(layout: Layout) -> scarcity.Script:
    try:
        return scarcity.script(layout)
    except UnavailableError as error:
        raise EC2ClientError("InternalError", f"{error.message}; {error.hint}") from error


def _apply_filters(
    response: Any, rows: list[dict[str, Any]], fields: Mapping[str, str]
) -> list[dict[str, Any]]:
    for filter_ in response._get_param("Filters", []):
        if filter_["Name"] not in fields:
            raise EC2ClientError(
                "UnsupportedOperation", f"The embedded EC2 has no filter {filter_['Name']} here"
            )
        rows = [row for row in rows if row[fields[filter_["Name"]]] in filter_["Values"]]
    return rows


def _page(response: Any, key: str, rows: list[dict[str, Any]], most: int = 100) -> ActionResult:
    start, size = int(response._get_param("NextToken") or 0), int(response._get_param("MaxResults") or most)
    more = {"NextToken": str(start + size)} if start + size < len(rows) else {}
    return ActionResult({key: rows[start : start + size], **more})


def _now() -> datetime:
    return datetime.now(UTC)


def _utc(moment: datetime | None, default: datetime) -> datetime:
    if moment is None:
        return default
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# --- Service Quotas and the Price List: JSON protocols that moto does not serve ---


class ServiceAnswerError(Exception):
    """An error as the answer: its code and text."""


def answer(layout: Layout, environ: Mapping[str, Any]) -> Refusal | None:
    """The answer to a request for one of these services; None for other services.

    Args:
        environ: WSGI's environ; its authorization was checked.
    """
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    scope, target = SCOPE.search(authorization), environ.get("HTTP_X_AMZ_TARGET", "")
    if scope is None or scope["service"] not in ("servicequotas", "pricing"):
        return None
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "ServiceQuotasV20190624.GetServiceQuota": lambda: _get_quota(script, request),
        "ServiceQuotasV20190624.ListServiceQuotas": lambda: _list_quotas(script, request),
        "AWSPriceListService.GetProducts": lambda: _get_products(scope["region"], request),
    }
    try:
        if target not in calls:
            raise ServiceAnswerError(
                "UnknownOperationException", f"The embedded cloud does not have {target}"
            )
        request = parse_json(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or "{}")
        script = scarcity.script(layout)
        return 200, JSON, json.dumps(calls[target]()).encode()
    except ServiceAnswerError as error:
        return refusal_of(authorization, 400, *error.args)
    except (ValueError, TypeError, LookupError) as error:  # botocore would not send such a request
        message = f"{type(error).__name__}: {error}"
        return refusal_of(authorization, 400, "SerializationException", message)
    except UnavailableError as error:
        return refusal_of(authorization, 500, "ServiceException", f"{error.message}; {error.hint}")


def _get_quota(script: scarcity.Script, request: Mapping[str, Any]) -> dict[str, Any]:
    quotas = [quota for quota in _quotas(script, request) if quota["QuotaCode"] == request["QuotaCode"]]
    if not quotas:
        raise ServiceAnswerError(
            "NoSuchResourceException", f"this service has no quota {request['QuotaCode']}"
        )
    return {"Quota": quotas[0]}


def _list_quotas(script: scarcity.Script, request: Mapping[str, Any]) -> dict[str, Any]:
    return _json_page("Quotas", _quotas(script, request), request)


def _quotas(script: scarcity.Script, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    if request["ServiceCode"] != "ec2":
        raise ServiceAnswerError("NoSuchResourceException", "the embedded cloud has only quotas of ec2")
    return [
        {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaCode": quota.code,
            "QuotaName": quota.name,
            "Value": float(script.limit(quota.code)),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }
        for quota in QUOTAS
    ]


def _get_products(region: str, request: Mapping[str, Any]) -> dict[str, Any]:
    if region not in PRICING_REGIONS:
        raise ServiceAnswerError(
            "UnrecognizedClientException",
            f"the Price List is in {', '.join(PRICING_REGIONS)}, not in {region}",
        )
    products = [
        json.dumps(product)
        for product in _products()
        if product["serviceCode"] == request["ServiceCode"]
        and all(_matches_filter(product, filter_) for filter_ in request.get("Filters", ()))
    ]
    return {"FormatVersion": "aws_v1", **_json_page("PriceList", products, request)}


def _matches_filter(product: Mapping[str, Any], filter_: Mapping[str, str]) -> bool:
    of_product = {name.lower(): value for name, value in product["product"]["attributes"].items()}
    of_product |= {
        "servicecode": product["serviceCode"],
        "productfamily": product["product"]["productFamily"],
    }
    value, expected = str(of_product.get(filter_["Field"].lower(), "")), filter_["Value"]
    fits: dict[str, bool] = {
        "TERM_MATCH": value == expected,
        "EQUALS": value == expected,
        "CONTAINS": expected in value,
        "ANY_OF": value in expected.split(","),
        "NONE_OF": value not in expected.split(","),
    }
    if filter_["Type"] not in fits:
        raise ServiceAnswerError("InvalidParameterException", f"invalid filter type {filter_['Type']}")
    return fits[filter_["Type"]]


@cache
def _products() -> tuple[dict[str, Any], ...]:
    """The Price List's products: machines, gp3 volumes and public addresses with a price, for each region."""
    return tuple(product for region in sorted(regions()) for product in _products_of(region))


def _products_of(region: str) -> Iterator[dict[str, Any]]:
    for name in instance_types():
        if any(name in _offered_types(region, zone.name) for zone in _zones(region)) and (
            price := _on_demand_price(name, region)
        ):
            yield _machine_product(region, name, price.usd)
    if volume := volume_price(region) or volume_price("us-east-1"):
        about = {"usagetype": "EBS:VolumeUsage.gp3", "volumeApiName": "gp3"}
        yield _product(region, "AmazonEC2", "Storage", about, volume.usd, "GB-Mo")
    if address := address_price(region) or address_price("us-east-1"):
        about = {"usagetype": "PublicIPv4:InUseAddress", "group": "VPCPublicIPv4Address"}
        yield _product(region, "AmazonVPC", "", about, address.usd, "Hrs")


def _machine_product(region: str, name: str, usd: Decimal) -> dict[str, Any]:
    """The product of a machine: Linux, shared tenancy, on demand."""
    facts = instance_types()[name]
    about = {
        "instanceType": name,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        "vcpu": str(facts.vcpu),
        "memory": f"{facts.memory_mib / 1024:g} GiB",
    }
    bare = " (bare metal)" if name.endswith(".metal") else ""
    return _product(region, "AmazonEC2", f"Compute Instance{bare}", about, usd, "Hrs")


def _product(
    region: str, service: str, family: str, about: dict[str, str], usd: Decimal, unit: str
) -> dict[str, Any]:
    sku = hashlib.sha256(f"{region} {about}".encode()).hexdigest()[:16].upper()
    # JRTCKXETXF is the offer term "OnDemand", 6YS6EN2CT7 its hourly rate, in all of AWS's price files.
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"  # AWS's codes for on demand and per hour
    price = {
        "rateCode": rate,
        "unit": unit,
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd} per {unit} of {about.get('instanceType') or about['usagetype']}",
        "appliesTo": [],
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    attributes = {
        **about,
        "regionCode": region,
        "location": _long_names().get(region, region),
        "locationType": "AWS Region",
        "servicecode": service,
    }
    on_demand = {
        "sku": sku,
        "offerTermCode": "JRTCKXETXF",
        "priceDimensions": {rate: price},
        "termAttributes": {},
    }
    return {
        "product": {"productFamily": family, "attributes": attributes, "sku": sku},
        "serviceCode": service,
        "terms": {"OnDemand": {term: on_demand}},
    }


@cache
def _long_names() -> dict[str, str]:
    names: dict[str, str] = {
        name: facts["description"]
        for partition in create_loader().load_data("endpoints")["partitions"]
        for name, facts in partition["regions"].items()
    }
    return names


def _json_page(key: str, rows: Sequence[Any], request: Mapping[str, Any]) -> dict[str, Any]:
    start, size = int(request.get("NextToken") or 0), int(request.get("MaxResults") or 100)
    more = {"NextToken": str(start + size)} if start + size < len(rows) else {}
    return {key: rows[start : start + size], **more}
