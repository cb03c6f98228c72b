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
    ("p3dn.24xlarge", image(), "vllm-cu129", {"workload-capability"}),
    ("p3dn.24xlarge", image(), "vllm-0.7", set()),
    ("g5.xlarge", image(), "vllm", {"cuda-driver"}),  # its default is CUDA 13.0 since 0.20
    ("g5.xlarge", NEW, "vllm", set()),
    ("g5.xlarge", image(), "vllm-cu129", set()),  # on 535 with limits, which is a warning
    ("g5.xlarge", image(), "pytorch-cu130", {"cuda-driver"}),
    ("g5.xlarge", NEW, "pytorch-cu130", set()),
    ("g7e.2xlarge", None, "pytorch-cu126", {"workload-build"}),
    ("g7e.2xlarge", None, "pytorch-cu128", set()),
    ("p6-b300.48xlarge", None, "pytorch-cu130", set()),  # 10.0's code runs on 10.3
    ("g6.xlarge", None, "pytorch-cu121", set()),  # 8.6's code runs on 8.9
    ("g5g.xlarge", None, "pytorch-cu121", {"workload-architecture"}),
    ("g5g.xlarge", None, "pytorch-cu126", {"workload-build"}),  # 7.5 is in the wheels of x86_64 alone
    ("g5g.xlarge", None, "pytorch-cu132", {"workload-build"}),
    ("g5g.xlarge", None, "vllm", {"workload-build"}),
    ("g5g.xlarge", None, "ollama", set()),
    ("g5g.xlarge", None, "tgi", {"workload-architecture"}),
    ("g4dn.xlarge", None, "pytorch-cu126", set()),
    ("g7e.2xlarge", None, "tensorflow", {"workload-build"}),  # what it compiles from PTX does not run there
    ("g4dn.xlarge", None, "tensorflow", set()),
    ("g5.xlarge", image(), "triton-25.08", set()),  # its package for older drivers
    ("p3dn.24xlarge", image(), "triton-25.08", {"workload-capability"}),
    ("g4ad.xlarge", None, "vllm", {"not-nvidia"}),
    ("p3.2xlarge", None, "vllm-0.7", {"retired"}),
    ("p2.xlarge", None, "tensorflow-2.17", {"retired", "workload-capability"}),
    ("g6f.large", None, "ollama", set()),  # nobody knows the driver yet
]


@pytest.mark.parametrize(("machine", "subject", "needs", "errors"), CASES)
def test_each_pair_is_judged_by_its_rule(
    machine: str, subject: Subject | None, needs: str | None, errors: set[str]
) -> None:
    found = fit(machine, image=subject, workload=workload(needs) if needs else None, today=TODAY)
    assert {one.id for one in found if one.severity == "error"} == errors
    assert all(one.source and one.message for one in found)
    assert all(one.remedy for one in found if one.severity == "error")


def test_a_fraction_of_a_gpu_is_told_where_no_image_says_whose_driver_it_has() -> None:
    found = fit("g6f.large", image=None, workload=workload("cuda-12.4"), today=TODAY)
    assert ("warning", "grid-only") in {(one.severity, one.id) for one in found}


@pytest.mark.parametrize("subject", [None, image()])
def test_a_finding_names_the_machine_that_it_is_about(subject: Subject | None) -> None:
    found = fit("p3dn.24xlarge", image=subject, workload=workload("vllm-cu129"), today=TODAY)
    objects = {one.id: one.object for one in found}
    assert (objects["previous-generation"], objects["workload-capability"]) == ("p3dn.24xlarge",) * 2


def test_a_driver_that_is_at_its_end_is_a_warning() -> None:
    found = fit("g4dn.xlarge", image=image(), workload=None, today=TODAY)
    assert {one.id for one in found} >= {"driver-end-of-life"}


def test_an_unknown_driver_is_said_and_not_guessed() -> None:
    [told] = fit("g5.xlarge", image=None, workload=workload("ollama"), today=TODAY)
    assert (told.severity, told.id) == ("warning", "workload-driver")
    [told] = fit("g5.xlarge", image=None, workload=workload("pytorch-cu130"), today=TODAY)
    assert (told.severity, told.id) == ("warning", "workload-driver")
    assert "needs driver 580.65.06 or later" in told.message  # of CUDA 13, where it says nothing itself
    [told] = fit("g5.xlarge", image=None, workload=workload("jax-cuda12"), today=TODAY)
    assert "525.60.13" in told.message


def test_a_cuda_that_does_not_know_the_gpu_is_told_without_an_image_too() -> None:
    found = fit("g7e.2xlarge", image=None, workload=workload("cuda-12.4"), today=TODAY)
    assert {(one.severity, one.id) for one in found} == {
        ("warning", "cuda-gpu"),
        ("warning", "workload-driver"),
    }


def test_a_container_of_any_cuda_version_is_a_workload() -> None:
    found = fit("g5.xlarge", image=image(), workload=workload("cuda-13.0"), today=TODAY)
    assert "cuda-driver" in {one.id for one in found}
    with pytest.raises(UsageError, match=r"unknown CUDA version '12\.99'"):
        workload("cuda-12.99")
    with pytest.raises(UsageError, match="unknown workload 'olama'"):
        workload("olama")


def test_every_workload_has_a_source_and_a_driver_to_be_judged_by() -> None:
    for name, one in workloads().items():
        assert one.source, name
        assert one.cuda or one.least_driver, name
        assert one.least_cc or one.built_for or one.note, name
        assert not one.built_for_arm64 or "arm64" in one.arch, name
        assert one.cuda is None or fit("g5.xlarge", image=NEW, workload=one, today=TODAY) is not None
