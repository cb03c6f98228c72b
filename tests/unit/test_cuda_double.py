"""The section `cuda` as it is run on a machine, with a double of libcuda.so.1 (tests/doubles/cuda.c).

The double stands for the driver's library: its devices are this host's memory, its kernels are C. So these
tests show that the calls fit together, that every fault the double can have is found by the checks, and that
a hung driver holds nobody up. They show nothing about a GPU, and the PTX is not run by them: for what it
means see test_cuda_ptx.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.probe import pcie
from gpukiln.probe.cuda import ELEMENTS
from gpukiln.probe.packing import gather_command
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.checks import PROFILES
from gpukiln.verify.facts import Facts
from gpukiln.verify.needs import applicability

ROOT = Path(__file__).resolve().parents[2]
CHECKS = load_checks()
KERNEL, BANDWIDTH, REDUCE = "compute.kernel", "compute.bandwidth", "multi-gpu.all-reduce"
FEW = 1 << 22  # elements: a quarter of the real number, but in the tests of what is good
LAST = "0000:1d:00.0"  # the last of four
SECTION = """
import json, sys
from gpukiln.probe import child
from gpukiln.probe import base
from gpukiln.probe import cuda
from gpukiln.probe import pcie
base.PCI = pcie.PCI = sys.argv[1]
base.in_container = lambda: False
cuda.ELEMENTS, cuda.COPYING_S = int(sys.argv[3]), 0.05
child.os.kill = (lambda *_: None) if sys.argv[4:] else child.os.kill
cuda.INIT_S = cuda.GPU_S = cuda.STEP_S = float(sys.argv[2])
print(json.dumps({"cuda": cuda.cuda(), "gpus": {"pci": base.pci_gpus()},
                  "expected": {"mig": None, "bandwidth_share": None}, "nvml": {"gpus": []}}))
"""
Ask = Callable[..., Facts]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the double under the library's name."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is not on PATH; the double of libcuda.so.1 is written in C")
    folder = tmp_path_factory.mktemp("double")
    subprocess.run(
        [
            gcc,
            "-Wall",
            "-Wextra",
            "-Werror",
            "-O2",
            "-shared",
            "-fPIC",
            "-o",
            str(folder / "libcuda.so.1"),
            str(ROOT / "tests" / "doubles" / "cuda.c"),
        ],
        check=True,
    )
    return folder


@pytest.fixture
def ask(library: Path, tmp_path: Path) -> Ask:
    """Gather the section in a process of its own, with the double as this machine's driver."""

    def gather(
        fault: str = "",
        *,
        gpus: int = 1,
        link: tuple[str, str] = ("2.5 GT/s PCIe", "2"),
        limit_s: float = 60,
        libraries: Path = library,
        elements: int = FEW,
        killable: bool = True,
        **more: str,
    ) -> Facts:
        for number in range(gpus):
            device = tmp_path / "pci" / f"0000:{0x1A + number:02x}:00.0"
            device.mkdir(parents=True)
            said = {
                "vendor": "0x10de",
                "class": "0x030200",
                "device": "0x1eb8",
                "current_link_speed": link[0],
                "current_link_width": link[1],
            }
            for name, text in said.items():
                (device / name).write_text(text + "\n")
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": str(libraries),
            "DOUBLE_GPUS": str(gpus),
            "DOUBLE_FAULT": fault,
            **more,
        }
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                SECTION,
                str(tmp_path / "pci"),
                str(limit_s),
                str(elements),
                *([] if killable else ["unkillable"]),
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return Facts(json.loads(done.stdout))

    return gather


def judge(check_id: str, facts: Facts) -> tuple[str, str]:
    check, function = CHECKS[check_id]
    answer = applicability(check.needs, facts, PROFILES["node"], expect_gpus=1)
    if answer.answer != "run":
        return answer.answer, answer.reason
    try:
        function(facts)
    except AssertionError as error:
        return "failed", str(error)
    except pytest.skip.Exception as reason:
        return "not_run", str(reason)
    return "passed", facts.take_note()


def test_a_good_gpu_passes_and_its_memory_is_given_back(ask: Ask, tmp_path: Path) -> None:
    facts = ask(elements=ELEMENTS, DOUBLE_LOG=str(tmp_path / "log"))
    assert judge(KERNEL, facts)[0] == "passed", judge(KERNEL, facts)
    assert judge(BANDWIDTH, facts)[0] == "passed", judge(BANDWIDTH, facts)
    assert judge(REDUCE, facts) == ("not_run", "one GPU")
    found: dict[str, Any] = facts["cuda"]
    gpu = found["gpus"][0]
    assert (found["driver_version"], gpu["compute_capability"], gpu["elements"]) == ("12.2", "8.6", 1 << 24)
    assert gpu["link"]["gb_s"] == 0.5  # 2.5 GT/s of 8 bits in 10, times 2
    calls = (tmp_path / "log").read_text().splitlines()
    launches = [call for call in calls if "launch" in call]
    assert launches == [f"0 launch hash grid 65536 1 1 block 256 1 1 shared 0 count {ELEMENTS}"]
    assert calls.count("0 alloc") == calls.count("0 free") == calls.count("0 release") == 1


