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
HISTORY = timedelta(days=7)
PRICING_REGION = "us-east-1"  # the Price List has endpoints in a few regions alone, with the prices of all
AT_ONCE = 100  # types in one question; a filter takes 200 values (EC2 API reference, "Filtering")
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
    """What became of one question.

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
class Refreshed:
    """What became of every question."""

    cloud: str
    region: str
    parts: tuple[QueryResult, ...]


@dataclass(frozen=True)
class RefreshDocument:
    """What offer.refresh prints with --json.

    Args:
        difference: What the region has that the shipped catalogue has not; null where nobody asked for it, or
            the types could not be asked.
    """

    schema: str
    refreshed: Refreshed
    difference: Difference | None


@dataclass(frozen=True)
class _Region:
    """A region that is being asked.

    Args:
        files: Its price list for who has no credentials.
        described: The types with an accelerator that it knows; None where that is not known.
    """

    cloud: Cloud
    now: datetime
    say: Callable[[str], None]
    files: PriceFiles
    described: Mapping[str, cache.Described] | None = None

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

    def says(self, source: str) -> str:
        """The source of an answer; a rehearsed one may not be taken for AWS's."""
        return source if self.cloud.name == "aws" else f"{source}, rehearsed by the {self.cloud.name} cloud"

    def says_list(self, service: str, usage: str = "") -> str:
        """The source of a price."""
        of_file = self.files.has_read(service)
        where = "AWS's public price list of" if of_file else "AWS Price List, GetProducts of"
        return self.says(f"{where} {service}{': ' if usage else ''}{usage}")

    def none(self, call: str) -> UnavailableError:
        """An answer without anything in it is none: what was known before may not go with it."""
        return UnavailableError(
            f"{call} answered nothing of {self.cloud.region}",
            hint="is the region enabled for the account? then run the same command again",
        )


def refresh(cloud: Cloud, say: Callable[[str], None], *, now: datetime | None = None) -> Refreshed:
    """Ask everything and keep the answers; a question that fails leaves its old answer, with its old day.

    Args:
        say: Told what is asked, and what failed.
        now: For prices that held until now.

    Raises:
        UsageError: The document of the region is damaged.
        BusyError: Another process writes it.
    """
    before = cache.read(cloud.name, cloud.region)
    now = now or datetime.now(UTC)
    wanted = {"AmazonEC2": (MACHINE, VOLUME), "AmazonVPC": (ADDRESS,)}
    files = PriceFiles(cloud.region, say, wanted)
    region = _Region(cloud, now, say, files, before.types.types if before.types else None)
    answers: dict[str, Any] = {}
    errors: dict[str, GpukilnError] = {}
    for name, (what, ask) in QUESTIONS.items():
        say(f"asking {cloud.region} for {what}")
        try:
            answers[name] = ask(region)
        except UnavailableError as error:
            errors[name] = error
            say(f"{what}: {error.message}")
        else:
            if name == "types":
                region = replace(region, described=answers[name].types)
    stands = cache.update(cloud.name, cloud.region, answers) if answers else before
    return Refreshed(cloud.name, cloud.region, tuple(_part(name, stands, errors) for name in QUESTIONS))


def refresh_document(cloud: Cloud, region: str, say: Callable[[str], None], *, diff: bool) -> RefreshDocument:
    """Ask everything, and compare the answers with the shipped catalogue.

    Args:
        diff: Whether they are compared.
    """
    refreshed = refresh(cloud, say)
    failed = any(query.error for query in refreshed.parts if query.name == "types")
    types = cache.read(cloud.name, region).types if diff and not failed else None
    return RefreshDocument(REFRESH, refreshed, difference(types, region) if types else None)


