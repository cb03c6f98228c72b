"""`invoke node.passthrough --create`: a VM of an exported image, on a double of Proxmox VE."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from gpukiln.nodes.passthrough import api
from tests.support import pve as double
from tests.support.passthrough import A10, Rig, Said

KEYS = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMq ann@desk\n"
MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A qcow2 of 2 GiB that ami.export wrote, by its head; and somebody's keys."""
    file = tmp_path / "node.qcow2"
    head = b"QFI\xfb" + (3).to_bytes(4, "big") + bytes(8) + bytes(4) + (16).to_bytes(4, "big")
    file.write_bytes(head + (2 << 30).to_bytes(8, "big") + b"\0" * 4096)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "node.qcow2.sha256").write_text(f"{digest}  node.qcow2\n")
    about = {"verified": True, "changed": {"datasource": "nocloud"}}
    (tmp_path / "node.qcow2.json").write_text(json.dumps(about))
    (tmp_path / "keys.pub").write_text(f"# hers\n{KEYS}")
    return file


Create = Callable[..., Said]


@pytest.fixture
def create(rig: Rig, image: Path) -> Create:
    def typed(*words: str, https: bool = True) -> Said:
        given = {
            "--image": str(image),
            "--name": "train-2",
            "--storage": "local-lvm",
            "--ssh-keys": str(image.with_name("keys.pub")),
        }
        where = () if "--pve" in words else rig.https if https else ("--pve", "local")
        rest = [word for name, value in given.items() if name not in words for word in (name, value)]
        return rig.run("--create", *where, *rest, *words)

    return typed


def as_before(rig: Rig) -> bool:
    """Nothing is left: no VM but the one that was there, no volume, nothing that still makes one."""
    making = [
        upid for upid, one in rig.cluster.tasks.items() if ":qmcreate:" in upid and one["status"] == "running"
    ]
    return (list(rig.cluster.vms), rig.cluster.volumes, making) == ([120], {}, [])


def test_nothing_is_made_without_apply(rig: Rig, create: Create) -> None:
    shown = create("--json")
    document = shown.json
    assert (shown.code, document["done"], document["vm"]) == (0, "looked", 100)
    assert (document["config"]["machine"], document["config"]["bios"]) == ("q35", "ovmf")
    assert (document["config"]["sshkeys"], "ann@desk" in shown.out + shown.err) == ("1 key", False)
    assert as_before(rig)
    assert not any(call.startswith(("PUT", "POST", "DELETE")) for call in rig.cluster.calls)


def test_more_memory_than_the_node_has_is_refused(rig: Rig, create: Create) -> None:
    """Without a GPU it is Proxmox VE that decides: such memory is not pinned."""
    shown = create("--gpu", "mapping:a10", "--accept-unseen", "--memory", "64GiB", "--apply")
    assert (shown.code, "65536 of the 65536 MiB" in shown.out + shown.err) == (6, True), shown
    assert as_before(rig)


def test_made_over_https_with_a_gpu(rig: Rig, create: Create, image: Path) -> None:
    """The image goes to the storage, which verifies it, and away again; the VM is read back."""
    large = image.read_bytes() + bytes(11 * MIB)  # proxmoxer streams what is above 10 MiB
    image.write_bytes(large)
    beside = image.with_name("node.qcow2.sha256")
    beside.write_text(f"{hashlib.sha256(large).hexdigest()} *node.qcow2\n")
    done = create(
        *("--gpu", "mapping:a10", "--accept-unseen", "--vm", "140", "--memory", "32GiB", "--cores", "8"),
        *("--disk-size", "40GiB", "--ip", "192.0.2.7/24,gw=192.0.2.1", "--apply", "--json"),
    )
    assert (done.code, done.json["done"], rig.cluster.uploads) == (0, "made", 1), done
    config = rig.cluster.vms[140]["config"]
    wanted = {
        "machine": "q35",
        "bios": "ovmf",
        "hostpci0": "mapping=a10,pcie=1",
        "memory": "32768",
        "cores": "8",
        "balloon": "0",
        "serial0": "socket",
        "vga": "serial0",
        "citype": "nocloud",
        "ciuser": "gpukiln",
        "ipconfig0": "ip=192.0.2.7/24,gw=192.0.2.1",
        "boot": "order=scsi0",
    }
    assert {name: config[name] for name in wanted} == wanted
    assert unquote(config["sshkeys"]) == KEYS.strip()
    assert config["ide2"].startswith("local-lvm:vm-140-cloudinit")
    assert "size=40960M" in config["scsi0"]
    assert "pre-enrolled-keys=0" in config["efidisk0"]
    assert hashlib.sha256(image.read_bytes()).hexdigest() in config["description"]
    assert not [one for one in rig.cluster.volumes if one.startswith("local:import")]


