"""The machine to verify, and how testinfra reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gpukiln.ssh import HostKeys, Ssh


@dataclass(frozen=True)
class Target:
    """A machine as testinfra's `--hosts` names it: ``local://``, ``docker://NAME``, ``facts://FILE``.

    Args:
        name: What reports call it, for example the instance's id.
        hostspec: The value for testinfra's `--hosts`.
    """

    name: str
    hostspec: str

    @property
    def address(self) -> str:
        """The address for messages."""
        return self.hostspec.partition("?")[0]

    def ssh_config(self) -> str:
        """The text of an OpenSSH client configuration; ssh never asks for a password with it."""
        return Ssh(self.name).config_text()


@dataclass(frozen=True)
class SshTarget(Target):
    """A machine reached over SSH by a user with passwordless sudo, or root."""

    ssh: Ssh

    @property
    def address(self) -> str:
        """The address for messages."""
        return self.ssh.address

    def ssh_config(self) -> str:
        """The text of an OpenSSH client configuration for this machine."""
        return self.ssh.config_text()


def new_machine_target(name: str, host: str, *, port: int, user: str, private_key: Path) -> SshTarget:
    """A machine that has just booted, with a key that was generated for it."""
    return ssh_target(
        name, Ssh(host, port=port, user=user, private_key=private_key, host_keys=HostKeys.NEW_MACHINE)
    )


def ssh_target(name: str, ssh: Ssh) -> SshTarget:
    """A machine that SSH reaches."""
    return SshTarget(name, ssh.url(), ssh)


@dataclass(frozen=True)
class InventoryTarget(Target):
    """A host of an Ansible inventory, reached as Ansible reaches it, with jump hosts, keys and variables.

    Args:
        inventory: A file or a folder.
    """

    inventory: Path

    @property
    def address(self) -> str:
        """The address for messages."""
        return f"{self.name} of {self.inventory}"


def inventory_target(name: str, inventory: Path) -> InventoryTarget:
    """A host of an inventory."""
    # force_ansible makes testinfra use Ansible's own connection, with its become and jump hosts.
    hostspec = f"ansible://{name}?ansible_inventory={quote(str(inventory))}&force_ansible=true"
    return InventoryTarget(name, hostspec, inventory)
