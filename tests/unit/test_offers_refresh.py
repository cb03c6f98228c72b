"""A region is asked through botocore, whose Stubber checks every question; answers have AWS's shapes."""

import gzip
import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib.resources import files

import boto3
import pytest
import yaml
from botocore.stub import Stubber

from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import ROOT
from gpukiln.catalog.quotas import QUOTAS
from gpukiln.errors import PartialError, UnavailableError, UsageError
from gpukiln.offers import cache, difference, prices
from gpukiln.offers.difference import FILE, ROW
from gpukiln.offers.refresh import MACHINE, describe_type, price_span, refresh, require_complete

HERE = "us-west-2"
NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
WEEK = NOW - timedelta(days=7)
KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
DENIED = ("AccessDeniedException", "no identity-based policy allows it")
THROTTLED = ("RequestLimitExceeded", "Request limit exceeded.")


class StubbedCloud:
    """Clients whose answers are given one after the other; a tuple of texts is an error."""

    name, region = "aws", HERE

    def __init__(self, clients):
        self.clients = clients
        self.stubs = {service: Stubber(client) for service, client in self.clients.items()}
        for stub in self.stubs.values():
            stub.activate()

    def client(self, service):
        return self.clients[service]

    def in_region(self, region):
        assert region == "us-east-1"
        return self

    def answers(self, service, call, answer, asked=None):
        if isinstance(answer, tuple):
            self.stubs[service].add_client_error(call, *answer, expected_params=asked)
        else:
            self.stubs[service].add_response(call, answer, asked)

    def everything(self, **others):
        """Answers to every question, in order; others by the name of their part, as a list or an error."""
        usual = {
            "types": [{"InstanceTypes": [instance("g5.xlarge")]}],
            "offerings": [offered("g5.xlarge", "a", "b")],
            "spot": [{"SpotPriceHistory": [spot("g5.xlarge", "a", "0.4", NOW - timedelta(days=9))]}],
            "on_demand": [listed(machine("g5.xlarge", "1.0060000000"))],
            "volume": [listed(GP3)],
            "public_ipv4": [listed(ADDRESS)],
            "quotas": [quota(code.code, 64.0) for code in QUOTAS],
        }
        for part, answers in {**usual, **others}.items():
            service, call = CALLS[part]
            for answer in answers if isinstance(answers, list) else [answers]:
                self.answers(service, call, answer)


CALLS = {
    "types": ("ec2", "describe_instance_types"),
    "offerings": ("ec2", "describe_instance_type_offerings"),
    "spot": ("ec2", "describe_spot_price_history"),
    "on_demand": ("pricing", "get_products"),
    "volume": ("pricing", "get_products"),
    "public_ipv4": ("pricing", "get_products"),
    "quotas": ("service-quotas", "get_service_quota"),
}


def instance(name, **changes):
    """g5.xlarge as DescribeInstanceTypes gives it, without what nobody reads."""
    row = {
        "InstanceType": name,
        "CurrentGeneration": False,
        "SupportedUsageClasses": ["on-demand", "spot"],
        "BareMetal": False,
        "Hypervisor": "nitro",
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "SustainedClockSpeedInGhz": 3.3},
        "VCpuInfo": {"DefaultVCpus": 4, "DefaultCores": 2, "DefaultThreadsPerCore": 2},
        "MemoryInfo": {"SizeInMiB": 16384},
        "InstanceStorageSupported": True,
        "InstanceStorageInfo": {"TotalSizeInGB": 250, "NvmeSupport": "required"},
        "NetworkInfo": {
            "MaximumNetworkInterfaces": 4,
            "DefaultNetworkCardIndex": 0,
            "NetworkCards": [{"NetworkCardIndex": 0, "MaximumNetworkInterfaces": 4}],
            "Ipv4AddressesPerInterface": 15,
            "EfaSupported": False,
        },
        "GpuInfo": {
            "Gpus": [
                {
                    "Name": "A10G",
                    "Manufacturer": "NVIDIA",
                    "Count": 1,
                    "LogicalGpuCount": 1,
                    "GpuPartitionSize": 1.0,
                    "MemoryInfo": {"SizeInMiB": 22888},
                }
            ],
            "TotalGpuMemoryInMiB": 22888,
        },
    }
    return row | changes


