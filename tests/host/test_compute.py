"""Every GPU computes right and moves data, shown by CUDA kernels that ran on it."""

import pytest

from gpukiln.catalog import xid
from gpukiln.gpus import kernel_log
from gpukiln.probe.base import require_reached
from gpukiln.probe.xids import OWNER
from gpukiln.verify import compute_facts
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

ALL = ("image", "node", "eks-node", "workspace", "runner", "pod")
LIVE = ("node", "eks-node", "runner", "pod")  # profiles of machines on which a user's work may run meanwhile
MIN_SHARE = 0.5
"""The wanted share of the link's theoretical rate, unless /etc/gpukiln/expected.json has another one.

NVIDIA states no such number (DCGM's PCIe test wants 0 GB/s by default). gpukiln's has to be
above what a fault leaves: half of the lanes somewhere on the path, or one PCIe generation less, carry at most
half of the GPU's own link. And it has to be below what healthy machines reach: packets' headers leave at most
90 % (Intel AN 708, "Throughput for Posted Writes"), and Azure's health checks refuse a machine below 63 %
(V100, 10 of 15.75 GB/s), 76 % (A100, 24 of 31.5) or 83 % (H100, 52 of 63;
Azure/azurehpc-health-checks:conf/).
"""


def title(gpu: dict) -> str:
    return f"{gpu['bus_id'] or 'GPU ' + str(gpu['index'])}"


def leave_out_busy(facts: Facts) -> None:
    """Skip the check where another process has a GPU to itself: nothing is known about that GPU."""
    busy = [f"{title(g)} is in use: {g['error']}" for g in facts["cuda"]["gpus"] if g["busy"]]
    if busy:
        pytest.skip("; ".join(busy))


def log_report(facts: Facts) -> tuple[list[str], list[str]]:
    """The log lines of the time in which the GPUs computed: faults of the machine, and others.

    An application's Xid names its process, where the driver knows it. If that is a process of the probe, the
    machine is at fault, else the job. A machine booted from an image runs no jobs.
    """
    section, table = facts["cuda"], xid.xid_rules()
    serious, others = [], []
    for own in (True, False):
        lines = [
            line for line in require_reached(section["xids"]) if is_own_process(line, section["pids"]) is own
        ]
        for event in kernel_log.events(lines, table):
            # An Xid whose kind is `info` in the catalogue is never a fault.
            number = table.get(event.number) if event.kind == "Xid" else None
            caused = own and number is not None and number["kind"] != "info"
            # On a machine that was booted for the verification no other process can have caused it.
            alone = facts.profile not in LIVE and not event.is_switch
            blamed = event.blames_hardware(table) or caused or alone
            (serious if blamed else others).append(event.explain(table))
    return serious, others


def is_own_process(line: str, pids: list[int]) -> bool:
    owner = OWNER.search(line)
    return owner is not None and int(owner[1]) in pids


