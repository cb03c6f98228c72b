"""The driver drives every GPU of the machine, and none reports damage."""

import pytest

from gpukiln.catalog import xid
from gpukiln.probe.base import NotReachedError
from gpukiln.probe.nvml import address
from gpukiln.verify import compute_facts
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts, known
from gpukiln.verify.gpu_facts import heat, label, nvml_gpus, read

ALL = ("image", "node", "eks-node")
LIVE = ("node", "eks-node")  # profiles of machines that run somebody's work
BEFORE = ("gpu.driver-loaded", "gpu.nvml")
SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def onoff(value: bool | None) -> str:
    return "unsupported" if value is None else "on" if value else "off"


@check(
    id="gpu.driver-loaded",
    title="The nvidia module is loaded, in the version of the user space",
    layer="gpu",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "The running kernel has no module: it was updated, and DKMS did not build for it.",
        "The driver was updated without a reboot.",
        "The driver's branch or kind of module does not know this GPU.",
        "Secure Boot refuses an unsigned module.",
    ),
    fix="`modprobe nvidia` and `dmesg` show why it does not load; after an upgrade of the driver reboot.",
)
def test_driver_loaded(facts):
    loaded = facts["gpus"]["module"]
    assert loaded, "/sys/module/nvidia/version is missing: the module is not loaded"
    wanted = known(facts["driver"]["nvidia_smi"])["version"]
    assert loaded == wanted, f"module {loaded} is loaded, wanted {wanted}, the user space's version"


@check(
    id="gpu.nvidia-smi",
    title="nvidia-smi succeeds and lists every GPU on the PCI bus",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The module is not loaded.", "A GPU fell off the bus.", "Libraries and module differ."),
    after=("gpu.driver-loaded",),
    fix="Exit 9: driver not loaded; 12: library missing; 15: a GPU fell off the bus, reset or replace it; "
    "18: module and libraries differ, reboot.",
)
def test_nvidia_smi(facts):
    smi, rows = known(facts["gpus"]["smi"]), known(facts["gpus"]["rows"])
    assert smi["rc"] == 0, f"nvidia-smi exits {smi['rc']}: {smi['out'].strip()[:300]}"
    where = "NVML" if facts.has_simulated_gpus else "the PCI bus"
    assert len(rows) == facts.gpu_count, f"nvidia-smi lists {len(rows)} GPUs, {where} has {facts.gpu_count}"
    lost = [
        r["bus_id"]
        for r in rows
        if "lost" in " ".join(r.values()).lower() or not r["uuid"].startswith("GPU-")
    ]
    assert not lost, f"nvidia-smi can't read {', '.join(lost)}"
    facts.note(", ".join(r["name"] for r in rows))


@check(
    id="gpu.nvml",
    title="NVML lists every GPU of the PCI bus, and none is lost",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "libnvidia-ml.so.1 is missing, or of another version than the module.",
        "A GPU fell off the bus: power, heat, or a PCIe link; see gpu.xid.",
        "A GPU is bound to another driver, such as vfio-pci.",
    ),
    after=("gpu.driver-loaded",),
    fix="Lost GPU: reboot the machine, replace the GPU if it comes back. Missing library: install the "
    "driver's libnvidia-ml1 in the module's version.",
)
def test_nvml(facts):
    found, pci, smi = facts["nvml"], facts["gpus"]["pci"], known(facts["gpus"]["smi"])
    if not found["available"] and found["error"]:
        raise AssertionError(
            f"NVML does not work: {found['error']['_error']}; nvidia-smi exits {smi['rc']}; wanted NVML"
        )
    gpus = nvml_gpus(facts)
    listed = {address(read(g, "bus_id")) for g in gpus}
    there = listed if facts.has_simulated_gpus else {p["address"].lower() for p in pci}
    assert listed == there, (
        f"NVML lists {', '.join(sorted(listed)) or 'none'}, the PCI bus has {', '.join(sorted(there))}"
    )
    unnamed = [label(g) for g in gpus if not read(g, "uuid") or not read(g, "name")]
    assert not unnamed, f"{', '.join(unnamed)} has no name or no UUID, wanted both"
    facts.note(", ".join(str(read(g, "name")) for g in gpus))


