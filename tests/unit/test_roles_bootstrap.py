"""What runs on a node at boot, with a PCI bus and an NVIDIA driver of this test's own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "scripts" / "bootstrap"
PRESENT = BOOTSTRAP / "nvidia-gpu-present.sh"
GPU, AUDIO, OTHER = ("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1013", "0x030000")


class Node:
    """A machine made of files: a PCI bus, commands on PATH, and where the script writes."""

    def __init__(self, folder: Path, *devices: tuple[str, str]) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.pci = folder / "pci"
        self.nodeadm = folder / "nodeadm.d"
        self.cdi = folder / "cdi"
        for path in (self.bin, self.pci, self.nodeadm):
            path.mkdir()
        for number, (vendor, kind) in enumerate(devices):
            device = self.pci / f"0000:00:{number:02x}.0"
            device.mkdir()
            for name, value in {"vendor": vendor, "class": kind, "device": "0x1eb8"}.items():
                (device / name).write_text(f"{value}\n")
        for script in ("nvidia-gpu-present", "nvidia-device-nodes"):
            (self.bin / script).symlink_to(BOOTSTRAP / f"{script}.sh")
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
                "GPUKILN_CDI": str(self.cdi / "nvidia.yaml"),
                "STATE": str(self.folder / "persistence"),
                "UVM": str(self.folder / "nvidia-uvm"),
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


DRIVER = "535.309.01"
SMI = """case $* in
  *persistence_mode*) cat "$STATE" ;;
  *name,driver_version*) echo "Tesla T4, 535.309.01" ;;
  "-pm 1") echo Enabled >"$STATE" ;;
  *) exit 2 ;;
esac"""
# As the real one: without a name the specification goes to standard output, and a name without .yaml or .json
# gets one. It writes the nodes that it finds, and can make them.
CTK = """
if [ "$1 $2" = "system create-device-nodes" ]; then exec touch "$UVM"; fi
for word; do case $word in --output=*) file=${word#--output=} ;; esac; done
case ${file:-} in '') file=/dev/stdout ;; *.yaml | *.json) ;; *) file=$file.yaml ;; esac
echo "time=now level=info msg=Generated" >&2
echo "- hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.${LIBRARIES:-535.309.01}" >"$file"
echo "  - path: /dev/nvidia-uvm-tools" >>"$file"
if [ -e "$UVM" ]; then echo "  - path: /dev/nvidia-uvm" >>"$file"; fi
"""


@pytest.mark.parametrize(
    ("devices", "code"), [((GPU,), 0), ((OTHER, AUDIO), 1), ((), 1), ((AUDIO, ("0x10de", "0x030000")), 0)]
)
def test_presence_is_vendor_and_class(
    devices: tuple[tuple[str, str], ...], code: int, tmp_path: Path
) -> None:
    assert Node(tmp_path, *devices).run(str(PRESENT)).returncode == code


SWITCH = ("0x10de", "0x068000")
B200 = ["--nvswitch", "--or-gpus", "0x2901,0x1eb8"]


@pytest.mark.parametrize(
    ("devices", "arguments", "code"),
    [
        ((GPU,), ["--nvswitch"], 1),
        ((GPU, SWITCH), ["--nvswitch"], 0),
        ((GPU, SWITCH), ["--nvswitch", "--or-gpus", "0x2901"], 0),
        ((GPU,), ["--nvswitch", "--or-gpus", "0x2901,0x3182"], 1),
        ((GPU,), B200, 0),
        ((OTHER,), B200, 1),
    ],
)
def test_a_gpu_may_stand_for_switches_that_are_no_pci_devices(
    devices: tuple[tuple[str, str], ...], arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = Node(tmp_path, *devices).run(str(PRESENT), *arguments, "--list")
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


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


class GpuNode(Node):
    """One with a T4 whose driver is loaded, persistence off, and the container toolkit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, GPU)
        (folder / "persistence").write_text("Disabled\n")
        self.command("nvidia-smi", SMI)
        self.command("nvidia-ctk", CTK)
        self.command("nvidia-modprobe", '[ "$*" = "-u -c 0" ] && touch "$UVM"')

    def fails(self, reason: str, **settings: str) -> None:
        done = self.bootstrap(**settings)
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.search(f"gpukiln-bootstrap: FAILED: {reason}", done.stderr), done.stderr
        assert not list(self.nodeadm.iterdir()), "a node that is not ready asks for GPU work"


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    return GpuNode(tmp_path)


