"""Each rule, shown failing and passing."""

from datetime import date

import pytest

from gpukiln.catalog import compat, cuda
from gpukiln.catalog.bases import base
from gpukiln.findings import Finding

TODAY = date(2026, 11, 21)


def rules(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.id) for finding in findings]


def test_a_finding_that_is_found_twice_is_one() -> None:
    [twice] = {Finding("gpu-lost", "error", "it is gone", evidence={"xid": xid}) for xid in (79, 79)}
    assert twice.evidence == {"xid": 79}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("g4dn.xlarge", []),
        ("g5.48xlarge", []),
        ("g4ad.xlarge", [("error", "not-nvidia")]),
        ("dl1.24xlarge", [("error", "not-nvidia")]),
        ("g6f.xlarge", [("error", "grid-only")]),
        ("gr6f.4xlarge", [("error", "grid-only")]),
        ("gr6.4xlarge", []),
        ("p3.2xlarge", [("error", "retired")]),
        ("p2.xlarge", [("error", "retired")]),
        ("p3dn.24xlarge", [("warning", "previous-generation")]),
        ("g5g.xlarge", [("error", "architecture")]),
    ],
)
def test_machine(name: str, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_instance_type(name, architecture="x86_64")) == expected


def test_arm_machine_fits_an_arm_image() -> None:
    assert not compat.check_instance_type("g5g.xlarge", architecture="arm64")


def test_a_retired_machine_names_its_alternatives() -> None:
    (finding,) = compat.check_instance_type("p3.2xlarge", architecture="x86_64")
    assert "g5.2xlarge" in finding.remedy


@pytest.mark.parametrize(
    ("driver", "modules", "name", "expected"),
    [
        ("535.309.01", "proprietary", "g4dn.xlarge", []),
        ("535.309.01", "proprietary", "p5.48xlarge", []),
        ("535.309.01", "proprietary", "p5en.48xlarge", [("error", "gpu-too-new")]),
        ("550.163.01", "proprietary", "p5en.48xlarge", []),
        ("535.309.01", "proprietary", "p6-b200.48xlarge", [("error", "gpu-too-new")]),
        ("535.309.01", "proprietary", "g7e.2xlarge", [("error", "gpu-too-new")]),
        ("580.178.04", "open", "p6-b200.48xlarge", []),
        ("580.178.04", "proprietary", "p6-b200.48xlarge", [("error", "modules-open")]),
        ("535.309.01", "proprietary", "p2.xlarge", [("error", "gpu-too-old")]),
        ("470.256.02", "proprietary", "p2.xlarge", []),
        ("595.91.07", "proprietary", "p3dn.24xlarge", [("error", "gpu-too-old")]),
        ("580.178.04", "proprietary", "p3dn.24xlarge", []),
        ("535.309.01", "open", "g4dn.xlarge", [("error", "modules-proprietary")]),
        ("580.178.04", "open", "g4dn.xlarge", []),
        ("535.309.01", "open", "g5.xlarge", []),
        ("535.86.09", "proprietary", "g6e.xlarge", [("error", "gpu-too-new")]),
        ("535.309.01", "proprietary", "g4ad.xlarge", []),
    ],
)
def test_driver_and_gpu(driver: str, modules: str, name: str, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_driver_gpu(driver, modules, name)) == expected


def test_a_new_gpu_names_the_driver_that_knows_it_and_the_way() -> None:
    (finding,) = compat.check_driver_gpu("535.309.01", "proprietary", "p5en.48xlarge")
    assert "550.90.07" in finding.message
    assert "nvidia_driver.branch=580" in finding.remedy