@check(
    id="gpu.persistence",
    title="Persistence mode is on for every GPU",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "nvidia-persistenced runs with `--no-persistence-mode`, as Ubuntu's unit starts it.",
        "nvidia-persistenced does not run.",
    ),
    after=BEFORE,
    fix="Enable nvidia-persistenced with `--persistence-mode`: Ubuntu's unit starts it with persistence off.",
)
def test_persistence(facts):
    off = [f"{label(g)} {onoff(m)}" for g in nvml_gpus(facts) if (m := read(g, "persistence")) is not True]
    assert not off, f"found persistence mode of {', '.join(off)}; wanted on"


def xid_report(facts: Facts) -> tuple[list[str], list[str]]:
    """What the kernel's log says: the events that blame the machine, and the others.

    A machine booted from an image has run nothing: there every Xid counts. An NVSwitch's that is not fatal is
    seen on healthy machines.
    """
    serious, others = [], []
    for event in xid.events(known(facts["gpus"]["xids"])):
        unprovoked = facts.profile not in LIVE and not event.switch
        (serious if event.blames_hardware or unprovoked else others).append(event)
    # an unknown one first: nobody has judged it
    return [str(event) for event in serious], [str(event) for event in sorted(others, key=lambda e: e.known)]


@check(
    id="gpu.xid",
    title="The kernel log of this boot has no Xid error that blames the machine",
    layer="gpu",
    profiles=ALL,
    needs=("gpu", "real-gpu"),
    causes=(
        "The GPU, its memory or its link is damaged, or too hot.",
        "An application made an invalid access (13, 31, 43, 45): a failure of an image, which has run none.",
    ),
    after=("gpu.driver-loaded",),
    fix="Each number's meaning and action are in the failure: reset or drain as it says, and replace a GPU "
    "that repeats it.",
)
def test_xid(facts):
    serious, others = xid_report(facts)
    assert not serious, f"{len(serious)} kinds of Xid messages, wanted none: {' | '.join(serious[:5])}"
    gap = facts["gpus"].get("log_gap")
    if gap and facts["gpus"]["container"]:
        pytest.skip(f"a container, which does not have all of the kernel's log: {gap}")
    if gap:
        raise NotReachedError(f"found no serious Xid in what could be read of the kernel's log: {gap}")
    notes = [f"{len(others)} that blame no hardware: {' | '.join(others[:3])}"] if others else []
    notes += [lost] if (lost := facts["gpus"].get("log_lost")) else []
    facts.note("; ".join(notes))


@check(
    id="gpu.ecc",
    title="ECC is as it will be after the next reset, and no uncorrected error happened since the last",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "`nvidia-smi -e` changed the mode, and the GPU was not reset since.",
        "A memory cell failed: the row is remapped at the next reset.",
    ),
    after=BEFORE,
    fix="Pending mode: reset the GPU or reboot. Uncorrected errors: drain, reset, and look at "
    "gpu.memory-repair; replace the GPU if they come again.",
)
def test_ecc(facts):
    notes, told = [], False
    for gpu in nvml_gpus(facts):
        current, pending = read(gpu, "ecc.current"), read(gpu, "ecc.pending")
        assert current == pending, (
            f"{label(gpu)}: ECC is {onoff(current)}, pending {onoff(pending)}; wanted the same"
        )
        errors = read(gpu, "ecc.volatile_uncorrected")
        told = told or (current, errors) != (None, None)
        assert not errors, f"{label(gpu)}: {errors} uncorrected ECC errors since the last reset, wanted 0"
        corrected, ever = read(gpu, "ecc.volatile_corrected"), read(gpu, "ecc.aggregate_uncorrected")
        notes += [f"{label(gpu)}: ECC {onoff(current)}"] if not current else []
        notes += [f"{label(gpu)}: {corrected} corrected"] if corrected else []
        notes += [f"{label(gpu)}: {ever} uncorrected in its life"] if ever else []
    if not told:
        pytest.skip("not told by any GPU: it has no ECC, or it is a virtual one")
    facts.note("; ".join(notes))