def offered(name, *zones):
    rows = [
        {"InstanceType": name, "LocationType": "availability-zone", "Location": HERE + zone} for zone in zones
    ]
    return {"InstanceTypeOfferings": rows}


def spot(name, zone, usd, when):
    return {
        "AvailabilityZone": HERE + zone,
        "InstanceType": name,
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": usd,
        "Timestamp": when,
    }


def quota(code, value):
    return {"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": value, "Unit": "None"}}


def product(sku, family, attributes, usd, unit, text):
    """A product of the Price List: a document as a text, with ten digits after the point."""
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    dimension = {
        "unit": unit,
        "endRange": "Inf",
        "description": text,
        "appliesTo": [],
        "rateCode": rate,
        "beginRange": "0",
        "pricePerUnit": {"USD": usd},
    }
    terms = {
        "priceDimensions": {rate: dimension},
        "sku": sku,
        "effectiveDate": "2026-11-01T00:00:00Z",
        "offerTermCode": "JRTCKXETXF",
        "termAttributes": {},
    }
    reserved = {f"{sku}.4NA7Y494T4": {"priceDimensions": {}, "sku": sku, "offerTermCode": "4NA7Y494T4"}}
    return json.dumps(
        {
            "product": {"productFamily": family, "attributes": attributes, "sku": sku},
            "serviceCode": attributes["servicecode"],
            "terms": {"OnDemand": {term: terms}, "Reserved": reserved},
            "version": "20261119204817",
            "publicationDate": "2026-11-19T20:48:17Z",
        }
    )


def machine(name, usd, sku="3DG6WFZ9QW4JAATJ", **more):
    attributes = {
        "servicecode": "AmazonEC2",
        "location": "US West (Oregon)",
        "locationType": "AWS Region",
        "regionCode": HERE,
        "instanceType": name,
        "instanceFamily": "GPU instance",
        "currentGeneration": "Yes",
        "vcpu": "4",
        "memory": "16 GiB",
        "gpu": "1",
        "storage": "1 x 250 NVMe SSD",
        "operatingSystem": "Linux",
        "licenseModel": "No License required",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        "usagetype": f"USW2-BoxUsage:{name}",
        **more,
    }
    text = f"${usd} per On Demand Linux {name} Instance Hour"
    return product(sku, "Compute Instance", attributes, usd, "Hrs", text)


GP3 = product(
    "K9XRRB4F8TF6MQ4R",
    "Storage",
    {
        "servicecode": "AmazonEC2",
        "regionCode": HERE,
        "volumeApiName": "gp3",
        "usagetype": "USW2-EBS:VolumeUsage.gp3",
    },
    "0.0800000000",
    "GB-Mo",
    "$0.08 per GB-month of General Purpose (gp3) provisioned storage - US West (Oregon)",
)
ADDRESS = product(
    "7R3X5ZVY6KTGFQHB",
    "",
    {
        "servicecode": "AmazonVPC",
        "regionCode": HERE,
        "group": "VPCPublicIPv4Address",
        "usagetype": "USW2-PublicIPv4:InUseAddress",
    },
    "0.0050000000",
    "Hrs",
    "$0.005 per In-use public IPv4 address per hour",
)


def listed(*products, page=""):
    return {"FormatVersion": "aws_v1", "PriceList": list(products), **({"NextToken": page} if page else {})}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def clients():
    regions = {"ec2": HERE, "pricing": "us-east-1", "service-quotas": HERE}
    return {name: boto3.client(name, region_name=region, **KEYS) for name, region in regions.items()}


@pytest.fixture
def cloud(clients):
    cloud = StubbedCloud(clients)
    yield cloud
    for stub in cloud.stubs.values():
        stub.deactivate()
        stub.assert_no_pending_responses()


