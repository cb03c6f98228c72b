"""GPUs for containers: one rendering, by what the engine says of itself, and what mends one that can't."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.gpus import engines
from gpukiln.gpus.config import Config
from gpukiln.gpus.engines import (
    ContainerEngine,
    arguments,
    cdi_devices,
    device_nodes,
    device_request,
    devices_of_container,
    injection_method,
    read_engine,
)
from gpukiln.gpus.leases import CONTAINER, LeaseHolder, Leases
from gpukiln.gpus.model import GpuProcess
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import device, snapshot, uuid

ONE, TWO = uuid(1), uuid(2)
BOTH = frozenset({ONE, TWO})
# As `nvidia-ctk cdi generate` writes it, shortened (NVIDIA/nvidia-container-toolkit, README, CDI).
CDI = f"""---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
- name: {ONE}
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
containerEdits:
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
"""


def docker(**values: Any) -> ContainerEngine:
    made = {
        "name": "docker",
        "version": "28.2.2",
        "runtimes": ("runc",),
        "cdi_devices": frozenset(),
        "hook": False,
    }
    return ContainerEngine(**{**made, "toolkit": True, **values})


@pytest.mark.parametrize(
    ("engine", "by"),
    [
        (docker(cdi_devices=BOTH), "cdi"),
        (docker(cdi_devices=frozenset({ONE}), hook=True), "hook"),
        (docker(hook=True), "hook"),
        (docker(runtimes=("nvidia", "runc")), "runtime"),
        (docker(name="podman", cdi_devices=BOTH), "cdi"),
    ],
)
def test_an_engine_gives_gpus_by_what_it_has(engine: ContainerEngine, by: str) -> None:
    assert injection_method(engine, [ONE, TWO]) == by


@pytest.mark.parametrize(
    ("engine", "told", "hint"),
    [
        (docker(), "docker 28.2.2 can't use GPUs", "role nvidia_container_toolkit"),
        (docker(cdi_devices=frozenset({ONE})), f"does not name {TWO}", "nvidia-ctk cdi generate"),
        (docker(name="podman"), "podman has no CDI specification", "nvidia-ctk cdi generate"),
        (docker(name="podman", toolkit=False), "podman has no CDI", "install nvidia-container-toolkit"),
    ],
)
def test_an_engine_that_can_not_says_what_mends_it(engine: ContainerEngine, told: str, hint: str) -> None:
    with pytest.raises(UnavailableError, match=told) as error:
        injection_method(engine, [ONE, TWO])
    assert hint in error.value.hint


def test_every_rendering_names_the_devices_by_uuid() -> None:
    assert arguments([ONE, TWO], "podman") == [
        *("--device", f"nvidia.com/gpu={ONE}"),
        *("--device", f"nvidia.com/gpu={TWO}"),
    ]
    assert arguments([ONE], "docker", by="cdi") == ["--device", f"nvidia.com/gpu={ONE}"]
    assert arguments([ONE, TWO], "docker", by="hook") == [
        "--gpus",
        f'"device={ONE},{TWO}","capabilities=compute,utility"',
    ]
    assert arguments([ONE], "docker", by="runtime")[:4] == [
        *("--runtime", "nvidia", "--env", f"NVIDIA_VISIBLE_DEVICES={ONE}"),
    ]
    service = {"services": {"job": yaml.safe_load("\n".join(arguments([ONE, TWO], "compose", ["video"])))}}
    [given] = service["services"]["job"]["deploy"]["resources"]["reservations"]["devices"]
    assert given == {"driver": "nvidia", "device_ids": [ONE, TWO], "capabilities": ["gpu", "video"]}
    lines = arguments([ONE, TWO], "systemd", allowed=["/dev/nvidia1", "/dev/nvidia2"])
    assert lines[0] == f"Environment=CUDA_VISIBLE_DEVICES={ONE},{TWO}"
    assert lines[-2:] == ["DeviceAllow=/dev/nvidia1 rw", "DeviceAllow=/dev/nvidia2 rw"]
    assert device_request([ONE]) == {
        "Driver": "nvidia",
        "DeviceIDs": [ONE],
        "Capabilities": [["gpu", "compute", "utility"]],
    }
    with pytest.raises(UsageError, match="--capabilities has 'cuda'"):
        arguments([ONE], "docker", ["cuda"])
    for engine in ("docker", "podman", "systemd"):
        with pytest.raises(UsageError, match=f"--capabilities video for {engine}"):
            arguments([ONE], engine, ["video"])
    assert "video" in arguments([ONE], "docker", ["video"], by="hook")[1]


def test_docker_understands_what_is_rendered() -> None:
    """Its command reads options before it looks for a daemon."""
    if shutil.which("docker") is None:
        pytest.skip("no docker here")
    nowhere = ["docker", "--host", "unix:///nowhere", "run"]

    def said(*words: str) -> str:
        return subprocess.run([*nowhere, *words, "image"], capture_output=True, text=True, check=False).stderr

    for by in ("hook", "cdi", "runtime"):
        assert "annot connect to the Docker daemon" in said(*arguments([ONE, TWO], "docker", by=by))
    assert "invalid argument" in said("--gpus", f"device={ONE},{TWO}")  # without the quotes


def test_compose_reads_it_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    lines = ["services:", "  job:", "    image: x", *(f"    {line}" for line in arguments([ONE], "compose"))]
    file.write_text("\n".join(lines))
    checker = shutil.which("check-jsonschema")
    assert checker
    asked = [checker, "--builtin-schema", "vendor.compose-spec", str(file)]
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0
    file.write_text(file.read_text().replace("capabilities:", "capability:"))
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 1


def test_devices_of_a_specification_are_read_and_those_of_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(CDI)
    (tmp_path / "other.yaml").write_text(CDI.replace("nvidia.com/gpu", "example.com/nic").replace(ONE, TWO))
    found = cdi_devices([f"{tmp_path}/*.yaml"])
    assert {ONE, "0", "all"} <= found
    assert TWO not in found


Tool = Callable[[str, str], None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a program on PATH, of which a script says what it answers."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def put(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


def test_docker_is_asked_what_it_found(tool: Tool) -> None:
    info = {
        "ServerVersion": "28.2.2",
        "Runtimes": {"runc": {}, "nvidia": {}},
        "DiscoveredDevices": [{"Source": "cdi", "ID": f"nvidia.com/gpu={ONE}"}],
    }
    tool("docker", f"echo '{json.dumps(info)}'")
    found = read_engine("docker")
    assert (found.runtimes, found.cdi_devices, found.hook) == (("nvidia", "runc"), frozenset({ONE}), False)
    tool("nvidia-container-runtime-hook", "")
    assert read_engine("docker").hook


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 3", "docker info --format: "),
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "Cannot connect to the Docker daemon"),
        ("""echo '{"ServerErrors": ["Cannot connect"]}'""", "docker: Cannot connect"),
        ("sleep 9", "docker does not answer"),
    ],
)
def test_a_docker_that_does_not_answer_is_told(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    monkeypatch.setattr(engines, "QUERY_S", 0.5)
    tool("docker", script)
    with pytest.raises(UnavailableError, match=told):
        read_engine("docker")


def test_a_memory_limit_is_refused_with_what_can_be_had() -> None:
    part = device(0, uuid="MIG-1", kind="mig", profile="2g.10gb", memory_total_mib=9856, parent=ONE)
    error = engines.memory_limit_error(8192, [device(1), part])
    assert isinstance(error, IncompatibleError)
    assert error.exit_code == 3
    assert error.details[0] == "a MIG device 2g.10gb of 9856 MiB: --mig 2g.10gb"


PART = "MIG-00000000-0000-0000-0000-000000000001"
EVERY = (ONE, TWO, PART)
# GPU 2 is cut up, and /dev/nvidia7.
MACHINE = [
    device(0, uuid=ONE, minor=0),
    device(1, uuid=TWO, minor=1),
    device(2, uuid=uuid(3), minor=7),
    device(2, uuid=PART, kind="mig", mig_index=0, parent=uuid(3)),
]
PODMAN = {"Devices": [{"PathOnHost": "/dev/nvidiactl"}, {"PathOnHost": "/dev/nvidia0"}]}


def asked(capability: str, **values: Any) -> dict[str, Any]:
    """A DeviceRequest as `docker inspect` shows it."""
    return {"Driver": "", "Count": 0, "DeviceIDs": None, "Capabilities": [[capability]], **values}


@pytest.mark.parametrize(
    ("host", "config", "wanted"),
    [
        ({"DeviceRequests": [asked("gpu", DeviceIDs=[ONE, TWO])]}, {}, (ONE, TWO)),
        ({"DeviceRequests": [asked("gpu", Count=-1)]}, {}, (ONE, TWO, PART)),  # --gpus all
        ({"DeviceRequests": [asked("gpu", Count=2)]}, {}, (ONE, TWO)),  # --gpus 2
        ({"DeviceRequests": [asked("gpu", DeviceIDs=["1", "2:0"])]}, {}, (TWO, PART)),
        ({"DeviceRequests": [asked("tpu", Count=-1)]}, {}, ()),
        ({"DeviceRequests": [asked("", Driver="cdi", DeviceIDs=[f"nvidia.com/gpu={ONE}"])]}, {}, (ONE,)),
        ({"DeviceRequests": [asked("", Driver="cdi", DeviceIDs=["nvidia.com/gpu=all"])]}, {}, EVERY),
        ({"DeviceRequests": [asked("", Driver="cdi", DeviceIDs=["example.com/nic=all"])]}, {}, ()),
        # Podman: the command, or the nodes that CDI led to.
        (PODMAN, {"CreateCommand": ["podman", "run", "--device", f"nvidia.com/gpu={TWO}", "i"]}, (TWO,)),
        (PODMAN, {"CreateCommand": ["podman", "run", "--device=nvidia.com/gpu=all", "i"]}, EVERY),
        (PODMAN, {}, (ONE,)),
        ({"Devices": [{"PathOnHost": "/dev/nvidia7"}]}, {}, (PART,)),
        ({"Devices": [{"PathOnHost": "/dev/nvidiactl"}]}, {}, ()),
        ({"Runtime": "nvidia"}, {"Env": [f"NVIDIA_VISIBLE_DEVICES={ONE}"]}, (ONE,)),
        ({"Runtime": "nvidia"}, {"Env": ["NVIDIA_VISIBLE_DEVICES=all"]}, EVERY),
        ({"Runtime": "runc"}, {"Env": [f"NVIDIA_VISIBLE_DEVICES={ONE}"]}, ()),
        ({}, {"Env": ["NVIDIA_VISIBLE_DEVICES=all"]}, ()),
    ],
)
def test_what_a_container_was_given_is_read(host: Any, config: Any, wanted: tuple[str, ...]) -> None:
    assert devices_of_container({"HostConfig": host, "Config": config}, MACHINE) == wanted


def test_a_unit_may_open_the_nodes_of_its_own_devices_alone() -> None:
    assert device_nodes([TWO], MACHINE) == ["/dev/nvidia1"]
    assert device_nodes([PART], MACHINE) == ["/dev/nvidia7", "char-nvidia-caps"]
    with pytest.raises(UnavailableError, match=f"device node of {ONE} is not known"):
        device_nodes([ONE], [device(0, uuid=ONE)])


# What `docker ps` and `docker inspect` say of one container that runs as long as a file is there.
DOCKER = """
test -e "{folder}/runs" || {{ [ $1 = ps ] && exit 0; }}
case $1 in
  ps) echo {id} ;;
  inspect) cat "{folder}/inspect" ;;