def test_a_gpu_node_is_readied_twice(node: GpuNode) -> None:
    for said in ("persistence switched on", "persistence is on"):
        done = node.bootstrap(NODE_LABELS="example.com/rack=b7")
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
        assert done.stderr == ""
    labels = f"nvidia.com/gpu.present=true,gpukiln/driver={DRIVER},example.com/rack=b7"
    assert (node.folder / "run" / "node-labels").read_text() == f"{labels}\n"
    [drop_in] = node.nodeadm.iterdir()
    config = yaml.safe_load(drop_in.read_text())
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert config["spec"] == {"kubelet": {"flags": [f"--node-labels={labels}"]}}
    assert [path.name for path in node.cdi.iterdir()] == ["nvidia.yaml"]
    assert f"libcuda.so.{DRIVER}" in (node.cdi / "nvidia.yaml").read_text()


def test_what_is_not_finished_has_a_name_that_nobody_reads(node: GpuNode) -> None:
    """Engines read every .yaml and .json in the CDI folder, nodeadm also .yml."""
    moved = node.folder / "moved"
    node.command("mv", f'ls "{node.cdi}" "{node.nodeadm}" >>"{moved}"; exec /bin/mv "$@"')
    assert node.bootstrap().returncode == 0
    seen = {Path(line).suffix for line in moved.read_text().split() if not line.endswith(":")}
    assert seen == {".new", ".yaml"}
    assert "nvidia.yaml.new" in moved.read_text()
    assert set(re.findall(r"\S+\.yaml$", moved.read_text(), re.M)) <= {"nvidia.yaml", "50-gpukiln.yaml"}


def test_a_node_without_nodeadm_or_toolkit(node: GpuNode) -> None:
    node.nodeadm.rmdir()
    (node.bin / "nvidia-ctk").unlink()
    done = node.bootstrap()
    assert done.returncode == 0, done.stderr
    assert "no container toolkit" in done.stdout
    assert (node.folder / "run" / "node-labels").exists()
    assert not node.nodeadm.exists()


def test_the_specification_follows_the_driver(node: GpuNode) -> None:
    spec = node.cdi / "nvidia.yaml"
    spec.parent.mkdir()
    spec.write_text("- hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03\n")
    done = node.bootstrap()
    assert done.returncode == 0, done.stderr
    assert "nvidia.yaml is of another driver: written anew" in done.stdout
    assert "535.261.03" not in spec.read_text()


def test_containers_get_the_node_that_cuda_opens(node: GpuNode) -> None:
    """nvidia-smi makes none, and neither does loading the driver."""
    assert node.bootstrap().returncode == 0
    assert "path: /dev/nvidia-uvm\n" in (node.cdi / "nvidia.yaml").read_text()


def test_without_the_driver_s_tool_the_toolkit_makes_the_nodes(node: GpuNode) -> None:
    (node.bin / "nvidia-modprobe").unlink()
    done = node.bootstrap()
    assert done.returncode == 0, done.stderr
    assert "path: /dev/nvidia-uvm\n" in (node.cdi / "nvidia.yaml").read_text()


def test_a_gpu_that_is_gone_takes_its_labels_along(node: GpuNode) -> None:
    assert node.bootstrap().returncode == 0
    for device in node.pci.iterdir():
        (device / "vendor").write_text("0x1013\n")
    assert node.bootstrap().returncode == 0
    assert not list(node.nodeadm.iterdir())


# --- every way to fail ----------------------------------------------------------------------------------


def test_a_driver_that_does_not_load_fails_in_time(node: GpuNode) -> None:
    (node.nodeadm / "50-gpukiln.yaml").write_text("of an earlier boot")
    node.command("modprobe", "echo 'no such device'; exit 1")
    node.fails(r"the driver is not ready after \d+ s: no such device")


def test_a_command_that_hangs_fails_in_time(node: GpuNode) -> None:
    # far longer than the test waits for the script
    node.command("nvidia-smi", "exec sleep 600")
    node.fails("the driver is not ready after ")


def test_a_lost_gpu_fails(tmp_path: Path) -> None:
    node = Node(tmp_path, GPU, GPU)
    node.command("nvidia-smi", SMI)
    done = node.bootstrap()
    assert done.returncode == 1
    assert "nvidia-smi lists 1 of 2 GPUs" in done.stderr


