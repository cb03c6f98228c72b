"""What things cost: the newer of cache and shipped data, with day and age; nothing is made newer."""

import json
import os
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal

import pytest

from gpukiln.catalog import offerings as shipped
from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import DATA, data
from gpukiln.catalog.regions import regions
from gpukiln.errors import BusyError, UsageError
from gpukiln.locks import locked
from gpukiln.offers import cache, prices

TODAY = date(2026, 11, 23)
HERE = "us-west-2"
ZONE = cache.ZonePrice(Decimal("0.41"), Decimal("0.4"), Decimal("0.405"), Decimal("0.5"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    return tmp_path


def keep(day=TODAY, **parts):
    """Put answers of a day there: on_demand, spot and zones by name, volume in USD."""
    made = {}
    if "on_demand" in parts:
        made["on_demand"] = cache.HourlyPrices(day, "the API", parts["on_demand"])
    if "spot" in parts:
        made["spot"] = cache.SpotHistory(day, "the API", parts["spot"])
    if "zones" in parts:
        made["offerings"] = cache.ZoneOfferings(day, "the API", parts["zones"])
    if "volume" in parts:
        made["volume"] = cache.UnitPrice(day, "the API", parts["volume"])
    return cache.update("aws", HERE, made)


def test_the_shipped_data_works_without_a_cache(home):
    found = prices.on_demand("g5.4xlarge", HERE, TODAY)
    assert (found.value, found.unit) == (Decimal("1.624"), "USD/hour")
    assert (found.age_days, found.stale) == (385, True)
    found = prices.on_demand("p5.4xlarge", HERE, TODAY)
    assert (found.age_days, found.stale) == (None, True)  # its day is not known
    dated = prices.on_demand("g5.4xlarge", "us-east-1", date(2026, 8, 1))
    assert (dated.as_of, dated.age_days, dated.stale) == ("2026-07-20", 12, False)
    assert prices.on_demand("g5.4xlarge", "us-east-1", date(2026, 8, 20)).stale  # 31 days
    assert prices.on_demand("g5.4xlarge", "af-south-1", TODAY) is None
    gp3, address = prices.volume(HERE, TODAY), prices.public_ipv4(HERE, TODAY)
    assert (gp3.value, gp3.unit) == (Decimal("0.08"), "USD/GB-month")
    assert (address.value, address.unit) == (Decimal("0.005"), "USD/hour")
    assert prices.volume("eu-west-1", TODAY) is prices.public_ipv4("cn-north-1", TODAY) is None
    assert list(home.iterdir()) == []  # to look leaves nothing


def test_no_number_goes_through_a_float():
    for figure in (prices.on_demand("p4d.24xlarge", "us-east-1", TODAY), prices.volume(HERE, TODAY)):
        assert isinstance(figure.value, Decimal)
    assert str(prices.on_demand("p4d.24xlarge", "us-east-1", TODAY).value) == "21.957642"


def test_shipped_spot_is_the_range_of_a_region():
    cheap, dear = prices.spot("g4dn.xlarge", HERE, TODAY)
    assert (cheap.zone, cheap.now.value, dear.zone, dear.now.value) == (
        *(prices.CHEAPEST, Decimal("0.2386")),
        *(prices.DEAREST, Decimal("0.2479")),
    )
    assert cheap.now.stale
    assert cheap.saving == Decimal("0.5464")  # 1 - 0.2386 / 0.526
    assert (cheap.low, cheap.mean, cheap.high) == (None, None, None)
    [only] = prices.spot("p5e.48xlarge", HERE, TODAY)
    assert (only.zone, only.saving) == (prices.CHEAPEST, None)  # no price on demand is known
    assert prices.spot("g7.2xlarge", HERE, TODAY) == ()


def test_what_the_region_said_is_taken_with_its_own_age():
    keep(TODAY - timedelta(days=3), on_demand={"g5.4xlarge": Decimal("1.7")}, volume=Decimal("0.09"))
    found = prices.on_demand("g5.4xlarge", HERE, TODAY)
    assert (found.value, found.age_days, found.stale, found.source) == (Decimal("1.7"), 3, False, "the API")
    assert prices.on_demand("g4dn.xlarge", HERE, TODAY).source != "the API"  # it said nothing of that one
    assert prices.volume(HERE, TODAY).value == Decimal("0.09")
    assert prices.on_demand("g5.4xlarge", HERE, TODAY, cloud="embedded").value == Decimal("1.624")


def test_an_older_answer_does_not_hide_newer_shipped_data():
    keep(date(2026, 10, 3), volume=Decimal("0.09"))
    assert prices.volume(HERE, TODAY).value == Decimal("0.08")  # of 2026-10-04
    keep(date(2026, 10, 5), volume=Decimal("0.09"))
    assert prices.volume(HERE, TODAY).value == Decimal("0.09")


def test_touching_a_file_makes_no_number_newer():
    keep(TODAY - timedelta(days=40), on_demand={"g5.4xlarge": Decimal("1.7")})
    os.utime(cache.path("aws", HERE))
    found = prices.on_demand("g5.4xlarge", HERE, TODAY)
    assert (found.value, found.age_days, found.stale) == (Decimal("1.7"), 40, True)
    assert prices.on_demand("g5.4xlarge", HERE, TODAY - timedelta(days=41)).stale  # of tomorrow


def test_spot_prices_of_zones_come_cheapest_first_and_age_in_a_day():
    dear = cache.ZonePrice(Decimal("1.624"), Decimal("0.9"), Decimal("1.2"), Decimal("1.624"))
    both = {f"{HERE}a": dear, f"{HERE}c": ZONE}
    keep(TODAY - timedelta(days=1), spot={"g5.4xlarge": both, "p5.4xlarge": {}})
    first, second = prices.spot("g5.4xlarge", HERE, TODAY)
    assert (first.zone, first.low, first.mean, first.high) == (f"{HERE}c", ZONE.low, ZONE.mean, ZONE.high)
    assert (first.saving, second.saving) == (Decimal("0.7475"), 0)  # as dear as on demand is no saving
    assert not first.now.stale
    assert prices.spot("g5.4xlarge", HERE, TODAY + timedelta(days=1))[0].now.stale
    assert prices.spot("p5.4xlarge", HERE, TODAY) == ()  # asked for, and there is none


def test_zones_are_names_where_the_region_was_asked_and_ids_else():
    assert prices.offerings("g5.xlarge", HERE) == ("usw2-az1", "usw2-az2", "usw2-az3")
    assert prices.offerings("p5e.48xlarge", "eu-west-1") == ()
    keep(zones={"g5.xlarge": (f"{HERE}b",), "g6.xlarge": ()})
    assert prices.offerings("g5.xlarge", HERE) == (f"{HERE}b",)
    assert prices.offerings("g6.xlarge", HERE) == ()
    assert prices.offerings("g4dn.xlarge", HERE) == ("usw2-az1", "usw2-az2", "usw2-az3")  # not asked for
    assert prices.offerings("g5.xlarge", "mars-north-1") is None
    assert prices.offerings("m5.xlarge", HERE) is None  # none of the catalogue's


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "has schema None, and this version reads 1"),
        ('{"schema": 2}', "has schema 2"),
        ('{"schema": 1, "cloud": "aws"}', "region is missing"),
        ('{"schema": 1, "cloud": "aws", "region": "eu-west-1"}', "is of eu-west-1 of aws"),
    ],
)
def test_a_damaged_document_says_what_to_do(text, said):
    file = cache.path("aws", HERE)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        prices.on_demand("g5.xlarge", HERE, TODAY)
    assert str(file) in caught.value.message
    assert f"`invoke offer.refresh --cloud aws --region {HERE}`" in caught.value.hint
    with pytest.raises(UsageError, match=said):  # nor is it written over
        keep(volume=Decimal(1))
    assert file.read_text() == text