def run(cloud, now=NOW):
    told = []
    return refresh(cloud, told.append, now=now), told


def failed(refreshed):
    return {part.name: part.error for part in refreshed.parts if part.error}


# --- answers --------------------------------------------------------------------------------------------


def test_everything_is_kept_with_its_day(cloud):
    cloud.everything()
    refreshed, told = run(cloud)
    assert failed(refreshed) == {}
    require_complete(refreshed)
    assert {part.name: part.answers for part in refreshed.parts} == {
        **dict.fromkeys(("types", "offerings", "on_demand", "volume", "public_ipv4", "spot"), 1),
        "quotas": len(QUOTAS),
    }
    assert {part.as_of for part in refreshed.parts} == {NOW.date()}
    assert told[0] == "asking us-west-2 for instance types"
    today = NOW.date()
    found = prices.on_demand("g5.xlarge", HERE, today)
    assert (str(found.value), found.age_days, found.stale) == ("1.006", 0, False)
    assert found.source == "AWS Price List, GetProducts of AmazonEC2"
    assert prices.on_demand("g5.xlarge", HERE, today, cloud="embedded").as_of == "2025-11-03"  # as shipped
    assert str(prices.volume(HERE, today).value) == "0.08"
    assert str(prices.public_ipv4(HERE, today).value) == "0.005"
    [zone] = prices.spot("g5.xlarge", HERE, today)
    assert (zone.zone, zone.now.value, zone.mean) == ("us-west-2a", Decimal("0.4"), Decimal("0.4"))
    assert prices.offerings("g5.xlarge", HERE) == ("us-west-2a", "us-west-2b")
    assert prices.offerings("g6.xlarge", HERE) == ()  # asked for, and not there
    assert cache.read("aws", HERE).quotas.vcpus["L-DB2E81BA"] == 64


def test_what_is_rehearsed_is_not_awss_word(cloud, monkeypatch):
    monkeypatch.setattr(cloud, "name", "embedded", raising=False)
    cloud.everything()
    refreshed, _ = run(cloud)
    kept = cache.read("embedded", HERE)
    for part in refreshed.parts:
        assert getattr(kept, part.name).source.endswith(", rehearsed by the embedded cloud")


def test_what_is_asked(cloud):
    """The filters stand for Linux, shared, without software, in use; region by its code."""
    everything = {**MACHINE, "regionCode": HERE}
    living = {name for name, machine in instance_types().items() if machine.status != "retired"}
    names = [{"Name": "instance-type", "Values": sorted(living)}]
    asked = {
        "types": {},
        "offerings": {"LocationType": "availability-zone", "Filters": names},
        "spot": {
            "InstanceTypes": ["g5.xlarge"],  # which this region has: another would be refused
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": WEEK,
            "EndTime": NOW,
        },
    }
    cloud.answers(
        "ec2", "describe_instance_types", {"InstanceTypes": [instance("g5.xlarge")]}, asked["types"]
    )
    cloud.answers("ec2", "describe_instance_type_offerings", offered("g5.xlarge", "a"), asked["offerings"])
    cloud.answers(
        "ec2",
        "describe_spot_price_history",
        {"SpotPriceHistory": [spot("g5.xlarge", "a", "0.4", WEEK)]},
        asked["spot"],
    )
    for service, about, answer in (
        ("AmazonEC2", {"regionCode": HERE} | everything, machine("g5.xlarge", "1.0060000000")),
        ("AmazonEC2", {"regionCode": HERE, "productFamily": "Storage", "volumeApiName": "gp3"}, GP3),
        ("AmazonVPC", {"regionCode": HERE, "group": "VPCPublicIPv4Address"}, ADDRESS),
    ):
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in about.items()]
        question = {"ServiceCode": service, "Filters": filters}
        cloud.answers("pricing", "get_products", listed(answer), question)
    for one in QUOTAS:
        question = {"ServiceCode": "ec2", "QuotaCode": one.code}
        cloud.answers("service-quotas", "get_service_quota", quota(one.code, 0.0), question)
    assert failed(run(cloud)[0]) == {}


