"""The rules by which GPUs are judged: the suite's checks (tests/host), and `gpukiln-gpu health` on the node.

A rule is a function of the facts (`gpukiln.probe.gather`). It returns what it measured, for people; an
AssertionError is a failure, a NotToldError says that no GPU tells what it judges, a NotReachedError that
nothing is known of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from gpukiln.gpus import faults
from gpukiln.gpus.gpu_facts import (
    COMPLETED,
    Facts,
    Gpu,
    fabric_troubles,
    heat,
    is_bridged,
    is_divided,
    label,
    lanes_refuted,
    links,
    nvml_gpus,
    read,
)
from gpukiln.probe.base import NotReachedError, NotToldError, known
from gpukiln.probe.nvml import address

SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass(frozen=True)
class Rule:
    """One thing that must be true of GPUs.

    Args:
        id: Of the check.
        title: What is true when it holds.
        fix: What to do when it does not.
        judge: Given the facts, and what else it asks for.
        sick: Whether a machine that breaks it should get no work.
    """

    id: str
    title: str
    fix: str
    judge: Callable[..., str]
    sick: bool


def onoff(value: bool | None) -> str:
    """A mode, for people."""
    return "unsupported" if value is None else "on" if value else "off"


def _nvml(facts: Facts, simulated: bool) -> str:
    """All GPUs of the bus answer.

    Args:
        simulated: Whether they are on no bus.
    """
    found, pci, smi = facts["nvml"], facts["gpus"]["pci"], known(facts["gpus"].get("smi"))
    if not found["available"] and found["error"]:
        exits = f"; nvidia-smi exits {smi['rc']}" if smi else ""
        raise AssertionError(f"NVML does not work: {found['error']['_error']}{exits}; wanted NVML")
    gpus = nvml_gpus(facts)
    listed = {address(read(g, "bus_id")) for g in gpus}
    there = listed if simulated else {p["address"].lower() for p in pci}
    if listed != there:
        raise AssertionError(
            f"NVML lists {', '.join(sorted(listed)) or 'none'}, the PCI bus has {', '.join(sorted(there))}"
        )
    unnamed = [label(g) for g in gpus if not read(g, "uuid") or not read(g, "name")]
    if unnamed:
        raise AssertionError(f"{', '.join(unnamed)} has no name or no UUID, wanted both")
    return ", ".join(str(read(g, "name")) for g in gpus)


def _persistence(facts: Facts) -> str:
    off = [f"{label(g)} {onoff(m)}" for g in nvml_gpus(facts) if (m := read(g, "persistence")) is not True]
    if off:
        raise AssertionError(f"found persistence mode of {', '.join(off)}; wanted on")
    return ""


def xid_report(lines: Iterable[str], table: faults.Table, *, live: bool) -> tuple[list[str], list[str]]:
    """What the kernel's log says: the events that blame the machine, and the others.

    A machine booted from an image has run nothing: there every Xid counts. An NVSwitch's that is not fatal is
    seen on healthy machines.

    Args:
        live: Whether the machine runs somebody's work.
    """
    serious: list[faults.Event] = []
    others: list[faults.Event] = []
    for event in faults.events(lines):
        unprovoked = not live and not event.switch
        (serious if event.blames_hardware(table) or unprovoked else others).append(event)
    # an unknown one first: nobody has judged it
    ranked = sorted(others, key=lambda e: e.known(table))
    return [event.told(table) for event in serious], [event.told(table) for event in ranked]


def _xid(facts: Facts, table: faults.Table, live: bool) -> str:
    serious, others = xid_report(known(facts["gpus"]["xids"]), table, live=live)
    if serious:
        raise AssertionError(f"{len(serious)} kinds of Xid messages, wanted none: {' | '.join(serious[:5])}")
    gap = facts["gpus"].get("log_gap")
    if gap and facts["gpus"]["container"]:
        raise NotToldError(f"a container, which does not have all of the kernel's log: {gap}")
    if gap:
        raise NotReachedError(f"found no serious Xid in what could be read of the kernel's log: {gap}")
    notes = [f"{len(others)} that blame no hardware: {' | '.join(others[:3])}"] if others else []
    notes += [lost] if (lost := facts["gpus"].get("log_lost")) else []
    return "; ".join(notes)


def _ecc(facts: Facts) -> str:
    notes, told = [], False
    for gpu in nvml_gpus(facts):
        current, pending = read(gpu, "ecc.current"), read(gpu, "ecc.pending")
        if current != pending:
            raise AssertionError(
                f"{label(gpu)}: ECC is {onoff(current)}, pending {onoff(pending)}; wanted the same"
            )
        errors = read(gpu, "ecc.volatile_uncorrected")
        told = told or (current, errors) != (None, None)
        if errors:
            raise AssertionError(
                f"{label(gpu)}: {errors} uncorrected ECC errors since the last reset, wanted 0"
            )
        corrected, ever = read(gpu, "ecc.volatile_corrected"), read(gpu, "ecc.aggregate_uncorrected")
        notes += [f"{label(gpu)}: ECC {onoff(current)}"] if not current else []
        notes += [f"{label(gpu)}: {corrected} corrected"] if corrected else []
        notes += [f"{label(gpu)}: {ever} uncorrected in its life"] if ever else []
    if not told:
        raise NotToldError("not told by any GPU: it has no ECC, or it is a virtual one")
    return "; ".join(notes)


def _memory_repair(facts: Facts) -> str:
    """Rows are remapped from Ampere on; before that pages were retired."""
    notes, told = [], False
    for gpu in nvml_gpus(facts):
        failed, pending = read(gpu, "remapped_rows.failed"), read(gpu, "remapped_rows.pending")
        retiring = read(gpu, "retired_pages_pending")
        for value, what in (
            (failed, "a remapping of memory rows failed"),
            (pending, "a remapping of memory rows is pending"),
            (retiring, "memory pages wait to be retired"),
        ):
            if value:
                raise AssertionError(f"{label(gpu)}: {what}, wanted none")
        told = told or (failed, pending, retiring) != (None, None, None)
        repaired = read(gpu, "remapped_rows.uncorrectable")
        notes += [f"{label(gpu)}: {repaired} rows remapped after uncorrectable errors"] if repaired else []
    if not told:
        raise NotToldError("not told by any GPU: its memory is not repaired, or it is a virtual one")
    return "; ".join(notes)


def _throttle(facts: Facts) -> str:
    seen: dict[str, None] = {}
    gpus = nvml_gpus(facts)
    untold = [label(gpu) for gpu in gpus if read(gpu, "throttle.mask") is None]
    if len(untold) == len(gpus):
        raise NotToldError("not told by any GPU: a virtual one does not say why it is slow")
    for gpu in gpus:
        mask = read(gpu, "throttle.mask") or 0
        slowed = [name for bit, name in SLOWED.items() if mask & bit]
        if slowed:
            raise AssertionError(
                f"{label(gpu)} is held back by {', '.join(slowed)} (0x{mask:x}), wanted neither"
            )
        seen.update(dict.fromkeys(read(gpu, "throttle.names") or []))
    return ", ".join([*seen, *(f"{gpu}: not told" for gpu in untold)])


def _clocks(facts: Facts) -> str:
    """A virtual GPU does not tell its clocks and temperatures: they are the hypervisor's."""
    hottest, untold, told = [], [], False
    for gpu in nvml_gpus(facts):
        top, room = read(gpu, "clocks.max_sm"), heat(gpu)
        if top is not None and top <= 0:
            raise AssertionError(f"{label(gpu)}: the highest SM clock is 0 MHz, wanted more than 0")
        if room is not None and room[0] <= 0:
            raise AssertionError(f"{label(gpu)} has {room[1]}, where it slows down")
        told = told or top is not None or room is not None
        names = [name for name, value in (("clock", top), ("heat", room)) if value is None]
        untold += [f"{label(gpu)}: {' and '.join(names)} not told"] if names else []
        now = read(gpu, "temperature.gpu")
        hottest += [now] if now is not None else []
    if not told:
        raise NotToldError("; ".join(untold))
    return "; ".join(([f"at most {max(hottest)} degrees"] if hottest else []) + untold)


