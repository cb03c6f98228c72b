"""What is shown first of several failures, and that drift hides no sick GPU: the real suite on made-up "
"facts."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from gpukiln.verify import order
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import CheckResult, Verdict
from tests.doubles.nvml_machine import LOST
from tests.support.host_gpu_faults import XID_79
from tests.support.host_machine import KERNEL, Data, machine, simulated_machine

CHECKS = load_checks()


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Verdict]:
    """Has the suite judge facts, as node.doctor does on a node."""

    def run(data: Data, **how: bool) -> Verdict:
        (tmp_path / "facts.json").write_text(json.dumps(data))
        url = f"facts://{quote(str(tmp_path / 'facts.json'), safe='')}"
        return run_suite(Target("n", url), profile="node", out_dir=tmp_path / "out", **how)

    return run


def drift(data: Data) -> None:
    """`apt-get remove nvtop`, and holds that were removed."""
    data["record"]["data"]["packages"]["nvtop"] = "3.0.1-1"
    data["packages"]["holds"] = []


def lost(data: Data) -> None:
    """`cloud.gpus last --scenario lost`."""
    data["nvml"]["gpus"][-1] = {"index": len(data["nvml"]["gpus"]) - 1, "error": LOST}
    data["gpus"].update(smi={"rc": 15, "out": "Unable to determine the device handle: GPU is lost"}, rows=[])


def found(verdict: Verdict) -> list[str]:
    return [check.id for check in verdict.failures]


def test_drift_hides_no_lost_gpu(judge: Callable[..., Verdict]) -> None:
    data = machine(gpus=2)
    drift(data)
    lost(data)
    data["gpus"]["xids"] = [XID_79]
    verdict = judge(data)
    assert found(verdict) == ["gpu.nvml", "gpu.nvidia-smi", "gpu.xid", "versions.holds", "versions.packages"]
    reasons = {check.reason for check in verdict.checks if check.outcome == "not_reached"}
    assert reasons <= {"gpu.nvml failed", "compute.kernel was not reached"}


def full(data: Data) -> None:
    """`fallocate` up to the last block of /."""
    root = next(one for one in data["storage"]["file_systems"] if one["path"] == "/")
    root["free"] = 0


def test_of_three_faults_the_one_that_stops_the_gpu_comes_first(judge: Callable[..., Verdict]) -> None:
    data = machine(gpus=2)
    for fault in (drift, lost, full):
        fault(data)
    assert found(judge(data)) == [
        "gpu.nvml",
        "gpu.nvidia-smi",
        "boot.disk-space",
        "versions.holds",
        "versions.packages",
    ]


def test_no_gpu_on_the_bus_comes_before_what_follows_of_it(judge: Callable[..., Verdict]) -> None:
    data = machine(gpus=0)
    drift(data)
    data["gpus"]["module"] = None

    assert found(judge(data))[0] == "hardware.gpus"


def test_nor_a_lost_one_of_simulated_gpus(judge: Callable[..., Verdict]) -> None:
    data = simulated_machine()
    data["simulated"]["disk"] = []
    drift(data)
    lost(data)
    verdict = judge(data, simulated=True)
    assert found(verdict)[:2] == ["gpu.nvml", "gpu.nvidia-smi"]
    assert set(found(verdict)) >= {"versions.holds", "versions.packages"}


def test_why_the_driver_does_not_load_comes_with_it_and_what_counts_later_comes_later(
    judge: Callable[..., Verdict],
) -> None:
    data = machine()
    drift(data)
    data["gpus"].update(module=None)
    data["loading"]["kernels"][KERNEL]["nvidia"] = {"files": [], "commands": ["/bin/false"], "error": None}
    assert found(judge(data))[:2] == ["gpu.driver-loaded", "modules.loads"]
    data = machine()
    data["loading"]["kernels"][KERNEL]["nvidia"] = {"files": [], "commands": ["/bin/false"], "error": None}
    data["boot"]["state"] = "degraded"
    data["packages"]["installed"]["nvidia-docker2"] = "2.13.0-1"
    data["nvml"]["gpus"][0]["pcie"]["width"] = 4
    assert found(judge(data)) == ["gpu.pcie-link", "boot.state", "modules.loads", "versions.nvidia-docker2"]


def test_a_machine_without_a_fault_has_no_finding(judge: Callable[..., Verdict]) -> None:
    assert found(judge(machine(gpus=2))) == []


def test_every_check_that_is_ordered_is_one() -> None:
    assert {*order.BLOCKING, *order.BREAKS_LATER} <= set(CHECKS)
    assert {*order.DEGRADED_LAYERS, *order.CONSUMER_LAYERS} <= {check.layer for check, _ in CHECKS.values()}


def test_results_of_equal_weight_stay_in_the_order_of_the_layers() -> None:
    checks = [CheckResult(f"hygiene.{name}", name, "hygiene", "failed") for name in ("b", "a", "c")]
    assert order.most_urgent_first(checks) == tuple(checks)
    assert order.most_urgent_first([CheckResult("gpu.nvml", "n", "gpu", "not_reached")]) == ()
