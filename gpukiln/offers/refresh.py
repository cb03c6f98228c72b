"""Asks a region what it has and what that costs, and keeps the answers with their day.

Prices need no account: who has no credentials reads AWS's public price list (price_files.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.quotas import QUOTAS
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, NoCredentialsError, explain_aws_errors
from gpukiln.errors import GpukilnError, PartialError, UnavailableError
from gpukiln.offers import cache
from gpukiln.offers.difference import Difference, difference
from gpukiln.offers.price_files import PriceFiles
from gpukiln.parsing import parse_json

REFRESH = "offer.refresh/1"
Row = dict[str, Any]
# EC2 keeps 90 days; a week shows the range of a price without last month's.
HISTORY = timedelta(days=7)
PRICING_REGION = "us-east-1"  # the Price List has endpoints in a few regions alone, with the prices of all
BATCH_TYPES = 100  # types in one question; a filter takes 200 values (EC2 API reference, "Filtering")
MICRO_USD = Decimal("0.000001")
# What an EC2 machine is in the Price List: aws/karpenter-provider-aws:pkg/providers/pricing/pricing.go
MACHINE = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
VOLUME = {"productFamily": "Storage", "volumeApiName": "gp3"}
ADDRESS = {"group": "VPCPublicIPv4Address"}  # its productFamily is empty


@dataclass(frozen=True)
class QueryResult:
    """The result of one query.

    Args:
        name: types, offerings, on_demand, volume, public_ipv4, spot or quotas.
        answers: How many types, prices or quotas; None where it could not be asked.
        as_of: The day of the answer that stands now; None: there is none.
        error: Why it could not be asked, with the next step; empty where it could.
    """

    name: str
    answers: int | None
    as_of: date | None
    error: str = ""


@dataclass(frozen=True)
class RefreshResult:
    """The result of every query."""

    cloud: str
    region: str
    parts: tuple[QueryResult, ...]


@dataclass(frozen=True)
class RefreshDocument:
    """What offer.refresh prints with --json.

    Args:
        difference: What the region has and the shipped catalogue lacks; null where it was not requested, or
            the types could not be asked.
    """

    schema: str
    refreshed: RefreshResult
    difference: Difference | None


@dataclass(frozen=True)
class _Region:
    """A region that is being queried.

    Args:
        files: Its price list for who has no credentials.
        described: The types with an accelerator that it knows; None where that is not known.
    """

    cloud: Cloud
    now: datetime
    say: Callable[[str], None]
    files: PriceFiles
    described: Mapping[str, cache.TypeDescription] | None = None

    @property
    def today(self) -> date:
        return self.now.date()

    @property
    def names(self) -> list[str]:
        """What is asked for: its types, and those of the catalogue that it may have."""
        living = {name for name, machine in instance_types().items() if machine.status != "retired"}
        return sorted(living | set(self.described or ()))

    @property
    def own_names(self) -> list[str]:
        """For questions that refuse a type that the region does not know."""
        return self.names if self.described is None else sorted(self.described)

    def source_name(self, source: str) -> str:
        """The source of an answer; an answer of the embedded cloud is marked as rehearsed."""
        return source if self.cloud.name == "aws" else f"{source}, rehearsed by the {self.cloud.name} cloud"

    def price_source(self, service: str, usage: str = "") -> str:
        """The source of a price."""
        of_file = self.files.has_read(service)
        where = "AWS's public price list of" if of_file else "AWS Price List, GetProducts of"
        return self.source_name(f"{where} {service}{': ' if usage else ''}{usage}")

    def empty_answer(self, call: str) -> UnavailableError:
        """The error for an empty answer, which must not replace what is cached."""
        return UnavailableError(
            f"{call} answered nothing of {self.cloud.region}",
            hint="enable the region for the account, then run the same command again",
        )


def refresh(cloud: Cloud, say: Callable[[str], None], *, now: datetime | None = None) -> RefreshResult:
    """Send every query and cache the answers; a query that fails leaves its old answer, with its old day.

    Args:
        say: Receives each query and each failure.
        now: For prices that held until now.

    Raises:
        UsageError: The document of the region is damaged.
        BusyError: Another process writes it.
    """
    before = cache.read(cloud.name, cloud.region)
    now = now or datetime.now(UTC)
    kept_products = {"AmazonEC2": (MACHINE, VOLUME), "AmazonVPC": (ADDRESS,)}
    files = PriceFiles(cloud.region, say, kept_products)
    region = _Region(cloud, now, say, files, before.types.types if before.types else None)
    answers: dict[str, Any] = {}
    errors: dict[str, GpukilnError] = {}
    # One failure stops no other query: an account may lack the permission for one service.
    for name, (what, ask) in QUERIES.items():
        say(f"asking {cloud.region} for {what}")
        try:
            answers[name] = ask(region)
        except UnavailableError as error:
            # Reported at the end with its exit code; what was known before stays in the cache.
            errors[name] = error
            say(f"{what}: {error.message}")
        else:
            if name == "types":
                region = replace(region, described=answers[name].types)
    stands = cache.update(cloud.name, cloud.region, answers) if answers else before
    return RefreshResult(cloud.name, cloud.region, tuple(_part(name, stands, errors) for name in QUERIES))


def refresh_document(cloud: Cloud, region: str, say: Callable[[str], None], *, diff: bool) -> RefreshDocument:
    """Ask everything, and compare the answers with the shipped catalogue.

    Args:
        diff: Whether they are compared.
    """
    refreshed = refresh(cloud, say)
    failed = any(query.error for query in refreshed.parts if query.name == "types")
    types = cache.read(cloud.name, region).types if diff and not failed else None
    return RefreshDocument(REFRESH, refreshed, difference(types, region) if types else None)


def require_complete(refreshed: RefreshResult) -> None:
    """Stop where something could not be asked.

    Raises:
        UnavailableError: Nothing could.
        PartialError: Some of it could.
    """
    failed = [part for part in refreshed.parts if part.error]
    if not failed:
        return
    kind = UnavailableError if len(failed) == len(refreshed.parts) else PartialError
    old = {part.name: f"stays as of {part.as_of}" if part.as_of else "is not known" for part in failed}
    raise kind(
        f"{len(failed)} of {len(refreshed.parts)} queries to {refreshed.region} were not answered",
        details=tuple(f"{part.name} {old[part.name]}: {part.error}" for part in failed),
        hint="the values shown for them keep their old day",
    )


def _part(name: str, stands: cache.CachedRegion, errors: Mapping[str, GpukilnError]) -> QueryResult:
    part = getattr(stands, name)
    as_of = part.as_of if part else None
    if error := errors.get(name):
        return QueryResult(
            name, None, as_of, f"{error.message}; {error.hint}" if error.hint else error.message
        )
    return QueryResult(name, _count(part), as_of)


def _count(part: Any) -> int:
    match part:
        case cache.TypeList():
            return len(part.types)
        case cache.ZoneOfferings() | cache.SpotHistory():
            return sum(map(bool, part.zones.values()))
        case cache.HourlyPrices():
            return len(part.usd_hour)
        case cache.Quotas():
            return len(part.vcpus)
        case _:
            return 1


# --- answers of EC2's own API -------------------------------------------------------------------------


def _types(region: _Region) -> cache.TypeList:
    ec2 = region.cloud.client("ec2")
    types: dict[str, cache.TypeDescription] = {}
    seen = 0
    with explain_aws_errors("look up the instance types"):
        for row in calls.pages(ec2, "describe_instance_types", "InstanceTypes"):
            seen += 1
            if row.get("GpuInfo", {}).get("Gpus"):  # no filter of the API knows GPUs
                types[row["InstanceType"]] = describe_type(row)
    if not seen:
        raise region.empty_answer("DescribeInstanceTypes")
    return cache.TypeList(
        region.today, region.source_name("EC2 DescribeInstanceTypes"), dict(sorted(types.items()))
    )


def describe_type(row: Row) -> cache.TypeDescription:
    """A type with an accelerator, as DescribeInstanceTypes gives it.

    Fractions of a GPU have a Count of 0; pods are counted on the default network card, as EKS does
    (aws/karpenter-provider-aws:pkg/providers/instancetype/types.go, ENILimitedPods).
    """
    [gpu, *_] = row["GpuInfo"]["Gpus"]
    network, usage = row["NetworkInfo"], row["SupportedUsageClasses"]
    # As `described` in the catalogue: interfaces times (addresses - 1) plus 2 for host-network pods.
    pods = None
    if cards := network.get("NetworkCards"):
        interfaces = cards[network.get("DefaultNetworkCardIndex", 0)]["MaximumNetworkInterfaces"]
        pods = interfaces * (network["Ipv4AddressesPerInterface"] - 1) + 2
    return cache.TypeDescription(
        manufacturer=gpu.get("Manufacturer", ""),
        accelerator=gpu.get("Name", ""),
        gpus=gpu.get("LogicalGpuCount") or gpu["Count"],
        gpu_memory_mib=gpu["MemoryInfo"]["SizeInMiB"],
        vcpu=row["VCpuInfo"]["DefaultVCpus"],
        memory_mib=row["MemoryInfo"]["SizeInMiB"],
        max_pods=pods,
        gpu_fraction=gpu.get("GpuPartitionSize", 1.0),
        arch="arm64" if "arm64" in row["ProcessorInfo"]["SupportedArchitectures"] else "x86_64",
        hypervisor=row.get("Hypervisor") or "none",
        efa=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        local_nvme_gb=row.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        on_demand="on-demand" in usage,
        spot="spot" in usage,
        capacity_blocks="capacity-block" in usage,
    )


def _offerings(region: _Region) -> cache.ZoneOfferings:
    ec2 = region.cloud.client("ec2")
    zones: dict[str, set[str]] = {name: set() for name in region.names}
    with explain_aws_errors("look up the zones of instance types"):
        for names in _batches(region.names):
            type_filters = [{"Name": "instance-type", "Values": names}]
            asked = {"LocationType": "availability-zone", "Filters": type_filters}
            for row in calls.pages(ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", **asked):
                zones[row["InstanceType"]].add(row["Location"])
    if region.own_names and not any(zones.values()):
        raise region.empty_answer("DescribeInstanceTypeOfferings")
    rows = {name: tuple(sorted(where)) for name, where in zones.items()}
    return cache.ZoneOfferings(region.today, region.source_name("EC2 DescribeInstanceTypeOfferings"), rows)


def _spot(region: _Region) -> cache.SpotHistory:
    ec2, start = region.cloud.client("ec2"), region.now - HISTORY
    asked = {"ProductDescriptions": ["Linux/UNIX"], "StartTime": start, "EndTime": region.now}
    # Every requested type gets an entry: an empty one says that there is no spot price, a missing one that
    # none was asked.
    seen: dict[str, dict[str, list[tuple[datetime, Decimal]]]] = {name: {} for name in region.names}
    with explain_aws_errors("look up spot prices"):
        for names in _batches(region.own_names):
            for row in calls.pages(
                ec2, "describe_spot_price_history", "SpotPriceHistory", InstanceTypes=names, **asked
            ):
                usd = _plain(_decimal(row["SpotPrice"], "DescribeSpotPriceHistory"))
                zone = seen[row["InstanceType"]].setdefault(row["AvailabilityZone"], [])
                zone.append((row["Timestamp"], usd))
    if region.own_names and not any(seen.values()):
        raise region.empty_answer("DescribeSpotPriceHistory")
    zones = {
        name: {zone: price_span(rows, start, region.now) for zone, rows in sorted(by_zone.items())}
        for name, by_zone in seen.items()
    }
    return cache.SpotHistory(region.today, region.source_name("EC2 DescribeSpotPriceHistory"), zones)


def price_span(
    changes: Sequence[tuple[datetime, Decimal]], start: datetime, now: datetime
) -> cache.ZonePrice:
    """What the price was between two moments.

    Args:
        changes: Each from when a price held until the next one; the first may be from before `start`, as EC2
            gives the one that held then, too.

    >>> from datetime import datetime
    >>> days = [datetime(2026, 11, day) for day in (1, 3, 5)]
    >>> price_span([(days[0], Decimal(1)), (days[1], Decimal(2))], days[0], days[2])
    ZonePrice(now=Decimal('2'), low=Decimal('1'), mean=Decimal('1.5'), high=Decimal('2'))
    >>> price_span([(days[0], Decimal(1))], days[1], days[2]).mean
    Decimal('1')
    """
    rows = sorted(changes)
    # Each price holds until the next change, the last one until now.
    ends = [when for when, _ in rows[1:]] + [max(now, rows[-1][0])]
    seconds = [
        Decimal(str(max(0.0, (end - max(since, start)).total_seconds())))
        for (since, _), end in zip(rows, ends, strict=True)
    ]
    last = rows[-1][1]
    prices = [usd for (_, usd), lasted in zip(rows, seconds, strict=True) if lasted] or [last]
    mean = last
    if total := sum(seconds):
        weighed = sum(usd * lasted for (_, usd), lasted in zip(rows, seconds, strict=True))
        mean = _plain((weighed / total).quantize(MICRO_USD))
    return cache.ZonePrice(last, min(prices), mean, max(prices))


# --- the Price List and Service Quotas ------------------------------------------------------------------


def _on_demand(region: _Region) -> cache.HourlyPrices:
    names = set(region.names)
    usd_by_type: dict[str, set[Decimal]] = {}
    for product in _products(region, "AmazonEC2", **MACHINE):
        name = product["product"]["attributes"].get("instanceType", "")
        if name in names:
            usd_by_type.setdefault(name, set()).update(_usd(product, "Hrs"))
    prices: dict[str, Decimal] = {}
    for name, usd in sorted(usd_by_type.items()):
        # Two prices mean that a filter of MACHINE no longer selects one product: none is better than the
        # wrong one.
        if len(usd) == 1:
            [prices[name]] = usd
        elif usd:
            region.say(f"{name} has {len(usd)} prices in the Price List, so none is used: {sorted(usd)}")
    if region.own_names and not prices:
        raise region.empty_answer("GetProducts")
    return cache.HourlyPrices(region.today, region.price_source("AmazonEC2"), prices)


def _volume(region: _Region) -> cache.UnitPrice:
    return _amount(region, "AmazonEC2", "EBS:VolumeUsage.gp3", "GB-Mo", VOLUME)


def _public_ipv4(region: _Region) -> cache.UnitPrice:
    return _amount(region, "AmazonVPC", "PublicIPv4:InUseAddress", "Hrs", ADDRESS)


def _amount(
    region: _Region, service: str, usage: str, unit: str, about: Mapping[str, str]
) -> cache.UnitPrice:
    """The price of a usage type; its name has the region before it, as in USW2-EBS:VolumeUsage.gp3."""
    amounts: set[Decimal] = set()
    for product in _products(region, service, **about):
        if product["product"]["attributes"].get("usagetype", "").endswith(usage):
            amounts |= _usd(product, unit)
    if len(amounts) != 1:
        raise (
            region.empty_answer(f"GetProducts of {service}")
            if not amounts
            else UnavailableError(
                f"the Price List has {len(amounts)} prices of {usage} in {region.cloud.region}: "
                f"{sorted(amounts)}"
            )
        )
    return cache.UnitPrice(region.today, region.price_source(service, usage), amounts.pop())


def _products(region: _Region, service: str, **attributes: str) -> Iterator[Row]:
    query = {"regionCode": region.cloud.region, **attributes}
    try:
        yield from _get_products(region, service, query)
    except NoCredentialsError:
        yield from region.files.products(service, query)


def _get_products(region: _Region, service: str, query: Mapping[str, str]) -> Iterator[Row]:
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in query.items()]
    with explain_aws_errors("look up prices"):
        # The endpoint's region says nothing about the prices; regionCode does.
        pricing = region.cloud.in_region(PRICING_REGION).client("pricing")
        for page in pricing.get_paginator("get_products").paginate(ServiceCode=service, Filters=filters):
            for text in page["PriceList"]:  # each a document of its own
                try:
                    yield parse_json(text)
                except ValueError as error:
                    raise UnavailableError(f"GetProducts of {service} answered no JSON: {error}") from error


def _usd(product: Row, unit: str) -> set[Decimal]:
    """Prices on demand; what has none yet stands there with 0, and China's are in CNY."""
    return {
        _plain(usd)
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for step in term["priceDimensions"].values()
        if step["unit"] == unit and step.get("beginRange", "0") == "0" and "USD" in step["pricePerUnit"]
        if (usd := _decimal(step["pricePerUnit"]["USD"], "GetProducts")) > 0
    }