def test_a_wrong_number_in_a_document_is_named():
    keep(on_demand={"g5.xlarge": Decimal("1.006")})
    file = cache.path("aws", HERE)
    document = json.loads(file.read_text())
    assert document["on_demand"]["usd_hour"] == {"g5.xlarge": "1.006"}
    document["on_demand"]["usd_hour"]["g5.xlarge"] = "cheap"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"on_demand\.usd_hour\.g5\.xlarge: found 'cheap'"):
        prices.on_demand("g5.xlarge", HERE, TODAY)


def test_parts_are_kept_beside_each_other_and_one_writes_at_a_time(monkeypatch):
    keep(on_demand={"g5.xlarge": Decimal("1.006")})
    keep(volume=Decimal("0.08"))
    found = cache.read("aws", HERE)
    assert (found.on_demand.usd_hour, found.volume.usd) == ({"g5.xlarge": Decimal("1.006")}, Decimal("0.08"))
    monkeypatch.setattr(cache, "LOCK_S", 0)
    with (
        locked(cache.path("aws", HERE).with_suffix(".lock")),
        pytest.raises(BusyError, match="is being written"),
    ):
        keep(volume=Decimal(1))


def test_the_shipped_lists_are_of_known_types_and_whole():
    listed = data("prices")
    for row in listed["spot"]:
        assert set(row["usd_hour"]) <= set(instance_types())
        assert all(0 < low <= high < 200 for low, high in row["usd_hour"].values())
    for name in ("machines", "spot", "volumes", "public_ipv4", "snapshots"):
        for row in listed[name]:
            assert row["as_of"]
            assert row["source"]
            assert set(row.get("regions") or [row["region"]]) <= regions()


