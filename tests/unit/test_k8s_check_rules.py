"""Every rule of `k8s.check`: one text on which it fires, and one that comes near and on which it does not.

The texts are in tests/support/k8s_rules, one list a concern.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.findings import Finding
from gpukiln.kubernetes.check import registry
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context

ROOT = Path(__file__).parents[2]
CASES: list[dict[str, Any]] = [
    one
    for file in sorted((ROOT / "tests/support/k8s_rules").glob("*.yaml"))
    for one in yaml.safe_load(file.read_text())
]
SHOWN_ELSEWHERE = {"server-refuses": "test_k8s_check.py: it takes an API server"}


def findings(case: dict[str, Any], text: str) -> list[Finding]:
    reading = Reading()
    reading.text(text, case.get("file", "a.yaml"))
    context = Context(
        resources=tuple(reading.resources), types=tuple(case.get("types", ())), driver=case.get("driver", "")
    )
    return list(apply_rules(reading, context, only=[case["rule"]]).findings)


def named(case: dict[str, Any]) -> str:
    return f"{case['rule']} {case.get('about', '')}".strip()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_rule_fires(case: dict[str, Any]) -> None:
    found = findings(case, case["fires"])
    assert found
    assert all(one.id == case["rule"] and one.evidence["line"] >= 1 for one in found)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_rule_does_not_fire_on_what_comes_near(case: dict[str, Any]) -> None:
    assert not findings(case, case["near"])


def test_every_rule_is_shown_to_fire() -> None:
    shown = {one["rule"] for one in CASES} | SHOWN_ELSEWHERE.keys()
    assert shown == {one.id for one in registry.rules()}


def test_rules_say_all_that_people_need() -> None:
    ids = Counter(one.id for one in registry.rules())
    assert not [name for name, many in ids.items() if many > 1]
    for one in registry.rules():
        for text in (one.title, one.reason, one.source, one.fix):
            assert text, one.id
            assert text == text.strip().rstrip("."), one.id
