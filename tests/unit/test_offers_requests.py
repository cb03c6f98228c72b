"""What requests get: a table that was written from AWS's own tables, and not from the code that it judges.

Sizes are those of DescribeInstanceTypes and zones those of DescribeInstanceTypeOfferings as moto 5.2.5 has
recorded them; prices are us-east-1's and us-west-2's of catalog/data/prices.yaml.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.errors import UsageError
from gpukiln.offers.request import parse_request
from gpukiln.offers.select import MatchingOffers, no_match_error, select

TODAY = date(2026, 11, 23)
EAST, WEST = "us-east-1", "us-west-2"


@pytest.fixture(autouse=True)
def nothing_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No region was asked for anything: the shipped data alone."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))


def answer(gpu: str, options: Mapping[str, Any]) -> MatchingOffers:
    ask = dict(options)
    regions = ask.pop("regions", (EAST,))
    return select(parse_request(gpu, **ask), regions, TODAY)


# A request, the first offer, and how many types satisfy it.
OFFERED: list[tuple[str, dict[str, Any], str, int]] = [
    # one GPU of a model
    ("T4:1", {}, "g4dn.xlarge", 5),
    ("A10G:1", {}, "g5.xlarge", 5),
    ("L4:1", {}, "g6.xlarge", 7),
    ("L40S:1", {}, "g6e.xlarge", 5),
    ("H100:1", {}, "p5.4xlarge", 1),
    ("RTX-PRO-6000:1", {}, "g7e.2xlarge", 3),
    ("RTX-PRO-4500:1", {}, "g7.2xlarge", 3),
    # as many as asked for
    ("T4:4", {}, "g4dn.12xlarge", 1),
    ("T4:8", {}, "g4dn.metal", 1),
    ("A10G:8", {}, "g5.48xlarge", 1),
    ("RTX-PRO-6000:2", {}, "g7e.12xlarge", 1),
    ("RTX-PRO-4500:8", {}, "g7.48xlarge", 1),
    ("H100:8", {}, "p5.48xlarge", 1),
    ("V100:8", {}, "p3dn.24xlarge", 1),
    ("A100:8", {}, "p4d.24xlarge", 2),
    ("A100:8:80GiB", {}, "p4de.24xlarge", 1),
    ("A100:40GB:8", {}, "p4d.24xlarge", 1),
    ("H200", {}, "p5en.48xlarge", 1),  # us-east-1 has no p5e
    ("B200", {}, "p6-b200.48xlarge", 1),
    ("B300", {}, "p6-b300.48xlarge", 1),
    ("2", {}, "g7.12xlarge", 2),
    ("8", {}, "g4dn.metal", 13),
    # from, to
    ("T4", {}, "g4dn.xlarge", 7),
    ("T4:2..", {}, "g4dn.12xlarge", 2),
    ("2..4", {}, "g4dn.12xlarge", 11),
    ("A10G,L4:1..4", {}, "g6.xlarge", 16),
    ("A10G,L4:2..4", {}, "g6.12xlarge", 4),
    ("..2:RTX-PRO-4500,RTX-PRO-6000", {}, "g7.2xlarge", 8),
    ("T4,A10G:4", {}, "g4dn.12xlarge", 3),
    # memory as the driver counts it: A10G and L4 have 22,888 MiB, L40S 45,776
    ("24GiB..:1", {}, "g6e.xlarge", 12),
    ("16GiB..24GiB:1", {}, "g4dn.xlarge", 17),
    ("40GiB..:1", {}, "g6e.xlarge", 9),
    ("48GiB..:1", {}, "g7e.2xlarge", 4),
    ("90GiB..:1", {}, "g7e.2xlarge", 3),
    ("24GiB..:2", {}, "g7.12xlarge", 2),
    ("80GiB..:8..", {}, "p4de.24xlarge", 6),
    ("16GiB:T4:1", {}, "g4dn.xlarge", 5),
    # memory as it is sold
    ("24GB..:1", {}, "g6.xlarge", 24),
    ("24GB:4", {}, "g6.12xlarge", 4),
    ("48GB:1", {}, "g6e.xlarge", 5),
    ("80GB:1", {}, "p5.4xlarge", 1),
    ("32GB", {}, "g7.2xlarge", 7),  # six g7, and p3dn's V100
    ("141GB..", {}, "p5en.48xlarge", 3),
    # AMD's g4ad and Habana's dl1 have no place where NVIDIA's are meant
    ("8GiB..:1", {}, "g4dn.xlarge", 29),
    ("..16GiB:4", {}, "g4dn.12xlarge", 1),
    # vCPU and main memory
    ("T4:1", {"cpu": 8, "memory": "32GiB"}, "g4dn.2xlarge", 4),
    ("T4:1", {"cpu": 48}, "g4dn.16xlarge", 1),
    ("L4:1", {"memory": "128GiB"}, "gr6.4xlarge", 4),
    ("L4:1", {"cpu": 32}, "g6.8xlarge", 3),
    ("L4:1", {"cpu": 32, "memory": "256GiB"}, "gr6.8xlarge", 2),
    ("L4,T4:4", {"memory": "200GiB"}, "g6.24xlarge", 1),
    ("1", {"cpu": 64, "memory": "512GiB"}, "g6e.16xlarge", 1),
    ("", {"cpu": 192}, "g6.48xlarge", 9),
    ("", {"memory": "2000GiB"}, "g7e.48xlarge", 5),
    ("L40S:4:16GiB..", {}, "g6e.12xlarge", 2),
    # local storage
    ("T4", {"disk": "1000GB"}, "g4dn.metal", 1),
    ("1", {"disk": "1900GB"}, "g7e.2xlarge", 6),
    ("", {"disk": "15TB"}, "g7e.48xlarge", 5),
    # EFA
    ("T4:1", {"efa": 1}, "g4dn.8xlarge", 2),
    ("1", {"efa": 1}, "g6.8xlarge", 12),
    ("L40S:4", {"efa": 2}, "g6e.24xlarge", 1),
    ("", {"efa": 2}, "g6e.24xlarge", 11),
    ("", {"efa": 16}, "p5.48xlarge", 3),
    # arm64
    ("", {"arch": "arm64"}, "g5g.xlarge", 6),
    ("2", {"arch": "arm64"}, "g5g.16xlarge", 2),  # g5g.metal costs the same
    ("T4G:1", {"arch": "arm64", "memory": "64GiB"}, "g5g.8xlarge", 1),
    ("T4,T4G:1", {"arch": "any"}, "g5g.xlarge", 9),
    # parts of a GPU: never unless asked for
    ("1", {}, "g4dn.xlarge", 29),
    ("1", {"fractions": True}, "g6f.large", 34),
    ("1", {"fractions": True, "memory": "16GiB"}, "g6f.xlarge", 33),
    ("L4:1:4GiB..", {"fractions": True}, "g6f.2xlarge", 10),
    ("L4:1:8GiB..", {"fractions": True, "memory": "100GiB"}, "gr6f.4xlarge", 5),
    ("12GB:1", {"fractions": True}, "g6f.4xlarge", 2),  # half of an L4 of 24 GB
    # money
    ("1", {"max_price": "0.526"}, "g4dn.xlarge", 1),
    ("24GiB..:1", {"max_price": "2.50"}, "g6e.xlarge", 2),
    ("24GiB..:1", {"max_price": "1.861"}, "g6e.xlarge", 1),
    ("T4:1", {"cpu": 8, "memory": "32GiB", "max_price": "0.752"}, "g4dn.2xlarge", 1),
    # spot: whichever is cheaper, in the cheapest zone
    ("24GiB..:1", {"spot": "auto", "max_price": "2.50"}, "g6e.4xlarge", 4),
    ("A10G:1", {"spot": "auto"}, "g5.4xlarge", 5),
    ("A100:8", {"spot": "only", "max_price": "8.00"}, "p4d.24xlarge", 1),
    ("B300:8", {"spot": "only"}, "p6-b300.48xlarge", 1),  # sold so, at a price that is not known
    # other regions
    ("H200:8", {"regions": (WEST,)}, "p5en.48xlarge", 2),  # p5e has no price, so it comes last
    ("24GiB..:1", {"regions": (WEST,), "spot": "auto"}, "g6e.xlarge", 12),
    ("T4:1", {"regions": ("af-south-1",), "cpu": 64}, "g4dn.16xlarge", 1),
    ("T4:1", {"regions": ("eu-west-1",)}, "g4dn.xlarge", 5),
    ("T4:1", {"regions": (WEST,), "cpu": 16, "memory": "64GiB"}, "g4dn.4xlarge", 3),
    ("RTX-PRO-6000,L40S:1:90GB..", {"regions": (WEST,)}, "g7e.2xlarge", 3),  # estimated
    ("A100:8", {"regions": ("eu-west-1",)}, "p4d.24xlarge", 1),
]


@pytest.mark.parametrize(("gpu", "options", "first", "many"), OFFERED)
def test_the_best_machine_for_a_request(gpu: str, options: dict[str, Any], first: str, many: int) -> None:
    offers = answer(gpu, options).offers
    assert offers, (gpu, options)
    assert (offers[0].instance_type, len(offers)) == (first, many), [one.instance_type for one in offers]
    known = [one.price or one.estimate for one in offers]
    prices = [one.value if one else Decimal("Infinity") for one in known]
    assert prices == sorted(prices)


# A request that nothing satisfies, and what comes near, with what it lacks.
REFUSED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    # the model is there, in another number
    (
        "A100:1",
        {},
        {"p4d.24xlarge": "it has 8", "p5.4xlarge": "it has 1 H100", "g6e.xlarge": "it has 1 L40S"},
    ),
    ("T4:2", {}, {"g4dn.xlarge": "it has 1 T4, wanted 2", "g4dn.12xlarge": "it has 4 T4, wanted 2"}),
    ("L4:2", {}, {"g6.xlarge": "it has 1", "g6.12xlarge": "it has 4", "g7.12xlarge": "RTX PRO 4500"}),
    ("H100:4", {}, {"p5.4xlarge": "it has 1", "p5.48xlarge": "it has 8"}),
    ("H200:1", {}, {"p5en.48xlarge": "it has 8"}),
    ("H100:16", {}, {"p5.48xlarge": "it has 8"}),
    # gone
    ("V100:1", {}, {"p3.2xlarge": "retired between 2026-04-25 and 2026-05-25", "p3dn.24xlarge": "it has 8"}),
    ("V100:4", {}, {"p3.8xlarge": "retired", "p3dn.24xlarge": "it has 8"}),
    ("V100:8:16GB", {}, {"p3.16xlarge": "retired", "p3dn.24xlarge": "32 GB"}),
    ("K80:1", {}, {"p2.xlarge": "retired between 2024-11 and 2025-04-17, instead: g4dn.xlarge or g5.xlarge"}),
    ("K80:8..", {}, {"p2.8xlarge": "retired", "p2.16xlarge": "retired"}),
    ("M60:1", {}, {"g3s.xlarge": "retired by 2025-10-31, instead: g4dn.xlarge"}),
    ("K520:4", {}, {"g2.8xlarge": "retired by 2023-10-19"}),
    ("V520:1", {}, {"g4ad.xlarge": "retired by 2026-09-11, instead: g4dn.xlarge"}),
    ("Gaudi:8", {}, {"dl1.24xlarge": "retired by 2026-06-10"}),
    # never was on EC2
    ("A10:1", {}, {"g5.xlarge": "it has 1 A10G, wanted A10"}),
    # the memory that was meant is that of the label
    ("A10G:24GiB..:1", {}, {"g5.xlarge": "22888 MiB (sold as 24 GB)"}),
    ("L40S:48GiB..:1", {}, {"g6e.xlarge": "45776 MiB (sold as 48 GB)"}),
    ("T4:24GB:1", {}, {"g4dn.xlarge": "T4 is of 16 GB, wanted 24"}),
    # a size too small
    ("T4:1", {"memory": "257GiB"}, {"g4dn.16xlarge": "262144 MiB"}),
    ("L40S:1", {"disk": "2TB"}, {"g6e.16xlarge": "1900 GB"}),
    ("H100:8", {"efa": 33}, {"p5.48xlarge": "32 EFA"}),
    ("T4:8", {"cpu": 97}, {"g4dn.metal": "96 vCPU"}),
    # another architecture
    ("T4G:1", {}, {"g5g.xlarge": "it is arm64, wanted x86_64"}),
    ("T4:1", {"arch": "arm64"}, {"g4dn.xlarge": "it is x86_64, wanted arm64", "g5g.xlarge": "it has 1 T4G"}),
    # a part of one
    ("L4:4GiB..6GiB:1", {}, {"g6f.2xlarge": "0.25 of one L4"}),
    ("L4:1:4GB", {"fractions": True}, {"g6f.large": "L4 is of 3 GB", "g6f.2xlarge": "L4 is of 6 GB"}),
    # too dear, by a cent
    ("T4:1", {"max_price": "0.525"}, {"g4dn.xlarge": "costs 0.526 USD/hour"}),
    ("T4:1", {"cpu": 8, "memory": "32GiB", "max_price": "0.751"}, {"g4dn.2xlarge": "costs 0.752"}),
    ("H200:8", {"max_price": "63.29"}, {"p5en.48xlarge": "costs 63.296"}),
    ("H200:8", {"regions": ("us-west-2",), "max_price": "5"}, {"p5e.48xlarge": "price is not known, wanted"}),
    (
        "RTX-PRO-4500:1",
        {"regions": ("us-west-2",), "max_price": "5"},
        {"g7.2xlarge": "price is not known (about 2.52 is estimated), wanted at most 5"},
    ),
    # not there
    ("L4:1", {"regions": ("eu-west-1",)}, {"g6.xlarge": "not offered in eu-west-1"}),
    ("H100:1", {"regions": ("us-west-1",)}, {"p5.4xlarge": "not offered in us-west-1"}),
    ("A10G:1", {"regions": ("af-south-1",)}, {"g5.xlarge": "not offered in af-south-1"}),
]


@pytest.mark.parametrize(("gpu", "options", "near"), REFUSED)
def test_what_cannot_be_had_says_what_comes_near(
    gpu: str, options: dict[str, Any], near: dict[str, str]
) -> None:
    got = answer(gpu, options)
    assert got.offers == ()
    lacks = {one.instance_type: "; ".join(lack.message for lack in one.lacks) for one in got.near}
    for name, words in near.items():
        assert words in lacks.get(name, "is not near"), (name, lacks)


def test_what_a_machine_lacks_is_a_finding() -> None:
    near = {one.instance_type: one for one in answer("A100:1", {}).near}
    lacks = {
        name: [(one.id, one.severity) for one in near[name].lacks] for name in ("p4d.24xlarge", "p5.4xlarge")
    }
    assert lacks == {"p4d.24xlarge": [("count", "error")], "p5.4xlarge": [("gpu", "error")]}


def test_it_cannot_be_had_is_the_error_that_names_the_nearest() -> None:
    request = parse_request("A100:1")
    error = no_match_error(request, select(request, (EAST,), TODAY), (EAST,))
    assert error.exit_code == 3
    told = "\n".join(error.details)
    assert "p5.4xlarge: it has 1 H100" in told
    assert "g6e.xlarge: it has 1 L40S" in told


def test_there_are_requests_enough() -> None:
    assert len(OFFERED) + len(REFUSED) >= 60
    asked = [(gpu, repr(options)) for gpu, options, *_ in [*OFFERED, *REFUSED]]
    assert len(set(asked)) == len(asked)


def test_boards_of_others_are_offered_to_nobody_who_does_not_name_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("g4ad.xlarge", "dl1.24xlarge"):  # as if EC2 still had them
        living = replace(instance_type(name), status="current", retired_since="")
        monkeypatch.setitem(instance_types(), name, living)
    monkeypatch.setattr("gpukiln.offers.prices.offerings", lambda *_, **__: None)  # where, is not known
    for gpu in ("", "8GiB..:1", "8GB:1", "32GiB:8", "32GB:8"):
        seen = answer(gpu, {"arch": "any", "fractions": True})
        names = {one.instance_type for one in (*seen.offers, *seen.near)}
        assert not {name for name in names if name.startswith(("g4ad", "dl1"))}, gpu
    assert [one.instance_type for one in answer("V520:1", {}).offers] == ["g4ad.xlarge"]
    assert [one.instance_type for one in answer("Gaudi:8", {}).offers] == ["dl1.24xlarge"]


ALIKE = [
    ("H100:8", "8:H100"),
    ("h100:8", "H100:8"),
    ("A10G,L4:24GB..:1..4", "1..4:24GB..:l4,a10g"),
    ("rtx-pro-6000", "RTX PRO 6000"),
    ("RTX PRO Server 6000", "RTX-PRO-6000"),  # EC2's name
    ("RTX PRO 4500", "rtx-pro-4500"),
    ("nvidia-t4", "T4"),
    ("Tesla T4", "t4"),
    ("T4g", "T4G"),
    ("A100", "A100-40GB,A100-80GB"),
    ("Radeon Pro V520", "V520"),
    ("", "1.."),
    ("T4", "T4:1.."),
    ("T4:..4", "T4:1..4"),
    ("16..24GiB", "16GiB..24GiB"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_the_same_request_in_other_words(one: str, other: str) -> None:
    first, second = answer(one, {}), answer(other, {})
    assert [row.instance_type for row in first.offers] == [row.instance_type for row in second.offers]
    assert set(parse_request(one).gpus) == set(parse_request(other).gpus)
    assert parse_request(one).count == parse_request(other).count


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        ("H10", {}, "H100"),
        ("A10X", {}, "A10"),
        ("RTX-PRO-600", {}, "RTX PRO 6000"),
        ("T4,L5", {}, "L5.*L4"),
        ("g4dn.xlarge", {}, "instance type"),
        ("p3.2xlarge:1", {}, "instance type"),
        ("T4:1:2", {}, "two count"),
        ("T4:L4", {}, "two names"),
        ("16GiB:24GiB", {}, "two memory"),
        ("16GB..24GiB", {}, "GiB and GB"),
        ("4..1", {}, "4 is more than 1"),
        ("24GiB..16GiB", {}, "is more than"),
        ("T4:0", {}, "less than 1"),
        ("T4:..", {}, "no end"),
        ("T4", {"arch": "sparc"}, "architecture 'sparc'.*x86_64"),
        ("T4", {"spot": "maybe"}, "maybe.*auto"),
        ("T4", {"memory": "32"}, "--memory '32'"),
        ("T4", {"disk": "much"}, "--disk 'much'"),
        ("T4", {"max_price": "cheap"}, "--max-price 'cheap'"),
        ("T4", {"max_price": "0"}, "--max-price '0'"),
        ("T4", {"max_price": "nan"}, "--max-price 'nan'"),
    ],
)
def test_what_is_no_request_says_what_is_wanted(gpu: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as wrong:
        parse_request(gpu, **options)
    assert wrong.value.exit_code == 2
    found = " ".join((wrong.value.message, *wrong.value.details, wrong.value.hint))
    assert re.search(words, found, re.DOTALL), found
