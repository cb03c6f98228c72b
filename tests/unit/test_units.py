"""One meaning for a text: what people type and read of memory, time, money and ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukiln.catalog.load import ROOT
from gpukiln.errors import UsageError
from gpukiln.gpus import cli
from gpukiln.gpus.verbs.lease import request_of
from gpukiln.kubernetes.addons.settings import Runners
from gpukiln.kubernetes.jobs.request import gpu_job
from gpukiln.kubernetes.quantity import quantity
from gpukiln.offers import request
from gpukiln.typed import load
from gpukiln.units import GIB, MIB, Duration, Memory, Money, Span, whole
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.spec import spec_of

# NIST SP 330 (decimal prefixes), IEC 80000-13 (binary prefixes), Kubernetes' resource quantities (Gi, G).
AMOUNTS = {
    "24GB": 24 * 10**9,
    "24G": 24 * 10**9,
    "24GiB": 24 * GIB,
    "24Gi": 24 * GIB,
    "24gib": 24 * GIB,
    "8192": 8192 * MIB,
    "8192MiB": 8192 * MIB,
    "1.5TiB": 1536 * GIB,
    ".5Gi": 512 * MIB,
    " 512 MB ": 512 * 10**6,
    "2t": 2 * 10**12,
    "1e3B": 1000,
    "0.3B": 1,  # at least so much: rounded up
}
NONE = (
    "",
    "x",
    "GiB",
    "-1GiB",
    "24 apples",
    "24GB24GB",
    "NaN",
    "1_0GiB",
    "\uff12\uff14GiB",
    "0GiB",
    "9" * 400,
)


@pytest.mark.parametrize(("text", "size"), AMOUNTS.items())
def test_an_amount_of_memory(text: str, size: int) -> None:
    assert Memory.parse(text, "--memory") == size


@pytest.mark.parametrize("text", [*NONE, "1e99GiB"])
def test_no_amount_of_memory(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        Memory.parse(text, "--memory")
    assert raised.value.message.startswith("--memory '")
    assert "wanted such as 24GiB" in raised.value.hint


@pytest.mark.parametrize(
    ("text", "hint"), [("32", "32GiB"), ("255", "255GiB"), ("8589934592", "8589934592B"), ("512m", "512Mi?")]
)
def test_what_can_mean_two_things_is_refused_with_both(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        Memory.parse(text, "--memory")
    assert hint in raised.value.hint


def job(**options: Any) -> Any:
    return gpu_job("registry.example/train:1", gpu_model="T4", cpu="1", command=["x"], **options)


def lease_mib(text: str) -> int:
    _, options = cli.read_options(["lease", "--memory", text])
    return request_of(options, None).memory_mib or 0  # leases are asked for GPUs that are named


def kubernetes_mib(text: str) -> int:
    return int(quantity(text) or 0) // MIB


def setting(text: str) -> str:
    return load(Runners, {"url": "https://x", "image": "x", "memory": text}, where="").memory


def contract(text: str) -> Workspace:
    profile = load(ComputeProfile, {"memory": text, "storage": text, "gpu_type": "T4"}, where="")
    return Workspace("vision", "ann", "us-west-2", profile)


READERS: dict[str, Callable[[str], int]] = {
    "gpu.lease --memory": lease_mib,
    "offer.list --memory": lambda text: request.parse_request("T4", memory=text).memory_mib,
    "k8s.job --memory": lambda text: kubernetes_mib(job(memory=text).memory),
    "k8s.job --shm": lambda text: kubernetes_mib(job(memory="14Gi", shm=text).shm),
    "k8s.job --scratch": lambda text: kubernetes_mib(job(scratch=f"{text}:/s").mounts[0].size),
    "settings of add-ons": lambda text: kubernetes_mib(setting(text)),
    "contract of a workspace": lambda text: spec_of(contract(text)).request.memory_mib,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "mib"), [("8192MB", 7813), ("8.192G", 7813), ("12GiB", 12288), ("12Gi", 12288), ("8192", 8192)]
)
def test_the_same_text_means_the_same_everywhere(reader: str, text: str, mib: int) -> None:
    """What Kubernetes is given is exact, so it may lack a part of the last MiB."""
    assert READERS[reader](text) in (mib, mib - ("k8s" in reader or "settings" in reader))


def test_a_manifest_has_another_grammar() -> None:
    """k8s.io/apimachinery/pkg/api/resource/quantity.go: a number without a unit is bytes, m a thousandth."""
    assert quantity("8192") == 8192
    assert quantity("512m") == Decimal("0.512")
    assert [quantity(text) for text in ("24GiB", "5K", "1_0", "NaN", "24gi")] == [None] * 5


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (14 * GIB, "14Gi"),
        (24 * 10**9, "24G"),
        (1500 * MIB, "1500Mi"),
        (1000, "1k"),
        (12345, "12345"),
        (0, "0"),
    ],
)
def test_an_amount_in_a_manifest(size: int, text: str) -> None:
    assert Memory(size).quantity == text


@given(st.integers(min_value=0, max_value=(1 << 63) - 1))
def test_what_a_manifest_gets_is_exact(size: int) -> None:
    assert quantity(Memory(size).quantity) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (1 << 10, "1 KiB"),
        (MIB - 1, "1 MiB"),
        (512 * MIB, "512 MiB"),
        (24 * 10**9, "22.35 GiB"),
        (61 * GIB, "61 GiB"),
        (15.25 * GIB, "15.25 GiB"),  # r4.large and its like: EC2 counts in quarters
        (3 << 40, "3 TiB"),
    ],
)
def test_an_amount_for_people(size: float, text: str) -> None:
    assert Memory(size).shown == text


def test_whole_units_hold_all_of_an_amount() -> None:
    amount = Memory.parse("24GB", "--memory")
    assert (amount.mib, amount.gib, amount.gb) == (22889, 23, 24)  # 24e9 / 2^20 is 22888.2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0", 0), ("90s", 90), ("1h30m", 5400), ("1.5H", 5400), ("7d", 604800), ("2w", 1209600)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert Duration.parse(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "h", "-3", "5 m", "inf", "nan", "1h30", "30m1", "9" * 400])
def test_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration") as raised:
        Duration.parse(text, "--for")
    assert "wanted such as 90s" in raised.value.hint


def test_a_duration_that_is_too_short() -> None:
    with pytest.raises(UsageError, match="is too short") as raised:
        Duration.parse("0.5s", "--timeout", least=1)
    assert raised.value.hint == "1s or more"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (4.23, "4.2s"),
        (59.94, "59.9s"),
        (59.96, "1m"),
        (187, "3m7s"),
        (7384, "2h3m"),
        (694800, "8d1h"),
    ],
)
def test_a_duration_for_people(seconds: float, text: str) -> None:
    assert Duration(seconds).shown == text


@given(st.floats(min_value=0, max_value=10**9))
def test_a_duration_that_is_shown_can_be_typed(seconds: float) -> None:
    shown = Duration(seconds).shown
    assert Duration.parse(shown, "--for").shown == shown


def test_money() -> None:
    assert Money.parse(" $2.50", "--budget") == Money("2.50")
    assert Money("1234.5").shown == "1,234.50"
    for text in ("", "cheap", "NaN", "-1", "0"):
        with pytest.raises(UsageError, match="is not a price"):
            Money.parse(text, "--budget")


@pytest.mark.parametrize(
    ("text", "span"), [("2", Span(2, 2)), ("1..4", Span(1, 4)), ("2..", Span(2)), ("..4", Span(1, 4))]
)
def test_a_range(text: str, span: Span) -> None:
    assert Span.parse(text, "--gpu", least=1) == span


@pytest.mark.parametrize(
    ("text", "says"),
    [("..", "has no end"), ("4..1", "4 is more than 1"), ("0", "less than 1"), ("a", "not a whole number")],
)
def test_no_range(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Span.parse(text, "--gpu", least=1)


def test_a_whole_number() -> None:
    assert whole("7", "--count") == 7
    for text in ("", "two", "1.5", "-1", "9" * 5000):
        with pytest.raises(UsageError, match="is not a whole number of 0 or more"):
            whole(text, "--count")


def test_the_form_in_a_schema_is_the_form_that_is_read() -> None:
    """ECMA-262, which JSON Schema names, and Python read this form alike: no class of theirs is in it."""
    schema = json.loads((ROOT / "docs" / "schemas" / "workspace.json").read_text())["$defs"]["ComputeProfile"]
    [pattern, *_] = (one.get("pattern") for one in schema["properties"]["memory"]["anyOf"])
    assert not re.search(r"\\[dswDSW]|\(\?", pattern.replace("(?:", ""))
    assert all(re.search(pattern, text.strip()) for text in AMOUNTS)
    assert not any(re.search(pattern, text) for text in NONE if text != "0GiB")