def _quotas(region: _Region) -> cache.Quotas:
    # The applied value of the account, not AWS's default (GetAWSDefaultServiceQuota).
    client = region.cloud.client("service-quotas")
    vcpus: dict[str, int] = {}
    with explain_aws_errors("look up the account's quotas"):
        for quota in QUOTAS:
            try:
                answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)
            except client.exceptions.NoSuchResourceException:
                continue  # the region has none of it
            vcpus[quota.code] = int(answer["Quota"]["Value"])
    if not vcpus:
        raise region.empty_answer("GetServiceQuota")
    return cache.Quotas(region.today, region.source_name("Service Quotas, GetServiceQuota"), vcpus)


QUERIES: dict[str, tuple[str, Callable[[_Region], Any]]] = {  # `types` first: the others ask for them
    "types": ("instance types", _types),
    "offerings": ("zones", _offerings),
    "on_demand": ("prices on demand", _on_demand),
    "volume": ("the price of gp3 volumes", _volume),
    "public_ipv4": ("the price of public IPv4 addresses", _public_ipv4),
    "spot": ("spot prices", _spot),
    "quotas": ("quotas", _quotas),
}


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), BATCH_TYPES):
        yield list(names[first : first + BATCH_TYPES])


def _decimal(text: str, call: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise UnavailableError(f"{call} answered {text!r}, which is no price") from error


def _plain(usd: Decimal) -> Decimal:
    """Without the zeros at the end: the Price List has ten digits, 0.5260000000.

    >>> _plain(Decimal("0.5260000000"))
    Decimal('0.526')
    >>> _plain(Decimal("10.00"))
    Decimal('10')
    """
    short = usd.normalize()
    return short.quantize(Decimal(1)) if short == short.to_integral() else short
