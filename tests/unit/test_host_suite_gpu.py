"""What the checks of the GPUs let pass, and why."""

import pytest

from gpukiln.probe import gather
from gpukiln.verify.facts import Facts
from tests.support.host_evaluate import CHECKS, evaluate_check
from tests.support.host_gpu_faults import XID_79, Data, both, cuda, gpu, later, no_link
from tests.support.host_machine import machine


def test_an_application_s_xid_is_noted_on_a_live_node_and_fails_an_image() -> None:
    data = machine()
    data["gpus"]["xids"] = ["NVRM: Xid (PCI:0000:00:1e): 31, pid=7, name=train, MMU Fault"]
    assert evaluate_check("gpu.xid", data, profile="image")[0] == "failed"
    for profile in ("node", "eks-node"):
        outcome, note = evaluate_check("gpu.xid", data, profile=profile)
        assert outcome == "passed"
        assert "Xid 31 FIFO_MMU_FAULT: GPU page fault" in note
    data["gpus"]["xids"].append(XID_79)
    assert evaluate_check("gpu.xid", data, profile="node")[0] == "failed"


def test_what_healthy_nvswitch_machines_log_is_noted_and_what_nobody_has_judged_comes_first() -> None:
    data = machine()
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 22013, {}, Link 28 Minion Link DLREQ interrupt"
    data["gpus"]["xids"] = [
        switch.format("Non-fatal"),
        switch.partition("{")[0] + "Severity 0 Engine instance 28",
    ]
    for profile in ("image", "node", "eks-node"):
        assert evaluate_check("gpu.xid", data, profile=profile)[0] == "passed"
    data["gpus"]["xids"].append("NVRM: Xid (PCI:0000:00:1e): 9999, new")
    outcome, note = evaluate_check("gpu.xid", data, profile="node")
    assert outcome == "passed"
    assert note.startswith(
        "2 events that do not blame the hardware: NVRM: Xid (PCI:0000:00:1e): 9999, new = Xid 9999: not in"
    )
    data["gpus"]["xids"].append(switch.format("Fatal"))
    assert evaluate_check("gpu.xid", data, profile="node")[0] == "failed"


def test_a_narrow_link_that_a_hypervisor_shows_for_every_gpu_is_noted() -> None:
    data = machine(gpus=2)
    data["boot"]["virtualization"] = "kvm"
    gpu("pcie/width", 8)(data)
    cuda(h2d_gb_s=7.5, d2h_gb_s=7.5)(data)
    assert evaluate_check("gpu.pcie-link", data)[0] == "failed"
    gpu("pcie/width", 8, 1)(data)
    outcome, note = evaluate_check("gpu.pcie-link", data)
    assert outcome == "passed"
    assert "8 of 16 lanes, as kvm shows it" in note


def test_gpus_without_nvlink_need_no_peer_access_and_no_fabric() -> None:
    data = machine(gpus=2)
    for found in data["nvml"]["gpus"]:
        found.update(name="NVIDIA A10G", nvlinks=None, fabric={"state": None, "status": None})
        found["peers"][0]["p2p"] = dict.fromkeys(found["peers"][0]["p2p"], 1)
    assert evaluate_check("multi-gpu.p2p", data) == ("passed", "0 paths ok; others: chipset not supported")
    assert evaluate_check("multi-gpu.nvlink", data)[0] == "passed"
    assert evaluate_check("multi-gpu.fabric", data) == ("passed", "no GPU has a fabric")


def divide(data: Data, *indexes: int) -> None:
    """MIG on, as on Hopper: the NVLinks stay active, and nobody has peers."""
    for found in data["nvml"]["gpus"]:
        divided = found["index"] in indexes
        found["mig"] = {"current": divided, "pending": divided}
        for peer in found["peers"]:
            if divided or peer["index"] in indexes:
                peer["p2p"].update(read=2, write=2)


