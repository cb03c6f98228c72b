"""A double of a Proxmox VE cluster: its API over TLS with tokens, and `pvesh` and `qm` as root.

It answers as the real one does, where that is unkind: who may, what a parameter may be, locks, digests,
tasks, the message in the status line alone.

Sources: pve-http-server src/PVE/APIServer/AnyEvent.pm and Formatter/Standard.pm (status line: the message's
first line; the body's `errors`; DELETE with a body is 501; multipart: the file's field is `filename`; 401),
qemu-server src/PVE/API2/Qemu.pm (check_hostpci_perm, create_vm, the digest), src/PVE/QemuServer/PCI.pm
(hostpci), pve-guest-common src/PVE/AbstractConfig.pm (locks), pve-common src/PVE/Tools.pm
(assert_if_modified, lock_file), pve-manager PVE/API2/Hardware/PCI.pm, Cluster/Mapping/PCI.pm, Tasks.pm,
PVE/CLI/pvesh.pm, pve-storage src/PVE/API2/Storage/Status.pm (upload), pve-access-control
src/PVE/AccessControl.pm (verify_token).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN_ID, SECRET = "gpukiln@pve!ci", "8a7f1b2e-1111-2222-3333-444455556666"
TOKEN = f"{TOKEN_ID}={SECRET}"
ROOT = "root@pam"
BLACKLIST = "05;06;0b"
PCI = r"(?:[a-f0-9]{4,}:)?[a-f0-9]{2}:[a-f0-9]{2}(?:\.[a-f0-9])?"
HOSTPCI = {
    "host",
    "mapping",
    "rombar",
    "romfile",
    "pcie",
    "x-vga",
    "legacy-igd",
    "mdev",
    "vendor-id",
    "device-id",
}
CONFIG = re.compile(
    r"(hostpci|scsi|ide|sata|virtio|net|serial|ipconfig|unused)\d+|name|ostype|machine|bios|efidisk0|cpu|cores|memory"
    r"|balloon|scsihw|vga|boot|citype|ciuser|sshkeys|agent|tags|description|onboot|template|lock|args"
)
PRIVILEGES = [
    "VM.Audit",
    "VM.Config.HWType",
    "VM.Config.Disk",
    "VM.Config.Cloudinit",
    "VM.Allocate",
    "Mapping.Use",
    "Datastore.AllocateSpace",
    "Datastore.AllocateTemplate",
    "Sys.Audit",
]
UNKNOWN = "property is not defined in schema and the schema does not allow additional properties"


class Failed(Exception):  # noqa: N818 - what it is called by the caller
    """An answer that is an error."""

    def __init__(self, status: int, message: str, errors: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.errors = status, message, errors or {}


class Silence(Exception):  # noqa: N818 - see above
    """No answer: the connection ends."""


def parameter(**errors: str) -> Failed:
    """raise_param_exc."""
    return Failed(
        400, "Parameter verification failed.", {name.replace("_", "-"): told for name, told in errors.items()}
    )


def device(
    vendor: str, number: str, kind: str, group: int, name: str, sub: str = "10de:1467"
) -> dict[str, Any]:
    """A device as PVE::SysFSTools::lspci lists it."""
    subvendor, subdevice = sub.split(":")
    return {
        "vendor": f"0x{vendor}",
        "device": f"0x{number}",
        "class": f"0x{kind}",
        "iommugroup": group,
        "device_name": name,
        "vendor_name": "NVIDIA Corporation" if vendor == "10de" else "Intel Corporation",
        "subsystem_vendor": f"0x{subvendor}",
        "subsystem_device": f"0x{subdevice}",
    }


def machine() -> dict[str, dict[str, Any]]:
    """A host with an A10 alone in its group, a card of four functions, and a T4 beside a network card."""
    return {
        "0000:00:01.0": device("8086", "460d", "060400", 2, "PCIe root port"),
        "0000:00:1f.0": device("8086", "7a04", "060100", 5, "LPC bridge"),
        "0000:01:00.0": device("10de", "2236", "030200", 14, "GA102GL [A10]"),
        "0000:02:00.0": device("10de", "1e04", "030000", 2, "TU102 [GeForce RTX 2080 Ti]"),
        "0000:02:00.1": device("10de", "10f7", "040300", 2, "TU102 High Definition Audio Controller"),
        "0000:02:00.2": device("10de", "1ad6", "0c0330", 2, "TU102 USB 3.1 Host Controller"),
        "0000:02:00.3": device("10de", "1ad7", "0c8000", 2, "TU102 USB Type-C UCSI Controller"),
        "0000:03:00.0": device("10de", "1eb8", "030200", 16, "TU104GL [Tesla T4]"),
        "0000:04:00.0": device("8086", "1533", "020000", 16, "I210 Gigabit Network Connection"),
    }


def entry(node: str, address: str, one: dict[str, Any]) -> str:
    """An entry of a resource mapping that is right for a device."""
    text = (
        f"id={one['vendor']}:{one['device']},iommugroup={one['iommugroup']},node={node},path={address},"
        f"subsystem-id={one['subsystem_vendor']}:{one['subsystem_device']}"
    )
    return text.replace("0x", "")


@dataclass
class Cluster:
    """The state of it; tests change it as they like.

    Args:
        vms: By number: {node, status, config}.
        faults: What happens instead of a call: its method, a pattern of its path, and what to do.
        polls: How often a task is running before it has ended.
        calls: "METHOD PATH" of each, in their order.
        lent: What the file of a lock says instead of being free: {VMID: message}.
    """

    nodes: dict[str, str] = field(default_factory=lambda: {"pve1": "online"})
    version: str = "8.4.1"
    memory: int = 64 << 30  # of each node
    pci: dict[str, dict[str, Any]] = field(default_factory=machine)
    vms: dict[int, dict[str, Any]] = field(default_factory=dict)
    mappings: dict[str, dict[str, Any]] = field(default_factory=dict)
    storages: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, bytes] = field(default_factory=dict)
    bridges: list[str] = field(default_factory=lambda: ["vmbr0"])
    rights: dict[str, set[str]] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[tuple[str, str, Callable[[], Any]]] = field(default_factory=list)
    polls: int = 1
    calls: list[str] = field(default_factory=list)
    uploads: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def call(self, method: str, path: str, given: dict[str, Any], user: str) -> Any:
        """One call; `given` has texts, and the bytes of an upload."""
        with self.lock:
            self.calls.append(f"{method} {path}")
            after = None
            for one in list(self.faults):
                if one[0] == method and re.fullmatch(one[1], path):
                    self.faults.remove(one)
                    after = one[2]()
                    break
            data = self._call(method, path, given, user)
            if after is not None:
                after()
            return data

    def _call(self, method: str, path: str, given: dict[str, Any], user: str) -> Any:
        for pattern, verbs in ROUTES:
            if found := re.fullmatch(pattern, path):
                name = verbs.get(method)
                if name is None:
                    raise Failed(501, f"Method '{method} /{path}' not implemented")
                node = found.groupdict().get("node")
                if node is not None and node not in self.nodes:
                    raise Failed(
                        595, f"hostname lookup '{node}' failed - failed to get address info for: {node}"
                    )
                if node is not None and self.nodes[node] != "online":
                    raise Failed(595, "No route to host")
                return getattr(self, name)(given, user, **found.groupdict())
        raise Failed(501, f"Method '{method} /{path}' not implemented")

    def may(self, user: str, path: str, *privileges: str, any_of: bool = False) -> bool:
        if user == ROOT:
            return True
        has: set[str] = set()
        parts = path.strip("/").split("/")
        for count in range(len(parts) + 1):
            has |= self.rights.get("/" + "/".join(parts[:count]), set())
        return bool(has & set(privileges)) if any_of else set(privileges) <= has

    def check(self, user: str, path: str, *privileges: str, any_of: bool = False) -> None:
        if not self.may(user, path, *privileges, any_of=any_of):
            raise Failed(403, f"Permission check failed ({path}, {'|'.join(privileges)})")

    # What anybody may ask

    def get_version(self, *_: Any) -> Any:
        return {"version": self.version, "release": self.version[:3], "repoid": "abcdef12"}

    def get_nodes(self, _: dict[str, Any], user: str) -> Any:
        """Without Sys.Audit only name and status (pve-manager, PVE/API2/Nodes.pm; PVE/API2Tools.pm)."""
        return [
            {
                "node": name,
                "status": status,
                "type": "node",
                **({"maxmem": self.memory} if self.may(user, f"/nodes/{name}", "Sys.Audit") else {}),
            }
            for name, status in self.nodes.items()
        ]

    def get_resources(self, given: dict[str, Any], user: str) -> Any:
        del given
        return [
            {
                "id": f"{one.get('type', 'qemu')}/{number}",
                "vmid": number,
                "node": one["node"],
                "type": one.get("type", "qemu"),
                "status": one["status"],
                "name": one["config"].get("name", ""),
            }
            for number, one in self.vms.items()
            if self.may(user, f"/vms/{number}", "VM.Audit")
        ]

    def get_nextid(self, given: dict[str, Any], _: str) -> Any:
        if "vmid" in given:
            if int(given["vmid"]) in self.vms:
                raise parameter(vmid=f"VM {given['vmid']} already exists")
            return str(given["vmid"])
        return str(next(number for number in range(100, 999) if number not in self.vms))

    def get_permissions(self, given: dict[str, Any], user: str) -> Any:
        path = given["path"]
        has = {name for name in PRIVILEGES if self.may(user, path, name)}
        return {path: dict.fromkeys(sorted(has), 1)}

    def get_pci(self, given: dict[str, Any], user: str, node: str) -> Any:
        del node
        self.check(user, "/", "Sys.Audit", "Sys.Modify", any_of=True)
        left_out = [one for one in given.get("pci-class-blacklist", BLACKLIST).split(";") if one]
        return [
            {"id": address, **one}
            for address, one in self.pci.items()
            if not any(one["class"].startswith(f"0x{kind}") for kind in left_out)
        ]

    def get_mappings(self, _: dict[str, Any], user: str) -> Any:
        wanted = ("Mapping.Modify", "Mapping.Use", "Mapping.Audit")
        return [
            {"id": name, "type": "pci", **one}
            for name, one in self.mappings.items()
            if self.may(user, f"/mapping/pci/{name}", *wanted, any_of=True)
        ]

    def get_storages(self, _: dict[str, Any], user: str, node: str) -> Any:
        del node
        wanted = ("Datastore.Audit", "Datastore.AllocateSpace")
        return [
            {"storage": name, **one}
            for name, one in self.storages.items()
            if self.may(user, f"/storage/{name}", *wanted, any_of=True)
        ]

    def get_network(self, *_: Any, node: str) -> Any:
        del node
        return [{"iface": name, "type": "bridge", "active": 1} for name in self.bridges]

    # Virtual machines

    def get_vms(self, _: dict[str, Any], user: str, node: str) -> Any:
        return [
            {"vmid": number, "name": one["config"].get("name", ""), "status": one["status"]}
            for number, one in self.vms.items()
            if one["node"] == node
            and one.get("type", "qemu") == "qemu"
            and self.may(user, f"/vms/{number}", "VM.Audit")
        ]

    def vm(self, node: str, vmid: str) -> dict[str, Any]:
        one = self.vms.get(int(vmid))
        if one is None or one["node"] != node:
            raise Failed(500, f"Configuration file 'nodes/{node}/qemu-server/{vmid}.conf' does not exist")
        return one

    @staticmethod
    def digest(config: dict[str, Any]) -> str:
        return hashlib.sha1(json.dumps(config, sort_keys=True).encode(), usedforsecurity=False).hexdigest()

    def get_config(self, _: dict[str, Any], user: str, node: str, vmid: str) -> Any:
        self.check(user, f"/vms/{vmid}", "VM.Audit")
        config = self.vm(node, vmid)["config"]
        return {**config, "digest": self.digest(config)}

    def get_current(self, _: dict[str, Any], user: str, node: str, vmid: str) -> Any:
        self.check(user, f"/vms/{vmid}", "VM.Audit")
        return {"status": self.vm(node, vmid)["status"], "vmid": int(vmid)}

    def put_config(self, given: dict[str, Any], user: str, node: str, vmid: str) -> Any:
        config = self.vm(node, vmid)["config"]
        gone = [one for one in given.get("delete", "").split(",") if one]
        new = {name: value for name, value in given.items() if name not in ("delete", "digest")}
        for name in [*new, *gone]:
            if not CONFIG.fullmatch(name):
                raise parameter(**{name: UNKNOWN})
        for name in gone:  # of what stands there: its value is what counts
            if name.startswith("hostpci") and name in config:
                self.hostpci(user, vmid, name, config[name])
        for name, value in new.items():
            if name.startswith("hostpci"):
                self.hostpci(user, vmid, name, value)
            else:
                self.check(user, f"/vms/{vmid}", "VM.Config.HWType")
        if given.get("digest") and given["digest"] != self.digest(config):
            raise Failed(500, "detected modified configuration - file changed by other user? Try again.")
        if config.get("lock"):
            raise Failed(500, f"VM is locked ({config['lock']})")
        for name in gone:
            config.pop(name, None)
        config.update(new)

    def hostpci(self, user: str, vmid: str, name: str, value: str) -> None:
        """The form, and check_hostpci_perm."""
        values = {}
        for part in value.split(","):
            key, equals, text = part.partition("=")
            values[key if equals else "host"] = text if equals else part
        if wrong := set(values) - HOSTPCI:
            told = f"invalid format - format error\n{wrong.pop()}: property is not defined in schema"
            raise parameter(**{name: told})
        if "host" in values and not re.fullmatch(rf"{PCI}(;{PCI})*", values["host"]):
            raise parameter(
                **{name: "invalid format - format error\nhost: value does not match the regex pattern"}
            )
        if user == ROOT:
            return
        if "host" in values:
            raise Failed(500, f"only root can set '{name}' config for non-mapped devices")
        if "mapping" not in values:
            raise Failed(500, "either 'host' or 'mapping' must be set.")
        self.check(user, f"/mapping/pci/{values['mapping']}", "Mapping.Use")
        self.check(user, f"/vms/{vmid}", "VM.Config.HWType")

    def create_vm(self, given: dict[str, Any], user: str, node: str) -> Any:
        number = int(given.pop("vmid"))
        self.check(user, f"/vms/{number}", "VM.Allocate")
        for name, value in given.items():
            if not CONFIG.fullmatch(name):
                raise parameter(**{name: UNKNOWN})
            if name.startswith("hostpci"):
                self.hostpci(user, str(number), name, value)
        if "sshkeys" in given and re.search(r"[\s]", given["sshkeys"]):
            raise parameter(sshkeys="invalid format - invalid urlencoded string: " + given["sshkeys"].strip())
        source, disk = "", given.get("scsi0", "")
        if found := re.search(r"import-from=([^,]+)", disk):
            source = found[1]
            if not re.match(r"[^:,]+:0,", disk):
                raise parameter(
                    scsi0="'import-from' requires special syntax - use <storage ID>:0,import-from=<source>"
                )
            if source.startswith("/"):
                if user != ROOT:
                    raise Failed(500, "Only root can pass arbitrary filesystem paths.")
                if not Path(source).exists():
                    raise Failed(500, f"unable to stat '{source}'")
            elif source not in self.volumes:
                raise Failed(500, f"volume '{source}' does not exist")
        if number in self.vms:
            raise Failed(500, f"unable to create VM {number} - VM {number} already exists on node '{node}'")
        self.vms[number] = {"node": node, "status": "stopped", "config": {"lock": "create"}}

        def done() -> None:
            config = {name: value for name, value in given.items() if name != "sshkeys"}
            if "sshkeys" in given:
                config["sshkeys"] = given["sshkeys"]
            for name, value in given.items():
                if found := re.match(r"([^:,]+):(\d+|cloudinit)(?:,|$)", value):
                    what = "cloudinit" if found[2] == "cloudinit" else f"disk-{len(self.volumes)}"
                    volume = f"{found[1]}:vm-{number}-{what}"
                    self.volumes[volume] = b""
                    rest = [one for one in value.split(",")[1:] if not one.startswith("import-from=")]
                    config[name] = ",".join(
                        [volume, *rest, "media=cdrom" if what == "cloudinit" else "size=2G"]
                    )
            net = given.get("net0", "")
            config["net0"] = net.replace("virtio,", "virtio=BC:24:11:2C:5E:0D,", 1)
            self.vms[number]["config"] = config

        def failed() -> None:
            for volume in [one for one in self.volumes if f":vm-{number}-" in one]:
                del self.volumes[volume]
            self.vms.pop(number, None)

        return self.task(node, "qmcreate", str(number), user, done, failed)

    def put_resize(self, given: dict[str, Any], user: str, node: str, vmid: str) -> Any:
        self.check(user, f"/vms/{vmid}", "VM.Config.Disk")
        config = self.vm(node, vmid)["config"]

        def done() -> None:
            config[given["disk"]] = re.sub(r"size=\w+", f"size={given['size']}", config[given["disk"]])

        return self.task(node, "resize", vmid, user, done)

    def delete_vm(self, given: dict[str, Any], user: str, node: str, vmid: str) -> Any:
        one = self.vm(node, vmid)
        self.check(user, f"/vms/{vmid}", "VM.Allocate")
        if given.get("skiplock") and user != ROOT:
            raise parameter(skiplock="Only root may use this option.")
        if one["config"].get("lock") and not given.get("skiplock"):
            raise Failed(500, f"VM is locked ({one['config']['lock']})")

        def done() -> None:
            for volume in [name for name in self.volumes if f":vm-{vmid}-" in name]:
                del self.volumes[volume]
            self.vms.pop(int(vmid), None)

        return self.task(node, "qmdestroy", vmid, user, done)

    # Storage

    def upload(self, given: dict[str, Any], user: str, node: str, storage: str) -> Any:
        self.check(user, f"/storage/{storage}", "Datastore.AllocateTemplate")
        content, (name, data) = given["content"], given["filename"]
        if content not in self.storages[storage]["content"].split(","):
            raise Failed(500, f"storage '{storage}' does not support '{content}' content")
        if not re.fullmatch(r"[a-zA-Z0-9\-\.\+\=\_]+\.(ova|qcow2|raw|vmdk)", name):
            raise parameter(filename="invalid filename or wrong extension")
        self.uploads += 1

        def done() -> None:
            if hashlib.new(given["checksum-algorithm"], data).hexdigest() != given["checksum"]:
                raise Failed(500, f"checksum mismatch: got '...' != expect '{given['checksum']}'")
            self.volumes[f"{storage}:{content}/{name}"] = data

        return self.task(node, "imgcopy", "", user, done)

    def get_content(self, given: dict[str, Any], user: str, node: str, storage: str) -> Any:
        del node
        self.check(user, f"/storage/{storage}", "Datastore.Audit", "Datastore.AllocateSpace", any_of=True)
        begin = f"{storage}:{given.get('content', '')}"
        return [
            {"volid": name, "size": len(data)}
            for name, data in self.volumes.items()
            if name.startswith(begin)
        ]

    def delete_content(self, _: dict[str, Any], user: str, node: str, storage: str, volume: str) -> Any:
        self.check(
            user, f"/storage/{storage}", "Datastore.Allocate", "Datastore.AllocateTemplate", any_of=True
        )
        if volume not in self.volumes:
            raise Failed(500, f"volume '{volume}' does not exist")
        return self.task(node, "imgdel", "", user, lambda: self.volumes.pop(volume, None))

    # Tasks

    def task(
        self,
        node: str,
        kind: str,
        about: str,
        user: str,
        done: Callable[[], Any],
        failed: Callable[[], Any] = lambda: None,
    ) -> str:
        """Begin one; it is done when it has been asked for so often, at once for pvesh."""
        begun = int(time.time())
        upid = f"UPID:{node}:{0xA000 + len(self.tasks):08X}:0000FFFF:{begun:08X}:{kind}:{about}:{user}:"
        self.tasks[upid] = {
            "left": self.polls,
            "done": done,
            "failed": failed,
            "status": "running",
            "exit": "",
            "at": begun,
        }
        if user == ROOT:
            self.end(upid)
        return upid

    def end(self, upid: str, words: str = "") -> None:
        """It ends: well, or with these words."""
        one = self.tasks[upid]
        if one["status"] == "stopped":
            return
        one["status"] = "stopped"
        try:
            if words:
                raise Failed(500, words)
            one["done"]()
            one["exit"] = "OK"
        except Failed as error:
            one["failed"]()
            one["exit"] = error.message

    def get_tasks(self, given: dict[str, Any], user: str, node: str) -> Any:
        found = []
        for upid, one in self.tasks.items():
            _, where, _, _, start, kind, about, who, _ = upid.split(":")
            owner, _, token = who.partition("!")
            wanted = given.get("typefilter", kind) == kind and given.get("vmid", about) == about
            if (
                where == node
                and wanted
                and int(start, 16) >= int(given.get("since", 0))
                and user in (ROOT, who, owner)
            ):
                found.append(
                    {
                        "upid": upid,
                        "user": owner,
                        "type": kind,
                        "id": about,
                        **({"tokenid": token} if token else {}),
                    }
                )
                found[-1]["status"] = one["exit"] if one["status"] == "stopped" else "RUNNING"
        return found

    def get_task(self, _: dict[str, Any], __: str, node: str, upid: str) -> Any:
        del node
        one = self.known(upid)
        if one["status"] == "running":
            one["left"] -= 1
            if one["left"] < 0:
                self.end(upid)
        return {"upid": upid, "status": one["status"], **({"exitstatus": one["exit"]} if one["exit"] else {})}

    def get_log(self, given: dict[str, Any], _: str, node: str, upid: str) -> Any:
        del node
        self.known(upid)
        lines = ["transferred 1.0 GiB of 2.0 GiB (50.00%)", "transferred 2.0 GiB of 2.0 GiB (100.00%)"]
        return [{"n": n, "t": text} for n, text in enumerate(lines, 1)][int(given.get("start", 0)) :] or [
            {"n": 1, "t": "no content"}
        ]

    def stop_task(self, _: dict[str, Any], __: str, node: str, upid: str) -> Any:
        del node
        self.known(upid)
        self.end(upid, "received interrupt")

    def known(self, upid: str) -> dict[str, Any]:
        if upid not in self.tasks:
            raise parameter(upid="no such task")
        return self.tasks[upid]


NODE, VM = r"nodes/(?P<node>[^/]+)", r"nodes/(?P<node>[^/]+)/qemu/(?P<vmid>\d+)"
STORE = r"nodes/(?P<node>[^/]+)/storage/(?P<storage>[^/]+)"
ROUTES: list[tuple[str, dict[str, str]]] = [
    ("version", {"GET": "get_version"}),
    ("nodes", {"GET": "get_nodes"}),
    ("cluster/resources", {"GET": "get_resources"}),
    ("cluster/nextid", {"GET": "get_nextid"}),
    ("cluster/mapping/pci", {"GET": "get_mappings"}),
    ("access/permissions", {"GET": "get_permissions"}),
    (f"{NODE}/hardware/pci", {"GET": "get_pci"}),
    (f"{NODE}/storage", {"GET": "get_storages"}),
    (f"{NODE}/network", {"GET": "get_network"}),
    (f"{NODE}/qemu", {"GET": "get_vms", "POST": "create_vm"}),
    (VM, {"DELETE": "delete_vm"}),
    (f"{VM}/config", {"GET": "get_config", "PUT": "put_config"}),
    (f"{VM}/resize", {"PUT": "put_resize"}),
    (f"{VM}/status/current", {"GET": "get_current"}),
    (f"{STORE}/upload", {"POST": "upload"}),
    (f"{STORE}/content", {"GET": "get_content"}),
    (f"{STORE}/content/(?P<volume>.+)", {"DELETE": "delete_content"}),
    (f"{NODE}/tasks", {"GET": "get_tasks"}),
    (f"{NODE}/tasks/(?P<upid>[^/]+)", {"DELETE": "stop_task"}),
    (f"{NODE}/tasks/(?P<upid>[^/]+)/status", {"GET": "get_task"}),
    (f"{NODE}/tasks/(?P<upid>[^/]+)/log", {"GET": "get_log"}),
]


def handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    """What answers over TLS."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path).removeprefix("/api2/json/")
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            try:
                user = self.user()
                if length and self.command not in ("PUT", "POST"):
                    raise Failed(501, f"Unexpected content for method '{self.command}'")
                given = dict(parse_qsl(url.query, keep_blank_values=True)) | self.form(body)
                data, error = cluster.call(self.command, path, given, user), None
            except Failed as failed:
                data, error = None, failed
            except Silence:
                self.close_connection = True
                return
            text = json.dumps({"data": data, **({"errors": error.errors} if error and error.errors else {})})
            raw = b"" if error and error.status == 401 else text.encode()
            # the first line alone: response() in AnyEvent.pm
            self.send_response(
                error.status if error else 200, error.message.splitlines()[0] if error else "OK"
            )
            self.send_header("Content-Type", "application/json;charset=UTF-8")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked was killed
                self.wfile.write(raw)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def user(self) -> str:
            found = re.fullmatch(r"PVEAPIToken=([^=]+)=(.*)", self.headers.get("Authorization", ""))
            if not found:
                raise Failed(401, "No ticket")
            if found[1] != TOKEN_ID:
                owner, _, name = found[1].partition("!")
                raise Failed(401, f"no such token '{name}' for user '{owner}'")
            if found[2] != SECRET:
                raise Failed(401, "invalid token value!")
            return TOKEN_ID

        def form(self, body: bytes) -> dict[str, Any]:
            kind = self.headers.get("Content-Type", "")
            if not body:
                return {}
            if not kind.startswith("multipart/form-data"):
                return dict(parse_qsl(body.decode(), keep_blank_values=True))
            parts = BytesParser().parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + body).get_payload()
            found: dict[str, Any] = {}
            for part in parts if isinstance(parts, list) else []:
                name = part.get_param("name", header="content-disposition")
                data = part.get_payload(decode=True)
                assert isinstance(data, bytes)
                if (file := part.get_filename()) is None:
                    found[str(name)] = data.decode()
                elif name == "filename":
                    found["filename"] = (file, data)
                else:  # "wrong field name for file upload - abort upload"
                    raise Failed(501, "upload failed")
            return found

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that does not trust the certificate, or was killed, goes away."""


@contextlib.contextmanager
def serve(cluster: Cluster, folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Serve it on loopback.

    Yields:
        HOST:PORT, the file of its CA, and the SHA-256 of its certificate.
    """
    ca, pair, seen = certificate(folder)
    server = Quiet(("127.0.0.1", 0), handler(cluster))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield f"127.0.0.1:{server.server_port}", ca, seen


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def certificate(folder: Path) -> tuple[Path, Path, str]:
    """A CA as a host makes its own, and a certificate of it: files, and the certificate's SHA-256."""
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, key: Any, issuer: x509.Name | None, by: Any, *, of: bool) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=of, path_length=None), critical=True)
        )
        if not of:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            made = made.add_extension(names, critical=False)
        return made.sign(by, hashes.SHA256())

    top, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = signed("Proxmox Virtual Environment", top, None, top, of=True)
    leaf = signed("pve1", own, ca.subject, top, of=False)
    (folder / "pve-root-ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pair = own.private_bytes(serialization.Encoding.PEM, *plain) + leaf.public_bytes(
        serialization.Encoding.PEM
    )
    (folder / "pve-ssl.pem").write_bytes(pair)
    return (
        folder / "pve-root-ca.pem",
        folder / "pve-ssl.pem",
        leaf.fingerprint(hashes.SHA256()).hex(":").upper(),
    )