@pytest.mark.parametrize(
    ("driver", "modules", "today", "expected"),
    [
        ("535.309.01", "proprietary", TODAY, [("warning", "driver-end-of-life")]),
        ("535.309.01", "proprietary", date(2026, 3, 1), []),
        ("535.309.01", "proprietary", date(2026, 4, 15), [("warning", "driver-end-of-life")]),
        ("580.178.04", "proprietary", TODAY, []),
        ("580.65.06", "proprietary", TODAY, [("warning", "driver-flaws")] * 2),
        ("470.256.02", "open", date(2024, 1, 1), [("error", "driver-modules")]),
        ("620.10", "proprietary", TODAY, [("error", "driver-modules")]),
        ("620.10", "open", TODAY, []),
    ],
)
def test_driver(driver: str, modules: str, today: date, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_driver(driver, modules, today=today)) == expected


def test_end_of_life_says_the_day_and_the_way_forward() -> None:
    (finding,) = compat.check_driver("535.309.01", "proprietary", today=TODAY)
    assert "2026-06-01" in finding.message
    assert "580" in finding.remedy
    assert "2028-06-30" in finding.remedy


@pytest.mark.parametrize(
    ("cuda", "driver", "expected"),
    [
        ("12.1", "535.309.01", []),
        ("12.1.1", "580.178.04", []),
        ("12.8", "535.309.01", [("warning", "cuda-minor-version")]),
        ("13.0", "535.309.01", [("error", "cuda-driver")]),
        ("13.0", "580.178.04", []),
        ("12.1", "520.61.05", [("error", "cuda-driver")]),
        ("12.1", "525.147.05", [("warning", "cuda-minor-version")]),
    ],
)
def test_cuda_and_driver(cuda: str, driver: str, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_cuda(cuda, driver)) == expected


@pytest.mark.parametrize(
    ("version", "driver", "gpus", "way", "package"),
    [
        ("12.1", "530.30.02", (), "native", None),
        ("12.1.1", "535.309.01", ("t4",), "native", None),
        ("11.8", "580.178.04", (), "native", None),
        ("12.6.3", "560.28.03", (), "native", None),  # the driver of 12.6.0
        ("12.1", "525.60.13", (), "minor-version", "cuda-compat-12-1"),
        ("12.1", "525.60.11", ("t4", "v100"), "forward-compat", "cuda-compat-12-1"),
        ("13.0", "535.309.01", ("t4",), "forward-compat", "cuda-compat-13-0"),
        ("13.0", "535.309.01", ("t4", "rtx-pro-6000-workstation"), "no", None),
        ("13.0", "535.309.01", (), "forward-compat", "cuda-compat-13-0"),
    ],
)
def test_the_way_a_driver_runs_cuda(
    version: str, driver: str, gpus: tuple[str, ...], way: str, package: str | None
) -> None:
    found = cuda.support(version, driver, gpus)
    assert (found.way, found.package) == (way, package)
    assert bool(found.limits) == (way != "native")


def test_a_plan_is_refused_though_a_package_in_the_container_would_help() -> None:
    (finding,) = compat.check_cuda("13.0", "535.309.01", ["g4dn.xlarge"])
    assert finding.severity == "error"
    assert "branch 580" in finding.remedy
    assert "cuda-compat-13-0" in finding.remedy


@pytest.mark.parametrize(
    ("cuda", "name", "expected"),
    [
        ("12.1", "g5.xlarge", []),
        ("12.1", "g7e.2xlarge", [("warning", "cuda-gpu")]),
        ("12.8", "g7e.2xlarge", []),
        ("13.0", "p3dn.24xlarge", [("warning", "cuda-gpu")]),
        ("12.1", "g4ad.xlarge", []),
    ],
)
def test_cuda_and_gpu(cuda: str, name: str, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_cuda_gpu(cuda, name)) == expected


@pytest.mark.parametrize(
    ("version", "expected"), [("1.19.1", []), ("1.20.0", []), ("1.19.0", [("error", "toolkit-flaws")])]
)
def test_container_toolkit(version: str, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_container_toolkit(version)) == expected


def test_an_old_toolkit_names_every_flaw() -> None:
    (finding,) = compat.check_container_toolkit("1.16.1")
    assert "CVE-2024-0132" in finding.message
    assert "CVE-2025-23266" in finding.message
    assert "1.19.1" in finding.remedy


