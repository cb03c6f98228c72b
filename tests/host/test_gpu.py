"""The driver drives every GPU of the machine."""

from gpukiln.verify.checks import check

ALL = ("image", "node", "eks-node")


@check(
    id="gpu.driver-loaded",
    title="The nvidia module is loaded, in the version of the user space",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    fix="`modprobe nvidia` and `dmesg` show why it does not load; after an upgrade of the driver reboot.",
)
def test_driver_loaded(facts):
    loaded, wanted = facts["gpus"]["module"], facts["driver"]["nvidia_smi"]["version"]
    assert loaded, "/sys/module/nvidia/version is missing: the module is not loaded"
    assert loaded == wanted, f"module {loaded} is loaded, wanted {wanted}, the user space's version"


@check(
    id="gpu.nvidia-smi",
    title="nvidia-smi succeeds and lists every GPU on the PCI bus",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    fix="Exit 9: driver not loaded; 12: library missing; 15: a GPU fell off the bus, reset or replace it; "
    "18: module and libraries differ, reboot.",
)
def test_nvidia_smi(facts):
    smi, rows, pci = facts["gpus"]["smi"], facts["gpus"]["rows"], facts["gpus"]["pci"]
    assert smi["rc"] == 0, f"nvidia-smi exits {smi['rc']}: {smi['out'].strip()[:300]}"
    assert len(rows) == len(pci), f"nvidia-smi lists {len(rows)} GPUs, the PCI bus has {len(pci)}"
    lost = [
        r["bus_id"]
        for r in rows
        if "lost" in " ".join(r.values()).lower() or not r["uuid"].startswith("GPU-")
    ]
    assert not lost, f"nvidia-smi can't read {', '.join(lost)}"
    facts.note(", ".join(r["name"] for r in rows))


@check(
    id="gpu.persistence",
    title="Persistence mode is on for every GPU",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    fix="Enable nvidia-persistenced with `--persistence-mode`: Ubuntu's unit starts it with persistence off.",
)
def test_persistence(facts):
    rows = facts["gpus"]["rows"]
    assert rows, "nvidia-smi lists no GPU"
    off = [f"{r['bus_id']} {r['persistence']}" for r in rows if r["persistence"] != "Enabled"]
    assert not off, f"found {', '.join(off)}; wanted Enabled"


@check(
    id="gpu.xid",
    title="The kernel log has no Xid error of this boot",
    layer="gpu",
    profiles=ALL,
    needs=("gpu",),
    fix="Look the number up in NVIDIA's Xid catalogue: some are an application's fault, some mean a reset.",
)
def test_xid(facts):
    found = facts["gpus"]["xids"]
    assert not found, f"{len(found)} Xid messages: {'; '.join(found[:3])}"
