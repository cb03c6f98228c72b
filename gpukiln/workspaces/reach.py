"""How a workspace's machine is reached, by SSH or Systems Manager, and whether it is healthy there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import HEALTH_TAG
from gpukiln.errors import GpukilnError, RefusedError, UnavailableError
from gpukiln.instances.tags import tag_list
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.state import state_home
from gpukiln.verify.report import LiveReport
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import ssh_target
from gpukiln.verify.verdict import Verdict
from gpukiln.workspaces.lifecycle import ExistingWorkspace, WorkspaceMachine, only_machine
from gpukiln.workspaces.network import key_file
from gpukiln.workspaces.userdata import AGENT

# Systems Manager user guide, "Allow and control permissions for SSH connections through Session Manager"
DOCUMENT = "AWS-StartSSHSession"
# `agent.py busy` samples for two seconds and asks nvidia-smi, which may be slow on a machine with eight GPUs.
BUSY_LIMIT_S = 60.0
PROFILE = "workspace"
TAG_CHARACTERS = 256  # EC2's limit of a value
HEALTHY, UNHEALTHY = "healthy", "unhealthy"


def workspace_ssh(cloud: Cloud, existing: ExistingWorkspace, *, user: str = "") -> Ssh:
    """How the machine of a workspace is reached.

    Args:
        user: Who logs in; empty: who works there.

    Raises:
        RefusedError: Its key is on another computer.
        UnavailableError: It does not run.
    """
    machine = only_machine(existing)
    if machine.state != "running":
        raise UnavailableError(
            f"{existing.name} is {machine.state}, wanted running",
            hint=f"`invoke workspace.start {existing.name}`",
        )
    key = key_file(cloud, existing.name)
    if not key.exists():
        other = f"aws ssm start-session --target {machine.instance_id} --region {cloud.region}"
        raise RefusedError(
            f"the key of {existing.name} is not on this computer: it was started from another one",
            hint=f"`{other}` needs none" if cloud.has_session_manager else "use that computer",
        )
    return Ssh(
        # The SSM proxy takes an instance id for the host; ssh_config(5) passes it on as %h.
        host=machine.instance_id if machine.by_session_manager else machine.ssh_address,
        port=22 if machine.by_session_manager else cloud.ssh_port,
        user=user or machine.user,
        private_key=key,
        host_keys=HostKeys.FIRST_SEEN,
        known_hosts=key.with_suffix(".known_hosts"),
        # Addresses are reused in a VPC: keyed by the address, the next machine would look like an attack.
        host_key_alias=machine.instance_id,
        proxy=_proxy(cloud, machine) if machine.by_session_manager else "",
    )


def ask_busy(cloud: Cloud, existing: ExistingWorkspace) -> str | None:
    """What is in use on the machine of a workspace now; None where it can't be reached."""
    try:
        command = workspace_ssh(cloud, existing).command(f"sudo -n python3 {AGENT} busy")
        ran = programs.run(command, limit_s=BUSY_LIMIT_S)
    except GpukilnError:
        return None
    return ran.stdout.decode(errors="replace").strip() if ran.returncode == 0 else None


def _proxy(cloud: Cloud, machine: WorkspaceMachine) -> str:
    # The embedded cloud has no profiles of the AWS CLI.
    profile = getattr(cloud, "profile", None)
    words = ["aws", "ssm", "start-session", "--target", machine.instance_id, "--region", cloud.region]
    words += ["--document-name", DOCUMENT, *(["--profile", profile] if profile else [])]
    return f"{shlex.join(words)} --parameters portNumber=%p"


@dataclass(frozen=True)
class HealthReport:
    """The result of a health check.

    Args:
        words: healthy or unhealthy, with the reason behind a colon.
        verdict: None: it could not be verified.
        folder: Where results.json and report.html are.
    """

    words: str
    verdict: Verdict | None
    folder: Path

    @property
    def is_healthy(self) -> bool:
        """Whether it is healthy."""
        return self.words.startswith(HEALTHY)


def report_folder(cloud: Cloud, name: str) -> Path:
    """Where the reports on a workspace are."""
    return state_home() / "workspaces" / "reports" / f"{cloud.name}-{cloud.region}-{name}"


def check_health(
    cloud: Cloud, existing: ExistingWorkspace, *, live: LiveReport | None = None
) -> HealthReport:
    """Verify the machine of a workspace, and tag it with the result.

    A machine that can't be reached is unhealthy.

    Raises:
        RefusedError: Its key is on another computer.
        UnavailableError: It does not run, or the cloud refused.
    """
    machine = only_machine(existing)
    target = ssh_target(existing.name, workspace_ssh(cloud, existing, user=machine.ssh_user))
    folder = report_folder(cloud, existing.name)
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
        words = _health_words(verdict)
    except GpukilnError as error:
        words = f"{UNHEALTHY}: {error.message}"
    tag = {HEALTH_TAG: words[:TAG_CHARACTERS]}
    with explain_aws_errors("tag the workspace's machine with its health"):
        cloud.client("ec2").create_tags(Resources=[machine.instance_id], Tags=tag_list(tag))
    return HealthReport(words, verdict, folder)


def _health_words(verdict: Verdict) -> str:
    if verdict.passed:
        return f"{HEALTHY}: {len(verdict.checks) - len(verdict.not_run)} checks passed, {verdict.started_at}"
    names = ", ".join(check.id for check in verdict.failures)
    return f"{UNHEALTHY}: {names}, {verdict.started_at}"
