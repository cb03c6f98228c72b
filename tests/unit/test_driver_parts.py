"""What the driver's role decides with: packages, GPUs and kernels."""

from typing import Any

import pytest

from gpukiln.catalog.load import data
from roles.nvidia_driver import gpus, kernels, packages


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
    assert found == (["nvidia-smi=535.309.01-0+deb12u1", "libcuda1=535.309.01-0+deb12u1"], [])


def test_a_transitional_package_is_missing() -> None:
    found = packages.driver_pins(MADISON, ["nvidia-utils-535-server"], "535.309.01", {})
    assert found == ([], ["nvidia-utils-535-server"])
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
    found = gpus.driver_fit(version, "auto", ids, keys)
    assert (found.modules, found.problems) == (modules, [])


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
    (found,) = gpus.driver_fit(version, modules, ids, keys).problems
    assert problem in found


@pytest.mark.parametrize(
    ("key", "needed"), [("b200", True), ("b300", True), ("h200", False), ("gb200", False)]
)
def test_what_needs_nvlink_s_subnet_manager(key: str, *, needed: bool) -> None:
    catalogue = data("nvidia_matrix")
    for ids, keys in (([], [key]), ([f"0x{catalogue['gpus'][key]['pci_ids'][0].lower()}"], [])):
        assert gpus.driver_fit("580.178.04", "open", ids, keys).nvlink5 is needed


def test_an_unknown_gpu_is_the_users_own_choice() -> None:
    found = gpus.driver_fit("580.178.04", "open", ["0x2684"], [])
    assert found == gpus.Fit("open", nvlink5=False, problems=[])


ROWS = """\
kernel-devel | 0:5.14.0-503.el9 | x86_64
kernel6.12-devel | 0:6.12.5-1.amzn2023 | x86_64
nvidia-driver-cuda | 3:580.178.04-1.el9 | x86_64
"""


def test_headers_are_found_in_the_repository_and_on_the_machine() -> None:
    there = {"kernel-devel": [{"version": "5.14.0-427.el9", "arch": "x86_64"}]}
    releases = ["5.14.0-427.el9.x86_64", "5.14.0-503.el9.x86_64", "6.12.5-1.amzn2023.x86_64", "6.1-1.x86_64"]
    assert kernels.kernel_parts(ROWS, there, releases, "devel") == [
        "kernel-devel-5.14.0-427.el9.x86_64",
        "kernel-devel-5.14.0-503.el9.x86_64",
        "kernel6.12-devel-6.12.5-1.amzn2023.x86_64",
    ]


def trial(*lines: str, rc: int = 0) -> dict[str, object]:
    return {"rc": rc, "stdout": "\n".join(lines), "stderr": "E: Unable to correct problems"}


MODULES = "linux-modules-nvidia-535-server"


OLDER, NEWER = "6.8.0-41-aws", "6.8.0-50-aws"
BRINGS_NEWER = (f"Inst {MODULES}-{NEWER} (1 Ubuntu)", f"Inst linux-image-{NEWER} (1 Ubuntu)")
FOLLOWS = ("Inst linux-aws [1] (2 Ubuntu)", "Inst linux-image-aws [1] (2 Ubuntu)")


@pytest.mark.parametrize(
    ("simulated", "installed", "purges", "lag"),
    [
        (trial(f"Inst {MODULES}-{OLDER} (1 Ubuntu)"), [], False, ""),
        (trial(), [f"{MODULES}-{OLDER}"], True, ""),
        (trial(f"Remv {MODULES}-{OLDER} [1]"), [f"{MODULES}-{OLDER}"], False, f"kernel {OLDER}"),
        # of another kind
        (trial(f"Inst {MODULES}-open-{OLDER} (1 Ubuntu)"), [], False, f"kernel {OLDER}"),
        # an older kernel than the machine's
        (trial(f"Inst {MODULES}-6.8.0-9-aws (1 Ubuntu)"), [], True, f"kernel {OLDER}"),
        # a newer one, which they bring
        (trial(*BRINGS_NEWER), [], True, ""),
        (trial(*BRINGS_NEWER), [], False, f"it has none for kernel {OLDER}"),
        (trial(*BRINGS_NEWER), ["linux-aws"], True, f"{OLDER}, which linux-aws still wants"),
        (trial(*BRINGS_NEWER, *FOLLOWS), ["linux-aws", "linux-image-aws"], True, ""),
        # a newer one that the kernel's own updates bring
        (trial(f"Inst {MODULES}-{OLDER} (1)", BRINGS_NEWER[1]), [], True, f"it has none for kernel {NEWER}"),
        (
            trial(f" {MODULES}-aws : Depends: x", "    Depends: common (<= 1-1) but 2 is", rc=100),
            [],
            True,
            "its packages can't be installed with it (x; common (<= 1-1) but 2 is)",
        ),
        (trial(rc=100), [], True, "E: Unable to correct problems"),
    ],
)
def test_precompiled_modules_lag_behind(
    simulated: dict[str, object], installed: list[str], purges: bool, lag: str
) -> None:
    there = {name: [{"version": "1"}] for name in (f"linux-image-{OLDER}", *installed)}
    updates = ["linux-aws", "linux-image-aws"] if purges else None
    said = kernels.precompiled_lag(simulated, [OLDER], MODULES, there, updates)
    assert lag in said
    assert bool(said) == bool(lag)


def test_the_newest_kernel_is_last() -> None:
    found = kernels.kernel_release_sort(
        ["6.1.0-56-cloud-amd64", "6.1.0-9-cloud-amd64", "5.10.0-60-cloud-amd64"]
    )
    assert found == ["5.10.0-60-cloud-amd64", "6.1.0-9-cloud-amd64", "6.1.0-56-cloud-amd64"]


@pytest.mark.parametrize(
    ("release", "flavour"),
    [
        ("6.1.0-56-cloud-amd64", "cloud-amd64"),
        ("6.8.0-1040-aws", "aws"),
        ("6.1.0-0.deb11.35-cloud-amd64", "0.deb11.35-cloud-amd64"),
        ("6.18.44", ""),
    ],
)
def test_flavour(release: str, flavour: str) -> None:
    assert kernels.kernel_flavour(release) == flavour
