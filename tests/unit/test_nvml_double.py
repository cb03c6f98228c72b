"""Unmodified programs read the double of NVML; what is gathered through it is judged as on a real machine."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.probe import child as probe_child
from gpukiln.probe import nvml as probe_nvml
from tests.doubles.nvml_machine import LOST, UNKNOWN, Data, made_up_machine
from tests.support import nvml_double
from tests.support.host_evaluate import evaluate_check
from tests.support.host_gpu_faults import gpu
from tests.support.host_machine import machine

ROOT = Path(__file__).parents[2]
GATHER = """
import json, sys
from gpukiln.probe.nvml import nvml_facts
print(json.dumps(nvml_facts(json.loads(sys.argv[1]))))
"""
PCI = [{"address": "0000:00:1e.0"}, {"address": "0000:00:1f.0"}]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_double.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_double.build(tmp_path_factory.mktemp("old"), branch=535)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec"
    nvml.write_state(path, made_up_machine())
    return path


def ask(library: Path, spec: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment against the double."""
    program = str(Path(sys.executable).parent / argv[0])
    env = {**nvml.environment(library, spec), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [program, *argv[1:]], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def gather(library: Path, spec: Path, pci: list[dict[str, str]] = PCI) -> Data:
    done = ask(library, spec, "python", "-c", GATHER, json.dumps(pci))
    assert done.returncode == 0, done.stderr
    facts: Data = json.loads(done.stdout)
    return facts


def judged(check_id: str, section: Data) -> tuple[str, str]:
    """A check's outcome on a good machine of which NVML says this."""
    data = machine(gpus=2)
    data["nvml"] = {**section, "at": data["nvml"]["at"]}
    return evaluate_check(check_id, data)


def test_pynvml_reads_the_double_and_follows_the_spec_while_it_runs(library: Path, spec: Path) -> None:
    env = nvml.environment(library, spec)
    code = """
import sys, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000001")
for line in sys.stdin:
    device = n.nvmlDeviceGetPciInfo(h).device
    print(n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetTemperature(h, 0), device, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        said = []
        for degrees in (31, 77):
            data = made_up_machine()
            data["gpus"][1]["temperature"]["gpu"] = degrees
            nvml.write_state(spec, data)
            child.stdin.write("next\n")
            child.stdin.flush()
            said.append(child.stdout.readline().split())
        child.stdin.close()
    assert said == [["1", "31", "31"], ["1", "77", "31"]]  # 0x1f is 31


def test_gpustat_reads_the_double(library: Path, spec: Path) -> None:
    data = made_up_machine()
    data["gpus"][0].update(utilization={"gpu": 93, "memory": 40}, fan=55)
    data["gpus"][1]["processes"] = [{"pid": os.getpid(), "name": "train", "kind": "compute", "memory": 1024}]
    nvml.write_state(spec, data)
    done = ask(library, spec, "gpustat", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["driver_version"] == "535.309.01"
    first, second = said["gpus"]
    assert (first["utilization.gpu"], first["fan.speed"], first["memory.total"]) == (93, 55, 40960)
    assert [(p["pid"], p["gpu_memory_usage"]) for p in second["processes"]] == [(os.getpid(), 1024)]


def test_nvitop_reads_the_double(library: Path, spec: Path) -> None:
    done = ask(library, spec, "nvitop", "-1")
    assert done.returncode == 0, done.stderr
    assert "CUDA Driver Version: 12.2" in done.stdout
    assert done.stdout.count("A100-SXM4-40GB") == 2
    assert "52W / 400W" in done.stdout
    assert "FunctionNotFound" not in done.stderr


def test_a_function_that_an_older_driver_lacks_is_not_found(old_library: Path, spec: Path) -> None:
    code = """
import pynvml as n
n.nvmlInit()
try:
    n.nvmlDeviceGetTemperatureV(n.nvmlDeviceGetHandleByIndex(0), 0)
except n.NVMLError_FunctionNotFound:
    print("not found")
"""
    assert ask(old_library, spec, "python", "-c", code).stdout == "not found\n"


@pytest.mark.parametrize("old", [False, True])
def test_what_a_spec_says_is_gathered_again(
    library: Path, old_library: Path, spec: Path, *, old: bool
) -> None:
    assert gather(old_library if old else library, spec) == made_up_machine()


def test_errors_and_what_is_not_supported_are_gathered_again(library: Path, spec: Path) -> None:
    data = made_up_machine()
    first, second = data["gpus"]
    first.update(ecc=dict.fromkeys(first["ecc"]), nvlinks=None, serial=None)
    first["fabric"] = dict.fromkeys(first["fabric"])
    second["processes"] = [{"pid": 7, "name": "Xorg", "kind": "graphics", "memory": 4}]
    second["power"]["draw"] = {**UNKNOWN, "_error": "nvmlDeviceGetPowerUsage: Unknown Error"}
    nvml.write_state(spec, data)
    assert gather(library, spec) == data


def test_memory_is_read_once_and_what_the_driver_has_reserved_is_not_used(library: Path, spec: Path) -> None:
    """nvml.h, nvmlMemory_v2_t. The suite's facts had the first form, in which reserved memory is used."""
    data = made_up_machine()
    data["gpus"][0]["memory"] = {"total": 40960, "used": 3, "reserved": 600}
    nvml.write_state(spec, data)
    said = gather(library, spec)["gpus"][0]["memory"]
    assert said == {"total": 40960, "used": 3, "reserved": 600, "free": 40357}


def test_without_a_gpu_nothing_is_loaded(tmp_path: Path, spec: Path) -> None:
    assert gather(tmp_path / "nowhere", spec, []) == made_up_machine(0)


def test_a_machine_without_the_library_says_so(tmp_path: Path, spec: Path) -> None:
    (tmp_path / nvml.SONAME).write_text("no library")
    found = gather(tmp_path / nvml.SONAME, spec)
    assert (found["available"], found["error"]["code"]) == (False, 12)
    outcome, reason = judged("gpu.nvml", found)
    assert outcome == "failed"
    assert "NVML Shared Library Not Found; nvidia-smi exits 0" in reason


def test_nvml_without_the_driver_says_so(library: Path, spec: Path) -> None:
    nvml.write_state(spec, made_up_machine(), errors={"nvmlInit": 9})
    found = gather(library, spec)
    assert (found["available"], found["error"]) == (False, {"_error": "Driver Not Loaded", "code": 9})
    assert judged("gpu.nvml", found)[0] == "failed"


def lost(data: Data) -> None:
    data["gpus"][1] = {"index": 1, "error": LOST}


def within(*path_and_value: Any) -> Callable[[Data], None]:
    fault = gpu(*path_and_value)
    return lambda data: fault({"nvml": data})


@pytest.mark.parametrize(
    ("check_id", "break_it", "words"),
    [
        ("gpu.nvml", lost, "can't reach GPU 1: nvmlDeviceGetHandleByIndex: GPU is lost"),
        ("gpu.ecc", within("ecc/volatile_uncorrected", 2), "2 uncorrected ECC errors"),
        (
            "gpu.persistence",
            within("persistence", False),
            "GPU 0 (00000000:00:1E.0): persistence mode is off",
        ),
        ("gpu.memory-repair", within("remapped_rows/pending", True), "is pending"),
        ("gpu.throttle", within("throttle/mask", 0x8), "hardware slowdown at"),
        ("gpu.clocks", within("temperature/gpu", 95), "95 degrees, wanted less than 92"),
        ("gpu.pcie-link", within("pcie/width", 8), "8 lanes, wanted 16"),
        ("gpu.mig", within("mig/pending", True), "MIG is off, and will be on after a reset"),
        (
            "gpu.idle",
            within("processes", [{"pid": 7, "name": "Xorg", "kind": "graphics"}]),
            "Xorg (7, graphics)",
        ),
        ("multi-gpu.nvlink", within("nvlinks/5/state", False), "11 of 12, not 5"),
        ("multi-gpu.p2p", within("peers/0/p2p/read", 5), "not supported"),
        ("multi-gpu.fabric", within("fabric/state", 1), "in the fabric is: not started"),
        ("multi-gpu.topology", within("peers/0/ancestor", 50), "across NUMA nodes, back: several switches"),
    ],
)
def test_a_fault_of_a_gpu_is_found_through_nvml(
    library: Path, spec: Path, check_id: str, break_it: Callable[[Data], None], words: str
) -> None:
    data = copy.deepcopy(made_up_machine())
    break_it(data)
    nvml.write_state(spec, data)
    outcome, reason = judged(check_id, gather(library, spec))
    assert outcome == "failed"
    assert words in reason


@pytest.mark.parametrize(
    ("check_id", "function"),
    [
        ("gpu.persistence", "nvmlDeviceGetPersistenceMode"),
        ("gpu.ecc", "nvmlDeviceGetEccMode"),
        ("gpu.memory-repair", "nvmlDeviceGetRemappedRows"),
        ("gpu.throttle", "nvmlDeviceGetCurrentClocksEventReasons"),
        ("gpu.clocks", "nvmlDeviceGetMaxClockInfo"),
        ("gpu.clocks", "nvmlDeviceGetMarginTemperature"),
        ("gpu.clocks", "nvmlDeviceGetFieldValues"),
        ("gpu.pcie-link", "nvmlDeviceGetCurrPcieLinkWidth"),
        ("gpu.mig", "nvmlDeviceGetMigMode"),
        ("gpu.idle", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
        ("multi-gpu.nvlink", "nvmlDeviceGetNvLinkState"),
        ("multi-gpu.nvlink", "nvmlDeviceGetNvLinkErrorCounter"),
        ("multi-gpu.p2p", "nvmlDeviceGetP2PStatus"),
        ("multi-gpu.fabric", "nvmlDeviceGetGpuFabricInfoV"),
        ("multi-gpu.topology", "nvmlDeviceGetTopologyCommonAncestor"),
    ],
)
def test_an_error_of_nvml_never_passes(library: Path, spec: Path, check_id: str, function: str) -> None:
    assert judged(check_id, gather(library, spec))[0] == "passed"
    nvml.write_state(spec, made_up_machine(), errors={f"0.{function}": 999})
    outcome, reason = judged(check_id, gather(library, spec))
    assert outcome == "failed"
    assert "Unknown Error" in reason


@pytest.mark.parametrize(
    "function", ["nvmlSystemGetConfComputeState", "nvmlSystemGetConfComputeGpusReadyState"]
)
def test_an_error_of_confidential_computing_never_passes(library: Path, spec: Path, function: str) -> None:
    nvml.write_state(spec, made_up_machine(), errors={function: 999})
    outcome, reason = judged("gpu.confidential", gather(library, spec))
    assert outcome == "failed"
    assert f"{function}: Unknown Error" in reason


def test_the_links_of_a_gpu_that_is_lost_meanwhile_are_an_error(library: Path, spec: Path) -> None:
    data = machine(gpus=2)
    data["nvml"] |= gather(library, spec)
    nvml.write_state(spec, made_up_machine(), errors={"1.nvmlDeviceGetHandleByIndex_v2": 15})
    done = ask(library, spec, "python", "-c", GATHER.replace("nvml_facts", "nvlink_facts"), json.dumps(PCI))
    data["nvlinks"] = {**json.loads(done.stdout), "at": data["nvml"]["at"] + 20}
    outcome, reason = evaluate_check("multi-gpu.nvlink", data)
    assert outcome == "failed"
    assert "GPU 1: nvlinks: nvmlDeviceGetHandleByIndex: GPU is lost" in reason


def test_a_gpu_lost_between_two_calls_fails_every_check_that_reads_it(library: Path, spec: Path) -> None:
    nvml.write_state(spec, made_up_machine(), errors={"0.nvmlDeviceGetPciInfo_v3": 15})
    assert judged("gpu.nvml", gather(library, spec)) == (
        "failed",
        "GPU 0: bus_id: nvmlDeviceGetPciInfo: GPU is lost",
    )


def test_the_gpus_of_the_bus_get_their_names() -> None:
    data = machine(gpus=2)
    probe_nvml.name_gpus(data)
    assert [g["name"] for g in data["gpus"]["pci"]] == ["NVIDIA A100-SXM4-40GB"] * 2
    probe_nvml.name_gpus({"nvml": {"_error": "gone"}, "gpus": {"_error": "gone"}})  # and nothing is raised


def test_what_hangs_or_crashes_while_it_is_asked_takes_nothing_with_it() -> None:
    with pytest.raises(RuntimeError, match="does not return in 1 s"):
        probe_child.call(lambda: time.sleep(60), 1)
    with pytest.raises(RuntimeError, match="ended with status -9"):
        probe_child.call(lambda: os.kill(os.getpid(), signal.SIGKILL), 10)
    with pytest.raises(RuntimeError, match="by zero"):
        probe_child.call(lambda: {"never": 1 // 0}, 10)
    assert probe_child.call(lambda: {"a": 1}, 10) == {"a": 1}
