"""How a workspace's machine is reached: SSH, directly or through Systems Manager."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from gpukiln.clouds.base import Cloud
from gpukiln.errors import GpukilnError, RefusedError, UnavailableError
from gpukiln.verify.target import Target
from gpukiln.workspaces.keys import key_file
from gpukiln.workspaces.lifecycle import Found, Machine, only
from gpukiln.workspaces.userdata import AGENT

# Systems Manager user guide, "Allow and control permissions for SSH connections through Session Manager"
DOCUMENT = "AWS-StartSSHSession"
ASK_S = 60.0


def target(cloud: Cloud, found: Found, *, user: str = "") -> Target:
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
    return Target(
        host=machine.instance_id if machine.by_session_manager else machine.ssh_address,
        port=22 if machine.by_session_manager else cloud.ssh_port,
        user=user or machine.user,
        private_key=key,
        name=found.name,
        proxy=_proxy(cloud, machine) if machine.by_session_manager else "",
    )


def ssh_command(cloud: Cloud, found: Found, words: Sequence[str] = ()) -> list[str]:
    """The command that opens a session on a workspace, or runs something there.

    Args:
        words: What is run, as SSH takes it: SSH joins the words with spaces, for the shell of the user there.

    Raises:
        RefusedError: Its key is on another computer.
        UnavailableError: It does not run.
    """
    reached, machine = target(cloud, found), only(found)
    known = key_file(cloud, found.name).with_suffix(".known_hosts")
    options = {
        "IdentitiesOnly": "yes",
        "HostKeyAlias": machine.instance_id,  # an address may be another machine's tomorrow
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{known}"',
        "LogLevel": "ERROR",
        "ServerAliveInterval": "15",
        **({"ProxyCommand": reached.proxy} if reached.proxy else {}),
    }
    command = ["ssh", "-i", str(reached.private_key), "-p", str(reached.port)]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    # ssh.c parses options behind the host as well, unless `--` stands before it.
    return [*command, "--", f"{reached.user}@{reached.host}", *words]


def busy(cloud: Cloud, found: Found) -> str | None:
    """What somebody does on the machine of a workspace now; None where it can't be asked."""
    try:
        command = ssh_command(cloud, found, [f"sudo -n python3 {AGENT} busy"])
    except GpukilnError:
        return None
    try:
        ran = subprocess.run(
            [command[0], "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _proxy(cloud: Cloud, machine: Machine) -> str:
    profile = getattr(cloud, "profile", None)
    words = ["aws", "ssm", "start-session", "--target", machine.instance_id, "--region", cloud.region]
    words += ["--document-name", DOCUMENT, *(["--profile", profile] if profile else [])]
    return f"{shlex.join(words)} --parameters portNumber=%p"
