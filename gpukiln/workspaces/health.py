"""Whether a workspace's machine is healthy: the verification suite, whose answer stays with the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import HEALTH_TAG
from gpukiln.errors import GpukilnError
from gpukiln.instances.tags import tag_list
from gpukiln.state import state_home
from gpukiln.verify.report import Live
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import over_ssh
from gpukiln.verify.verdict import Verdict
from gpukiln.workspaces import lifecycle, reach
from gpukiln.workspaces.lifecycle import Found

PROFILE = "workspace"
TAG_CHARACTERS = 256  # EC2's limit of a value
HEALTHY, UNHEALTHY = "healthy", "unhealthy"


@dataclass(frozen=True)
class Health:
    """What a look at a machine said.

    Args:
        words: healthy or unhealthy, with the reason behind a colon.
        verdict: None: it could not be judged.
        folder: Of the report.
    """

    words: str
    verdict: Verdict | None
    folder: Path

    @property
    def good(self) -> bool:
        """Whether it is healthy."""
        return self.words.startswith(HEALTHY)


def reports(cloud: Cloud, name: str) -> Path:
    """Where the reports on a workspace are."""
    return state_home() / "workspaces" / "reports" / f"{cloud.name}-{cloud.region}-{name}"


def look(cloud: Cloud, found: Found, *, live: Live | None = None) -> Health:
    """Judge the machine of a workspace, and tag it with what came of it.

    A machine that can't be reached is unhealthy.

    Raises:
        RefusedError: Its key is on another computer.
        UnavailableError: It does not run, or the cloud refused.
    """
    machine = lifecycle.only(found)
    target = over_ssh(found.name, reach.reached(cloud, found, user=machine.ssh_user))
    folder = reports(cloud, found.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    type_ = instance_types().get(machine.instance_type)
    verdict: Verdict | None = None
    try:
        verdict = run_suite(
            target,
            profile=PROFILE,
            out_dir=folder,
            on_start=live.start if live else None,
            on_check=live.check if live else None,
            expect_gpus=type_.gpus if type_ and not machine.lacks_gpus else 0,
            instance_type=machine.instance_type,
            simulated=machine.simulated,
        )
        words = _words(verdict)
    except GpukilnError as error:
        words = f"{UNHEALTHY}: {error.message}"
    tag = {HEALTH_TAG: words[:TAG_CHARACTERS]}
    with explain_aws_errors("tag the workspace's machine with its health"):
        cloud.client("ec2").create_tags(Resources=[machine.instance_id], Tags=tag_list(tag))
    return Health(words, verdict, folder)


def _words(verdict: Verdict) -> str:
    if verdict.passed:
        return f"{HEALTHY}: {len(verdict.checks) - len(verdict.not_run)} checks passed, {verdict.started_at}"
    names = ", ".join(check.id for check in verdict.failures)
    return f"{UNHEALTHY}: {names}, {verdict.started_at}"
