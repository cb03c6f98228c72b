"""Which machines to judge: an inventory's, or such as testinfra's --hosts names them."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from urllib.parse import urlsplit

from gpukiln.errors import UsageError
from gpukiln.nodes.playbook import Request, list_hosts
from gpukiln.verify.target import InventoryTarget, Target, UrlTarget

CONNECT_S = 20
_SSH = re.compile(
    r"ssh://(?:[^@/\s\[\]]+@)?(?:\[(?P<v6>[0-9a-fA-F:]+)\]|[^:/?\s\[\]]+)(?::(?P<port>\d{1,5}))?(?:\?\S*)?"
)


def find_targets(hosts: str, inventory: Path | None, limit: str = "") -> list[Target]:
    """Name the machines to judge.

    Args:
        hosts: Separated by commas: `ssh://[USER@]HOST[:PORT]`, reached with the user's own SSH configuration;
            `local://`, this machine; `ansible://PATTERN`, hosts of the inventory. Empty for the whole
            inventory.
        inventory: Ansible's; needed for its hosts alone.
        limit: An Ansible pattern, for the inventory's hosts.

    Returns:
        Each machine once, in the order given.

    Raises:
        UsageError: A host is not of these forms, an inventory is missing or needless, or no host is left.
    """
    targets: dict[str, Target] = {}
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
            found: list[Target] = _of_inventory(rest, inventory, limit)
        elif kind == "local" and not rest:
            found = [UrlTarget("localhost", name="localhost", url="local://")]
        elif _is_ssh(url):
            separator = "&" if "?" in url else "?"
            title = rest.partition("?")[0]
            found = [UrlTarget(title, name=title, url=f"{url}{separator}controlpersist=0&timeout=60")]
        else:
            raise UsageError(
                f"--hosts has {url!r}, wanted ssh://[USER@]HOST[:PORT], local:// or ansible://PATTERN",
                hint="invoke node.verify --hosts ssh://admin@192.0.2.1,local://",
            )
        targets |= {target.title: target for target in found}
    return list(targets.values())


def _of_inventory(pattern: str, inventory: Path | None, limit: str) -> list[Target]:
    if inventory is None:
        raise UsageError(
            "--inventory is missing", hint="name one, or machines: --hosts ssh://USER@HOST or local://"
        )
    if pattern not in ("", "all"):
        limit = f"{pattern}:&{limit}" if limit else pattern
    names = list_hosts(Request("", inventory, limit=limit))
    return [InventoryTarget(name, name=name, inventory=inventory) for name in names]


def _is_ssh(url: str) -> bool:
    found = _SSH.fullmatch(url)
    if found is None or int(found["port"] or 1) not in range(1, 65536):
        return False
    try:
        return not found["v6"] or ipaddress.ip_address(found["v6"]).version == 6
    except ValueError:
        return False


def ssh_command(url: str, command: str) -> list[str]:
    """The command line that gives a line to the shell of a machine's user.

    Args:
        url: `ssh://[USER@]HOST[:PORT]`.

    Raises:
        UsageError: It is no such URL.
    """
    if not _is_ssh(url) or "?" in url:
        raise UsageError(f"{url!r} is no ssh://[USER@]HOST[:PORT]")
    parts = urlsplit(url)
    return [
        "ssh",
        *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15", "-T"),
        *(["-p", str(parts.port)] if parts.port else []),
        *(["-l", parts.username] if parts.username else []),
        str(parts.hostname),
        "--",
        command,
    ]
