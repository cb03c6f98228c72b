"""What the role nvidia_container_toolkit decides: tables, without any machine."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.nvidia_container_toolkit import decide as toolkit
from roles.plan import Node, Plan, Role
from tests.support.roles import asked, node

VERSION = "1.19.1"
GPU = {"gpus": [{"address": "0000:00:1e.0", "id": "0x1eb8"}], "switches": []}
LOADED, CDI = "/sys/module/nvidia/version", "/var/run/cdi/nvidia.yaml"
RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}


def role(system: str = "debian-12", **given: Any) -> Role:
    repository = {
        manager: {"url": "https://r.example.com/", "suite": "/", "key_fingerprint": "A" * 40, "key_url": "/k"}
        for manager in ("apt", "rpm")
    }
    return asked(
        "nvidia_container_toolkit", system, **{"version": VERSION, "repository": repository, **given}
    )


def host(asked_for: Role, plan: Plan | None = None, **more: Any) -> Node:
    """A node without anything of it, or after a plan was carried out."""
    looks = toolkit.look(asked_for)
    there = {
        "globs": {pattern: [] for pattern in looks["globs"]},
        "keyrings": {path: [] for path in looks["keyrings"]},
        "answers": {"described": {"rc": 2, "stdout": "", "stderr": ""}},
        **more,
    }
    if plan is None:
        return node(**there)
    repository = toolkit._repository(asked_for)
    texts = {file.path: file.text for file in plan.files} | {repository.path: repository.text}
    after = node(dict.fromkeys(toolkit.PACKAGES, f"={VERSION}-1"), texts, **there)
    for file in plan.files:
        after["files"][file.path]["mode"] = file.mode
    after["keyrings"][repository.keyring] = ["A" * 40]
    after["units"] |= dict.fromkeys(plan.enable, RUNS)
    return after


@pytest.mark.parametrize("docker2", [False, True])
@pytest.mark.parametrize("system", ["debian-12", "rocky-9"])
def test_a_bare_node_gets_all_of_it_and_the_second_time_nothing(system: str, *, docker2: bool) -> None:
    one = role(system, docker2=docker2)
    plan = toolkit.decide(one, host(one))
    assert plan.packages == list(toolkit.PACKAGES)
    assert f"+nvidia-container-toolkit {VERSION}" in plan.lines
    assert (plan.do["repository"], plan.do["fetch"]) == (True, True)
    assert set(toolkit.DROPINS) <= {file.path for file in plan.files}
    assert (toolkit.WRAPPER in {file.path for file in plan.files}) == docker2
    after = toolkit.decide(one, host(one, plan))
    assert not after.acts
    assert not after.do["repository"]


def test_another_version_and_one_that_is_not_held_are_put_right() -> None:
    one = role()
    there = host(one, toolkit.decide(one, host(one)))
    there["packages"]["libnvidia-container1"][0]["version"] = "1.18.0-1"
    there["packages"]["nvidia-container-toolkit"][0]["held"] = False
    plan = toolkit.decide(one, there)
    assert plan.packages == ["libnvidia-container1", "nvidia-container-toolkit"]
    assert plan.lines == [f"+libnvidia-container1 {VERSION}", "hold nvidia-container-toolkit"]
    assert plan.do["fetch"]


def test_predecessors_go_and_daemon_json_stays() -> None:
    one = role()
    there = host(one)
    there["packages"] = node({"nvidia-docker2": "2.13.0-1"})["packages"]
    there["files"][toolkit.DAEMON_JSON] = {"mode": "0644", "uid": 0, "gid": 0, "sha256": "x"}
    plan = toolkit.decide(one, there)
    assert (plan.do["predecessors"], plan.do["kept"]) == (["nvidia-docker2"], True)
    assert "-nvidia-docker2" in plan.lines
    assert not toolkit.decide(one, host(one)).do["kept"]


@pytest.mark.parametrize("pattern", [toolkit.REPLACES[2], toolkit.REPLACES[-1]])
def test_what_the_repository_replaces_is_seen(pattern: str) -> None:
    one = role()
    there = host(one, toolkit.decide(one, host(one)))
    there["globs"][pattern] = [pattern.replace("*", "")]
    assert toolkit.decide(one, there).do["repository"]


def test_the_command_of_nvidia_docker2_goes_with_it() -> None:
    one = role()
    there = host(one, toolkit.decide(role(docker2=True), host(one)))
    assert toolkit.decide(one, there).absent == [toolkit.WRAPPER]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"docker2": True, "engines": ["containerd"]},
            "asked for with the engines containerd, wanted docker",
        ),
        ({"docker2": True, "engines": []}, "asked for with the engines none, wanted docker"),
        ({"repository": {}}, "Found the repository nvidia-container-toolkit at no address"),
    ],
)
def test_what_is_refused(given: dict[str, Any], found: str) -> None:
    plan = toolkit.decide(role(**given), host(role()))
    assert found in plan.refusal
    assert not plan.acts


def described(*lines: str) -> dict[str, Any]:
    return {"described": {"rc": 0, "stdout": "".join(f"{line}\n" for line in lines), "stderr": ""}}


RIGHT = (
    f"{LOADED}:580.178.04",
    f"{CDI}:/dev/nvidia-uvm",
    f"{CDI}:/dev/nvidia-uvm",
    f"{CDI}:libcuda.so.580.178.04",
)


@pytest.mark.parametrize(
    ("lines", "describes"),
    [
        (RIGHT, False),
        (RIGHT[:1], True),
        ((*RIGHT[:3], f"{CDI}:libcuda.so.535.309.01"), True),
        ((RIGHT[0], RIGHT[3]), True),
        ((*RIGHT, f"{CDI}:libcuda.so.535.309.01"), True),
    ],
    ids=["right", "none", "another driver", "no node for CUDA", "two drivers"],
)
def test_the_specification_is_of_the_loaded_driver(lines: tuple[str, ...], *, describes: bool) -> None:
    there = host(role(), pci=GPU, answers=described(*lines))
    plan = toolkit.decide_runtime(role(), there)
    assert plan.do["describe"] == describes
    assert plan.lines == [f"+{CDI}: driver 580.178.04"] * describes
    assert not toolkit.decide_runtime(role(), host(role(), answers=described(*lines))).acts, "no GPU"


def test_without_a_loaded_driver_it_is_refused() -> None:
    there = host(role(), pci=GPU)
    assert toolkit.decide_runtime(role(), there).refusal.startswith("Found a GPU and no loaded driver")
    in_check = toolkit.decide_runtime(role(check=True), there)
    assert in_check.lines == [f"+{CDI}: driver that will be loaded"]


def test_what_grep_finds_is_understood(tmp_path: Path) -> None:
    """The command itself, on files as the kernel and nvidia-ctk write them."""

    loaded, cdi = tmp_path / "version", tmp_path / "nvidia.yaml"
    loaded.write_text("580.178.04\n")
    cdi.write_text(
        "  - path: /dev/nvidia-uvm-tools\n  - path: /dev/nvidia-uvm\n"
        "  - hostPath: /usr/lib/libcuda.so.580.178.04\n"
    )
    one = role(loaded_file=str(loaded), cdi_file=str(cdi))
    argv = toolkit.look_runtime(one)["commands"]["described"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    answers = {"described": {"rc": 0, "stdout": said, "stderr": ""}}
    assert not toolkit.decide_runtime(one, host(one, pci=GPU, answers=answers)).do["describe"]