def test_what_has_mig_on_needs_no_nvlink_and_no_peers_and_it_is_said() -> None:
    data = machine(gpus=2)
    divide(data, 0)
    assert evaluate_check("multi-gpu.p2p", data) == (
        "not_run",
        "MIG is on, and a divided GPU has no peers: GPU 0",
    )
    outcome, note = evaluate_check("multi-gpu.nvlink", data)
    assert outcome == "passed"
    assert note == "12 links on GPU 1 (00000000:00:1F.0); MIG is on, links not checked: GPU 0"
    later("2/errors/recovery", 1)(data)
    assert (
        evaluate_check("multi-gpu.nvlink", data)[0] == "failed"
    )  # its links are active, and their errors count
    both(no_link(0), no_link(1))(data)
    assert evaluate_check("multi-gpu.nvlink", data)[0] == "failed"  # GPU 1 is whole
    divide(data, 0, 1)
    outcome, reason = evaluate_check("multi-gpu.nvlink", data)
    assert (outcome, reason) == ("not_run", "MIG is on, and NVLinks are off then: GPU 0, 1")


def test_what_a_gpu_does_not_tell_is_said_beside_what_the_other_tells() -> None:
    data = machine(gpus=2)
    for path in ("clocks/max_sm", "temperature/slowdown", "throttle/mask", "pcie/width", "peers/0/ancestor"):
        gpu(path, None)(data)
    for check_id, words in {
        "gpu.clocks": "GPU 0 (00000000:00:1E.0): clock and temperature not reported",
        "gpu.throttle": "GPU 0 (00000000:00:1E.0): not reported",
        "gpu.pcie-link": "GPU 0 (00000000:00:1E.0): not reported",
        "multi-gpu.topology": "1 x several switches, 1 directions not reported",
    }.items():
        outcome, note = evaluate_check(check_id, data)
        assert outcome == "passed"
        assert words in note


def test_a_ready_state_that_is_not_told_is_no_fault_and_no_pass() -> None:
    data = machine()
    assert evaluate_check("gpu.confidential", data) == ("passed", "off")
    data["nvml"]["confidential"] = {"on": True, "ready": None}
    assert evaluate_check("gpu.confidential", data)[0] == "not_run"
    data["nvml"]["confidential"] = {"on": True, "ready": True}
    assert evaluate_check("gpu.confidential", data) == ("passed", "on, and ready")


def test_processes_that_are_not_told_are_no_idle_gpu() -> None:
    data = machine()
    gpu("processes", None)(data)
    assert evaluate_check("gpu.idle", data) == ("not_run", "no GPU reports which processes use it")


def test_t_limit_counts_where_there_is_one_and_its_own_limit_is_no_fault() -> None:
    data = machine()
    gpu("temperature/slowdown", 20)(data)  # 31 degrees are above it
    gpu("temperature/margin", -2)(data)
    assert evaluate_check("gpu.clocks", data)[0] == "failed"
    gpu("temperature/tlimit/slowdown", -2)(data)
    assert evaluate_check("gpu.clocks", data) == ("passed", "at most 31 degrees")


def test_errors_that_an_nvlink_has_come_to_are_noted() -> None:
    data = machine(gpus=2)
    for number in range(5):
        gpu(f"nvlinks/{number}/errors/replay", 40, 1)(data)
        later(f"{number}/errors/replay", 40, 1)(data)
    outcome, note = evaluate_check("multi-gpu.nvlink", data)
    assert outcome == "passed"
    assert note.endswith(
        "errors since the driver was loaded: 40 (GPU 1 link 0 replay), 40 (GPU 1 link 1 replay), "
        "40 (GPU 1 link 2 replay), 2 more counters above 0"
    )


def test_dcgm_s_diagnostic_is_not_run_where_it_refuses_mig_and_only_there() -> None:
    data = machine()
    words = "Cannot run diagnostic: CUDA does not support enumerating GPUs with MIG mode enabled, yet GPU 0"
    data["monitoring"]["dcgm"].update(rc=223, out=words, tests=[], problem="its output is no JSON: line 1")
    assert evaluate_check("monitoring.dcgm", data)[0] == "not_run"
    data["monitoring"]["dcgm"]["tests"] = [
        {"name": "memory", "status": "Fail", "warning": "MIG, page retired"}
    ]
    assert evaluate_check("monitoring.dcgm", data)[0] == "failed"


def test_one_gpu_is_no_failure_of_what_needs_several() -> None:
    assert evaluate_check("multi-gpu.p2p", machine()) == ("not_run", "one GPU")
    assert evaluate_check("multi-gpu.p2p", machine(), expect_gpus=8)[0] == "failed"


