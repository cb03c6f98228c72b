"""AMD's GPUs in the same snapshot: every version's output is read, what is broken is told."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from gpukiln.errors import BusyError, IncompatibleError
from gpukiln.gpus import amd, collect
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.leases import Leases, device_environment, whoami
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.probe import base
from tests.support import amd_smi, documents, gpus

Typed = Callable[..., tuple[int, str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """This process sees AMD's GPUs."""
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "leases"))
    monkeypatch.setenv("GPUKILN_GPUS_CONFIG", str(tmp_path / "gpus.toml"))
    monkeypatch.setattr(base, "PCI", str(tmp_path / "pci"))
    monkeypatch.setattr(amd, "MODULE", str(tmp_path / "amdgpu"))
    monkeypatch.setattr(amd, "ROCM_TOOL", str(tmp_path / "nowhere"))
    monkeypatch.setattr(collect, "in_container", lambda: False)
    monkeypatch.setattr(collect, "is_simulated", lambda: False)
    monkeypatch.setattr(base.watch, "hung", {})

    def make(version: str = "7.0", count: int = 2, before: str = "", **changed: Any) -> Path:
        amd_smi.bus(tmp_path / "pci", count)
        (tmp_path / "amdgpu").mkdir(exist_ok=True)
        pids = changed.pop("pids", None)
        told = {**amd_smi.outputs(version, count, pids), **changed}
        folder = amd_smi.install(tmp_path / "bin", told, before=before)
        monkeypatch.setattr(base, "PATH", f"{folder}:/usr/bin:/bin")
        return tmp_path

    return make


@pytest.fixture
def typed(typed_gpu: Callable[..., tuple[int, str, str]]) -> Typed:
    def run(*words: str) -> tuple[int, str]:
        code, out, err = typed_gpu(*words)
        return code, out + err

    return run


@pytest.mark.parametrize("version", amd_smi.VERSIONS)
def test_every_version_tells_the_same(machine: Callable[..., Path], version: str) -> None:
    machine(version)
    found = snapshot()
    assert (found.state, found.source, found.code) == ("ok", "amd-smi", 0), found.message
    one = found.devices[0]
    assert (one.uuid, one.vendor, one.name) == (amd_smi.uuid(0), "amd", amd_smi.NAMES[version])
    assert (one.bus_id, one.pci_id, one.cpus) == ("0000:05:00.0", "0x74A11002", "0-47")
    assert (one.memory_total_mib, one.memory_used_mib, one.memory_free_mib) == (196592, 283, 196309)
    assert (one.utilization_percent, one.power_watts, one.temperature_c) == (42, 141.0, 38)
    assert one.power_limit_watts == {"5.6": 560.0, "6.2": 750.0, "7.0": 1000.0}[version]
    assert one.temperature_margin_c == (72 if version == "5.6" else 62)
    assert one.pcie_generation_max == (4 if version == "5.6" else 5)
    assert (one.clock_sm_mhz, one.clock_memory_max_mhz, one.pcie_width) == (132, 1300, 16)
    assert one.vbios
    assert found.driver.version
    assert found.driver.cuda is None


@pytest.mark.parametrize("verb", ["list", "show", "memory", "processes"])
@pytest.mark.parametrize("version", amd_smi.VERSIONS)
def test_every_null_has_its_reason_and_every_document_its_form(
    machine: Callable[..., Path], typed: Typed, version: str, verb: str
) -> None:
    machine(version, 8, pids={3: os.getpid()})
    code, said = typed(verb)
    assert code == 0, said
    code, said = typed(verb, "--json")
    document = json.loads(said)
    documents.check(document)
    for device in document["nodes"][0]["devices"]:
        for name, value in device.items():
            if name != "error":
                assert (value is None) == (name in device["unavailable"]), name


def test_a_program_is_on_the_gpus_of_whose_memory_it_has_some(machine: Callable[..., Path]) -> None:
    for version in amd_smi.VERSIONS:
        machine(version, 4, pids={2: os.getpid()})
        found = snapshot()
        assert [(job.pid, job.device, job.memory_mib) for job in found.processes or ()] == [
            (os.getpid(), amd_smi.uuid(2), 2245)
        ]


