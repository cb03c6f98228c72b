"""The GPUs of a machine exchange data and compute together."""

import pytest

from gpukiln.verify.checks import check


@check(
    id="multi-gpu.all-reduce",
    title="Every GPU adds up the numbers of all GPUs, and has the right sum",
    layer="multi-gpu",
    profiles=("image", "node", "eks-node", "workspace", "runner", "pod"),
    needs=("gpu", "real-gpu", "several-gpus"),
    causes=(
        "PCIe access control (ACS) or an IOMMU between the GPUs: peer copies hang or arrive wrong",
        "error 802 or 999: the fabric manager does not run, or is of another version than the driver",
        "an NVLink is down, or a GPU's memory is damaged",
    ),
    after=("gpu.nvml", "compute.kernel"),
    fix="`nvidia-smi topo -p2p r` and `nvidia-smi nvlink -s` show the paths. On bare metal switch ACS off "
    "(or the IOMMU to passthrough); with NVSwitch start nvidia-fabricmanager in the driver's version.",
)
def test_all_reduce(facts):
    result = facts["cuda"]["all_reduce"]
    # Another process with exclusive access is no fault of the machine.
    busy = [g for g in facts["cuda"]["gpus"] if g["busy"]]
    if busy and not result["tried"]:
        pytest.skip(f"a GPU is in use: {result['reason']}")
    if facts["cuda"]["mig"] and not result["tried"]:
        pytest.skip(f"MIG is on, which shows a process one GPU: {result['reason']}")
    assert result["tried"], f"the all-reduce was not run: {result['reason']}"
    assert not result["error"], f"the all-reduce ended early: {result['error']}"
    assert result["ok"], f"{len(result['wrong'])} GPUs have a wrong sum: {'; '.join(result['wrong'])}"
    # Copies through the host are slower but correct; boards without peer access are common.
    staged = [" to ".join(pair) for pair in result["through_host"]]
    way = f"{result['direct']} of {result['direct'] + len(staged)} copies directly from GPU to GPU"
    more = f", through the host {', '.join(staged[:4])}{', ...' if len(staged) > 4 else ''}" if staged else ""
    facts.note(f"{result['elements']} elements in {result['ms']} ms; {way}{more}")
