"""The role packages: the versions that apt is asked for, and the advice when something can't be installed."""

import pytest

from roles.packages.decide import decide_failed, exact
from roles.packages.failure import package_failure
from tests.support.roles import asked, node


def test_the_version_that_apt_is_asked_for() -> None:
    madison = """\
    nvtop | 3.1.0-1 | http://mirror bookworm/main amd64 Packages
     dcgm | 1:4.6.1-2 | file:/srv ./ Packages
     dcgm | 1:4.6.1-1 | file:/srv ./ Packages
     dcgm | 4.6.10-1 | file:/srv ./ Packages
  toolkit | 1.19.2-1 | file:/srv ./ Packages
  toolkit | 1.19.1-1 | file:/srv ./ Packages
"""
    assert exact(madison, ["dcgm"], "4.6.1") == ["dcgm=1:4.6.1-2"]
    assert exact(madison, ["toolkit", "nvtop"], "1.19.1") == [
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
    message = package_failure({"msg": f"{command}{said}"}, ["x", "y"], "1")
    assert said.splitlines()[0] in message
    assert advice in message
    assert "Wanted: x, y in version 1." in message
    assert "Dpkg::Options" not in message


def test_what_dnf_lists_is_told() -> None:
    result = {
        "msg": "Failed to install some of the specified packages",
        "failures": ["No package nvtop available."],
    }
    assert "No package nvtop available." in package_failure(result, ["nvtop"])


def test_the_role_refuses_with_what_apt_said() -> None:
    result = {"msg": "No package matching 'nvtop' is available"}
    plan = decide_failed(asked("packages", names=["nvtop"], result=result), node())
    assert plan.refusal == package_failure(result, ["nvtop"])