def test_pages_are_read_to_the_end_and_an_empty_one_is_no_end(cloud):
    changes = [
        spot("g5.xlarge", "abc"[number % 3], "0.4", WEEK + timedelta(minutes=number))
        for number in range(2500)
    ]
    cloud.everything(
        types=[
            {"InstanceTypes": [instance("m5.large", GpuInfo={})] * 100, "NextToken": "1"},
            {"InstanceTypes": [], "NextToken": "2"},
            {"InstanceTypes": [instance("g5.xlarge")]},
        ],
        spot=[
            {"SpotPriceHistory": changes[:1000], "NextToken": "1"},
            {"SpotPriceHistory": [], "NextToken": "2"},
            {"SpotPriceHistory": changes[1000:2000], "NextToken": "3"},
            {"SpotPriceHistory": changes[2000:], "NextToken": ""},  # EC2 ends a history so
        ],
        on_demand=[
            listed(*[machine(f"m{number}.large", "0.1000000000") for number in range(100)], page="1"),
            listed(page="2"),
            listed(machine("g5.xlarge", "1.0060000000")),
        ],
    )
    refreshed, _ = run(cloud)
    assert failed(refreshed) == {}
    document = cache.read("aws", HERE)
    assert list(document.types.types) == ["g5.xlarge"]
    assert document.on_demand.usd_hour == {"g5.xlarge": Decimal("1.006")}
    assert sorted(document.spot.zones["g5.xlarge"]) == [f"{HERE}a", f"{HERE}b", f"{HERE}c"]


def test_a_thousand_offerings_and_more(cloud):
    rows = [
        {"InstanceType": "g5.xlarge", "LocationType": "availability-zone", "Location": f"{HERE}-lax-{number}"}
        for number in range(1500)
    ]
    pages = [
        {"InstanceTypeOfferings": rows[:1000], "NextToken": "1"},
        {"InstanceTypeOfferings": rows[1000:]},
    ]
    cloud.everything(offerings=pages)
    assert failed(run(cloud)[0]) == {}
    assert len(prices.offerings("g5.xlarge", HERE)) == 1500


def test_more_types_than_a_question_takes_are_asked_in_parts(cloud, monkeypatch):
    monkeypatch.setattr("gpukiln.offers.refresh.BATCH_TYPES", 50)
    cloud.everything(offerings=[offered("g5.xlarge", "a"), offered("p4d.24xlarge", "b")])
    assert failed(run(cloud)[0]) == {}
    assert prices.offerings("p4d.24xlarge", HERE) == (f"{HERE}b",)


def test_traps_of_described_types():
    fraction = instance("g6f.large")
    fraction["GpuInfo"]["Gpus"][0] |= {"Count": 0, "GpuPartitionSize": 0.125, "LogicalGpuCount": 1}
    assert (describe_type(fraction).gpus, describe_type(fraction).gpu_fraction) == (1, 0.125)
    metal = instance("g5g.metal", BareMetal=True, ProcessorInfo={"SupportedArchitectures": ["arm64"]})
    del metal["Hypervisor"], metal["InstanceStorageInfo"]
    assert (describe_type(metal).hypervisor, describe_type(metal).arch) == ("none", "arm64")
    assert describe_type(metal).local_nvme_gb == 0
    old = instance("g2.2xlarge", ProcessorInfo={"SupportedArchitectures": ["i386", "x86_64"]})
    assert describe_type(old).arch == "x86_64"
    block = describe_type(instance("p6.x", SupportedUsageClasses=["capacity-block"]))
    assert (block.on_demand, block.spot, block.capacity_blocks) == (False, False, True)
    many = instance("p5.48xlarge")  # 32 cards, of which EKS takes the first
    many["NetworkInfo"] |= {
        "MaximumNetworkInterfaces": 64,
        "NetworkCards": [{"MaximumNetworkInterfaces": 2}] * 32,
        "Ipv4AddressesPerInterface": 50,
        "EfaInfo": {"MaximumEfaInterfaces": 32},
    }
    assert (describe_type(many).max_pods, describe_type(many).efa) == (100, 32)