def pvesh(cluster: Cluster, words: list[str], node: str = "pve1") -> tuple[str, str, int]:
    """What `pvesh` or `qm set` writes on standard output and error, and its exit status.

    As PVE/CLI/pvesh.pm: JSON on standard output, below what a task says; what is wrong on standard error, on
    which perl writes too. Values are told as `-name value` or `--name value`.
    """
    name, verb, where, *rest = words
    method = {"get": "GET", "set": "PUT", "create": "POST", "delete": "DELETE"}[verb]
    path = f"nodes/{node}/qemu/{where}/config" if Path(name).name == "qm" else where.strip("/")
    given = {key.lstrip("-"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}
    given.pop("output-format", None)
    noise = "perl: warning: Setting locale failed.\n"
    try:
        data = cluster.call(method, path, given, ROOT)
    except Failed as failed:
        if failed.status != 400:
            return "", f"{noise}{failed.message}\n", 255
        told = "".join(f"{key}: {text}\n" for key, text in failed.errors.items())
        return "", f"{noise}400 Parameter verification failed.\n{told}pvesh {verb} <api_path> [OPTIONS]\n", 2
    said = "transferred 2.0 GiB of 2.0 GiB (100.00%)\n" if str(data).startswith("UPID") else ""
    return said + (json.dumps(data) + "\n" if data is not None else ""), noise, 0


# Asks the process of the test, whose state it is.
PROGRAM = """#!{python} -IS
import http.client, json, sys
asked = http.client.HTTPConnection("127.0.0.1", {port})
asked.request("POST", "/", json.dumps(sys.argv))
out, err, code = json.load(asked.getresponse())
sys.stderr.write(err)
sys.stdout.write(out)
sys.exit(code)
"""


@contextlib.contextmanager
def programs(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """`pvesh` and `qm` in a folder for PATH."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            words = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            raw = json.dumps(pvesh(cluster, words)).encode()
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked was killed
                self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    folder.mkdir(exist_ok=True)
    for name in ("pvesh", "qm"):
        file = folder / name
        file.write_text(PROGRAM.format(python=sys.executable, port=server.server_port))
        file.chmod(0o755)
    with running(server):
        yield folder


def status(code: int, message: str) -> Callable[[], Any]:
    """A fault: this answer instead."""

    def fault() -> Any:
        raise Failed(code, message)

    return fault


def silence() -> Any:
    """A fault: no answer, and nothing was done."""
    raise Silence


def done_and_silent() -> Any:
    """A fault: it was done, and no answer comes."""
    return silence


def host(root: Path, cluster: Cluster, drivers: dict[str, str], cmdline: str = "quiet iommu=pt") -> Path:
    """The kernel of a host, as files below a folder."""
    for number in {one["iommugroup"] for one in cluster.pci.values() if one["iommugroup"] >= 0}:
        (root / f"sys/kernel/iommu_groups/{number}").mkdir(parents=True, exist_ok=True)
    for address, one in cluster.pci.items():
        folder = root / f"sys/bus/pci/devices/{address}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("vendor", "device", "class"):
            (folder / name).write_text(f"{one[name]}\n")
        if one["class"].startswith("0x0604"):
            (folder / "pci_bus").mkdir(exist_ok=True)
        if one["iommugroup"] >= 0:
            (folder / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{one['iommugroup']}")
        if driver := drivers.get(address):
            (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(f"../../drivers/{driver}")
    (root / "proc/sys/kernel").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/osrelease").write_text("6.8.12-4-pve\n")
    (root / "proc/cmdline").write_text(f"BOOT_IMAGE=/vmlinuz root=/dev/x {cmdline}\n")
    return root
