"""Results of checks and rules: `Finding`, severities and outcomes.

Every package that examines something (the host suite, `k8s.check`, `k8s.doctor`, `offer.check`, passthrough,
the health of GPUs, attestation, the requirements of a release) has its own rules and returns these values.
Packed into gpukiln-gpu: standard library, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
"""error: it does not work, or does harm; warning: it works, but somebody should examine it; info: no fault.

Only findings have a severity. The health of a GPU (sick, lost) and the state of a node (well, sick) differ.
"""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The most severe first."""

# Four outcomes, not a flag: a check that did not run must not look like one that passed.
Outcome = Literal["passed", "failed", "not_run", "not_reached"]
"""not_run: a requirement of the check is missing, which is no fault; not_reached: an earlier failure, a tool
that hangs, or a time limit has prevented the check. Both have a reason, and neither counts as passed.
"""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "not_run", "not_reached")
FinalOutcome = Literal["passed", "failed"]
"""The outcomes of a check that always runs, such as a signed verdict."""


@dataclass(frozen=True)
class Finding:
    """A finding of a rule.

    Args:
        id: Of the rule or fault, for example gpu-lost; users look it up and skip it by its id.
        message: What was found and what was wanted.
        object: The examined object: a GPU's UUID, Kind/name, an instance type, hostpci0; empty for the whole.
        evidence: The values behind the message, with units in the names: {"file": "job.yaml", "line": 7}.
        remedy: The next step; empty where the cause is not known.
        source: The document that states the rule; empty where the message says it.
    """

    id: str
    severity: Severity
    message: str
    object: str = ""
    # A mapping has no hash: without it a finding can be in a set.
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    remedy: str = ""
    source: str = ""


@dataclass(frozen=True)
class CheckedItem(Finding):
    """The result for an examined object; severity info where it has no fault.

    Args:
        outcome: failed for an error or a warning.
    """

    outcome: Outcome = "failed"


def worst_severity(findings: Iterable[Finding]) -> Severity | None:
    """The most severe severity of some findings; None for no finding.

    >>> worst_severity([Finding("a", "info", ""), Finding("b", "error", "")])
    'error'
    >>> worst_severity([])
    """
    return min((finding.severity for finding in findings), key=SEVERITIES.index, default=None)
