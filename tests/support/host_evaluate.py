"""Evaluates one check of tests/host on made-up facts."""

import pytest

from gpukiln.probe.base import NotReachedError
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.checks import PROFILES
from gpukiln.verify.facts import Facts
from gpukiln.verify.needs import applicability
from tests.support.host_machine import Data
from tests.support.host_pod_faults import POD_FAULTS
from tests.support.host_runner_faults import RUNNER_FAULTS

# Loaded once: each module of the suite is executed.
CHECKS = load_checks()


def evaluate_check(
    check_id: str,
    data: Data,
    *,
    profile: str = "image",
    expect_gpus: int | None = 1,
    simulated: bool = False,
) -> tuple[str, str]:
    """Outcome and reason of one check, decided as the plugin does."""
    check, function = CHECKS[check_id]
    if check_id in RUNNER_FAULTS:
        profile, expect_gpus = "runner", None
    if check_id in POD_FAULTS:
        profile = "pod"
    facts = Facts(data, profile, allow_simulated=simulated)
    try:
        answer = applicability(check.needs, facts, PROFILES[profile], expect_gpus=expect_gpus)
        if answer.answer != "run":
            # As pytest reports it: a missing need that the profile expects is a failure.
            return {"fail": "failed"}.get(answer.answer, answer.answer), answer.reason
        function(facts)
    except AssertionError as error:
        return "failed", str(error)
    except pytest.skip.Exception as reason:
        return "not_run", str(reason)
    except NotReachedError as reason:
        return "not_reached", str(reason)
    return "passed", facts.take_note()


def remedy(check_id: str, data: Data, *, profile: str = "image") -> str:
    """The fix in the report of a check that fails."""
    check, function = CHECKS[check_id]
    facts = Facts(data, profile)
    with pytest.raises(AssertionError):
        function(facts)
    return facts.take_remedy() or check.fix
