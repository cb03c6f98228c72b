"""What a check or a rule says: one `Finding`, one set of severities, one set of outcomes.

Every part that examines something (the suite, `k8s.check`, `k8s.doctor`, `offer.check`, passthrough, the
health of GPUs, attestation, what a release needs) keeps its rules and returns these values. It is packed into
gpukiln-gpu: standard library, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
"""error: it does not work, or does harm; warning: it works today, and somebody should look; info: no fault.

A severity is of a finding. The state of a GPU (sick, lost) and of a node (well, sick) are other things.
"""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The most severe first."""

Outcome = Literal["passed", "failed", "not_run", "not_reached"]
"""not_run: what the check needs is legitimately missing; not_reached: an earlier failure, a tool that hangs,
or the end of the time made it meaningless. Both have a reason, and neither is ever counted as passed.
"""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "not_run", "not_reached")
FinalOutcome = Literal["passed", "failed"]
"""Of what ends one way or the other, such as a signed verdict."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Args:
        id: Of the rule or fault, for example gpu-lost; people skip and look it up by it.
        message: What was found, and what was wanted.
        object: What it is about: a GPU's UUID, Kind/name, an instance type, hostpci0; empty: the whole.
        evidence: Values behind the message, units in the names: {"file": "job.yaml", "line": 7}.
        remedy: The next step; empty where its cause is not established.
        source: Where the rule is stated; empty where it follows from the message.
    """

    id: str
    severity: Severity
    message: str
    object: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    remedy: str = ""
    source: str = ""


@dataclass(frozen=True)
class CheckedItem(Finding):
    """What came of one thing that was examined, also where nothing is wrong with it (severity info).

    Args:
        outcome: A finding that fails is an error, or a warning.
    """

    outcome: Outcome = "failed"


def worst_severity(findings: Iterable[Finding]) -> Severity | None:
    """Return the most severe severity, None where there is no finding."""
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default=None)
