"""A recording of a host's GPUs: redacted, and the same when it is replayed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.probe import contact, recording
from tests.doubles.nvml_machine import Data, made_up_machine
from tests.support import nvml_double

PCI = [{"address": "0000:00:1e.0", "device": "0x20b0"}]
RECORD = """
import json, sys
from gpukiln.probe import recording
recording.is_simulated = lambda: False  # the double is what is recorded here
print(json.dumps(recording.make_recording(json.loads(sys.argv[1]))))
"""


def record(library: Path, spec: Path, machine: Data) -> Data:
    nvml.write_state(spec, machine)
    env = {**nvml.environment(library, spec), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", RECORD, json.dumps(PCI)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: Data = json.loads(done.stdout)
    return found


def test_a_recording_names_nobody_and_replays_as_it_was(tmp_path: Path) -> None:
    library, spec = nvml_double.build(tmp_path), tmp_path / "spec"
    machine = made_up_machine()
    private = {"uuid": "GPU-5e1f", "serial": "1652923000417"}
    machine["gpus"][0].update(private)
    machine["gpus"][0]["fabric"]["cluster"] = private["cluster"] = "7d3b" * 8
    machine["gpus"][1]["fabric"]["cluster"] = "7d3b" * 8
    machine["gpus"][0]["processes"] = [
        {"pid": 4242, "name": "/home/eve/train", "kind": "compute", "memory": 9}
    ]
    found = record(library, spec, machine)
    text = json.dumps(found)
    assert not any(word in text for word in (*private.values(), "4242", "eve"))
    assert found["pci"] == PCI
    gpu = found["nvml"]["gpus"][0]
    assert gpu["processes"] == [{"pid": 1000, "name": "process-1000", "kind": "compute", "memory": 9}]
    assert [g["fabric"]["cluster"] for g in found["nvml"]["gpus"]] == [f"{1:032x}"] * 2
    own = ("uuid", "serial", "processes", "fabric")
    assert {k: v for k, v in gpu.items() if k not in own} == {
        k: v for k, v in machine["gpus"][0].items() if k not in own
    }
    assert record(library, spec, found["nvml"]) == found


def test_an_error_in_place_of_a_uuid_is_kept() -> None:
    machine = made_up_machine()
    machine["gpus"][0]["uuid"] = {"_error": "Unknown Error", "code": 999}
    machine["gpus"][1] = {"index": 1, "error": {"_error": "GPU is lost", "code": 15}}
    assert recording.redact(machine)["gpus"][0]["uuid"]["code"] == 999
    assert recording.redact(machine)["gpus"][1] == machine["gpus"][1]


def test_without_a_gpu_there_is_nothing_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "pci_gpus", list)
    file = tmp_path / "recording.json"
    for arguments in ([], [str(file)]):
        assert recording.main(arguments) == 4
        out, err = capsys.readouterr()
        assert out == ""
        assert "no recording: found no NVIDIA GPU on the PCI bus; run it on a host with a GPU" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [([], 0, "wrote {file}"), (["-S"], 4, "has no NVML bindings (nvidia-ml-py); run it with scripts/run")],
)
def test_the_command_writes_a_file(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    """On the double of a host with two GPUs; -S leaves out every installed package."""
    library, spec, file = nvml_double.build(tmp_path), tmp_path / "spec", tmp_path / "recording.json"
    nvml.write_state(spec, made_up_machine())
    command = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from gpukiln.probe import recording; recording.is_simulated = lambda: False\n"
        f"recording.pci_gpus = lambda: {PCI!r}\n"
        f"sys.exit(recording.main([{str(file)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-I", *options, "-c", command],
        env=nvml.environment(library, spec),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert said.format(file=file) in done.stderr
    assert file.exists() == (code == 0)
    assert not file.exists() or len(json.loads(file.read_text())["nvml"]["gpus"]) == 2


def test_a_double_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "pci_gpus", lambda: PCI)
    monkeypatch.setattr(recording, "is_simulated", lambda: True)
    assert recording.main([str(tmp_path / "recording.json")]) == 4
    assert "no recording: the GPUs of this machine are simulated" in capsys.readouterr().err
    monkeypatch.setattr(contact, "is_simulated", lambda: True)
    assert contact.main([str(tmp_path / "found")]) == 4
    assert "the GPUs of this machine are simulated, wanted real ones" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
