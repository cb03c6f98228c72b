"""The monitoring tools of the GPUs work."""

import re

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check

ALL = ("image", "node", "eks-node", "workspace")
FINE = ("pass", "skip", "not run")


@check(
    id="monitoring.nvtop",
    title="nvtop starts",
    layer="monitoring",
    profiles=ALL,
    needs=("component:nvtop",),
    causes=("The package or a library that it needs is missing.",),
    fix="Install nvtop again; `ldd $(command -v nvtop)` names a missing library.",
)
def test_nvtop(facts):
    answer = require_reached(facts["monitoring"]["nvtop"])
    assert answer["rc"] == 0, f"`nvtop --version` exits {answer['rc']}: {answer['out']}; wanted 0"
    facts.note(answer["out"])


@check(
    id="monitoring.dcgm",
    title="DCGM's short diagnostic passes",
    layer="monitoring",
    profiles=ALL,
    needs=("gpu", "real-gpu", "component:dcgm"),
    causes=(
        "The host engine does not run (nvidia-dcgm.service).",
        "The diagnostic found a fault; its output names the test.",
    ),
    after=("gpu.driver-loaded", "gpu.nvml"),
    fix="`systemctl status nvidia-dcgm`; `dcgmi diag -r 1` prints the warning of each test.",
)
def test_dcgm(facts):
    diagnostic = require_reached(facts["monitoring"]["dcgm"])
    assert diagnostic["ran"], "dcgmi is missing, wanted it installed"
    # If one GPU has MIG enabled, DCGM refuses the diagnostic of all GPUs, in a message that names MIG
    # (NVIDIA/DCGM, nvvs/src/NvidiaValidationSuite.cpp, BuildCommonGpusList; issues 31 and 70).
    if not diagnostic["tests"] and re.search(r"\bMIG\b", diagnostic["out"]):
        pytest.skip(f"MIG is on, and DCGM's diagnostic refuses: {' '.join(diagnostic['out'].split())[:200]}")
    bad = [
        f"{t['name']}: {t['status']} {t['warning']}".strip()
        for t in diagnostic["tests"]
        if t["status"].lower() not in FINE
    ]
    assert not bad, f"`dcgmi diag -r 1` exits {diagnostic['rc']}, found {'; '.join(bad)}; wanted pass"
    # After the tests: their messages say more than the exit status.
    assert diagnostic["rc"] == 0, (
        f"`dcgmi diag -r 1` exits {diagnostic['rc']}: {diagnostic['out'].strip()[:300]}"
    )
    assert not diagnostic["problem"], f"`dcgmi diag -r 1 -j`: {diagnostic['problem']}"
    # All tests may have been skipped, for example without the right to run them.
    passed = sum(t["status"].lower() == "pass" for t in diagnostic["tests"])
    assert passed, "`dcgmi diag -r 1` ran no test, wanted at least one passed"
    facts.note(f"{passed} tests passed")
