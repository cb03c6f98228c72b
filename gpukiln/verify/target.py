"""The machine to judge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gpukiln.ssh import HostKeys, Ssh


@dataclass(frozen=True)
class Target:
    """A machine, by what testinfra's `--hosts` takes: ``local://``, ``docker://NAME``, ``facts://FILE``.

    Args:
        name: What reports call it, for example the instance's id.
        hostspec: What testinfra's `--hosts` takes.
    """

    name: str
    hostspec: str

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return self.hostspec.partition("?")[0]

    def ssh_config(self) -> str:
        """The text of an OpenSSH client configuration; a question for a password would never be answered."""
        return Ssh(self.name).config_text()


@dataclass(frozen=True)
class SshTarget(Target):
    """A machine reached over SSH by a user with passwordless sudo, or root."""

    ssh: Ssh

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return self.ssh.address

    def ssh_config(self) -> str:
        """The text of an OpenSSH client configuration for this machine."""
        return self.ssh.config_text()


def new_machine_target(name: str, host: str, *, port: int, user: str, private_key: Path) -> SshTarget:
    """A machine that booted a moment ago, with a key that was made for it."""
    return ssh_target(
        name, Ssh(host, port=port, user=user, private_key=private_key, host_keys=HostKeys.NEW_MACHINE)
    )


def ssh_target(name: str, ssh: Ssh) -> SshTarget:
    """A machine that SSH reaches."""
    return SshTarget(name, ssh.url(), ssh)


@dataclass(frozen=True)
class InventoryTarget(Target):
    """A host of an Ansible inventory, reached as Ansible reaches it: jump hosts, keys, variables and all.

    Args:
        inventory: A file or a folder.
    """

    inventory: Path

    @property
    def address(self) -> str:
        """How it is reached, for people."""
        return f"{self.name} of {self.inventory}"


def inventory_target(name: str, inventory: Path) -> InventoryTarget:
    """A host of an inventory."""
    hostspec = f"ansible://{name}?ansible_inventory={quote(str(inventory))}&force_ansible=true"
    return InventoryTarget(name, hostspec, inventory)
