"""The published schema of a verdict: up to date, true of real verdicts, and refusing wrong ones."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gpukiln.cli.schemas import verdict_schema
from gpukiln.typed import dump
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.verdict import CheckResult, Verdict

VALIDATOR = jsonschema.Draft202012Validator(verdict_schema())
VERDICT = Verdict(
    target="i-1",
    profile="image",
    started_at="2026-01-01T00:00:00+00:00",
    duration_s=12.3,
    checks=(
        CheckResult("hygiene.history", "No history", "hygiene", "passed", "3 files", evidence=("os",)),
        CheckResult(
            "boot.state", "running", "boot", "failed", "found x", "look", ("a cause",), ("boot",), 0.1
        ),
        CheckResult("gpu.xid", "no Xid", "gpu", "not_run", "no GPU", "-"),
        CheckResult("gpu.ecc", "no errors", "gpu", "not_reached", "gpu.nvml failed", "-"),
    ),
    suite_version="0.9.1",
    environment={"kernel": "6.1"},
)


def as_json(verdict: Verdict) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(dump(verdict)))
    return document


def test_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(verdict_schema())


def test_real_verdicts_are_valid() -> None:
    VALIDATOR.validate(as_json(VERDICT))
    checks = [c for c, _ in load_checks().values()]
    results = tuple(CheckResult(c.id, c.title, c.layer, "failed", "x", c.fix, c.causes) for c in checks)
    VALIDATOR.validate(as_json(replace(VERDICT, checks=results)))


@pytest.mark.parametrize("name", dump(VERDICT))
def test_every_field_is_required(name: str) -> None:
    document = as_json(VERDICT)
    del document[name]
    assert not VALIDATOR.is_valid(document)


@pytest.mark.parametrize("name", dump(VERDICT)["checks"][0])
def test_every_field_of_a_check_is_required(name: str) -> None:
    document = as_json(VERDICT)
    del document["checks"][0][name]
    assert not VALIDATOR.is_valid(document)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": 1},
        {"passed": "yes"},
        {"profile": "imagine"},
        {"duration_s": -1},
        {"counts": {"passed": 1, "failed": 0, "not_run": 0}},
        {"counts": {"passed": 1, "failed": 0, "not_run": 0, "not_reached": 0, "skipped": 0}},
        {"environment": {"kernel": 6}},
        {"checks": [as_json(VERDICT)["checks"][0] | {"outcome": "skipped"}]},
        {"checks": [as_json(VERDICT)["checks"][0] | {"layer": "gqu"}]},
        {"checks": [as_json(VERDICT)["checks"][0] | {"causes": "one"}]},
    ],
)
def test_wrong_verdicts_are_refused(wrong: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid(as_json(VERDICT))
    assert not VALIDATOR.is_valid(as_json(VERDICT) | wrong)


def test_fields_are_described() -> None:
    schema = verdict_schema()
    fields = {**schema["properties"], **schema["$defs"]["CheckResult"]["properties"]}
    assert {name for name, field in fields.items() if not field.get("description")} == set()
    assert "never count as passed" in fields["outcome"]["description"]
