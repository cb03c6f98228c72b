"""A report for people, for CI (JUnit), and for code scanning (SARIF 2.1.0)."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpukiln import __version__
from gpukiln.files import write_whole
from gpukiln.kubernetes.check import fit
from gpukiln.kubernetes.check.judging import Finding, Report
from gpukiln.kubernetes.check.registry import rules
from gpukiln.reports.junit import Case, Suite, write_suites
from gpukiln.reports.sanitize import sanitize

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def lines(report: Report) -> Iterator[str]:
    """The report as text: file by file; why and what to do stand with a rule's first finding."""
    told: set[str] = set()
    file = ""
    width = max((len(f"{one.line}") for one in report.findings), default=0)
    for one in report.findings:
        if one.file != file:
            file = one.file
            yield sanitize(file)
        where = f"{one.object}: " if one.object else ""
        yield sanitize(f"  {one.line:>{width}} {one.severity:<7} {one.rule}: {where}{one.found}")
        if one.rule not in told or one.fix not in told:
            if one.rule not in told:
                yield f"  {'':>{width}}         why: {one.reason}"
            yield sanitize(f"  {'':>{width}}         fix: {one.fix}")
            told |= {one.rule, one.fix}
    if report.findings:
        yield ""
    for pod in report.placed:
        for text in fit.words(pod):
            yield sanitize(text)
    if report.placed:
        yield ""
    for gap in report.unchecked:
        yield sanitize(f"not checked: {gap.file}:{gap.line}: {gap.reason}")
    for left in report.skipped:
        why = f" ({left.reason})" if left.reason else ", and no reason given (--skip RULE=REASON)"
        yield sanitize(f"skipped: {left.rule}, {_many(left.findings, 'finding')}{why}")
    counts = report.counts
    yield (
        f"{_many(counts.files, 'file')}, {_many(counts.objects, 'object')}, {_many(counts.pods, 'pod')}: "
        f"{_many(counts.errors, 'error')}, {_many(counts.warnings, 'warning')}"
        + (f", {counts.unchecked} not checked" if counts.unchecked else "")
        + f" (Kubernetes {', '.join(report.kubernetes)})"
    )


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def write_junit(report: Report, files: tuple[str, ...], path: Path) -> None:
    """Write one suite a file, one test case a rule that is broken; warnings pass, and are told.

    Args:
        files: All that were read: what has no finding passes.

    Raises:
        OSError: It can't be written.
    """
    by_file: dict[str, dict[str, list[Finding]]] = {file: defaultdict(list) for file in files}
    for one in report.findings:
        by_file[one.file][one.rule].append(one)
    gaps = defaultdict(list)
    for gap in report.unchecked:
        gaps[gap.file].append(gap)
    suites = []
    for file in [*by_file, *(name for name in gaps if name not in by_file)]:
        cases = [_case(file, rule, found) for rule, found in by_file.get(file, {}).items()]
        cases += [Case(file, f"line {gap.line}", "skipped", message=gap.reason) for gap in gaps[file]]
        suites.append(Suite(file, cases or [Case(file, "k8s.check")]))
    write_suites("gpukiln k8s.check", suites, path, mode=0o644)


def _case(file: str, rule: str, found: list[Finding]) -> Case:
    text = "\n".join(f"{file}:{one.line}: {one.object} {one.found}" for one in found)
    text += f"\nwhy: {found[0].reason}\nfix: {found[0].fix}\nsource: {found[0].source}"
    if found[0].severity == "error":
        return Case(file, rule, "failure", rule, found[0].found, text)
    return Case(file, rule, text=text)


def write_sarif(report: Report, path: Path) -> None:
    """Write the report as code scanning reads it.

    Raises:
        OSError: It can't be written.
    """
    write_whole(path, json.dumps(sarif(report), indent=2) + "\n", mode=0o644)


def sarif(report: Report) -> dict[str, Any]:
    """The report as SARIF 2.1.0 (docs.oasis-open.org/sarif/sarif/v2.1.0)."""
    used = {one.rule for one in report.findings}
    named = [one for one in rules() if one.id in used]
    order = {one.id: number for number, one in enumerate(named)}
    return {
        "$schema": SARIF,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "gpukiln k8s.check",
                        "version": __version__,
                        "rules": [
                            {
                                "id": one.id,
                                "shortDescription": {"text": one.title},
                                "fullDescription": {"text": f"{one.title}: {one.reason}"},
                                "help": {"text": f"{one.fix}\nSource: {one.source}"},
                                "defaultConfiguration": {"level": one.severity},
                            }
                            for one in named
                        ],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            {
                                "level": "note",
                                "message": {"text": f"not checked: {sanitize(gap.reason)}"},
                                "locations": [_location(gap.file, gap.line)],
                            }
                            for gap in report.unchecked
                        ],
                    }
                ],
                "results": [
                    {
                        "ruleId": one.rule,
                        "ruleIndex": order[one.rule],
                        "level": one.severity,
                        "message": {"text": sanitize(_message(one))},
                        "locations": [_location(one.file, one.line, one.path)],
                        "partialFingerprints": {"gpukiln/v1": _fingerprint(one)},
                    }
                    for one in report.findings
                ],
            }
        ],
    }


def _message(finding: Finding) -> str:
    where = f"{finding.object}: " if finding.object else ""
    return f"{where}{finding.found}. {finding.reason[:1].upper()}{finding.reason[1:]}. Fix: {finding.fix}"


def _location(file: str, line: int, path: str = "") -> dict[str, Any]:
    uri = quote("stdin" if file == "-" else Path(file).as_posix())
    place: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}
    }
    if path:
        place["logicalLocations"] = [{"fullyQualifiedName": path}]
    return place


def _fingerprint(finding: Finding) -> str:
    """What stays the same where lines move."""
    parts = (finding.rule, finding.file, finding.object, finding.path, finding.found)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
