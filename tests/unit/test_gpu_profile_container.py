"""A healthy container with one of eight GPUs is not called sick, and a sick one is."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gpu_profile_container import ADDRESS, one_of_eight
from tests.support.host_evaluate import CHECKS, evaluate_check
from tests.support.host_gpu_faults import cuda

Data = dict[str, Any]
LAYERS = ("boot", "runtime", "gpu", "compute", "container", "multi-gpu", "monitoring")
RUNNER = [i for i, (check, _) in CHECKS.items() if "runner" in check.profiles]
NODE = [i for i, (check, _) in CHECKS.items() if "node" in check.profiles and check.layer in LAYERS]


def outcome(check_id: str, data: Data, profile: str) -> tuple[str, str]:
    if profile == "node":  # which has no record of ours
        data["record"] = {"data": None, "error": "/etc/gpukiln/image.json is missing"}
    return evaluate_check(check_id, data, profile=profile, expect_gpus=1)


@pytest.mark.parametrize(("profile", "checks"), [("runner", RUNNER), ("node", NODE)])
def test_nothing_is_found_on_a_healthy_one(profile: str, checks: list[str]) -> None:
    found = {i: outcome(i, one_of_eight(), profile) for i in checks}
    assert {i: said for i, said in found.items() if said[0] not in ("passed", "not_run")} == {}
    passed = {i for i, said in found.items() if said[0] == "passed"}
    assert passed >= {"compute.kernel", "compute.bandwidth"}
    if profile == "node":
        assert passed >= {i for i in NODE if i.startswith("gpu.")} - {"gpu.xid"}
        assert found["gpu.xid"][1].startswith("this container can't read all of the kernel's log: ")


def gpu(key: str, value: Any) -> Callable[[Data], None]:
    return lambda data: data["nvml"]["gpus"][0].update({key: value})


@pytest.mark.parametrize(
    ("check_id", "profile", "fault", "words"),
    [
        ("compute.kernel", "runner", cuda(ok=False, error="error 214"), f"{ADDRESS}: error 214"),
        ("compute.kernel", "node", lambda d: d["cuda"].update(gpus=[]), f"CUDA does not see {ADDRESS}"),
        ("compute.bandwidth", "node", cuda(h2d_gb_s=13.2), "13.2 GB/s to the GPU"),
        ("gpu.nvml", "node", gpu("bus_id", "00000000:52:00.0"), f"the PCI bus has {ADDRESS}"),
        ("gpu.persistence", "node", gpu("persistence", False), "persistence mode is off"),
        (
            "gpu.xid",
            "node",
            lambda d: d["gpus"]["xids"].append("NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus."),
            "Xid 79",
        ),
    ],
)
def test_a_fault_is_found(check_id: str, profile: str, fault: Callable[[Data], None], words: str) -> None:
    data = one_of_eight()
    fault(data)
    said = outcome(check_id, data, profile)
    assert said[0] == "failed", said
    assert words in said[1]
