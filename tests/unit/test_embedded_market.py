"""What the embedded cloud tells of quotas, prices and capacity: from the catalogue and what was scripted."""

import io
import itertools
import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from botocore.exceptions import ClientError

from gpukiln.catalog.prices import machine_price
from gpukiln.catalog.quotas import QUOTAS, quota_of
from gpukiln.clouds.embedded import market, scarcity
from gpukiln.clouds.embedded.cloud import UNSET
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.instances.launch import launch
from gpukiln.offers.availability import availability
from tests.support.release_cloud import HOME, Cloud, server, tell

G, P = "L-DB2E81BA", "L-417A185B"
TYPES = ["g5.xlarge", "g6.xlarge", "g4dn.xlarge"]
DLAMI = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-{}/latest/ami-id"


@pytest.fixture
def ec2(layout):
    assert layout
    return Cloud().client("ec2")


def code_of(call, **asked):
    with pytest.raises(ClientError) as refused:
        call(**asked)
    return refused.value.response["Error"]["Code"]


def start(ec2, image_id, name, count=1, **asked):
    asked = {"ImageId": image_id, "InstanceType": name, "MinCount": count, "MaxCount": count, **asked}
    return ec2.run_instances(**asked)["Instances"]


def spot_scores(ec2, names, region=HOME, **asked):
    asked = {"SingleAvailabilityZone": True, "RegionNames": [region], **asked}
    found = ec2.get_spot_placement_scores(InstanceTypes=names, TargetCapacity=1, **asked)
    return {
        one.get("AvailabilityZoneId", one["Region"]): one["Score"] for one in found["SpotPlacementScores"]
    }


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("g4dn.xlarge", G, "L-3819A6DF"),
        ("gr6.4xlarge", G, "L-3819A6DF"),
        ("g6f.large", G, "L-3819A6DF"),
        ("vt1.3xlarge", G, "L-3819A6DF"),
        ("p3dn.24xlarge", P, "L-7212CCBC"),
        ("p4de.24xlarge", P, "L-7212CCBC"),
        ("p5en.48xlarge", P, "L-C4BD4855"),
        ("p6-b200.48xlarge", P, None),  # AWS's table has no such spot quota
        ("dl1.24xlarge", "L-6E869C2A", "L-85EED4F7"),
        ("m5.xlarge", None, None),
        ("u-6tb1.metal", None, None),
    ],
)
def test_each_type_has_its_quota(name, on_demand, spot):
    found = [quota_of(name, market) for market in ("on-demand", "spot")]
    assert [quota and quota.code for quota in found] == [on_demand, spot]


def test_quotas_are_plenty_until_one_is_scripted(layout):
    quotas = Cloud().client("service-quotas")
    scarcity.add(layout, f"quota:{G}:8")
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode=G)["Quota"]["Value"] == 8
    pages = quotas.get_paginator("list_service_quotas").paginate(
        ServiceCode="ec2", PaginationConfig={"PageSize": 3}
    )
    found = {one["QuotaCode"]: (one["QuotaName"], one["Value"]) for page in pages for one in page["Quotas"]}
    assert set(found) == {quota.code for quota in QUOTAS}
    assert found[P] == ("Running On-Demand P instances", scarcity.PLENTY_VCPUS)
    get = quotas.get_service_quota
    assert code_of(get, ServiceCode="ec2", QuotaCode="L-00000000") == "NoSuchResourceException"
    assert code_of(get, ServiceCode="vpc", QuotaCode="L-F678F1CE") == "NoSuchResourceException"
    assert code_of(quotas.list_services) == "UnknownOperationException"


