"""Workspaces by name for every program that reads OpenSSH's configuration: ssh, rsync, VS Code Remote.

Each workspace has a file of its own in ~/.ssh/gpukiln.d, which one line at the top of ~/.ssh/config includes:
an Include below a `Host` would belong to that host alone (ssh_config(5)). That line is added once, and with
consent: people keep that file by hand.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import RefusedError
from gpukiln.files import write_whole
from gpukiln.ssh import Ssh

FOLDER = "gpukiln.d"
INCLUDE = f"# workspaces of gpukiln\nInclude {FOLDER}/*.conf\n"
_INCLUDED = re.compile(
    rf"(?mi)^\s*include\s+(?:\S+\s+)*\"?(?:~/\.ssh/)?{re.escape(FOLDER)}/\*\.conf\"?(?:\s|$)"
)
ASK_S = 10.0


def is_included(home: Path) -> bool:
    """Whether ~/.ssh/config includes the workspaces."""
    config = home / ".ssh/config"
    return config.exists() and _INCLUDED.search(config.read_text(encoding="utf-8")) is not None


def include(home: Path) -> None:
    """Have ~/.ssh/config include the workspaces; its other lines, its mode and a link to it stay.

    Raises:
        OSError: It could not be written.
    """
    if is_included(home):
        return
    config = home / ".ssh/config"
    config.parent.mkdir(mode=0o700, exist_ok=True)
    target = config.resolve()  # people link it to a repository of theirs
    text, mode = "", 0o600
    if target.exists():
        text, mode = target.read_text(encoding="utf-8"), stat.S_IMODE(target.stat().st_mode)
    write_whole(target, f"{INCLUDE}\n{text}" if text else INCLUDE, mode=mode)


def write_entry(home: Path, name: str, ssh: Ssh) -> Path:
    """Write, or write again, how a workspace is reached.

    Args:
        name: Of the workspace; becomes the name of the host.

    Returns:
        The file; `ssh -F FILE NAME` reaches the workspace where ~/.ssh/config does not include it.

    Raises:
        RefusedError: ~/.ssh/config has another host of this name, which an entry would hide.
        OSError: It could not be written.
    """
    file = _file(home, name)
    if not file.exists() and (other := _resolved(home, name)) != name:
        raise RefusedError(
            f"~/.ssh/config has a host {name} already ({other}), and keeps it",
            hint=f"`invoke workspace.ssh {name}` reaches the workspace; --no-ssh-config writes no entry",
        )
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(file, ssh.entry(name))
    return file


def remove_entry(home: Path, name: str) -> None:
    """Remove the entry of a workspace; nothing happens where there is none."""
    _file(home, name).unlink(missing_ok=True)


def _file(home: Path, name: str) -> Path:
    return home / ".ssh" / FOLDER / f"{name}.conf"


def _resolved(home: Path, name: str) -> str:
    """The address that the user's own configuration gives a name: the name itself where it says nothing.

    OpenSSH itself is asked: a name can come from an included file, a pattern or a Match.
    """
    config = home / ".ssh/config"
    if not config.exists():
        return name
    asked = programs.run(Ssh(name, config=config).resolve_command(), limit_s=ASK_S)
    found = re.search(r"(?m)^hostname (.*)$", asked.stdout.decode(errors="replace"))
    return found[1] if found else name
