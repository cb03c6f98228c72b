"""Where machines can be had: four answers, none of which stands for another, and what is unknown and why.

Answers have the form of botocore's model; how they hang together is rehearsed in test_embedded_market.py.
"""

from datetime import UTC, datetime
from decimal import Decimal

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber

from gpukiln.offers.availability import CapacityReservation, QuotaLeft, Reservation, availability

ZONES = {"us-west-2a": "usw2-az2", "us-west-2b": "usw2-az1"}
TYPES = ["g5.xlarge", "g6.xlarge", "g4dn.xlarge"]
ALL = [(name, zone) for name in TYPES for zone in ZONES]
DENIED = ("UnauthorizedOperation", "You are not authorized to perform this operation.")
NO_PLAN = ("AccessDenied", "the support plan does not have it")
SERVICES = {"get_service_quota": "service-quotas", "get_caller_identity": "sts"}  # ec2: all others
NO_BLOCKS = [{"CapacityBlockOfferings": []}]
THROTTLED = ("RequestLimitExceeded", "Request limit exceeded.")
BLOCK = {
    "CapacityBlockOfferingId": "cb-1",
    "InstanceType": "p5.48xlarge",
    "AvailabilityZone": "us-west-2b",
    "InstanceCount": 1,
    "StartDate": datetime(2026, 11, 24, 11, 30, tzinfo=UTC),
    "EndDate": datetime(2026, 11, 25, 11, 30, tzinfo=UTC),
    "CapacityBlockDurationHours": 24,
    "UpfrontFee": "1320.96",
    "CurrencyCode": "USD",
}


SESSION = boto3.Session("x", "x", region_name="us-west-2")


class Cloud:
    """AWS, which answers as it is told to, and what it was asked.

    Args:
        answers: Calls in their order, each with the page that it answers, or with an error's code and text.
    """

    region = "us-west-2"

    def __init__(self, answers):
        self.asked, self._clients, self._stubs = [], {}, {}
        self._answers = answers

    def client(self, service):
        if service not in self._clients:
            self._clients[service] = self._client(service)
        return self._clients[service]

    def _client(self, service):
        client = SESSION.client(service)
        client.meta.events.register("provide-client-params.*.*", self._note)
        stub = Stubber(client)
        for call, page in self._answers:
            if SERVICES.get(call, "ec2") == service:
                stub.add_client_error(call, *page) if isinstance(page, tuple) else stub.add_response(
                    call, page
                )
        stub.activate()
        return client

    def _note(self, params, model, **_):
        self.asked.append((model.name, params))

    def params(self, call):
        return [params for name, params in self.asked if name == call]


def pages(key, *contents):
    """The answers of a call in pages; each but the last names the next."""
    return [
        {key: content, **({"NextToken": f"page-{number}"} if number < len(contents) else {})}
        for number, content in enumerate(contents, 1)
    ]


def offered(*pairs):
    return pages("InstanceTypeOfferings", [{"InstanceType": name, "Location": zone} for name, zone in pairs])


def running(*instances):
    return pages("Reservations", [{"Instances": [*instances]}])


def instance(name, *, lifecycle=None, tenancy="default"):
    more = {"InstanceLifecycle": lifecycle} if lifecycle else {}
    return {"InstanceType": name, "Placement": {"Tenancy": tenancy}, **more}


def reservation(name="cr-1", instance_type="g5.xlarge", free=1, **changed):
    return {
        "CapacityReservationId": name,
        "OwnerId": "111122223333",
        "InstanceType": instance_type,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": "us-west-2a",
        "Tenancy": "default",
        "TotalInstanceCount": 4,
        "AvailableInstanceCount": free,
        "State": "active",
        "InstanceMatchCriteria": "open",
        "ReservationType": "default",
        **changed,
    }


def scores(*pairs):
    rows = [{"Region": "us-west-2", "AvailabilityZoneId": zone, "Score": score} for zone, score in pairs]
    return pages("SpotPlacementScores", rows)


def aws(*, spot=False, **changed):
    """An AWS with an answer to every call; what a test is about is changed, and None is not asked."""
    zones = [{"ZoneName": name, "ZoneId": zone_id} for name, zone_id in ZONES.items()]
    answers = {
        "describe_availability_zones": [{"AvailabilityZones": zones}],
        "describe_instance_type_offerings": offered(*ALL),
        "describe_capacity_reservations": pages("CapacityReservations", []),
        "get_service_quota": [{"Quota": {"Value": 64.0}}],
        "describe_instances": running(),
        "get_caller_identity": [{"Account": "111122223333"}],
        "describe_instance_types": [],
        "get_spot_placement_scores": scores(("usw2-az1", 3), ("usw2-az2", 8)) if spot else [],
        "get_capacity_manager_supportability_scores": [NO_PLAN],
        "describe_capacity_block_offerings": [],
    }
    assert set(changed) <= set(answers)
    return Cloud([(call, page) for call, pages in (answers | changed).items() for page in pages])


