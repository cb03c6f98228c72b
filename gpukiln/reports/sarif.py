"""Findings for code scanning: SARIF 2.1.0 (docs.oasis-open.org/sarif/sarif/v2.1.0)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpukiln import __version__
from gpukiln.files import write_atomic
from gpukiln.findings import Finding, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}


def write_sarif(path: Path, document: dict[str, Any]) -> None:
    """Write a document of `sarif`.

    Raises:
        OSError: It can't be written.
    """
    write_atomic(path, json.dumps(document, indent=2) + "\n", mode=0o644)


def sarif(
    tool: str,
    rules: Mapping[str, tuple[str, str]],
    findings: Sequence[Finding],
    not_checked: Iterable[tuple[str, int, str]],
) -> dict[str, Any]:
    """A document of the findings of one run.

    Args:
        rules: The title (what must hold) and the remedy of each by its id, in their order; only those with
            findings are written.
        findings: Their evidence has file, line, path and reason.
        not_checked: File, line and reason.
    """
    # SARIF has one level and description for each rule, so that the first finding of a rule gives both.
    first = {finding.id: finding for finding in reversed(findings)}
    used = [rule for rule in rules if rule in first]
    run = {
        "tool": {
            "driver": {
                "name": tool,
                "version": __version__,
                "rules": [
                    {
                        "id": id,
                        "shortDescription": {"text": title},
                        "fullDescription": {"text": f"{title}: {first[id].evidence['reason']}"},
                        "help": {"text": f"{remedy}\nSource: {first[id].source}"},
                        "defaultConfiguration": {"level": LEVELS[first[id].severity]},
                    }
                    for id in used
                    for title, remedy in [rules[id]]
                ],
            }
        },
        # Lines and columns of Python texts are in code points.
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                # The run itself succeeded; files that could not be checked are notifications.
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {
                        "level": "note",
                        "message": {"text": f"not checked: {reason}"},
                        "locations": [_location(file, line)],
                    }
                    for file, line, reason in not_checked
                ],
            }
        ],
        "results": [
            {
                "ruleId": finding.id,
                "ruleIndex": used.index(finding.id),
                "level": LEVELS[finding.severity],
                "message": {"text": _message(finding)},
                "locations": [
                    _location(finding.evidence["file"], finding.evidence["line"], finding.evidence["path"])
                ],
                "partialFingerprints": {"gpukiln/v1": _fingerprint(finding)},
            }
            for finding in findings
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _message(finding: Finding) -> str:
    where, reason = f"{finding.object}: " if finding.object else "", finding.evidence["reason"]
    return f"{where}{finding.message}. {reason[:1].upper()}{reason[1:]}. Fix: {finding.remedy}"


def _location(file: str, line: int, path: str = "") -> dict[str, Any]:
    # An artifact location must be a URI; a file that is read from standard input has none.
    uri = quote("stdin" if file == "-" else Path(file).as_posix())
    place: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}
    }
    if path:
        place["logicalLocations"] = [{"fullyQualifiedName": path}]
    return place


def _fingerprint(finding: Finding) -> str:
    """A hash that stays the same when lines move, so that code scanning recognises the finding."""
    parts = (
        finding.id,
        finding.evidence["file"],
        finding.object,
        finding.evidence["path"],
        finding.message,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