@pytest.mark.parametrize(
    ("version", "today", "expected"),
    [
        ("1.35", TODAY, []),
        ("1.34", TODAY, [("warning", "kubernetes-ends-soon")]),
        ("1.33", TODAY, [("warning", "kubernetes-extended")]),
        ("1.30", TODAY, [("error", "kubernetes-ended")]),
        ("1.99", TODAY, [("warning", "kubernetes-unknown")]),
        ("1.34", date(2026, 9, 1), []),
    ],
)
def test_kubernetes(version: str, today: date, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_kubernetes(version, today=today)) == expected


@pytest.mark.parametrize(
    ("name", "branch", "expected"),
    [
        ("debian-12", 535, []),
        ("eks-ubuntu-22.04", 535, []),
        ("eks-al2023-nvidia", 535, [("error", "base-driver")]),
        ("eks-al2023-nvidia", 580, []),
        ("eks-al2023", 535, []),
        ("dlami-ubuntu-22.04", 535, [("error", "base-driver")]),
        ("dlami-ubuntu-22.04", 580, []),
    ],
)
def test_base(name: str, branch: int, expected: list[tuple[str, str]]) -> None:
    assert rules(compat.check_base(name, base(name), branch=branch, architecture="x86_64")) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [("eks-al2023", "has DKMS as an rpm"), ("eks-al2023-nvidia", "brings its own driver"), ("debian-12", "")],
)
def test_build_tools_can_not_be_removed_everywhere(name: str, message: str) -> None:
    found = compat.check_base(name, base(name), branch=580, architecture="x86_64", keep_build_tools=False)
    assert [message in one.message for one in found] == ([True] if message else [])
    assert rules(found) == ([("error", "base-build-tools")] if message else [])


def test_base_of_another_architecture() -> None:
    found = compat.check_base("debian-12", base("debian-12"), branch=535, architecture="riscv64")
    assert rules(found) == [("error", "base-architecture")]


@pytest.mark.parametrize(
    ("driver", "names", "modules"),
    [
        ("535.309.01", ["g4dn.xlarge", "g5.xlarge"], "proprietary"),
        ("580.178.04", ["g4dn.xlarge", "g5.xlarge"], "open"),
        ("580.178.04", ["g4dn.xlarge", "g5g.xlarge"], "proprietary"),
        ("580.178.04", ["p6-b200.48xlarge"], "open"),
    ],
)
def test_modules_are_chosen_for_the_machines(driver: str, names: list[str], modules: str) -> None:
    assert compat.choose_modules(driver, names) == modules


def test_nvswitch_needs_a_fabric_manager() -> None:
    (found,) = compat.check_fabric_manager("debian-12", base("debian-12"), ["g5.xlarge", "p5.48xlarge"])
    assert (found.severity, found.id) == ("error", "fabric-manager")
    assert found.message.startswith("p5.48xlarge has NVSwitch")
    assert not compat.check_fabric_manager("debian-12", base("debian-12"), ["p5.4xlarge"])
    ubuntu = "eks-ubuntu-22.04"
    assert not compat.check_fabric_manager(ubuntu, base(ubuntu), ["p5.48xlarge"])


@pytest.mark.parametrize("name", ["p6-b200.48xlarge", "p6-b300.48xlarge"])
def test_what_has_its_switches_behind_nvlink_s_subnet_manager_needs_that(name: str) -> None:
    for system in ("debian-12", "eks-ubuntu-22.04"):
        (found,) = compat.check_fabric_manager(system, base(system), ["p5.48xlarge", name])
        assert (found.severity, found.id) == ("error", "fabric-manager")
        assert found.message.startswith(
            f"{name} needs NVLink's subnet manager (NVLSM) in addition to the fabric"
        )
        assert "eks-al2023" in found.remedy
    for system in ("eks-al2023", "eks-al2023-nvidia"):
        assert not compat.check_fabric_manager(system, base(system), ["p5.48xlarge", name])
