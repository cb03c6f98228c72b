"""The driver works with every GPU of the machine, and no GPU reports damage."""

import pytest

from gpukiln.catalog import xid
from gpukiln.gpus import rules
from gpukiln.gpus.gpu_facts import label, nvml_gpus, read
from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check, evaluate

ALL = ("image", "node", "eks-node", "workspace")
LIVE = ("node", "eks-node")  # profiles of machines that run jobs: an application's Xid is no fault there
BEFORE = ("gpu.driver-loaded", "gpu.nvml")


@check(
    id="gpu.driver-loaded",
    title="The nvidia module is loaded, in the version of the user space",
    layer="gpu",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "The running kernel has no module: it was updated, and DKMS did not build for it.",
        "The driver was updated without a reboot.",
        "The driver's branch, or its open or proprietary kind of module, does not support this GPU.",
        "Secure Boot refuses an unsigned module.",
    ),
    fix="`modprobe nvidia` and `dmesg` show why it does not load. After a driver upgrade reboot as soon as "
    "the "
    "kernel that boots next has the module (modules.present).",
)
def test_driver_loaded(facts):
    loaded = facts["gpus"]["module"]
    assert loaded, "/sys/module/nvidia/version is missing: the module is not loaded"
    installed = require_reached(facts["driver"]["nvidia_smi"])["version"]
    # Without nvidia-smi there is nothing to compare with, and versions.driver-complete says so.
    assert installed in (loaded, None), (
        f"module {loaded} is loaded, wanted {installed}, the user space's version"
    )


@check(
    id="gpu.nvidia-smi",
    title="nvidia-smi succeeds and lists every GPU on the PCI bus",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The module is not loaded.", "A GPU fell off the bus.", "Libraries and module differ."),
    after=("gpu.driver-loaded",),
    fix="Exit 9: driver not loaded; 12: library missing; 15: a GPU fell off the bus, reset or replace it; "
    "18: module and libraries differ, see versions.driver-agrees.",
)
def test_nvidia_smi(facts):
    smi, rows = require_reached(facts["gpus"]["smi"]), require_reached(facts["gpus"]["rows"])
    assert smi["rc"] == 0, f"nvidia-smi exits {smi['rc']}: {smi['out'].strip()[:300]}"
    # Simulated GPUs are on no bus.
    where = "NVML" if facts.has_simulated_gpus else "the PCI bus"
    assert len(rows) == facts.gpu_count, f"nvidia-smi lists {len(rows)} GPUs, {where} has {facts.gpu_count}"
    lost = [
        r["bus_id"]
        for r in rows
        # nvidia-smi prints `[GPU is lost]` in the fields of such a GPU.
        if "lost" in " ".join(r.values()).lower() or not r["uuid"].startswith("GPU-")
    ]
    assert not lost, f"nvidia-smi can't read {', '.join(lost)}"
    facts.note(", ".join(r["name"] for r in rows))


@check(
    id=rules.NVML.id,
    title=rules.NVML.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "libnvidia-ml.so.1 is missing, or of another version than the module.",
        "A GPU fell off the bus: power, heat, or a PCIe link; see gpu.xid.",
        "A GPU is bound to another driver, such as vfio-pci.",
    ),
    after=("gpu.driver-loaded",),
    fix=rules.NVML.fix,
)
def test_nvml(facts):
    evaluate(facts, rules.NVML.evaluate, facts.has_simulated_gpus)


@check(
    id=rules.PERSISTENCE.id,
    title=rules.PERSISTENCE.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "nvidia-persistenced runs with `--no-persistence-mode`, as Ubuntu's unit starts it.",
        "nvidia-persistenced does not run.",
    ),
    after=BEFORE,
    fix=rules.PERSISTENCE.fix,
)
def test_persistence(facts):
    evaluate(facts, rules.PERSISTENCE.evaluate)


@check(
    id=rules.XID.id,
    title=rules.XID.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "The GPU, its memory or its link is damaged, or too hot.",
        "An application made an invalid access (13, 31, 43, 45). On a machine booted from an image no job "
        "ran.",
    ),
    after=("gpu.driver-loaded",),
    fix=rules.XID.fix,
)
def test_xid(facts):
    evaluate(facts, rules.XID.evaluate, xid.xid_rules(), facts.profile in LIVE)


@check(
    id=rules.ECC.id,
    title=rules.ECC.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "`nvidia-smi -e` changed the mode, and the GPU was not reset afterwards.",
        "A memory cell failed: the row is remapped at the next reset.",
    ),
    after=BEFORE,
    fix=rules.ECC.fix,
)
def test_ecc(facts):
    evaluate(facts, rules.ECC.evaluate)


@check(
    id=rules.MEMORY_REPAIR.id,
    title=rules.MEMORY_REPAIR.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The memory has uncorrectable errors.", "The spare rows of a memory bank are used up."),
    after=BEFORE,
    fix=rules.MEMORY_REPAIR.fix,
)
def test_memory_repair(facts):
    evaluate(facts, rules.MEMORY_REPAIR.evaluate)


@check(
    id=rules.THROTTLE.id,
    title=rules.THROTTLE.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "A fan, the airflow or the inlet temperature is bad.",
        "A power cable is missing, or the board signals a power brake.",
    ),
    after=BEFORE,
    fix=rules.THROTTLE.fix,
)
def test_throttle(facts):
    evaluate(facts, rules.THROTTLE.evaluate)


@check(
    id=rules.CLOCKS.id,
    title=rules.CLOCKS.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The GPU is not cooled enough.", "The GPU started only in part: its firmware reports nothing."),
    after=BEFORE,
    fix=rules.CLOCKS.fix,
)
def test_clocks(facts):
    evaluate(facts, rules.CLOCKS.evaluate)


@check(
    id=rules.PCIE_LINK.id,
    title=rules.PCIE_LINK.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The card or a riser is not seated well.", "A lane is damaged.", "The slot has fewer lanes."),
    after=BEFORE,
    fix=rules.PCIE_LINK.fix,
)
def test_pcie_link(facts):
    evaluate(facts, rules.PCIE_LINK.evaluate, facts.to_dict().get("cuda") or {})


@check(
    id=rules.MIG.id,
    title=rules.MIG.title,
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "`nvidia-smi -mig` changed the mode, and the GPU was not reset afterwards.",
        "MIG manager or mig-parted did not run, or ran on the wrong node.",
        "The GPUs are divided on purpose, and gpu_bootstrap_mig has another value.",
    ),
    after=BEFORE,
    fix=rules.MIG.fix,
)
def test_mig(facts):
    evaluate(facts, rules.MIG.evaluate)


@check(
    id="gpu.idle",
    title="No process uses a GPU of a machine that has just booted",
    layer="gpu",
    profiles=("image",),
    needs=("gpu",),
    causes=("A service of the image starts a GPU program or a display server.",),
    after=BEFORE,
    fix="Disable the service that starts the process: all memory of the GPUs is for the user's jobs.",
)
def test_idle(facts):
    by_gpu = {label(gpu): read(gpu, "processes") for gpu in nvml_gpus(facts)}
    # Virtual GPUs do not list the processes of their virtual machine.
    if all(processes is None for processes in by_gpu.values()):
        pytest.skip("no GPU reports which processes use it")
    busy = [
        f"{gpu}: {p['name'] or 'a process'} ({p['pid']}, {p['kind']})"
        for gpu, processes in by_gpu.items()
        for p in processes or []
    ]
    assert not busy, f"found {', '.join(busy)}; wanted no process"
