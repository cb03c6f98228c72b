"""The filters of the driver's role: packages, GPUs and kernels."""

from typing import Any

import pytest

from gpukiln.catalog.load import data
from tests.support.roles import load_filters

kernels = load_filters("nvidia_driver", "kernels")
packages = load_filters("nvidia_driver", "packages")
gpus = load_filters("nvidia_driver", "gpus")


def test_what_a_transaction_would_install() -> None:
    there = {"dkms": [{"version": "3.0.10-8"}], "kernel": [{"version": "6.1"}, {"version": "6.2"}]}
    wanted = ["dkms", "dkms=3.0.10-8", "dkms=3.0.11-1", "kernel=6.2", "gcc", "gcc=12"]
    assert packages.not_installed(wanted, there) == ["dkms=3.0.11-1", "gcc", "gcc=12"]


def installed(**versions: str) -> dict[str, list[dict[str, Any]]]:
    return {name.replace("_", "-"): [{"version": version}] for name, version in versions.items()}


MADISON = """\
nvidia-smi | 535.309.01-0+deb12u1 | http://m.example.com/d bookworm-security/non-free amd64 Packages
nvidia-smi | 535.261.03-1 | http://mirror.example.com/debian bookworm/non-free amd64 Packages
nvidia-utils-535-server | 580.1-0ubuntu1 | http://mirror.example.com/ubuntu noble/restricted amd64 Packages
"""


def test_packages_are_pinned_to_the_version() -> None:
    there = installed(libcuda1="535.309.01-0+deb12u1")
    found = packages.driver_pins(MADISON, ["nvidia-smi", "libcuda1"], "535.309.01", there)
    assert found == {
        "pins": ["nvidia-smi=535.309.01-0+deb12u1", "libcuda1=535.309.01-0+deb12u1"],
        "missing": [],
    }


def test_a_transitional_package_is_missing() -> None:
    found = packages.driver_pins(MADISON, ["nvidia-utils-535-server"], "535.309.01", {})
    assert found == {"pins": [], "missing": ["nvidia-utils-535-server"]}
    assert packages.madison_versions(MADISON, "nvidia-utils-535-server") == ["580.1-0ubuntu1"]


def test_what_is_held_carries_the_drivers_version() -> None:
    there = installed(
        libcuda1="535.309.01-0+deb12u1",
        firmware_nvidia_gsp="535.309.01-0+deb12u1",
        nvidia_support="20220217+3~deb12u1",
        vim="535.309.01-1",
    )
    assert packages.driver_packages(there, "535.309.01") == ["firmware-nvidia-gsp", "libcuda1"]


def test_strangers_are_of_another_branch_or_out_of_step() -> None:
    there = installed(
        nvidia_utils_535_server="535.309.01-0ubuntu0.22.04.1",
        libnvidia_compute_580_server="580.159.03-0ubuntu0.22.04.1",
        linux_modules_nvidia_580_server_aws="6.8.0-1040.42+1",
        linux_modules_nvidia_535_server_aws="6.8.0-1040.42+1",
        libcuda1="535.261.03-1",
        nvidia_persistenced="535.171.04-1",
        nvidia_container_toolkit="1.19.1-1",
        libnvidia_container1="1.19.1-1",
        cuda_toolkit_12_1="12.1.1-1",
        kmod_nvidia_open_dkms="3:580.159.03-1.el9",
    )
    assert packages.driver_strangers(there, "535.309.01") == [
        "kmod-nvidia-open-dkms 3:580.159.03-1.el9",
        "libcuda1 535.261.03-1",
        "libnvidia-compute-580-server 580.159.03-0ubuntu0.22.04.1",
        "linux-modules-nvidia-580-server-aws 6.8.0-1040.42+1",
    ]
    assert packages.driver_branches(there)["linux-modules-nvidia-535-server-aws"] == 535
    assert "nvidia-container-toolkit" not in packages.driver_branches(there)


REHEARSAL = """\
Inst nvidia-headless-535-server (535.309.01-0ubuntu0.24.04.2 Ubuntu:24.04/noble-updates [amd64])
Inst libnvidia-compute-580-server [580.1.1-1] (580.173.02-0ubuntu0.24.04.1 Ubuntu:24.04 [amd64])
Inst gcc (4:13.2.0-7ubuntu1 Ubuntu:24.04/noble [amd64])
Conf nvidia-dkms-580-server (580.173.02-0ubuntu0.24.04.1 Ubuntu:24.04 [amd64])
"""