# --- prices ---------------------------------------------------------------------------------------------


def test_a_mean_weighs_each_price_by_how_long_it_held():
    day = timedelta(days=1)
    changes = [(NOW - day, Decimal("0.8")), (WEEK - 9 * day, Decimal("9")), (WEEK - day, Decimal("0.1"))]
    found = price_span(changes, WEEK, NOW)
    assert found == cache.ZonePrice(*map(Decimal, ("0.8", "0.1", "0.2", "0.8")))  # (6 * 0.1 + 1 * 0.8) / 7
    young = price_span([(NOW - day, Decimal("2")), (NOW - 2 * day, Decimal("1"))], WEEK, NOW)
    assert young == cache.ZonePrice(*map(Decimal, ("2", "1", "1.5", "2")))
    just = price_span([(NOW, Decimal("3"))], WEEK, NOW)
    assert just == cache.ZonePrice(*map(Decimal, ("3", "3", "3", "3")))
    third = price_span([(WEEK, Decimal("1")), (NOW - timedelta(hours=56), Decimal("2"))], WEEK, NOW)
    assert third.mean == Decimal("1.333333")


def test_products_without_a_price_or_with_two_have_none(cloud):
    cloud.everything(
        on_demand=[
            listed(
                machine("g5.xlarge", "1.0060000000"),
                machine("g5.2xlarge", "0.0000000000"),
                machine("g5.4xlarge", "1.6240000000"),
                machine("g5.4xlarge", "1.7000000000", sku="OTHER"),
                machine("p6-b200.48xlarge", "110.0000000000"),
                machine("g6.xlarge", "5.0000000000").replace('"USD"', '"CNY"'),
            )
        ]
    )
    refreshed, told = run(cloud)
    assert failed(refreshed) == {}
    found = cache.read("aws", HERE).on_demand.usd_hour
    assert {name: str(usd) for name, usd in found.items()} == {
        "g5.xlarge": "1.006",
        "p6-b200.48xlarge": "110",
    }
    assert [text for text in told if "g5.4xlarge has 2 prices" in text]


@pytest.mark.parametrize(
    ("part", "answer", "said"),
    [
        ("on_demand", listed("{"), "answered no JSON"),
        ("on_demand", listed(machine("g5.xlarge", "free")), "answered 'free', which is no price"),
        ("on_demand", listed(), "answered nothing of us-west-2"),
        ("volume", listed(), "answered nothing of us-west-2"),
        ("volume", listed(GP3, GP3.replace("0.0800000000", "0.09")), "has 2 prices of EBS:VolumeUsage.gp3"),
        ("types", {"InstanceTypes": []}, "answered nothing of us-west-2"),
        ("offerings", {"InstanceTypeOfferings": []}, "answered nothing of us-west-2"),
        ("spot", {"SpotPriceHistory": []}, "answered nothing of us-west-2"),
        (
            "spot",
            {"SpotPriceHistory": [spot("g5.xlarge", "a", "?", NOW)]},
            "answered '[?]', which is no price",
        ),
    ],
)
def test_an_answer_that_is_none_leaves_the_old_one(cloud, part, answer, said):
    cloud.everything()
    run(cloud, NOW - timedelta(days=2))
    old = getattr(cache.read("aws", HERE), part)
    cloud.everything(**{part: [answer]})
    refreshed, _ = run(cloud)
    assert list(failed(refreshed)) == [part]
    with pytest.raises(PartialError, match="1 of 7 queries") as caught:
        require_complete(refreshed)
    [line] = caught.value.details
    assert line.startswith(f"{part} stays as of 2026-11-21: ")
    assert re.search(said, line)
    assert getattr(cache.read("aws", HERE), part) == old


# --- failures -------------------------------------------------------------------------------------------


