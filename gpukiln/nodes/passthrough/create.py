"""A VM of an exported image: looked at and planned, made, read back; what was half made is removed.

PVE imports a disk while it makes the VM (`import-from`, qemu-server PVE/API2/Qemu.pm): from a path of the
host's, which it takes from root@pam alone, or from a storage whose content has `import` (Proxmox VE 8.2 and
later), to which an image is uploaded with its checksum (pve-storage PVE/API2/Storage/Status.pm).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpukiln.errors import CheckFailedError, GpukilnError, IncompatibleError, UnavailableError, UsageError
from gpukiln.nodes.passthrough.api import IMPORT_S, LOOK_S, UPLOAD_S, Pve, PveTarget, UnansweredError, connect
from gpukiln.nodes.passthrough.facts import privileges, read_guest
from gpukiln.nodes.passthrough.model import PassthroughCheck, impossible, passed, refused, warned
from gpukiln.nodes.passthrough.values import parse_hostpci, parse_properties
from gpukiln.parsing import parse_json
from gpukiln.units import MIB, Memory

# The magic of a qcow2 file, also in its version 3 (qemu docs/interop/qcow2.txt).
QCOW2 = b"QFI\xfb"
SECTOR = 512
# Large enough that hashing, not reading, takes the time.
CHUNK = 8 << 20
UPLOADED_S = 600.0  # for the answer, when all was sent
KEY = re.compile(r"(?:ssh-|ecdsa-|sk-)\S+ \S+")
DISK = "scsi0"
HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9-]+)*")


@dataclass(frozen=True)
class VmOptions:
    """What was asked for, as it was typed."""

    image: str
    name: str
    storage: str
    import_storage: str
    memory: str
    cores: int
    disk_size: str
    bridge: str
    user: str
    ssh_keys: str
    ip: str
    unproven: bool


@dataclass(frozen=True)
class ImageFile:
    """An exported image's file.

    Args:
        format: qcow2 or raw.
        size: Of its disk, in bytes.
        sha256: The checksum that the file next to it has.
        record: The record that ami.export wrote, empty where there is none.
    """

    path: Path
    format: str
    size: int
    sha256: str
    record: dict[str, Any]


@dataclass(frozen=True)
class VmPlan:
    """A VM that is to be made.

    Args:
        config: The settings sent to Proxmox VE, without the disk.
    """

    node: str
    vm: int
    image: ImageFile
    config: dict[str, str]
    checks: tuple[PassthroughCheck, ...]
    keys: str
    grow_mib: int

    @property
    def public_config(self) -> dict[str, str]:
        """The same without people's keys."""
        count = len(self.keys.splitlines())
        return {**self.config, **({"sshkeys": f"{count} key{'s' if count > 1 else ''}"} if count else {})}


def require_uploadable(target: PveTarget) -> None:
    """Whether Proxmox VE can come by a file of this computer.

    Raises:
        UsageError: It is reached over SSH.
    """
    if target.pve.startswith("ssh://"):
        raise UsageError(
            f"the image is on this computer, and Proxmox VE on {target.pve} imports its own files alone",
            hint="run it there with --pve local, or over HTTPS, which uploads the image",
        )


def read_image(name: str) -> ImageFile:
    """Read the checksum and the record next to an image, and the image's head.

    Raises:
        UsageError: It is missing, or its checksum is.
        IncompatibleError: It is of a kind that Proxmox VE does not import.
    """
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise UsageError(
            f"--image {name} is no file", hint="`invoke ami.export IMAGE --to qcow2 --output FILE`"
        )
    with path.open("rb") as file:
        head = file.read(32)
    if head[:4] == QCOW2:
        kind, size = "qcow2", int.from_bytes(head[24:32], "big")  # qemu docs/interop/qcow2.txt: bytes 24-31
        # Bytes 8 to 15 are the offset of the backing file's name; 0: none.
        if any(head[8:16]):
            raise IncompatibleError(
                f"{path.name} has a backing file, and is no whole disk", hint="export it anew"
            )
    else:
        kind, size = "raw", path.stat().st_size
    if path.suffix != f".{kind}":
        raise IncompatibleError(
            f"{path.name} is {kind} by its content, and Proxmox VE goes by the name",
            hint=f"name it .{kind}, or export it with --to qcow2 or --to raw",
        )
    checksum_file = path.with_name(f"{path.name}.sha256")
    if not checksum_file.is_file():
        raise UsageError(
            f"{checksum_file.name} is missing next to {path.name}",
            hint="ami.export writes it; carry both, or `sha256sum`",
        )
    lines = [line.split() for line in checksum_file.read_text(encoding="utf-8").splitlines()]
    checksums = [line[0].lower() for line in lines if line[1:] in ([path.name], [f"*{path.name}"])]
    # As `sha256sum` prints it: binary mode has * before the name.
    if len(checksums) != 1 or not re.fullmatch(r"[0-9a-f]{64}", checksums[0]):
        raise UsageError(
            f"{checksum_file.name} holds no SHA-256 of {path.name}",
            hint="as `sha256sum FILE` prints it, by this name",
        )
    return ImageFile(path, kind, size, checksums[0], _record(path))