def test_a_launch_beyond_a_quota_is_refused_and_leaves_nothing(layout, ec2, image_id):
    scarcity.add(layout, f"quota:{G}:8")
    start(ec2, image_id, "g5.xlarge")
    with pytest.raises(ClientError, match=r"VcpuLimitExceeded.*current vCPU limit of 8 allows"):
        start(ec2, image_id, "g6.2xlarge")
    start(ec2, image_id, "g4dn.xlarge")
    said = []
    with pytest.raises(IncompatibleError, match="quota is too low") as refused:
        launch(Cloud(), {"ImageId": image_id}, instance_types=TYPES, spot=False, say=said.append)
    assert G in refused.value.hint
    assert len(said) == len(TYPES), "a quota counts in every zone"
    start(ec2, image_id, "g5.xlarge", InstanceMarketOptions={"MarketType": "spot"})  # another bucket
    scarcity.add(layout, "quota:L-3819A6DF:4")
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    assert (
        code_of(start, ec2=ec2, image_id=image_id, name="g5.xlarge", **spot) == "MaxSpotInstanceCountExceeded"
    )
    start(ec2, image_id, "m5.xlarge", 3)


def test_placement_scores_fall_where_spot_is_scarce(layout, ec2):
    free = spot_scores(ec2, TYPES)
    assert free == {"usw2-az1": 9, "usw2-az2": 9, "usw2-az3": 9, "usw2-az4": 4}  # that has g6 alone
    assert set(spot_scores(ec2, TYPES[:2]).values()) == {3}, "fewer than three are always low"
    assert spot_scores(ec2, TYPES, SingleAvailabilityZone=False) == {HOME: 9}
    for name in TYPES:
        scarcity.add(layout, f"us-west-2a:{name}:spot")
    assert spot_scores(ec2, TYPES) == {**free, "usw2-az2": 1}
    scarcity.clear(layout)
    scarcity.add(layout, "us-west-2b:g5.*")
    scarcity.add(layout, "us-west-2c:g5.*:on-demand")
    assert spot_scores(ec2, TYPES) == {**free, "usw2-az1": 6}
    assert code_of(ec2.get_spot_placement_scores, InstanceTypes=["g5.tiny"], TargetCapacity=1) == (
        "InvalidParameterValue"
    )


def test_spot_prices_change_within_a_week_and_are_the_same_for_the_same_moment(ec2):
    end = datetime(2026, 11, 20, tzinfo=UTC) if datetime.now(UTC).year == 2026 else datetime.now(UTC)
    asked = {"InstanceTypes": ["g4dn.xlarge"], "ProductDescriptions": ["Linux/UNIX"], "EndTime": end}
    asked["StartTime"] = end - timedelta(days=7)
    found = ec2.describe_spot_price_history(**asked)["SpotPriceHistory"]
    assert found == ec2.describe_spot_price_history(**asked)["SpotPriceHistory"]
    on_demand = Decimal(str(machine_price("g4dn.xlarge", HOME).usd))
    zones = {one["AvailabilityZone"] for one in found}
    assert zones == {"us-west-2a", "us-west-2b", "us-west-2c"}
    for zone in zones:
        rows = [one for one in found if one["AvailabilityZone"] == zone]
        times = [one["Timestamp"] for one in rows]
        assert times == sorted(times, reverse=True)
        assert times[-1] <= asked["StartTime"] < times[-2], "the price at the begin is told too"
        assert len({one["SpotPrice"] for one in rows}) >= 4
        assert all(on_demand / 3 < Decimal(one["SpotPrice"]) < on_demand * 6 / 10 for one in rows)


def test_spot_prices_are_told_in_pages_of_a_thousand_and_filtered(ec2):
    asked = {"StartTime": datetime.now(UTC) - timedelta(days=7)}
    first = ec2.describe_spot_price_history(**asked)
    assert (len(first["SpotPriceHistory"]), bool(first.get("NextToken"))) == (1000, True)
    pages = ec2.get_paginator("describe_spot_price_history").paginate(**asked)
    every = [one for page in pages for one in page["SpotPriceHistory"]]
    assert len(every) > 1000
    assert "p5e.48xlarge" not in {one["InstanceType"] for one in every}, "no price on demand is known"
    zone = [{"Name": "availability-zone", "Values": ["us-west-2a"]}]
    few = ec2.describe_spot_price_history(Filters=zone, InstanceTypes=["g5.xlarge"], **asked)[
        "SpotPriceHistory"
    ]
    assert {one["AvailabilityZoneId"] for one in few} == {"usw2-az2"}
    windows = ec2.describe_spot_price_history(ProductDescriptions=["Windows"], **asked)
    assert windows["SpotPriceHistory"] == []
    price = [{"Name": "spot-price", "Values": ["1"]}]
    assert code_of(ec2.describe_spot_price_history, Filters=price) == "UnsupportedOperation"
    assert code_of(ec2.describe_spot_price_history, NextToken="x") == "InvalidParameterValue"


