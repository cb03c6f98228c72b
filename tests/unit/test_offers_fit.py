"""What does not fit is refused before anything is launched, by a rule that names its source."""

from datetime import date

import pytest

from gpukiln.catalog.workloads import workload, workloads
from gpukiln.errors import UsageError
from gpukiln.images.subject import Subject
from gpukiln.offers.fit import fit

TODAY = date(2026, 11, 23)


def image(
    driver: str = "535.309.01", modules: str = "proprietary", types: tuple[str, ...] = ("g4dn.xlarge",)
) -> Subject:
    return Subject(
        image_id="ami-1",
        build_id="b",
        recipe="eks-gpu",
        profile="image",
        instance_types=types,
        base="eks-ubuntu-22.04",
        ssh_user="ubuntu",
        architecture="x86_64",
        driver=driver,
        modules=modules,
        cuda="",
    )


NEW = image("580.178.04", "open")
CASES = [
    ("g4dn.xlarge", image(), None, set()),
    ("g7e.2xlarge", image(), None, {"gpu-too-new"}),
    ("g5g.xlarge", image(), None, {"architecture"}),
    ("p4d.24xlarge", image(), None, {"fabric-manager"}),
    ("p4d.24xlarge", image(types=("p4d.24xlarge",)), None, set()),
    ("g6f.large", image(), None, {"grid-only"}),
    ("g6.xlarge", NEW, None, set()),
    ("p3dn.24xlarge", NEW, None, {"modules-proprietary"}),
    ("g5.xlarge", image(), "ollama", {"workload-driver"}),
    ("g5.xlarge", image(), "ollama-0.24", set()),
    ("g5.xlarge", NEW, "ollama", set()),
    ("p3dn.24xlarge", image(), "vllm", {"workload-capability"}),
    ("p3dn.24xlarge", image(), "vllm-0.7", set()),
    ("g5.xlarge", image(), "vllm", set()),  # CUDA 12.9 on 535: with limits, which is a warning
    ("g5.xlarge", image(), "pytorch-cu130", {"cuda-driver"}),
    ("g5.xlarge", NEW, "pytorch-cu130", set()),
    ("g7e.2xlarge", None, "pytorch-cu126", {"workload-build"}),
    ("g7e.2xlarge", None, "pytorch-cu128", set()),
    ("p6-b300.48xlarge", None, "pytorch-cu130", set()),  # 10.0's code runs on 10.3
    ("g6.xlarge", None, "pytorch-cu121", set()),  # 8.6's code runs on 8.9
    ("g5g.xlarge", None, "pytorch-cu121", {"workload-architecture"}),
    ("g4ad.xlarge", None, "vllm", {"not-nvidia"}),
    ("p3.2xlarge", None, "vllm-0.7", {"retired"}),
    ("p2.xlarge", None, "tensorflow", {"retired", "workload-capability"}),
    ("g6f.large", None, "ollama", set()),  # nobody knows the driver yet
]


@pytest.mark.parametrize(("machine", "subject", "needs", "errors"), CASES)
def test_each_pair_is_judged_by_its_rule(
    machine: str, subject: Subject | None, needs: str | None, errors: set[str]
) -> None:
    found = fit(machine, image=subject, workload=workload(needs) if needs else None, today=TODAY)
    assert {one.rule for one in found if one.level == "error"} == errors
    assert all(one.source and one.message for one in found)
    assert all(one.hint for one in found if one.level == "error")


def test_a_driver_that_is_at_its_end_is_a_warning() -> None:
    found = fit("g4dn.xlarge", image=image(), workload=None, today=TODAY)
    assert {one.rule for one in found} >= {"driver-end-of-life"}


def test_an_unknown_driver_is_said_and_not_guessed() -> None:
    [told] = fit("g5.xlarge", image=None, workload=workload("ollama"), today=TODAY)
    assert (told.level, told.rule) == ("warning", "workload-driver")


def test_a_container_of_any_cuda_version_is_a_workload() -> None:
    found = fit("g5.xlarge", image=image(), workload=workload("cuda-13.0"), today=TODAY)
    assert "cuda-driver" in {one.rule for one in found}
    with pytest.raises(UsageError, match=r"unknown CUDA version '12\.99'"):
        workload("cuda-12.99")
    with pytest.raises(UsageError, match="unknown workload 'olama'"):
        workload("olama")


def test_every_workload_has_a_source_and_a_driver_to_be_judged_by() -> None:
    for name, one in workloads().items():
        assert one.source, name
        assert one.cuda or one.least_driver, name
        assert one.least_cc or one.built_for, name
        assert one.cuda is None or fit("g5.xlarge", image=NEW, workload=one, today=TODAY) is not None