BROKEN = {
    "no-driver": ("no-driver", "the kernel module amdgpu is not loaded", {}),
    "missing": ("no-library", "amd-smi is not installed", {}),
    "permission": (
        "no-permission",
        "required groups",
        {
            "before": 'echo "RuntimeError: WARNING: User is missing the following required groups: video" '
            ">&2; exit 1"
        },
    ),
    "hang": ("hung", "amd-smi hangs", {"before": "sleep 60"}),
    "broken": ("failed", "does not print JSON", {"list": '[{"gpu": 0,'}),
    "nothing": ("failed", "exits with 0", {"list": "No GPUs"}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_has_an_answer_of_its_own(
    machine: Callable[..., Path], typed: Typed, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    state, said, how = BROKEN[fault]
    monkeypatch.setattr(amd, "LIMIT_S", 1.0 if fault == "hang" else 30.0)
    monkeypatch.setattr(base, "HUNG_S", 1)
    folder = machine(**how)
    if fault == "missing":
        (folder / "bin/amd-smi").unlink()
    if fault == "no-driver":
        (folder / "amdgpu").rmdir()
    code, text = typed("list", "--json")
    node = json.loads(text)["nodes"][0]
    assert (code, node["state"], node["source"]) == (4, state, "amd-smi")
    assert said in node["message"]
    assert node["fix"]
    assert typed("lease")[0] == 4


@pytest.mark.parametrize("how", ["exit 3", "sleep 60"])
def test_one_question_without_an_answer_costs_its_own_fields(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(amd, "LIMIT_S", 1.0)
    monkeypatch.setattr(base, "HUNG_S", 1)
    machine(before=f'[ "$1" != metric ] || {how}')
    found = snapshot()
    one = found.devices[0]
    assert (found.state, one.name) == ("ok", "AMD Instinct MI350X")
    assert one.memory_used_mib is None
    assert "metric" in one.unavailable["memory_used_mib"]
    assert any("metric" in problem.message for problem in found.errors)


def test_warnings_before_the_document_are_passed_over(machine: Callable[..., Path]) -> None:
    machine(before='echo "WARNING: [something] is old"')
    assert len(snapshot().devices) == 2


def test_a_gpu_that_amd_smi_does_not_list_is_a_row(machine: Callable[..., Path], typed: Typed) -> None:
    machine(
        count=3,
        list=amd_smi.outputs("7.0", 2)["list"],
        static=amd_smi.outputs("7.0", 2)["static"],
        metric=amd_smi.outputs("7.0", 2)["metric"],
        process=[],
    )
    code, said = typed("list", "--json")
    assert code == 5
    rows = json.loads(said)["nodes"][0]["devices"]
    assert [row["bus_id"] for row in rows] == [amd_smi.address(n) for n in range(3)]
    assert "does not list it" in rows[2]["error"]


def test_partitions_that_share_a_number_are_not_leased(machine: Callable[..., Path]) -> None:
    told = amd_smi.outputs("7.0", 2)
    told["static"]["gpu_data"][1]["asic"]["asic_serial"] = amd_smi.serial(0)
    machine(static=told["static"])
    assert [one.uuid for one in snapshot().devices] == [None, None]
    with pytest.raises(BusyError, match="0 of 2"):
        Leases().acquire(DeviceRequest(), whoami())


def test_a_container_sees_the_gpus_whose_nodes_it_was_given(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine()
    monkeypatch.setattr(collect, "in_container", lambda: True)
    monkeypatch.setattr(amd, "DRI", str(folder / "dri"))
    found = snapshot()
    assert (found.state, found.code) == ("not-granted", 0)
    assert "/dev/kfd" in found.fix
    (folder / "dri").mkdir()
    (folder / "dri/renderD128").write_text("")
    assert snapshot().state == "ok"


# ---- lease and run


def test_a_request_for_cuda_gets_none_of_them(machine: Callable[..., Path]) -> None:
    machine()
    for request in (DeviceRequest(cuda=((">=", (12, 1)),)), DeviceRequest(capability=(8, 0))):
        with pytest.raises(IncompatibleError):
            Leases().acquire(request, whoami())
    granted = Leases().acquire(DeviceRequest(count=2, models=("mi350x",)), whoami())
    assert granted.environment == {"ROCR_VISIBLE_DEVICES": f"{amd_smi.uuid(0)},{amd_smi.uuid(1)}"}


def test_each_vendor_has_its_variable() -> None:
    nvidia = "GPU-8c1f0000-0000-0000-0000-000000000000"
    assert device_environment((nvidia, amd_smi.uuid(0))) == {
        "CUDA_VISIBLE_DEVICES": nvidia,
        "ROCR_VISIBLE_DEVICES": amd_smi.uuid(0),
    }
    assert device_environment(("MIG-8c1f0000-0000-0000-0000-000000000000",)).keys() == {
        "CUDA_VISIBLE_DEVICES"
    }


def test_a_command_sees_its_own_gpu(machine: Callable[..., Path]) -> None:
    folder = machine()
    code = f"""
import sys
from gpukiln.gpus import amd, cli, collect
from gpukiln.probe import base
base.PCI, base.PATH, amd.MODULE = {str(folder / "pci")!r}, {base.PATH!r}, {str(folder / "amdgpu")!r}
collect.in_container = lambda: False
sys.exit(cli.main(sys.argv[1:]))
"""
    words = ("run", "--gpu", "1", "--", "sh", "-c", "echo $ROCR_VISIBLE_DEVICES; exit 7")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, f"{amd_smi.uuid(1)}\n"), done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--docker", "rocm/pytorch", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "--docker does not support AMD's GPUs yet" in done.stderr
    assert Leases().current() == []


@pytest.mark.parametrize(
    "words",
    [("topology",), ("cuda",), ("watch",), ("insights",), ("reset", "0"), ("mig", "export"), ("args", "L-1")],
)
def test_the_rest_is_not_for_amd_yet(
    machine: Callable[..., Path], typed: Typed, words: tuple[str, ...]
) -> None:
    machine()
    Leases().acquire(DeviceRequest(), whoami(), kind="detached")
    code, said = typed(*words)
    assert code == 3
    assert "not support AMD's GPUs yet" in said


# ---- GPUs of both vendors


@pytest.fixture
def both(
    machine: Callable[..., Path], loaded_nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    assert loaded_nvml

    def make(**changed: Any) -> Path:
        folder = machine(**changed)
        append_region(folder / "state")
        rows = initial_rows(make_profile("g5.12xlarge", seed="i-1", driver="580.65.06", cuda="13.0"))
        State(folder / "state").write(rows)
        monkeypatch.setenv(library.STATE, str(folder / "state"))
        monkeypatch.setattr(collect, "is_simulated", lambda: True)
        return folder

    return make


def test_gpus_of_both_vendors_are_in_one_snapshot(both: Callable[..., Path], typed: Typed) -> None:
    both()
    found = snapshot()
    assert (found.source, found.code) == ("nvml, amd-smi", 0)
    assert [one.vendor for one in found.devices] == ["nvidia"] * 4 + ["amd"] * 2
    assert found.driver.version == "580.65.06"
    assert found.device("0") is None, "two have this index"
    assert found.device(amd_smi.uuid(0)) is not None
    assert typed("list")[0] == 0
    with pytest.raises(BusyError, match="one vendor"):
        Leases().acquire(DeviceRequest(count=5), whoami())
    granted = Leases().acquire(DeviceRequest(count=2, models=("mi350x",)), whoami())
    assert granted.environment.keys() == {"ROCR_VISIBLE_DEVICES"}


def test_one_vendor_that_does_not_answer_costs_its_rows(
    both: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "HUNG_S", 1)
    monkeypatch.setattr(amd, "LIMIT_S", 1.0)
    both(before="sleep 60")
    found = snapshot()
    assert (found.state, found.code) == ("ok", 5)
    assert [one.readable for one in found.devices] == [True] * 4 + [False] * 2
    monkeypatch.setattr(base.watch, "hung", {})
    folder = both()
    State(folder / "state").change(lambda rows: rows.update({"error.code": "9"}))
    monkeypatch.setattr(base, "bus_gpus", lambda: [])
    monkeypatch.setattr(collect, "bus_gpus", lambda: [{"address": "0000:81:00.0", "device": "0x20b0"}])
    found = snapshot()
    assert (found.state, found.code) == ("ok", 5)
    assert [(one.vendor, one.readable) for one in found.devices] == [
        ("nvidia", False),
        ("amd", True),
        ("amd", True),
    ]
    assert "nvidia is not loaded" in str(found.devices[0].error)


def test_a_processor_s_own_gpu_without_rocm_is_a_note(both: Callable[..., Path]) -> None:
    (both() / "bin/amd-smi").unlink()
    found = snapshot()
    assert (found.source, found.code, len(found.devices)) == ("nvml", 0, 4)
    assert "amd-smi is not installed" in found.errors[0].message
    assert found.errors[0].severity == "info"


def test_a_group_is_of_one_vendor() -> None:
    rows = (gpus.device(0), gpus.device(0, uuid=amd_smi.uuid(0), vendor="amd", peers=()))
    found = gpus.snapshot(*rows)
    assert found.device("0") is None
