"""The value that verification returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

Outcome = Literal["passed", "failed", "not_run"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "not_run")
SCHEMA = 1


@dataclass(frozen=True)
class CheckResult:
    """What came of one check.

    Args:
        id: Id of the check.
        title: What is true when it passes.
        layer: Its layer.
        outcome: `passed`, `failed` or `not_run`; the last is never counted as the first.
        reason: Why it failed or was not run; for a passed check what was measured, or empty.
        fix: What to do when it fails.
        duration_s: Seconds.
    """

    id: str
    title: str
    layer: str
    outcome: Outcome
    reason: str = ""
    fix: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What came of all checks on one machine.

    Args:
        target: Name of the machine.
        profile: Profile it was judged by.
        started_at: UTC, ISO 8601.
        duration_s: Seconds, gathering the facts included.
        checks: The results, in the order of the layers.
        schema: Version of this document's form.
    """

    target: str
    profile: str
    started_at: str
    duration_s: float
    checks: tuple[CheckResult, ...]
    schema: int = SCHEMA

    @property
    def counts(self) -> dict[str, int]:
        """How many checks passed, failed and were not run."""
        return {o: sum(c.outcome == o for c in self.checks) for o in OUTCOMES}

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing failed. Checks not run do not count either way."""
        counts = self.counts
        return counts["failed"] == 0 and counts["passed"] > 0

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.outcome == "failed")

    @property
    def not_run(self) -> tuple[CheckResult, ...]:
        """The checks that were not run."""
        return tuple(c for c in self.checks if c.outcome == "not_run")

    def to_dict(self) -> dict[str, Any]:
        """Return the document that is written as JSON."""
        return {
            "schema": self.schema,
            "target": self.target,
            "profile": self.profile,
            "started_at": self.started_at,
            "duration_s": round(self.duration_s, 3),
            "passed": self.passed,
            "counts": self.counts,
            "checks": [asdict(c) for c in self.checks],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        """Read what `to_dict` wrote.

        Args:
            data: The document; `counts` and `passed` are computed anew, not believed.

        Raises:
            ValueError: A field is missing or has the wrong type (pydantic's ValidationError is one).
        """
        fields = {k: v for k, v in data.items() if k not in ("counts", "passed")}
        if fields.get("schema") != SCHEMA:
            raise ValueError(f"the verdict has schema {fields.get('schema')!r}, this version reads {SCHEMA}")
        return TypeAdapter(cls).validate_python(fields)
