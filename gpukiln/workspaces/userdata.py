"""A workspace's user data: what cloud-init sets up at the machine's first boot, as multipart MIME.

Input of users is data in a JSON file; no shell interprets it.
"""

from __future__ import annotations

import ast
import base64
import functools
import gzip
import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.workspaces import agent
from gpukiln.workspaces.contract import Workspace, lasting_variables
from gpukiln.workspaces.iam import EFS

LIMIT_BYTES = 16 * 1024  # EC2 user guide, "Instance user data": before base64
AGENT = "/usr/local/lib/gpukiln/workspace-agent.py"
# A fixed boundary keeps the user data equal for equal contracts, which the client token of RunInstances
# needs.
BOUNDARY = "gpukiln-workspace-part"
PROFILE = "/etc/profile.d/gpukiln-workspace.sh"
# What our roles need where they run by themselves; the versions are those that we use.
ROLES_NEED = ("ansible-core", "nvidia-ml-py", "tomli", "tomlkit")
UNITS = {
    "gpukiln-workspace.service": f"""[Unit]
Description=gpukiln: the stages of this workspace
After=network-online.target docker.service
Wants=network-online.target

[Service]
Type=exec
RemainAfterExit=yes
EnvironmentFile=-/etc/gpukiln/agent.env
ExecStart=/usr/bin/python3 {AGENT} boot

[Install]
WantedBy=multi-user.target
""",
    "gpukiln-workspace-idle.service": f"""[Unit]
Description=gpukiln: stop this workspace when it is idle

[Service]
Type=oneshot
EnvironmentFile=-/etc/gpukiln/agent.env
ExecStart=/usr/bin/python3 {AGENT} idle
""",
    "gpukiln-workspace-idle.timer": """[Unit]
Description=gpukiln: check each minute whether this workspace is idle

[Timer]
OnActiveSec=1min
OnUnitActiveSec=1min
AccuracySec=5s

[Install]
WantedBy=timers.target
""",
    "gpukiln-workspace-spot.service": f"""[Unit]
Description=gpukiln: watch for the notice that this spot instance ends

[Service]
EnvironmentFile=-/etc/gpukiln/agent.env
ExecStart=/usr/bin/python3 {AGENT} spot
Restart=on-failure

[Install]
WantedBy=multi-user.target
""",
}
# Accounts of images: the agent may not change their uid and home.
ACCOUNTS = re.compile(
    "admin|centos|debian|ec2-user|fedora|rocky|ssm-user|ubuntu"
    "|adm|backup|bin|daemon|docker|games|gpu|mail|nobody|root|sshd|staff|sudo|sys|users|video|wheel"
)


