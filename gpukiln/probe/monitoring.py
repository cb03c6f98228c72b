"""Gathers whether the monitoring tools of the GPUs work.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

from __future__ import annotations

import json
from typing import Any

from gpukiln.probe.base import (
    NOT_REACHED,
    NotReachedError,
    pci_gpus,
    require_driver_answers,
    run,
    run_unless_hung,
)

DIAG_TIMEOUT_S = 240  # of level 1, which takes seconds on a healthy machine


def monitoring() -> dict[str, Any]:
    """{nvtop: {rc, out}, dcgm: {ran, rc, out, problem, tests}}; DCGM runs only where there is a GPU."""
    nvtop = run_unless_hung("nvtop", "--version", timeout=20)
    if NOT_REACHED not in nvtop:
        nvtop = {"rc": nvtop["rc"], "out": (nvtop["out"] + nvtop["err"]).strip()[:300]}
    try:
        dcgm = _dcgm() if pci_gpus() else {"ran": False}
    except NotReachedError as error:
        dcgm = {NOT_REACHED: str(error)}
    return {"nvtop": nvtop, "dcgm": dcgm}


def _dcgm() -> dict[str, Any]:
    """The short diagnostic: its exit status, and every test's outcome."""
    require_driver_answers()
    if run("dcgmi", "--version")["rc"] == 127:
        return {"ran": False}
    # Level 1 takes seconds and loads no GPU; level 2 and more would run tests on GPUs in use.
    done = run("dcgmi", "diag", "-r", "1", "-j", timeout=DIAG_TIMEOUT_S)
    problem = None
    tests: list[dict[str, str]] = []
    try:
        # dcgmi may print messages before the document, for example about another version of the host engine.
        tests = diag_tests(json.loads(done["out"][max(done["out"].find("{"), 0) :]))
    except ValueError as error:
        problem = f"its output is no JSON: {error}"
    return {
        "ran": True,
        "rc": done["rc"],
        "out": (done["out"] + done["err"])[:2000],
        "problem": problem,
        "tests": tests,
    }


def diag_tests(document: Any) -> list[dict[str, str]]:
    """Every result in the output of `dcgmi diag -j`: [{name, status, warning}].

    The surrounding keys differ between DCGM 3 and 4, so that a test is any object with a name and results.

    >>> diag_tests({"tests": [{"name": "Denylist", "results": [{"status": "Pass"}]}]})
    [{'name': 'Denylist', 'status': 'Pass', 'warning': ''}]
    >>> diag_tests({"error": "no GPU"})
    []
    """
    if isinstance(document, list):
        return [row for inner in document for row in diag_tests(inner)]
    if not isinstance(document, dict):
        return []
    if "name" in document and isinstance(document.get("results"), list):
        return [
            {"name": str(document["name"]), "status": str(row.get("status", "")), "warning": _warning(row)}
            for row in document["results"]
        ]
    return [row for inner in document.values() for row in diag_tests(inner)]


def _warning(row: dict[str, Any]) -> str:
    said = row.get("warnings") or row.get("warning") or []
    said = said if isinstance(said, list) else [said]
    return "; ".join(str(w.get("warning", w)) if isinstance(w, dict) else str(w) for w in said)[:300]