def test_a_refusal_leaves_the_old_answer_and_its_age_and_is_told(cloud):
    cloud.everything()
    run(cloud, NOW - timedelta(days=40))
    cloud.everything(on_demand=DENIED, spot=THROTTLED)
    refreshed, told = run(cloud)
    errors = failed(refreshed)
    assert set(errors) == {"on_demand", "spot"}
    assert "GetProducts answered AccessDeniedException" in errors["on_demand"]
    assert "let the role call GetProducts" in errors["on_demand"]
    assert "AWS throttles this account's calls" in errors["spot"]
    assert any(text.startswith("prices on demand: can't look up prices") for text in told)
    found = prices.on_demand("g5.xlarge", HERE, NOW.date())
    assert (found.as_of, found.age_days, found.stale) == ("2026-10-14", 40, True)
    assert prices.spot("g5.xlarge", HERE, NOW.date())[0].now.age_days == 40
    assert cache.read("aws", HERE).offerings.as_of == NOW.date()  # that one was answered
    with pytest.raises(PartialError) as caught:
        require_complete(refreshed)
    assert [line.partition(":")[0] for line in caught.value.details] == [
        "on_demand stays as of 2026-10-14",
        "spot stays as of 2026-10-14",
    ]


def test_types_that_were_not_answered_are_taken_from_before(cloud):
    cloud.everything()
    run(cloud)
    cloud.everything(types=DENIED)
    question = cloud.stubs["ec2"]._queue[-1]  # of spot prices
    question["expected_params"] = {
        "InstanceTypes": ["g5.xlarge"],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": WEEK,
        "EndTime": NOW,
    }
    assert list(failed(run(cloud)[0])) == ["types"]


def test_nothing_answered_writes_nothing(cloud, home):
    cloud.everything(**dict.fromkeys(CALLS, DENIED))
    refreshed, _ = run(cloud)
    with pytest.raises(UnavailableError, match="7 of 7 queries") as caught:
        require_complete(refreshed)
    assert caught.value.details[0].startswith("types is not known: ")
    assert list(home.iterdir()) == []


def test_a_region_without_gpus_says_so(cloud):
    cloud.everything(
        types=[{"InstanceTypes": [instance("m5.large", GpuInfo={})]}],
        offerings=[{"InstanceTypeOfferings": []}],
        spot=[],
        on_demand=[listed()],
    )
    refreshed, _ = run(cloud)
    assert failed(refreshed) == {}
    assert [part.answers for part in refreshed.parts if part.name in ("types", "offerings", "spot")] == [
        0
    ] * 3
    assert prices.offerings("g5.xlarge", HERE) == ()


def test_a_quota_that_a_region_has_not_is_left_out(cloud):
    none = ("NoSuchResourceException", "The request failed because the specified quota doesn't exist.")
    cloud.everything(quotas=[none, *(quota(one.code, 8.0) for one in QUOTAS[1:])])
    assert failed(run(cloud)[0]) == {}
    assert set(cache.read("aws", HERE).quotas.vcpus) == {one.code for one in QUOTAS[1:]}


def test_a_throttled_quota_says_when_to_come_back(cloud):
    cloud.everything(quotas=("TooManyRequestsException", "Too Many Requests"))
    assert "wait a minute" in failed(run(cloud)[0])["quotas"]


def test_a_damaged_document_is_told_before_anything_is_asked(cloud):
    file = cache.path("aws", HERE)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        run(cloud)


# --- the difference to the catalogue --------------------------------------------------------------------


def told_as(machine, **changes):
    """A type as the API would describe what the catalogue says."""
    row = {name: getattr(machine, name) for name in difference.COMPARED}
    return cache.TypeDescription(
        **{"manufacturer": "NVIDIA", "accelerator": machine.gpu.upper(), **row, **changes}
    )


@pytest.fixture
def types():
    rows = {
        name: told_as(machine) for name, machine in instance_types().items() if machine.status != "retired"
    }
    return cache.TypeList(date(2026, 11, 23), "EC2 DescribeInstanceTypes", rows)


def with_types(types, gone=(), **rows):
    there = {name: row for name, row in types.types.items() if name not in gone}
    return replace(types, types=there | {name.replace("_", "."): row for name, row in rows.items()})


