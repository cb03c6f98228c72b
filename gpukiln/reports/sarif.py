"""Findings as code scanning reads them: SARIF 2.1.0 (docs.oasis-open.org/sarif/sarif/v2.1.0)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from gpukiln import __version__
from gpukiln.files import write_whole
from gpukiln.findings import Finding, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}


class SarifRule(Protocol):
    """What code scanning shows of a rule: what must hold, what happens where it doesn't, the next step."""

    @property
    def id(self) -> str: ...

    @property
    def severity(self) -> Severity: ...

    @property
    def title(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def fix(self) -> str: ...

    @property
    def source(self) -> str: ...


def write_sarif(path: Path, document: dict[str, Any]) -> None:
    """Write what `sarif` gave.

    Raises:
        OSError: It can't be written.
    """
    write_whole(path, json.dumps(document, indent=2) + "\n", mode=0o644)


def sarif(
    tool: str,
    rules: Iterable[SarifRule],
    findings: Sequence[Finding],
    not_checked: Iterable[tuple[str, int, str]],
) -> dict[str, Any]:
    """A document of the findings of one run.

    Args:
        rules: All of the tool; only those with findings are written.
        findings: Their evidence has file, line, path and reason.
        not_checked: File, line and reason.
    """
    used = {one.id for one in findings}
    named = [one for one in rules if one.id in used]
    order = {one.id: number for number, one in enumerate(named)}
    run = {
        "tool": {
            "driver": {
                "name": tool,
                "version": __version__,
                "rules": [
                    {
                        "id": one.id,
                        "shortDescription": {"text": one.title},
                        "fullDescription": {"text": f"{one.title}: {one.reason}"},
                        "help": {"text": f"{one.fix}\nSource: {one.source}"},
                        "defaultConfiguration": {"level": LEVELS[one.severity]},
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
                        "message": {"text": f"not checked: {reason}"},
                        "locations": [_location(file, line)],
                    }
                    for file, line, reason in not_checked
                ],
            }
        ],
        "results": [
            {
                "ruleId": one.id,
                "ruleIndex": order[one.id],
                "level": LEVELS[one.severity],
                "message": {"text": _message(one)},
                "locations": [_location(one.evidence["file"], one.evidence["line"], one.evidence["path"])],
                "partialFingerprints": {"gpukiln/v1": _fingerprint(one)},
            }
            for one in findings
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _message(finding: Finding) -> str:
    where, reason = f"{finding.object}: " if finding.object else "", finding.evidence["reason"]
    return f"{where}{finding.message}. {reason[:1].upper()}{reason[1:]}. Fix: {finding.remedy}"


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
    parts = (
        finding.id,
        finding.evidence["file"],
        finding.object,
        finding.evidence["path"],
        finding.message,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
