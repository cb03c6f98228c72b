"""Writes the report that people read: one HTML page that needs nothing beside itself.

The page is made of `report.html.j2`. It loads nothing. Its one script opens the check that a link leads to,
and its policy allows that script, by its hash, and no other; without it every link still leads to its check.
What a machine said is escaped by the template's autoescape and goes through `text.presentable`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from gpukiln.files import write_whole
from gpukiln.units import Duration
from gpukiln.verify.checks import LAYERS, PROFILES
from gpukiln.verify.presentable import presentable, presentable_values
from gpukiln.verify.verdict import OUTCOMES, CheckResult, Outcome, Verdict, count

TEMPLATE = "report.html.j2"
FOUND_CHARS = 4000  # of a section of the facts that is shown as it is
MARKS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "not_run": "○", "not_reached": "⊘"}
MEANINGS: dict[Outcome, str] = {
    "passed": "Looked at, and found as it should be.",
    "failed": "Looked at, and found wrong.",
    "not_run": "What the check needs is not on this machine. It says nothing, good or bad.",
    "not_reached": "A check that failed makes this one meaningless. Mend that one first.",
}
# A browser scrolls to a closed <details> and leaves it closed.
SCRIPT = """
function reveal(hash) {
  const found = document.getElementById(hash.slice(1));
  if (found instanceof HTMLDetailsElement) found.open = true;
}
addEventListener("hashchange", () => reveal(location.hash));
addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link) reveal(link.hash);
});
reveal(location.hash);
"""
# Packages whose version a person asks for first when a GPU machine misbehaves.
PACKAGES = re.compile(
    r"(lib|xserver-xorg-video-|linux-modules-|kmod-)?nvidia|lib(cuda|cudnn|nccl)|cuda|datacenter-gpu-manager"
    r"|docker|containerd|runc$|dkms$|nvtop$|kubelet$|cloud-init$|systemd$|linux-image-[\d.]+|kernel(-core)?$"
)


@dataclass(frozen=True)
class Judged:
    """A machine on the page.

    Args:
        target: Name of the machine.
        verdict: None where it could not be judged.
        facts: What was found on it, as in facts.json; may be empty.
        reason: Why it could not be judged.
    """

    target: str
    verdict: Verdict | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def state(self) -> str:
        """`passed`, `failed` or `not_judged`."""
        return "not_judged" if self.verdict is None else "passed" if self.verdict.passed else "failed"


@dataclass(frozen=True)
class Section:
    """What a check looked at.

    Args:
        name: Section of the facts.
        asked: What was asked, each {what, status, bad, out, err}; status is a command's exit code, or `file`.
        found: Where nothing was asked that could be shown: what was found, as JSON.
        error: Why it could not be gathered.
        seconds: How long gathering took.
    """

    name: str
    asked: list[dict[str, Any]]
    found: str
    error: str
    seconds: float | None


def write_html(machines: Sequence[Judged], path: Path) -> None:
    """Write the report of one machine or several.

    Args:
        machines: At least one.
        path: The page; written whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    write_whole(path, render(machines))


def render(machines: Sequence[Judged]) -> str:
    """The page as text.

    Args:
        machines: At least one.
    """
    return _template().render(
        machines=machines,
        state="passed" if all(m.state == "passed" for m in machines) else "failed",
        together=count(chain.from_iterable(m.verdict.checks for m in machines if m.verdict)),
        wrong_on=_wrong_on(machines),
        outcomes=OUTCOMES,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        marks=MARKS,
        meanings=MEANINGS,
        profile_title=lambda name: PROFILES[name].title if name in PROFILES else "",
        sentence=sentence,
        layers=layers,
        failures=failures,
        evidence=evidence,
        versions=versions,
        script=Markup(SCRIPT),  # noqa: S704 - the constant above
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )
    environment.filters.update(
        took=_took, when=_when, ticks=_ticks, words=lambda name: name.replace("_", " ")
    )
    return environment.get_template(TEMPLATE)


