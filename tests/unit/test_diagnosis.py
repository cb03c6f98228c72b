"""The doctor's first sentence, for every situation that a machine can be in."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from gpukiln.verify.diagnosis import diagnosis
from tests.support.host_machine import DRIVER, KERNEL, machine

Data = dict[str, Any]
HUNG = {
    "tool": "nvidia-smi",
    "command": "nvidia-smi -h",
    "reason": "no answer in 20 s; process 7 (smi) is in D",
}
NOTHING = {"_not_reached": "nvidia-smi hangs"}


def without_driver(data: Data) -> None:
    data["driver"].update(
        nvidia_smi={"rc": 127, "version": None}, libraries={"libcuda.so": [], "libnvidia-ml.so": []}
    )
    data["gpus"]["module"] = None
    data["gpus"]["smi"] = {"rc": 127, "out": "nvidia-smi: not found"}
    data["modules"] = {KERNEL: dict.fromkeys(("nvidia", "nvidia_uvm", "nvidia_modeset"))}


def without_gpu(data: Data) -> None:
    data["gpus"] = {"pci": [], "module": None, "nouveau": False}


def unloaded(data: Data) -> None:
    data["gpus"]["module"] = None
    data["gpus"]["smi"] = {"rc": 9, "out": "couldn't communicate with the NVIDIA driver"}


def hangs(data: Data) -> None:
    data["hung"] = {"tools": [HUNG], "kernel": ["NVRM: Xid (PCI:0000:00:1e): 119, GSP RPC timeout"]}
    data["driver"]["nvidia_smi"] = data["gpus"]["smi"] = data["gpus"]["rows"] = NOTHING


def both(*faults: Callable[[Data], Any]) -> Callable[[Data], None]:
    def inject(data: Data) -> None:
        for fault in faults:
            fault(data)

    return inject


def gpu(**values: Any) -> Callable[[Data], None]:
    return lambda data: data["gpus"]["pci"][0].update(values)


def gpus(**values: Any) -> Callable[[Data], None]:
    return lambda data: data["gpus"].update(values)


# What is wrong -> what the sentence must say, and what it must not.
SITUATIONS: dict[str, tuple[Callable[[Data], Any], str, str]] = {
    "all well": (
        gpu(name="Tesla T4", driver="nvidia"),
        f"1 NVIDIA GPU on the PCI bus (Tesla T4), and driver {DRIVER} is loaded",
        "hang",
    ),
    "nothing at all": (
        both(without_driver, without_gpu),
        "No NVIDIA GPU is on the PCI bus, and no NVIDIA driver is installed",
        "None",
    ),
    "a driver and no GPU": (
        without_gpu,
        f"No NVIDIA GPU is on the PCI bus, though driver {DRIVER} is installed",
        "loaded",
    ),
    "a loaded driver and no GPU": (
        gpus(pci=[]),
        f"No NVIDIA GPU is on the PCI bus, though driver {DRIVER} is loaded",
        "installed",
    ),
    "a GPU and no driver": (
        without_driver,
        "1 NVIDIA GPU on the PCI bus, and no NVIDIA driver is installed",
        "None",
    ),
    "nouveau has the GPU": (
        both(unloaded, gpu(driver="nouveau")),
        "nouveau, the kernel's own driver, has claimed the GPU",
        "not loaded",
    ),
    "nouveau is loaded and no driver is installed": (
        both(without_driver, gpus(nouveau=True)),
        "nouveau, the kernel's own driver, has claimed the GPU",
        "None",
    ),
    "passed through to a guest": (gpu(driver="vfio-pci"), "vfio-pci has claimed a GPU", "None"),
    "installed and not loaded": (unloaded, f"driver {DRIVER} is installed and not loaded", "libraries"),
    "no module for the running kernel": (
        both(unloaded, lambda d: d["kernel"].update(running="6.1.0-99")),
        f"no module for 6.1.0-99 (there is one for {KERNEL})",
        "not loaded",
    ),
    "Secure Boot": (
        both(unloaded, lambda d: d["signatures"][KERNEL].update(rc=1, out="Secure Boot is on, no signature")),
        f"refuses the module of driver {DRIVER}: Secure Boot is on",
        "not loaded",
    ),
    "library of another version": (
        both(gpus(module="535.261.03"), gpus(smi={"rc": 18, "out": "mismatch"})),
        f"driver 535.261.03 is loaded, and its libraries are of version {DRIVER}: the machine",
        "exits",
    ),
    "a library alone is of another version": (
        lambda d: d["driver"]["libraries"].update({"libcuda.so": ["550.1.1"]}),
        "of version 550.1.1",
        "None",
    ),
    "loaded, and its user space is gone": (
        both(without_driver, gpus(module=DRIVER)),
        "its libraries and nvidia-smi are missing",
        "None",
    ),
    "hangs": (
        hangs,
        "nvidia-smi hangs (no answer in 20 s; process 7 (smi) is in D): 1 NVIDIA GPU on the PCI bus, driver "
        f"{DRIVER} is loaded; the last kernel message: NVRM: Xid (PCI:0000:00:1e): 119",
        "not installed",
    ),
    "another tool hangs": (
        lambda d: d["hung"].update(tools=[{**HUNG, "tool": "kmod"}, {**HUNG, "tool": "dkms"}]),
        "kmod, dkms hang: no answer",
        "nvidia-smi",
    ),
    "fell off the bus": (
        gpu(lost=True),
        "A GPU fell off the bus: 0000:00:1e.0 no longer answers",
        "is loaded",
    ),
    "fell off the bus, says the kernel": (
        gpus(xids=["NVRM: Xid (PCI:0000:00:1e): 79, pid=1, GPU has fallen off the bus."]),
        "A GPU fell off the bus (1 NVIDIA GPU on the PCI bus): NVRM: Xid",
        "is loaded",
    ),
    "fell off the bus, says nvidia-smi": (
        gpus(smi={"rc": 15, "out": "GPU is lost"}),
        "A GPU fell off the bus",
        "is loaded",
    ),
    "nvidia-smi fails otherwise": (gpus(smi={"rc": 255, "out": "?"}), "nvidia-smi exits 255", "libraries"),
    "the GPUs could not be read": (
        both(without_driver, lambda d: d.update(gpus=NOTHING)),
        "It is not known",
        "no GPU machine",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_sentence_names_the_diagnosis(name: str) -> None:
    fault, words, never = SITUATIONS[name]
    data = copy.deepcopy(machine())
    fault(data)
    said = diagnosis(json.loads(json.dumps(data)))
    assert words in said
    assert never not in said
    assert said.endswith(".")
    assert "\n" not in said


@pytest.mark.parametrize("section", machine())
@pytest.mark.parametrize("value", [None, {"_error": "x"}, NOTHING])
def test_facts_that_are_missing_break_no_sentence(section: str, value: Any) -> None:
    data = machine()
    if value is None:
        del data[section]
    else:
        data[section] = value
    assert diagnosis(data).endswith(".")
    assert diagnosis({}).startswith("It is not known which GPUs")
