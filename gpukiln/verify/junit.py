"""A verdict as JUnit XML.

pytest's own junit.xml names a test case after the test's function and the machine's address: CI would show
neither the check's id nor the fix, and would treat the same check on the next machine as another test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpukiln.reports.junit import Case, Result, Suite, write_suites
from gpukiln.verify.verdict import CheckResult, Verdict
from gpukiln.verify.verification import Verification


def write_junit(machines: Sequence[Verification], path: Path) -> None:
    """Write the verdicts of machines; one that could not be verified is an error, not a failure.

    Args:
        path: The file; written whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    several = len(machines) > 1
    suites = [
        _suite(machine.verdict, several=several) if machine.verdict else _unreachable(machine)
        for machine in machines
    ]
    write_suites("gpukiln", suites, path)


def _unreachable(machine: Verification) -> Suite:
    group = f"gpukiln.{machine.target}"
    # CI treats an error as a problem of the run; a failure would look like a fault of the machine.
    return Suite(machine.target, [Case(group, "reach", "error", "unreachable", machine.reason, seconds=0)])


def _suite(verdict: Verdict, *, several: bool) -> Suite:
    about = {"profile": verdict.profile, "suite_version": verdict.suite_version}
    about |= {"simulated": str(verdict.simulated).lower(), **verdict.environment}
    # A single machine has another name in each run of a pipeline. CI keeps the history of a check by its
    # class name, so that this has the profile instead.
    prefix = f"gpukiln.{verdict.target}" if several else f"gpukiln.{verdict.profile}"
    return Suite(
        verdict.target,
        [_case(check, prefix) for check in verdict.checks],
        verdict.duration_s,
        {
            "timestamp": verdict.started_at,
            "hostname": verdict.environment.get("host name", verdict.target),
        },
        about,
    )


def _case(check: CheckResult, prefix: str) -> Case:
    result: Result = "passed"
    kind = message = ""
    text = check.reason
    if check.outcome == "failed":
        result, kind, message, text = "failure", "check", check.reason, _failure(check)
    # JUnit has no `not run`: `skipped` is the only other result, and the message keeps the difference.
    elif check.outcome != "passed":
        result, kind, text = "skipped", check.outcome, ""
        message = f"{check.outcome.replace('_', ' ')}: {check.reason}"
    return Case(
        f"{prefix}.{check.layer}",
        check.id,
        result,
        kind,
        message,
        text,
        check.duration_s,
        {"title": check.title, "layer": check.layer, "outcome": check.outcome},
    )


def _failure(check: CheckResult) -> str:
    lines = [f"wanted: {check.title}", f"found: {check.reason}"]
    lines += [f"likely cause: {cause}" for cause in check.causes]
    lines += [f"fix: {check.remedy}"]
    if check.evidence:
        lines.append(f"evidence: {', '.join(check.evidence)} (see report.html)")
    return "\n".join(lines)
