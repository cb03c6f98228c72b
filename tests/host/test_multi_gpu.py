"""The GPUs of a machine reach each other."""

from collections import defaultdict

import pytest

from gpukiln.gpus import rules
from gpukiln.gpus.gpu_facts import (
    P2P_STATUS,
    TOPOLOGY,
    are_linked,
    check_readable,
    has_mig,
    label,
    links,
    nvml_gpus,
    read,
)
from gpukiln.gpus.rules import check_link_states, join_numbers
from gpukiln.probe.base import ERROR
from gpukiln.verify.checks import check, evaluate

ALL = ("image", "node", "eks-node", "workspace")
NEEDS = ("gpu", "several-gpus")
BEFORE = ("gpu.driver-loaded", "gpu.nvml")
OK, DISABLED, UNKNOWN = 0, 4, 6
CRC_A_SECOND = 100
"""A link with so many CRC errors a second is bad, and so is a link with one replay or recovery.

NVIDIA's own limits for the growth of counters: DCGM, modules/health/DcgmHealthWatch.cpp,
DCGM_LIMIT_MAX_NVLINK_CRC_ERROR. The totals since the driver was loaded are no limit: healthy H100 failed such
a check (aws/eks-node-monitoring-agent#261).
"""


def pairs(gpus):
    """Each pair of GPUs, the first one's report on the path to the second, and a name of it for messages."""
    for gpu in gpus:
        said = {p["index"]: p for p in read(gpu, "peers")}
        for other in gpus:
            # Both directions: a path may differ, or only one may fail.
            if other is not gpu:
                way = f"{label(gpu)} to {label(other)}"
                assert other["index"] in said, f"{way}: NVML was not asked, wanted a path"
                yield gpu, other, said[other["index"]], way


@check(
    id="multi-gpu.topology",
    title="The path between every two GPUs is known, and the same in both directions",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=("The firmware's tables of PCIe or NUMA are wrong.", "A virtual machine hides the PCIe tree."),
    after=BEFORE,
    fix="Compare `nvidia-smi topo -m` with the board's manual; update the firmware.",
)
def test_topology(facts):
    paths, levels, unreported = {}, defaultdict(int), 0
    for gpu, other, said, way in pairs(nvml_gpus(facts)):
        check_readable(gpu, said["ancestor"], way)
        if said["ancestor"] is None:  # a virtual GPU has no place on a bus
            unreported += 1
            continue
        assert said["ancestor"] in TOPOLOGY, f"{way}: level {said['ancestor']}, wanted one that NVML knows"
        paths[gpu["index"], other["index"]] = said["ancestor"]
        levels[TOPOLOGY[said["ancestor"]]] += 1
    odd = [
        f"GPU {a} to {b}: {TOPOLOGY[level]}, back: {TOPOLOGY[paths[b, a]]}"
        for (a, b), level in paths.items()
        if paths.get((b, a), level) != level
    ]
    assert not odd, f"found {'; '.join(odd)}; wanted the same in both directions"
    if not paths:
        pytest.skip("no GPU reports its paths: the GPUs are virtual")
    known = [f"{(n + 1) // 2} x {level}" for level, n in levels.items()]
    facts.note(", ".join(known + ([f"{unreported} directions not reported"] if unreported else [])))


@check(
    id="multi-gpu.p2p",
    title="GPUs with NVLink between them can access each other's memory, and peer access is not disabled",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "The fabric manager does not run, or is of another version than the driver.",
        "An NVLink or its bridge failed.",
        "A module parameter disables peer access.",
    ),
    after=BEFORE,
    fix="`nvidia-smi topo -p2p r` shows the pairs. On a machine with NVSwitch install the fabric manager in "
    "the "
    "driver's exact version, and start it.",
)
def test_p2p(facts):
    count, without, gpus = 0, set(), nvml_gpus(facts)
    # A GPU with MIG enabled has no peer access (MIG User Guide, Application Considerations).
    divided = [gpu["index"] for gpu in gpus if has_mig(gpu)]
    if divided and len(gpus) - len(divided) < 2:
        pytest.skip(f"MIG is on, and a divided GPU has no peers: GPU {join_numbers(divided)}")
    for gpu, other, said, way in pairs(gpus):
        if gpu["index"] in divided or other["index"] in divided:
            continue
        for kind in ("read", "write"):
            status = said["p2p"][kind]
            check_readable(gpu, status, f"{way}: peer {kind}")
            status_text = (
                P2P_STATUS.get(status, f"status {status}") if status is not None else "not supported"
            )
            # Boards and chipsets without it are common where GPUs have only PCIe between them.
            joined = are_linked(gpu, other, gpus)
            must = joined or status in (DISABLED, UNKNOWN) or status not in (None, *P2P_STATUS)
            assert status == OK or not must, f"{way}: peer {kind} is {status_text}, wanted ok"
            count += status == OK
            without |= {status_text} if status != OK else set()
    notes = [f"{count // 2} paths ok"]
    notes += [f"others: {', '.join(sorted(without))}"] if without else []
    notes += [f"MIG is on, no peers: GPU {join_numbers(divided)}"] if divided else []
    facts.note("; ".join(notes))