# Of AWS's page of prices on demand, 2025-11-03; p5.4xlarge of skypilot-catalog.
LISTED = [
    ("g4dn.4xlarge", "us-west-2", "1.204"),
    ("g5.xlarge", "us-west-2", "1.006"),
    ("g4dn.xlarge", "us-east-2", "0.526"),
    ("g4dn.xlarge", "eu-west-1", "0.587"),
    ("g6e.12xlarge", "eu-central-1", "13.12002"),
    ("p5.48xlarge", "eu-north-1", "58.8928"),
    ("p5.4xlarge", "eu-west-2", "8.944"),
]


@pytest.mark.parametrize(("name", "region", "usd"), LISTED)
def test_prices_are_shipped_of_other_regions_than_the_first(name, region, usd):
    assert str(prices.on_demand(name, region, TODAY).value) == usd


def test_no_region_that_offers_gpus_is_without_a_price():
    unpriced = set()
    for region in shipped.regions():
        there = {name for name in instance_types() if shipped.zone_ids(name, region)}
        without = {name for name in there if prices.on_demand(name, region, TODAY) is None}
        assert not there or there - without or region == "ap-south-2", region  # no source lists that one
        if region in {"us-east-1", "us-east-2", "us-west-2", "eu-central-1", "eu-west-1"}:
            unpriced |= {name.partition(".")[0] for name in without}
    assert unpriced == {"g7", "g7e", "p5e"}  # newer than the lists; p5e has no price on demand anywhere


def test_the_shipped_zones_are_generated():
    assert (DATA / "offerings.yaml").read_text() == shipped.shipped()


def test_a_family_is_split_where_its_types_are_elsewhere():
    assert shipped.zone_ids("p5.4xlarge", "ap-southeast-2") == ("apse2-az3",)
    assert shipped.zone_ids("p5.48xlarge", "ap-southeast-2") == ("apse2-az1", "apse2-az2", "apse2-az3")
    found = dict(shipped._grouped({"g9": ["g9.a", "g9.b"]}, {"g9.a": ("z1",)}))
    assert found == {"g9.a": ("z1",)}  # and never the family: its other type is not there


def test_what_the_source_has_in_no_region_is_unknown(monkeypatch):
    there = shipped._offerings()
    assert shipped.zone_ids("g7.2xlarge", "eu-west-1") == ()
    monkeypatch.setattr(shipped, "_offerings", lambda: replace(there, unknown=("g7", "p5.4xlarge")))
    assert shipped.zone_ids("g7.2xlarge", "eu-west-1") is shipped.zone_ids("p5.4xlarge", HERE) is None
    assert shipped.zone_ids("p5.48xlarge", HERE)