def _pcie_link(facts: Facts, copied: Mapping[str, Any]) -> str:
    """Every link has its lanes, or a hypervisor that shows fewer.

    Args:
        copied: The section `cuda`; empty where nothing was copied.
    """
    gpus = nvml_gpus(facts)
    notes = [f"{label(gpu)}: not told" for gpu in gpus if read(gpu, "pcie.width") is None]
    if len(notes) == len(gpus):
        raise NotToldError("not told by any GPU: a virtual one's link is its host's")
    shown: dict[str, int] = {}
    virtual = facts["boot"].get("virtualization") or "none"
    for gpu in gpus:
        model = str(read(gpu, "name"))
        shown[model] = max(shown.get(model, 0), read(gpu, "pcie.width") or 0)
    for gpu in gpus:
        width, widest = read(gpu, "pcie.width"), read(gpu, "pcie.max_width")
        narrow = width is not None and widest is not None and width < widest
        # A virtual machine's link is what its hypervisor shows, the same for every GPU of a model or not.
        refuted = lanes_refuted(copied, str(read(gpu, "bus_id")), width) if narrow else ""
        same = width == shown[str(read(gpu, "name"))]
        if narrow and not (virtual != "none" and (same or refuted)):
            raise AssertionError(f"{label(gpu)} has a PCIe link of {width} lanes, wanted {widest}")
        seen = refuted or f"{width} of {widest} lanes, as {virtual} shows it"
        notes += [f"{label(gpu)}: {seen}"] if narrow else []
        gen, newest = read(gpu, "pcie.gen"), read(gpu, "pcie.max_gen")
        if gen is not None and newest is not None and gen < newest:
            notes.append(f"{label(gpu)}: generation {gen} of {newest} while idle")
    return "; ".join(notes)


