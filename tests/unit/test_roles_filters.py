"""The filters of the roles: pure functions, so no machine is needed."""

from pathlib import Path

import pytest

from tests.support.roles import load_filters

ROOT = Path(__file__).parents[2]


kernels = load_filters("nvidia_driver", "kernels")
record = load_filters("image_record", "image_record")


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
            "its packages can't be installed beside it (x; common (<= 1-1) but 2 is)",
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


def test_only_a_stale_initramfs_is_rebuilt() -> None:
    configuration = "/etc/modprobe.d/gpukiln-nvidia.conf"
    files = [
        {"path": configuration, "mtime": 10.0},
        {"path": "/boot/vmlinuz-1.0-a", "mtime": 1.0},
        {"path": "/boot/initrd.img-1.0-a", "mtime": 11.0},
        {"path": "/boot/vmlinuz-2.0-a", "mtime": 1.0},
        {"path": "/boot/initrd.img-2.0-a", "mtime": 9.0},
        {"path": "/boot/vmlinuz-3.0-a", "mtime": 1.0},
        {"path": "/boot/vmlinuz-0-rescue-9a8b", "mtime": 1.0},
    ]
    assert kernels.stale_initramfs(files, configuration, "/boot/initrd.img-%s") == ["2.0-a", "3.0-a"]
    assert not kernels.stale_initramfs(files[1:3], configuration, "/boot/initrd.img-%s")


COMPONENTS = {
    "nvidia_driver": {
        "branch": 535,
        "modules": "proprietary",
        "keep_build_tools": False,
        "packages": {"debian": "nvidia-kernel-dkms", "ubuntu": "nvidia-dkms-{branch}-server"},
    },
    "docker": {"packages": {"debian": "docker.io", "ubuntu": "docker.io"}},
    "nvtop": {"packages": {"debian": "nvtop", "ubuntu": "nvtop"}},
    "kubernetes": {},
}
IMAGE = {
    "schema": 1,
    "components": {
        "nvidia_driver": {"version": "535.309.01", "branch": 535, "status": "install"},
        "docker": {"version": None, "status": "install"},
        "nvtop": {"version": None, "status": "install"},
        "kubernetes": {"version": "1.34", "status": "left_out", "reason": "the base has none"},
    },
}
MODINFO = [
    {"item": ["6.1.0-9-cloud-amd64", "nvidia-current"], "stdout": ""},
    {"item": ["6.1.0-9-cloud-amd64", "nvidia"], "stdout": ""},
    {"item": ["6.1.0-56-cloud-amd64", "nvidia-current"], "stdout": "535.309.01"},
    {"item": ["6.1.0-56-cloud-amd64", "nvidia"], "stdout": ""},
]


def test_record_says_what_is_there() -> None:
    packages = {
        "nvidia-kernel-dkms": [{"version": "535.309.01-0+deb12u1"}],
        "docker.io": [{"version": "20.10.24+dfsg1-1+deb12u1+b6"}],
    }
    made = record.image_record(IMAGE, COMPONENTS, "debian", packages, MODINFO)
    assert made["kernel"] == "6.1.0-56-cloud-amd64"
    assert made["kernels"] == ["6.1.0-56-cloud-amd64", "6.1.0-9-cloud-amd64"]
    assert made["modules"] == {"nvidia": {"6.1.0-56-cloud-amd64": "535.309.01"}}
    assert made["packages"]["docker.io"] == "20.10.24+dfsg1-1+deb12u1+b6"
    states = {name: said["status"] for name, said in made["components"].items()}
    assert states == {
        "nvidia_driver": "installed",
        "docker": "installed",
        "nvtop": "install",
        "kubernetes": "left_out",
    }
    assert made["components"]["docker"]["version"] == "20.10.24+dfsg1"
    assert made["components"]["nvidia_driver"]["keep_build_tools"] is False
    assert "keep_build_tools" not in made["components"]["docker"]


def test_record_of_an_rpm_system() -> None:
    """A package's release belongs to its version, and several kernels are installed at once."""
    packages = {
        "docker-ce": [{"version": "28.5.2", "release": "1.el9", "epoch": 3}],
        "kernel-core": [
            {"version": "5.14.0", "release": "9.el9"},
            {"version": "5.14.0", "release": "10.el9"},
        ],
    }
    components = {
        "docker": {"packages": {"amazon": "docker", "redhat": "docker-ce"}},
        "nvtop": {"packages": {"amazon": None, "redhat": "nvtop"}},
    }
    image = {"components": {name: {"version": None, "status": "install"} for name in components}}
    made = record.image_record(image, components, "rocky", packages, [], family="redhat")
    assert made["packages"] == {"docker-ce": "28.5.2-1.el9", "kernel-core": "5.14.0-10.el9, 5.14.0-9.el9"}
    assert made["components"]["docker"] == {
        "version": "28.5.2",
        "status": "installed",
        "package": {"name": "docker-ce", "version": "28.5.2-1.el9"},
    }
    assert made["components"]["nvtop"]["status"] == "install"
    assert not record.package_drift(made["packages"], packages)
    del packages["kernel-core"][1]
    assert record.package_drift(made["packages"], packages) == [
        "-kernel-core 5.14.0-10.el9, 5.14.0-9.el9",
        "+kernel-core 5.14.0-9.el9",
    ]
    amazon = {"docker": [{"version": "25.0", "release": "1"}], "nvtop": [{"version": "3", "release": "1"}]}
    made = record.image_record(image, components, "amazon", amazon, [], family="redhat")
    assert [said["status"] for said in made["components"].values()] == ["installed", "install"]


def test_record_has_source_size_and_licences_of_what_is_installed() -> None:
    dpkg = "libc6\tglibc\t2.36-9\t12986\tamd64\ngone\tgone\t1\t\tall\nempty\tempty\t1\t\tall\n"
    copyright_lines = (
        "/usr/share/doc/libc6/copyright:License: LGPL-2.1+\n/usr/share/doc/libc6/copyright:License:  GPL-2+\n"
        "/usr/share/doc/libc6/copyright:License: GPL-2+\n/usr/share/doc/empty/copyright:License:\n"
    )
    packages = {"libc6": [{"version": "2.36-9+b1"}], "empty": [{"version": "1"}]}
    made = record.image_record(IMAGE, COMPONENTS, "debian", packages, [], dpkg, copyright_lines)
    assert made["package_details"] == {
        "empty": {
            "source": "empty",
            "source_version": "1",
            "architecture": "all",
            "installed_kib": 0,
            "licenses": [],
        },
        "libc6": {
            "source": "glibc",
            "source_version": "2.36-9",
            "architecture": "amd64",
            "installed_kib": 12986,
            "licenses": ["GPL-2+", "LGPL-2.1+"],
        },
    }


def test_record_knows_precompiled_modules() -> None:
    packages = {"nvidia-headless-no-dkms-535-server": [{"version": "535.309.01-0ubuntu0.22.04.1"}]}
    made = record.image_record(IMAGE, COMPONENTS, "ubuntu", packages, [])
    assert made["components"]["nvidia_driver"]["status"] == "installed"
    assert made["kernel"] is None