def test_four_good_gpus_pass(ask: Ask, tmp_path: Path) -> None:
    facts = ask(gpus=4, elements=ELEMENTS, DOUBLE_LOG=str(tmp_path / "log"))
    assert [judge(i, facts)[0] for i in (KERNEL, BANDWIDTH, REDUCE)] == ["passed"] * 3
    assert "12 of 12 copies directly" in judge(REDUCE, facts)[1]
    calls = (tmp_path / "log").read_text().splitlines()
    assert [sum(f"{i} launch hash" in call for call in calls) for i in range(4)] == [1, 1, 1, 1]
    assert [sum(f"{i} launch add" in call for call in calls) for i in range(4)] == [3, 3, 3, 3]
    assert sum("peer copy" in call for call in calls) == 12


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("element", f"in 1 of 4096 blocks of 1024 elements, first in element {FEW - 12345}: "),
        ("unwritten", f"first in element {FEW - 256}: 0x00000000"),
        ("init-100", "cuInit: error 100"),
        ("init-802", "cuInit: error 802"),
        ("init-803", "cuInit: error 803"),
        ("init-999", "cuInit: error 999"),
        ("no-device", "CUDA finds no GPU"),
        ("ecc", "cuCtxSynchronize: error 214 (CUDA_ERROR_ECC_UNCORRECTABLE: double)"),
        ("ptx", "cuModuleLoadDataEx: error 218 (CUDA_ERROR: double): ptxas fatal: no such thing"),
        ("launch", "cuLaunchKernel: error 209"),
        ("crash", "cuCtxSynchronize: the process ended with status -6"),
        ("prohibited", "cuDevicePrimaryCtxRetain: error 46"),
        ("memory-odd", "cuMemAlloc_v2: error 2"),
        ("host-memory", "cuMemAllocHost_v2: error 2"),
        ("lost-copy", "a copy there and back is wrong in 4096 of 4096 blocks"),
    ],
)
def test_a_fault_is_found(ask: Ask, fault: str, words: str) -> None:
    outcome, reason = judge(KERNEL, ask(fault))
    assert (outcome, words in reason) == ("failed", True), reason


@pytest.mark.parametrize("fault", ["memory", "full", "exclusive"])
def test_a_gpu_in_use_is_no_fault(ask: Ask, fault: str) -> None:
    facts = ask(fault, gpus=2)
    for check_id in (KERNEL, BANDWIDTH, REDUCE):
        outcome, reason = judge(check_id, facts)
        assert (outcome, "in use" in reason) == ("not_run", True), reason
    assert [gpu["ok"] for gpu in facts["cuda"]["gpus"]] == [True, False]


@pytest.mark.parametrize(
    ("fault", "words"), [("slow-up", " GB/s to the GPU"), ("slow-down", " from it, link 0.5")]
)
def test_slow_copies_are_found(ask: Ask, fault: str, words: str) -> None:
    facts = ask(fault)
    assert judge(KERNEL, facts)[0] == "passed"
    outcome, reason = judge(BANDWIDTH, facts)
    assert (outcome, words in reason) == ("failed", True), reason


@pytest.mark.parametrize(
    ("speed", "width", "gb_s"),
    [
        ("8.0 GT/s PCIe", "16", 15.75),
        ("16.0 GT/s PCIe", "8", 15.75),
        ("5 GT/s", "4", 2.0),
        ("32.0 GT/s PCIe", "16", 63.02),
        ("64.0 GT/s PCIe", "16", 128.0),
        ("Unknown", "16", None),
        ("8.0 GT/s PCIe", "0", None),
        ("8.0 GT/s PCIe", "63", None),
        ("8.0 GT/s PCIe", "3", None),
    ],
)
def test_rate_of_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speed: str, width: str, gb_s: float | None
) -> None:
    monkeypatch.setattr(pcie, "PCI", str(tmp_path))
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "current_link_speed").write_text(speed + "\n")
    (tmp_path / "gpu" / "current_link_width").write_text(width + "\n")
    assert pcie.link("gpu")["gb_s"] == gb_s


@pytest.mark.parametrize(
    ("most", "gb_s"),
    [
        (("8.0 GT/s PCIe", "16"), 15.75),
        (("16.0 GT/s PCIe", "16"), 15.75),
        (("Unknown", "255"), 15.75),
        (("8.0 GT/s PCIe", "8"), None),
        (("5.0 GT/s PCIe", "16"), None),
    ],
)
def test_a_link_that_the_gpu_is_not_made_for_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: tuple[str, str], gb_s: float | None
) -> None:
    monkeypatch.setattr(pcie, "PCI", str(tmp_path))
    (tmp_path / "gpu").mkdir()
    for prefix, (speed, width) in (("current", ("8.0 GT/s PCIe", "16")), ("max", most)):
        (tmp_path / "gpu" / f"{prefix}_link_speed").write_text(speed + "\n")
        (tmp_path / "gpu" / f"{prefix}_link_width").write_text(width + "\n")
    assert pcie.link("gpu")["gb_s"] == gb_s