def test_a_reservation_is_scripted_and_used_up_by_what_runs(layout, ec2, image_id):
    scarcity.add(layout, "reservation:us-west-2a:p5.48xlarge:2")
    scarcity.add(layout, "reservation:eu-west-1a:p4d.24xlarge:1")
    [found] = ec2.describe_capacity_reservations()["CapacityReservations"]
    assert found["OwnerId"] == Cloud().client("sts").get_caller_identity()["Account"]
    assert (found["TotalInstanceCount"], found["AvailableInstanceCount"]) == (2, 2)
    start(ec2, image_id, "p5.48xlarge", Placement={"AvailabilityZone": "us-west-2a"})
    start(ec2, image_id, "p5.48xlarge", Placement={"AvailabilityZone": "us-west-2b"})
    ids = [found["CapacityReservationId"]]
    [now] = ec2.describe_capacity_reservations(CapacityReservationIds=ids)["CapacityReservations"]
    assert now["AvailableInstanceCount"] == 1
    gone = [{"Name": "state", "Values": ["cancelled"]}]
    assert ec2.describe_capacity_reservations(Filters=gone)["CapacityReservations"] == []


def test_capacity_blocks_are_on_sale_where_the_type_is_not_scarce(layout, ec2):
    asked = {"InstanceType": "p5.48xlarge", "InstanceCount": 2, "CapacityDurationHours": 48}
    found = ec2.describe_capacity_block_offerings(**asked)["CapacityBlockOfferings"]
    assert [one["AvailabilityZone"][-1] for one in found] == ["a", "b", "c", "d"]
    assert Decimal(found[0]["UpfrontFee"]) == Decimal("55.04") * 48 * 2
    assert datetime.now(UTC) < found[0]["StartDate"] < datetime.now(UTC) + timedelta(hours=25)
    assert found[0]["EndDate"] - found[0]["StartDate"] == timedelta(hours=48)
    scarcity.add(layout, "us-west-2c:p5.*")
    later = {"StartDateRange": datetime.now(UTC) + timedelta(days=3)}
    rest = ec2.describe_capacity_block_offerings(**asked, **later)["CapacityBlockOfferings"]
    assert [one["AvailabilityZone"][-1] for one in rest] == ["a", "b", "d"]
    assert rest[0]["StartDate"] > later["StartDateRange"]
    never = {"EndDateRange": datetime.now(UTC)}
    assert ec2.describe_capacity_block_offerings(**asked, **never)["CapacityBlockOfferings"] == []
    wrong = [{"InstanceType": "g5.xlarge"}, {"CapacityDurationHours": 20}, {"CapacityDurationHours": 360}]
    for change in wrong:
        assert (
            code_of(ec2.describe_capacity_block_offerings, **{**asked, **change}) == "InvalidParameterValue"
        )