@pytest.mark.usefixtures("programs")
def test_made_on_the_host_itself_from_the_file(rig: Rig, create: Create) -> None:
    done = create("--gpu", "01:00", "--apply", https=False)
    assert (done.code, rig.cluster.uploads) == (0, 0), done
    assert rig.cluster.vms[100]["config"]["hostpci0"] == "0000:01:00,pcie=1"
    assert "qm start 100" in done.out


@pytest.mark.parametrize(
    ("change", "words", "code", "told"),
    [
        ("flip", (), 6, "the file is damaged or changed"),
        ("no-sum", (), 2, "node.qcow2.sha256 is missing next to node.qcow2"),
        ("backing", (), 3, "has a backing file"),
        ("suffix", (), 3, "is raw by its content"),
        ("record", (), 6, "was not verified"),
        ("record", ("--unproven",), 0, "not verified"),
        ("ec2", (), 0, "its cloud-init was prepared for EC2"),
        ("", ("--storage", "ceph"), 6, "--storage: local-lvm"),
        ("", ("--storage", "local"), 6, "--storage local-lvm"),
        ("", ("--import-storage", "local-lvm"), 6, "--import-storage local"),
        ("full", (), 6, "1 GiB, 2 GiB are needed"),
        ("inactive", (), 6, "is not active"),
        ("old", (), 6, "pvesm set local --content iso,vztmpl,import"),
        ("", ("--bridge", "vmbr7"), 6, "has no vmbr7"),
        ("", ("--vm", "120"), 2, "there is a VM or container 120 already"),
        ("", ("--disk-size", "1GiB"), 2, "less than the image's 2 GiB"),
        ("", ("--name", "a b"), 2, "no name of a host"),
        ("", ("--ssh-keys", "/etc/hostname"), 2, "something else than public keys"),
        ("", ("--pve", "ssh://root@pve1"), 2, "the image is on this computer"),
        ("", ("--node", "pve9"), 2, "there are: pve1"),
        ("rights", (), 6, "lacks Datastore.AllocateTemplate on /storage/local"),
        ("", ("--gpu", "mapping:a10"), 6, "host.driver, host.lease could not be checked"),
    ],
)
def test_what_is_refused_before_anything_is_made(
    rig: Rig, create: Create, image: Path, change: str, words: tuple[str, ...], code: int, told: str
) -> None:
    spoil(change, rig, image)
    ended = create(*words, *(["--apply"] if code else []))
    assert (ended.code, told in ended.out + ended.err) == (code, True), ended
    assert (as_before(rig), rig.cluster.uploads) == (True, 0)


def spoil(change: str, rig: Rig, image: Path) -> None:
    raw, beside = image.read_bytes(), image.with_name("node.qcow2.sha256")
    if change == "flip":
        image.write_bytes(raw[:-1] + b"x")
    elif change == "no-sum":
        beside.unlink()
    elif change == "backing":
        image.write_bytes(raw[:15] + b"\1" + raw[16:])
    elif change == "suffix":
        image.write_bytes(b"\0" * 1024)
    elif change == "record":
        image.with_name("node.qcow2.json").write_text(json.dumps({"verified": False}))
    elif change == "ec2":
        image.with_name("node.qcow2.json").write_text(json.dumps({"proven": True, "changed": {}}))
    elif change == "full":
        rig.cluster.storages["local-lvm"]["avail"] = 1 << 30
    elif change == "inactive":
        rig.cluster.storages["local-lvm"]["active"] = 0
    elif change == "old":
        rig.cluster.storages["local"]["content"] = "iso,vztmpl"
    elif change == "rights":
        rig.cluster.rights["/storage"] = {"Datastore.Audit", "Datastore.AllocateSpace"}


