"""What DCGM's diagnostic prints is understood, of both forms. The documents are made up."""

from typing import Any

import pytest

from gpukiln.probe import monitoring

FAIL = {"name": "Memory", "results": [{"status": "Fail", "warnings": [{"warning": "page retired"}]}]}
PASS = {"name": "Denylist", "results": [{"status": "Pass"}, {"status": "Skip"}]}


@pytest.mark.parametrize(
    "document",
    [
        {"DCGM GPU Diagnostic": {"test_categories": [{"category": "a", "tests": [PASS, FAIL]}]}},
        {"DCGM Diagnostic": {"test_categories": [{"tests": [PASS]}, {"tests": [FAIL]}]}, "entity_groups": []},
    ],
)
def test_results_are_found(document: Any) -> None:
    assert monitoring.diag_tests(document) == [
        {"name": "Denylist", "status": "Pass", "warning": ""},
        {"name": "Denylist", "status": "Skip", "warning": ""},
        {"name": "Memory", "status": "Fail", "warning": "page retired"},
    ]


@pytest.mark.parametrize(
    ("rc", "out", "ran", "problem"),
    [
        (0, 'a word\n{"x": [{"name": "n", "results": [{"status": "Pass"}]}]}', True, None),
        (1, "Error: unable to establish a connection", True, "its output is no JSON"),
        (127, "", False, None),
    ],
)
def test_the_diagnostic_is_asked_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, *, rc: int, out: str, ran: bool, problem: str | None
) -> None:
    monkeypatch.setattr(monitoring, "run", lambda *_a, **_o: {"rc": rc, "out": out, "err": ""})
    monkeypatch.setattr(monitoring, "pci_gpus", lambda: [{"address": "0000:00:1e.0"}])
    found = monitoring.monitoring()["dcgm"]
    assert found["ran"] == ran
    assert problem is None or found["problem"].startswith(problem)
    assert bool(found.get("tests")) == (rc == 0)
    monkeypatch.setattr(monitoring, "pci_gpus", list)
    assert monitoring.monitoring()["dcgm"] == {"ran": False}
