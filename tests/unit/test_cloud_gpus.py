"""What `invoke cloud.gpus` asks the server, of instances whose machines do not run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends

from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.container import ContainerMachine
from gpukiln.clouds.embedded.gpus.requests import answer, describe_gpus
from gpukiln.clouds.embedded.gpus.settings import apply_setting
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import SLOT, State, append_region
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import MachineSpec
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.clouds.embedded.network import MachineNetwork
from gpukiln.errors import GpukilnError, IncompatibleError, UsageError
from tests.doubles.nvml_machine import made_up_machine

Ask = Callable[..., dict[str, Any]]
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({}, "KeyError"),
    ({"gpus": ["a"]}, "AttributeError"),
    ({"gpus": [{"temperature": {"gpu": "hot"}}]}, "hot"),
    ({"gpus": [{"name": "A"}] * 65}, "65 GPUs"),
    ({"gpus": [{"name": "A" * SLOT}]}, "and the limit is"),
]


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    layout = Layout(tmp_path)
    layout.create()
    return Machines(layout)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, machines: Machines) -> Iterator[Callable[[str], str]]:
    """Launch an instance of moto's, with a machine that was never started."""
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-west-2")

        def launch(instance_type: str) -> str:
            asked = {"ImageId": "ami-0123456789abcdef0", "MinCount": 1, "MaxCount": 1}
            [instance] = ec2.run_instances(**asked, InstanceType=instance_type)["Instances"]
            name, folder = instance["InstanceId"], machines.layout.machines / instance["InstanceId"]
            folder.mkdir()
            disk = AttachedDisk("vol-1", "/dev/xvda", folder / "disk")
            spec = MachineSpec(name, "container", folder, disk, folder / "console", "127.0.0.1", 22)
            machines._by_id[name] = ContainerMachine(
                spec, MachineNetwork(name, folder, address="127.0.0.1", ssh_port=22)
            )
            return str(name)

        yield launch


def tags(name: str) -> dict[str, str]:
    found: dict[str, str] = ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"].tags[name]
    return found


def refused(machines: Machines, **document: Any) -> GpukilnError:
    with pytest.raises(GpukilnError) as error:
        answer(machines, document)
    return error.value


def test_a_machine_that_does_not_run_is_marked_for_its_next_start(
    machines: Machines, launched: Callable[[str], str]
) -> None:
    name = launched("g5.xlarge")
    assert answer(machines, {"instance_id": name})["simulated"] is False
    told = answer(machines, {"instance_id": name, "switch": "on"})
    assert (told["simulated"], told["gpus"]) == (True, [])
    assert tags(name)["gpukiln:gpus"] == "simulated"
    answer(machines, {"instance_id": name, "switch": "off"})
    assert "gpukiln:gpus" not in tags(name)


def test_what_can_not_be_is_refused_with_the_next_step(
    machines: Machines, launched: Callable[[str], str]
) -> None:
    plain, gpu = launched("m5.large"), launched("g5.xlarge")
    error = refused(machines, instance_id=plain, switch="on")
    assert isinstance(error, IncompatibleError)
    assert "m5.large has no GPU" in str(error)
    error = refused(machines, instance_id=gpu, settings=["0.lost=true"])
    assert isinstance(error, IncompatibleError)
    assert f"cloud.gpus {gpu} --on" in error.hint
    assert isinstance(refused(machines, instance_id="i-none"), UsageError)
    assert isinstance(refused(machines, instance_id=gpu, sett=["0.lost=true"]), UsageError)


def test_settings_of_one_request_hold_together_or_not_at_all(
    machines: Machines, launched: Callable[[str], str], tmp_path: Path
) -> None:
    name = launched("p4d.24xlarge")
    machine, gpus = (
        machines.get(name),
        SimulatedGpus(tmp_path, tmp_path, instance_type="p4d.24xlarge", seed=name),
    )
    assert machine
    gpus.files.folder.mkdir()
    append_region(gpus.files.state.path)
    gpus.files.state.write(initial_rows(made_up_machine()))
    machine.gpus, machine.gpu_files = gpus, gpus.files
    told = answer(machines, {"instance_id": name, "settings": ["0.temperature=70", "1.lost=true"]})["gpus"]
    assert (told[0]["temperature_celsius"], told[1]["error"]) == (70, 15)
    before = gpus.files.state.rows()
    refused(machines, instance_id=name, settings=["0.temperature=71", "9.lost=true"])
    assert gpus.files.state.rows() == before
    answer(machines, {"instance_id": name, "recording": made_up_machine(1)})
    assert gpus.files.state.rows()["gpus.count"] == "1"
    before = gpus.files.state.rows()
    for recording, said in BROKEN:
        assert said in str(refused(machines, instance_id=name, recording=recording))
    assert "0 to 0" in refused(machines, instance_id=name, settings=["².lost=true"]).hint
    assert "-40 to 200" in str(refused(machines, instance_id=name, settings=["0.temperature=201"]))
    assert "no MIG profile" in str(refused(machines, instance_id=name, scenario="mig-mixed"))
    error = refused(machines, instance_id=name, settings=["0.temperature=77"], reset=["99"])
    assert "--reset 99" in str(error)
    assert gpus.files.state.rows() == before
    told = answer(machines, {"instance_id": name, "healthy": True})["gpus"]
    assert len(told) == 1, "it begins anew as what was recorded"
    told = answer(machines, {"instance_id": name, "board": "rtx-4090:2", "settings": ["1.temperature=70"]})
    assert [(gpu["name"], gpu["temperature_celsius"]) for gpu in told["gpus"]][1] == (
        "NVIDIA GeForce RTX 4090",
        70,
    )
    assert gpus.files.state.rows()["driver"] == "535.309.01"
    assert "rtx-4091" in str(refused(machines, instance_id=name, board="rtx-4091"))
    assert "not a number from 1 to 64" in str(refused(machines, instance_id=name, board="rtx-4090:65"))
    assert isinstance(refused(machines, instance_id=name, board="rtx-5090"), IncompatibleError), (
        "of branch 570"
    )


def test_what_is_shown_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "state"
    append_region(path)
    state = State(path)
    state.write(initial_rows(made_up_machine()))
    rows = state.change(lambda rows: [apply_setting(rows, text) for text in ("0.hung=true", "1.lost=true")])
    told = describe_gpus(rows)
    assert [(gpu["hung"], gpu["error"]) for gpu in told["gpus"]] == [(True, None), (False, 15)]