def applied(patch, tmp_path):
    """The data file after `git apply`."""
    file = tmp_path / FILE.relative_to(ROOT)
    file.parent.mkdir(parents=True)
    file.write_text(FILE.read_text())
    (tmp_path / "a.patch").write_text(patch)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "--whitespace=error-all", "a.patch"], cwd=tmp_path, check=True)
    return file.read_text()


def test_no_difference_is_no_patch(types):
    found = difference.difference(types, HERE)
    assert (found.new, found.retired, found.changed, found.notes, found.patch) == ((), (), (), (), "")


def test_the_catalogue_is_as_ec2_was_when_moto_asked_it():
    """Every type of the region that has all; from moto's file, for the embedded cloud adds to its tables."""
    file = files("moto").joinpath("ec2/resources/instance_types.json.gz")
    answer = json.loads(gzip.decompress(file.read_bytes()))
    rows = {name: describe_type(row) for name, row in answer.items() if row.get("GpuInfo", {}).get("Gpus")}
    found = difference.difference(cache.TypeList(NOW.date(), "moto", rows), HERE)
    assert len(rows) > 60
    assert (found.new, found.retired, found.changed, found.patch) == ((), (), (), "")


def test_what_the_catalogue_leaves_out_is_not_new(types):
    now = with_types(types, **{"p6e-gb200_36xlarge": told_as(instance_types()["p6-b200.48xlarge"])})
    found = difference.difference(now, HERE)
    assert (found.new, found.patch) == ((), "")
    assert found.notes[0].startswith("p6e-gb200.36xlarge is left out: four GPUs of a GB200 UltraServer")


def test_every_row_has_the_form_that_is_edited():
    rows = [match["name"] for match in ROW.finditer(FILE.read_text())]
    assert rows == list(instance_types())


def test_a_patch_holds_what_is_new_retired_and_changed(types, tmp_path):
    g5 = types.types["g5.xlarge"]
    now = with_types(
        types,
        gone=["p3dn.24xlarge"],
        g5_2xlarge=replace(types.types["g5.2xlarge"], local_nvme_gb=460, memory_mib=32760),
        g5_96xlarge=replace(g5, gpus=16, vcpu=384, memory_mib=1572864, efa=4, max_pods=737),
        g9_xlarge=replace(g5, manufacturer="NVIDIA", accelerator="RTX PRO 9000 Max", gpu_memory_mib=200000),
        g6f_8xlarge=replace(types.types["g6f.4xlarge"], vcpu=32, max_pods=None),
        a9_metal=replace(g5, arch="arm64", hypervisor="none", on_demand=False, capacity_blocks=True),
    )
    found = difference.difference(now, HERE)
    assert found.new == ("a9.metal", "g5.96xlarge", "g6f.8xlarge", "g9.xlarge")
    assert found.retired == ("p3dn.24xlarge",)
    assert [(one.instance_type, one.field, one.catalogue, one.described) for one in found.changed] == [
        ("g5.2xlarge", "memory_mib", 32768, 32760),
        ("g5.2xlarge", "local_nvme_gb", 450, 460),
    ]
    text = applied(found.patch, tmp_path)
    rows = yaml.safe_load(text)["instance_types"]
    before = yaml.safe_load(FILE.read_text())["instance_types"]
    touched = {*found.new, *found.retired, "g5.2xlarge"}
    assert {name: row for name, row in rows.items() if name not in touched} == {
        name: row for name, row in before.items() if name not in touched
    }
    assert rows["g5.2xlarge"] == before["g5.2xlarge"] | {"memory_mib": 32760, "local_nvme_gb": 460}
    assert rows["p3dn.24xlarge"] == before["p3dn.24xlarge"] | {
        "status": "retired",
        "retired_since": "by 2026-11-23, as the API of us-west-2 says",
    }
    assert rows["g5.96xlarge"] == {
        **{"gpu": "a10g", "gpus": 16, "gpu_memory_mib": 22888, "vcpu": 384, "memory_mib": 1572864},
        **{"efa": 4, "local_nvme_gb": 250, "max_pods": 737},
    }
    assert rows["g9.xlarge"]["gpu"] == "rtx-pro-9000-max"
    assert (rows["g6f.8xlarge"]["driver"], "max_pods" in rows["g6f.8xlarge"]) == ("grid", False)
    assert (rows["a9.metal"]["on_demand"], rows["a9.metal"]["capacity_blocks"]) == (False, True)
    assert list(rows)[list(rows).index("g5.48xlarge") + 1] == "g5.96xlarge"
    assert text.count("  # DescribeInstanceTypes of us-west-2 on 2026-11-23\n") == 4
    assert [line for line in FILE.read_text().splitlines() if "#" in line and line not in text] == []
    assert max(map(len, text.splitlines())) <= difference.WIDTH
    notes = "\n".join(found.notes)
    assert "g9.xlarge: its GPU (NVIDIA RTX PRO 9000 Max of 200000 MiB) is not in nvidia_matrix.yaml" in notes
    assert "g6f.8xlarge: max_pods is missing" in notes
    assert "p3dn.24xlarge: it is listed as an alternative to p3.16xlarge" in notes