def _mig(facts: Facts) -> str:
    """Where no role has said what is wanted, only the pending mode is judged."""
    wanted = facts["expected"]["mig"]
    if wanted not in (None, "any", "enabled", "disabled"):
        raise AssertionError(
            f"/etc/gpukiln/expected.json wants MIG {wanted!r}, wanted there: enabled, disabled or any"
        )
    notes = []
    for gpu in nvml_gpus(facts):
        current, pending = read(gpu, "mig.current"), read(gpu, "mig.pending")
        if current != pending:
            raise AssertionError(
                f"{label(gpu)}: MIG is {onoff(current)}, pending {onoff(pending)}; wanted the same"
            )
        if wanted not in (None, "any") and bool(current) != (wanted == "enabled"):
            raise AssertionError(
                f"{label(gpu)}: MIG is {onoff(current)}, wanted {wanted}, as /etc/gpukiln/expected.json says"
            )
        notes += [f"{label(gpu)}: MIG is on"] if current else []
    return "; ".join(notes)


def listed(numbers: Iterable[Any]) -> str:
    """Numbers, for people."""
    return ", ".join(map(str, numbers))


def _nvlink_states(facts: Facts) -> str:
    return "; ".join(judge_states(nvml_gpus(facts)))


def judge_states(gpus: Sequence[Gpu]) -> list[str]:
    """Notes on how many NVLinks are active: as many on each GPU of a model, and some.

    Fewer than there are is common: a virtual machine with 1 to 4 of an NVSwitch's GPUs has 0 to 6 of 12
    (Fabric Manager user guide, "Full Passthrough Virtualization Model"), H100 NVL has 12 of 18
    (Azure/azurehpc-health-checks#162).
    """
    models: dict[str, list[tuple[Gpu, list[int], list[int]]]] = defaultdict(list)
    notes = []
    for gpu in gpus:
        if not is_divided(gpu):
            found = links(gpu)
            up, down = ([link["link"] for link in found if link["state"] is state] for state in (True, False))
            models[str(read(gpu, "name"))].append((gpu, up, down))
    for name, alike in models.items():
        shown = "; ".join(
            f"{label(gpu)} {len(up)} of {len(up + down)}" + (f", not {listed(down)}" if down else "")
            for gpu, up, down in alike
        )
        if len({len(up) for _, up, _ in alike}) != 1:
            raise AssertionError(f"active NVLinks of {name}: {shown}; wanted as many on each of them")
        gpu, up, down = alike[0]
        if down and not up and not is_bridged(gpu):
            raise AssertionError(f"all NVLinks of all {name} are inactive, wanted some active")
        notes.append(f"{len(up)}{f' of {len(up + down)}' if down else ''} links on each {name}")
    divided = [gpu["index"] for gpu in gpus if is_divided(gpu)]
    return notes + ([f"MIG is on, links not judged: GPU {listed(divided)}"] if divided else [])


