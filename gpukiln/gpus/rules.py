"""The rules about GPUs, for the checks of the host suite (tests/host) and for `gpukiln-gpu health` on a node.

A rule is a function of the facts (`gpukiln.probe.gather`). It returns what it measured, in words. It raises
an
AssertionError for a failure, a NotReportedError where no GPU reports what it needs (outcome not_run), and a
NotReachedError where the facts are missing (outcome not_reached).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

from gpukiln.findings import SEVERITIES, Finding
from gpukiln.gpus import kernel_log
from gpukiln.gpus.faults import FAULTS, device_faults, lanes_missing, onoff, thermal_margin
from gpukiln.gpus.gpu_facts import (
    Facts,
    Gpu,
    are_linked,
    copies_exceed_lanes,
    fabric_faults,
    has_mig,
    label,
    links,
    nvml_gpus,
    read,
    title,
    value,
)
from gpukiln.gpus.nvlinks import GpuLinks, comparable_groups, link_mismatch
from gpukiln.probe.base import NotReachedError, NotReportedError, require_reached
from gpukiln.probe.nvml import address

MAX_NAMED = 3  # findings in the text of a failure


class FaultError(AssertionError):
    """A check failed by faults of GPUs.

    Args:
        findings: At least one.
        message: A text for all of them; empty for the message of the first.
    """

    def __init__(self, *findings: Finding, message: str = "") -> None:
        super().__init__(message or findings[0].message)
        self.findings = findings


@dataclass(frozen=True)
class HealthRule:
    """A condition that healthy GPUs fulfil.

    Args:
        id: Of the check.
        title: The condition in words.
        fix: The remedy.
        evaluate: Given the facts, and what else the rule needs. Raises `FaultError` with its findings; any
            other AssertionError means that NVML could not read a value.
    """

    id: str
    title: str
    fix: str
    evaluate: Callable[..., str]


def _require_none(facts: Facts, *ids: str) -> None:
    """Fail where a GPU has one of these faults."""
    findings = [
        (gpu, finding)
        for gpu in nvml_gpus(facts)
        for finding in device_faults(partial(value, gpu), title(gpu), ids)
    ]
    if findings:
        text = "; ".join(f"{label(gpu)}: {finding.message}" for gpu, finding in findings[:MAX_NAMED])
        more = f"; and {len(findings) - MAX_NAMED} more" if len(findings) > MAX_NAMED else ""
        raise FaultError(*(finding for _, finding in findings), message=f"{text}{more}; wanted none of it")


def _fix(*ids: str) -> str:
    """Meaning and remedy of faults from the table, as the fix of a check."""
    return (
        ". ".join(f"{FAULTS[id].text[0].upper()}{FAULTS[id].text[1:]}: {FAULTS[id].remedy}" for id in ids)
        + "."
    )


def _nvml(facts: Facts, simulated: bool) -> str:
    """Every GPU on the bus answers.

    Args:
        simulated: Whether the GPUs are simulated, which are on no bus.
    """
    try:
        return _all_listed(facts, simulated)
    except AssertionError as error:
        raise FaultError(Finding(NVML.id, "error", str(error), remedy=NVML.fix)) from None


def _all_listed(facts: Facts, simulated: bool) -> str:
    section, pci, smi = facts["nvml"], facts["gpus"]["pci"], require_reached(facts["gpus"].get("smi"))
    if not section["available"] and section["error"]:
        exits = f"; nvidia-smi exits {smi['rc']}" if smi else ""
        raise AssertionError(f"NVML does not work: {section['error']['_error']}{exits}; wanted: it works")
    gpus = nvml_gpus(facts)
    listed = {address(read(g, "bus_id")) for g in gpus}
    there = listed if simulated else {p["address"].lower() for p in pci}
    if listed != there:
        listing = ", ".join(sorted(listed)) or "none"
        raise AssertionError(f"NVML lists {listing}, the PCI bus has {', '.join(sorted(there))}")
    unnamed = [label(g) for g in gpus if not read(g, "uuid") or not value(g, "name")]
    if unnamed:
        raise AssertionError(f"{', '.join(unnamed)} has no name or no UUID, wanted both")
    return ", ".join(str(value(g, "name")) for g in gpus)


def _persistence(facts: Facts) -> str:
    _require_none(facts, "persistence-off")
    silent = [label(gpu) for gpu in nvml_gpus(facts) if value(gpu, "persistence") is None]
    if len(silent) == len(nvml_gpus(facts)):
        raise NotReportedError("not reported by any GPU")
    return ", ".join(f"{gpu}: not reported" for gpu in silent)


def log_events(
    lines: Iterable[str], table: kernel_log.XidTable, *, live: bool
) -> tuple[list[kernel_log.KernelEvent], list[kernel_log.KernelEvent]]:
    """The events of the kernel's log: those that count as a failure, the most severe first; and the others.

    Args:
        live: Whether the machine runs users' programs.
    """
    serious: list[kernel_log.KernelEvent] = []
    others: list[kernel_log.KernelEvent] = []
    for event in kernel_log.events(lines, table):
        counts = event.severity(table) != "info" and event.is_known(table)
        # A machine that was booted for verification has run no program that could cause an Xid. SXids that
        # are not fatal occur on healthy machines.
        unprovoked = not live and not event.is_switch
        (serious if counts or unprovoked else others).append(event)
    serious.sort(key=lambda event: SEVERITIES.index(event.severity(table)))
    return serious, sorted(others, key=lambda event: event.is_known(table))  # an unknown one comes first


def _xid(facts: Facts, table: kernel_log.XidTable, live: bool) -> str:
    serious, others = log_events(require_reached(facts["gpus"]["xids"]), table, live=live)
    if serious:
        texts = [event.explain(table) for event in serious]
        text = f"{len(serious)} kinds of faults in the kernel's log, wanted none: {' | '.join(texts[:5])}"
        raise FaultError(*(event.finding(table) for event in serious), message=text)
    gap = facts["gpus"].get("log_gap")
    if gap and facts["gpus"]["container"]:
        raise NotReportedError(f"this container can't read all of the kernel's log: {gap}")
    if gap:
        raise NotReachedError(f"found no serious Xid in the readable part of the kernel's log: {gap}")
    texts = [event.explain(table) for event in others]
    notes = (
        [f"{len(others)} events that do not blame the hardware: {' | '.join(texts[:3])}"] if others else []
    )
    notes += [lost] if (lost := facts["gpus"].get("log_lost")) else []
    return "; ".join(notes)


def _ecc(facts: Facts) -> str:
    _require_none(facts, "ecc-uncorrected", "ecc-pending")
    notes, reported = [], False
    for gpu in nvml_gpus(facts):
        current, errors = value(gpu, "ecc_enabled"), value(gpu, "ecc_uncorrected")
        reported = reported or (current, errors) != (None, None)
        corrected, ever = value(gpu, "ecc_corrected"), value(gpu, "ecc_uncorrected_lifetime")
        notes += [f"{label(gpu)}: ECC {onoff(current)}"] if not current else []
        notes += [f"{label(gpu)}: {corrected} corrected"] if corrected else []
        notes += [f"{label(gpu)}: {ever} uncorrected in its life"] if ever else []
    if not reported:
        raise NotReportedError("not reported by any GPU: they have no ECC, or are virtual")
    return "; ".join(notes)


def _memory_repair(facts: Facts) -> str:
    """No memory repair is pending or failed: row remapping from Ampere on, retirement of pages before."""
    _require_none(facts, "remap-failed", "remap-pending", "pages-pending")
    notes, reported = [], False
    for gpu in nvml_gpus(facts):
        names = ("remap_failed", "remap_pending", "pages_pending")
        reported = reported or any(value(gpu, name) is not None for name in names)
        repaired = value(gpu, "remapped_rows_uncorrectable")
        notes += [f"{label(gpu)}: {repaired} rows remapped after uncorrectable errors"] if repaired else []
    if not reported:
        raise NotReportedError("not reported by any GPU: they have no memory repair, or are virtual")
    return "; ".join(notes)


def _throttle(facts: Facts) -> str:
    seen: dict[str, None] = {}
    gpus = nvml_gpus(facts)
    silent = [label(gpu) for gpu in gpus if value(gpu, "clock_events") is None]
    if len(silent) == len(gpus):
        raise NotReportedError("not reported by any GPU: virtual GPUs do not report clock events")
    _require_none(facts, "thermal-slowdown", "hardware-slowdown")
    for gpu in gpus:
        seen.update(dict.fromkeys(value(gpu, "clock_events") or []))
    return ", ".join([*seen, *(f"{gpu}: not reported" for gpu in silent)])


def _clocks(facts: Facts) -> str:
    """Every GPU reports its clocks and is below its slowdown temperature."""
    _require_none(facts, "no-clock", "temperature-margin")
    hottest, silent, reported = [], [], False
    for gpu in nvml_gpus(facts):
        top, margin = value(gpu, "clock_sm_max_mhz"), thermal_margin(partial(value, gpu))
        reported = reported or top is not None or margin is not None
        # A virtual GPU reports neither: clocks and temperatures are the hypervisor's.
        names = [name for name, reading in (("clock", top), ("temperature", margin)) if reading is None]
        silent += [f"{label(gpu)}: {' and '.join(names)} not reported"] if names else []
        now = value(gpu, "temperature_c")
        hottest += [now] if now is not None else []
    if not reported:
        raise NotReportedError("; ".join(silent))
    return "; ".join(([f"at most {max(hottest)} degrees"] if hottest else []) + silent)


def _pcie_link(facts: Facts, copied: Mapping[str, Any]) -> str:
    """Every PCIe link has all of its lanes, unless a hypervisor shows fewer.

    Args:
        copied: The section `cuda` of the facts; empty where nothing was copied.
    """
    gpus = nvml_gpus(facts)
    notes = [f"{label(gpu)}: not reported" for gpu in gpus if value(gpu, "pcie_width") is None]
    if len(notes) == len(gpus):
        raise NotReportedError("not reported by any GPU: the link of a virtual GPU is its host's")
    shown: dict[str, int] = {}
    virtual = facts["boot"].get("virtualization") or "none"
    for gpu in gpus:
        model = str(value(gpu, "name"))
        shown[model] = max(shown.get(model, 0), value(gpu, "pcie_width") or 0)
    for gpu in gpus:
        width, widest = value(gpu, "pcie_width"), value(gpu, "pcie_width_max")
        narrow = lanes_missing(width, widest) is not None
        # A virtual machine sees the link that its hypervisor emulates. That is no fault where all GPUs of the
        # model show the same width, or where copies were faster than that width allows.
        refuted = copies_exceed_lanes(copied, str(read(gpu, "bus_id")), width) if narrow else ""
        same = width == shown[str(value(gpu, "name"))]
        if narrow and not (virtual != "none" and (same or refuted)):
            text = f"{label(gpu)} has {lanes_missing(width, widest)}"
            raise FaultError(FAULTS["pcie-narrow"].finding(title(gpu), text))
        seen = refuted or f"{width} of {widest} lanes, as {virtual} shows it"
        notes += [f"{label(gpu)}: {seen}"] if narrow else []
        gen, newest = value(gpu, "pcie_generation"), value(gpu, "pcie_generation_max")
        if gen is not None and newest is not None and gen < newest:
            notes.append(f"{label(gpu)}: generation {gen} of {newest} while idle")
    return "; ".join(notes)


def _mig(facts: Facts) -> str:
    """MIG has the mode of /etc/gpukiln/expected.json; without that file only the pending mode is checked."""
    expected = facts["expected"]["mig"]
    if expected not in (None, "any", "enabled", "disabled"):
        raise AssertionError(
            f"/etc/gpukiln/expected.json has MIG {expected!r}, wanted: enabled, disabled or any"
        )
    _require_none(facts, "mig-pending")
    notes = []
    for gpu in nvml_gpus(facts):
        current = value(gpu, "mig_enabled")
        if expected not in (None, "any") and bool(current) != (expected == "enabled"):
            raise AssertionError(
                f"{label(gpu)}: MIG is {onoff(current)}, wanted {expected} by /etc/gpukiln/expected.json"
            )
        notes += [f"{label(gpu)}: MIG is on"] if current else []
    return "; ".join(notes)


def join_numbers(numbers: Iterable[Any]) -> str:
    """Numbers in words.

    >>> join_numbers([0, 3, 4])
    '0, 3, 4'
    >>> join_numbers([])
    ''
    """
    return ", ".join(map(str, numbers))


def _nvlink_states(facts: Facts) -> str:
    return "; ".join(check_link_states(nvml_gpus(facts)))


def check_link_states(gpus: Sequence[Gpu]) -> list[str]:
    """Check that each GPU of a group has the same number of active NVLinks (nvlinks.py); returns notes."""
    whole = [gpu for gpu in gpus if not has_mig(gpu)]
    cards = []
    for gpu in whole:
        nvlinks = links(gpu)
        up, down = ([link["link"] for link in nvlinks if link["state"] is state] for state in (True, False))
        joined = frozenset(
            other["index"] for other in whole if other is not gpu and are_linked(gpu, other, gpus)
        )
        cards.append(GpuLinks(gpu["index"], label(gpu), str(value(gpu, "name")), up, down, joined))
    notes = []
    for group in comparable_groups(cards):
        if text := link_mismatch(group):
            raise FaultError(FAULTS["nvlink-down"].finding("", text))
        example = group[0]
        of = f" of {len(example.up) + len(example.down)}" if example.down else ""
        which = f"each {example.name}" if len(group) > 1 else example.label
        notes.append(f"{len(example.up)}{of} links on {which}")
    divided = [gpu["index"] for gpu in gpus if has_mig(gpu)]
    return notes + ([f"MIG is on, links not checked: GPU {join_numbers(divided)}"] if divided else [])


def _fabric(facts: Facts) -> str:
    _require_none(facts, "fabric-not-joined")
    joined = 0
    for gpu in nvml_gpus(facts):
        if read(gpu, "fabric.state"):  # null or 0: the GPU has no fabric
            if problems := fabric_faults(gpu):
                text = f"{label(gpu)}: the fabric reports {', '.join(problems)}, wanted none"
                raise FaultError(FAULTS["fabric-not-joined"].finding(title(gpu), text))
            joined += 1
    return f"{joined} GPUs in the fabric" if joined else "no GPU has a fabric"


NVML = HealthRule(
    "gpu.nvml",
    "NVML lists every GPU of the PCI bus, and none is lost",
    "Lost GPU: reboot the machine, and replace the GPU if it happens again. Missing library: install the "
    "driver's libnvidia-ml1 in the module's version.",
    _nvml,
)
PERSISTENCE = HealthRule(
    "gpu.persistence",
    "Persistence mode is on for every GPU",
    _fix("persistence-off"),
    _persistence,
)
XID = HealthRule(
    "gpu.xid",
    "The kernel log of this boot has no Xid error that blames the machine",
    "The failure has meaning and action of each number: reset or drain accordingly, and replace a GPU "
    "that repeats it.",
    _xid,
)
ECC = HealthRule(
    "gpu.ecc",
    "The ECC mode does not change with the next reset, and no uncorrected error happened since the last",
    _fix("ecc-uncorrected", "ecc-pending"),
    _ecc,
)
MEMORY_REPAIR = HealthRule(
    "gpu.memory-repair",
    "No memory repair of a GPU is pending or failed",
    _fix("remap-failed", "remap-pending", "pages-pending"),
    _memory_repair,
)
THROTTLE = HealthRule(
    "gpu.throttle",
    "Neither heat nor power supply slows down a GPU",
    _fix("thermal-slowdown", "hardware-slowdown"),
    _throttle,
)
CLOCKS = HealthRule(
    "gpu.clocks",
    "Every GPU reports its clocks, and is cooler than its slowdown temperature",
    _fix("temperature-margin", "no-clock"),
    _clocks,
)
PCIE_LINK = HealthRule(
    "gpu.pcie-link",
    "Every GPU's PCIe link has its full width",
    _fix("pcie-narrow"),
    _pcie_link,
)
MIG = HealthRule(
    "gpu.mig",
    "The MIG mode does not change with the next reset, and is the one that the node expects",
    "Reset the GPU or reboot for a pending mode; set another mode with `nvidia-smi -mig 0` or `1`; "
    "`gpu_bootstrap_mig` has the expected mode (role gpu_bootstrap, /etc/gpukiln/expected.json).",
    _mig,
)
NVLINK = HealthRule(
    "multi-gpu.nvlink",
    "GPUs of one model have the same number of active NVLinks, and at least one; their errors do not grow",
    _fix("nvlink-down"),
    _nvlink_states,  # growing errors need two samples with work in between: the check of the host suite only
)
FABRIC = HealthRule(
    "multi-gpu.fabric",
    "Every GPU of an NVSwitch machine has joined the fabric, which reports itself as healthy",
    _fix("fabric-not-joined"),
    _fabric,
)
SINGLE_GPU_RULES = (NVML, XID, ECC, MEMORY_REPAIR, THROTTLE, CLOCKS, PCIE_LINK, MIG, PERSISTENCE)
MULTI_GPU_RULES = (NVLINK, FABRIC)  # run where the machine has more than one GPU
