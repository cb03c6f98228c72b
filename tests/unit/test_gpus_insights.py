"""Every rule about a watched machine: when it speaks, and when it does not."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpukiln.gpus import health, insights
from gpukiln.gpus.insights import MachineContext, WatchData
from gpukiln.gpus.model import Device, Driver, GpuProcess, LeaseMark, Snapshot
from gpukiln.gpus.sampling import Sample, Tick

MARK = LeaseMark("L-1", "ann", "exclusive", None, None)
BASE: dict[str, Any] = {"name": "H100", "memory_total_mib": 80000, "persistence": True}


def gpu(number: int = 0, **more: Any) -> Device:
    return health.with_health(Device(f"GPU-{number}", "gpu", number, **{**BASE, **more}))


def snapshot(devices: Sequence[Device], **more: Any) -> Snapshot:
    said: dict[str, Any] = {
        "processes": (),
        "driver": Driver(version="580.1", ended=False),
        "leases": "yes",
        **more,
    }
    return Snapshot(
        "node", "", "nvml", "host", False, "ok", "", "", devices=tuple(devices), errors=(), **said
    )


def watched(
    *devices: Device,
    samples: Sequence[dict[str, Any]] = ({},),
    seconds: int = 60,
    first: Sequence[Device] | None = None,
    context: MachineContext | None = None,
    **more: Any,
) -> WatchData:
    """A watch in which each GPU had the same values all the time; those of `samples`, in their order."""
    given = devices or (gpu(),)
    each = [
        Sample(one.uuid or "", one.index, **{"utilization_percent": 0, "memory_used_mib": 0, **said})
        for one, said in zip(given, [*samples, *[{}] * len(given)], strict=False)
    ]
    ticks = [Tick(n, float(n), 0, "", tuple(each)) for n in range(seconds)]
    return WatchData(
        ticks, 1.0, snapshot(first or given, **more), snapshot(given, **more), context or MachineContext()
    )


def rules(found: WatchData) -> list[str]:
    return [one.id for one in insights.examine(found)]


LEASED = gpu(leases=(MARK,))
BUSY = {"utilization_percent": 90}
LINKED = {"nvlinks_total": 18, "nvlinks_active": 18}
FOUR = [gpu(n) for n in range(4)]
MIG = Device("MIG-1", "mig", 0, parent="GPU-0", leases=(MARK,))
CASES = {
    "leased-idle": (
        [watched(LEASED), watched(LEASED, samples=[{"utilization_percent": 4}])],
        [
            watched(LEASED, samples=[{"utilization_percent": 5}]),
            watched(),
            watched(LEASED, first=[gpu()]),  # leased a moment ago
            watched(LEASED, seconds=4),
            watched(LEASED, samples=[{"utilization_percent": None}]),
        ],
    ),
    "busy-unleased": (
        [watched(samples=[{"utilization_percent": 10}])],
        [
            watched(samples=[{"utilization_percent": 9}]),
            watched(LEASED, samples=[BUSY]),
            watched(samples=[BUSY], leases="none"),  # nobody keeps leases here
            watched(gpu(), MIG, samples=[BUSY]),
        ],
    ),
    "memory-full": (
        [watched(samples=[{"memory_used_mib": 76001}])],
        [watched(samples=[{"memory_used_mib": 76000}]), watched(gpu(memory_total_mib=None))],
    ),
    "memory-held": (
        [watched(samples=[{"memory_used_mib": 4000}])],
        [
            watched(samples=[{"memory_used_mib": 3900}]),
            watched(samples=[{"memory_used_mib": 40000, "utilization_percent": 1}]),
        ],
    ),
    "thermal-slowdown": (
        [
            watched(samples=[{"clock_events": ("software thermal slowdown",)}]),
            watched(samples=[{"clock_events": ("idle", "hardware thermal slowdown")}]),
        ],
        [watched(samples=[{"clock_events": ("hardware slowdown",)}]), watched()],
    ),
    "power-cap": (
        [watched(samples=[{"clock_events": ("software power cap",)}])],
        [watched(samples=[{"clock_events": ("idle",)}])],
    ),
    "hardware-slowdown": (
        [
            watched(samples=[{"clock_events": ("hardware slowdown",)}]),
            watched(samples=[{"clock_events": ("hardware power brake",)}]),
        ],
        [watched(samples=[{"clock_events": ("software thermal slowdown",)}])],
    ),
    "clocks-locked": (
        [watched(samples=[{"clock_events": ("application clocks",)}])],
        [watched(samples=[{"clock_events": ("idle",)}])],
    ),
    "pcie-narrow": (
        [
            watched(gpu(pcie_width_max=16), samples=[{**BUSY, "pcie_width": 8}]),
            watched(gpu(pcie_generation_max=5), samples=[{**BUSY, "pcie_generation": 3}]),
        ],
        [
            watched(gpu(pcie_width_max=16), samples=[{**BUSY, "pcie_width": 16}]),
            watched(gpu(pcie_generation_max=5), samples=[{"pcie_generation": 1}]),  # it rests
            # a T4 of EC2 shows 8 of 16 lanes
            watched(
                gpu(pcie_width_max=16),
                samples=[{**BUSY, "pcie_width": 8}],
                context=MachineContext(virtual="amazon"),
            ),
        ],
    ),
    "behind-its-group": (
        [
            watched(*FOUR, samples=[BUSY, BUSY, {"utilization_percent": 40}, BUSY]),
            watched(*FOUR, samples=[{**BUSY, "clock_sm_mhz": mhz} for mhz in (1900, 1900, 1200, 1900)]),
        ],
        [
            watched(*FOUR, samples=[BUSY, BUSY, {"utilization_percent": 70}, BUSY]),
            watched(*FOUR, samples=[BUSY, BUSY, {"utilization_percent": 5}, BUSY]),  # not loaded: at rest
            watched(LEASED, gpu(1), samples=[{"utilization_percent": 40}, BUSY]),  # another's work
            watched(samples=[BUSY]),
        ],
    ),
    "ecc-uncorrected": ([watched(gpu(ecc_uncorrected=1))], [watched(gpu(ecc_uncorrected=0))]),
    "remap-pending": ([watched(gpu(remap_pending=True))], [watched(gpu(remap_pending=False))]),
    "remap-failed": ([watched(gpu(remap_failed=True))], [watched(gpu(remap_failed=None))]),
    "recovery-action": ([watched(gpu(recovery_action="gpu reset"))], [watched(gpu(recovery_action="none"))]),
    "persistence-off": ([watched(gpu(persistence=False))], [watched(gpu(persistence=None))]),
    "driver-ended": ([watched(driver=Driver(ended=True))], [watched(), watched(driver=Driver())]),
    "nvlink-down": (
        [watched(gpu(0, **LINKED), gpu(1, **{**LINKED, "nvlinks_active": 17}))],
        [
            watched(gpu(0, nvlinks_total=18, nvlinks_active=12), gpu(1, nvlinks_total=18, nvlinks_active=12)),
            watched(gpu(0, **LINKED), gpu(1, **{**LINKED, "nvlinks_active": 0}, mig_enabled=True)),
        ],
    ),
    "no-fabric-manager": (
        [watched(context=MachineContext(nvswitches=6))],
        [
            watched(context=MachineContext(6, frozenset({"nv-fabricmanage"}))),
            watched(),
        ],
    ),
    "fabric-not-joined": (
        [watched(gpu(fabric_state="in progress")), watched(gpu(fabric_state="completed with status 12"))],
        [watched(gpu(fabric_state=word)) for word in ("completed", "none", None)],
    ),
    "pages-pending": ([watched(gpu(pages_pending=True))], [watched(gpu(pages_pending=False))]),
    "ecc-pending": (
        [watched(gpu(ecc_enabled=True, ecc_pending=False))],
        [watched(gpu(ecc_enabled=True, ecc_pending=True)), watched(gpu(ecc_pending=True))],
    ),
    "mig-pending": (
        [watched(gpu(mig_enabled=False, mig_pending=True))],
        [watched(gpu(mig_enabled=True, mig_pending=True))],
    ),
    "mps-active": (
        [watched(context=MachineContext(programs=frozenset({"nvidia-cuda-mps"})))],
        [watched(context=MachineContext(programs=frozenset({"nvidia-smi"})))],
    ),
    "temperature-margin": (
        [
            watched(gpu(temperature_margin_slowdown_c=-2), samples=[{"temperature_margin_c": -3}]),
            watched(gpu(temperature_slowdown_c=90), samples=[{"temperature_c": 90}]),
        ],
        [
            watched(gpu(temperature_margin_slowdown_c=-2), samples=[{"temperature_margin_c": -2}]),
            watched(gpu(temperature_slowdown_c=90), samples=[{"temperature_c": 89}]),
            watched(samples=[{"temperature_c": 99}]),
        ],
    ),
}


def test_every_rule_has_its_cases() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in insights.RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_speaks_when_it_should_and_only_then(rule: str) -> None:
    speaks, silent = CASES[rule]
    for case in speaks:
        assert rules(case).count(rule) == 1
    for case in silent:
        assert rule not in rules(case)


def test_evidence_has_numbers_threshold_and_window() -> None:
    said = {one.id: one for one in insights.examine(CASES["busy-unleased"][0][0])}["busy-unleased"]
    numbers = {"utilization_mean_percent": 10.0, "pids": []}
    assert said.evidence == {**numbers, "threshold": {"utilization_percent": 10}, "window_s": 60}
    assert said.object == "GPU-0"
    process = GpuProcess(7, "GPU-0", "compute", "running")
    named = {one.id: one for one in insights.examine(watched(samples=[BUSY], processes=(process,)))}
    assert named["busy-unleased"].evidence["pids"] == [7]


def test_a_healthy_machine_has_nothing_to_hear_and_a_short_watch_says_what_it_left_out() -> None:
    assert insights.examine(watched(*FOUR)) == ()
    assert insights.not_run(watched(*FOUR)) == ()
    assert "leased-idle" in insights.not_run(watched(LEASED, seconds=1))
    assert insights.examine(WatchData((), 1.0, snapshot([]), snapshot([]))) == ()


def test_the_worst_stands_first() -> None:
    found = insights.examine(watched(gpu(persistence=False, ecc_uncorrected=1, remap_pending=True)))
    assert [one.severity for one in found] == ["error", "warning", "info"]
    assert all(one.source for one in found), "the table of faults has a source for each"


def test_a_gpu_that_is_lost_at_last_is_not_judged() -> None:
    lost = dataclasses.replace(gpu(persistence=False), error="GPU_IS_LOST")
    assert rules(watched(lost)) == []


def test_the_context_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, name in (("1", "systemd"), ("77", "nv-fabricmanage")):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "comm").write_text(f"{name}\n")
    for address, kind in (("0000:c4:00.0", "0x068000"), ("0000:01:00.0", "0x030200")):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "vendor").write_text("0x10de\n")
        (tmp_path / "pci" / address / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(insights, "run_unrecorded", lambda *_: {"rc": 0, "out": "kvm\n"})
    found = insights.machine_context(str(tmp_path / "proc"), str(tmp_path / "pci"))
    assert found == MachineContext(1, frozenset({"systemd", "nv-fabricmanage"}), "kvm")
