"""How a workspace's machine is reached: SSH, directly or through Systems Manager."""

from __future__ import annotations

import shlex

from gpukiln import programs
from gpukiln.clouds.base import Cloud
from gpukiln.errors import GpukilnError, RefusedError, UnavailableError
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.workspaces.keys import key_file
from gpukiln.workspaces.lifecycle import Found, Machine, only
from gpukiln.workspaces.userdata import AGENT

# Systems Manager user guide, "Allow and control permissions for SSH connections through Session Manager"
DOCUMENT = "AWS-StartSSHSession"
ASK_S = 60.0


def reached(cloud: Cloud, found: Found, *, user: str = "") -> Ssh:
    """How the machine of a workspace is reached.

    Args:
        user: Who logs in; empty: who works there.

    Raises:
        RefusedError: Its key is on another computer.
        UnavailableError: It does not run.
    """
    machine = only(found)
    if machine.state != "running":
        raise UnavailableError(
            f"{found.name} is {machine.state}, wanted running", hint=f"`invoke workspace.start {found.name}`"
        )
    key = key_file(cloud, found.name)
    if not key.exists():
        other = f"aws ssm start-session --target {machine.instance_id} --region {cloud.region}"
        raise RefusedError(
            f"the key of {found.name} is not on this computer: it was started from another one",
            hint=f"`{other}` needs none" if cloud.has_session_manager else "go on from there",
        )
    return Ssh(
        host=machine.instance_id if machine.by_session_manager else machine.ssh_address,
        port=22 if machine.by_session_manager else cloud.ssh_port,
        user=user or machine.user,
        private_key=key,
        host_keys=HostKeys.FIRST_SEEN,
        known_hosts=key.with_suffix(".known_hosts"),
        host_key_alias=machine.instance_id,
        proxy=_proxy(cloud, machine) if machine.by_session_manager else "",
    )


def busy(cloud: Cloud, found: Found) -> str | None:
    """What somebody does on the machine of a workspace now; None where it can't be asked."""
    try:
        command = reached(cloud, found).command(f"sudo -n python3 {AGENT} busy")
        ran = programs.run(command, limit_s=ASK_S)
    except GpukilnError:
        return None
    return ran.stdout.decode(errors="replace").strip() if ran.returncode == 0 else None


def _proxy(cloud: Cloud, machine: Machine) -> str:
    profile = getattr(cloud, "profile", None)
    words = ["aws", "ssm", "start-session", "--target", machine.instance_id, "--region", cloud.region]
    words += ["--document-name", DOCUMENT, *(["--profile", profile] if profile else [])]
    return f"{shlex.join(words)} --parameters portNumber=%p"