def _finalize(value: Any) -> Any:
    """Applied to every expression of the template; what a macro made has been through it already."""
    return presentable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _ticks(text: str) -> Markup:
    """A text whose `commands` are set as such; it is escaped before it becomes Markup (S704)."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(presentable(text)))))  # noqa: S704


def _took(seconds: float) -> str:
    return Duration(seconds).shown if seconds >= 0.1 else "< 0.1s"


def _when(started_at: str) -> str:
    return re.sub(r"T(\d\d:\d\d:\d\d)(\+00:00|Z)$", r" \1 UTC", started_at)


def _checks(number: int) -> str:
    return f"{number} check" if number == 1 else f"{number} checks"


def sentence(verdict: Verdict) -> str:
    """Say the verdict in words, with what it does not say."""
    counts = verdict.counts
    if counts["failed"]:
        said = f"{counts['failed']} of {_checks(len(verdict.checks))} failed."
    elif not counts["passed"]:
        return "No check could be run, so nothing was proven: that is no pass."
    else:
        said = "Every check that could be run passed."
    if counts["not_run"]:
        said += f" {_checks(counts['not_run'])} could not be run here and prove nothing."
    return said


def layers(verdict: Verdict) -> list[tuple[str, str, dict[Outcome, int], list[CheckResult]]]:
    """Group the checks.

    Returns:
        For each layer with a check: its name, what it is about, its counts, its checks.
    """
    names = [*LAYERS, *dict.fromkeys(c.layer for c in verdict.checks if c.layer not in LAYERS)]
    rows = [(name, [c for c in verdict.checks if c.layer == name]) for name in names]
    return [(name, LAYERS.get(name, ""), count(found), found) for name, found in rows if found]


def failures(verdict: Verdict) -> dict[str, list[CheckResult]]:
    """The checks that failed, by what was found: the same thing is read once."""
    found: dict[str, list[CheckResult]] = {}
    for check in verdict.failures:
        found.setdefault(check.reason, []).append(check)
    return found


def _wrong_on(machines: Sequence[Judged]) -> list[tuple[CheckResult, list[int]]]:
    """Which check failed on which machines (their places, from 1), what failed on most of them first."""
    found: dict[str, tuple[CheckResult, list[int]]] = {}
    for place, machine in enumerate(machines, 1):
        for check in machine.verdict.failures if machine.verdict else ():
            found.setdefault(check.id, (check, []))[1].append(place)
    return sorted(found.values(), key=lambda row: -len(row[1]))


def evidence(facts: Mapping[str, Any], check: CheckResult) -> list[Section]:
    """What a check looked at.

    Returns:
        A section for each name in the check's evidence that the facts have.
    """
    return [_section(facts, name) for name in check.evidence if name in facts]


def _section(facts: Mapping[str, Any], name: str) -> Section:
    asked = _dig(facts, "evidence", name)
    rows = [_asked(row) for row in asked if isinstance(row, dict)] if isinstance(asked, list) else []
    found = facts[name]
    error = str(found["_error"]) if isinstance(found, dict) and "_error" in found else ""
    text = "" if rows or error else json.dumps(presentable_values(found), indent=1, ensure_ascii=False)
    more = len(text) - FOUND_CHARS
    seconds = _dig(facts, "seconds", name)
    return Section(
        name=name,
        asked=rows,
        # no secret is cut in two before it is recognised
        found=presentable(text)[:FOUND_CHARS] + (f"\n... and {more} more characters" if more > 0 else ""),
        error=error,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
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
        Heading to name to version; what is not there is left out.
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
    found: dict[str, dict[str, Any]] = {
        "Driver": driver,
        "Kernel": kernel,
        "Components in the image's record": components,
        "Packages": {name: packages[name] for name in sorted(packages) if PACKAGES.match(name)},
    }
    shown = {title: {k: _texts(v) for k, v in rows.items() if v} for title, rows in found.items()}
    return {title: rows for title, rows in shown.items() if rows}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