def by_zone(places, name="g5.xlarge"):
    return {place.zone: place for place in places if place.instance_type == name}


def test_each_type_has_each_zone_with_four_answers():
    cloud = aws(
        spot=True,
        describe_instance_type_offerings=offered(
            *[pair for pair in ALL if pair != ("g5.xlarge", "us-west-2b")]
        ),
        describe_instances=running(instance("g6.12xlarge", lifecycle="spot"), instance("g5.xlarge")),
        describe_capacity_reservations=pages("CapacityReservations", [reservation()]),
    )
    places = availability(cloud, [*TYPES, TYPES[0]], spot=True)
    assert [(place.instance_type, place.zone, place.zone_id) for place in places] == [
        (name, zone, zone_id) for name in TYPES for zone, zone_id in ZONES.items()
    ]
    here, there = by_zone(places).values()
    assert (here.offered.answer, there.offered.answer) == ("yes", "no")
    assert here.quota == there.quota
    assert here.quota == QuotaLeft("L-3819A6DF", "All G and VT Spot Instance Requests", 4, 64, 48, 0, 16)
    assert (here.likelihood.placement, here.likelihood.together) == (8, tuple(TYPES))
    assert (there.likelihood.placement, there.likelihood.reasons) == (None, ("the zone does not have it",))
    assert here.reservation.held == (CapacityReservation("cr-1", 1, named=False, block=False),)
    assert there.reservation == Reservation((), ())
    assert by_zone(places, "g6.xlarge")["us-west-2b"].likelihood.placement == 3


def test_what_counts_against_a_quota_on_demand():
    others = [
        instance("g5.4xlarge", lifecycle="spot"),
        instance("p5.48xlarge", lifecycle="capacity-block"),
        instance("g4dn.metal", tenancy="host"),
        instance("m5.24xlarge"),
        instance("p4d.24xlarge"),
    ]
    reserved = [
        reservation("cr-1", free=2),
        reservation("cr-2", State="pending", TotalInstanceCount=1),
        reservation("cr-3", OwnerId="444455556666", free=4),
        reservation(
            "cr-4", "p5.48xlarge", ReservationType="capacity-block", InstanceMatchCriteria="targeted"
        ),
    ]
    cloud = aws(
        describe_instances=running(instance("g5.xlarge"), instance("vt1.3xlarge"), *others),
        describe_instance_types=[
            {"InstanceTypes": [{"InstanceType": "vt1.3xlarge", "VCpuInfo": {"DefaultVCpus": 12}}]}
        ],
        describe_capacity_reservations=pages("CapacityReservations", reserved),
    )
    quota = availability(cloud, TYPES, spot=False)[0].quota
    assert (quota.code, quota.used, quota.reserved, quota.left) == ("L-DB2E81BA", 4 + 12, (2 + 1) * 4, 36)
    assert cloud.params("DescribeInstanceTypes") == [{"InstanceTypes": ["vt1.3xlarge"]}]


def test_a_quota_that_is_used_up_leaves_nothing_and_not_less():
    cloud = aws(
        get_service_quota=[{"Quota": {"Value": 8.0}}], describe_instances=running(instance("g6.4xlarge"))
    )
    quota = availability(cloud, TYPES, spot=False)[0].quota
    assert (quota.limit, quota.used, quota.left) == (8, 16, 0)


def test_quotas_are_asked_for_once_each():
    names = ["g5.xlarge", "g6.xlarge", "p5.48xlarge", "p4d.24xlarge"]
    cloud = aws(
        get_service_quota=[{"Quota": {"Value": 64.0}}, {"Quota": {"Value": 0.0}}],
        describe_capacity_block_offerings=[*pages("CapacityBlockOfferings", [BLOCK]), *NO_BLOCKS],
        describe_instance_type_offerings=offered(*[(name, "us-west-2b") for name in names]),
    )
    places = availability(cloud, names, spot=False)
    assert {place.instance_type: place.quota.left for place in places} == dict(
        zip(names, [64, 64, 0, 0], strict=True)
    )
    asked = cloud.params("GetServiceQuota")
    assert asked == [{"ServiceCode": "ec2", "QuotaCode": code} for code in ("L-DB2E81BA", "L-417A185B")]


