"""scripts/first-contact on the doubles of NVML and CUDA: what it leaves, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.probe.contact_doubles import contradictions
from gpukiln.probe.contact_folder import Folder
from tests.doubles.answers import PREPARE, build_cuda, doubles_answer, environment, make_pci
from tests.doubles.nvml_machine import Data, made_up_machine
from tests.support import nvml_double

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "first-contact"
PYTHONS = Path.home() / ".pyenv" / "versions"
RUN = """
from pathlib import Path
contact.is_simulated = lambda: False  # the doubles are what is met here
contact.COMMAND_S, cuda.INIT_S = 2.0, 5.0
cuda.GPU_S = cuda.STEP_S = 10.0
exec(sys.argv[4])
sys.exit(contact.main([sys.argv[3]], root=Path(sys.argv[5])))
"""
SMI = """#!/bin/sh
echo "GPU 00000000:1A:00.0"
echo "    Product Name    : NVIDIA A100-SXM4-40GB"
echo "    Serial Number   : 1652923000417"
echo "    GPU UUID        : GPU-5e1f0000-aaaa-bbbb-cccc-0123456789ab"
echo "        Process ID  : 4242"
echo "        Name        : /home/eve/train"
echo "|    0   N/A  N/A            4242      C   /home/eve/train                     900MiB |"
"""
PRIVATE = ("1652923000417", "5e1f0000", "4242", "eve", "train", os.uname().nodename)
Contact = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double of NVML, with that of CUDA beside it."""
    folder = tmp_path_factory.mktemp("doubles")
    built = nvml_double.build(folder)
    build_cuda(built.parent)
    return built


