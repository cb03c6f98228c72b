"""What runs on a node at boot, with a PCI bus and an NVIDIA driver of this test's own."""

import os
import subprocess
from pathlib import Path

import pytest

BOOTSTRAP = Path(__file__).parents[2] / "scripts" / "bootstrap"
PRESENT = BOOTSTRAP / "nvidia-gpu-present.sh"
GPU, AUDIO, OTHER = ("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1013", "0x030000")


class Node:
    """A machine made of files: a PCI bus, commands on PATH, and where the script writes."""

    def __init__(self, folder: Path, *devices: tuple[str, str]) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.pci = folder / "pci"
        self.nodeadm = folder / "nodeadm.d"
        for path in (self.bin, self.pci, self.nodeadm):
            path.mkdir()
        for number, (vendor, kind) in enumerate(devices):
            device = self.pci / f"0000:00:{number:02x}.0"
            device.mkdir()
            for name, value in {"vendor": vendor, "class": kind, "device": "0x1eb8"}.items():
                (device / name).write_text(f"{value}\n")
        (self.bin / "nvidia-gpu-present").symlink_to(PRESENT)
        self.command("modprobe", "exit 0")

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, *argv: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "GPUKILN_PCI_DEVICES": str(self.pci),
                "GPUKILN_RUN": str(self.folder / "run"),
                "GPUKILN_NODEADM": str(self.nodeadm),
                "GPUKILN_CDI": str(self.folder / "cdi" / "nvidia.yaml"),
                "WAIT_S": "3",
                **settings,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def bootstrap(self, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", str(BOOTSTRAP / "eks-gpu-bootstrap.sh"), **settings)


SMI = """case $* in
  *persistence_mode*) cat "$STATE" ;;
  *name,driver_version*) echo "Tesla T4, 535.309.01" ;;
  "-pm 1") echo Enabled >"$STATE" ;;
  *) exit 2 ;;
esac"""


@pytest.mark.parametrize(
    ("devices", "code"), [((GPU,), 0), ((OTHER, AUDIO), 1), ((), 1), ((AUDIO, ("0x10de", "0x030000")), 0)]
)
def test_presence_is_vendor_and_class(
    devices: tuple[tuple[str, str], ...], code: int, tmp_path: Path
) -> None:
    assert Node(tmp_path, *devices).run(str(PRESENT)).returncode == code


def test_presence_marks_and_unmarks(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert Node(tmp_path, GPU).run(str(PRESENT), "--mark", str(mark)).returncode == 0
    assert mark.exists()
    (tmp_path / "other").mkdir()
    assert Node(tmp_path / "other", OTHER).run(str(PRESENT), "--mark", str(mark)).returncode == 0
    assert not mark.exists()


def test_without_a_gpu_it_succeeds_and_does_nothing(tmp_path: Path) -> None:
    done = Node(tmp_path, OTHER).bootstrap()
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_gpu_node_is_readied_twice(tmp_path: Path) -> None:
    node = Node(tmp_path, GPU)
    state = tmp_path / "state"
    state.write_text("Disabled\n")
    node.command("nvidia-smi", SMI)
    node.command("nvidia-ctk", 'for a; do case $a in --output=*) echo cdi >"${a#--output=}" ;; esac; done')
    for said in ("persistence switched on", "persistence is on"):
        done = node.bootstrap(STATE=str(state), NODE_LABELS="example.com/rack=b7")
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
    labels = "nvidia.com/gpu.present=true,gpukiln/driver=535.309.01,example.com/rack=b7"
    assert (tmp_path / "run" / "node-labels").read_text() == f"{labels}\n"
    assert f"- --node-labels={labels}" in (node.nodeadm / "50-gpukiln.yaml").read_text()
    assert (tmp_path / "cdi" / "nvidia.yaml").read_text() == "cdi\n"
    assert sorted(path.name for path in (tmp_path / "cdi").iterdir()) == ["nvidia.yaml"]


def test_a_driver_that_does_not_load_fails_in_time(tmp_path: Path) -> None:
    node = Node(tmp_path, GPU)
    node.command("modprobe", "echo 'no such device'; exit 1")
    done = node.bootstrap()
    assert done.returncode == 1
    assert "FAILED: the driver is not ready after" in done.stderr
    assert "no such device" in done.stderr


def test_a_lost_gpu_fails(tmp_path: Path) -> None:
    node = Node(tmp_path, GPU, GPU)
    node.command("nvidia-smi", SMI)
    done = node.bootstrap(STATE=str(tmp_path / "state"))
    assert done.returncode == 1
    assert "nvidia-smi lists 1 of 2 GPUs" in done.stderr