def test_a_quota_that_no_source_names_is_unknown():
    names = ["p6-b200.48xlarge"]
    cloud = aws(
        spot=True,
        get_spot_placement_scores=[],
        describe_instance_type_offerings=offered(("p6-b200.48xlarge", "us-west-2a")),
        describe_capacity_block_offerings=NO_BLOCKS,
    )
    quota = availability(cloud, names, spot=True)[0].quota
    assert (quota.code, quota.needed, quota.left) == ("", 192, None)
    assert quota.reason == "no source names the spot quota of p6-b200.48xlarge"
    assert not cloud.params("GetServiceQuota")


def test_a_type_that_the_catalogue_does_not_know():
    cloud = aws(describe_instance_type_offerings=offered(("g9.xlarge", "us-west-2a")))
    [quota] = {place.quota for place in availability(cloud, ["g9.xlarge"], spot=False)}
    assert (quota.code, quota.needed, quota.limit, quota.left) == ("L-DB2E81BA", None, 64, 64)
    assert "does not know how many virtual CPUs g9.xlarge has" in quota.reason


def test_fewer_than_three_types_are_not_scored():
    """AWS calls fewer always low; a type that no zone of the region has does not help."""
    cloud = aws(
        spot=True,
        get_spot_placement_scores=[],
        describe_instance_type_offerings=offered(*[pair for pair in ALL if pair[0] != "g6.xlarge"]),
    )
    places = availability(cloud, TYPES, spot=True)
    likelihood = by_zone(places)["us-west-2a"].likelihood
    assert (likelihood.placement, likelihood.together) == (None, ())
    assert "AWS scores 3 types together" in likelihood.reasons[0]
    assert "the region has 2" in likelihood.reasons[0]
    assert {place.offered.answer for place in by_zone(places, "g6.xlarge").values()} == {"no"}


def test_a_score_is_asked_for_all_types_together_in_single_zones():
    cloud = aws(spot=True)
    availability(cloud, TYPES, spot=True)
    assert cloud.params("GetSpotPlacementScores") == [
        {
            "InstanceTypes": TYPES,
            "TargetCapacity": 1,
            "SingleAvailabilityZone": True,
            "RegionNames": ["us-west-2"],
        }
    ]


def test_a_zone_that_aws_gives_no_score_is_unknown():
    places = availability(aws(spot=True, get_spot_placement_scores=scores(("usw2-az1", 1))), TYPES, spot=True)
    here, there = by_zone(places).values()
    assert here.likelihood.placement is None
    assert "AWS gave no placement score of the zone" in here.likelihood.reasons
    assert there.likelihood.placement == 1


def test_the_capacity_score_of_an_account_that_has_it():
    rows = [
        {"InstanceType": "g5.xlarge", "AvailabilityZoneId": "usw2-az2", "Score": "medium"},
        {"InstanceType": "g5.xlarge", "AvailabilityZoneId": "usw2-az1", "Score": "unsupported"},
    ]
    answer = {"AggregateScore": "medium", "CapacityManagerSupportabilityScores": rows}
    cloud = aws(get_capacity_manager_supportability_scores=[answer])
    places = availability(cloud, TYPES, spot=False)
    assert [place.likelihood.capacity for place in by_zone(places).values()] == ["medium", "unsupported"]
    assert by_zone(places)["us-west-2a"].likelihood.placement is None, "on demand there is none"
    assert by_zone(places, "g6.xlarge")["us-west-2a"].likelihood.reasons[-1] == (
        "AWS gave no capacity score of the type in the zone"
    )
    [asked] = cloud.params("GetCapacityManagerSupportabilityScores")
    assert (asked["MarketType"], asked["CapacityAmount"], asked["CapacityUnit"]) == (
        "on-demand",
        1,
        "instances",
    )
    assert asked["CapacityAvailabilityZoneIds"] == ["usw2-az1", "usw2-az2"]


def test_more_types_and_zones_than_a_capacity_score_takes():
    zones = [{"ZoneName": f"us-west-2-lax-{n}", "ZoneId": f"usw2-lax1-az{n}"} for n in range(12)]
    names = [f"g5.{n}xlarge" for n in range(60)]
    cloud = aws(
        describe_availability_zones=[{"AvailabilityZones": zones}],
        describe_instance_type_offerings=offered(*[(name, "us-west-2-lax-0") for name in names]),
        get_capacity_manager_supportability_scores=[{}] * 4,
    )
    availability(cloud, names, spot=False)
    asked = cloud.params("GetCapacityManagerSupportabilityScores")
    sizes = [(len(one["CapacityAvailabilityZoneIds"]), len(one["InstanceTypes"])) for one in asked]
    assert sizes == [(10, 50), (10, 10), (2, 50), (2, 10)]