esac
"""


def test_the_lease_of_a_container_ends_with_it_and_one_without_a_lease_gets_one(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = "0123456789abcdef" * 4
    said = [
        {
            "Id": id,
            "HostConfig": {"DeviceRequests": [asked("gpu", DeviceIDs=["1"])]},
            "Config": {"Image": "train"},
        }
    ]
    (tmp_path / "inspect").write_text(json.dumps(said))
    (tmp_path / "runs").touch()
    tool("docker", DOCKER.format(folder=tmp_path, id=id))
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "state"))
    job = GpuProcess(os.getpid(), TWO, "compute", "running", user="eve", uid=1003, command="python3 train.py")
    found = snapshot(device(1), device(2), processes=(job,))
    leases = Leases(LeaseStore(tmp_path / "state"), take_snapshot=lambda: found, config=Config(Path("none")))
    assert leases.reconcile(LeaseHolder("ann", 1001)) == ["L-1", "L-2"]
    assert leases.reconcile(LeaseHolder("ann", 1001)) == []
    box, process = leases.current()
    assert (box.kind, box.uuids, box.user, box.command) == (
        *(CONTAINER, (ONE,), "ann"),
        f"container {id[:12]} (train)",
    )
    assert (process.user, process.uuids) == ("eve", (TWO,))
    (tmp_path / "runs").unlink()
    assert [one.id for one in leases.current()] == ["L-2"]
    tool("docker", "exit 1")  # it does not answer: nothing is given away
    granted = leases.acquire(DeviceRequest(), LeaseHolder("ann", 1001), kind=CONTAINER, engine="docker")
    for number in granted.descriptors:
        os.close(number)
    assert {one.id for one in leases.current()} == {"L-2", granted.lease.id}
    leases.store.close()
