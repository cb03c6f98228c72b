"""The verdict as a value, its report, and the table of checks in docs."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gpukiln.verify import catalog, report
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
    assert Verdict.from_dict(json.loads(report.to_json(VERDICT))) == VERDICT


def test_verdict_does_not_believe_counts_of_a_document() -> None:
    data = VERDICT.to_dict() | {"passed": True, "counts": {"passed": 3, "failed": 0, "not_run": 0}}
    assert not Verdict.from_dict(data).passed


@pytest.mark.parametrize("wrong", [{"schema": 2}, {"checks": [{"id": "x"}]}, {"target": None}])
def test_verdict_refuses_another_form(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's text is its own
        Verdict.from_dict(VERDICT.to_dict() | wrong)


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


def test_checks_not_run_are_told_apart_in_a_passed_verdict() -> None:
    good = replace(VERDICT, checks=tuple(c for c in VERDICT.checks if c.outcome in ("passed", "not_run")))
    assert good.passed
    assert "passed - 1 passed, 0 failed, 1 not run" in report.summary(good)


def test_written_json_is_the_verdict(tmp_path: Path) -> None:
    report.write_json(VERDICT, tmp_path / "v.json")
    assert json.loads((tmp_path / "v.json").read_text()) == json.loads(json.dumps(VERDICT.to_dict()))
    assert [p.name for p in tmp_path.iterdir()] == ["v.json"]


def test_docs_list_the_checks_as_they_are() -> None:
    path = Path(__file__).parents[2] / "docs" / "checks.md"
    assert path.read_text() == catalog.markdown(), "run: python -m gpukiln.verify.catalog > docs/checks.md"