def _record(path: Path) -> dict[str, Any]:
    record_file = path.with_name(f"{path.name}.json")
    if not record_file.is_file():
        return {}
    try:
        record = parse_json(record_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{record_file.name} is damaged: {error}") from error
    return record if isinstance(record, dict) else {}


def check_checksum(image: ImageFile, on_bytes: Callable[[int], None]) -> PassthroughCheck:
    """Read all of it, and compare."""
    digest, done = hashlib.sha256(), 0
    with image.path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
            done += len(part)
            on_bytes(done)
    if digest.hexdigest() != image.sha256:
        return refused(
            "image.sha256",
            f"{image.path.name} has {digest.hexdigest()}, and {image.sha256} is its recorded checksum",
            "the file is damaged or changed: copy or export it again",
        )
    return passed("image.sha256", image.sha256)


def plan_vm(pve: Pve, order: VmOptions, image: ImageFile, node: str, number: int, gpu: str) -> VmPlan:
    """Look at storages and network, and say what would be made.

    Args:
        number: Of the VM, 0: the next that is free.
        gpu: The value of hostpci0, or empty.

    Raises:
        UsageError: What was typed can't be meant.
    """
    for option, value in (("name", order.name), ("storage", order.storage)):
        if not value:
            raise UsageError(f"--{option} is missing")
    if not HOST_NAME.fullmatch(order.name):
        raise UsageError(f"--name {order.name!r} is no name of a host")
    memory, keys = Memory.parse(order.memory, "--memory").mib, _read_keys(order.ssh_keys)
    grow = Memory.parse(order.disk_size, "--disk-size").mib if order.disk_size else 0
    # A disk only grows: qm resize refuses to shrink one (and would cut off the file system).
    if grow and grow * MIB < image.size:
        raise UsageError(f"--disk-size {order.disk_size} is less than the image's {Memory(image.size).shown}")
    vm = _vm_number(pve, number)
    config = {
        "name": order.name,
        "ostype": "l26",
        # q35 and OVMF, as pve-docs qm-pci-passthrough.adoc recommends for PCI Express devices.
        "machine": "q35",
        "bios": "ovmf",
        # pre-enrolled-keys=0: with Secure Boot on, a kernel module that DKMS built is not loaded.
        "efidisk0": f"{order.storage}:1,efitype=4m,pre-enrolled-keys=0",
        "cpu": "host",
        "cores": str(order.cores),
        "memory": str(memory),
        "balloon": "0",  # with a PCI device all of the memory is held: qemu locks it for DMA
        "scsihw": "virtio-scsi-single",
        "net0": f"virtio,bridge={order.bridge}",
        # Cloud images write their console to the serial port; `qm terminal` reads it.
        "serial0": "socket",
        "vga": "serial0",
        "boot": f"order={DISK}",
        "ide2": f"{order.storage}:cloudinit",
        "citype": "nocloud",
        "ciuser": order.user,
        "ipconfig0": f"ip={order.ip}",
        "agent": "1",
        "tags": "gpukiln",
        "description": f"gpukiln: {image.path.name}, SHA-256 {image.sha256}",
        **({"hostpci0": gpu} if gpu else {}),
    }
    checks = [
        *_image_checks(order, image),
        *_location_checks(pve, order, image, node, max(image.size, grow * MIB)),
    ]
    if not pve.is_root:
        checks.append(_privilege_check(pve, order, vm))
    if not keys:
        checks.append(warned("vm.login", "no SSH key can log in", "--ssh-keys FILE"))
    return VmPlan(node, vm, image, config, tuple(checks), keys, grow)


def create_vm(pve: Pve, order: VmOptions, vm_plan: VmPlan, say: Callable[[str], None]) -> None:
    """Make the VM; what fails or is interrupted leaves none.

    Raises:
        CheckFailedError: It differs from the settings that were sent; it is removed.
    """
    with _source(pve, order, vm_plan, say) as source:
        # The clocks of this computer and of the node differ by seconds.
        started = int(time.time()) - 5
        disk = f"{order.storage}:0,import-from={source},discard=on,iothread=1,ssd=1"
        # Its format is urlencoded (qemu-server PVE/QemuServer.pm).
        keys = {"sshkeys": quote(vm_plan.keys, safe="")} if vm_plan.keys else {}
        # pvesh answers when the disk is imported, the API at once
        maker, task = pve if pve.target.https else connect(pve.target, limit_s=IMPORT_S), ""
        try:
            say(f"make VM {vm_plan.vm}, import the disk")
            settings = {"vmid": vm_plan.vm, **vm_plan.config, **keys, DISK: disk}
            task = str(maker.post(f"nodes/{vm_plan.node}/qemu", **settings))
            pve.wait(task, vm_plan.node, limit_s=IMPORT_S, said=say)
            if vm_plan.grow_mib:
                say(f"grow the disk to {order.disk_size}")
                size = f"{vm_plan.grow_mib}M"
                grown = pve.put(f"nodes/{vm_plan.node}/qemu/{vm_plan.vm}/resize", disk=DISK, size=size)
                # Depending on the release, resizing is a task, or done when the answer comes.
                if isinstance(grown, str) and grown.startswith("UPID"):
                    pve.wait(grown, vm_plan.node, limit_s=LOOK_S)
            _compare(pve, vm_plan)
        except BaseException as error:
            _remove(pve, vm_plan, task, started, error)
            raise


def _vm_number(pve: Pve, number: int) -> int:
    # `cluster/nextid` reserves nothing: two callers may get the same number, and the second one is refused.
    if not number:
        return int(pve.get("cluster/nextid"))
    try:
        return int(pve.get("cluster/nextid", vmid=number))
    except IncompatibleError as error:  # 400: "VM 120 already exists", PVE/API2/Cluster.pm
        raise UsageError(
            f"there is a VM or container {number} already",
            hint="another --vm, or none: the next that is free",
        ) from error


def _read_keys(name: str) -> str:
    if not name:
        return ""
    file = Path(name).expanduser()
    if not file.is_file():
        raise UsageError(f"--ssh-keys {name} is no file")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or not all(KEY.match(line) for line in lines):
        raise UsageError(
            f"--ssh-keys {name} holds something else than public keys", hint="~/.ssh/id_ed25519.pub"
        )
    return "\n".join(lines)


def _image_checks(order: VmOptions, image: ImageFile) -> Iterator[PassthroughCheck]:
    # A raw disk is a whole number of sectors; anything else was cut off in a copy.
    gib = Memory(image.size).shown
    if image.format == "raw" and image.size % SECTOR:
        yield impossible(
            "image.disk", f"{image.size} bytes are no whole sectors", "it is no disk: export it again"
        )
    else:
        yield passed("image.disk", f"{image.format}, {gib}")
    if not image.record:
        yield warned("image.record", "no record next to it: it is not known whether the image was verified")
        return
    # Records of exports before 0.2.0 have the same fact under another name.
    verified = image.record.get("verified", image.record.get("proven"))
    if verified is False and not order.unproven:
        yield refused(
            "image.record", "its record says that the image was not verified", "--unproven takes it"
        )
    else:
        yield passed("image.record", "verified") if verified else warned("image.record", "not verified")
    changed = image.record.get("changed")
    asks = changed.get("datasource") if isinstance(changed, dict) else None
    if asks == "nocloud":
        yield passed("image.datasource", "its cloud-init asks the drive of Proxmox VE (nocloud)")
    else:
        yield warned(
            "image.datasource",
            f"its cloud-init was prepared for {asks or 'EC2'}, and the VM has the drive of Proxmox VE",
            "export it with --datasource nocloud: else neither user nor keys may come to be",
        )


def _location_checks(
    pve: Pve, order: VmOptions, image: ImageFile, node: str, needs: int
) -> Iterator[PassthroughCheck]:
    there = {str(storage["storage"]): storage for storage in pve.get(f"nodes/{node}/storage")}
    yield _storage(there, order.storage, "images", needs, node)
    if pve.target.https:
        yield _storage(there, order.import_storage, "import", image.path.stat().st_size, node)
    bridges = [str(interface["iface"]) for interface in pve.get(f"nodes/{node}/network", type="any_bridge")]
    if order.bridge in bridges:
        yield passed("network.bridge", order.bridge)
    else:
        yield refused(
            "network.bridge", f"{node} has no {order.bridge}", f"--bridge: {', '.join(bridges) or 'none'}"
        )


def _storage(there: dict[str, Any], name: str, content: str, needs: int, node: str) -> PassthroughCheck:
    check, option = f"storage.{content}", "--storage" if content == "images" else "--import-storage"
    fitting = [
        storage_name
        for storage_name, facts in sorted(there.items())
        if content in str(facts["content"]).split(",")
    ]
    if name not in there:
        return refused(
            check, f"{node} has no storage {name}", f"{option}: {', '.join(fitting) or 'none fits'}"
        )
    storage = there[name]
    contents = str(storage["content"]).split(",")
    if content not in contents:
        added = ",".join([*contents, content])
        return refused(
            check,
            f"{name} holds {storage['content']}, and no {content}",
            f"{option} {fitting[0]}"
            if fitting
            else f"`pvesm set {name} --content {added}` (Proxmox VE 8.2 and later)",
        )
    if not int(storage.get("active", 0)):
        return refused(check, f"{name} is not active", f"`pvesm status` on {node}")
    free = int(storage.get("avail", 0))
    if free < needs:
        return refused(check, f"{name} has {Memory(free).shown}, {Memory(needs).shown} are needed", option)
    return passed(check, f"{name}, {Memory(free).shown} free")


def _privilege_check(pve: Pve, order: VmOptions, vm: int) -> PassthroughCheck:
    needs = {
        f"/vms/{vm}": {"VM.Allocate", "VM.Config.Disk", "VM.Config.HWType", "VM.Config.Cloudinit"},
        f"/storage/{order.storage}": {"Datastore.AllocateSpace"},
        f"/storage/{order.import_storage}": {"Datastore.AllocateSpace", "Datastore.AllocateTemplate"},
    }
    has = privileges(pve, tuple(needs))
    missing = [
        f"{', '.join(sorted(privileges_needed - has[path]))} on {path}"
        for path, privileges_needed in needs.items()
        if privileges_needed - has[path]
    ]
    if missing:
        return refused(
            "rights.create",
            f"{pve.user} lacks {'; '.join(missing)}",
            "`pveum acl modify PATH --tokens ... --roles ...`",
        )
    return passed("rights.create", f"{pve.user} may make it")


@contextlib.contextmanager
def _source(pve: Pve, order: VmOptions, vm_plan: VmPlan, say: Callable[[str], None]) -> Iterator[str]:
    """Where Proxmox VE imports the disk from; what was uploaded for that is removed."""
    if not pve.target.https:
        yield str(vm_plan.image.path.resolve())
        return
    # A name of its own, so that a forgotten upload is not taken for an image of a user.
    name = f"gpukiln-{vm_plan.image.sha256[:12]}-{secrets.token_hex(3)}.{vm_plan.image.format}"
    volume = f"{order.import_storage}:import/{name}"
    folder = f"nodes/{vm_plan.node}/storage/{order.import_storage}"
    failed: BaseException | None = None
    try:
        with _UploadFile(vm_plan.image.path, name, say) as file:
            task = connect(pve.target, limit_s=UPLOADED_S).post(
                f"{folder}/upload",
                content="import",
                checksum=vm_plan.image.sha256,
                filename=file,
                **{"checksum-algorithm": "sha256"},
            )
        pve.wait(str(task), vm_plan.node, limit_s=UPLOAD_S)
        yield volume
    except BaseException as error:
        failed = error
        raise
    finally:
        try:
            there = {
                str(volume_row["volid"]) for volume_row in pve.get(f"{folder}/content", content="import")
            }
            if volume in there:
                gone = pve.delete(f"{folder}/content/{volume}")
                if isinstance(gone, str) and gone.startswith("UPID"):
                    pve.wait(gone, vm_plan.node, limit_s=LOOK_S)
            elif isinstance(failed, UnansweredError):
                failed.add_note(
                    f"{volume} may still come to {vm_plan.node}; `pvesm free {volume}` removes it"
                )
        except GpukilnError as error:
            removal_note = (
                f"{volume} is left on {vm_plan.node}: {error.message}; `pvesm free {volume}` removes it"
            )
            if failed is None:
                say(removal_note)
            else:
                failed.add_note(removal_note)


class _UploadFile(io.FileIO):
    """A file under another name, which reports how much of it was read."""

    def __init__(self, path: Path, name: str, say: Callable[[str], None]) -> None:
        super().__init__(path)
        self.name = name  # what proxmoxer gives as the upload's name
        self._say, self._size, self._started, self._reported = say, path.stat().st_size, time.monotonic(), 0.0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        now, done = time.monotonic(), self.seek(0, io.SEEK_CUR)
        if now - self._reported > 1 and done:
            self._reported, rate = now, done / max(now - self._started, 0.001)
            left = (self._size - done) / rate
            self._say(f"upload {100 * done / self._size:.0f} %, {Memory(rate).shown}/s, {left:.0f} s left")
        return data


def _compare(pve: Pve, vm_plan: VmPlan) -> None:
    now = read_guest(pve, vm_plan.node, vm_plan.vm).config
    wrong = []
    for name, value in vm_plan.config.items():
        there = now.get(name)
        if name in ("efidisk0", "ide2"):
            right = there is not None
        elif name == "net0":  # with the address that it was given
            right = parse_properties(str(there)).get("bridge") == parse_properties(value)["bridge"]
        elif name.startswith("hostpci"):
            right = there is not None and parse_hostpci(str(there)).is_equivalent(parse_hostpci(value))
        else:
            right = str(there).strip() == value
        if not right:
            wrong.append(f"{name}: found {there}, wanted {value}")
    if "import-from" in str(now.get(DISK, "import-from")):
        wrong.append(f"{DISK}: found {now.get(DISK)}, wanted the imported disk")
    if wrong:
        raise CheckFailedError(
            f"VM {vm_plan.vm} differs from the settings that were sent", details=tuple(wrong)
        )


def _remove(pve: Pve, vm_plan: VmPlan, task: str, started: int, error: BaseException) -> None:
    """Remove the VM that this call created; a note on the error names what could not be removed.

    The task shows whether this call created it: Proxmox VE writes the configuration, or refuses, before it
    answers with the task.
    """
    folder = f"nodes/{vm_plan.node}"
    try:
        task_ids = [task] if task else []
        if not task:  # no answer came: the node's list of tasks knows
            asked = {"typefilter": "qmcreate", "vmid": vm_plan.vm, "since": started, "source": "all"}
            task_ids = [
                str(task_row["upid"])
                for task_row in pve.get(f"{folder}/tasks", **asked)
                if _asked_by(task_row) == pve.user
            ]
        if not task_ids:
            return
        for task_id in task_ids:
            if pve.get(f"{folder}/tasks/{task_id}/status").get("status") == "running":
                pve.delete(f"{folder}/tasks/{task_id}")
                with contextlib.suppress(UnavailableError):  # it ends badly: that is what was asked for
                    pve.wait(task_id, vm_plan.node, limit_s=LOOK_S)
        if vm_plan.vm not in {int(vm_row["vmid"]) for vm_row in pve.get(f"{folder}/qemu")}:
            return
        # skiplock is for root@pam alone (PVE/API2/Qemu.pm); a VM in creation is locked.
        options = {"purge": 1, "destroy-unreferenced-disks": 1, **({"skiplock": 1} if pve.is_root else {})}
        gone = pve.delete(f"{folder}/qemu/{vm_plan.vm}", **options)
        pve.wait(str(gone), vm_plan.node, limit_s=LOOK_S * 5)
    except GpukilnError as failed:
        error.add_note(
            f"VM {vm_plan.vm} may be left on {vm_plan.node}: {failed.message}; by hand: "
            f"`qm unlock {vm_plan.vm}`, `qm destroy {vm_plan.vm} --purge --destroy-unreferenced-disks`"
        )


def _asked_by(task: dict[str, Any]) -> str:
    """Who asked for a task; a token's name stands in a field of its own (pve-manager PVE/API2/Tasks.pm)."""
    return f"{task['user']}!{task['tokenid']}" if task.get("tokenid") else str(task["user"])