def test_the_price_list_has_the_prices_of_the_catalogue():
    pricing = Cloud("us-east-1").client("pricing")

    def match(**fields):
        return [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in fields.items()]

    asked = match(
        regionCode=HOME,
        instanceType="g4dn.xlarge",
        operatingSystem="Linux",
        tenancy="Shared",
        capacitystatus="Used",
        preInstalledSw="NA",
        productFamily="Compute Instance",
    )
    [text] = pricing.get_products(ServiceCode="AmazonEC2", Filters=asked)["PriceList"]
    product = json.loads(text)
    [term] = product["terms"]["OnDemand"].values()
    [price] = term["priceDimensions"].values()
    assert (price["unit"], Decimal(price["pricePerUnit"]["USD"])) == ("Hrs", Decimal("0.526"))
    attributes = product["product"]["attributes"]
    assert (attributes["vcpu"], attributes["memory"], attributes["location"]) == (
        *("4", "16 GiB"),
        "US West (Oregon)",
    )
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode="AmazonEC2", Filters=match(regionCode=HOME)
    )
    counts = [len(page["PriceList"]) for page in itertools.islice(pages, 3)]
    assert sum(counts) > 50
    assert max(counts) <= 100
    [metal] = pricing.get_products(
        ServiceCode="AmazonEC2", Filters=match(regionCode=HOME, instanceType="g4dn.metal")
    )["PriceList"]
    assert json.loads(metal)["product"]["productFamily"] == "Compute Instance (bare metal)"
    either = {"Type": "ANY_OF", "Field": "instanceType", "Value": "g5.xlarge,g5.2xlarge"}
    found = pricing.get_products(ServiceCode="AmazonEC2", Filters=[*match(regionCode=HOME), either])
    assert len(found["PriceList"]) == 2
    assert pricing.get_products(ServiceCode="AmazonEC2", Filters=match(tenancy="Host"))["PriceList"] == []
    assert (
        code_of(Cloud().client("pricing").get_products, ServiceCode="AmazonEC2")
        == "UnrecognizedClientException"
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"ServiceCode": "ec2"}', b'{"ServiceCode": 1}'])
def test_what_is_no_request_is_refused_in_the_form_of_the_service(tmp_path, body):
    environ = {
        "HTTP_AUTHORIZATION": "AWS4 Credential=x/20261123/us-west-2/servicequotas/aws4_request",
        "HTTP_X_AMZ_TARGET": "ServiceQuotasV20190624.GetServiceQuota",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
    }
    status, kind, answered = market.answer(Layout(tmp_path), environ)
    assert (status, kind) == (400, "application/x-amz-json-1.1")
    assert json.loads(answered)["__type"] in ("SerializationException", "NoSuchResourceException")


def test_a_script_that_can_not_be_read_is_told(layout, ec2):
    layout.scarcity.write_text("{")
    quotas = Cloud().client("service-quotas")
    with pytest.raises(ClientError, match=r"ServiceException.*can't be read.*--plenty all"):
        quotas.get_service_quota(ServiceCode="ec2", QuotaCode=G)
    with pytest.raises(ClientError, match=r"InternalError.*can't be read"):
        ec2.describe_capacity_reservations()
    quota = availability(Cloud(), TYPES, spot=False)[0].quota
    assert quota.limit is None
    assert "can't be read" in quota.reason


@pytest.mark.parametrize(
    ("arch", "system", "name"),
    [
        ("x86_64", "ubuntu-22.04", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) "),
        ("x86_64", "amazon-linux-2023", "Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) "),
        ("arm64", "ubuntu-22.04", "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) "),
    ],
)
def test_the_parameters_of_aws_own_images_name_images(ec2, arch, system, name):
    ssm = Cloud().client("ssm")
    value = ssm.get_parameter(Name=DLAMI.format(arch, system))["Parameter"]["Value"]
    [image] = ec2.describe_images(ImageIds=[value], Owners=["amazon"])["Images"]
    assert image["Name"].startswith(name)
    assert (image["Architecture"], image["OwnerId"]) == (arch, "898082745236")
    assert image["Description"].startswith("Supported EC2 instances: G")
    none = DLAMI.format("arm64", "windows-11")
    assert code_of(ssm.get_parameter, Name=none) == "ParameterNotFound"


def test_images_of_others_are_not_kept(image_id):
    ssm = Cloud().client("ssm")
    theirs = ssm.get_parameter(Name=DLAMI.format("x86_64", "ubuntu-24.04"))["Parameter"]["Value"]
    tell("keep")
    kept = json.loads((server()[1].regions / f"{HOME}.json").read_text())["document"]
    assert image_id in kept["images"]
    assert theirs not in kept["images"]
    assert theirs.replace("ami", "snap") not in kept["snapshots"]


