"""Writes the HTML report: one page, rendered from `report.html.j2` in the frame of `reports.html`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Template

from gpukiln.files import write_atomic
from gpukiln.findings import OUTCOMES, Outcome
from gpukiln.reports.html import environment
from gpukiln.reports.sanitize import sanitize, sanitize_values
from gpukiln.verify.checks import PROFILES
from gpukiln.verify.verdict import CheckResult, Verdict, count
from gpukiln.verify.verification import Verification

TEMPLATE = "report.html.j2"
FOUND_CHARS = 4000  # a section without commands is shown as JSON up to this length
MARKS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "not_run": "○", "not_reached": "⊘"}
MEANINGS: dict[Outcome, str] = {
    "passed": "Checked, and as wanted.",
    "failed": "Checked, and not as wanted.",
    "not_run": "The machine does not have what the check needs. The result is unknown.",
    "not_reached": "An earlier check that this one depends on failed, a tool hangs, or the time was up. Fix "
    "that first.",
}
# Packages whose version matters first when a GPU machine misbehaves.
PACKAGES = re.compile(
    r"(lib|xserver-xorg-video-|linux-modules-|kmod-)?nvidia|lib(cuda|cudnn|nccl)|cuda|datacenter-gpu-manager"
    r"|docker|containerd|runc$|dkms$|nvtop$|kubelet$|cloud-init$|systemd$|linux-image-[\d.]+|kernel(-core)?$"
)


@dataclass(frozen=True)
class FactsSection:
    """A section of the facts that a check read.

    Args:
        name: Its key in the facts.
        asked: Commands and files, each {what, status, bad, out, err}; status is the exit code, or `file`.
        found: The section as JSON, where it has no commands and files to show.
        error: Why it could not be gathered.
        seconds: How long gathering took.
    """

    name: str
    asked: list[dict[str, Any]]
    found: str
    error: str
    seconds: float | None


def write_html(machines: Sequence[Verification], path: Path) -> None:
    """Write the report of one machine or several.

    Args:
        machines: At least one.
        path: The page; written whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    write_atomic(path, render(machines))


def render(machines: Sequence[Verification]) -> str:
    """The page as text.

    Args:
        machines: At least one.
    """
    return _template().render(
        machines=machines,
        state="passed" if all(m.state == "passed" for m in machines) else "failed",
        together=count(chain.from_iterable(m.verdict.checks for m in machines if m.verdict)),
        wrong_on=_failures_by_check(machines),
        outcomes=OUTCOMES,
    )


@cache
def _template() -> Template:
    pages = environment(Path(__file__).parent)
    pages.globals.update(
        marks=MARKS,
        meanings=MEANINGS,
        profile_title=lambda name: PROFILES[name].title if name in PROFILES else "",
        sentence=sentence,
        evidence=evidence,
        versions=versions,
    )
    return pages.get_template(TEMPLATE)


def _count_text(number: int) -> str:
    return f"{number} check" if number == 1 else f"{number} checks"


def sentence(verdict: Verdict) -> str:
    """The verdict as a sentence, with the number of checks that were not run."""
    counts = verdict.counts
    # Failures first; checks that were not run never make a verdict better.
    if counts["failed"]:
        said = f"{counts['failed']} of {_count_text(len(verdict.checks))} failed."
    elif not counts["passed"]:
        return "No check could be run: that is not a pass."
    else:
        said = "Every check that could be run passed."
    if counts["not_run"]:
        said += f" {_count_text(counts['not_run'])} could not be run here; their result is unknown."
    return said


def _failures_by_check(machines: Sequence[Verification]) -> list[tuple[CheckResult, list[int]]]:
    """Each failed check with the positions of its machines, from 1; first the check with most machines."""
    failures: dict[str, tuple[CheckResult, list[int]]] = {}
    for place, machine in enumerate(machines, 1):
        for check in machine.verdict.failures if machine.verdict else ():
            failures.setdefault(check.id, (check, []))[1].append(place)
    # A check that fails everywhere has one cause, in the image or in the suite.
    return sorted(failures.values(), key=lambda row: -len(row[1]))


def evidence(facts: Mapping[str, Any], check: CheckResult) -> list[FactsSection]:
    """The evidence of a check.

    Returns:
        A section for each name in the check's evidence that the facts have.
    """
    return [_section(facts, name) for name in check.evidence if name in facts]


def _section(facts: Mapping[str, Any], name: str) -> FactsSection:
    # Facts of earlier versions have no evidence: the section itself is shown then.
    asked = _dig(facts, "evidence", name)
    rows = [_query_row(row) for row in asked if isinstance(row, dict)] if isinstance(asked, list) else []
    value = facts[name]
    error = str(value["_error"]) if isinstance(value, dict) and "_error" in value else ""
    text = "" if rows or error else json.dumps(sanitize_values(value), indent=1, ensure_ascii=False)
    more = len(text) - FOUND_CHARS
    seconds = _dig(facts, "seconds", name)
    return FactsSection(
        name=name,
        asked=rows,
        # redacted before it is cut: half of a secret would not be recognised
        found=sanitize(text)[:FOUND_CHARS] + (f"\n... and {more} more characters" if more > 0 else ""),
        error=error,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _query_row(row: Mapping[str, Any]) -> dict[str, Any]:
    command = "command" in row
    return {
        "what": f"$ {row['command']}" if command else str(row.get("file", "")),
        "status": f"exit {row.get('rc')}" if command else "file",
        "bad": command and row.get("rc") != 0,
        "out": str(row.get("out", "")),
        "err": str(row.get("err", "")),
    }


def _dig(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _texts(value: Any) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, list) else str(value or "")


def versions(facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The versions that matter on a GPU machine.

    Returns:
        Heading to name to version, without empty ones.
    """
    driver: dict[str, Any] = {
        "nvidia-smi": _dig(facts, "driver", "nvidia_smi", "version"),
        "module that is loaded": _dig(facts, "gpus", "module"),
        "nvidia-persistenced": _dig(facts, "driver", "persistenced"),
    }
    driver |= _dict(_dig(facts, "driver", "libraries"))
    for release, modules in _dict(_dig(facts, "modules")).items():
        driver[f"module of {release}"] = _dig(modules, "nvidia", "version")
    kernel = {
        "running": _dig(facts, "kernel", "running"),
        "installed": _dig(facts, "kernel", "installed"),
    }
    packages = _dict(_dig(facts, "packages", "installed"))
    components = {
        name: ", ".join(filter(None, (_texts(_dig(said, k)) for k in ("version", "status", "reason"))))
        for name, said in _dict(_dig(facts, "record", "data", "components")).items()
    }
    groups: dict[str, dict[str, Any]] = {
        "Driver": driver,
        "Kernel": kernel,
        "Components in the image's record": components,
        "Packages": {name: packages[name] for name in sorted(packages) if PACKAGES.match(name)},
    }
    shown = {title: {k: _texts(v) for k, v in rows.items() if v} for title, rows in groups.items()}
    return {title: rows for title, rows in shown.items() if rows}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
