"""What people type after `invoke offer.`: the answer, the error and its exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.exit_codes import invoke

ROOT = Path(__file__).parents[2]


class Said(NamedTuple):
    stdout: str
    stderr: str


Typed = Callable[..., Said]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Run a command line of the noun, which must end with a code."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))

    def typed(*words: str, code: int = 0) -> Said:
        with pytest.raises(SystemExit) as ended:
            invoke([f"offer.{words[0]}", *words[1:]])
        shown = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, shown
        return shown

    return typed


def test_an_offer_satisfies_all_of_a_request(offer: Typed) -> None:
    done = offer("list", "--gpu", "T4:1", "--cpu", "8", "--memory", "32GiB", "--regions", "us-east-1")
    assert done.stdout.splitlines()[2].split()[0] == "g4dn.2xlarge"
    assert "g4dn.xlarge in us-east-1" in done.stdout  # near, and not enough
    document = json.loads(offer("list", "--gpu", "T4:1", "--json").stdout)
    assert document["schema"] == "offer.list/1"
    assert document["offers"][0]["offer"]["price"]["value"] == "0.526"


def test_what_no_machine_has_ends_with_3_and_the_nearest(offer: Typed) -> None:
    done = offer("list", "--gpu", "A100:1", code=3)
    for near in ("p5.4xlarge: it has 1 H100 SXM", "g6e.xlarge: it has 1 L40S", "p4d.24xlarge: it has 8"):
        assert near in done.stderr
    done = offer("list", "--gpu", "K80:1", code=3)
    assert "p2.xlarge: retired" in done.stderr
    assert "instead: g4dn.xlarge" in done.stderr


def test_a_budget_that_nothing_keeps_ends_with_6(offer: Typed) -> None:
    done = offer("list", "--gpu", "L4:1", "--budget", "400", "--regions", "us-east-1", code=6)
    assert "the cheapest, g6.xlarge in us-east-1, costs 591.15" in done.stderr
    done = offer("list", "--gpu", "L4:1", "--budget", "400", "--hours", "200", "--regions", "us-east-1")
    assert "g6.xlarge" in done.stdout


def test_a_size_becomes_a_request(offer: Typed) -> None:
    document = json.loads(offer("size", "--params", "7B", "--json", "--regions", "us-east-1").stdout)
    needs = document["size"]["per_gpu_mib"]
    assert document["request"]["gpu_memory_mib"] == {"low": needs, "high": None}
    assert all(row["offer"]["gpu_memory_mib"] >= needs for row in document["offers"])
    done = offer("size", "--params", "405e9", code=3)
    assert "--tensor-parallel 2" in done.stderr


def test_more_gpus_are_no_advice_where_something_else_is_lacking(offer: Typed) -> None:
    done = offer("size", "--params", "7B", "--max-price", "0.01", code=3)
    assert "--tensor-parallel" not in done.stderr
    done = offer("size", "--params", "7B", "--tensor-parallel", "9", code=3)  # no machine has 18
    assert "--tensor-parallel" not in done.stderr
    assert "g4dn.metal: it has 8 T4" in done.stderr.splitlines()[1]  # and not one with fewer


def test_a_budget_tells_what_it_leaves_out_for_want_of_a_price(offer: Typed) -> None:
    done = offer("list", "--gpu", "L40S,RTX-PRO-4500:1", "--budget", "1500")
    assert "not known: g7.2xlarge in us-west-2, g7.4xlarge in us-west-2" in done.stdout


def test_an_estimate_is_marked_and_explained_once(offer: Typed) -> None:
    """The price of us-east-1 in prices.yaml, 3.36312; a month: 730 hours of it and of an address at 0.005."""
    done = offer("list", "--gpu", "RTX-PRO-6000:1")
    rows = [line for line in done.stdout.splitlines() if line.startswith("g7e.")]
    assert len(rows) == 3
    assert "~3.36312  ~2,458.73" in rows[0]
    table, _, rest = done.stdout.partition("a month of")
    assert table.count("estimated") == 1
    assert "~ estimated, for no price is known: as in us-east-1 (aws/karpenter" in table
    assert "machine ~2,455.08: 730 hours, on-demand at about 3.36312 USD/hour, estimated" in rest
    [first, *_] = json.loads(offer("list", "--gpu", "RTX-PRO-6000:1", "--json").stdout)["offers"]
    assert (first["offer"]["price"], first["month"]["usd"]) == (None, None)  # nothing is taken for a price
    assert (first["offer"]["estimate"]["value"], first["month"]["estimate"]) == ("3.36312", "2458.73")


def test_what_does_not_run_there_is_refused(offer: Typed) -> None:
    done = offer("check", "g5g.xlarge", "--needs", "pytorch-cu121", code=3)
    assert "workload-architecture" in done.stdout
    done = offer("check", "g6.xlarge", "g5.xlarge", "--image", "runner-gpu")
    assert done.stdout.count("fits") == 2
    done = offer("list", "--gpu", "RTX-PRO-6000:1", "--needs", "pytorch-cu126", code=3)
    assert "none of them can run it" in done.stderr


def test_one_machine_is_shown_with_the_source_of_its_price(offer: Typed) -> None:
    done = offer("show", "g6.xlarge", "--regions", "us-east-1")
    assert "0.8048 USD/hour (aws/karpenter-provider-aws" in done.stdout
    done = offer("show", "p3.2xlarge")
    assert "retired" in done.stdout
    assert "instead: g5.2xlarge" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("list", "--gpu", "T5:1"), "unknown GPU 'T5'"),
        (("list", "--gpu", "g4dn.xlarge"), "is an instance type, wanted GPUs"),
        (("list", "--gpu", "T4:1:2"), "has two count: 1 and 2"),
        (("list", "--gpu", "4..1"), "4 is more than 1"),
        (("list", "--gpu", "24GB..32GiB"), "mixes GiB and GB"),
        (("list", "--gpu", "T4:0"), "--gpu '0' is less than 1"),
        (("list", "--gpu", ",:1"), "--gpu ',' names no GPU"),
        (("list", "--gpu", f"T4:{'9' * 5000}"), "has two names"),
        (("list", "--gpu", f"{'9' * 5000}GiB"), "unknown GPU"),
        (("list", "--memory", "32"), "--memory '32' is too little to be meant as MiB"),
        (("list", "--memory", f"{'9' * 5000}GiB"), "is not an amount of memory"),
        (("list", "--max-price", "cheap"), "--max-price 'cheap' is not a price"),
        (("list", "--spot", "yes"), "unknown --spot 'yes'"),
        (("list", "--arch", "amd64"), "unknown architecture 'amd64'"),
        (("list", "--regions", "us-west-9"), "unknown region 'us-west-9'"),
        (("list", "--hours", "1000"), "--hours 1000, wanted hours of a month"),
        (("list", "--needs", "olama"), "unknown workload 'olama'"),
        (("list", "--image", "auto"), "--image auto needs a cloud"),
        (("list", "--profile", "me"), "--profile is for --cloud aws"),
        (("size",), "--params is missing"),
        (("show",), "no instance type is named"),
        (("show", "g6.xlarg"), "unknown GPU instance type 'g6.xlarg'"),
        (("check", "g6.xlarge"), "nothing to run is named"),
        (("check", "ami-1"), "no instance type is named"),
        (("check", "ami-1", "g6.xlarge"), "ami-1 was not built here"),
        (("check", "g6.xlarg", "--needs", "vllm"), "unknown GPU instance type 'g6.xlarg'"),
        (("check", "g6.xlarge", "--needs", "vllm", "--regions", "us-west-2,us-east-1"), "names 2 regions"),
        (("refresh", "--region", "us-west-2,us-east-1"), "names 2 regions"),
    ],
)
def test_what_is_no_request_is_told(offer: Typed, words: tuple[str, ...], told: str) -> None:
    assert told in offer(*words, code=2).stderr
