"""What programs ask of NVML is there, is listed, and agrees with the catalogue in what they show."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukiln.catalog.boards import board
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.fidelity import functions
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.settings import play_scenario
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from tests.support import nvml_double

ROOT = Path(__file__).resolve().parents[2]
TYPES = ("g4dn.xlarge", "g5.12xlarge", "p4d.24xlarge", "p5.48xlarge", "g6f.xlarge")
# What programs call. nvtop: src/extract_gpuinfo_nvidia.c (3.0 to 3.2); go-nvlib: pkg/nvlib/device
# (NVIDIA/go-nvlib), by go-nvml's names; k8s-device-plugin: internal/rm/health.go.
ASKED = {
    "nvtop": """nvmlInit nvmlShutdown nvmlErrorString nvmlDeviceGetCount nvmlDeviceGetHandleByIndex
        nvmlDeviceGetName nvmlDeviceGetPciInfo_v3 nvmlDeviceGetMaxPcieLinkGeneration
        nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetTemperatureThreshold nvmlDeviceGetClockInfo
        nvmlDeviceGetMaxClockInfo
        nvmlDeviceGetUtilizationRates nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2
        nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetPcieThroughput
        nvmlDeviceGetFanSpeed nvmlDeviceGetTemperature nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit
        nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization nvmlDeviceGetProcessUtilization
        nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v3
        nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlDeviceGetMigMode""",
    "go-nvlib": """nvmlInit_v2 nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetHandleByUUID
        nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetMigMode nvmlDeviceGetMaxMigDeviceCount
        nvmlDeviceGetMigDeviceHandleByIndex nvmlDeviceIsMigDeviceHandle nvmlDeviceGetGpuInstanceProfileInfo
        nvmlDeviceGetGpuInstanceById nvmlGpuInstanceGetInfo nvmlGpuInstanceGetComputeInstanceProfileInfo
        nvmlGpuInstanceGetComputeInstanceById nvmlComputeInstanceGetInfo_v2 nvmlDeviceGetAttributes_v2
        nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetDeviceHandleFromMigDeviceHandle
        nvmlDeviceGetArchitecture nvmlDeviceGetBrand nvmlDeviceGetCudaComputeCapability
        nvmlDeviceGetMinorNumber
        nvmlDeviceGetPciInfo_v3 nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkRemotePciInfo_v2
        nvmlDeviceGetTopologyCommonAncestor nvmlSystemGetDriverVersion nvmlSystemGetCudaDriverVersion_v2
        nvmlDeviceGetGpuFabricInfo""",
    "k8s-device-plugin": """nvmlEventSetCreate nvmlEventSetFree nvmlEventSetWait_v2 nvmlDeviceRegisterEvents
        nvmlDeviceGetSupportedEventTypes nvmlDeviceGetMemoryInfo nvmlDeviceGetUUID""",
}
Show = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    nvml_double.build(folder)
    return folder


def exported(built: Path, branch: int) -> set[str]:
    double = nvml_double.build(built, branch=branch)
    done = subprocess.run(["nm", "-D", "--defined-only", double], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def listed(branch: int) -> list[str]:
    return [name for row in functions() for name in row.of_branch(branch)]


@pytest.mark.parametrize("branch", [470, 535, 550, 570, 590, 620])
def test_every_function_is_listed_and_every_listed_one_is_there(built: Path, branch: int) -> None:
    names = listed(branch)
    assert len(names) == len(set(names))
    assert set(names) == exported(built, branch)


def test_every_function_that_nvidia_names_is_there(built: Path) -> None:
    """Whatever pynvml looks up; what nvml.h declares besides is in functions.yaml by name."""
    asked = set(re.findall(r'_nvmlGetFunctionPointer\(\s*"(nvml\w+)"', Path(pynvml.__file__).read_text()))
    assert len(asked) > 400
    assert asked <= exported(built, 620)


def test_the_library_of_590_has_as_many_functions_as_nvidias(built: Path) -> None:
    """405: the symbols that a capture of driver 590.48.01 lists (utkuozdemir/nvidia_gpu_exporter)."""
    assert len({name for name in exported(built, 590) if name.startswith("nvml")}) == 405


@pytest.mark.parametrize("program", sorted(ASKED))
def test_what_programs_ask_is_there(built: Path, program: str) -> None:
    assert set(ASKED[program].split()) - exported(built, 535) == set()


@pytest.mark.parametrize("package", ["gpustat", "nvitop"])
def test_what_python_programs_ask_of_an_older_driver_is_there(built: Path, package: str) -> None:
    """Names in their own sources; those that pynvml itself falls back from are told by its version."""
    import importlib.util  # noqa: PLC0415 - beside its one use

    spec = importlib.util.find_spec(package)
    assert spec
    assert spec.origin
    text = "".join(file.read_text() for file in Path(spec.origin).parent.rglob("*.py"))
    asked = set(re.findall(r"\b(nvml(?:Device|System)[A-Z]\w+)\b", text)) - {"nvmlDevice_t"}
    there = {re.sub(r"_v\d$", "", name) for name in exported(built, 620)}
    missing = {re.sub(r"_v\d?$", "", name).rstrip("_") for name in asked} - there
    # pynvml's own names of parts of an answer, or no function at all but a part of a name
    assert missing <= {"nvmlDeviceGet", "nvmlDeviceGetCurrentDriverModel", "nvmlDeviceGetPendingDriverModel"}


@pytest.fixture
def show(built: Path, tmp_path: Path) -> Show:
    """Run a program on the GPUs of an instance type."""

    def run(name: str, *words: str, scenario: str = "") -> subprocess.CompletedProcess[str]:
        path = tmp_path / name
        append_region(path)
        rows = initial_rows(make_profile(name, seed="i-1", driver="580.65.06", cuda="13.0"))
        if scenario:
            play_scenario(rows, scenario)
        State(path).write(rows)
        program = str(Path(sys.executable).parent / words[0])
        env = {
            **library.environment(library.build(built, branch=580), path),
            "COLUMNS": "200",
            "LINES": "200",
        }
        return subprocess.run(
            [program, *words[1:]], env=env, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def answered(show: Show, name: str) -> dict[str, Any]:
    """What pynvml says, as the facts have it."""
    code = (
        f"import json, pynvml, sys; sys.path.insert(0, {os.fspath(ROOT)!r})\n"
        "from gpukiln.probe.nvml import read_nvml; found = read_nvml(); pynvml.nvmlInit()\n"
        "for gpu in found['gpus']:\n"
        "    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu['index'])\n"
        "    gpu['cc'] = '.'.join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle)))\n"
        "    gpu['pci_id'] = pynvml.nvmlDeviceGetPciInfo(handle).pciDeviceId\n"
        "    gpu['architecture'] = pynvml.nvmlDeviceGetArchitecture(handle)\n"
        "    gpu['mig_devices'] = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)\n"
        "print(json.dumps(found))"
    )
    done = show(name, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", TYPES)
def test_programs_agree_with_the_catalogue(show: Show, name: str) -> None:
    """One row of the table: pynvml, gpustat and nvitop on a type, field by field."""
    kind = instance_type(name)
    model, facts = board(kind.gpu), gpu(kind.gpu)
    whole = kind.gpu_fraction == 1
    told = answered(show, name)["gpus"]
    assert len(told) == kind.gpus
    assert len({one["uuid"] for one in told}) == kind.gpus
    for one in told:
        assert one["cc"] == facts.cc
        assert f"{one['pci_id'] >> 16:04X}" in facts.pci_ids
        assert one["pci_id"] & 0xFFFF == 0x10DE
        if whole:
            assert one["name"] == model.name
            assert one["power"]["limit"] == model.power.limit
            assert one["pcie"]["max_gen"] == model.pcie.gen
            links = model.nvlink.links if model.nvlink and kind.interconnect != "none" else 0
            assert len(one["nvlinks"] or []) == links
            assert (one["mig"]["current"] is not None) == bool(model.mig)
        assert one["mig_devices"] == 0
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", one["uuid"])

    shown = json.loads(show(name, "gpustat", "--json").stdout)
    assert shown["driver_version"] == "580.65.06"
    for here, there in zip(told, shown["gpus"], strict=True):
        assert (there["name"], there["uuid"]) == (here["name"], here["uuid"])
        assert there["memory.total"] == here["memory"]["total"]
        assert there["enforced.power.limit"] == here["power"]["limit"]
        assert there["temperature.gpu"] == here["temperature"]["gpu"]
        assert there["processes"] == []

    table = show(name, "nvitop", "-1", "--colorful", "--ascii").stdout
    assert "Driver Version: 580.65.06" in table
    assert "Traceback" not in table
    for one in told:
        total = one["memory"]["total"]
        assert re.search(rf"{total}MiB|{total / 1024:.2f}GiB", table), table
        assert one["bus_id"] in table
        if whole:
            assert f"{one['power']['limit']:.0f}W" in table


def test_nvitop_shows_mig_devices(show: Show) -> None:
    """It ends with a KeyError where a MIG device has no BAR1 (nvitop 1.7.2)."""
    done = show("p5.48xlarge", "nvitop", "-1", "--ascii", scenario="mig-mixed")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"[01]:\d\s+\d\w+\.\d+gb @ GI/CI: ?\d+/0", done.stdout)) == 7 + 2