def test_every_column_can_be_rehearsed(layout, ec2, image_id):
    """The clients are those of code that knows of no embedded cloud."""
    scarcity.add(layout, f"quota:{P}:400")
    scarcity.add(layout, "reservation:us-west-2b:p5.48xlarge:1")
    scarcity.add(layout, "us-west-2c:p5.*:on-demand")
    start(ec2, image_id, "p4d.24xlarge")
    found = {place.zone[-1]: place for place in availability(Cloud(), ["p5.48xlarge"], spot=False)}
    assert {zone: place.offered.answer for zone, place in found.items()} == dict.fromkeys("abcd", "yes")
    quota = found["a"].quota
    assert (quota.needed, quota.limit, quota.used, quota.reserved, quota.left) == (192, 400, 96, 192, 112)
    assert [found[zone].likelihood.capacity for zone in "abcd"] == ["high", "high", "low", "high"]
    assert [len(found[zone].reservation.held) for zone in "abcd"] == [0, 1, 0, 0]
    assert [len(found[zone].reservation.blocks) for zone in "abcd"] == [1, 1, 0, 1]
    scarcity.add(layout, "us-west-2a:g5.*:spot")
    spot = {
        place.zone[-1]: place
        for place in availability(Cloud(), TYPES, spot=True)
        if "g5" in place.instance_type
    }
    assert [spot[zone].likelihood.placement for zone in "abcd"] == [6, 9, 9, None]
    assert spot["d"].offered.answer == "no"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("quota:L-DB2E81BA", "is not a quota, wanted quota:CODE:VCPUS"),
        ("quota:L-DB2E81BA:-1", "is not a quota"),
        ("quota:L-DB2E81B:8", "unknown quota 'L-DB2E81B'.*L-DB2E81BA"),
        (
            "reservation:us-west-2a:p5.48xlarge",
            "is not a reservation, wanted reservation:ZONE:TYPE:INSTANCES",
        ),
        ("reservation:us-west-2a:p5.48xlarge:0", "is not a reservation"),
        ("reservation:*:p5.48xlarge:1", "is not a reservation"),
        ("reservation:us-west-2z:p5.48xlarge:1", "unknown availability zone"),
        ("reservation:us-west-2a:p5.49xlarge:1", "unknown instance type"),
    ],
)
def test_what_is_no_line_of_the_script(tmp_path, text, told):
    home = Layout(tmp_path)
    with pytest.raises(UsageError) as refused:
        scarcity.add(home, text)
    assert re.search(told, f"{refused.value.message} {refused.value.hint}")
    assert not home.scarcity.exists()


def test_lines_of_each_kind_are_replaced_and_removed(tmp_path):
    home = Layout(tmp_path)
    lines = ["*:g5.xlarge", f"quota:{G}:8", f"quota:{P}:0", "reservation:us-west-2a:p5.48xlarge:2"]
    for text in (*lines, f"quota:{G}:16"):
        assert str(scarcity.add(home, text)) == text
    wanted = [lines[0], lines[2], f"quota:{G}:16", lines[3]]
    assert [str(line) for line in scarcity.script(home).lines] == wanted
    for text, gone in ((f"quota:{G}", wanted[2]), ("reservation:us-west-2a:p5.48xlarge", wanted[3])):
        assert [str(line) for line in scarcity.clear(home, text)] == [gone]
    with pytest.raises(UsageError, match="unknown scarcity rule 'quota:L-DB2E81BA'"):
        scarcity.clear(home, f"quota:{G}")
    assert [str(line) for line in scarcity.clear(home)] == [lines[0], lines[2]]


def test_a_users_own_endpoints_do_not_win():
    assert {"AWS_ENDPOINT_URL_SERVICE_QUOTAS", "AWS_ENDPOINT_URL_PRICING"} <= set(UNSET)