@check(
    id="gpu.memory-repair",
    title="No GPU waits for a memory repair, and none failed",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("Uncorrectable memory errors.", "The spare rows of a memory bank are used up."),
    after=BEFORE,
    fix="Pending: drain and reset the GPU (`nvidia-smi --gpu-reset`) or reboot. Failed: replace the GPU.",
)
def test_memory_repair(facts):
    """Rows are remapped from Ampere on; before that pages were retired."""
    notes, told = [], False
    for gpu in nvml_gpus(facts):
        failed, pending = read(gpu, "remapped_rows.failed"), read(gpu, "remapped_rows.pending")
        retiring = read(gpu, "retired_pages_pending")
        assert not failed, f"{label(gpu)}: a remapping of memory rows failed, wanted none"
        assert not pending, f"{label(gpu)}: a remapping of memory rows is pending, wanted none"
        assert not retiring, f"{label(gpu)}: memory pages wait to be retired, wanted none"
        told = told or (failed, pending, retiring) != (None, None, None)
        repaired = read(gpu, "remapped_rows.uncorrectable")
        notes += [f"{label(gpu)}: {repaired} rows remapped after uncorrectable errors"] if repaired else []
    if not told:
        pytest.skip("not told by any GPU: its memory is not repaired, or it is a virtual one")
    facts.note("; ".join(notes))


@check(
    id="gpu.throttle",
    title="No GPU is slowed down by heat or power supply",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "A fan, the airflow or the inlet temperature.",
        "A missing power cable, or the board's power brake.",
    ),
    after=BEFORE,
    fix="`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`: mend cooling or power; idle and the software "
    "power cap are normal.",
)
def test_throttle(facts):
    seen: dict[str, None] = {}
    gpus = nvml_gpus(facts)
    untold = [label(gpu) for gpu in gpus if read(gpu, "throttle.mask") is None]
    if len(untold) == len(gpus):
        pytest.skip("not told by any GPU: a virtual one does not say why it is slow")
    for gpu in gpus:
        mask = read(gpu, "throttle.mask") or 0
        slowed = [name for bit, name in SLOWED.items() if mask & bit]
        assert not slowed, f"{label(gpu)} is held back by {', '.join(slowed)} (0x{mask:x}), wanted neither"
        seen.update(dict.fromkeys(read(gpu, "throttle.names") or []))
    facts.note(", ".join([*seen, *(f"{gpu}: not told" for gpu in untold)]))


@check(
    id="gpu.clocks",
    title="Every GPU reports its clocks, and is cooler than where it slows down",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("Cooling.", "A GPU that came up half: its firmware reports nothing."),
    after=BEFORE,
    fix="`nvidia-smi -q -d CLOCK,TEMPERATURE`; mend the cooling, or reset the GPU.",
)
def test_clocks(facts):
    """A virtual GPU does not tell its clocks and temperatures: they are the hypervisor's."""
    hottest, untold, told = [], [], False
    for gpu in nvml_gpus(facts):
        top, room = read(gpu, "clocks.max_sm"), heat(gpu)
        assert top is None or top > 0, f"{label(gpu)}: the highest SM clock is 0 MHz, wanted more than 0"
        assert room is None or room[0] > 0, f"{label(gpu)} has {room[1]}, where it slows down"
        told = told or top is not None or room is not None
        names = [name for name, value in (("clock", top), ("heat", room)) if value is None]
        untold += [f"{label(gpu)}: {' and '.join(names)} not told"] if names else []
        now = read(gpu, "temperature.gpu")
        hottest += [now] if now is not None else []
    if not told:
        pytest.skip("; ".join(untold))
    facts.note("; ".join(([f"at most {max(hottest)} degrees"] if hottest else []) + untold))


