"""The verdict as a value, its report, and the table of checks in docs."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from gpukiln.errors import UsageError
from gpukiln.progress import Progress
from gpukiln.typed import dump, load
from gpukiln.verify import report
from gpukiln.verify.suite import GATHERING
from gpukiln.verify.verdict import CheckResult, Verdict

VERDICT = Verdict(
    target="i-1",
    profile="image",
    started_at="2026-01-01T00:00:00+00:00",
    duration_s=12.3,
    checks=(
        CheckResult("hygiene.history", "No shell history", "hygiene", "passed"),
        CheckResult(
            "boot.state", "running", "boot", "failed", "found [degraded]", "look at [bold]", ("a [cause]",)
        ),
        CheckResult("gpu.xid", "no Xid", "gpu", "not_run", "no GPU", "-"),
        CheckResult("gpu.ecc", "no errors", "gpu", "not_reached", "gpu.nvml failed", "-"),
    ),
    environment={"kernel": "6.1"},
)


def test_verdict_survives_json() -> None:
    assert load(Verdict, json.loads(json.dumps(dump(VERDICT))), where="x") == VERDICT


def test_verdict_does_not_believe_counts_of_a_document() -> None:
    data = dump(VERDICT) | {"passed": True, "counts": {"passed": 3, "failed": 0, "not_run": 0}}
    assert not load(Verdict, data, where="x").passed


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"schema": 1}, "x: found schema 1"),
        ({"checks": [{"id": "x"}]}, r"x: \d mistakes"),
        ({"target": None}, "x: target: it has no value, wanted a text"),
    ],
)
def test_verdict_refuses_another_form(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(Verdict, dump(VERDICT) | wrong, where="x")


def test_report_names_every_check_and_each_failure_s_fix() -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(report.render(VERDICT))
    text = out.getvalue()
    for words in (
        "hygiene.history",
        "not run",
        "no GPU",
        "found [degraded]",
        "look at [bold]",
        "a [cause]",
        "not reached",
    ):
        assert words in text
    assert "i-1 (image): FAILED - 1 passed, 1 failed, 1 not run, 1 not reached in 12 s" in text


def live(results: tuple[CheckResult, ...], *, terminal: bool, width: int = 200) -> list[str]:
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=width, force_terminal=terminal, color_system=None))
    with progress.step("verify"):
        shown = report.LiveReport(progress)
        shown.start("No shell history")
        shown.start(GATHERING)
        for result in results:
            shown.start(result.title)
            shown.check(result)
    return out.getvalue().splitlines()


def test_each_check_is_one_line_below_its_layer_where_there_is_no_terminal() -> None:
    step, gathering, *lines, end = live(VERDICT.checks, terminal=False)
    assert [line.split() for line in (step, gathering[-15:])] == [["..", "verify"], ["gathering", "facts"]]
    assert [line.split()[:5] for line in lines] == [
        ["hygiene", "the", "image", "has", "no"],
        ["passed", "0.0", "s", "hygiene.history", "No"],
        ["boot", "the", "machine", "booted", "completely,"],
        ["FAILED", "0.0", "s", "boot.state", "found"],
        ["gpu", "the", "driver", "works", "with"],
        ["not", "run", "0.0", "s", "gpu.xid"],
        ["not", "reached", "0.0", "s", "gpu.ecc"],
    ]
    assert lines[3].endswith("found [degraded]")
    assert lines[5].endswith("no GPU")
    assert end.startswith("ok verify")


def test_a_long_reason_stays_one_line() -> None:
    long = replace(VERDICT.checks[1], reason="x" * 500)
    for terminal, width in ((False, 80), (True, 80), (True, 40)):
        lines = [line for line in live((long,), terminal=terminal, width=width) if "FAILED" in line]
        assert len(lines) == 1
        assert "x" * 120 not in lines[0]
        assert not terminal or len(lines[0].rpartition("\r")[2].rpartition("\x1b[2K")[2]) <= width


def test_the_ending_says_the_same_thing_once() -> None:
    out = io.StringIO()
    twice = (VERDICT.checks[1], replace(VERDICT.checks[1], id="boot.other"))
    Console(file=out, width=140).print(report.ending(replace(VERDICT, checks=twice)))
    text = out.getvalue()
    assert text.count("found: [degraded]") == 1
    assert text.count("fix:   look at [bold]") == 1
    assert "also:  boot.other\n" in text
    assert "hygiene.history" not in text
    assert "FAILED - 0 passed, 2 failed" in text


def test_checks_not_run_are_told_apart_in_a_passed_verdict() -> None:
    good = replace(VERDICT, checks=tuple(c for c in VERDICT.checks if c.outcome in ("passed", "not_run")))
    assert good.passed
    assert "passed - 1 passed, 0 failed, 1 not run" in report.summary(good)