def test_what_a_check_comes_after_is_a_check_that_comes_before() -> None:
    order = list(CHECKS)
    for check_id, (check, _function) in CHECKS.items():
        for before in check.after:
            assert before in order, f"{check_id} is after {before}, which is no check"
            assert order.index(before) < order.index(check_id)
            assert set(check.profiles) & set(CHECKS[before][0].profiles)


def test_every_check_names_likely_causes() -> None:
    assert [i for i, (check, _function) in CHECKS.items() if not check.causes] == []


def test_no_check_of_the_gpus_is_reached_before_nvml_works() -> None:
    """Only what finds out whether the driver and NVML work, and the kernel's log, is judged without them."""
    layers = ("gpu", "multi-gpu")
    found = {i: check for i, (check, _function) in CHECKS.items() if check.layer in layers}
    first = {i for i, check in found.items() if "gpu.nvml" not in check.after}
    assert first == {"gpu.driver-loaded", "gpu.nvidia-smi", "gpu.nvml", "gpu.xid"}


@pytest.mark.parametrize("check_id", ["compute.kernel", "compute.bandwidth", "multi-gpu.all-reduce"])
def test_a_gpu_in_use_is_no_fault_and_no_pass(check_id: str) -> None:
    data = machine(gpus=2)
    cuda(ok=False, busy=True, error="cuMemAlloc_v2: error 2", link=None)(data)
    data["cuda"]["all_reduce"] = {"tried": False, "reason": "cuMemAlloc_v2: error 2"}
    outcome, reason = evaluate_check(check_id, data)
    assert (outcome, "in use: " in reason) == ("not_run", True)


def test_a_fault_beside_a_gpu_in_use_is_found() -> None:
    data = machine(gpus=2)
    cuda(ok=False, busy=True, error="cuMemAlloc_v2: error 2")(data)
    data["cuda"]["gpus"][1].update(ok=False, error="error 214")
    assert evaluate_check("compute.kernel", data) == ("failed", "0000:00:1f.0: error 214")


def test_a_gpu_hidden_by_mig_is_no_fault_and_no_pass() -> None:
    data = machine(gpus=2)
    data["gpus"]["pci"][1] = {"address": "0000:00:1f.0", "device": "0x20b0"}
    del data["cuda"]["gpus"][1]
    assert evaluate_check("compute.kernel", data) == (
        "failed",
        "CUDA does not see 0000:00:1f.0; wanted 2 GPUs",
    )
    data["cuda"]["mig"] = True
    assert evaluate_check("compute.kernel", data)[0] == "not_run"
    data["cuda"]["all_reduce"] = {"tried": False, "reason": "one GPU"}
    assert evaluate_check("multi-gpu.all-reduce", data)[0] == "not_run"


def test_a_link_that_is_not_known_leaves_its_rate_unjudged() -> None:
    data = machine()
    cuda(link={"speed": "Unknown", "width": "0", "gb_s": None})(data)
    outcome, reason = evaluate_check("compute.bandwidth", data)
    assert outcome == "not_run"
    assert "12.3 GB/s to the GPU, 13.1 from it, link Unknown x0" in reason


def test_a_divided_gpu_and_a_slow_link_are_right_where_the_node_says_so() -> None:
    data = machine()
    data["nvml"]["gpus"][0]["mig"] = {"current": True, "pending": True}
    cuda(h2d_gb_s=7.5)(data)
    assert [evaluate_check(check, data)[0] for check in ("gpu.mig", "compute.bandwidth")] == [
        "failed",
        "failed",
    ]
    for mig in ("enabled", "any", None):
        data["expected"] = {"mig": mig, "bandwidth_share": 0.4}
        assert evaluate_check("gpu.mig", data) == ("passed", "GPU 0 (00000000:00:1E.0): MIG is on")
        assert evaluate_check("compute.bandwidth", data)[0] == "passed"


def test_a_container_is_asked_for_all_that_the_checks_of_its_gpus_read() -> None:
    shared = [(c, f) for c, f in CHECKS.values() if {"runner", "node"} <= set(c.profiles)]
    assert {check.id for check, _ in shared} >= {"compute.kernel", "compute.bandwidth"}
    for _, function in shared:
        facts = Facts(machine(gpus=2))
        function(facts)
        assert set(facts.take_read()) <= {*gather.RUNNER_SECTIONS, "hung"}


def test_one_gpu_has_no_other_to_work_with() -> None:
    assert evaluate_check("multi-gpu.all-reduce", machine()) == ("not_run", "one GPU")