def check_counters(facts, gpus):
    """Fail where error counters of active NVLinks grew between two reads; return notes about their totals."""
    later = facts["nvlinks"]
    assert not later["error"], f"NVML answered, and later failed: {later['error'][ERROR]}"
    # The growth per second needs a time above 0, also for a probe that was very fast.
    seconds = max(later["at"] - facts["nvml"]["at"], 1.0)
    then, counted = {gpu["index"]: gpu for gpu in later["gpus"]}, {}
    for gpu in gpus:
        assert gpu["index"] in then, f"{label(gpu)} was listed, and was missing {seconds:.0f} s later"
        after = {link["link"]: link for link in links(then[gpu["index"]])}
        for link in (link for link in links(gpu) if link["state"]):
            where = f"{label(gpu)}: NVLink {link['link']}"
            # A link that has gone is as bad as one that went down.
            now = after.get(link["link"], {"state": None})
            assert now["state"], f"{where} is inactive {seconds:.0f} s after it was active, wanted active"
            for kind, before in link["errors"].items():
                for counter in (before, now["errors"][kind]):
                    check_readable(gpu, counter, f"NVLink {link['link']}: {kind} errors")
                if None not in (before, now["errors"][kind]):
                    check_growth(f"{where}: {kind} errors", kind, now["errors"][kind] - before, seconds)
                    counted[f"GPU {gpu['index']} link {link['link']} {kind}"] = now["errors"][kind]
    some = [f"{errors} ({where})" for where, errors in counted.items() if errors]
    some[3:] = [f"{len(some) - 3} more counters above 0"] if len(some) > 3 else []
    if not counted:
        return ["errors not reported"]
    return [f"errors since the driver was loaded: {', '.join(some)}"] if some else []


def check_growth(what, kind, more, seconds):
    # Healthy links have single CRC errors, which are corrected, but no replays or recoveries.
    if kind in ("replay", "recovery"):
        assert more < 1, f"{what} grew by {more} in {seconds:.0f} s, wanted no growth"
    assert more < CRC_A_SECOND * seconds, (
        f"{what} grew by {more / seconds:.0f} a second, wanted less than {CRC_A_SECOND}"
    )


@check(
    id=rules.NVLINK.id,
    title=rules.NVLINK.title,
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "A bridge is loose or missing.",
        "A link failed in training: see gpu.xid for 74, 136, 144 to 150.",
        "The fabric manager does not run.",
    ),
    after=BEFORE,
    fix=rules.NVLINK.fix,
)
def test_nvlink(facts):
    """GPUs with MIG are exempt: their NVLinks are off. Counters are read before and after CUDA's work."""
    gpus = nvml_gpus(facts)
    notes = check_link_states(gpus)
    if any(link["state"] for gpu in gpus for link in links(gpu)):
        notes += check_counters(facts, gpus)
    elif all(has_mig(gpu) for gpu in gpus):
        pytest.skip(f"MIG is on, and NVLinks are off then: GPU {join_numbers(gpu['index'] for gpu in gpus)}")
    facts.note("; ".join(notes))


@check(
    id=rules.FABRIC.id,
    title=rules.FABRIC.title,
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "The fabric manager does not run: it starts only in the driver's exact version.",
        "An NVSwitch or a link failed.",
    ),
    after=BEFORE,
    fix=rules.FABRIC.fix,
)
def test_fabric(facts):
    evaluate(facts, rules.FABRIC.evaluate)