def test_a_transitional_package_is_seen_before_it_is_installed() -> None:
    assert packages.simulated_strangers(REHEARSAL, 535) == [
        "libnvidia-compute-580-server 580.173.02-0ubuntu0.24.04.1"
    ]
    assert not packages.simulated_strangers(REHEARSAL.splitlines()[0], 535)


@pytest.mark.parametrize(
    ("version", "ids", "keys", "modules"),
    [
        ("535.309.01", ["0x1eb8"], [], "proprietary"),
        ("580.178.04", ["0x1eb8", "0x2237"], [], "open"),
        ("580.178.04", ["0x1db1"], [], "proprietary"),
        ("580.178.04", [], ["t4", "b200"], "open"),
        ("535.309.01", ["0x2342"], [], "open"),
        ("580.178.04", [], [], "proprietary"),
    ],
)
def test_the_gpus_decide_on_the_modules(version: str, ids: list[str], keys: list[str], modules: str) -> None:
    found = gpus.driver_fit(data("nvidia_matrix"), version, "auto", ids, keys)
    assert (found["modules"], found["problems"]) == (modules, [])


@pytest.mark.parametrize(
    ("version", "modules", "ids", "keys", "problem"),
    [
        (
            "535.309.01",
            "proprietary",
            ["0x2335"],
            [],
            "does not know the H200 SXM (Hopper), wanted 550.90.07",
        ),
        ("580.178.04", "proprietary", ["0x2901"], [], "proprietary kernel modules can't drive the B200"),
        ("535.309.01", "open", ["0x1eb8"], [], "list the T4 (Turing) from 575.51.02 on, found 535.309.01"),
        ("595.91.07", "auto", ["0x1db1"], [], "has dropped the V100 (Volta), wanted branch 580 or older"),
        ("580.178.04", "auto", ["0x2684"], [], "does not know the GPU 10DE:2684: set nvidia_driver_modules"),
        ("580.178.04", "auto", [], ["a10gg"], "no GPU 'a10gg' in the catalogue, wanted one of"),
    ],
)
def test_what_cannot_work_is_said(
    version: str, modules: str, ids: list[str], keys: list[str], problem: str
) -> None:
    (found,) = gpus.driver_fit(data("nvidia_matrix"), version, modules, ids, keys)["problems"]
    assert problem in found


@pytest.mark.parametrize(
    ("key", "needed"), [("b200", True), ("b300", True), ("h200", False), ("gb200", False)]
)
def test_what_needs_nvlink_s_subnet_manager(key: str, *, needed: bool) -> None:
    catalogue = data("nvidia_matrix")
    for ids, keys in (([], [key]), ([f"0x{catalogue['gpus'][key]['pci_ids'][0].lower()}"], [])):
        assert gpus.driver_fit(catalogue, "580.178.04", "open", ids, keys)["nvlink5"] is needed


def test_an_unknown_gpu_is_the_users_own_choice() -> None:
    found = gpus.driver_fit(data("nvidia_matrix"), "580.178.04", "open", ["0x2684"], [])
    assert found == {"modules": "open", "nvlink5": False, "problems": []}


ROWS = """\
kernel-devel | 0:5.14.0-503.el9 | x86_64
kernel6.12-devel | 0:6.12.5-1.amzn2023 | x86_64
nvidia-driver-cuda | 3:580.178.04-1.el9 | x86_64
"""


def test_headers_are_found_in_the_repository_and_on_the_machine() -> None:
    there = {"kernel-devel": [{"version": "5.14.0", "release": "427.el9", "arch": "x86_64"}]}
    releases = ["5.14.0-427.el9.x86_64", "5.14.0-503.el9.x86_64", "6.12.5-1.amzn2023.x86_64", "6.1-1.x86_64"]
    assert kernels.kernel_parts(ROWS, there, releases, "devel") == [
        "kernel-devel-5.14.0-427.el9.x86_64",
        "kernel-devel-5.14.0-503.el9.x86_64",
        "kernel6.12-devel-6.12.5-1.amzn2023.x86_64",
    ]


STATUS = """\
nvidia-current/535.309.01, 6.1.0-9-amd64, x86_64: installed
nvidia-current/535.309.01, 6.1.0-10-amd64, x86_64: built
nvidia/580.178.04, 6.1.0-11-amd64, x86_64: installed
nvidia-srv/580.178.04, 6.1.0-12-amd64, x86_64: installed (WARNING! Diff between built and installed module!)
"""


def test_dkms_says_which_kernels_lack_a_module() -> None:
    releases = [f"6.1.0-{number}-amd64" for number in (9, 10, 11, 12)]
    assert kernels.dkms_missing(STATUS, releases, "535.309.01") == releases[1:]
    assert kernels.dkms_missing(STATUS, releases, "580.178.04") == releases[:2]