def _fabric(facts: Facts) -> str:
    joined = 0
    for gpu in nvml_gpus(facts):
        state, status = read(gpu, "fabric.state"), read(gpu, "fabric.status")
        if state:  # null or 0: it has none
            if (state, status) != (COMPLETED, 0):
                raise AssertionError(
                    f"{label(gpu)}: the fabric's state is {state}, its status {status}; "
                    "wanted 3 (completed), 0"
                )
            if troubles := fabric_troubles(gpu):
                raise AssertionError(
                    f"{label(gpu)}: the fabric reports {', '.join(troubles)}, wanted neither"
                )
            joined += 1
    return f"{joined} GPUs in the fabric" if joined else "no GPU has a fabric"


NVML = Rule(
    "gpu.nvml",
    "NVML lists every GPU of the PCI bus, and none is lost",
    "Lost GPU: reboot the machine, replace the GPU if it comes back. Missing library: install the "
    "driver's libnvidia-ml1 in the module's version.",
    _nvml,
    sick=True,
)
PERSISTENCE = Rule(
    "gpu.persistence",
    "Persistence mode is on for every GPU",
    "Enable nvidia-persistenced with `--persistence-mode`: Ubuntu's unit starts it with persistence off.",
    _persistence,
    sick=False,
)
XID = Rule(
    "gpu.xid",
    "The kernel log of this boot has no Xid error that blames the machine",
    "Each number's meaning and action are in the failure: reset or drain as it says, and replace a GPU "
    "that repeats it.",
    _xid,
    sick=True,
)
ECC = Rule(
    "gpu.ecc",
    "ECC is as it will be after the next reset, and no uncorrected error happened since the last",
    "Pending mode: reset the GPU or reboot. Uncorrected errors: drain, reset, and look at "
    "gpu.memory-repair; replace the GPU if they come again.",
    _ecc,
    sick=True,
)
MEMORY_REPAIR = Rule(
    "gpu.memory-repair",
    "No GPU waits for a memory repair, and none failed",
    "Pending: drain and reset the GPU (`nvidia-smi --gpu-reset`) or reboot. Failed: replace the GPU.",
    _memory_repair,
    sick=True,
)
THROTTLE = Rule(
    "gpu.throttle",
    "No GPU is slowed down by heat or power supply",
    "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`: mend cooling or power; idle and the software "
    "power cap are normal.",
    _throttle,
    sick=False,
)
CLOCKS = Rule(
    "gpu.clocks",
    "Every GPU reports its clocks, and is cooler than where it slows down",
    "`nvidia-smi -q -d CLOCK,TEMPERATURE`; mend the cooling, or reset the GPU.",
    _clocks,
    sick=False,
)
PCIE_LINK = Rule(
    "gpu.pcie-link",
    "Every GPU's PCIe link has its full width",
    "Seat the card again; `lspci -vv` shows LnkCap and LnkSta of every bridge on the way.",
    _pcie_link,
    sick=False,
)
MIG = Rule(
    "gpu.mig",
    "MIG is as it will be after the next reset, and as the node's expectations say",
    "Reset the GPU or reboot for a pending mode; `nvidia-smi -mig 0` or `1` where the other is wanted; "
    "`gpu_bootstrap_mig` says what is wanted (role gpu_bootstrap, /etc/gpukiln/expected.json).",
    _mig,
    sick=False,
)
NVLINK = Rule(
    "multi-gpu.nvlink",
    "GPUs of one model have equally many active NVLinks, and some; their errors don't grow",
    "`nvidia-smi nvlink -s` and `-e`: reset the GPUs; seat the bridge again; replace the GPU or the "
    "baseboard if the link stays down or its errors go on.",
    _nvlink_states,  # how errors grow takes two looks with work between them: the suite's check alone
    sick=True,
)
FABRIC = Rule(
    "multi-gpu.fabric",
    "Every GPU of an NVSwitch machine has joined the fabric, which calls itself healthy",
    "`systemctl status nvidia-fabricmanager` and its log; install it in the driver's exact version.",
    _fabric,
    sick=True,
)
OF_ONE = (NVML, XID, ECC, MEMORY_REPAIR, THROTTLE, CLOCKS, PCIE_LINK, MIG, PERSISTENCE)
OF_SEVERAL = (NVLINK, FABRIC)  # where there is more than one GPU
