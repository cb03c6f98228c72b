"""Reads the measured rates, the links and NVML's values of GPUs for the checks of the compute layer."""

from __future__ import annotations

import re
from typing import Any

from gpukiln.probe.nvml import address
from gpukiln.verify.facts import Facts

Gpu = dict[str, Any]

NOT_READY = 802  # CUresult
# A CUDA device that is a part of a GPU: NVIDIA A100-SXM4-40GB MIG 1g.5gb, also 1c.3g.20gb
# (MIG User Guide, "MIG Device Names").
_SLICE = re.compile(r"\bMIG \d+[cg]\.")


def confidential_computing(facts: Facts) -> dict[str, Any]:
    """Confidential computing: {on, ready}, each None where NVML does not report it."""
    state = (facts.to_dict().get("nvml") or {}).get("confidential") or {}
    return {key: state.get(key) if isinstance(state.get(key), bool) else None for key in ("on", "ready")}


def not_ready_hint(facts: Facts, error: str) -> str:
    """The hint for CUDA's error 802: a GPU accepts no work before its ready state is set; else an empty text.

    NVML, nvmlSystemSetConfComputeGpusReadyState: NVML_CC_ACCEPTING_CLIENT_REQUESTS_FALSE.
    """
    if f"error {NOT_READY}" not in error:
        return ""
    state = confidential_computing(facts)
    if not state["on"] or state["ready"]:
        return ""
    unset = "is unset" if state["ready"] is False else "may be unset, NVML does not report it"
    return (
        f"; confidential computing is on and its ready state {unset}: `nvidia-smi conf-compute -grs`, and "
        "after attestation `-srs 1`"
    )


def other_processes(facts: Facts) -> list[str]:
    """Processes on the GPUs of this machine, as NVML listed them before the copies."""
    return [
        f"{process['name'] or 'a process'} ({process['pid']}) on {address(gpu['bus_id'])}"
        for gpu in facts["nvml"]["gpus"]
        if isinstance(gpu.get("processes"), list) and isinstance(gpu.get("bus_id"), str)
        for process in gpu["processes"]
    ]


def link_text(gpu: Gpu) -> str:
    """The link that the kernel reports for a GPU, for messages; faster copies show that it is wrong."""
    link = gpu["link"]
    shown = f"{link['speed'] or 'speed?'} x{link['width'] or '?'}"
    if link["gb_s"] is None:
        return f"link {shown}"
    # No copy is faster than the link: the hypervisor's emulated link is wrong then.
    refuted = min(gpu["h2d_gb_s"], gpu["d2h_gb_s"]) > link["gb_s"]
    return f"link {link['gb_s']} ({shown}{', but copies are faster' if refuted else ''})"


def slow_copy_reason(facts: Facts, gpu: Gpu) -> str:
    """The reason why slow copies of this GPU are no fault of its link; empty where there is none.

    Confidential computing stages every copy, encrypted, in a bounce buffer (NVIDIA Confidential Computing,
    release notes of R580 TRD1, "Feature Summary"). A part of a GPU has some of its copy engines (NVML,
    nvmlGpuInstanceProfileInfo_t, copyEngineCount).
    """
    if confidential_computing(facts)["on"]:
        return "confidential computing is on, and copies pass through a bounce buffer"
    # Pageable memory is first copied into a pinned buffer of the driver.
    if gpu.get("pinned") is False:
        return "CUDA allocated no pinned memory, and pageable memory is copied slower"
    if _SLICE.search(str(gpu["name"])):
        return "a MIG device has only a part of its GPU's copy engines"
    # NVML asks the driver, sysfs shows what a hypervisor emulates. Where they differ the link's rate is
    # unknown.
    for nvml_gpu in facts["nvml"]["gpus"]:
        width = nvml_gpu.get("pcie", {}).get("width")
        same = isinstance(nvml_gpu.get("bus_id"), str) and address(nvml_gpu["bus_id"]) == gpu["bus_id"]
        if same and isinstance(width, int) and str(width) != gpu["link"]["width"]:
            # The kernel reads what a hypervisor shows, NVML asks the driver.
            return f"NVML reports a link of {width} lanes, and the kernel {gpu['link']['width'] or 'none'}"
    if others := other_processes(facts):
        return f"the machine is busy: {', '.join(others[:3])}"
    return ""
