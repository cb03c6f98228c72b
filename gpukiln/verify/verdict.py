"""The value that verification returns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from gpukiln.findings import OUTCOMES, Outcome
from gpukiln.typed import dump
from gpukiln.verify.checks import LAYERS, PROFILES
from gpukiln.verify.order import most_urgent_first

SCHEMA = 2

# What docs/schemas/verdict.json says of a value that its type does not; a stored verdict is read without it.
CheckId = Annotated[str, Field(json_schema_extra={"pattern": r"^[a-z-]+\.[a-z0-9-]+$"})]
Layer = Annotated[str, Field(json_schema_extra={"enum": list(LAYERS)})]
ProfileName = Annotated[str, Field(json_schema_extra={"enum": list(PROFILES)})]
Seconds = Annotated[float, Field(json_schema_extra={"minimum": 0})]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Version = Annotated[int, Field(json_schema_extra={"const": SCHEMA})]


@dataclass(frozen=True)
class CheckResult:
    """What came of one check. One that failed is an error, and has one finding: its reason and remedy.

    It is no `gpukiln.findings.Finding` itself: a verdict has a result of every check, most of which found
    nothing.

    Args:
        id: `<layer>.<name>`, what people quote.
        title: What is true when it passes.
        layer: A key of `gpukiln.verify.checks.LAYERS`.
        outcome: `passed`; `failed`; `not_run`: what it needs is legitimately missing; `not_reached`: a check
            that failed makes it meaningless, a tool hangs, or the time was up. The last two are never counted
            as the first.
        reason: Why it did not pass; for a passed check what was measured, or empty.
        remedy: What to do where it did not pass.
        causes: What usually is behind a failure, the likeliest first.
        evidence: Sections of the facts that it looked at.
        duration_s: Without gathering the facts.
    """

    id: CheckId
    title: str
    layer: Layer
    outcome: Outcome
    reason: str = ""
    remedy: str = ""
    causes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    duration_s: Seconds = 0.0


def count(checks: Iterable[CheckResult]) -> dict[Outcome, int]:
    """Count results.

    Returns:
        How many came out how, for every outcome.
    """
    results = list(checks)
    return {o: sum(c.outcome == o for c in results) for o in OUTCOMES}


def counts_text(checks: Iterable[CheckResult]) -> str:
    """Say how many checks came out how.

    Returns:
        Text such as `34 passed, 0 failed, 9 not run`; not reached is named only where there is one.
    """
    counts = count(checks)
    text = f"{counts['passed']} passed, {counts['failed']} failed, {counts['not_run']} not run"
    return text + (f", {counts['not_reached']} not reached" if counts["not_reached"] else "")


def _grouped(
    checks: Iterable[CheckResult], key: Callable[[CheckResult], str]
) -> dict[str, list[CheckResult]]:
    groups: dict[str, list[CheckResult]] = {}
    for check in checks:
        groups.setdefault(key(check), []).append(check)
    return groups


@dataclass(frozen=True)
class Verdict:
    """What came of all checks on one machine.

    Args:
        target: Name of the machine.
        profile: Profile it was judged by.
        started_at: UTC, ISO 8601.
        duration_s: Seconds, gathering the facts included.
        checks: The results, in the order of the layers.
        suite_version: SHA-256 over the checks and what gathers the facts: of another suite, another verdict.
        environment: What was judged, by names for people: system, kernel, driver, GPUs, the image's digest.
        instance_type: EC2's type of the machine where it was started to be judged, or an empty string.
        simulated: Whether the machine's GPUs are simulated, or such were asked for: then it proves nothing.
        schema: Version of this document's form.
    """

    target: str
    profile: ProfileName
    started_at: Time
    duration_s: Seconds
    checks: tuple[CheckResult, ...]
    suite_version: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    instance_type: str = ""
    simulated: bool = False
    schema: Version = SCHEMA

    @property
    def counts(self) -> dict[Outcome, int]:
        """How many checks passed, failed, were not run, and were not reached."""
        return count(self.checks)

    @property
    def passed(self) -> bool:
        """Whether something passed, and nothing failed or was not reached.

        Checks not run do not count either way. Some are not reached without a failure: the time was up.
        """
        counts = self.counts
        return counts["failed"] == counts["not_reached"] == 0 and counts["passed"] > 0

    @property
    def passed_without_simulation(self) -> bool:
        """Whether it passed on a machine on which something can be proven: its GPUs are not simulated."""
        return self.passed and not self.simulated

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed, what keeps the GPUs from working first."""
        return most_urgent_first(self.checks)

    def failures_by_reason(self) -> dict[str, list[CheckResult]]:
        """The checks that failed, by what was found: one fault fails many checks with the same words."""
        return _grouped(self.failures, lambda check: check.reason)

    def layers(self) -> list[tuple[str, str, dict[Outcome, int], list[CheckResult]]]:
        """For each layer with a check: its name, what it is about, its counts, its checks."""
        by_layer = _grouped(self.checks, lambda check: check.layer)
        names = [
            *(name for name in LAYERS if name in by_layer),
            *(name for name in by_layer if name not in LAYERS),
        ]
        return [(name, LAYERS.get(name, ""), count(by_layer[name]), by_layer[name]) for name in names]

    @property
    def not_run(self) -> tuple[CheckResult, ...]:
        return tuple(c for c in self.checks if c.outcome == "not_run")

    @property
    def saw_gpu(self) -> bool:
        """Whether a check of a GPU passed: a machine without one proves nothing of its driver."""
        return any(check.layer == "gpu" and check.outcome == "passed" for check in self.checks)

    @property
    def digest(self) -> str:
        """SHA-256 of the document, hexadecimal: ties a tag or a record to one verdict."""
        return hashlib.sha256(json.dumps(dump(self), sort_keys=True).encode()).hexdigest()

    @model_serializer(mode="wrap")
    def _document(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What people look for comes before the checks."""
        written = plain(self)
        checks = written.pop("checks")
        return {
            "schema": written.pop("schema"),
            "simulated": written.pop("simulated"),
            **written,
            "duration_s": round(self.duration_s, 3),
            "passed": self.passed,
            "counts": self.counts,
            "checks": checks,
        }

    @model_validator(mode="before")
    @classmethod
    def _of_this_form(cls, document: Any) -> Any:
        """`counts` and `passed` are computed anew, not believed."""
        if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
            raise ValueError(f"it has schema {document.get('schema')!r}, this version reads {SCHEMA}")
        return document
