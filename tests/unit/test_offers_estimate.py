"""Where no price is known an offer is put where it probably belongs, and the estimate says what it is of."""

import io
from datetime import date
from decimal import Decimal

import pytest
from rich.console import Console

from gpukiln.catalog.prices import DatedPrice
from gpukiln.clouds.aws import AwsCloud
from gpukiln.kubernetes.nodes.group import types_of
from gpukiln.offers import cache
from gpukiln.offers.cost import MachineUsage
from gpukiln.offers.estimate import estimate
from gpukiln.offers.model import ImageChoice
from gpukiln.offers.request import parse_request
from gpukiln.offers.select import select
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.plan import WorkspacePlan, describe_offer, plan_offline
from gpukiln.workspaces.spec import spec_of
from gpukiln.workspaces.view import preview, preview_parts

TODAY = date(2026, 11, 23)
EAST, WEST, FRANKFURT = "us-east-1", "us-west-2", "eu-central-1"
# Prices of AWS: us-east-1 and eu-central-1 in catalog/data/prices.yaml.
T4_EAST = {"g4dn.xlarge": "0.526", "g4dn.4xlarge": "1.204", "g4dn.8xlarge": "2.176", "g4dn.16xlarge": "4.352"}


@pytest.fixture(autouse=True)
def nothing_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))


@pytest.fixture
def listed(monkeypatch):
    """Have these prices in the catalogue, by region and type, and no other."""

    def having(**regions):
        there = {
            name.replace("_", "-"): {
                one: DatedPrice(Decimal(usd), "2026-07-20", "AWS") for one, usd in row.items()
            }
            for name, row in regions.items()
        }
        monkeypatch.setattr("gpukiln.catalog.prices._machines", lambda: there)

    return having


def first(gpu, region=WEST, **options):
    return select(parse_request(gpu, **options), [region], TODAY).offers[0]


def test_the_same_type_of_another_region_comes_before_a_dearer_one_with_a_price(listed):
    listed(us_east_1=T4_EAST, us_west_2={"g4dn.16xlarge": "4.352"})
    found = first("T4:1", cpu=16, memory="64GiB")
    assert (found.instance_type, found.price) == ("g4dn.4xlarge", None)
    assert (found.estimate.value, found.estimate.source) == (Decimal("1.204"), "as in us-east-1 (AWS)")
    assert (found.estimate.as_of, found.estimate.stale) == ("2026-07-20", True)


def test_the_level_of_prices_of_a_region_counts(listed):
    listed(us_east_1=T4_EAST, eu_central_1={"g4dn.xlarge": "0.658", "g6.xlarge": "1.00"})
    found = estimate("g4dn.4xlarge", FRANKFURT, TODAY)
    assert found.value == Decimal("1.5062")  # 1.204 * 1.251, of g4dn.xlarge: 0.658 / 0.526; AWS asks 1.505
    assert found.source == "1.251 times us-east-1 (AWS)"


def test_a_newer_answer_of_another_region_comes_before_an_older_one(listed):
    listed(us_east_1=T4_EAST, us_west_1={"g4dn.xlarge": "0.631"})
    asked = cache.HourlyPrices(TODAY, "the API", {"g4dn.4xlarge": Decimal("1.3")})
    cache.update("aws", "us-west-1", {"on_demand": asked})
    assert estimate("g4dn.4xlarge", WEST, TODAY).source == "as in us-west-1 (the API)"
    cache.path("aws", "us-west-1").write_text(
        "{"
    )  # damaged: of another region than the one that is asked for
    assert estimate("g4dn.4xlarge", WEST, TODAY).value == Decimal("1.204")


def test_a_size_that_no_region_prices_is_estimated_by_its_family(listed):
    listed(us_east_1={}, us_west_2={"g4dn.4xlarge": "1.204", "g4dn.12xlarge": "3.912"})
    found = estimate("g4dn.8xlarge", WEST, TODAY)
    assert (found.value, found.source) == (
        Decimal("2.408"),
        "by vCPU from g4dn.4xlarge (AWS)",
    )  # not of 4 GPUs
    assert estimate("g5.xlarge", WEST, TODAY) is None


def test_without_any_price_the_smallest_is_first_and_not_the_newest(listed):
    listed()
    names = [one.instance_type for one in select(parse_request("T4,L4,RTX-PRO-4500:1"), [WEST], TODAY).offers]
    assert names[:2] == ["g4dn.xlarge", "g6.xlarge"]
    assert names[-1] == "g6.16xlarge"


def test_a_spot_price_is_estimated_too():
    """Of g5.4xlarge spot cost 0.5516 there, and on demand 1.624 where g5.xlarge costs 1.006."""
    found = estimate("g5.xlarge", WEST, TODAY, spot=True)
    assert found.value == Decimal("0.3417")
    assert found.source.startswith("by price on demand from g5.4xlarge (skypilot-org")
    most = estimate("g7.2xlarge", EAST, TODAY, spot=True)
    assert (most.value, most.source[:28]) == (Decimal("2.52"), "at most the price on demand ")
    assert first("A10G:1", spot="only").instance_type == "g5.xlarge"


def test_node_pools_and_workspaces_take_what_is_cheaper_by_an_estimate_first():
    """p5.4xlarge has a price, 6.88; g7e.2xlarge has none there, and 3.36312 in us-east-1."""
    asked = {"gpu": "H100,RTX-PRO-6000:1", "cpu": 8, "memory": "", "arch": "", "region": WEST, "today": TODAY}
    assert types_of(named=(), **asked)[0] == "g7e.2xlarge"  # of the first pool, with the largest weight
    profile = ComputeProfile(gpu_type="H100,RTX-PRO-6000", gpu_count=1)
    found = plan_offline(
        spec_of(Workspace(workspace_name="one", region=WEST, owner="me", compute_profile=profile)), TODAY
    )
    names = [one.instance_type for one in found.offers]  # in this order where one has no capacity
    assert names == ["g7e.2xlarge", "g7e.4xlarge", "g7e.8xlarge", "p5.4xlarge"]


def test_a_plan_says_that_its_price_is_estimated():
    """Its words go into the machine's tag and Terraform's variables, where the price itself is not known."""
    words = describe_offer(first("RTX-PRO-6000:1"), "us-west-2a")
    assert words == "g7e.2xlarge on-demand in us-west-2a, about 3.36312 USD/hour (estimated)"


def test_a_preview_marks_estimates_and_explains_the_mark_once():
    """3.36312 of us-east-1 in prices.yaml; a month: 730 hours of it and of an address at 0.005."""
    wanted = Workspace(workspace_name="one", region=WEST, owner="me")
    offers = (first("RTX-PRO-6000:1"),) * 4
    choice = ImageChoice("ami-1", "given", "ami-1", ("it was named",), "", ())
    shown = io.StringIO()
    for part in preview_parts(
        preview(AwsCloud(WEST), WorkspacePlan(wanted, offers, choice, None, {}, 1, MachineUsage()), TODAY)
    ):
        Console(file=shown, width=200).print(part)
    assert "~3.36312" in shown.getvalue()
    assert "~2458.73" in shown.getvalue()
    assert shown.getvalue().count("estimated") == 1
    assert "no capacity 1 more, up to 3.36312 USD/hour" in shown.getvalue()
