"""Which machines to verify: hosts of an inventory, or URLs in the form of testinfra's --hosts."""

from __future__ import annotations

from pathlib import Path

from gpukiln.errors import UsageError
from gpukiln.nodes.playbook import PlaybookRequest, list_hosts
from gpukiln.ssh import URL_SYNTAX, is_ssh, parse_ssh
from gpukiln.verify.target import Target, inventory_target, ssh_target

LOCAL = "local://"


def find_targets(hosts: str, inventory: Path | None, limit: str = "") -> list[Target]:
    """Find the machines to verify.

    Args:
        hosts: Separated by commas: `ssh://[USER@]HOST[:PORT]`, reached with the user's own SSH configuration;
            `local://`, this machine; `ansible://PATTERN`, hosts of the inventory. Empty for the whole
            inventory.
        inventory: Ansible's; needed for its hosts alone.
        limit: An Ansible pattern, for the inventory's hosts.

    Returns:
        Each machine once, in the order given.

    Raises:
        UsageError: A host has another form, an inventory is missing or unnecessary, or no host is left.
    """
    targets: dict[str, Target] = {}
    # Without --hosts the whole inventory is meant, as with ansible-playbook.
    of_inventory = not hosts.strip(", ") or "ansible://" in hosts
    if not of_inventory and (inventory is not None or limit):
        raise UsageError(
            f"--hosts {hosts} names no host of an inventory, and "
            f"{'--inventory' if inventory else '--limit'} is given",
            hint=f"leave one of them out, or name the inventory's hosts too: --hosts {hosts},ansible://all",
        )
    for url in [part.strip() for part in hosts.split(",") if part.strip()] or ["ansible://all"]:
        kind, _, rest = url.partition("://")
        if kind == "ansible":
            host_targets: list[Target] = _of_inventory(rest, inventory, limit)
        elif kind == "local" and not rest:
            host_targets = [Target("localhost", LOCAL)]
        elif is_ssh(url):
            host_targets = [ssh_target(rest.partition("?")[0], parse_ssh(url))]
        else:
            raise UsageError(
                f"--hosts has {url!r}, wanted {URL_SYNTAX}, local:// or ansible://PATTERN",
                hint="invoke node.verify --hosts ssh://admin@192.0.2.1,local://",
            )
        # By name: a host that is named twice, or in two groups, is verified once.
        targets |= {target.name: target for target in host_targets}
    return list(targets.values())


def _of_inventory(pattern: str, inventory: Path | None, limit: str) -> list[Target]:
    if inventory is None:
        raise UsageError(
            "--inventory is missing", hint="name one, or machines: --hosts ssh://USER@HOST or local://"
        )
    if pattern not in ("", "all"):
        # Ansible's `:&` is the intersection: --limit narrows the pattern, and never widens it.
        limit = f"{pattern}:&{limit}" if limit else pattern
    names = list_hosts(PlaybookRequest("", inventory, limit=limit))
    return [inventory_target(name, inventory) for name in names]