@check(
    id="gpu.pcie-link",
    title="Every GPU's PCIe link has its full width",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=("The card or a riser is not seated well.", "A damaged lane.", "A slot with fewer lanes."),
    after=BEFORE,
    fix="Seat the card again; `lspci -vv` shows LnkCap and LnkSta of every bridge on the way.",
)
def test_pcie_link(facts):
    gpus = nvml_gpus(facts)
    notes = [f"{label(gpu)}: not told" for gpu in gpus if read(gpu, "pcie.width") is None]
    if len(notes) == len(gpus):
        pytest.skip("not told by any GPU: a virtual one's link is its host's")
    shown: dict[str, int] = {}
    virtual = facts["boot"].get("virtualization") or "none"
    for gpu in gpus:
        model = str(read(gpu, "name"))
        shown[model] = max(shown.get(model, 0), read(gpu, "pcie.width") or 0)
    for gpu in gpus:
        width, widest = read(gpu, "pcie.width"), read(gpu, "pcie.max_width")
        narrow = width is not None and widest is not None and width < widest
        # A virtual machine's link is what its hypervisor shows, the same for every GPU of a model or not.
        refuted = compute_facts.lanes_refuted(facts, str(read(gpu, "bus_id")), width) if narrow else ""
        same = width == shown[str(read(gpu, "name"))]
        assert not narrow or (virtual != "none" and (same or refuted)), (
            f"{label(gpu)} has a PCIe link of {width} lanes, wanted {widest}"
        )
        seen = refuted or f"{width} of {widest} lanes, as {virtual} shows it"
        notes += [f"{label(gpu)}: {seen}"] if narrow else []
        gen, newest = read(gpu, "pcie.gen"), read(gpu, "pcie.max_gen")
        if gen is not None and newest is not None and gen < newest:
            notes.append(f"{label(gpu)}: generation {gen} of {newest} while idle")
    facts.note("; ".join(notes))


@check(
    id="gpu.mig",
    title="MIG is as it will be after the next reset, and as the node's expectations say",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    causes=(
        "`nvidia-smi -mig` changed the mode, and the GPU was not reset since.",
        "Who divides the GPUs (MIG manager, mig-parted) did not do it, or did it on the wrong node.",
        "The GPUs are divided on purpose, and gpu_bootstrap_mig does not say so.",
    ),
    after=BEFORE,
    fix="Reset the GPU or reboot for a pending mode; `nvidia-smi -mig 0` or `1` where the other is wanted; "
    "`gpu_bootstrap_mig` says what is wanted (role gpu_bootstrap, /etc/gpukiln/expected.json).",
)
def test_mig(facts):
    """Where no role has said what is wanted, only the pending mode is judged."""
    wanted = facts["expected"]["mig"]
    assert wanted in (None, "any", "enabled", "disabled"), (
        f"/etc/gpukiln/expected.json wants MIG {wanted!r}, wanted there: enabled, disabled or any"
    )
    notes = []
    for gpu in nvml_gpus(facts):
        current, pending = read(gpu, "mig.current"), read(gpu, "mig.pending")
        assert current == pending, (
            f"{label(gpu)}: MIG is {onoff(current)}, pending {onoff(pending)}; wanted the same"
        )
        assert wanted in (None, "any") or bool(current) == (wanted == "enabled"), (
            f"{label(gpu)}: MIG is {onoff(current)}, wanted {wanted}, as /etc/gpukiln/expected.json says"
        )
        notes += [f"{label(gpu)}: MIG is on"] if current else []
    facts.note("; ".join(notes))


@check(
    id="gpu.idle",
    title="Nothing uses a GPU of a machine that has just booted",
    layer="gpu",
    profiles=("image",),
    needs=("gpu",),
    causes=("A service of the image starts a GPU program, or a display server.",),
    after=BEFORE,
    fix="Disable the service that starts the process named: an image's GPUs are the user's.",
)
def test_idle(facts):
    found = {label(gpu): read(gpu, "processes") for gpu in nvml_gpus(facts)}
    if all(processes is None for processes in found.values()):
        pytest.skip("not told by any GPU which processes use it")
    busy = [
        f"{gpu}: {p['name'] or 'a process'} ({p['pid']}, {p['kind']})"
        for gpu, processes in found.items()
        for p in processes or []
    ]
    assert not busy, f"found {', '.join(busy)}; wanted no process"