def require_complete(refreshed: Refreshed) -> None:
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
        f"{len(failed)} of {len(refreshed.parts)} questions to {refreshed.region} were not answered",
        details=tuple(f"{part.name} {old[part.name]}: {part.error}" for part in failed),
        hint="what is shown of them is as old as it says",
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
        case cache.Types():
            return len(part.types)
        case cache.Offerings() | cache.SpotHistory():
            return sum(map(bool, part.zones.values()))
        case cache.Hourly():
            return len(part.usd_hour)
        case cache.Quotas():
            return len(part.vcpus)
        case _:
            return 1


# --- EC2 ------------------------------------------------------------------------------------------------


def _types(region: _Region) -> cache.Types:
    ec2 = region.cloud.client("ec2")
    found: dict[str, cache.Described] = {}
    seen = 0
    with explain_aws_errors("look up the instance types"):
        for row in calls.pages(ec2, "describe_instance_types", "InstanceTypes"):
            seen += 1
            if row.get("GpuInfo", {}).get("Gpus"):  # no filter of the API knows GPUs
                found[row["InstanceType"]] = described(row)
    if not seen:
        raise region.none("DescribeInstanceTypes")
    return cache.Types(region.today, region.says("EC2 DescribeInstanceTypes"), dict(sorted(found.items())))


