"""What a build costs: seconds and prices multiplied, no price invented, nothing on the embedded cloud."""

from dataclasses import replace
from decimal import Decimal

import pytest

from gpukiln.catalog.images import load_image
from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import ROOT, data
from gpukiln.catalog.prices import machine_price, snapshot_price
from gpukiln.commands import ami
from gpukiln.images.builds import Builds, Record
from gpukiln.images.cost import cost_lines, estimate, measured_cost
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.typed import dump, load
from tests.support.plans import BAKE, VERDICT

STEPS = {
    "plan": 9.0,
    "bake": 1800.0,
    "boot from the image": 100.0,
    "verify": 200.0,
    "remove the machine": 60.0,
}


@pytest.fixture
def on_aws(planned):
    return replace(planned, cloud="aws", region="us-east-1")


def test_an_estimate_from_the_last_build(on_aws):
    cost = estimate(on_aws, STEPS)
    bake, verify = cost.machines
    assert (bake.instance_type, bake.seconds, bake.usd) == ("m5.xlarge", 1800, 0.096)  # half an hour of 0.192
    assert (verify.instance_type, verify.seconds) == ("g4dn.xlarge", 360)
    assert verify.usd == pytest.approx(0.0526)  # a tenth of an hour of 0.526
    assert cost.usd == pytest.approx(0.1486)
    assert cost.snapshot_usd_month == pytest.approx(1.5)  # 30 GiB
    text = "\n".join(cost_lines(cost))
    for words in (
        "0.15 USD",
        "as long as the last build here",
        "2026-01-19",
        "2026-07-20",
        "1.50 USD a month",
    ):
        assert words in text


def test_an_estimate_without_a_build_says_that_it_assumes(on_aws):
    assert "assumed" in cost_lines(estimate(on_aws, {}))[0]


def test_a_price_that_nobody_knows_is_not_guessed(on_aws):
    elsewhere = replace(on_aws, region="eu-west-3", instance_types=("g5.xlarge",))
    cost = estimate(elsewhere, STEPS)
    assert cost.usd is None
    assert cost.snapshot_usd_month is None
    text = "\n".join(cost_lines(cost))
    assert "cost: not known" in text
    assert "the catalogue has none for g5.xlarge in eu-west-3" in text


def test_the_embedded_cloud_costs_nothing(planned):
    assert estimate(planned, STEPS) is None
    assert measured_cost(planned, STEPS, LaunchedMachine("i-1", "g4dn.xlarge", "us-west-2a", False)) is None
    assert cost_lines(None) == ["cost: none, the embedded cloud is this machine"]


def test_a_record_keeps_what_was_spent_and_each_verification_adds_to_it(on_aws, tmp_path):
    first = measured_cost(on_aws, STEPS, LaunchedMachine("i-1", "g4dn.xlarge", "us-east-1a", False))
    again = {step: STEPS[step] for step in STEPS if step not in ("plan", "bake")}
    cost = measured_cost(on_aws, again, LaunchedMachine("i-2", "g5.xlarge", "us-east-1b", True), first)
    assert [(one.purpose, one.instance_type) for one in cost.machines] == [
        ("bake", "m5.xlarge"),
        ("verify", "g4dn.xlarge"),
        ("verify", "g5.xlarge"),
    ]
    assert cost.usd == pytest.approx(0.096 + 0.0526 + 0.1006)
    assert cost_lines(cost)[0].startswith("cost: at most 0.25 USD, machine time measured")  # spot
    builds = Builds(tmp_path)
    build = builds.create("eks-gpu")
    build.write(Record(build.id, "verified", on_aws, BAKE, (VERDICT,), STEPS, cost=cost))
    assert build.read().cost == cost


def test_a_record_of_before_has_no_cost(planned, tmp_path):
    build = Builds(tmp_path).create("eks-gpu")
    record = Record(build.id, "verified", planned, BAKE, (VERDICT,), STEPS)
    document = dump(record)
    del document["cost"]
    assert load(Record, document, where="record").cost is None


def test_show_says_what_a_build_cost(on_aws, tmp_path, monkeypatch, capsys):
    builds = Builds(tmp_path)
    build = builds.create("eks-gpu")
    machine = LaunchedMachine("i-1", "g4dn.xlarge", "us-east-1a", False)
    build.write(Record(build.id, "failed", on_aws, cost=measured_cost(on_aws, STEPS, machine), error="no"))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    ami.AmiShow(build="last").run()
    shown = capsys.readouterr().out
    assert "cost: 0.15 USD, machine time measured" in shown
    assert "bake on m5.xlarge for" in shown


def test_the_catalogue_of_prices():
    assert machine_price("m5.xlarge", "us-east-1").usd == Decimal("0.192")
    assert machine_price("g5.xlarge", "us-gov-east-1") is None
    assert snapshot_price("mars-north-1") is None
    for listed in data("prices")["machines"]:
        assert listed["as_of"]
        assert all(0 < usd < 200 for usd in listed["usd_hour"].values())
        assert set(listed["usd_hour"]) - {"m5.xlarge"} <= set(instance_types())
    for image in (ROOT / "ami").glob("*/image.yaml"):
        assert machine_price(load_image(image.parent.name, ROOT).builder_instance_type, "us-west-2")