def test_a_boto3_without_capacity_scores(monkeypatch):
    cloud = aws(get_capacity_manager_supportability_scores=[])
    monkeypatch.delattr(type(cloud.client("ec2")), "get_capacity_manager_supportability_scores")
    likelihood = availability(cloud, TYPES, spot=False)[0].likelihood
    assert "this boto3 knows no capacity scores" in likelihood.reasons[-1]


def test_reservations_that_a_machine_could_start_in():
    held = [
        reservation("cr-open", free=2),
        reservation("cr-named", InstanceMatchCriteria="targeted"),
        reservation("cr-full", free=0),
        reservation("cr-windows", InstancePlatform="Windows"),
        reservation("cr-dedicated", Tenancy="dedicated"),
        reservation("cr-later", State="scheduled"),
        reservation("cr-other", "g5.2xlarge"),
        reservation("cb-1", ReservationType="capacity-block", InstanceMatchCriteria="targeted"),
    ]
    cloud = aws(describe_capacity_reservations=pages("CapacityReservations", held))
    found = by_zone(availability(cloud, TYPES, spot=False))
    assert [
        (one.reservation_id, one.free, one.named, one.block) for one in found["us-west-2a"].reservation.held
    ] == [
        ("cr-open", 2, False, False),
        ("cr-named", 1, True, False),
        ("cb-1", 1, True, True),
    ]
    assert found["us-west-2b"].reservation.held == ()


def test_capacity_blocks_of_a_type_that_has_them():
    cloud = aws(
        describe_instance_type_offerings=offered(
            ("p5.48xlarge", "us-west-2a"), ("p5.48xlarge", "us-west-2b")
        ),
        describe_capacity_block_offerings=pages("CapacityBlockOfferings", [], [BLOCK]),
    )
    found = by_zone(availability(cloud, ["p5.48xlarge"], spot=False), "p5.48xlarge")
    assert found["us-west-2a"].reservation.blocks == ()
    [block] = found["us-west-2b"].reservation.blocks
    assert (block.offering_id, block.starts, block.hours) == ("cb-1", BLOCK["StartDate"], 24)
    assert (block.fee, block.currency) == (Decimal("1320.96"), "USD")
    first = cloud.params("DescribeCapacityBlockOfferings")[0]
    assert first == {"InstanceType": "p5.48xlarge", "InstanceCount": 1, "CapacityDurationHours": 24}


def test_a_thousand_to_a_page_and_an_empty_page_is_not_the_end():
    many = [{"InstanceType": f"g5.{n}xlarge", "Location": "us-west-2a"} for n in range(1000)]
    last = [{"InstanceType": name, "Location": zone} for name, zone in ALL]
    boxes = [{"Instances": [instance("g5.xlarge")]}] * 1000
    cloud = aws(
        describe_instance_type_offerings=pages("InstanceTypeOfferings", many, [], last),
        describe_instances=pages("Reservations", boxes, [], boxes[:5]),
        describe_capacity_reservations=pages("CapacityReservations", [], [reservation()]),
        get_service_quota=[{"Quota": {"Value": 5000.0}}],
    )
    place = availability(cloud, TYPES, spot=False)[0]
    assert place.offered.answer == "yes"
    assert (place.quota.used, place.quota.reserved, place.quota.left) == (4020, 4, 976)
    assert [asked["MaxResults"] for asked in cloud.params("DescribeInstances")] == [1000] * 3


COLUMNS = {  # call: what of a place it makes unknown
    "describe_instance_type_offerings": {"offered"},
    "get_service_quota": {"quota"},
    "describe_instances": {"quota"},
    "get_spot_placement_scores": {"likelihood"},
    "describe_capacity_reservations": {"reservation"},
    "describe_capacity_block_offerings": {"reservation"},
}


def unknown(place):
    """The columns in which something is unknown, and the reasons."""
    columns = {
        "offered": (place.offered.answer == "unknown", place.offered.reason),
        "quota": (place.quota.left is None, place.quota.reason),
        "likelihood": (place.likelihood.placement is None, "; ".join(place.likelihood.reasons)),
        "reservation": (
            None in (place.reservation.held, place.reservation.blocks),
            "; ".join(place.reservation.reasons),
        ),
    }
    return {name: reason for name, (lacks, reason) in columns.items() if lacks}


