"""A verdict on a machine together with its facts, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukiln.verify.diagnosis import diagnosis
from gpukiln.verify.verdict import Verdict


@dataclass(frozen=True)
class Verification:
    """The verification of one machine.

    Args:
        target: Its name.
        verdict: None where it could not be verified.
        facts: The machine's facts, as in facts.json; may be empty.
        reason: Why it could not be verified.
    """

    target: str
    verdict: Verdict | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def state(self) -> str:
        """`passed`, `failed` or `not_verified`."""
        return "not_verified" if self.verdict is None else "passed" if self.verdict.passed else "failed"

    @property
    def diagnosis(self) -> str:
        """One sentence on its GPUs and their driver; empty where it could not be verified."""
        return diagnosis(self.facts) if self.verdict else ""
