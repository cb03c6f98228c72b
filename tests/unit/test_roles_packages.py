"""The filters of the role packages: what is installed, and the advice when something can't be."""

import pytest

from tests.support.roles import load_filters

packages = load_filters("packages", "packages")

DPKG = """\
ii |docker.io|20.10.24+dfsg1-1+deb12u1+b6
hi |nvidia-container-toolkit|1.19.1-1
rc |nvidia-docker2|2.13.0-1
un |docker-ce|
ii |netkit|1:2.0
"""


def test_what_dpkg_knows() -> None:
    found = packages.packages_of_dpkg(DPKG)
    assert set(found) == {"docker.io", "nvidia-container-toolkit", "nvidia-docker2", "netkit"}
    assert found["docker.io"] == {
        "installed": True,
        "held": False,
        "package_version": "20.10.24+dfsg1-1+deb12u1+b6",
        "version": "20.10.24+dfsg1-1+deb12u1+b6".rpartition("-")[0],
    }
    assert found["nvidia-container-toolkit"]["held"]
    assert not found["nvidia-docker2"]["installed"], "removed, and its configuration is left"
    assert found["netkit"]["version"] == "2.0"


def test_what_rpm_knows() -> None:
    facts = {
        "containerd.io": [{"version": "2.2.1", "release": "1.el9", "epoch": None}],
        "nvidia-container-toolkit": [{"version": "1.19.1", "release": "1", "epoch": 0}],
        "bash": [{"version": "5", "release": "1"}],
    }
    locks = "# Added lock on ...\nnvidia-container-toolkit-0:1.19.1-1.*\n\n!containerd.io-0:2.2.2-1.el9.*\n"
    found = packages.packages_of_rpm(facts, locks, ["containerd.io", "nvidia-container-toolkit", "nvtop"])
    assert {name: (entry["version"], entry["held"]) for name, entry in found.items()} == {
        "containerd.io": ("2.2.1", False),
        "nvidia-container-toolkit": ("1.19.1", True),
    }


def test_what_is_missing() -> None:
    found = packages.packages_of_dpkg(DPKG)
    assert packages.packages_missing(found, ["docker.io", "nvtop", "nvidia-docker2"]) == [
        "nvtop",
        "nvidia-docker2",
    ]
    assert packages.packages_missing(found, ["nvidia-container-toolkit"], "1.19.1") == []
    assert packages.packages_missing(found, ["nvidia-container-toolkit"], "1.19.2") != []


def test_the_version_that_apt_is_asked_for() -> None:
    madison = """\
    nvtop | 3.1.0-1 | http://mirror bookworm/main amd64 Packages
     dcgm | 1:4.6.1-2 | file:/srv ./ Packages
     dcgm | 1:4.6.1-1 | file:/srv ./ Packages
     dcgm | 4.6.10-1 | file:/srv ./ Packages
  toolkit | 1.19.2-1 | file:/srv ./ Packages
  toolkit | 1.19.1-1 | file:/srv ./ Packages
"""
    assert packages.packages_exact(madison, ["dcgm"], "4.6.1") == ["dcgm=1:4.6.1-2"]
    assert packages.packages_exact(madison, ["toolkit", "nvtop"], "1.19.1") == [
        "toolkit=1.19.1-1",
        "nvtop=1.19.1",
    ]


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "Free space"),
        ("Error: Transaction test error:\n  needs 5MB more space on the / filesystem", "Free space"),
        ("At least 20MB more space needed on the / filesystem.", "Free space"),
        ("E: Held packages were changed and -y was used without --allow-change-held-packages.", "unhold"),
        ("E: Unable to correct problems, you have held broken packages.", "unhold"),
        ("No package matching 'nvtop' is available", "Is a repository missing"),
        ("no available installation candidate for x=1-*", "Is a repository missing"),
        ("Failed to install some of the specified packages", "Is a repository missing"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend", "Another package manager"),
        ("Failed to download metadata: Cannot download repomd.xml", "network and proxy"),
        ("package podman conflicts with containerd.io", "in the way"),
        ("Package x is not signed", "Install nothing"),
        ("something new", "/var/log/apt/term.log"),
    ],
)
def test_advice(said: str, advice: str) -> None:
    command = "'/usr/bin/apt-get -y -o \"Dpkg::Options::=--force-confdef\" install 'x=1'' failed: "
    message = packages.package_failure({"msg": f"{command}{said}"}, ["x", "y"], "1")
    assert said.splitlines()[0] in message
    assert advice in message
    assert "Wanted: x, y in version 1." in message
    assert "Dpkg::Options" not in message


def test_what_dnf_lists_is_told() -> None:
    result = {
        "msg": "Failed to install some of the specified packages",
        "failures": ["No package nvtop available."],
    }
    assert "No package nvtop available." in packages.package_failure(result, ["nvtop"])