@check(
    id="compute.kernel",
    title="A CUDA kernel runs on every GPU, and every element of its result is right",
    layer="compute",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "error 100, 999 or a missing GPU: driver not loaded, no /dev/nvidia-uvm, a GPU off the bus or in MIG "
        "mode without an instance",
        "error 802: the fabric manager does not run, or confidential computing is on and its ready state "
        "unset; 803: the loaded module is of another version than "
        "libcuda.so.1",
        "error 221: libnvidia-ptxjitcompiler.so.1 is not installed",
        "error 214, a wrong element, or a call that does not return: the GPU or its memory is damaged",
    ),
    after=("gpu.driver-loaded", "gpu.nvml"),
    fix="Check the software first: `dmesg | grep NVRM`, modules and libraries of one version, a reboot. If a "
    "wrong result, ECC error or hang comes back, drain the node and have the GPU replaced.",
)
def test_kernel(facts):
    section, pci = facts["cuda"], facts["gpus"]["pci"]
    error = section["error"] or ""
    assert not error, f"CUDA can't be used: {error}{compute_facts.not_ready_hint(facts, error)}"
    wrong = "; ".join(f"{title(g)}: {g['error']}" for g in section["gpus"] if not g["ok"] and not g["busy"])
    assert not wrong, wrong + compute_facts.not_ready_hint(facts, wrong)
    serious, others = log_report(facts)
    assert not serious, f"while the GPUs computed, the kernel logged {'; '.join(serious[:3])}"
    seen = {g["bus_id"] for g in section["gpus"]}
    # CUDA numbers only GPUs that work; the bus has all.
    lost = [p["address"] for p in pci if p["address"] not in seen and len(section["gpus"]) < len(pci)]
    # CUDA shows a process one MIG instance and no other GPU (MIG User Guide, CUDA Device Enumeration).
    if lost and section["mig"] and section["gpus"]:
        pytest.skip(f"MIG is on: CUDA shows a process one instance, and not {', '.join(lost)}")
    assert not lost, f"CUDA does not see {', '.join(lost)}; wanted {len(pci)} GPUs"
    # A copy next to a running job is slower.
    leave_out_busy(facts)
    compared = [g["elements"] for g in section["gpus"]]
    # A kernel that was never launched would leave the memory as it was.
    assert all(compared), f"compared {compared} elements, wanted some of every GPU"
    facts.note(
        f"{min(compared)} elements compared; "
        + ", ".join(f"{title(g)} {g['name']} in {g['kernel_ms']} ms" for g in section["gpus"])
        + (f"; logged meanwhile, and no fault of the machine: {' | '.join(others[:3])}" if others else "")
        + (f"; the kernel's log was not read: {section['log_gap']}" if section.get("log_gap") else "")
    )


@check(
    id="compute.bandwidth",
    title="Host and GPU exchange data at half of the link's theoretical rate, or at the share in "
    "/etc/gpukiln/expected.json",
    layer="compute",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "a switch or riser between them has a slower link than the GPU's own",
        "a job uses the machine's memory at the same time",
        "IOMMU translation, or the link repeats packets: see the AER errors in `dmesg`",
    ),
    after=("compute.kernel",),
    fix="`lspci -vv` shows LnkSta of the GPU and of every bridge above it (`lspci -t`); reseat the card, "
    "try another slot, look for AER errors. If all machines of this kind are as slow, lower the wanted share "
    "with `gpu_bootstrap_bandwidth_share` (role gpu_bootstrap, /etc/gpukiln/expected.json).",
)
def test_bandwidth(facts):
    """The wanted share is `MIN_SHARE`, or that of the node's expectations."""
    gpus, share = facts["cuda"]["gpus"], facts["expected"]["bandwidth_share"]
    share = MIN_SHARE if share is None else share
    # The file is written by a role, but may be edited.
    sound = isinstance(share, int | float) and 0 < share <= 1
    assert sound, f"/etc/gpukiln/expected.json has bandwidth_share {share!r}, wanted above 0 and at most 1"
    assert gpus, "no GPU was measured"
    leave_out_busy(facts)
    slow, excused, shown = [], [], []
    for gpu in gpus:
        # Both directions: a damaged lane may slow down only one.
        lowest, rate = min(gpu["h2d_gb_s"], gpu["d2h_gb_s"]), gpu["link"]["gb_s"]
        # Where the kernel reports no current rate, the maximum can still show that the copies are fast
        # enough.
        most = gpu["link"].get("max_gb_s")
        link = compute_facts.link_text(gpu)
        said = f"{title(gpu)} {gpu['h2d_gb_s']} GB/s to the GPU, {gpu['d2h_gb_s']} from it, {link}"
        if lowest >= share * (rate or most or float("inf")):
            shown.append(said)
        # Slow copies on an unknown link are no evidence: hypervisors often emulate the link.
        elif rate is None:
            excused.append(f"{said}: the kernel does not report the link's rate")
        elif excuse := compute_facts.slow_copy_reason(facts, gpu):
            excused.append(f"{said}: {excuse}")
        else:
            slow.append(said)
    assert not slow, f"{'; '.join(slow)}; wanted at least {share:.0%} of the link's rate each way"
    if excused:
        pytest.skip("; ".join(excused))
    facts.note("; ".join(shown))