@pytest.fixture
def contact(library: Path, tmp_path: Path) -> Contact:
    """Start a first contact with two GPUs that both doubles play; it writes to `tmp_path / "found"`."""

    def start(
        *,
        smi: str = SMI,
        machine: Data | None = None,
        errors: dict[str, int] | None = None,
        also: str = "",
        python: Sequence[str | Path] = (sys.executable,),
        before: str = "",
        **more: str,
    ) -> subprocess.Popen[str]:
        make_pci(tmp_path / "pci", 2)
        (tmp_path / "tools").mkdir()
        (tmp_path / "tools" / "nvidia-smi").write_text(smi)
        (tmp_path / "tools" / "nvidia-smi").chmod(0o755)
        machine = machine or made_up_machine()
        for number, one in enumerate(machine["gpus"]):
            one["bus_id"] = f"00000000:{0x1A + number:02X}:00.0"
        nvml.write_state(tmp_path / "spec", machine, errors=errors)
        arguments = [tmp_path / "pci", tmp_path / "tools", tmp_path / "found", also, ROOT]
        return subprocess.Popen(
            [*python, "-c", before + PREPARE + RUN, *map(str, arguments)],
            env=environment(library, tmp_path / "spec", DOUBLE_GPUS="2", **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def old_python() -> Path:
    """The oldest Python that first contact is for, or the one that there is."""
    return next(PYTHONS.glob("3.9.*/bin/python3.9"), Path(sys.executable))


def found(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / "found" / name).read_text(encoding="utf-8"))


def steps(tmp_path: Path) -> dict[str, str]:
    return {row["step"]: row["ended"] for row in found(tmp_path, "state.json")["steps"]}


def test_all_that_is_found_is_in_one_folder_and_names_nobody(contact: Contact, tmp_path: Path) -> None:
    machine = made_up_machine()
    machine["gpus"][0].update(uuid="GPU-5e1f0000-aaaa-bbbb-cccc-0123456789ab", serial="1652923000417")
    machine["gpus"][0]["processes"] = [
        {"pid": 4242, "name": "/home/eve/train", "kind": "compute", "memory": 9}
    ]
    with contact(machine=machine) as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert out == "", "the doubles contradict themselves"
    assert found(tmp_path, "state.json")["ended"] == "yes"
    assert set(steps(tmp_path).values()) == {"done"}
    assert [one["found"]["gpus"][1]["ok"] for one in found(tmp_path, "compute.json")] == [True] * 3
    assert [one["found"]["all_reduce"]["ok"] for one in found(tmp_path, "compute-two.json")] == [True] * 2
    assert "first in element 12345" in found(tmp_path, "compute-wrong.json")["found"]["gpus"][0]["error"]
    assert found(tmp_path, "packed.json")["rc"] == 0
    assert len(found(tmp_path, "recording.json")["nvml"]["gpus"]) == 2
    calls = [(c["call"], c["gpu"], c["args"], c["code"]) for c in found(tmp_path, "nvml-calls.json")]
    assert ("nvmlDeviceGetTemperatureThreshold", 0, [7], 3) in calls
    assert ("nvmlDeviceGetNvLinkState", 1, [35], 2) in calls
    assert {row["call"] for row in found(tmp_path, "cuda-calls.json")} >= {"cuInit", "cuMemcpyPeer"}
    samples = (tmp_path / "found" / "samples.csv").read_text().splitlines()
    assert len(samples) > 4
    assert samples[-1].split(",")[2:5] == ["2.5 GT/s PCIe", "2", "210"]
    for file in (tmp_path / "found").iterdir():
        text = file.read_text(encoding="utf-8")
        assert [word for word in PRIVATE if re.search(rf"\b{word}", text)] == [], file.name
        assert not file.name.endswith(".part")


def test_what_the_doubles_never_answer_ends_it(contact: Contact, tmp_path: Path) -> None:
    machine = made_up_machine()
    machine["gpus"][0]["uuid"] = None
    errors = {"1.nvmlDeviceGetPersistenceMode": 999}
    with contact(machine=machine, errors=errors, DOUBLE_FAULT="slice") as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "nvml: nvmlDeviceGetPersistenceMode(): here 999; the double 0 number\n" in out
    assert "facts: nvml.gpus.*.uuid: here null; the double text\n" in out
    assert (tmp_path / "found" / "contradictions.txt").read_text() == out


def test_a_call_and_a_kind_that_the_doubles_lack_are_told() -> None:
    doubles = {"nvml": {"f()": ["13"], "g(1)": ["0 number"]}, "cuda": {"c": ["0"]}}
    answers = {
        "nvml": {"f(193)": ["0 field 0"], "g(1)": ["0 number", "3"], "h()": ["0"]},
        "cuda": {"c": ["0"]},
    }
    assert contradictions(answers, doubles) == [
        "nvml: f(193): here 0 field 0; the double does not have this call",
        "nvml: g(1): here 3; the double 0 number",
        "nvml: h(): here 0; the double does not have this call",
    ]
    assert contradictions(doubles, doubles) == []


def test_a_wrong_element_that_nobody_notices_is_a_failure(contact: Contact, tmp_path: Path) -> None:
    with contact(also="cuda._difference = lambda *_: None") as process:
        out, _err = process.communicate(timeout=150)
    assert process.returncode == 1
    assert "a wrong element was expected, but not reported" in out
    assert steps(tmp_path)["wrong expectation"] == "failed"


def test_an_interrupted_one_says_so(contact: Contact, tmp_path: Path) -> None:
    process = contact(also="cuda.GPU_S = 100.0", DOUBLE_FAULT="hang")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "compute" not in (
        steps(tmp_path) if (tmp_path / "found" / "state.json").exists() else {}
    ):
        time.sleep(0.1)
    time.sleep(1)  # until it hangs
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert found(tmp_path, "state.json")["ended"] == "interrupted"
    assert steps(tmp_path)["compute"] == "no"
    assert "interrupted; the results so far are in" in err


def test_a_driver_that_hangs_is_not_waited_for(contact: Contact, tmp_path: Path) -> None:
    with contact(smi="#!/bin/sh\nsleep 1000\n") as process:
        process.communicate(timeout=150)
    assert process.returncode == 5
    ended = steps(tmp_path)
    assert {ended["nvidia-smi"], ended["nvidia-smi-q"], ended["compute"]} == {"not reached"}
    assert found(tmp_path, "state.json")["ended"] == "yes"
    assert len(found(tmp_path, "recording.json")["nvml"]["gpus"]) == 2  # NVML itself does not


def test_the_time_is_up_whatever_hangs(contact: Contact, tmp_path: Path) -> None:
    began = time.monotonic()
    with contact(also="contact.TOTAL_S, cuda.GPU_S = 12.0, 100.0", DOUBLE_FAULT="hang") as process:
        process.communicate(timeout=100)
    assert time.monotonic() - began < 40
    assert process.returncode == 5
    assert steps(tmp_path)["two at once"] == "not reached"


def test_a_folder_that_is_there_is_left_alone(contact: Contact, tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "mine").write_text("mine")
    with contact() as process:
        _out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "exists already, wanted a new folder" in err
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["mine"]


@pytest.mark.parametrize(("bindings", "code"), [(True, 0), (False, 5)])
def test_python_of_the_oldest_kind_does_it_and_says_what_it_lacks(
    contact: Contact, tmp_path: Path, bindings: bool, code: int
) -> None:
    """Of an installation that has nothing but Python: without pynvml what needs it is not done."""
    (tmp_path / "lent").mkdir()
    if bindings:
        shutil.copy(pynvml.__file__, tmp_path / "lent")
    with contact(python=(old_python(), "-S"), PYTHONPATH=f"{ROOT}:{tmp_path / 'lent'}") as process:
        out, err = process.communicate(timeout=150)
    assert (process.returncode, out) == (code, ""), err
    missing = [step for step, ended in steps(tmp_path).items() if ended != "done"]
    assert missing == ([] if bindings else ["nvml", "packed command"])
    assert bindings or "found no pynvml: make a packed file" in err


def test_a_packed_file_needs_nothing_beside_it(contact: Contact, tmp_path: Path) -> None:
    packed = tmp_path / "contact.py"
    subprocess.run([sys.executable, SCRIPT, "--pack", packed], check=True, stderr=subprocess.DEVNULL)
    errors = {"1.nvmlDeviceGetPersistenceMode": 999}
    modules = f"exec(open({str(packed)!r}).read().rpartition('exec(')[0])\n"  # all but its start
    with contact(python=(old_python(), "-I", "-S"), before=modules, errors=errors) as process:
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "nvml: nvmlDeviceGetPersistenceMode(): here 999; the double 0 number\n" in out
    assert set(steps(tmp_path).values()) == {"done"}


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_gets_a_clear_message(tmp_path: Path) -> None:
    """In a checkout, and as the packed file that Python 3.9 alone can run."""
    packed = tmp_path / "contact.py"
    made = subprocess.run(
        [sys.executable, SCRIPT, "--pack", packed], check=True, stderr=subprocess.PIPE, text=True
    )
    assert "python3 contact.py FOLDER" in made.stderr
    old = old_python()
    for command in ([sys.executable, SCRIPT], [old, "-I", "-S", packed], [old, "-S", SCRIPT]):
        done = subprocess.run(
            [*command, tmp_path / "found"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert "found no NVIDIA GPU on the PCI bus, wanted one" in done.stderr
    assert not (tmp_path / "found").exists()


def test_the_doubles_answer_as_their_list_says(tmp_path: Path) -> None:
    listed = json.loads((ROOT / "tests" / "doubles" / "answers.json").read_text(encoding="utf-8"))
    assert doubles_answer(tmp_path) == listed, "python -m tests.doubles.answers > tests/doubles/answers.json"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("    Serial Number   : 1652923000417", "    Serial Number   : (left out)"),
        ("    Chassis Serial Number   : N/A", "    Chassis Serial Number   : N/A"),
        ("    GPU PDI : 0x1234", "    GPU PDI : (left out)"),
        ("    GPU Fabric GUID : 0x0ab", "    GPU Fabric GUID : (left out)"),
        ("    Product Name : NVIDIA H100", "    Product Name : NVIDIA H100"),
        ("Xid: 31, pid=77, name=train, Ch 8", "Xid: 31, pid=(left out), name=(left out), Ch 8"),
        ("MIG-5e1f0000-aaaa-bbbb-cccc-0123456789ab", "MIG-00000000-0000-0000-0000-000000000000"),
        (
            "|    0   N/A  N/A     4242      C   python train.py --data x      900MiB |",
            "|    0   N/A  N/A     0      C   (left out)      900MiB |",
        ),
        ("on gpu-7.site and gpu-7", "on host and host"),
        ("/home/eve/x token=abcdef123456", "/home/(left out)/x token=(left out)"),
    ],
)
def test_what_is_one_hosts_own_is_left_out(tmp_path: Path, text: str, shown: str) -> None:
    folder = Folder(tmp_path, "gpu-7.site")
    assert folder.shown(text) == shown
    assert folder.shown(shown) == shown
