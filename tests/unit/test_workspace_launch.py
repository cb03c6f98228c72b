"""A workspace's machine starts in the first place that has one, and never twice."""

import itertools
from datetime import date

import pytest

from gpukiln.clouds.embedded import scarcity
from gpukiln.errors import BusyError, IncompatibleError
from gpukiln.offers.request import parse_request
from gpukiln.offers.select import select
from gpukiln.workspaces.provision import launch
from gpukiln.workspaces.volumes import Home
from tests.support.release_cloud import Cloud, running

GROUPS = itertools.count(1)
HOME = Home("vol-1", "vision", "ann", "us-west-2", "us-west-2b", 20)


@pytest.fixture
def start(layout, image_id):
    offers = select(parse_request("A10G:1", cpu=4), ["us-west-2"], date(2026, 11, 23)).offers[:2]
    said = []
    fresh = f"sg-{next(GROUPS)}"

    def run(*, home=None, group=fresh, last=""):
        return launch(
            Cloud(),
            "vision",
            offers,
            {"ImageId": image_id},
            subnet_ids=(),
            group_id=group,
            last=last,
            home=home,
            say=said.append,
        )

    run.layout, run.said, run.offers = layout, said, offers
    return run


def test_the_first_offer_in_the_first_zone_that_has_one(start):
    first = start.offers[0].instance_type
    scarcity.add(start.layout, f"us-west-2a:{first}")
    started = start()
    assert (started.instance_type, started.zone) == (first, "us-west-2b")
    assert "InsufficientInstanceCapacity" in start.said[0]


def test_a_command_that_is_repeated_gets_the_machine_that_it_has(start):
    first = start()
    assert start().instance_id == first.instance_id
    assert list(running()) == [first.instance_id]
    second = start(last=first.instance_id)  # the first has ended
    assert second.instance_id != first.instance_id


def test_a_home_pins_the_zone_and_no_capacity_there_names_the_move(start):
    assert start(home=HOME).zone == "us-west-2b"
    scarcity.add(start.layout, "us-west-2b:*")
    with pytest.raises(BusyError, match="in us-west-2b, where its home is") as busy:
        start(home=HOME, group="sg-2")
    assert len(busy.value.details) == 2  # both offers, in that zone alone
    assert busy.value.hint.startswith("`invoke workspace.move vision --zone ")


def test_nobody_has_capacity_and_the_whole_walk_is_told(start):
    scarcity.add(start.layout, "*:*")
    with pytest.raises(BusyError) as busy:
        start()
    assert len(busy.value.details) == 6  # two types in three zones
    assert running() == {}


def test_a_quota_is_told_by_code_and_name(start):
    scarcity.add(start.layout, "quota:L-DB2E81BA:0")
    with pytest.raises(IncompatibleError, match="quota is too low") as low:
        start()
    assert "L-DB2E81BA, Running On-Demand G and VT instances" in low.value.hint


def test_a_zone_without_the_type_is_no_place(start):
    home = Home("vol-1", "vision", "ann", "us-west-2", "us-west-2d", 20)
    with pytest.raises(IncompatibleError, match="is not offered in us-west-2d, where its home is"):
        start(home=home)
