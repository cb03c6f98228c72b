"""What a request gets when a cloud is asked too: each offer with the zones and quota of its own market."""

from datetime import date

import pytest

from gpukiln.catalog.quotas import quota_of
from gpukiln.offers import image
from gpukiln.offers.cost import MachineUsage
from gpukiln.offers.image import Images
from gpukiln.offers.listing import RunSpec, list_offers, show_offer
from gpukiln.offers.request import parse_request
from tests.support.release_cloud import Cloud

TODAY = date(2026, 11, 23)


@pytest.fixture
def cloud(layout, tmp_path, monkeypatch):
    """The embedded API, with nothing scripted and nothing kept."""
    assert layout
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    return Cloud()


def test_an_offer_is_told_the_quota_of_its_own_market(cloud) -> None:
    request = parse_request("L40S:1", spot="auto")
    found, error = list_offers(request, ["us-west-2"], TODAY, use=MachineUsage(), runs=RunSpec(), cloud=cloud)
    assert error is None
    markets = {row.offer.market for row in found.offers}
    assert markets == {"spot", "on-demand"}  # of some types no spot price is known
    for row in found.offers:
        quota = quota_of(row.offer.instance_type, row.offer.market)
        assert {place.quota.code for place in row.places} == {quota.code}


def test_a_region_that_refuses_its_images_is_asked_once(cloud, monkeypatch) -> None:
    asked = []

    def refused(where):
        asked.append(where.region)
        return Images("2026-11-23T00:00:00+00:00", (), (), (), ("AccessDenied",))

    monkeypatch.setattr(image, "images_of", refused)
    found, _ = list_offers(
        parse_request("L4:1"),
        ["us-west-2"],
        TODAY,
        use=MachineUsage(),
        runs=RunSpec(choose=True),
        cloud=cloud,
    )
    assert asked == ["us-west-2"]
    assert "us-west-2: AccessDenied" in found.notes


def test_a_machine_is_shown_in_the_market_that_was_asked_for(cloud) -> None:
    for spot, market in ((False, "on-demand"), (True, "spot")):
        found = show_offer("g6e.xlarge", ["us-west-2"], TODAY, use=MachineUsage(), cloud=cloud, spot=spot)
        [row] = found.offers
        assert row.offer.market == market
        assert {place.quota.code for place in row.places} == {quota_of("g6e.xlarge", market).code}
