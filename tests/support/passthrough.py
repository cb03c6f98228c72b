"""What the tests of node.passthrough share: a Proxmox VE with a VM and GPUs, and what is typed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpukiln.nodes.passthrough import api
from gpukiln.nodes.passthrough import host as hosts
from gpukiln.nodes.passthrough.pvesh import Pvesh
from tests.support import documents
from tests.support import pve as double
from tests.support.exit_codes import invoke
from tests.support.pve import TOKEN, Cluster, entry, serve

A10, RTX, T4 = "0000:01:00.0", "0000:02:00", "0000:03:00.0"
VFIO = dict.fromkeys((A10, T4, *(f"{RTX}.{n}" for n in range(4))), "vfio-pci")
EFI = "local-lvm:vm-120-disk-0,efitype=4m,pre-enrolled-keys=0,size=4M"


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return documents.read(self.out)

    def check(self, name: str) -> dict[str, Any]:
        return next(one for one in self.json["checks"] if one["id"] == name)

    def result(self, name: str) -> tuple[str, str, int]:
        """Outcome, severity and exit code of one check."""
        found = self.check(name)
        return found["outcome"], found["severity"], found["exit_code"]


class Rig(NamedTuple):
    cluster: Cluster
    https: tuple[str, ...]
    run: Callable[..., Said]
    folder: Path
    real: Callable[[], None]

    def local(self, *words: str, vm: str = "120") -> Said:
        return self.run("--pve", "local", "--vm", vm, *words)

    def token(self, *words: str, vm: str = "120") -> Said:
        return self.run(*self.https, "--vm", vm, *words)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.cluster.vms[120]["config"])

    def undo_files(self) -> list[Path]:
        return sorted((self.folder / "home/passthrough").glob("*"))


def stopped_vm() -> dict[str, Any]:
    config = {"name": "train", "machine": "q35", "bios": "ovmf", "efidisk0": EFI, "memory": "16384"}
    return {"node": "pve1", "status": "stopped", "config": config}


@contextlib.contextmanager
def rigged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Rig]:
    """A host, a VM, a mapping of the A10, and a token that may all that is needed."""
    cluster = Cluster(vms={120: stopped_vm()})
    cluster.mappings["a10"] = {"map": [entry("pve1", "0000:01:00", cluster.pci[A10])]}
    cluster.rights = {
        "/": {"Sys.Audit"},
        "/vms": {"VM.Audit", "VM.Allocate", "VM.Config.HWType", "VM.Config.Disk", "VM.Config.Cloudinit"},
        "/mapping/pci": {"Mapping.Use"},
        "/storage": {"Datastore.Audit", "Datastore.AllocateSpace", "Datastore.AllocateTemplate"},
    }
    cluster.storages = {
        "local": {"content": "iso,vztmpl,import", "avail": 50 << 30, "active": 1, "type": "dir"},
        "local-lvm": {"content": "images,rootdir", "avail": 50 << 30, "active": 1, "type": "lvmthin"},
    }
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "leases"))
    monkeypatch.setattr(hosts, "ROOT", str(double.host(tmp_path / "root", cluster, VFIO)))
    monkeypatch.setattr(socket, "gethostname", lambda: "pve1.example.org")
    monkeypatch.setattr(api, "POLL_S", 0.01)

    def run(*words: str) -> Said:
        with pytest.raises(SystemExit) as ended:
            invoke(["node.passthrough", *words])
        shown = capfd.readouterr()
        return Said(int(ended.value.code or 0), shown.out, shown.err)

    with serve(cluster, tmp_path) as (where, ca, _):
        monkeypatch.setenv(api.TOKEN_VARIABLE, TOKEN)
        with monkeypatch.context() as patched:
            # without a process for each call; `programs` has them
            patched.setattr(Pvesh, "_exec", lambda _, words: double.pvesh(cluster, words))
            yield Rig(cluster, ("--pve", where, "--ca", str(ca)), run, tmp_path, patched.undo)
