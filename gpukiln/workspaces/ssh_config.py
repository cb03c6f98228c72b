"""Workspaces by name for every program that reads OpenSSH's configuration: ssh, rsync, VS Code Remote.

Each workspace has a file of its own in this computer's state, and one line at the top of ~/.ssh/config
includes them all: below a `Host` an Include would belong to that host alone (ssh_config(5)). It is added once
and with consent: people keep that file by hand.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import RefusedError
from gpukiln.files import write_atomic
from gpukiln.ssh import Ssh
from gpukiln.state import state_home

# `ssh -G` connects to nothing, but a `Match exec` of the user's configuration may run a slow program.
RESOLVE_LIMIT_S = 10.0


def entries() -> Path:
    """The folder of the entries; `.declined` in it says that the line is not wanted."""
    return state_home() / "ssh_config.d"


def include_line() -> str:
    """What ~/.ssh/config includes them by."""
    return f'Include "{entries()}/*.conf"'


def is_included(home: Path) -> bool:
    """Whether ~/.ssh/config includes the entries."""
    config = home / ".ssh/config"
    return config.exists() and include_line() in map(
        str.strip, config.read_text(encoding="utf-8").splitlines()
    )


def include(home: Path) -> None:
    """Have ~/.ssh/config include the entries; its other lines, its mode and a link to it stay.

    Raises:
        OSError: It could not be written.
    """
    if is_included(home):
        return
    config = home / ".ssh/config"
    config.parent.mkdir(mode=0o700, exist_ok=True)
    target = config.resolve()  # people link it to a repository of theirs
    # OpenSSH refuses a configuration that others can write (ssh_config(5)).
    text, mode = "", 0o600
    if target.exists():
        text, mode = target.read_text(encoding="utf-8"), stat.S_IMODE(target.stat().st_mode)
    line = f"# workspaces of gpukiln\n{include_line()}\n"
    write_atomic(target, f"{line}\n{text}" if text else line, mode=mode)


def is_declined() -> bool:
    """Whether the line was offered, and not wanted."""
    return (entries() / ".declined").exists()


def decline() -> None:
    """Remember that the line is not wanted, so that nobody is asked again."""
    entries().mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(entries() / ".declined", "")


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
    file = _file(name)
    # A file that exists was written by an earlier call, so that the name resolves to the workspace itself.
    if not file.exists() and (other := _resolved(home, name)) != name:
        raise RefusedError(
            f"~/.ssh/config has a host {name} already ({other}), and keeps it",
            hint=f"`invoke workspace.ssh {name}` reaches the workspace; --no-ssh-config writes no entry",
        )
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(file, ssh.entry(name))
    return file


def has_entry(name: str) -> bool:
    """Whether a workspace has one."""
    return _file(name).exists()


def remove_entry(name: str) -> None:
    """Remove the entry of a workspace; nothing happens where there is none."""
    _file(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return entries() / f"{name}.conf"


def _resolved(home: Path, name: str) -> str:
    """The address that the user's own configuration gives a name: the name itself where it says nothing.

    OpenSSH itself is asked: a name can come from an included file, a pattern or a Match.
    """
    config = home / ".ssh/config"
    if not config.exists():
        return name
    asked = programs.run(Ssh(name, config=config).resolve_command(), limit_s=RESOLVE_LIMIT_S)
    # Without a matching entry `ssh -G` prints the name itself as hostname.
    host_match = re.search(r"(?m)^hostname (.*)$", asked.stdout.decode(errors="replace"))
    return host_match[1] if host_match else name
