"""GPUs of a confidential virtual machine accept work."""

import pytest

from gpukiln.gpus.gpu_facts import nvml_gpus
from gpukiln.probe.base import ERROR
from gpukiln.verify.checks import check


@check(
    id="gpu.confidential",
    title="GPUs that do confidential computing accept work",
    layer="gpu",
    profiles=("image", "node", "eks-node", "workspace"),
    needs=("gpu",),
    causes=("The GPUs' ready state is not set; a unit or an administrator sets it after attestation.",),
    after=("gpu.driver-loaded", "gpu.nvml"),
    fix="Attest the GPUs, then run `nvidia-smi conf-compute -srs 1`, preferably in a unit that runs before "
    "any job.",
)
def test_confidential(facts):
    """CUDA answers 802 until then, as it does without a fabric manager (NVIDIA/nvtrust#87)."""
    # Fails with NVML's error where NVML lists no GPU.
    nvml_gpus(facts)
    state = facts["nvml"]["confidential"]
    for key, value in state.items():
        assert not isinstance(value, dict), f"confidential computing, {key}: {value[ERROR]}"
    assert not state["on"] or state["ready"] is not False, (
        "confidential computing is on, and the GPUs' ready state is off, wanted set: CUDA answers 802"
    )
    # Older drivers do not have the call; CUDA's check finds error 802 then.
    if state["on"] and state["ready"] is None:
        pytest.skip("confidential computing is on, and NVML does not report the ready state")
    facts.note({True: "on, and ready", False: "off", None: "no GPU supports it"}[state["on"]])
