"""A report for people, for CI (JUnit), and for code scanning (SARIF)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpukiln.findings import Finding
from gpukiln.kubernetes.check import fit
from gpukiln.kubernetes.check.evaluate import CheckReport
from gpukiln.kubernetes.check.registry import rules
from gpukiln.reports.junit import Case, Suite, write_suites
from gpukiln.reports.sanitize import sanitize
from gpukiln.reports.sarif import sarif


def lines(report: CheckReport) -> Iterator[str]:
    """The report as text, file by file; reason and fix follow the first finding of a rule."""
    # Reason and fix of a rule are long; repeating them for each finding hides the findings.
    shown: set[str] = set()
    file = ""
    width = max((len(f"{finding.evidence['line']}") for finding in report.findings), default=0)
    for finding in report.findings:
        if finding.evidence["file"] != file:
            file = finding.evidence["file"]
            yield sanitize(file)
        where = f"{finding.object}: " if finding.object else ""
        line = f"{finding.evidence['line']:>{width}} {finding.severity:<7} {finding.id}"
        yield sanitize(f"  {line}: {where}{finding.message}")
        if finding.id not in shown or finding.remedy not in shown:
            if finding.id not in shown:
                yield f"  {'':>{width}}         why: {finding.evidence['reason']}"
            yield sanitize(f"  {'':>{width}}         fix: {finding.remedy}")
            shown |= {finding.id, finding.remedy}
    if report.findings:
        yield ""
    for pod in report.placed:
        for text in fit.placement_lines(pod):
            yield sanitize(text)
    if report.placed:
        yield ""
    for gap in report.unchecked:
        yield sanitize(f"not checked: {gap.file}:{gap.line}: {gap.reason}")
    for left in report.skipped:
        why = f" ({left.reason})" if left.reason else ", without a reason (--skip RULE=REASON)"
        yield sanitize(f"skipped: {left.rule}, {_many(left.findings, 'finding')}{why}")
    counts = report.counts
    yield (
        f"{_many(counts.files, 'file')}, {_many(counts.objects, 'object')}, {_many(counts.pods, 'pod')}: "
        f"{_many(counts.errors, 'error')}, {_many(counts.warnings, 'warning')}"
        + (f", {counts.unchecked} not checked" if counts.unchecked else "")
        + f" (Kubernetes {', '.join(report.kubernetes)})"
    )


def rule_lines() -> Iterator[str]:
    """All rules, for people."""
    for rule in rules():
        yield f"{rule.id} ({rule.severity}): {rule.title}"
        yield f"  why: {rule.reason}\n  fix: {rule.fix}\n  source: {rule.source}"


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def write_junit(report: CheckReport, files: tuple[str, ...], path: Path) -> None:
    """Write a suite for each file and a test case for each violated rule; warnings pass and are shown.

    Args:
        files: All files that were read; one without findings passes.

    Raises:
        OSError: It can't be written.
    """
    by_file: dict[str, dict[str, list[Finding]]] = {file: defaultdict(list) for file in files}
    for finding in report.findings:
        by_file[finding.evidence["file"]][finding.id].append(finding)
    gaps = defaultdict(list)
    for gap in report.unchecked:
        gaps[gap.file].append(gap)
    suites = []
    for file in [*by_file, *(name for name in gaps if name not in by_file)]:
        cases = [_case(file, rule, findings) for rule, findings in by_file.get(file, {}).items()]
        # Skipped, not passed: CI shows what was not checked.
        cases += [Case(file, f"line {gap.line}", "skipped", message=gap.reason) for gap in gaps[file]]
        suites.append(Suite(file, cases or [Case(file, "k8s.check")]))
    write_suites("gpukiln k8s.check", suites, path, mode=0o644)


def _case(file: str, rule: str, findings: list[Finding]) -> Case:
    first = findings[0]
    text = "\n".join(
        f"{file}:{finding.evidence['line']}: {finding.object} {finding.message}" for finding in findings
    )
    text += f"\nwhy: {first.evidence['reason']}\nfix: {first.remedy}\nsource: {first.source}"
    if first.severity == "error":
        return Case(file, rule, "failure", rule, first.message, text)
    return Case(file, rule, text=text)


def code_scanning(report: CheckReport) -> dict[str, Any]:
    """The report as SARIF."""
    findings = [
        replace(
            finding,
            message=sanitize(finding.message),
            object=sanitize(finding.object),
            remedy=sanitize(finding.remedy),
        )
        for finding in report.findings
    ]
    gaps = ((gap.file, gap.line, sanitize(gap.reason)) for gap in report.unchecked)
    titles = {known_rule.id: (known_rule.title, known_rule.fix) for known_rule in rules()}
    return sarif("gpukiln k8s.check", titles, findings, gaps)
