"""`invoke node.passthrough` against a double of Proxmox VE: over TLS with a token, by pvesh, over SSH."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.nodes.passthrough import api
from gpukiln.nodes.passthrough import host as hosts
from tests.support import documents
from tests.support import pve as double
from tests.support.passthrough import A10, RTX, T4, Rig, stopped_vm
from tests.support.pve import TOKEN, Cluster, entry

ROOT = Path(__file__).parents[2]


def test_nothing_is_changed_without_apply(rig: Rig) -> None:
    before = rig.config
    shown = rig.local("--gpu", "01:00")
    assert (shown.code, rig.config, rig.undo_files()) == (0, before, [])
    for word in ("A10", "10de:2236", "vfio-pci", "then: 0000:01:00,pcie=1", "--apply sets it"):
        assert word in shown.out
    found = rig.local("--gpu", "0000:01:00.0", "--json").json
    assert found["change"] == {
        "key": "hostpci0",
        "before": None,
        "after": "0000:01:00.0,pcie=1",
        "digest": Cluster.digest(before),
    }
    assert {one["outcome"] for one in found["checks"]} == {"passed"}
    assert not any(call.startswith(("PUT", "POST", "DELETE")) for call in rig.cluster.calls)


def test_set_read_back_and_taken_back(rig: Rig) -> None:
    """All four functions of a card go together, whichever is named."""
    before = rig.config
    done = rig.local("--gpu", "02:00.0", "--primary", "--hide-rom", "--apply", "--json").json
    assert [one["kind"] for one in done["functions"]] == ["GPU", "audio", "USB", "USB-C"]
    assert rig.config == {**before, "hostpci0": "0000:02:00,pcie=1,x-vga=1,rombar=0"}
    (file,) = rig.undo_files()
    assert (done["done"], done["undo"]) == ("set", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    documents.read(file.read_text())

    again = rig.local("--gpu", "02:00", "--primary", "--hide-rom", "--apply")
    assert (again.code, "it stands there already" in again.out, rig.undo_files()) == (0, True, [file])

    looked = rig.run("--undo", str(file), "--json")
    assert (looked.json["done"], "hostpci0" in rig.config) == ("looked", True)
    undone = rig.run("--undo", str(file), "--apply", "--json")
    assert (undone.code, undone.json["done"], rig.config) == (0, "undone", before)
    assert rig.run("--undo", str(file), "--apply", "--json").json["done"] == "as-is"


@pytest.mark.usefixtures("programs")
def test_another_setting_is_changed_in_its_place(rig: Rig) -> None:
    rig.cluster.vms[120]["config"] |= {"hostpci0": "0000:06:00,pcie=1", "hostpci3": "02:00,pcie=on,x-vga=1"}
    before = rig.config
    done = rig.local("--gpu", "02:00", "--apply", "--json").json
    assert (done["change"]["key"], done["change"]["before"]) == ("hostpci3", "02:00,pcie=on,x-vga=1")
    assert rig.config["hostpci3"] == "0000:02:00,pcie=1"
    rig.run("--undo", done["undo"], "--apply")
    assert rig.config == before
    # the one that is printed for who has no gpukiln at hand does the same
    rig.local("--gpu", "02:00", "--apply")
    command = json.loads(rig.undo_files()[-1].read_text())["command"]
    assert os.system(f"{command} 2>/dev/null") == 0  # noqa: S605 - what people type
    assert rig.config == before


def test_undo_takes_back_its_own_change_alone(rig: Rig) -> None:
    file = rig.local("--gpu", "01:00", "--apply", "--json").json["undo"]
    rig.cluster.vms[120]["status"] = "running"
    assert (ended := rig.run("--undo", file, "--apply")).code == 6, ended
    rig.cluster.vms[120]["config"]["hostpci0"] = "0000:09:00"
    ended = rig.run("--undo", file, "--apply")
    assert (ended.code, "another user changed it since" in ended.err) == (6, True)
    (rig.folder / "x.json").write_text("{}")
    assert rig.run("--undo", str(rig.folder / "x.json")).code == 2
    assert rig.run("--undo", file, "--vm", "120").code == 2


def test_a_token_sets_a_mapping_and_never_an_address(rig: Rig) -> None:
    ended = rig.token("--gpu", "01:00", "--apply", "--accept-unseen", "--json")
    assert (ended.code, ended.result("rights.address")) == (3, ("failed", "error", 3))
    assert "hostpci0" not in rig.config
    step = ended.check("rights.address")["remedy"]
    assert entry("pve1", "0000:01:00.0", rig.cluster.pci[A10]).split(",")[0] in step

    # drivers and leases can't be seen over the API: refused, unless somebody takes that on
    ended = rig.token("--gpu", "mapping:a10", "--apply")
    assert (ended.code, "hostpci0" in rig.config) == (6, False)
    assert "host.driver, host.lease could not be checked; --accept-unseen" in ended.out
    done = rig.token("--gpu", "mapping:a10", "--apply", "--accept-unseen", "--json")
    assert (done.code, rig.config["hostpci0"]) == (0, "mapping=a10,pcie=1")
    assert rig.run("--undo", done.json["undo"], "--apply").code == 0
    assert "hostpci0" not in rig.config


def test_over_ssh_the_kernel_is_seen_too(rig: Rig, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = hosts.ROOT
    monkeypatch.setattr(hosts, "ROOT", "/")
    ssh = programs / "ssh"
    ssh.write_text(
        "#!/bin/bash\n"
        '[ "${@: -2:1}" != root@down ] || { echo "ssh: host down: Connection refused" >&2; exit 255; }\n'
        "command=${@: -1}\n"
        f'[ "$command" != "python3 - /" ] || command="{sys.executable} - {root}"\n'
        "[[ $command != /usr/local/bin/gpukiln-gpu* ]] || exit 127\n"
        'exec bash -c "$command"\n'
    )
    ssh.chmod(0o755)
    real = os.uname().nodename.partition(".")[0]  # where the double of ssh runs it
    rig.cluster.nodes = {real: "online"}
    rig.cluster.vms[120]["node"] = real
    rig.cluster.mappings["a10"]["map"] = [entry(real, "0000:01:00", rig.cluster.pci[A10])]
    both = rig.token("--gpu", "mapping:a10", "--ssh", "ssh://root@pve1", "--json")
    assert [both.check(name)["outcome"] for name in ("host.driver", "host.lease")] == ["passed", "passed"]
    assert both.code == 0
    alone = rig.run("--pve", "ssh://root@pve1", "--vm", "120", "--gpu", "01:00", "--apply", "--json")
    assert (alone.code, rig.config["hostpci0"]) == (0, "0000:01:00,pcie=1")
    down = rig.token("--gpu", "mapping:a10", "--ssh", "ssh://root@down", "--json")
    assert (down.code, down.check("host.driver")["outcome"]) == (0, "not_run")
    ended = rig.run("--pve", "ssh://root@down", "--vm", "120", "--gpu", "01:00")
    assert (ended.code, "Connection refused" in ended.err) == (4, True)


def edit(**config: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.cluster.vms[120]["config"].update(config)


def bind(address: str, driver: str) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        link = rig.folder / f"root/sys/bus/pci/devices/{address}/driver"
        link.unlink()
        (rig.folder / f"root/sys/bus/pci/drivers/{driver}").mkdir(exist_ok=True)
        link.symlink_to(f"../../drivers/{driver}")

    return change


def other_vm(value: str, status: str = "stopped", node: str = "pve1") -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        config = {"name": "infer", "hostpci2": value}
        rig.cluster.vms[121] = {"node": node, "status": status, "config": config}
        rig.cluster.nodes[node] = "online"

    return change


def others(**config: Any) -> Callable[[Rig], None]:
    """Another VM that runs with this configuration."""
    said = {"name": "infer", **config}
    return lambda rig: rig.cluster.vms.update({121: {"node": "pve1", "status": "running", "config": said}})


def off(rig: Rig) -> None:
    for one in rig.cluster.pci.values():
        one["iommugroup"] = -1


def leased(rig: Rig) -> None:
    gpu = rig.folder / f"root/proc/driver/nvidia/gpus/{A10}"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: NVIDIA A10\nGPU UUID: GPU-aaaa\nDevice Minor: 0\n")
    bind(A10, "nvidia")(rig)
    lease("GPU-aaaa")(rig)


def lease(device: str) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        """A detached lease, in the database that gpukiln-gpu reads."""
        from gpukiln.gpus.store import Lease, LeasedDevice, LeaseStore, boot_clock, boot_id  # noqa: PLC0415

        store = LeaseStore(rig.folder / "leases")
        held = LeasedDevice(device, "A10", None, None, 1.0, None)
        values = {
            **{"user": "ann", "uid": 0, "project": "", "mode": "exclusive", "kind": "detached"},
            **{
                "memory_mib": None,
                "pid": 1,
                "ticks": None,
                "job_pid": None,
                "job_ticks": None,
                "command": "",
            },
            **{
                "engine": None,
                "container": None,
                "machine_gpus": 1,
                "granted_at": "2026-11-24T00:00:00+00:00",
            },
            **{"heartbeat_s": None, "beat_boot": None, "boot_id": boot_id(), "granted_boot": boot_clock()},
        }
        with store.change():
            store.add(Lease(number=0, expires_boot=boot_clock() + 900, devices=(held,), **values))  # type: ignore[arg-type]
        store.close()

    return change


def in_use(rig: Rig) -> None:
    leased(rig)
    sqlite3.connect(rig.folder / "leases/leases.db").execute("delete from leases").connection.commit()
    (rig.folder / "root/proc/4711/fd").mkdir(parents=True)
    (rig.folder / "root/proc/4711/comm").write_text("python3\n")
    (rig.folder / "root/proc/4711/fd/7").symlink_to("/dev/nvidia0")


def kernel(arguments: str) -> Callable[[Rig], None]:
    return lambda rig: (rig.folder / "root/proc/cmdline").write_text(arguments) and None  # type: ignore[func-returns-value]


def console(rig: Rig) -> None:
    (rig.folder / f"root/sys/bus/pci/devices/{A10}/boot_vga").write_text("1\n")


def elsewhere(rig: Rig) -> None:
    rig.cluster.nodes["pve2"] = "online"
    rig.cluster.vms[120]["node"] = "pve2"


@pytest.mark.parametrize(
    ("change", "gpu", "code", "check", "result", "words"),
    [
        pytest.param(None, "03:00", 6, "iommu.group", "error", "0000:04:00.0 I210", id="group"),
        pytest.param(off, "01:00", 6, "iommu.on", "error", "the IOMMU is off", id="no-iommu"),
        pytest.param(
            kernel("pcie_acs_override=downstream"), "01:00", 0, "iommu.override", "warning", "makes", id="acs"
        ),
        pytest.param(
            bind(A10, "nouveau"), "01:00", 6, "host.driver", "error", f"{A10} has nouveau", id="nouveau"
        ),
        pytest.param(
            bind(f"{RTX}.1", "snd_hda_intel"), "02:00", 0, "host.driver", "warning", "snd_hda", id="audio"
        ),
        pytest.param(in_use, "01:00", 6, "host.driver", "error", "used by 4711 python3", id="in-use"),
        pytest.param(leased, "01:00", 6, "host.lease", "error", "leased: L-1 of ann", id="leased"),
        pytest.param(lease("GPU-gone"), "01:00", 6, "host.lease", "error", "no driver says", id="lost"),
        pytest.param(console, "01:00", 0, "host.console", "warning", "own console", id="console"),
        pytest.param(
            elsewhere, "01:00", 0, "host.driver", "not_run", "and the VM is on pve2", id="elsewhere"
        ),
        pytest.param(
            other_vm("0000:01:00.0"), "01:00", 6, "gpu.free", "error", "VM 121 infer (stopped)", id="other"
        ),
        pytest.param(
            other_vm("mapping=a10,pcie=1", "running"),
            "01:00",
            6,
            "gpu.free",
            "error",
            "running",
            id="other-map",
        ),
        pytest.param(
            other_vm("01:00", node="pve2"), "01:00", 0, "gpu.free", "passed", "none of the 0", id="far"
        ),
        pytest.param(
            others(args="-device vfio-pci,host=0000:01:00.0,multifunction=on"),
            "01:00",
            6,
            "gpu.free",
            "error",
            "VM 121 infer (running) has it by its args",
            id="args",
        ),
        pytest.param(
            others(args="-device vfio-pci,sysfsdev=/sys/bus/pci/devices/0000:01:00.0"),
            "01:00",
            6,
            "gpu.free",
            "error",
            "by its args",
            id="args-sysfs",
        ),
        pytest.param(
            others(args='-device \'{"driver":"vfio-pci","host":"0000:01:00.0"}\''),
            "01:00",
            6,
            "gpu.free",
            "error",
            "by its args",
            id="args-json",
        ),
        pytest.param(
            others(args="-device vfio-pci,host=03:00.0 -device e1000,mac=52:54:01:00:00:01"),
            "01:00",
            0,
            "gpu.free",
            "passed",
            "none of the 1",
            id="args-far",
        ),
        pytest.param(
            edit(args="-device vfio-pci,host=01:00.0"),
            "01:00",
            6,
            "vm.args",
            "error",
            "have it already",
            id="own-args",
        ),
        pytest.param(
            edit(balloon="2048"), "01:00", 6, "vm.balloon", "error", "2048 of its 16384 MiB", id="balloon"
        ),
        pytest.param(
            edit(balloon="0"), "01:00", 0, "vm.memory", "passed", "16384 of the 65536", id="no-balloon"
        ),
        pytest.param(
            edit(memory="current=65536"),
            "01:00",
            6,
            "vm.memory",
            "error",
            "65536 of the 65536",
            id="memory",
        ),
        pytest.param(
            others(memory="57344", hostpci0="0000:03:00"),
            "01:00",
            6,
            "vm.memory",
            "error",
            "VM 121 infer holds 57344 MiB",
            id="pinned",
        ),
        pytest.param(
            others(memory="57344"), "01:00", 0, "vm.memory", "passed", "16384 of the 65536", id="not-pinned"
        ),
        pytest.param(edit(lock="backup"), "01:00", 75, "vm.lock", "error", "locked (backup)", id="locked"),
        pytest.param(edit(template=1), "01:00", 6, "vm.kind", "error", "template", id="template"),
        pytest.param(edit(machine="pc-i440fx-9.0"), "01:00", 6, "vm.machine", "error", "no PCI", id="i440fx"),
        pytest.param(edit(bios="seabios"), "01:00", 0, "vm.firmware", "warning", "SeaBIOS", id="seabios"),
        pytest.param(edit(efidisk0=""), "01:00", 0, "vm.firmware", "warning", "EFI disk", id="no-efi"),
        pytest.param(
            edit(efidisk0="a:b,pre-enrolled-keys=1"),
            "01:00",
            0,
            "vm.firmware",
            "warning",
            "Secure",
            id="keys",
        ),
        pytest.param(
            edit(**{f"hostpci{n}": f"0000:2{n:x}:00" for n in range(16)}),
            "01:00",
            6,
            "vm.slot",
            "error",
            "all 16",
            id="full",
        ),
    ],
)
def test_what_is_examined(
    rig: Rig, change: Callable[[Rig], None] | None, gpu: str, code: int, check: str, result: str, words: str
) -> None:
    if change:
        change(rig)
    before = rig.config
    shown = rig.local("--gpu", gpu, "--json", *(["--apply"] if code else []))
    found = shown.check(check)
    word = found["severity"] if found["outcome"] == "failed" else found["outcome"]
    assert (shown.code, word, words in found["message"]) == (code, result, True), found
    assert (found["exit_code"], bool(found["remedy"])) == (code, result != "passed")
    assert (rig.config, rig.undo_files()) == (before, [])


def test_a_running_vm_is_refused(rig: Rig) -> None:
    rig.cluster.vms[120]["status"] = "running"
    shown = rig.local("--gpu", "01:00", "--apply", "--json")
    assert (shown.code, shown.result("vm.stopped"), shown.json["done"]) == (
        6,
        ("failed", "error", 6),
        "refused",
    )
    assert "hostpci0" not in rig.config


@pytest.mark.parametrize(
    ("mapping", "code", "check", "words"),
    [
        (
            {"map": [entry("pve1", "0000:01:00", double.machine()[T4])]},
            6,
            "mapping.match",
            "the id 10de:2236",
        ),
        ({"map": ["node=pve1,path=0000:01:00,id=10de:2236"]}, 6, "mapping.match", "iommugroup 14"),
        (
            {"map": [entry("pve1", "0000:01:00", double.machine()[A10])], "mdev": 1},
            3,
            "mapping.kind",
            "mediated",
        ),
    ],
)
def test_a_mapping_is_compared_with_the_hardware(
    rig: Rig, mapping: dict[str, Any], code: int, check: str, words: str
) -> None:
    rig.cluster.mappings["a10"] = mapping
    shown = rig.local("--gpu", "mapping:a10", "--json")
    found = shown.check(check)
    assert (shown.code, words in found["message"]) == (code, True), found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--vm", "120", "--gpu", "4"), "wanted a PCI address"),
        (("--vm", "120", "--gpu", "04:00.0"), "is no GPU: I210"),
        (("--vm", "120", "--gpu", "09:00"), "has no PCI device 0000:09:00"),
        (("--vm", "120", "--gpu", "mapping:b10"), "there are: a10"),
        (("--vm", "999", "--gpu", "01:00"), "there are: 120 train"),
        (
            (
                "--vm",
                "120",
            ),
            "--vm and --gpu say",
        ),
        (("--vm", "120", "--gpu", "01:00", "--slot", "16"), "hostpci0 to hostpci15"),
        (("--vm", "120", "--gpu", "01:00", "--ca", "x"), "apply to HTTPS only"),
        (("--vm", "120", "--gpu", "01:00", "--ssh", "ssh://x"), "asked with a token"),
    ],
)
def test_what_can_not_be_meant(rig: Rig, words: tuple[str, ...], told: str) -> None:
    ended = rig.run("--pve", "local", *words)
    assert (ended.code, told in ended.err) == (2, True), ended


def test_a_container_and_a_mapping_of_another_node(rig: Rig) -> None:
    rig.cluster.vms[130] = {"node": "pve1", "status": "running", "type": "lxc", "config": {}}
    assert "is a container" in rig.local("--gpu", "01:00", vm="130").err
    rig.cluster.mappings["a10"] = {"map": [entry("pve7", "0000:01:00", rig.cluster.pci[A10])]}
    ended = rig.local("--gpu", "mapping:a10")
    assert (ended.code, "only of pve7" in ended.err) == (2, True)


# Who is asked, and with what


def test_a_certificate_is_verified_always(rig: Rig, tmp_path: Path) -> None:
    where, gpu = rig.https[1], ("--vm", "120", "--gpu", "mapping:a10")
    ended = rig.run("--pve", where, *gpu)
    assert (ended.code, "no trusted CA signed" in ended.err, rig.cluster.calls) == (4, True, [])
    print_ = double.x509.load_pem_x509_certificate((tmp_path / "pve-ssl.pem").read_bytes())
    right = print_.fingerprint(double.hashes.SHA256()).hex(":").upper()
    assert rig.run("--pve", where, "--fingerprint", right, *gpu).code == 0
    calls = len(rig.cluster.calls)
    ended = rig.run("--pve", where, "--fingerprint", "AA:" * 31 + "AA", *gpu)
    assert (ended.code, right in ended.err, len(rig.cluster.calls)) == (4, True, calls)
    assert rig.run("--pve", where, "--fingerprint", "AA:BB", *gpu).code == 2
    assert rig.run("--pve", where, "--ca", "/nonexistent", *gpu).code == 2


@pytest.mark.parametrize(
    ("token", "code", "told"),
    [
        ("", 2, "wanted USER@REALM!NAME=VALUE"),
        ("gpukiln@pve!ci", 2, "does not hold a token"),
        ("gpukiln@pve!ci=wrong-1111", 4, "invalid token value!"),
        ("gpukiln@pve!other=wrong-1111", 4, "no such token 'other'"),
    ],
)
def test_a_token_that_is_not_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, token: str, code: int, told: str
) -> None:
    monkeypatch.setenv(api.TOKEN_VARIABLE, token)
    ended = rig.token("--gpu", "mapping:a10")
    assert (ended.code, told in ended.err, "wrong-1111" in ended.out + ended.err) == (code, True, False), (
        ended
    )


def test_a_token_from_a_file_that_others_can_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(api.TOKEN_VARIABLE)
    file = rig.folder / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    ended = rig.token("--gpu", "mapping:a10", "--token-file", str(file))
    assert (ended.code, "others may read" in ended.err) == (2, True)
    file.chmod(0o600)
    done = rig.token("--gpu", "mapping:a10", "--token-file", str(file), "--apply", "--accept-unseen")
    assert done.code == 0
    kept = "".join(path.read_text() for path in rig.undo_files())
    assert double.SECRET not in done.out + done.err + kept


@pytest.mark.parametrize(
    ("path", "lacks", "check"),
    [
        ("/mapping/pci", "Mapping.Use on /mapping/pci/a10", "rights.token"),
        ("/vms", "VM.Config.HWType on /vms/120", "rights.token"),
    ],
)
def test_rights_that_are_missing_are_seen_before(rig: Rig, path: str, lacks: str, check: str) -> None:
    rig.cluster.rights[path] = {"VM.Audit", "Mapping.Audit"}
    shown = rig.token("--gpu", "mapping:a10", "--json")
    assert (shown.code, shown.result(check), lacks in shown.out) == (6, ("failed", "error", 6), True)


def test_vms_that_a_token_does_not_see_may_have_it(rig: Rig) -> None:
    rig.cluster.rights["/vms"] = set()
    rig.cluster.rights["/vms/120"] = {"VM.Audit", "VM.Config.HWType"}
    shown = rig.token("--gpu", "mapping:a10", "--json")
    assert (shown.code, shown.result("gpu.free")) == (0, ("not_run", "info", 0))


# Every call may fail

ANSWERS = [
    (double.status(500, "can't lock file '/var/lock/qemu-server/lock-120.conf' - got timeout"), 75),
    (double.status(500, "VM is locked (backup)"), 75),
    (double.status(403, "Permission check failed (/vms/120, VM.Config.HWType)"), 4),
    (double.status(500, "cluster not ready - no quorum?"), 4),
    (double.status(595, "No route to host"), 4),
    (double.status(596, "Connection timed out"), 4),
    (double.status(501, "Method 'PUT /nodes/pve1/qemu/120/config' not implemented"), 3),
    (double.silence, 4),
]
LOOKS = [
    "cluster/resources",
    "nodes/pve1/qemu/120/config",
    "nodes/pve1/hardware/pci",
    "cluster/mapping/pci",
    "nodes/pve1/qemu",
    "access/permissions",
    "version",
]
SET = ("--gpu", "mapping:a10", "--apply", "--accept-unseen")


@pytest.mark.parametrize("path", LOOKS)
def test_a_look_that_fails_changes_nothing(rig: Rig, path: str) -> None:
    for fault, code in ANSWERS[2:5] + ANSWERS[7:]:
        rig.cluster.faults = [("GET", path, fault)]
        ended = rig.token(*SET)
        assert (ended.code, rig.undo_files(), "hostpci0" in rig.config) == (code, [], False), ended


@pytest.mark.parametrize(("fault", "code"), ANSWERS)
def test_a_write_that_fails_leaves_nothing(rig: Rig, fault: Callable[[], Any], code: int) -> None:
    rig.cluster.faults = [("PUT", ".*config", fault)]
    ended = rig.token(*SET)
    assert (ended.code, rig.undo_files(), "hostpci0" in rig.config) == (code, [], False), ended
    assert "next: " in ended.err


def test_a_change_of_somebody_else_meanwhile_is_refused(rig: Rig) -> None:
    rig.cluster.faults = [("PUT", ".*config", lambda: edit(memory="1")(rig))]
    ended = rig.token(*SET)
    assert (ended.code, "another user changed it in the meantime" in ended.err) == (75, True)
    assert (rig.undo_files(), rig.config["memory"], "hostpci0" in rig.config) == ([], "1", False)


def test_a_write_without_an_answer_is_looked_at(rig: Rig) -> None:
    rig.cluster.faults = [("PUT", ".*config", double.done_and_silent)]
    done = rig.token(*SET, "--json")
    assert (done.code, done.json["done"], "hostpci0" in rig.config) == (0, "set", True)
    rig.run("--undo", done.json["undo"], "--apply")

    def gone() -> Any:
        rig.cluster.faults = [("GET", ".*120/config", double.status(595, "No route to host"))]
        return double.silence()

    rig.cluster.faults = [("PUT", ".*config", gone)]
    ended = rig.token(*SET)
    assert (ended.code, "it is not known whether" in ended.err, len(rig.undo_files())) == (5, True, 2)


@pytest.mark.parametrize(
    ("when", "code", "told"),
    [("before", 130, "interrupted"), ("after", 5, "was written"), ("reading", 5, "was not read back")],
)
def test_an_interruption_says_what_was_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, when: str, code: int, told: str
) -> None:
    real_put, real_get = api.Pve.put, api.Pve.get

    def put(self: api.Pve, path: str, /, **values: Any) -> Any:
        if when != "before":
            real_put(self, path, **values)
        if when == "reading":
            monkeypatch.setattr(api.Pve, "get", get)
            return
        raise KeyboardInterrupt

    def get(_self: api.Pve, _path: str, /, **_values: Any) -> Any:
        monkeypatch.setattr(api.Pve, "get", real_get)
        raise KeyboardInterrupt

    monkeypatch.setattr(api.Pve, "put", put)
    ended = rig.token(*SET)
    assert (ended.code, told in ended.err) == (code, True), ended
    assert ("hostpci0" in rig.config, len(rig.undo_files())) == (
        (False, 0) if when == "before" else (True, 1)
    )


def test_what_is_read_back_is_compared(rig: Rig) -> None:
    def spoilt() -> Callable[[], None]:
        return edit(memory="1", hostpci0="mapping=a10").__get__(rig)  # type: ignore[no-any-return]

    rig.cluster.faults = [("PUT", ".*config", spoilt)]
    ended = rig.token(*SET)
    assert (ended.code, len(rig.undo_files())) == (1, 1)
    assert "memory: it was 16384, and is 1" in ended.err
    assert "hostpci0: found mapping=a10, wanted mapping=a10,pcie=1" in ended.err

    def unreadable() -> Callable[[], None]:
        def after() -> None:
            rig.cluster.faults = [("GET", ".*config", double.status(595, "No route to host"))]

        return after

    rig.cluster.vms[120] = stopped_vm()
    rig.cluster.faults = [("PUT", ".*config", unreadable)]
    ended = rig.token(*SET)
    assert (ended.code, "was written, and can't be read back" in ended.err) == (5, True)


def test_pvesh_says_the_same(rig: Rig) -> None:
    for fault, code in ANSWERS[:4]:
        rig.cluster.faults = [("PUT", ".*config", fault)]
        ended = rig.local("--gpu", "01:00", "--apply")
        assert (ended.code, rig.undo_files()) == (code, []), ended
    rig.cluster.faults = [("PUT", ".*config", lambda: edit(memory="1")(rig))]
    assert rig.local("--gpu", "01:00", "--apply").code == 75