@pytest.mark.parametrize("refusal", [DENIED, THROTTLED], ids=lambda one: one[0])
@pytest.mark.parametrize("call", COLUMNS)
def test_a_call_that_fails_makes_its_column_unknown_and_no_other(call, refusal):
    names = ["p5.48xlarge", "p5.4xlarge", "p4d.24xlarge"]
    answers = {
        "describe_instance_type_offerings": offered(*[(name, zone) for name in names for zone in ZONES]),
        "get_service_quota": [{"Quota": {"Value": 64.0}}] * 2,
        "describe_capacity_block_offerings": NO_BLOCKS * 3,
    }
    answers |= {call: [refusal] * len(answers.get(call, [1]))}
    cloud = aws(spot=True, **answers)
    for place in availability(cloud, names, spot=True):
        assert set(unknown(place)) == COLUMNS[call]
        [reason] = unknown(place).values()
        assert refusal[0] in reason
        assert ("let the role call" if refusal == DENIED else "wait a minute") in reason


def test_reservations_that_can_not_be_read_leave_at_most_so_much_of_a_quota():
    cloud = aws(describe_capacity_reservations=[DENIED])
    quota = availability(cloud, TYPES, spot=False)[0].quota
    assert (quota.used, quota.reserved, quota.left) == (0, None, 64)
    assert "DescribeCapacityReservations answered UnauthorizedOperation" in quota.reason


def test_an_account_that_can_not_be_looked_up_and_a_size():
    cloud = aws(
        describe_capacity_reservations=pages("CapacityReservations", [reservation()]),
        get_caller_identity=[("AccessDenied", "no")],
        describe_instances=running(instance("vt1.3xlarge")),
        describe_instance_types=[THROTTLED],
    )
    quota = availability(cloud, TYPES, spot=False)[0].quota
    assert (quota.limit, quota.used, quota.reserved, quota.left) == (64, None, None, None)
    assert "RequestLimitExceeded" in quota.reason
    assert "AccessDenied" in quota.reason


def test_a_quota_without_a_value():
    quota = availability(aws(get_service_quota=[{"Quota": {}}]), TYPES, spot=False)[0].quota
    assert (quota.limit, quota.left, quota.reason) == (
        None,
        None,
        "Service Quotas gave no value of L-DB2E81BA",
    )


@pytest.mark.parametrize("answer", [DENIED, {"AvailabilityZones": []}])
def test_zones_that_are_unknown_have_names_and_no_score(answer):
    cloud = aws(
        spot=True, describe_availability_zones=[answer], get_capacity_manager_supportability_scores=[]
    )
    places = availability(cloud, TYPES, spot=True)
    assert [(place.zone, place.zone_id) for place in places[:2]] == [("us-west-2a", ""), ("us-west-2b", "")]
    assert set(unknown(places[0])) == {"likelihood"}
    cloud = aws(
        spot=True,
        describe_availability_zones=[answer],
        describe_instance_type_offerings=[DENIED],
        get_capacity_manager_supportability_scores=[],
    )
    places = availability(cloud, TYPES, spot=True)
    assert [(place.instance_type, place.zone) for place in places] == [(name, "") for name in TYPES]
    assert set(unknown(places[0])) == {"offered", "likelihood"}
    assert places[0].quota.left == 64


def test_a_type_that_no_zone_has():
    cloud = aws(describe_instance_type_offerings=offered())
    places = availability(cloud, ["g5.xlarge"], spot=False)
    assert [place.offered.answer for place in places] == ["no", "no"]


def test_a_service_that_can_not_be_reached_is_asked_once():
    class Nowhere(Cloud):
        def _client(self, service):
            nowhere = {
                "endpoint_url": "http://127.0.0.1:1",
                "config": Config(retries={"total_max_attempts": 1}),
            }
            client = SESSION.client(service, **nowhere)
            client.meta.events.register("provide-client-params.*.*", self._note)
            return client

    cloud = Nowhere(())
    [place] = availability(cloud, ["p5.48xlarge"], spot=False)
    assert [name for name, _ in cloud.asked] == ["DescribeAvailabilityZones", "GetServiceQuota"]
    assert set(unknown(place)) == {"offered", "quota", "likelihood", "reservation"}
    assert "Could not connect to the endpoint URL" in place.offered.reason


def test_nothing_is_asked_for_no_type():
    cloud = Cloud(())
    assert availability(cloud, [], spot=True) == ()
    assert cloud.asked == []
