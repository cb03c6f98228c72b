"""Rules over the samples of a watch, the last snapshot and the leases; each finding has its evidence.

Every threshold is in the table RULES. Only `machine_context` reads the machine.
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
from gpukiln.probe.base import PCI, NotReachedError, read, run_unrecorded

SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
NVSWITCH = ("0x10de", "0x0680")  # vendor, and PCI class "other bridge", as sysfs has them
Number = float  # int or float (PEP 484, the numeric tower)


@dataclass(frozen=True)
class MachineContext:
    """What the rules need to know of a machine that a snapshot does not have.

    Args:
        nvswitches: NVSwitches on its PCI bus.
        programs: Names of the running processes, cut to 15 characters by the kernel.
        virtual: The hypervisor as systemd-detect-virt names it; none on bare metal.
    """

    nvswitches: int = 0
    programs: frozenset[str] = frozenset()
    virtual: str = "none"


@dataclass(frozen=True)
class WatchData:
    """The input of the rules: the samples of a watch, and the snapshots around it.

    Args:
        ticks: The samples, in their order.
        interval_s: The time that a tick stands for.
        first: The snapshot before the watch.
        last: The snapshot after the watch.
    """

    ticks: Sequence[Tick]
    interval_s: float
    first: Snapshot
    last: Snapshot
    context: MachineContext = field(default_factory=MachineContext)

    @property
    def window_s(self) -> float:
        """The length of the watch."""
        return duration_of(self.ticks, self.interval_s)

    @property
    def gpus(self) -> list[Device]:
        """The sampled GPUs that the last snapshot could read."""
        seen = {sample.uuid for tick in self.ticks for sample in tick.samples}
        return [
            device
            for device in self.last.devices
            if device.kind == "gpu" and device.readable and device.uuid in seen
        ]

    def samples(self, device: Device) -> list[Sample]:
        """The samples of a GPU without an error."""
        return [s for tick in self.ticks for s in tick.samples if s.uuid == device.uuid and not s.error]

    def values(self, device: Device, name: str) -> list[Any]:
        """The values of a field in a GPU's samples, without nulls."""
        return [value for s in self.samples(device) if (value := getattr(s, name)) is not None]

    def leases(self, device: Device, *, throughout: bool) -> set[str]:
        """Ids of leases on a GPU or on one of its MIG devices.

        Args:
            throughout: Only leases that were active before and after the watch.
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


Evidence = Iterator["tuple[Device | None, dict[str, Any]]"]  # the device, and the evidence of a finding


@dataclass(frozen=True)
class WatchRule:
    """A rule of `watch` and `insights`.

    Args:
        threshold: The numbers with which evidence is compared, by name.
        window_s: The shortest watch for this rule; 0 where the last snapshot is enough.
        find: Yields the findings, given the data of the watch and the threshold.
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
    """The findings of all rules, the most severe first.

    The evidence of each has its numbers, the threshold with which they were compared, and window_s: the
    length of the watch; 0 where the rule reads the last snapshot.
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
    """Ids of the rules that need a longer watch."""
    return tuple(rule.id for rule in RULES if watched.window_s < rule.window_s)


def machine_context(proc: str = "/proc", pci: str = PCI) -> MachineContext:
    """The context of this machine.

    Args:
        proc: Where the kernel shows processes.
        pci: Where it shows PCI devices.
    """
    names = (read(path) for path in glob.glob(f"{proc}/[0-9]*/comm"))  # noqa: PTH207 - no need of a Path each
    kinds = (
        ((read(f"{path}/vendor") or "").strip(), (read(f"{path}/class") or "")[:6])
        for path in glob.glob(os.path.join(pci, "*"))  # noqa: PTH118, PTH207
    )
    switches = sum(1 for kind in kinds if kind == NVSWITCH)
    try:
        virtual = run_unrecorded("systemd-detect-virt", "--vm")["out"].strip() or "none"
    except NotReachedError:
        virtual = "none"
    return MachineContext(switches, frozenset(name.strip() for name in names if name), virtual)


# ---- the functions of the rules


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 1)


def _leased_idle(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "utilization_percent")
        leases = watched.leases(gpu, throughout=True)
        # The maximum, not the mean: a job that computes in bursts is not idle.
        if used and leases and max(used) < limit["utilization_percent"]:
            yield gpu, {"utilization_max_percent": max(used), "leases": sorted(leases)}


def _busy_unleased(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    if watched.last.leases != "yes":  # this machine has no leases, or they can't be read
        return
    for gpu in watched.gpus:
        used = watched.values(gpu, "utilization_percent")
        # Any lease during the watch excuses the GPU: one that began or ended meanwhile is no violation.
        if used and _mean(used) >= limit["utilization_percent"] and not watched.leases(gpu, throughout=False):
            listed = [process for process in watched.last.processes or () if process.device == gpu.uuid]
            if listed and all(process.kind == GRAPHICS for process in listed):  # a desktop
                continue
            evidence = {"utilization_mean_percent": _mean(used), "pids": [process.pid for process in listed]}
            yield gpu, evidence


def _memory_full(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "memory_used_mib")
        if used and gpu.memory_total_mib:
            # One full sample is enough: the next larger allocation would have failed.
            most = 100 * max(used) / gpu.memory_total_mib
            if most > limit["memory_percent"]:
                yield gpu, {"memory_max_percent": round(most, 1), "memory_max_mib": max(used)}


def _memory_held(watched: WatchData, limit: Mapping[str, Number]) -> Evidence:
    for gpu in watched.gpus:
        used = watched.values(gpu, "memory_used_mib")
        busy = watched.values(gpu, "utilization_percent")
        if not used or not busy or not gpu.memory_total_mib or max(busy) > 0:
            continue
        # The minimum: memory that was in use in every sample.
        least = 100 * min(used) / gpu.memory_total_mib
        if least >= limit["memory_percent"]:
            evidence = {"memory_min_percent": round(least, 1), "memory_min_mib": min(used)}
            yield gpu, {**evidence, "utilization_max_percent": max(busy)}


def _slowed(*events: str) -> Callable[[WatchData, Mapping[str, Number]], Evidence]:
    """Finds GPUs that report one of these reasons in enough of their samples."""

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
    """Finds links with fewer lanes, or of a lower generation, than the GPU supports, under load."""
    # A virtual machine sees the link that its hypervisor emulates: a T4 of EC2 shows 8 of 16 lanes.
    if watched.context.virtual != "none":
        return
    for gpu in watched.gpus:
        # An idle link drops to a lower generation to save power.
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
    """Finds a GPU that is far less busy, or clocked far lower, than the others of its loaded group."""
    for group in _groups(watched):
        # GPUs that are idle together are no slow group: each must be loaded.
        means = {g.index: _mean(watched.values(g, "utilization_percent") or [0]) for g in group}
        if len(group) < limit["gpus"] or min(means.values()) < limit["utilization_percent"]:
            continue
        for gpu in group:
            # Compared with the median of the others, so that one fast or slow GPU does not move the scale.
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
    """GPUs by lease; those without a lease are one group, for they may work together."""
    groups: dict[str, list[Device]] = {}
    for gpu in watched.gpus:
        for lease in sorted(watched.leases(gpu, throughout=True)) or [""]:
            groups.setdefault(lease, []).append(gpu)
    return list(groups.values())


def _has_fault(id: str) -> Callable[[WatchData, Mapping[str, Number]], Evidence]:
    """Finds GPUs with a fault of the table in the last snapshot."""

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
    # With MIG on, NVLinks are off on A100 (see `gpu_facts.has_mig`).
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
    """Finds a machine with NVSwitches on which nv-fabricmanager does not run."""
    # The kernel keeps 15 characters of a name (proc_pid_comm(5)); the name is from NVIDIA's Fabric Manager
    # user guide.
    if watched.context.nvswitches and "nv-fabricmanager"[:15] not in watched.context.programs:
        yield None, {"nvswitches": watched.context.nvswitches}


def _mps_active(watched: WatchData, _: Mapping[str, Number]) -> Evidence:
    """Finds nvidia-cuda-mps-control or nvidia-cuda-mps-server (NVIDIA, Multi-Process Service)."""
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
    """A rule for a fault of the table: by the last snapshot, or by samples.

    Args:
        find: Finds it in samples; None for the condition of the fault, on the last snapshot.
    """
    fault = FAULTS[id]
    return WatchRule(
        *(id, fault.severity, fault.text, fault.remedy, find or _has_fault(id)),
        threshold or {},
        window_s,
        fault.source,
    )


# docs/gpus.md, "Insights", has this table for users.
RULES: tuple[WatchRule, ...] = (
    WatchRule(
        "leased-idle",
        "warning",
        "it is leased but idle",
        "release the lease, or find out what its job waits for (data, a lock, a crashed worker)",
        _leased_idle,
        {"utilization_percent": 5},
        window_s=5,
    ),
    WatchRule(
        "busy-unleased",
        "warning",
        "a process uses it without a lease",
        "start it with `gpukiln-gpu run`, or create a lease for it: `gpukiln-gpu leases --reconcile`",
        _busy_unleased,
        {"utilization_percent": 10},
        window_s=2,
    ),
    WatchRule(
        "memory-full",
        "warning",
        "almost all of its memory is in use",
        "reduce the batch size, or lease a GPU with more memory: a larger batch will fail",
        _memory_full,
        {"memory_percent": 95},
        window_s=1,
    ),
    WatchRule(
        "memory-held",
        "warning",
        "its memory is in use, but nothing computes on it",
        "end the processes that are no longer needed: `gpukiln-gpu processes` lists them",
        _memory_held,
        {"memory_percent": 5},
        window_s=5,
    ),
    WatchRule(
        "power-cap",
        "info",
        "its power limit lowers its clocks",
        "this is normal under full load; compare it with the board's default: `nvidia-smi -q -d POWER`",
        _slowed("software power cap"),
        {"samples_percent": 50},
        window_s=2,
    ),
    WatchRule(
        "clocks-locked",
        "info",
        "an administrator has set its clocks",
        "restore the defaults: `nvidia-smi --reset-applications-clocks` and `--reset-gpu-clocks`",
        _slowed("application clocks"),
        {"samples_percent": 50},
        window_s=1,
    ),
    WatchRule(
        "behind-its-group",
        "warning",
        "it is far slower than the other GPUs of its group",
        "it slows down the whole job: check its temperature, power, PCIe link and the CPU that feeds it",
        _behind_group,
        {"gpus": 2, "utilization_percent": 10, "share_percent": 70},
        window_s=5,
    ),
    WatchRule(
        "driver-ended",
        "warning",
        "NVIDIA no longer supports its driver's branch",
        "install a supported branch: the role nvidia_driver, or a newer image",
        _driver_ended,
    ),
    WatchRule(
        "no-fabric-manager",
        "error",
        "the machine has NVSwitches, but the fabric manager does not run",
        "check `systemctl status nvidia-fabricmanager`: it must have the driver's exact version",
        _no_fabric_manager,
    ),
    WatchRule(
        "mps-active",
        "info",
        "processes share GPUs through MPS",
        "a process that fails may end all of them; `echo quit | nvidia-cuda-mps-control` stops MPS",
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
