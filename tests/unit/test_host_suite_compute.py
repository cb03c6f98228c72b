"""Healthy machines whose copies are slow, or faster than the link that is shown; and what is found there."""

from typing import Any

import pytest

from tests.doubles.nvml_machine import UNKNOWN, Data
from tests.support.host_evaluate import evaluate_check
from tests.support.host_gpu_faults import cuda, gpu, put
from tests.support.host_machine import machine

KERNEL, BANDWIDTH = "compute.kernel", "compute.bandwidth"
SLOW = {"h2d_gb_s": 3.0, "d2h_gb_s": 3.1}  # of 15.75


def at_work(data: Data) -> None:
    """Another one's process on the other GPU of the machine."""
    process = {"pid": 7, "name": "train", "kind": "compute", "memory": 900}
    gpu("processes", [process], 1)(data)


def secret(**state: Any) -> Data:
    data = machine(gpus=2)
    data["nvml"]["confidential"] = state
    return data


def test_a_bounce_buffer_is_slower_than_the_link() -> None:
    data = secret(on=True, ready=True)
    assert evaluate_check(BANDWIDTH, data)[0] == "passed"  # and where it is not, there is nothing to say
    cuda(**SLOW)(data)
    outcome, reason = evaluate_check(BANDWIDTH, data)
    assert outcome == "not_run"
    assert "3.0 GB/s to the GPU" in reason
    assert "copies pass through a bounce buffer" in reason


@pytest.mark.parametrize(
    "state", [{"on": False, "ready": None}, {"on": None, "ready": None}, {"on": UNKNOWN, "ready": UNKNOWN}]
)
def test_without_confidential_computing_a_slow_link_is_found(state: Data) -> None:
    data = secret(**state)
    cuda(**SLOW)(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "failed"


@pytest.mark.parametrize(
    ("on", "ready", "code", "said"),
    [
        (True, False, 802, "its ready state is unset: `nvidia-smi conf-compute -grs`"),
        (True, None, 802, "its ready state may be unset, NVML does not report it"),
        (True, True, 802, ""),
        (False, None, 802, ""),
        (None, None, 802, ""),
        (True, False, 999, ""),
    ],
)
def test_802_names_a_ready_state_that_is_unset(
    on: bool | None, ready: bool | None, code: int, said: str
) -> None:
    data = secret(on=on, ready=ready)
    data["cuda"]["error"] = f"cuInit: error {code}"
    outcome, reason = evaluate_check(KERNEL, data)
    assert outcome == "failed"
    assert said in reason
    assert ("ready state" in reason) == bool(said)


def test_802_is_said_where_nvml_says_nothing() -> None:
    """As in a container without NVML."""
    data = machine()
    data["cuda"]["error"], data["nvml"] = "cuInit: error 802", {"_error": "no NVML"}
    assert evaluate_check(KERNEL, data) == ("failed", "CUDA can't be used: cuInit: error 802")


def test_a_machine_where_others_compute_is_busy() -> None:
    data = machine(gpus=2)
    cuda(**SLOW)(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "failed"
    at_work(data)
    outcome, reason = evaluate_check(BANDWIDTH, data)
    assert outcome == "not_run"
    assert "the machine is busy: train (7) on 0000:00:1f.0" in reason


def test_an_error_of_nvml_is_no_process_of_another() -> None:
    data = machine(gpus=2)
    cuda(**SLOW)(data)
    gpu("processes", {"_error": "Unknown Error", "code": 999}, 1)(data)
    gpu("processes", None)(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "failed"


def test_a_busy_machine_that_is_fast_enough_passes() -> None:
    data = machine(gpus=2)
    at_work(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "passed"


def test_a_part_of_a_gpu_is_not_judged_by_the_whole_link() -> None:
    data = machine()
    cuda(name="NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", **SLOW)(data)
    outcome, reason = evaluate_check(BANDWIDTH, data)
    assert (outcome, "copy engines" in reason) == ("not_run", True)


def test_two_that_show_different_lanes_are_not_believed() -> None:
    """The kernel says 16; the virtual PCIe is the hypervisor's."""
    data = machine()
    cuda(**SLOW)(data)
    gpu("pcie/width", 8)(data)
    outcome, reason = evaluate_check(BANDWIDTH, data)
    assert outcome == "not_run"
    assert "NVML reports a link of 8 lanes, and the kernel 16" in reason


def test_copies_prove_lanes_that_are_not_shown() -> None:
    """One of two GPUs is shown with 8 lanes of 8 GT/s, 7.9 GB/s."""
    data = machine(gpus=2)
    data["boot"]["virtualization"] = "kvm"
    gpu("pcie/width", 8)(data)
    for rate, outcome in ((12.3, "passed"), (7.5, "failed")):
        cuda(h2d_gb_s=rate, d2h_gb_s=rate)(data)
        assert evaluate_check("gpu.pcie-link", data)[0] == outcome
    cuda(h2d_gb_s=12.3)(data)
    data["boot"]["virtualization"] = "none"
    assert evaluate_check("gpu.pcie-link", data)[0] == "failed"
    data["boot"]["virtualization"], data["cuda"] = "kvm", {"_error": "no CUDA"}
    assert evaluate_check("gpu.pcie-link", data)[0] == "failed"


def test_a_link_that_is_not_believed_is_judged_by_what_it_could_do_at_most() -> None:
    data = machine()
    cuda(link={"speed": "Unknown", "width": "0", "gb_s": None, "max_gb_s": 15.75, "max_width": "16"})(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "passed"
    cuda(**SLOW)(data)
    assert evaluate_check(BANDWIDTH, data)[0] == "not_run"


def test_a_link_that_copies_refute_is_said() -> None:
    data = machine()
    put(
        "cuda/gpus",
        [{**data["cuda"]["gpus"][0], "link": {"speed": "2.5 GT/s PCIe", "width": "16", "gb_s": 4.0}}],
    )(data)
    outcome, note = evaluate_check(BANDWIDTH, data)
    assert (outcome, "but copies are faster" in note) == ("passed", True)
