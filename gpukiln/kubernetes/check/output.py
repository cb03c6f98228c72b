"""A report for people, for CI (JUnit), and for code scanning (SARIF)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpukiln.findings import Finding
from gpukiln.kubernetes.check import fit
from gpukiln.kubernetes.check.evaluate import Report
from gpukiln.kubernetes.check.registry import rules
from gpukiln.reports.junit import Case, Suite, write_suites
from gpukiln.reports.sanitize import sanitize
from gpukiln.reports.sarif import sarif


def lines(report: Report) -> Iterator[str]:
    """The report as text: file by file; why and what to do stand with a rule's first finding."""
    shown: set[str] = set()
    file = ""
    width = max((len(f"{one.evidence['line']}") for one in report.findings), default=0)
    for one in report.findings:
        if one.evidence["file"] != file:
            file = one.evidence["file"]
            yield sanitize(file)
        where = f"{one.object}: " if one.object else ""
        line = f"{one.evidence['line']:>{width}} {one.severity:<7} {one.id}"
        yield sanitize(f"  {line}: {where}{one.message}")
        if one.id not in shown or one.remedy not in shown:
            if one.id not in shown:
                yield f"  {'':>{width}}         why: {one.evidence['reason']}"
            yield sanitize(f"  {'':>{width}}         fix: {one.remedy}")
            shown |= {one.id, one.remedy}
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


def rule_lines() -> Iterator[str]:
    """All rules, for people."""
    for rule in rules():
        yield f"{rule.id} ({rule.severity}): {rule.title}"
        yield f"  why: {rule.reason}\n  fix: {rule.fix}\n  source: {rule.source}"


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def write_junit(report: Report, files: tuple[str, ...], path: Path) -> None:
    """Write one suite a file, one test case a rule that is violated; warnings pass, and are shown.

    Args:
        files: All that were read: what has no finding passes.

    Raises:
        OSError: It can't be written.
    """
    by_file: dict[str, dict[str, list[Finding]]] = {file: defaultdict(list) for file in files}
    for one in report.findings:
        by_file[one.evidence["file"]][one.id].append(one)
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
    first = found[0]
    text = "\n".join(f"{file}:{one.evidence['line']}: {one.object} {one.message}" for one in found)
    text += f"\nwhy: {first.evidence['reason']}\nfix: {first.remedy}\nsource: {first.source}"
    if first.severity == "error":
        return Case(file, rule, "failure", rule, first.message, text)
    return Case(file, rule, text=text)


def code_scanning(report: Report) -> dict[str, Any]:
    """The report as SARIF."""
    findings = [
        replace(
            one,
            message=sanitize(one.message),
            object=sanitize(one.object),
            remedy=sanitize(one.remedy),
        )
        for one in report.findings
    ]
    gaps = ((one.file, one.line, sanitize(one.reason)) for one in report.unchecked)
    titles = {one.id: (one.title, one.fix) for one in rules()}
    return sarif("gpukiln k8s.check", titles, findings, gaps)
