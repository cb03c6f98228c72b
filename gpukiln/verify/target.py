"""The machine to judge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True)
class Target:
    """A machine reached over SSH.

    Args:
        host: Address.
        port: TCP port of sshd.
        user: User with passwordless sudo, or root.
        private_key: File with the private key.
        name: What reports call it, for example the instance's id.
        proxy: Command that SSH speaks through instead of a connection of its own; empty: none.
    """

    host: str
    port: int = 22
    user: str = "admin"
    private_key: Path | None = None
    name: str = ""
    proxy: str = ""

    @property
    def title(self) -> str:
        """Name for people: the given one, else the address."""
        return self.name or self.host

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return f"{self.user}@{self.host}:{self.port}"

    @property
    def hostspec(self) -> str:
        """What testinfra's `--hosts` takes. No shared connection: nothing of it outlives the run."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user}@{host}:{self.port}?controlpersist=0&timeout=60"

    def ssh_config(self) -> str:
        """Return the text of an OpenSSH client configuration for this machine.

        The host key is not checked: the machine made it at its first boot, a moment ago.
        """
        lines = [
            "Host *",
            "  BatchMode yes",
            "  StrictHostKeyChecking no",
            "  UserKnownHostsFile /dev/null",
            "  GlobalKnownHostsFile /dev/null",
            "  LogLevel ERROR",
            "  ServerAliveInterval 15",
            "  ServerAliveCountMax 8",
        ]
        if self.private_key is not None:
            lines += ["  IdentitiesOnly yes", f'  IdentityFile "{self.private_key}"']
        if self.proxy:
            lines.append(f"  ProxyCommand {self.proxy}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class UrlTarget(Target):
    """A machine as testinfra names it, reached with the user's own SSH configuration and known hosts.

    Args:
        url: What testinfra's `--hosts` takes.
    """

    url: str = "local://"

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return self.url.partition("?")[0]

    @property
    def hostspec(self) -> str:
        """What testinfra's `--hosts` takes."""
        return self.url

    def ssh_config(self) -> str:
        """Nothing of ours; a question for a password would never be answered."""
        return "Host *\n  BatchMode yes\nInclude ~/.ssh/config\nInclude /etc/ssh/ssh_config\n"


@dataclass(frozen=True)
class InventoryTarget(Target):
    """A host of an Ansible inventory, reached as Ansible reaches it: jump hosts, keys, variables and all.

    Args:
        inventory: A file or a folder.
    """

    inventory: Path = Path()

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return f"{self.host} of {self.inventory}"

    @property
    def hostspec(self) -> str:
        """What testinfra's `--hosts` takes."""
        return f"ansible://{self.host}?ansible_inventory={quote(str(self.inventory))}&force_ansible=true"
