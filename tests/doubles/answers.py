"""What the doubles answer, in the form in which scripts/first-contact compares it with a real machine.

    python -m tests.doubles.answers > tests/doubles/answers.json

has to be done again when a double learns something; tests/unit/test_first_contact.py says so.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.probe.contact_doubles import Answers, merge
from tests.doubles.nvml_machine import LOST, UNKNOWN, made_up_machine
from tests.support import nvml_double
from tests.support.gpu_profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]
# Prepares a process for the doubles: made-up PCI devices, few elements to compute, tools of the test's own.
PREPARE = """
import sys
from gpukiln.probe import contact_calls
from gpukiln.probe import base
from gpukiln.probe import cuda
from gpukiln.probe import pcie
from gpukiln.probe import contact
pci, tools = sys.argv[1:3]
base.PCI = pcie.PCI = pci
base.in_container = lambda: False
base.PATH = tools + ":/usr/bin:/bin"
cuda.ELEMENTS, cuda.SHARED, cuda.COPYING_S = 1 << 18, 1 << 14, 0.02
"""
ASK = """
import os
from pathlib import Path
path = Path(sys.argv[3])
contact_calls.record_cuda_calls(str(path / contact.CALLS))
steps = contact.Contact(contact.Folder(path, os.uname().nodename), "", {})
steps.ask_nvml(), steps.compute("first"), steps.compute("second"), steps.compare()
"""


def build_cuda(folder: Path) -> None:
    """Compile the double of CUDA into a folder."""
    source, library = Path(__file__).with_name("cuda.c"), folder / "libcuda.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source)], check=True)


def make_pci(folder: Path, gpus: int) -> None:
    """Make PCI devices that are GPUs, with a link that copies of a double may reach or not."""
    said = {
        "vendor": "0x10de",
        "class": "0x030200",
        "device": "0x20b0",
        "current_link_speed": "2.5 GT/s PCIe",
        "current_link_width": "2",
        "max_link_speed": "16.0 GT/s PCIe",
        "max_link_width": "16",
    }
    for number in range(gpus):
        device = folder / f"0000:{0x1A + number:02x}:00.0"
        device.mkdir(parents=True)
        for name, text in said.items():
            (device / name).write_text(text + "\n")


def machines() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """What NVML says, and what the double of CUDA is told."""
    two = {"DOUBLE_GPUS": "2"}
    yield made_up_machine(), two
    odd = copy.deepcopy(made_up_machine())
    first, second = odd["gpus"]
    first.update(
        ecc=dict.fromkeys(first["ecc"]), nvlinks=None, serial=None, fabric={"state": None, "status": None}
    )
    first["processes"] = [{"pid": 7, "name": "train", "kind": "compute", "memory": 900}]
    second["power"]["draw"] = {**UNKNOWN, "_error": "nvmlDeviceGetPowerUsage: Unknown Error"}
    yield odd, {"DOUBLE_GPUS": "2", "DOUBLE_FAULT": "no-peer"}
    for profile in PROFILES.values():
        said = profile.make()["nvml"]
        yield {key: value for key, value in said.items() if key != "at"}, two
    lost = copy.deepcopy(made_up_machine())
    lost["gpus"][1] = {"index": 1, "error": LOST}
    yield lost, {"DOUBLE_GPUS": "1"}


def environment(library: Path, spec: Path, **more: str) -> dict[str, str]:
    """Environment in which a program finds both doubles."""
    return {**nvml.environment(library, spec), "PYTHONPATH": str(ROOT), "DOUBLE_FAULT": "", **more}


def doubles_answer(folder: Path) -> Answers:
    """Ask the doubles, each machine in a process of its own.

    Args:
        folder: An empty one, for what is built.
    """
    library, spec, found = nvml_double.build(folder), folder / "spec", []
    build_cuda(library.parent)
    for number, (machine, more) in enumerate(machines()):
        nvml.write_state(spec, machine)
        place, pci = folder / f"asked-{number}", folder / f"pci-{number}"
        make_pci(pci, int(more["DOUBLE_GPUS"]))
        subprocess.run(
            [sys.executable, "-c", PREPARE + ASK, str(pci), os.devnull, str(place)],
            env=environment(library, spec, **more),
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )
        found.append(json.loads((place / "answers.json").read_text(encoding="utf-8")))
    return merge(*found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        json.dump(doubles_answer(Path(made)), sys.stdout, indent=1)
        sys.stdout.write("\n")
