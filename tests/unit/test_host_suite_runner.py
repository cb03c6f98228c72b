"""What holds for all checks of a container."""

from tests.support.host_evaluate import evaluate_check
from tests.support.host_runner_faults import RUNNER_FAULTS, container


def test_a_container_that_could_not_be_gathered_never_passes() -> None:
    data = container()
    data["runner"] = {"_error": "RuntimeError: tool is broken"}
    assert {evaluate_check(i, data)[0] for i in RUNNER_FAULTS} == {"failed"}


def test_what_was_left_out_of_a_container_is_not_run_and_buildah_starts_no_process() -> None:
    data = container()
    data["record"]["data"]["components"]["cuda_nvcc"] = {"status": "left_out", "reason": "no source"}
    data["runner"]["process_1"] = "/sbin/init"
    assert evaluate_check("compute.runner-nvcc", data) == ("not_run", "cuda_nvcc left out: no source")
    assert evaluate_check("runtime.runner-init", data)[0] == "not_run"