def render(
    contract: Workspace, *, gpus: int, compose: str = "", roles: str = "", endpoint: str = ""
) -> bytes:
    """User data, gzipped where it would be too large. It is the same in all zones.

    Args:
        contract: Checked, see `spec.read_spec`. A home volume is named by the machine's tag `gpukiln:home`.
        gpus: How many the machine has to show; 0: none.
        compose: The services, as a Compose file; empty: none.
        roles: https://REPOSITORY@COMMIT, whose roles a foreign image runs; empty: none.
        endpoint: Of an embedded cloud; empty: AWS's own.

    Raises:
        UsageError: It is too large.
    """
    config = _config(contract, gpus=gpus, compose=compose)
    if roles:
        packages = [f"{name}=={version(name)}" for name in ROLES_NEED]
        url, _, commit = roles.rpartition("@")
        config["roles"] = {"url": url, "commit": commit, "packages": packages}
    files = [
        _file(agent.CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n", "0600"),
        _file(AGENT, _without_comments(Path(agent.__file__).read_text()), "0755"),
        _file(PROFILE, login_profile(contract), "0644"),
        *(_file(f"/etc/systemd/system/{name}", text, "0644") for name, text in UNITS.items()),
    ]
    if endpoint:
        files.append(_file("/etc/gpukiln/agent.env", f"AWS_ENDPOINT_URL={endpoint}\n", "0644"))
    document = {"hostname": contract.workspace_name, "manage_etc_hosts": "localhost", "write_files": files}
    cloud = "#cloud-config\n" + json.dumps(document) + "\n"  # JSON is YAML 1.2, so no value needs quoting
    whole = _multipart(("text/cloud-config", cloud), ("text/x-shellscript", start_script(contract)))
    if len(whole) >= LIMIT_BYTES:
        # cloud-init reads gzipped user data; mtime=0 keeps it the same at each call.
        whole = gzip.compress(whole, mtime=0)
    if len(whole) >= LIMIT_BYTES:
        raise UsageError(
            f"the user data has {len(whole)} bytes gzipped, EC2 takes less than {LIMIT_BYTES}",
            hint="make the agent script shorter: let it fetch what it needs",
        )
    return whole


def user_of(owner: str) -> str:
    """The owner's account on the machine, which is never root or another account of the image.

    >>> user_of("ann")
    'ann'
    >>> user_of("ubuntu")
    'ws-ubuntu'
    """
    return f"ws-{owner}" if ACCOUNTS.fullmatch(owner) else owner


def runtime_env(workspace: Workspace) -> dict[str, str]:
    """What the workspace's user has in the environment, secrets apart."""
    cache = workspace.capabilities.artifact_cache
    env = lasting_variables(
        workspace.workspace_name, workspace.owner, workspace.region, user_of(workspace.owner)
    )
    if cache:
        env["GPUKILN_ARTIFACT_CACHE"] = f"{agent.CACHE}/gpukiln" if EFS.fullmatch(cache) else cache
    return env


def login_profile(workspace: Workspace) -> str:
    """What a login shell reads."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in runtime_env(workspace).items()]
    return (
        "# shellcheck shell=sh\n" + "\n".join(lines) + "\n"
        "if [ -d /usr/local/cuda/bin ]; then PATH=/usr/local/cuda/bin:$PATH; fi\n"
        f"for gpukiln_secret in {agent.RUN_FOLDER}/secrets/*; do\n"
        '  if [ -r "$gpukiln_secret" ]; then export "${gpukiln_secret##*/}=$(cat "$gpukiln_secret")"; fi\n'
        "done\n"
        "unset gpukiln_secret\n"
    )


def start_script(workspace: Workspace) -> str:
    """The script that cloud-init runs once, last of all."""
    units = ["gpukiln-workspace.service", "gpukiln-workspace-idle.timer"]
    units += ["gpukiln-workspace-spot.service"] if workspace.spot else []
    # --no-block: cloud-init's own service is still active, and the boot stages may take an hour.
    enable = f"systemctl enable --now --no-block {' '.join(units)}"
    return f"#!/bin/sh\nset -eu\nsystemctl daemon-reload\n{enable}\n"


def _config(workspace: Workspace, *, gpus: int, compose: str) -> dict[str, Any]:
    """What the agent reads."""
    has, toolchain = workspace.capabilities, workspace.toolchain_template
    return {
        "name": workspace.workspace_name,
        "user": user_of(workspace.owner),
        "region": workspace.region,
        "home": has.persistent_home,
        "secrets": has.secrets,
        "tags": has.identity_mode == "iam",
        "gpus": gpus,
        "desktop": has.gui_vnc,
        "efs": has.artifact_cache if EFS.fullmatch(has.artifact_cache) else "",
        "env": runtime_env(workspace),
        "toolchain": {"name": toolchain.name, "version": toolchain.version} if toolchain else None,
        "roles": None,
        "compose": compose,
        "script": workspace.agent_init_script,
        "idle_minutes": workspace.idle_minutes,
    }


def _multipart(*parts: tuple[str, str]) -> bytes:
    body = "".join(
        f'--{BOUNDARY}\nContent-Type: {kind}; charset="us-ascii"\n\n{text}\n' for kind, text in parts
    )
    head = f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"\nMIME-Version: 1.0\n\n'
    return f"{head}{body}--{BOUNDARY}--\n".encode("ascii")


def _file(path: str, text: str, mode: str) -> dict[str, str]:
    """For cloud-init's write_files. What YAML reads otherwise than JSON is packed."""
    entry = {"path": path, "permissions": mode, "owner": "root:root"}
    # YAML 1.2 allows only printable characters in a document, JSON escapes others in another way.
    if text.isascii() and text.replace("\n", "").isprintable():
        return {**entry, "content": text}
    return {**entry, "content": base64.b64encode(text.encode()).decode(), "encoding": "b64"}


@functools.cache
def _without_comments(text: str) -> str:
    """Python without docstrings and lines of comments: they would take a fifth of what fits."""
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            first = node.body[0]
            if len(node.body) > 1 and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                dropped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    kept = [line for number, line in lines if number not in dropped and not re.match(r"\s*(#(?!!)|$)", line)]
    return "\n".join(kept) + "\n"