def test_a_driver_that_comes_late_is_waited_for(node: GpuNode) -> None:
    node.command("modprobe", f'[ -e "{node.folder}/tried" ] && exit; touch "{node.folder}/tried"; exit 1')
    done = node.bootstrap(WAIT_S="20")
    assert done.returncode == 0, done.stderr
    assert re.search(r"driver ready after [1-9]\d* s", done.stdout)


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ("echo not supported; exit 3", "nvidia-smi -pm 1: not supported"),
        ("exit 0", "persistence is off after nvidia-smi -pm 1"),
    ],
)
def test_persistence_that_stays_off(node: GpuNode, switch: str, reason: str) -> None:
    node.command("nvidia-smi", SMI.replace('echo Enabled >"$STATE"', switch))
    node.fails(reason)


def test_a_specification_that_can_not_be_made(node: GpuNode) -> None:
    node.cdi.mkdir()
    (node.cdi / "nvidia.yaml").write_text("as it was")
    node.command("nvidia-ctk", "echo 'level=error msg=\"no NVML\"' >&2; exit 1")
    node.fails('nvidia-ctk cdi generate: level=error msg="no NVML"')
    assert (node.cdi / "nvidia.yaml").read_text() == "as it was"


def test_nodes_that_can_not_be_made(node: GpuNode) -> None:
    node.command("nvidia-modprobe", "echo 'no such module'; exit 1")
    node.fails("nvidia-device-nodes exits 1: no such module")
    node.command("nvidia-modprobe", "exit 0")
    node.fails("Found no /dev/nvidia-uvm in the CDI specification, wanted it")


def test_libraries_of_another_version(node: GpuNode) -> None:
    node.fails(f"Found driver {DRIVER} loaded and none of its libraries", LIBRARIES="535.309.02")


def test_a_wrong_setting(node: GpuNode) -> None:
    node.fails("Found WAIT_S=soon, wanted a number of seconds", WAIT_S="soon")


def test_a_probe_that_fails(node: GpuNode) -> None:
    (node.bin / "nvidia-gpu-present").unlink()
    node.command("nvidia-gpu-present", "exit 2")
    node.fails("nvidia-gpu-present exits 2")


def test_an_error_that_nobody_thought_of(node: GpuNode) -> None:
    (node.folder / "run").write_text("a file where the folder should be")
    node.fails("unexpected error in line ")


# --- the unit -------------------------------------------------------------------------------------------

# The lines of NVIDIA/nvidia-container-toolkit:deployments/systemd that order its unit.
REFRESH = {
    "1.18": "",
    "1.19.0": "After=multi-user.target",
    "engines after it": "Before=docker.service containerd.service crio.service",
}


@pytest.mark.parametrize("toolkit", REFRESH)
def test_the_unit_is_in_no_cycle_with_the_toolkit_s(toolkit: str, tmp_path: Path) -> None:
    """systemd leaves a unit of a cycle out, and boots on."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on PATH")
    ours = (ROOT / "roles/gpu_bootstrap/files/gpukiln-bootstrap.service").read_text()
    start = "\n[Service]\nType=oneshot\nExecStart=/bin/true\n"
    units = {
        "gpukiln-bootstrap": re.sub(r"(?m)^ExecStart=.*", "ExecStart=/bin/true", ours),
        "nvidia-cdi-refresh": f"[Unit]\n{REFRESH[toolkit]}\n{start}",
        "containerd": start,
        "docker": f"[Unit]\nAfter=containerd.service\n{start}",
    }
    wants = tmp_path / "multi-user.target.wants"
    wants.mkdir()
    for name, text in units.items():
        (tmp_path / f"{name}.service").write_text(text)
        (wants / f"{name}.service").symlink_to(f"../{name}.service")
    done = subprocess.run(
        [analyze, "verify", "--man=no", "multi-user.target"],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:/usr/lib/systemd/system"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cycle" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


# --- the role -------------------------------------------------------------------------------------------


def test_a_label_that_no_kubelet_takes_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    label = {"rack": "b 7"}
    playbook = tmp_path / "site.yml"
    role = {"ansible.builtin.include_role": {"name": "gpu_bootstrap", "tasks_from": "install"}}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [role]}
    playbook.write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            *("--check", "-e", json.dumps({"gpu_bootstrap_node_labels": label}), str(playbook)),
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"Found the node label {next(iter(label))}=" in done.stdout