def described(row: Row) -> cache.Described:
    """A type with an accelerator, as DescribeInstanceTypes gives it.

    Fractions of a GPU have a Count of 0; pods are counted on the default network card, as EKS does
    (aws/karpenter-provider-aws:pkg/providers/instancetype/types.go, ENILimitedPods).
    """
    [gpu, *_] = row["GpuInfo"]["Gpus"]
    network, usage = row["NetworkInfo"], row["SupportedUsageClasses"]
    pods = None
    if cards := network.get("NetworkCards"):
        interfaces = cards[network.get("DefaultNetworkCardIndex", 0)]["MaximumNetworkInterfaces"]
        pods = interfaces * (network["Ipv4AddressesPerInterface"] - 1) + 2
    return cache.Described(
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


def _offerings(region: _Region) -> cache.Offerings:
    ec2 = region.cloud.client("ec2")
    zones: dict[str, set[str]] = {name: set() for name in region.names}
    with explain_aws_errors("look up the zones of instance types"):
        for names in _some(region.names):
            wanted = [{"Name": "instance-type", "Values": names}]
            asked = {"LocationType": "availability-zone", "Filters": wanted}
            for row in calls.pages(ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", **asked):
                zones[row["InstanceType"]].add(row["Location"])
    if region.own_names and not any(zones.values()):
        raise region.none("DescribeInstanceTypeOfferings")
    rows = {name: tuple(sorted(where)) for name, where in zones.items()}
    return cache.Offerings(region.today, region.says("EC2 DescribeInstanceTypeOfferings"), rows)


def _spot(region: _Region) -> cache.SpotHistory:
    ec2, start = region.cloud.client("ec2"), region.now - HISTORY
    asked = {"ProductDescriptions": ["Linux/UNIX"], "StartTime": start, "EndTime": region.now}
    seen: dict[str, dict[str, list[tuple[datetime, Decimal]]]] = {name: {} for name in region.names}
    with explain_aws_errors("look up spot prices"):
        for names in _some(region.own_names):
            for row in calls.pages(
                ec2, "describe_spot_price_history", "SpotPriceHistory", InstanceTypes=names, **asked
            ):
                usd = _plain(_decimal(row["SpotPrice"], "DescribeSpotPriceHistory"))
                zone = seen[row["InstanceType"]].setdefault(row["AvailabilityZone"], [])
                zone.append((row["Timestamp"], usd))
    if region.own_names and not any(seen.values()):
        raise region.none("DescribeSpotPriceHistory")
    zones = {
        name: {zone: held(rows, start, region.now) for zone, rows in sorted(by_zone.items())}
        for name, by_zone in seen.items()
    }
    return cache.SpotHistory(region.today, region.says("EC2 DescribeSpotPriceHistory"), zones)


def held(changes: Sequence[tuple[datetime, Decimal]], start: datetime, now: datetime) -> cache.ZonePrice:
    """What the price was between two moments.

    Args:
        changes: Each from when a price held until the next one; the first may be from before `start`, as EC2
            gives the one that held then, too.
    """
    rows = sorted(changes)
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


def _on_demand(region: _Region) -> cache.Hourly:
    names = set(region.names)
    found: dict[str, set[Decimal]] = {}
    for product in _products(region, "AmazonEC2", **MACHINE):
        name = product["product"]["attributes"].get("instanceType", "")
        if name in names:
            found.setdefault(name, set()).update(_usd(product, "Hrs"))
    prices: dict[str, Decimal] = {}
    for name, usd in sorted(found.items()):
        if len(usd) == 1:
            [prices[name]] = usd
        elif usd:
            region.say(f"{name} has {len(usd)} prices in the Price List, which is none: {sorted(usd)}")
    if region.own_names and not prices:
        raise region.none("GetProducts")
    return cache.Hourly(region.today, region.says_list("AmazonEC2"), prices)


def _volume(region: _Region) -> cache.Amount:
    return _amount(region, "AmazonEC2", "EBS:VolumeUsage.gp3", "GB-Mo", VOLUME)


def _public_ipv4(region: _Region) -> cache.Amount:
    return _amount(region, "AmazonVPC", "PublicIPv4:InUseAddress", "Hrs", ADDRESS)


def _amount(region: _Region, service: str, usage: str, unit: str, about: Mapping[str, str]) -> cache.Amount:
    """The price of a usage type; its name has the region before it, as in USW2-EBS:VolumeUsage.gp3."""
    found: set[Decimal] = set()
    for product in _products(region, service, **about):
        if product["product"]["attributes"].get("usagetype", "").endswith(usage):
            found |= _usd(product, unit)
    if len(found) != 1:
        raise (
            region.none(f"GetProducts of {service}")
            if not found
            else UnavailableError(
                f"the Price List has {len(found)} prices of {usage} in {region.cloud.region}: {sorted(found)}"
            )
        )
    return cache.Amount(region.today, region.says_list(service, usage), found.pop())


def _products(region: _Region, service: str, **attributes: str) -> Iterator[Row]:
    wanted = {"regionCode": region.cloud.region, **attributes}
    try:
        yield from _asked(region, service, wanted)
    except NoCredentialsError:
        yield from region.files.products(service, wanted)


def _asked(region: _Region, service: str, wanted: Mapping[str, str]) -> Iterator[Row]:
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    with explain_aws_errors("look up prices"):
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
    client = region.cloud.client("service-quotas")
    found: dict[str, int] = {}
    with explain_aws_errors("look up the account's quotas"):
        for quota in QUOTAS:
            try:
                answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)
            except client.exceptions.NoSuchResourceException:
                continue  # the region has none of it
            found[quota.code] = int(answer["Quota"]["Value"])
    if not found:
        raise region.none("GetServiceQuota")
    return cache.Quotas(region.today, region.says("Service Quotas, GetServiceQuota"), found)


QUESTIONS: dict[str, tuple[str, Callable[[_Region], Any]]] = {  # `types` first: the others ask for them
    "types": ("instance types", _types),
    "offerings": ("zones", _offerings),
    "on_demand": ("prices on demand", _on_demand),
    "volume": ("the price of gp3 volumes", _volume),
    "public_ipv4": ("the price of public IPv4 addresses", _public_ipv4),
    "spot": ("spot prices", _spot),
    "quotas": ("quotas", _quotas),
}


def _some(names: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), AT_ONCE):
        yield list(names[first : first + AT_ONCE])


def _decimal(text: str, call: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise UnavailableError(f"{call} answered {text!r}, which is no price") from error


def _plain(usd: Decimal) -> Decimal:
    """Without the zeros at the end: the Price List has ten digits, 0.5260000000."""
    short = usd.normalize()
    return short.quantize(Decimal(1)) if short == short.to_integral() else short