STEPS = [
    ("POST", "nodes/pve1/storage/local/upload"),
    ("POST", "nodes/pve1/qemu"),
    ("PUT", "nodes/pve1/qemu/100/resize"),
    ("GET", "nodes/pve1/qemu/100/config"),
]
FAULTS: list[Callable[[], Any]] = [
    double.status(500, "can't lock file '/var/lock/qemu-server/lock-100.conf' - got timeout"),
    double.status(596, "Connection timed out"),
    double.silence,
    double.done_and_silent,
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_at_each_call_leaves_nothing(
    rig: Rig, create: Create, step: tuple[str, str], fault: int
) -> None:
    rig.cluster.polls = 2
    rig.cluster.faults = [(*step, FAULTS[fault])]
    ended = create("--disk-size", "4GiB", "--apply")
    assert (ended.code in (4, 5, 75), rig.cluster.faults) == (True, []), ended
    if step[1].endswith("upload") and fault == 3:
        # the task of which nobody knows the name goes on
        assert "may still come to pve1; `pvesm free local:import/gpukiln-" in ended.err
        for upid in list(rig.cluster.tasks):
            rig.cluster.end(upid)
        rig.cluster.volumes.clear()
    assert as_before(rig), (ended, rig.cluster.vms, rig.cluster.volumes)


def test_a_task_that_fails_and_one_that_is_interrupted(
    rig: Rig, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Callable[[], None]:
        def after() -> None:
            upid = next(one for one in rig.cluster.tasks if ":qmcreate:" in one)
            rig.cluster.end(upid, "unable to create VM 100 - No space left on device")

        return after

    rig.cluster.faults = [("POST", "nodes/pve1/qemu", broken)]
    ended = create("--apply")
    assert (ended.code, "free space on the storage" in ended.err, as_before(rig)) == (4, True, True), ended

    rig.cluster.polls = 3
    real = api.time.sleep

    def interrupted(seconds: float) -> None:
        here = threading.current_thread() is threading.main_thread()
        if here and any(":qmcreate:" in upid and one["left"] == 1 for upid, one in rig.cluster.tasks.items()):
            monkeypatch.setattr(api.time, "sleep", real)
            raise KeyboardInterrupt
        real(seconds)

    monkeypatch.setattr(api.time, "sleep", interrupted)
    ended = create("--apply")
    assert (ended.code, as_before(rig)) == (130, True), ended


def test_a_vm_of_somebody_else_is_not_removed(rig: Rig, create: Create) -> None:
    """Its number was taken between the look and the call."""

    def taken() -> None:
        config = {"name": "hers"}
        rig.cluster.vms[100] = {"node": "pve1", "status": "stopped", "config": config}

    rig.cluster.faults = [("POST", "nodes/pve1/qemu", taken)]
    ended = create("--apply")
    assert (ended.code, rig.cluster.vms[100]["config"]) == (4, {"name": "hers"}), ended
    assert "already exists on node 'pve1'" in ended.err


def test_what_can_not_be_removed_is_told(rig: Rig, create: Create) -> None:
    rig.cluster.faults = [
        ("GET", "nodes/pve1/qemu/100/config", double.status(595, "No route to host")),
        ("DELETE", "nodes/pve1/qemu/100", double.status(500, "VM is locked (create)")),
    ]
    ended = create("--apply")
    assert ended.code == 4
    assert "also: VM 100 may be left on pve1" in ended.err
    assert "`qm unlock 100`, `qm destroy 100 --purge --destroy-unreferenced-disks`" in ended.err


def test_the_gpu_is_examined_as_for_a_vm_that_is_there(rig: Rig, create: Create) -> None:
    rig.cluster.vms[121] = {"node": "pve1", "status": "stopped", "config": {"name": "x", "hostpci0": A10}}
    ended = create("--gpu", "01:00", "--apply", https=False)
    assert (ended.code, "VM 121 x (stopped) has it" in ended.out) == (6, True)
