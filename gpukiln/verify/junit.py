"""Writes JUnit XML as CI systems read it: the one writer, and what a verdict is in it.

pytest's own junit.xml names a test case after the test's function and the way to the machine; CI would show
neither the check's id nor what to do, and would take the same check on the next machine for another test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

from gpukiln.files import write_whole
from gpukiln.verify.presentable import presentable
from gpukiln.verify.verdict import CheckResult, Verdict

Result = Literal["passed", "failure", "error", "skipped"]


@dataclass(frozen=True)
class Case:
    """A test case.

    Args:
        group: What CI shows it under, JUnit's classname.
        kind: Of a result that is not passed: a word that CI may group by.
        message: Of such a result, in one line.
        text: More about a failure; of a case that passed, its output.
        seconds: None: not measured.
    """

    group: str
    name: str
    result: Result = "passed"
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """The test cases of one machine or file.

    Args:
        about: More attributes, for example timestamp and hostname.
        seconds: None: not measured.
    """

    name: str
    cases: Sequence[Case]
    seconds: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)


def write_suites(name: str, suites: Sequence[Suite], path: Path, *, mode: int = 0o600) -> None:
    """Write suites with their counts.

    Args:
        path: The file; written whole or not at all.
        mode: Of the file.

    Raises:
        OSError: It can't be written.
    """
    root = ET.Element("testsuites", name=name)
    for one in suites:
        suite = ET.SubElement(root, "testsuite", _plain(name=one.name, **_counts(one), **one.about))
        if one.seconds is not None:
            suite.set("time", f"{one.seconds:.3f}")
        _properties(suite, one.properties)
        for case in one.cases:
            _case(suite, case)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    if measured := [one.seconds for one in suites if one.seconds is not None]:
        root.set("time", f"{sum(measured):.3f}")
    ET.indent(root)
    text = ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"
    write_whole(path, text, mode=mode)


def _counts(suite: Suite) -> dict[str, int]:
    results = [one.result for one in suite.cases]
    return {
        "tests": len(results),
        "failures": results.count("failure"),
        "errors": results.count("error"),
        "skipped": results.count("skipped"),
    }


def _case(suite: ET.Element, one: Case) -> None:
    case = ET.SubElement(suite, "testcase", _plain(classname=one.group, name=one.name))
    if one.seconds is not None:
        case.set("time", f"{one.seconds:.3f}")
    _properties(case, one.properties)
    if one.result != "passed":
        about = {"type": one.kind, "message": one.message}
        said = ET.SubElement(
            case, one.result, _plain(**{key: value for key, value in about.items() if value})
        )
        said.text = presentable(one.text) or None
    elif one.text:
        ET.SubElement(case, "system-out").text = presentable(one.text)


def _properties(parent: ET.Element, values: Mapping[str, str]) -> None:
    if not values:
        return
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", _plain(name=name, value=value))


def _plain(**attributes: object) -> dict[str, str]:
    return {name: presentable(str(value)) for name, value in attributes.items()}


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
    several = len(verdicts) + len(not_judged) > 1
    suites = [_suite(verdict, several=several) for verdict in verdicts]
    for target, reason in not_judged:
        case = Case(f"gpukiln.{target}", "reach", "error", "unreachable", reason, seconds=0)
        suites.append(Suite(target, [case]))
    write_suites("gpukiln", suites, path)


def _suite(verdict: Verdict, *, several: bool) -> Suite:
    about = {"profile": verdict.profile, "suite_version": verdict.suite_version}
    about |= {"simulated": str(verdict.simulated).lower(), **verdict.environment}
    # A single machine has another name in each run of a pipeline: with it, no check would have a history.
    prefix = f"gpukiln.{verdict.target}" if several else f"gpukiln.{verdict.profile}"
    return Suite(
        verdict.target,
        [_of_check(check, prefix) for check in verdict.checks],
        verdict.duration_s,
        {
            "timestamp": verdict.started_at,
            "hostname": verdict.environment.get("host name", verdict.target),
        },
        about,
    )


def _of_check(check: CheckResult, prefix: str) -> Case:
    result: Result = "passed"
    kind = message = ""
    text = check.reason
    if check.outcome == "failed":
        result, kind, message, text = "failure", "check", check.reason, _failure(check)
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
    lines += [f"fix: {check.fix}"]
    if check.evidence:
        lines.append(f"looked at: {', '.join(check.evidence)} (see report.html)")
    return "\n".join(lines)
