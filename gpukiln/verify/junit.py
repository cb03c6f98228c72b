"""Writes the verdicts as JUnit XML, one test case a check, as CI systems read it.

pytest's own junit.xml names a test case after the test's function and the way to the machine; CI would show
neither the check's id nor what to do, and would take the same check on the next machine for another test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from gpukiln.files import write_whole
from gpukiln.verify.presentable import presentable
from gpukiln.verify.verdict import CheckResult, Verdict


def write_junit(
    verdicts: Sequence[Verdict], path: Path, *, not_judged: Sequence[tuple[str, str]] = ()
) -> None:
    """Write the verdicts of one machine or several.

    Args:
        verdicts: One a machine.
        path: The file; written whole or not at all.
        not_judged: Name of each machine that could not be judged, and why: an error, no failure.

    Raises:
        OSError: It can't be written.
    """
    root = ET.Element("testsuites", name="gpukiln")
    several = len(verdicts) + len(not_judged) > 1
    for verdict in verdicts:
        _suite(root, verdict, several=several)
    for target, reason in not_judged:
        suite = ET.SubElement(
            root, "testsuite", _plain(name=target, tests=1, failures=0, errors=1, skipped=0)
        )
        case = ET.SubElement(suite, "testcase", _plain(classname=f"gpukiln.{target}", name="reach", time=0))
        ET.SubElement(case, "error", _plain(type="unreachable", message=reason))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(v.duration_s for v in verdicts):.3f}")
    ET.indent(root)
    write_whole(path, ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n")


def _plain(**attributes: object) -> dict[str, str]:
    return {name: presentable(str(value)) for name, value in attributes.items()}


def _suite(root: ET.Element, verdict: Verdict, *, several: bool) -> None:
    counts = verdict.counts
    suite = ET.SubElement(
        root,
        "testsuite",
        _plain(
            name=verdict.target,
            tests=len(verdict.checks),
            failures=counts["failed"],
            errors=0,
            skipped=counts["not_run"] + counts["not_reached"],
            time=f"{verdict.duration_s:.3f}",
            timestamp=verdict.started_at,
            hostname=verdict.environment.get("host name", verdict.target),
        ),
    )
    about = {"profile": verdict.profile, "suite_version": verdict.suite_version}
    about |= {"simulated": str(verdict.simulated).lower(), **verdict.environment}
    _properties(suite, about)
    # A single machine has another name in each run of a pipeline: with it, no check would have a history.
    prefix = f"gpukiln.{verdict.target}" if several else f"gpukiln.{verdict.profile}"
    for check in verdict.checks:
        case = ET.SubElement(
            suite,
            "testcase",
            _plain(classname=f"{prefix}.{check.layer}", name=check.id, time=f"{check.duration_s:.3f}"),
        )
        _properties(case, {"title": check.title, "layer": check.layer, "outcome": check.outcome})
        if check.outcome == "failed":
            ET.SubElement(case, "failure", _plain(type="check", message=check.reason)).text = _failure(check)
        elif check.outcome != "passed":
            why = f"{check.outcome.replace('_', ' ')}: {check.reason}"
            ET.SubElement(case, "skipped", _plain(type=check.outcome, message=why))
        elif check.reason:
            ET.SubElement(case, "system-out").text = presentable(check.reason)


def _properties(parent: ET.Element, values: dict[str, str]) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", _plain(name=name, value=value))


def _failure(check: CheckResult) -> str:
    lines = [f"wanted: {check.title}", f"found: {check.reason}"]
    lines += [f"likely cause: {cause}" for cause in check.causes]
    lines += [f"fix: {check.fix}"]
    if check.evidence:
        lines.append(f"looked at: {', '.join(check.evidence)} (see report.html)")
    return presentable("\n".join(lines))