def test_what_is_beside_a_row_stays(types):
    text = FILE.read_text().replace("  g5.xlarge: {", "  # A note.\n  g5.xlarge: {  # another\n    ", 1)
    now = with_types(types, g5_xlarge=replace(types.types["g5.xlarge"], vcpu=5))
    changed = difference.difference(now, HERE, text=text).patch.splitlines()
    assert [line for line in changed if line.startswith(("-", "+"))][2:] == [
        "-    gpu: a10g, gpus: 1, gpu_memory_mib: 22888, vcpu: 4, memory_mib: 16384, local_nvme_gb: 250,",
        "+    gpu: a10g, gpus: 1, gpu_memory_mib: 22888, vcpu: 5, memory_mib: 16384, local_nvme_gb: 250,",
    ]


def test_boards_of_one_name_are_told_by_their_memory(types):
    a100 = [replace(types.types[name], accelerator="A100") for name in ("p4d.24xlarge", "p4de.24xlarge")]
    now = with_types(
        types, p4d_24xlarge=a100[0], p4de_24xlarge=a100[1], p4d_9xlarge=a100[0], p4de_9xlarge=a100[1]
    )
    patch = difference.difference(now, HERE).patch
    assert "+  p4d.9xlarge: {gpu: a100-40gb, " in patch
    assert "+  p4de.9xlarge: {gpu: a100-80gb, " in patch
    now = with_types(now, p4f_9xlarge=replace(a100[0], gpu_memory_mib=60000))
    assert "+  p4f.9xlarge: {gpu: a100, " in difference.difference(now, HERE).patch


def test_a_type_is_retired_only_where_the_region_had_it(types):
    gone = with_types(types, gone=["p6-b300.48xlarge"])
    assert difference.difference(gone, HERE).retired == ("p6-b300.48xlarge",)
    elsewhere = difference.difference(gone, "eu-west-1")  # which never had it
    assert (elsewhere.retired, elsewhere.patch) == ((), "")


def test_a_type_that_no_source_places_is_asked_about(types, monkeypatch):
    monkeypatch.setattr(difference, "zone_ids", lambda *_: None)
    found = difference.difference(with_types(types, gone=["g5.xlarge"]), HERE)
    assert (found.retired, found.patch) == ((), "")
    assert found.notes == ("neither in us-west-2 nor in the shipped offerings, so maybe retired: g5.xlarge",)


def test_a_type_that_is_back_is_told(types):
    now = with_types(types, p3_2xlarge=told_as(instance_types()["p3.2xlarge"]))
    found = difference.difference(now, HERE)
    assert [(one.field, one.described) for one in found.changed] == [("status", "current")]
    assert found.notes == ("p3.2xlarge is offered again: remove its retired_since",)
    assert "status: current" in found.patch
