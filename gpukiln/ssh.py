"""How a machine is reached over SSH: the one place that writes OpenSSH's options and command lines."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from gpukiln.errors import UsageError

CONNECT_S = 20
KEEPALIVE_S = 15
URL_SYNTAX = "ssh://[USER@]HOST[:PORT]"
_URL = re.compile(
    r"ssh://(?:[^@/\s\[\]]+@)?(?:\[(?P<v6>[0-9a-fA-F:]+)\]|[^:/?\s\[\]]+)(?::(?P<port>\d{1,5}))?(?:\?\S*)?"
)


class HostKeys(Enum):
    """Which key of a machine is accepted."""

    CONFIGURED = "as the user's own configuration and known hosts say"
    NEW_MACHINE = "any: the machine made its key at its first boot, a moment ago"
    FIRST_SEEN = "the first that was seen, which is kept"


@dataclass(frozen=True)
class Ssh:
    """A machine, and how to log in to it.

    Args:
        host: Name, address, or an alias of the user's configuration.
        port: TCP port of sshd; None: the configuration's.
        user: Who logs in; empty: the configuration's.
        private_key: File; with one no other key is offered.
        host_keys: Which of its keys are accepted.
        known_hosts: File in which the first key is kept.
        host_key_alias: The name under which it is kept there: an address may be another machine's tomorrow.
        proxy: Command that SSH speaks through instead of a connection of its own.
        config: File that is read instead of the user's configuration.
        extra: More arguments of ssh.
    """

    host: str
    port: int | None = None
    user: str = ""
    private_key: Path | None = None
    host_keys: HostKeys = HostKeys.CONFIGURED
    known_hosts: Path | None = None
    host_key_alias: str = ""
    proxy: str = ""
    config: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The machine for people: ``ann@192.0.2.1:22``."""
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"{user}{self._host}{port}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def options(self) -> dict[str, str]:
        """Options of ssh_config(5), but for host, port and user."""
        chosen = {"ServerAliveInterval": str(KEEPALIVE_S)}
        if self.host_keys is HostKeys.NEW_MACHINE:
            chosen |= {
                "StrictHostKeyChecking": "no",
                "UserKnownHostsFile": "/dev/null",
                "GlobalKnownHostsFile": "/dev/null",
                "LogLevel": "ERROR",
            }
        if self.host_keys is HostKeys.FIRST_SEEN:
            chosen |= {
                "HostKeyAlias": self.host_key_alias or self.host,
                "StrictHostKeyChecking": "accept-new",
                "UserKnownHostsFile": f'"{self.known_hosts}"',
                "LogLevel": "ERROR",
            }
        if self.private_key is not None:
            chosen |= {"IdentitiesOnly": "yes", "IdentityFile": f'"{self.private_key}"'}
        if self.proxy:
            chosen["ProxyCommand"] = self.proxy
        return chosen

    def config_text(self) -> str:
        """An OpenSSH client configuration that reaches this machine, for who takes a file of it."""
        lines = ["Host *", "  BatchMode yes", *(f"  {key} {value}" for key, value in self.options().items())]
        if self.host_keys is HostKeys.CONFIGURED:  # the first value of an option counts
            lines += ["Include ~/.ssh/config", "Include /etc/ssh/ssh_config"]
        return "\n".join(lines) + "\n"

    def entry(self, name: str) -> str:
        """A host of an OpenSSH client configuration, which reaches this machine by a name.

        >>> print(Ssh("192.0.2.1", 2222, "ann").entry("vision"), end="")
        Host vision
          HostName 192.0.2.1
          User ann
          Port 2222
          ServerAliveInterval 15
        """
        place = {"HostName": self.host, "User": self.user, "Port": str(self.port or "")}
        chosen = {key: value for key, value in place.items() if value} | self.options()
        return "\n".join([f"Host {name}", *(f"  {key} {value}" for key, value in chosen.items())]) + "\n"

    def resolve_command(self) -> list[str]:
        """The command line that prints what OpenSSH makes of this machine's name, and connects to nothing."""
        program, *rest = self.command(batch=False)
        return [program, "-G", *rest]

    def url(self) -> str:
        """What testinfra's `--hosts` takes; no shared connection, nothing of it outlives the run."""
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        query = {"controlpersist": "0", "timeout": "60"}
        if self.host_keys is HostKeys.CONFIGURED:  # else the configuration says so
            query |= {"ssh_identity_file": str(self.private_key)} if self.private_key else {}
        query |= {"ssh_config": str(self.config)} if self.config else {}
        query |= {"ssh_extra_args": shlex.join(self.extra)} if self.extra else {}
        return f"ssh://{user}{self._host}{port}?{urlencode(query, safe='/')}"

    def command(self, *words: str, batch: bool = True, terminal: bool | None = None) -> list[str]:
        """The command line that opens a session, or runs something there.

        Args:
            words: For the shell of the user there: SSH joins them with spaces. Without any: a session.
            batch: Whether it fails where it would ask for a password or wait for a host that is silent.
            terminal: Whether it gets a terminal; None: as ssh decides.
        """
        options = self.options()
        if batch:
            options |= {"BatchMode": "yes", "ConnectTimeout": str(CONNECT_S)}
        command = ["ssh", *(["-F", str(self.config)] if self.config else [])]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        command += self.extra
        command += [] if terminal is None else ["-t" if terminal else "-T"]
        command += ["-p", str(self.port)] if self.port else []
        # ssh.c reads options behind the host as well, unless `--` stands before it
        return [*command, "--", f"{self.user}@{self.host}" if self.user else self.host, *words]


def parse_ssh(url: str) -> Ssh:
    """Read a machine as the user names it; its keys are those of the user's own configuration.

    Args:
        url: `ssh://[USER@]HOST[:PORT]`; what testinfra reads behind `?` (`ssh_identity_file`, `ssh_config`,
            `ssh_extra_args`) is read as well.

    Raises:
        UsageError: It is no such URL.
    """
    if not is_ssh(url):
        raise UsageError(f"{url!r} is no {URL_SYNTAX}")
    parts = urlsplit(url)
    given = {key: values[0] for key, values in parse_qs(parts.query).items()}
    key, config = given.get("ssh_identity_file"), given.get("ssh_config")
    return Ssh(
        host=str(parts.hostname),
        port=parts.port,
        user=parts.username or "",
        private_key=Path(key) if key else None,
        config=Path(config) if config else None,
        extra=tuple(shlex.split(given.get("ssh_extra_args", ""))),
    )


def is_ssh(text: str) -> bool:
    """Whether a text is a URL that `parse_ssh` reads."""
    match = _URL.fullmatch(text)
    if match is None or int(match["port"] or 1) not in range(1, 65536):
        return False
    try:
        return not match["v6"] or ipaddress.ip_address(match["v6"]).version == 6
    except ValueError:
        return False
