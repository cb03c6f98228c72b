"""How a machine is reached over SSH: the only code that writes OpenSSH's options and command lines."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from gpukiln.errors import UsageError

# Without it a host that drops packets is waited for until TCP gives up, which takes minutes.
CONNECT_S = 20
# NAT gateways and firewalls drop idle connections; AWS's NAT gateway after 350 s (VPC user guide, "NAT
# gateway basics").
KEEPALIVE_S = 15
URL_SYNTAX = "ssh://[USER@]HOST[:PORT]"
_URL = re.compile(
    r"ssh://(?:[^@/\s\[\]]+@)?(?:\[(?P<v6>[0-9a-fA-F:]+)\]|[^:/?\s\[\]]+)(?::(?P<port>\d{1,5}))?(?:\?\S*)?"
)


class HostKeys(Enum):
    """Which host keys are accepted."""

    CONFIGURED = "according to the user's configuration and known hosts"
    NEW_MACHINE = "any: the machine has just generated its key, at its first boot"
    FIRST_SEEN = "the first one, which is stored and compared later"


@dataclass(frozen=True)
class Ssh:
    """A machine, and how to log in to it.

    Args:
        host: Name, address, or an alias of the user's configuration.
        port: TCP port of sshd; None: the configuration's.
        user: Who logs in; empty: the configuration's.
        private_key: File; if given, ssh offers no other key.
        host_keys: Which of its keys are accepted.
        known_hosts: File that stores the first host key.
        host_key_alias: The name of the stored key: the address may belong to another machine later.
        proxy: ProxyCommand, in place of a TCP connection.
        config: File that replaces the user's configuration.
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
        """The machine in messages.

        >>> Ssh("192.0.2.1", 22, "ann").address
        'ann@192.0.2.1:22'
        >>> Ssh("2001:db8::1", 2222).address
        '[2001:db8::1]:2222'
        """
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"{user}{self._host}{port}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def options(self) -> dict[str, str]:
        """Options of ssh_config(5), except host, port and user."""
        chosen = {"ServerAliveInterval": str(KEEPALIVE_S)}
        if self.host_keys is HostKeys.NEW_MACHINE:
            chosen |= {
                # A key in known_hosts for the same address belongs to an earlier machine, and ssh would
                # refuse to connect.
                "StrictHostKeyChecking": "no",
                "UserKnownHostsFile": "/dev/null",
                "GlobalKnownHostsFile": "/dev/null",
                # ERROR hides "Permanently added ... to the list of known hosts".
                "LogLevel": "ERROR",
            }
        if self.host_keys is HostKeys.FIRST_SEEN:
            chosen |= {
                "HostKeyAlias": self.host_key_alias or self.host,
                "StrictHostKeyChecking": "accept-new",
                # Quoted: ssh splits the value at spaces (ssh_config(5)).
                "UserKnownHostsFile": f'"{self.known_hosts}"',
                "LogLevel": "ERROR",
            }
        if self.private_key is not None:
            # IdentitiesOnly: an agent with many keys would use up the server's MaxAuthTries before this one.
            chosen |= {"IdentitiesOnly": "yes", "IdentityFile": f'"{self.private_key}"'}
        if self.proxy:
            chosen["ProxyCommand"] = self.proxy
        return chosen

    def config_text(self) -> str:
        """An OpenSSH client configuration that reaches this machine, for programs that take a file."""
        lines = ["Host *", "  BatchMode yes", *(f"  {key} {value}" for key, value in self.options().items())]
        if self.host_keys is HostKeys.CONFIGURED:  # ssh takes the first value of an option
            lines += ["Include ~/.ssh/config", "Include /etc/ssh/ssh_config"]
        return "\n".join(lines) + "\n"

    def entry(self, name: str) -> str:
        """A Host section of an OpenSSH client configuration that reaches this machine by a name.

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
        """The command line that prints OpenSSH's effective options for this machine, without a connection."""
        program, *rest = self.command(batch=False)
        return [program, "-G", *rest]

    def url(self) -> str:
        """The URL for testinfra's `--hosts`, without a shared connection that would outlive the run."""
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        query = {"controlpersist": "0", "timeout": "60"}
        if self.host_keys is HostKeys.CONFIGURED:  # else the file of `config_text` has it
            query |= {"ssh_identity_file": str(self.private_key)} if self.private_key else {}
        query |= {"ssh_config": str(self.config)} if self.config else {}
        query |= {"ssh_extra_args": shlex.join(self.extra)} if self.extra else {}
        return f"ssh://{user}{self._host}{port}?{urlencode(query, safe='/')}"

    def command(self, *words: str, batch: bool = True, terminal: bool | None = None) -> list[str]:
        """The command line that opens a session or runs a command.

        Args:
            words: The command; SSH joins the words with spaces for the user's shell. None: a session.
            batch: Whether to fail instead of asking for a password or waiting for a silent host.
            terminal: Whether to allocate a terminal; None: ssh decides.
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
        # ssh also reads options behind the host, unless `--` is before it (ssh.c)
        return [*command, "--", f"{self.user}@{self.host}" if self.user else self.host, *words]


def parse_ssh(url: str) -> Ssh:
    """Parse a machine that the user gave; its host keys are those of the user's configuration.

    Args:
        url: `ssh://[USER@]HOST[:PORT]`; behind `?` it may have testinfra's `ssh_identity_file`, `ssh_config`
            and `ssh_extra_args`.

    Raises:
        UsageError: The text has another form.

    >>> parse_ssh("ssh://ann@192.0.2.1:2222").address
    'ann@192.0.2.1:2222'
    >>> parse_ssh("ssh://gpu1?ssh_identity_file=/root/.ssh/id_ed25519").private_key.name
    'id_ed25519'
    """
    if not is_ssh(url):
        raise UsageError(f"{url!r} is not {URL_SYNTAX}")
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
    """Whether a text is a URL that `parse_ssh` reads.

    >>> is_ssh("ssh://[2001:db8::1]:22"), is_ssh("ssh://host:99999"), is_ssh("192.0.2.1")
    (True, False, False)
    """
    match = _URL.fullmatch(text)
    if match is None or int(match["port"] or 1) not in range(1, 65536):
        return False
    try:
        # The regular expression allows any hexadecimal digits and colons.
        return not match["v6"] or ipaddress.ip_address(match["v6"]).version == 6
    except ValueError:
        return False
