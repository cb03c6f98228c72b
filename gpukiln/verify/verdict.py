"""The verdict on a machine: the value that verification returns."""

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

# Constraints for docs/schemas/verdict.json only: reading a stored verdict does not apply them, so that
# verdicts of other versions, with other checks and layers, stay readable.
CheckId = Annotated[str, Field(json_schema_extra={"pattern": r"^[a-z-]+\.[a-z0-9-]+$"})]
Layer = Annotated[str, Field(json_schema_extra={"enum": list(LAYERS)})]
ProfileName = Annotated[str, Field(json_schema_extra={"enum": list(PROFILES)})]
Seconds = Annotated[float, Field(json_schema_extra={"minimum": 0})]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Version = Annotated[int, Field(json_schema_extra={"const": SCHEMA})]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. A failed one is an error with one finding: its reason and remedy.

    This is no `gpukiln.findings.Finding`: a verdict has a result of every check, also of those that passed.

    Args:
        id: `<layer>.<name>`.
        title: What is true when it passes.
        layer: A key of `gpukiln.verify.checks.LAYERS`.
        outcome: `passed`; `failed`; `not_run`: a need is legitimately missing; `not_reached`: an earlier
            check
            failed on which this one depends, a tool hangs, or the time was up. The last two never count as
            passed.
        reason: Why it did not pass; of a passed check the measured value, or empty.
        remedy: The fix where it did not pass.
        causes: Usual causes of a failure, the likeliest first.
        evidence: Sections of the facts that it read.
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
        The number of results for every outcome.
    """
    results = list(checks)
    return {o: sum(c.outcome == o for c in results) for o in OUTCOMES}


def counts_text(checks: Iterable[CheckResult]) -> str:
    """The number of checks of each outcome, as text.

    Returns:
        For example `34 passed, 0 failed, 9 not run`; not reached is left out where there is none.

    >>> passed = CheckResult("gpu.nvml", "NVML lists every GPU", "gpu", "passed")
    >>> counts_text([passed])
    '1 passed, 0 failed, 0 not run'
    >>> counts_text([])
    '0 passed, 0 failed, 0 not run'
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
    """The results of all checks on one machine.

    Args:
        target: Name of the machine.
        profile: The profile by which it was verified.
        started_at: UTC, ISO 8601.
        duration_s: Seconds, gathering the facts included.
        checks: The results, in the order of the layers.
        suite_version: SHA-256 of the checks and the probe: verdicts of different suites are not comparable.
        environment: The verified machine for reports: system, kernel, driver, GPUs, the image's digest.
        instance_type: EC2's type of a machine that was launched for the verification, or an empty string.
        simulated: Whether the machine's GPUs are simulated, or `--simulated` was given; no release accepts
            it.
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
        """Whether at least one check passed, and none failed or was not reached.

        Checks that were not run do not count. Without a failure checks are not reached when the time was up.
        """
        counts = self.counts
        # Without a passed check nothing was verified, for example where every check was left out.
        return counts["failed"] == counts["not_reached"] == 0 and counts["passed"] > 0

    @property
    def passed_without_simulation(self) -> bool:
        """Whether it passed on a machine whose GPUs are not simulated; only that counts for a release."""
        return self.passed and not self.simulated

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The failed checks, first those that keep the GPUs from working."""
        return most_urgent_first(self.checks)

    def failures_by_reason(self) -> dict[str, list[CheckResult]]:
        """The failed checks by reason: one fault fails several checks with the same reason."""
        return _grouped(self.failures, lambda check: check.reason)

    def layers(self) -> list[tuple[str, str, dict[Outcome, int], list[CheckResult]]]:
        """For each layer with a check: name, title, counts, checks."""
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
        """Whether a check of a GPU passed: without a GPU the driver is not verified."""
        return any(check.layer == "gpu" and check.outcome == "passed" for check in self.checks)

    @property
    def digest(self) -> str:
        """SHA-256 of the document, hexadecimal: tags and records name a verdict by it."""
        # Sorted, so that the order of fields does not change the digest.
        return hashlib.sha256(json.dumps(dump(self), sort_keys=True).encode()).hexdigest()

    @model_serializer(mode="wrap")
    def _document(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The document, with the summary before the long list of checks."""
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
    def _require_schema(cls, document: Any) -> Any:
        """Refuse another schema. `counts` and `passed` of the document are ignored: they are computed."""
        if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
            raise ValueError(f"found schema {document.get('schema')!r}, wanted {SCHEMA}")
        return document
