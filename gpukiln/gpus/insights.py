"""What a watch has to say: rules over samples, the last snapshot and the leases, each with its evidence.

Every threshold is in the table RULES and nowhere else; nothing here asks a machine but `surroundings`.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from gpukiln.findings import SEVERITIES, Finding, Severity
from gpukiln.gpus.config import GRAPHICS
from gpukiln.gpus.faults import FAULTS, HARDWARE_EVENTS, THERMAL_EVENTS, lanes_missing, thermal_margin
from gpukiln.gpus.model import Device, Driver, Snapshot
from gpukiln.gpus.nvlinks import GpuLinks, comparable_groups, link_mismatch
from gpukiln.gpus.sampling import Sample, Tick, duration_of
from gpukiln.probe.base import PCI, NotReachedError, ask, read

SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
NVSWITCH = ("0x10de", "0x0680")  # vendor, and class of a PCI device: a bridge of another kind
Number = float  # of evidence: int or float


@dataclass(frozen=True)
class MachineContext:
    """What of a machine is not in a snapshot.

    Args:
        nvswitches: NVSwitches on its PCI bus.
        programs: Names of what runs, as the kernel has them: 15 characters at most.
        virtual: What virtualizes this machine, as systemd-detect-virt names it; none for nothing.
    """

    nvswitches: int = 0
    programs: frozenset[str] = frozenset()
    virtual: str = "none"


@dataclass(frozen=True)
class WatchData:
    """What the rules examine.

    Args:
        ticks: Of the watch.
        interval_s: That a tick stands for.
        first: The snapshot before it.
        last: The snapshot after it.
    """

    ticks: Sequence[Tick]
    interval_s: float
    first: Snapshot
    last: Snapshot
    context: MachineContext = field(default_factory=MachineContext)

    @property
    def window_s(self) -> float:
        """For how long it was watched."""
        return duration_of(self.ticks, self.interval_s)

    @property
    def gpus(self) -> list[Device]:
        """The GPUs that were sampled and that the last snapshot could read."""
        seen = {sample.uuid for tick in self.ticks for sample in tick.samples}
        return [
            device
            for device in self.last.devices
            if device.kind == "gpu" and device.readable and device.uuid in seen
        ]

    def samples(self, device: Device) -> list[Sample]:
        """Those of a GPU that could be read."""
        return [s for tick in self.ticks for s in tick.samples if s.uuid == device.uuid and not s.error]

    def values(self, device: Device, name: str) -> list[Any]:
        """A field of its samples, without nulls."""
        return [value for s in self.samples(device) if (value := getattr(s, name)) is not None]

    def leases(self, device: Device, *, throughout: bool) -> set[str]:
        """Ids of leases on a GPU or a part of it: of all the time, or of any.

        Args:
            throughout: Whether only those that held before and after the watch.
        """
        before, after = (
            {
                mark.id
                for part in snapshot.devices
                if part.uuid and device.uuid in (part.uuid, part.parent)
                for mark in part.leases
            }
            for snapshot in (self.first, self.last)
        )
        return before & after if throughout else before | after


Evidence = Iterator["tuple[Device | None, dict[str, Any]]"]  # what is evidence, and of which device


@dataclass(frozen=True)
class WatchRule:
    """One thing that is looked for.

    Args:
        threshold: The numbers that it holds evidence against, by name.
        window_s: It says nothing of a shorter watch; 0: it goes by the last snapshot alone.
        find: Given what was watched and the threshold.
    """

    id: str
    severity: Severity
    text: str
    remedy: str
    find: Callable[[WatchData, Mapping[str, Number]], Evidence]
    threshold: Mapping[str, Number] = field(default_factory=dict)
    window_s: float = 0.0
    source: str = ""


def examine(watched: WatchData) -> tuple[Finding, ...]:
    """What all rules find, the worst first.

    Besides its numbers the evidence has the threshold that they were compared with, and window_s: for how
    long it was watched; 0: it is so now.
    """
    findings = [
        Finding(
            id=rule.id,
            severity=rule.severity,
            message=rule.text,
            object=device.title if device else "",
            evidence={
                **evidence,
                "threshold": dict(rule.threshold),
                "window_s": watched.window_s if rule.window_s else 0.0,
            },
            remedy=rule.remedy,
            source=rule.source,
        )
        for rule in RULES
        if watched.window_s >= rule.window_s
        for device, evidence in rule.find(watched, rule.threshold)
    ]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def not_run(watched: WatchData) -> tuple[str, ...]:
    """Ids of rules that want a longer watch."""
    return tuple(rule.id for rule in RULES if watched.window_s < rule.window_s)


def machine_context(proc: str = "/proc", pci: str = PCI) -> MachineContext:
    """What of this machine rules want to know beside its GPUs."""
    names = (read(path) for path in glob.glob(f"{proc}/[0-9]*/comm"))  # noqa: PTH207 - no need of a Path each
    kinds = (
        ((read(f"{path}/vendor") or "").strip(), (read(f"{path}/class") or "")[:6])
        for path in glob.glob(os.path.join(pci, "*"))  # noqa: PTH118, PTH207
    )
    switches = sum(1 for kind in kinds if kind == NVSWITCH)
    try:
        virtual = ask("systemd-detect-virt", "--vm")["out"].strip() or "none"
    except NotReachedError:
        virtual = "none"
    return MachineContext(switches, frozenset(name.strip() for name in names if name), virtual)


# ---- what the rules look for


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 1)


def _leased_idle(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "utilization_percent")
        leases = watched.leases(gpu, throughout=True)
        if used and leases and max(used) < limit["utilization_percent"]:
            yield gpu, {"utilization_max_percent": max(used), "leases": sorted(leases)}


def _busy_unleased(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    if watched.last.leases != "yes":  # nobody keeps leases here, or they can't be read
        return
    for gpu in watched.gpus:
        used = watched.values(gpu, "utilization_percent")
        if used and _mean(used) >= limit["utilization_percent"] and not watched.leases(gpu, throughout=False):
            listed = [process for process in watched.last.processes or () if process.device == gpu.uuid]
            if listed and all(process.kind == GRAPHICS for process in listed):  # a desktop that draws
                continue
            evidence = {"utilization_mean_percent": _mean(used), "pids": [process.pid for process in listed]}
            yield gpu, evidence


def _memory_full(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "memory_used_mib")
        if used and gpu.memory_total_mib:
            most = 100 * max(used) / gpu.memory_total_mib
            if most > limit["memory_percent"]:
                yield gpu, {"memory_max_percent": round(most, 1), "memory_max_mib": max(used)}


def _memory_held(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "memory_used_mib")
        busy = watched.values(gpu, "utilization_percent")
        if not used or not busy or not gpu.memory_total_mib or max(busy) > 0:
            continue
        least = 100 * min(used) / gpu.memory_total_mib
        if least >= limit["memory_percent"]:
            evidence = {"memory_min_percent": round(least, 1), "memory_min_mib": min(used)}
            yield gpu, {**evidence, "utilization_max_percent": max(busy)}


def _slowed(*events: str) -> Callable[[WatchData, Mapping[str, Number]], Evidence]:
    """GPUs that named one of these reasons in so many of their samples."""

    def find(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
        for gpu in watched.gpus:
            samples = watched.values(gpu, "clock_events")
            hit = [reasons for reasons in samples if set(reasons) & set(events)]
            if hit and 100 * len(hit) / len(samples) >= limit["samples_percent"]:
                evidence: dict[str, Any] = {"samples_percent": round(100 * len(hit) / len(samples), 1)}
                evidence["clock_events"] = [
                    name for name in events if any(name in reasons for reasons in hit)
                ]
                for name in ("temperature_c", "power_watts"):
                    if values := watched.values(gpu, name):
                        evidence[f"{name.rpartition('_')[0]}_max_{name.rpartition('_')[2]}"] = max(values)
                yield gpu, evidence

    return find


def _pcie_narrow(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    """Links rest in a lower generation: only samples under load say something.

    A virtual machine's link is what its hypervisor shows: a T4 of EC2 has 8 of 16 lanes there.
    """
    if watched.context.virtual != "none":
        return
    for gpu in watched.gpus:
        loaded = [
            s for s in watched.samples(gpu) if (s.utilization_percent or 0) >= limit["utilization_percent"]
        ]
        width, generation = (
            max((value for s in loaded if (value := getattr(s, name)) is not None), default=None)
            for name in ("pcie_width", "pcie_generation")
        )
        evidence: dict[str, Any] = {}
        if lanes_missing(width, gpu.pcie_width_max):
            evidence.update(pcie_width=width, pcie_width_max=gpu.pcie_width_max)
        newest = gpu.pcie_generation_max
        if generation is not None and newest is not None and generation < newest:
            evidence.update(pcie_generation=generation, pcie_generation_max=newest)
        if evidence:
            yield gpu, {**evidence, "samples": len(loaded)}


def _behind_group(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    """Of GPUs that work together, all loaded, one that does far less or runs far slower than the others."""
    for group in _groups(watched):
        means = {g.index: _mean(watched.values(g, "utilization_percent") or [0]) for g in group}
        if len(group) < limit["gpus"] or min(means.values()) < limit["utilization_percent"]:
            continue
        for gpu in group:
            others = [other for other in group if other is not gpu]
            evidence: dict[str, Any] = {}
            for name in ("utilization_percent", "clock_sm_mhz"):
                own = watched.values(gpu, name)
                theirs = [_mean(values) for other in others if (values := watched.values(other, name))]
                if own and theirs and _mean(own) < limit["share_percent"] / 100 * median(theirs):
                    evidence.update({name: _mean(own), f"group_{name}": round(median(theirs), 1)})
            if evidence:
                yield gpu, {**evidence, "group": [member.uuid for member in group]}


def _groups(watched: WatchData) -> list[list[Device]]:
    """GPUs of one lease; and those that have none, which may work together."""
    groups: dict[str, list[Device]] = {}
    for gpu in watched.gpus:
        for lease in sorted(watched.leases(gpu, throughout=True)) or [""]:
            groups.setdefault(lease, []).append(gpu)
    return list(groups.values())


def _has_fault(id: str) -> Callable[[WatchData, Mapping[str, Number]], Evidence]:
    """GPUs that have a fault of the table by the last snapshot."""

    def find(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
        for gpu in watched.gpus:
            text = FAULTS[id].condition(partial(getattr, gpu))
            if text is not None:
                yield gpu, {"found": text}

    return find


def _driver_ended(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    driver: Driver = watched.last.driver
    if driver.ended:
        yield None, {"driver": driver.version, "supported_until": driver.supported_until}


def _nvlink_down(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    whole = {gpu.uuid: gpu for gpu in watched.gpus if gpu.nvlinks_total and not gpu.mig_enabled}
    cards = []
    for gpu in whole.values():
        up, down = range(gpu.nvlinks_active or 0), range((gpu.nvlinks_total or 0) - (gpu.nvlinks_active or 0))
        joined = frozenset(peer.uuid for peer in gpu.peers if peer.nvlinks)
        cards.append(GpuLinks(gpu.uuid, gpu.title, gpu.name or "", up, down, joined))
    for group in comparable_groups(cards):
        if link_mismatch(group):
            most = max(len(card.up) for card in group)
            for card in group:
                if len(card.up) < most or not most:
                    evidence = {"nvlinks_active": len(card.up), "nvlinks_active_of_its_like": most}
                    yield whole[str(card.key)], evidence


def _no_fabric_manager(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    """Named nv-fabricmanager (NVIDIA, Fabric Manager user guide), of which the kernel keeps 15 characters."""
    if watched.context.nvswitches and "nv-fabricmanager"[:15] not in watched.context.programs:
        yield None, {"nvswitches": watched.context.nvswitches}


def _mps_active(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    """Its daemons are nvidia-cuda-mps-control and -server (NVIDIA, Multi-Process Service)."""
    if "nvidia-cuda-mps"[:15] in watched.context.programs:
        yield None, {"programs": ["nvidia-cuda-mps"]}


def _too_hot(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        margins = []
        for sample in watched.samples(gpu):

            def value(name: str, sample: Sample = sample, gpu: Device = gpu) -> Any:
                return getattr(sample if name in SAMPLE_FIELDS else gpu, name)

            if (margin := thermal_margin(value)) is not None:
                margins.append(margin)
        if margins and min(margins)[0] <= 0:
            yield gpu, {"found": min(margins)[1]}


# ---- the table


def _fault(
    id: str,
    find: Callable[[WatchData, Mapping[str, Number]], Evidence] | None = None,
    threshold: Mapping[str, Number] | None = None,
    window_s: float = 0.0,
) -> WatchRule:
    """A rule about a fault of the table: by the last snapshot, or by samples.

    Args:
        find: Looks for it in samples.
    """
    fault = FAULTS[id]
    return WatchRule(
        *(id, fault.severity, fault.text, fault.remedy, find or _has_fault(id)),
        threshold or {},
        window_s,
        fault.source,
    )


RULES: tuple[WatchRule, ...] = (
    WatchRule(
        "leased-idle",
        "warning",
        "it is leased, and does nothing",
        "release the lease, or find out what its job waits for (data, a lock, a crashed worker)",
        _leased_idle,
        {"utilization_percent": 5},
        window_s=5,
    ),
    WatchRule(
        "busy-unleased",
        "warning",
        "somebody uses it without a lease",
        "start it with `gpukiln-gpu run`, or write a lease for it: `gpukiln-gpu leases --reconcile`",
        _busy_unleased,
        {"utilization_percent": 10},
        window_s=2,
    ),
    WatchRule(
        "memory-full",
        "warning",
        "hardly any of its memory is free",
        "a larger batch will fail: make it smaller, or lease a GPU with more memory",
        _memory_full,
        {"memory_percent": 95},
        window_s=1,
    ),
    WatchRule(
        "memory-held",
        "warning",
        "its memory is held, and nothing works on it",
        "`gpukiln-gpu processes` names who holds it; end what is forgotten",
        _memory_held,
        {"memory_percent": 5},
        window_s=5,
    ),
    WatchRule(
        "power-cap",
        "info",
        "its power limit holds its clocks back",
        "normal under full load; compare the limit with the board's own: `nvidia-smi -q -d POWER`",
        _slowed("software power cap"),
        {"samples_percent": 50},
        window_s=2,
    ),
    WatchRule(
        "clocks-locked",
        "info",
        "its clocks were set by hand",
        "`nvidia-smi --reset-applications-clocks` and `--reset-gpu-clocks` give it back what it can do",
        _slowed("application clocks"),
        {"samples_percent": 50},
        window_s=1,
    ),
    WatchRule(
        "behind-its-group",
        "warning",
        "it is far behind the GPUs that it works with",
        "the job goes at its pace: look at its heat, power, PCIe link and the CPU that feeds it",
        _behind_group,
        {"gpus": 2, "utilization_percent": 10, "share_percent": 70},
        window_s=5,
    ),
    WatchRule(
        "driver-ended",
        "warning",
        "NVIDIA has ended the support of its driver's branch",
        "move to a branch that is supported: the role nvidia_driver, or a newer image",
        _driver_ended,
    ),
    WatchRule(
        "no-fabric-manager",
        "error",
        "the machine has NVSwitches, and no fabric manager runs",
        "`systemctl status nvidia-fabricmanager`: it must have the driver's exact version",
        _no_fabric_manager,
    ),
    WatchRule(
        "mps-active",
        "info",
        "processes share GPUs through MPS",
        "one that fails may end all of them; `echo quit | nvidia-cuda-mps-control` ends it",
        _mps_active,
    ),
    _fault("recovery-action"),
    _fault("remap-failed"),
    _fault("ecc-uncorrected"),
    _fault("remap-pending"),
    _fault("pages-pending"),
    _fault("ecc-pending"),
    _fault("mig-pending"),
    _fault("fabric-not-joined"),
    _fault("persistence-off"),
    _fault("nvlink-down", _nvlink_down),
    _fault("thermal-slowdown", _slowed(*THERMAL_EVENTS), {"samples_percent": 1}, window_s=1),
    _fault("hardware-slowdown", _slowed(*HARDWARE_EVENTS), {"samples_percent": 1}, window_s=1),
    _fault("temperature-margin", _too_hot, window_s=1),
    _fault("pcie-narrow", _pcie_narrow, {"utilization_percent": 20}, window_s=1),
)