def test_a_fault_of_one_gpu_hides_no_other(ask: Ask) -> None:
    facts = ask("element", gpus=4, DOUBLE_BAD="1")
    assert [gpu["ok"] for gpu in facts["cuda"]["gpus"]] == [True, False, True, True]
    assert judge(KERNEL, facts)[1].startswith("0000:1b:00.0: the kernel's result is wrong")
    assert judge(REDUCE, facts)[1].startswith("the all-reduce was not run: 0000:1b:00.0")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("sum", f"1 GPUs have a wrong sum: {LAST}: the sum is wrong in 1 of 1024 blocks of 1024 elements"),
        ("peer-wrong", f"1 GPUs have a wrong sum: {LAST}: the sum is wrong in 1 of 1024 blocks"),
        ("peer-hang", "cuMemcpyPeer does not return in 6 s, killed"),
    ],
)
def test_a_fault_between_gpus_is_found(ask: Ask, fault: str, words: str) -> None:
    facts = ask(fault, gpus=4, limit_s=6)
    assert judge(KERNEL, facts)[0] == "passed"
    outcome, reason = judge(REDUCE, facts)
    assert (outcome, words in reason) == ("failed", True), reason


@pytest.mark.parametrize(
    ("fault", "said"),
    [("no-peer", "6 of 12 copies directly"), ("too-many-peers", "4 of 12 copies directly")],
)
def test_gpus_that_do_not_reach_each_other_go_through_the_host(ask: Ask, fault: str, said: str) -> None:
    outcome, note = judge(REDUCE, ask(fault, gpus=4))
    assert outcome == "passed"
    assert f"{said} from GPU to GPU, through the host 0000:1" in note


def test_many_peers_take_longer_than_one(ask: Ask) -> None:
    """12 mappings of 0.4 s each; none of them takes the 3 s that one step may take."""
    outcome, note = judge(REDUCE, ask("peer-slow", gpus=4, limit_s=3))
    assert (outcome, "12 of 12 copies directly" in note) == ("passed", True), note


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("slice", "a MIG device has only a part of its GPU's copy engines"),
        ("unpinned", "CUDA allocated no pinned memory"),
    ],
)
def test_copies_that_are_slow_by_design_are_no_fault(ask: Ask, fault: str, why: str) -> None:
    facts = ask(fault, link=("64.0 GT/s PCIe", "32"))
    assert judge(KERNEL, facts)[0] == "passed"
    outcome, reason = judge(BANDWIDTH, facts)
    assert (outcome, why in reason) == ("not_run", True), reason


def test_a_hung_call_ends_in_time_and_the_next_gpu_is_tested(ask: Ask) -> None:
    started = time.monotonic()
    facts = ask("hang", gpus=2, limit_s=6, DOUBLE_BAD="0")
    assert time.monotonic() - started < 40
    outcome, reason = judge(KERNEL, facts)
    assert outcome == "failed"
    assert re.match(
        r"0000:1a:00\.0: cuCtxSynchronize does not return in 6 s, killed: process \d+ \(.*\) is in state ",
        reason,
    )
    assert [gpu["ok"] for gpu in facts["cuda"]["gpus"]] == [False, True]


def test_a_driver_that_does_not_start_is_waited_for_once(ask: Ask) -> None:
    outcome, reason = judge(KERNEL, ask("init-hang", gpus=4, limit_s=2))
    assert outcome == "failed"
    assert reason.startswith("CUDA can't be used: cuInit does not return in 2 s, killed: process ")


def test_a_process_that_cannot_be_killed_is_left_alone(ask: Ask) -> None:
    started = time.monotonic()
    outcome, reason = judge(KERNEL, ask("init-hang", limit_s=2, killable=False))
    assert time.monotonic() - started < 30
    assert outcome == "failed"
    assert "CUDA can't be used: cuInit does not return in 2 s, and can't be killed: process " in reason


def test_no_library_is_a_failure_and_no_gpu_is_none(ask: Ask, tmp_path: Path) -> None:
    outcome, reason = judge(KERNEL, ask(libraries=tmp_path))
    assert (outcome, "libcuda.so.1" in reason) == ("failed", True), reason


def test_without_a_gpu_the_library_is_not_even_loaded(ask: Ask, tmp_path: Path) -> None:
    facts = ask(gpus=0, DOUBLE_LOG=str(tmp_path / "log"))
    assert facts["cuda"]["error"] == "no NVIDIA GPU on the PCI bus"
    assert not (tmp_path / "log").exists()


def test_the_command_with_all_sources_fits_into_one_argument() -> None:
    assert len(gather_command()) < 128 * 1024  # Linux, MAX_ARG_STRLEN
