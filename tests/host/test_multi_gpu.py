"""Several GPUs of one machine reach each other."""

from collections import defaultdict

from gpukiln.verify.checks import check
from gpukiln.verify.gpu_facts import (
    P2P_STATUS,
    TOPOLOGY,
    check_readable,
    is_bridged,
    label,
    linked,
    links,
    nvml_gpus,
    read,
)

ALL = ("image", "node", "eks-node")
NEEDS = ("gpu", "several-gpus")
BEFORE = ("gpu.driver-loaded", "gpu.nvml")
OK, DISABLED, UNKNOWN = 0, 4, 6
COMPLETED = 3  # of a fabric's states


def pairs(gpus):
    """Every GPU with each other one, and what it says of the way to it."""
    for gpu in gpus:
        said = {p["index"]: p for p in read(gpu, "peers")}
        for other in gpus:
            if other is not gpu:
                way = f"{label(gpu)} to {label(other)}"
                assert other["index"] in said, f"{way}: NVML was not asked, wanted a way"
                yield gpu, other, said[other["index"]], way


@check(
    id="multi-gpu.topology",
    title="The way between every two GPUs is known, and the same in both directions",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=("The firmware's tables of PCIe or NUMA are wrong.", "A virtual machine hides the PCIe tree."),
    after=BEFORE,
    fix="Compare `nvidia-smi topo -m` with the board's manual; update the firmware.",
)
def test_topology(facts):
    ways, levels = {}, defaultdict(int)
    for gpu, other, said, way in pairs(nvml_gpus(facts)):
        check_readable(gpu, said["ancestor"], way)
        assert said["ancestor"] in TOPOLOGY, f"{way}: level {said['ancestor']}, wanted one that NVML knows"
        ways[gpu["index"], other["index"]] = said["ancestor"]
        levels[TOPOLOGY[said["ancestor"]]] += 1
    odd = [
        f"GPU {a} to {b}: {TOPOLOGY[level]}, back: {TOPOLOGY[ways[b, a]]}"
        for (a, b), level in ways.items()
        if ways[b, a] != level
    ]
    assert not odd, f"found {'; '.join(odd)}; wanted the same in both directions"
    facts.note(", ".join(f"{n // 2} x {level}" for level, n in levels.items()))


@check(
    id="multi-gpu.p2p",
    title="GPUs with NVLink between them reach each other's memory, and nobody switched that off",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "The fabric manager does not run, or is of another version than the driver.",
        "An NVLink or its bridge failed.",
        "A module parameter switched it off.",
    ),
    after=BEFORE,
    fix="`nvidia-smi topo -p2p r`; where there is an NVSwitch, install the fabric manager in the driver's "
    "exact version, and start it.",
)
def test_p2p(facts):
    count, without = 0, set()
    for gpu, other, said, way in pairs(nvml_gpus(facts)):
        for kind in ("read", "write"):
            status = said["p2p"][kind]
            check_readable(gpu, status, f"{way}: peer {kind}")
            found = P2P_STATUS.get(status, f"status {status}") if status is not None else "not supported"
            # Boards and chipsets without it are common where GPUs have only PCIe between them.
            must = linked(gpu, other) or status in (DISABLED, UNKNOWN) or status not in (None, *P2P_STATUS)
            assert status == OK or not must, f"{way}: peer {kind} is {found}, wanted ok"
            count += status == OK
            without |= {found} if status != OK else set()
    facts.note(f"{count // 2} ways ok" + (f"; others: {', '.join(sorted(without))}" if without else ""))


@check(
    id="multi-gpu.nvlink",
    title="Every NVLink is active, without errors, and as many as on the other GPUs of the model",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "A bridge is loose or missing.",
        "A link failed in training: see gpu.xid for 74, 136, 144 to 150.",
        "The fabric manager does not run.",
    ),
    after=BEFORE,
    fix="`nvidia-smi nvlink -s` and `-e`: reset the GPUs; seat the bridge again; replace the GPU or the "
    "baseboard if the link stays down.",
)
def test_nvlink(facts):
    active: dict[str, dict[str, int]] = defaultdict(dict)
    for gpu in nvml_gpus(facts):
        found = links(gpu)
        down = [str(link["link"]) for link in found if not link["state"]]
        assert not down or is_bridged(gpu), (
            f"{label(gpu)}: NVLink {', '.join(down)} of {len(found)} is inactive, wanted all active"
        )
        for link in found:
            for kind, errors in link["errors"].items():
                check_readable(gpu, errors, f"NVLink {link['link']}: {kind} errors")
                assert not errors, f"{label(gpu)}: NVLink {link['link']} has {errors} {kind} errors, wanted 0"
        active[str(read(gpu, "name"))][label(gpu)] = len(found) - len(down)
    for name, counts in active.items():
        listed = ", ".join(f"{gpu} {count}" for gpu, count in counts.items())
        assert len(set(counts.values())) == 1, (
            f"active NVLinks of {name}: {listed}; wanted as many on each of them"
        )
    facts.note(", ".join(f"{next(iter(c.values()))} links on each {name}" for name, c in active.items()))


@check(
    id="multi-gpu.fabric",
    title="Every GPU of an NVSwitch machine has joined the fabric",
    layer="multi-gpu",
    profiles=ALL,
    needs=NEEDS,
    causes=(
        "The fabric manager does not run: it starts only in the driver's exact version.",
        "An NVSwitch or a link failed.",
    ),
    after=BEFORE,
    fix="`systemctl status nvidia-fabricmanager` and its log; install it in the driver's exact version.",
)
def test_fabric(facts):
    joined = 0
    for gpu in nvml_gpus(facts):
        state, status = read(gpu, "fabric.state"), read(gpu, "fabric.status")
        if state:  # null or 0: it has none
            assert (state, status) == (COMPLETED, 0), (
                f"{label(gpu)}: the fabric's state is {state}, its status {status}; wanted 3 (completed), 0"
            )
            joined += 1
    facts.note(f"{joined} GPUs in the fabric" if joined else "no GPU has a fabric")
