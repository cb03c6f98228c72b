"""Gathers everything that decides whether a VM can get a GPU; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import GpukilnError, UsageError
from gpukiln.nodes.passthrough import host as hosts
from gpukiln.nodes.passthrough.api import Pve
from gpukiln.nodes.passthrough.host import Host


@dataclass(frozen=True)
class Guest:
    """A virtual machine of the node.

    Args:
        config: Its configuration, with what is pending; without the digest.
    """

    id: int
    name: str
    status: str
    config: dict[str, Any]
    digest: str = ""

    @property
    def is_template(self) -> bool:
        # Proxmox VE has booleans as 0 and 1.
        return bool(int(self.config.get("template", 0)))


@dataclass(frozen=True)
class PveFacts:
    """A node, a VM and the devices.

    Args:
        user: Who asks Proxmox VE.
        devices: As /nodes/NODE/hardware/pci lists them, bridges too, by address.
        guests: The other VMs of the node that may be seen.
        sees_all: Whether every VM of the node may be seen.
        rights: What the token may, by path; None for root@pam, who may all.
        mapping: The resource mapping asked for, None where an address was.
        host: What its kernel says; None where it could not be read.
        unseen: Why not.
        memory: The node's, in MiB; None where who asks may not see it.
    """

    user: str
    version: str
    node: str
    devices: dict[str, dict[str, Any]]
    guests: tuple[Guest, ...]
    mappings: dict[str, dict[str, Any]]
    sees_all: bool
    rights: Mapping[str, frozenset[str]] | None
    mapping: dict[str, Any] | None
    host: Host | None
    unseen: str = ""
    memory: int | None = None


def find_vm(pve: Pve, number: int) -> tuple[str, Guest]:
    """A VM and the node that has it.

    Raises:
        UsageError: There is none, or it is a container.
    """
    # Containers are listed as type vm, too.
    vms = {int(vm["vmid"]): vm for vm in pve.get("cluster/resources", type="vm")}
    if number not in vms:
        seen = ", ".join(f"{vm_id} {vms[vm_id].get('name', '')}".strip() for vm_id in sorted(vms)) or "none"
        raise UsageError(
            f"{pve.target.pve} has no VM {number} that {pve.user} may see", hint=f"there are: {seen}"
        )
    if vms[number]["type"] != "qemu":
        raise UsageError(
            f"{number} is a container, which uses the host's own driver",
            hint="only a VM can be given a PCI device",
        )
    node = str(vms[number]["node"])
    return node, read_guest(pve, node, number, vms[number])


def read_guest(pve: Pve, node: str, number: int, listed: Mapping[str, Any] | None = None) -> Guest:
    """A VM as it is configured now."""
    # Without `current`: pending changes count, since they take effect at the start that follows.
    config = dict(pve.get(f"nodes/{node}/qemu/{number}/config"))
    status = (
        pve.get(f"nodes/{node}/qemu/{number}/status/current")["status"]
        if listed is None
        else listed["status"]
    )
    return Guest(number, str(config.get("name", "")), str(status), config, str(config.pop("digest", "")))


def find_node(pve: Pve, name: str) -> str:
    """The node that was named, or the only one.

    Raises:
        UsageError: It is not in the cluster, or several are and none was named.
    """
    names = sorted(str(node_row["node"]) for node_row in pve.get("nodes"))
    if name and name not in names:
        raise UsageError(f"{pve.target.pve} has no node {name!r}", hint=f"there are: {', '.join(names)}")
    if not name and len(names) > 1:
        raise UsageError(f"which node? {pve.target.pve} has {', '.join(names)}", hint="--node NAME")
    return name or names[0]


def gather_facts(pve: Pve, node: str, *, mapping: str, vm: int | None, ssh: str) -> PveFacts:
    """Look at a node's devices, VMs and kernel.

    Args:
        mapping: Name of the mapping asked for, or empty.
        vm: The VM that is to get the GPU, which is not among the other guests; None: one that is to be made.
        ssh: Where to look at the kernel where Proxmox VE is reached over HTTPS; or empty.
    """
    # Bridges are filtered by default, and belong to the groups: PVE/API2/Hardware/PCI.pm.
    devices = {
        str(device["id"]): device
        for device in pve.get(f"nodes/{node}/hardware/pci", **{"pci-class-blacklist": ""})
    }
    mappings = {str(mapping_row["id"]): mapping_row for mapping_row in pve.get("cluster/mapping/pci")}
    # A token's privileges are asked path by path: inheritance is resolved by Proxmox VE.
    paths = ("/vms", f"/vms/{vm}" if vm else "/vms", *([f"/mapping/pci/{mapping}"] if mapping else []))
    # root@pam needs no privileges.
    rights = None if pve.is_root else privileges(pve, paths)
    others = tuple(
        read_guest(pve, node, int(row["vmid"]), row)
        for row in pve.get(f"nodes/{node}/qemu")
        if int(row["vmid"]) != vm
    )
    host, why = _host(pve, node, ssh)
    return PveFacts(
        user=pve.user,
        version=str(pve.get("version")["version"]),
        node=node,
        devices=devices,
        guests=others,
        mappings=mappings,
        sees_all=rights is None or "VM.Audit" in rights.get("/vms", frozenset()),
        rights=rights,
        mapping=mappings.get(mapping) if mapping else None,
        host=host,
        unseen=why,
        memory=_memory(pve, node),
    )


def _memory(pve: Pve, node: str) -> int | None:
    """In MiB; PVE/API2/Nodes.pm shows it only with Sys.Audit on the node."""
    sizes = [node_row.get("maxmem") for node_row in pve.get("nodes") if node_row["node"] == node]
    return int(sizes[0]) >> 20 if sizes and sizes[0] else None


def privileges(pve: Pve, paths: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """What the token may at these paths, inherited rights too."""
    by_path = {}
    for path in paths:
        answer = pve.get("access/permissions", path=path)
        by_path[path] = frozenset(name for privileges in answer.values() for name in privileges)
    return by_path


def _host(pve: Pve, node: str, ssh: str) -> tuple[Host | None, str]:
    if pve.target.https and not ssh:
        return None, f"the API does not report the drivers, kernel arguments and leases of {node}"
    # pvesh already runs there, so that no second address is needed.
    if not pve.target.https:
        ssh = "" if pve.target.pve == "local" else pve.target.pve
    try:
        host = hosts.inspect_host(ssh)
    except GpukilnError as error:
        return None, error.message
    # A cluster answers through any of its nodes; the kernel that counts is the node's.
    if host.name != node:
        return None, f"{ssh or 'this machine'} is {host.name}, and the VM is on {node}"
    return host, ""
