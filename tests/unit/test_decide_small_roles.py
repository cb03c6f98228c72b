"""What small roles decide: tables, without any machine."""

from typing import Any

import pytest

from roles.docker_compose import decide as docker_compose
from roles.gpu_bootstrap import decide as gpu_bootstrap
from roles.gpu_presence import decide as gpu_presence
from roles.nvtop import decide as nvtop
from roles.packages import decide as packages
from roles.plan import Plan
from tests.support.roles import asked, node


@pytest.mark.parametrize(
    ("system", "there", "install", "source"),
    [
        ("debian-12", {}, ["nvtop"], "archive"),
        ("debian-12", {"nvtop": "3.0.1-1"}, [], "archive"),
        ("ubuntu-22.04", {}, ["nvtop"], "archive"),
        ("rocky-9", {}, ["nvtop"], "repository"),
        ("amazon-2023", {}, [], None),
    ],
)
def test_nvtop(system: str, there: dict[str, str], install: list[str], source: str | None) -> None:
    plan = nvtop.decide(asked("nvtop", system), node(there))
    assert (plan.packages, plan.do.get("source"), plan.acts) == (install, source, bool(install))
    assert ("left_out" in plan.do) == (source is None)
    assert bool(nvtop.look(asked("nvtop", system))) == (source is not None)


@pytest.mark.parametrize(
    ("system", "there", "install"),
    [
        ("debian-12", {}, ["docker-compose"]),
        ("debian-12", {"docker-compose": "1.29.2-3"}, []),
        ("rocky-9", {}, []),
    ],
)
def test_compose(system: str, there: dict[str, str], install: list[str]) -> None:
    plan = docker_compose.decide(asked("docker_compose", system), node(there))
    assert (plan.packages, "left_out" in plan.do) == (install, system == "rocky-9")


TOOLKIT: dict[str, Any] = {"names": ["toolkit", "base"], "version": "1.19.1", "hold": True}
MADISON = "toolkit | 1:1.19.1-2 | x\ntoolkit | 1:1.19.1-1 | x\nbase | 1.19.0-1 | x\n"


@pytest.mark.parametrize(
    ("system", "there", "install", "hold", "unlock"),
    [
        ("debian-12", {}, ["toolkit=1:1.19.1-2", "base=1.19.1"], ["toolkit", "base"], []),
        ("debian-12", {"toolkit": "=1.19.1-1", "base": "=1.19.1-1"}, None, [], None),
        ("debian-12", {"toolkit": "=1.19.1-1", "base": "1.19.1-1"}, None, ["base"], None),
        (
            "rocky-9",
            {"toolkit": "=1.18.0-1", "base": "=1.19.1-1"},
            ["toolkit-1.19.1", "base-1.19.1"],
            ["toolkit", "base"],
            ["toolkit"],
        ),
    ],
)
def test_packages(
    system: str, there: dict[str, str], install: list[str] | None, hold: list[str], unlock: list[str] | None
) -> None:
    role = asked("packages", system, **TOOLKIT)
    plan = packages.decide(role, node(there, answers={"madison": {"stdout": MADISON}}))
    assert (plan.do.get("install"), plan.do["hold"], plan.do.get("unlock")) == (install, hold, unlock)
    assert plan.acts == bool(install or hold)


def test_apt_is_asked_for_exact_versions_where_something_is_missing() -> None:
    role = asked("packages", **TOOLKIT)
    assert packages.decide(role, node()).ask["node_facts"]["commands"]["madison"][1] == "madison"
    installed = node({"toolkit": "=1.19.1-1", "base": "=1.19.1-1"})
    assert packages.decide(role, installed) == Plan(do={"hold": [], "forbid": False})
    assert packages.decide(asked("packages", check=True, **TOOLKIT), node()).lines == [
        "+toolkit 1.19.1",
        "+base 1.19.1",
    ]


@pytest.mark.parametrize(("policy", "forbid"), [({}, True), ({packages.POLICY: "#!/bin/sh\n"}, False)])
def test_an_administrators_policy_of_services_stays(policy: dict[str, str], forbid: bool) -> None:
    role = asked("packages", names=["docker.io"], start_services=False)
    assert packages.decide(role, node(files=policy)).do["forbid"] is forbid


def test_what_came_in_another_version_is_refused() -> None:
    role = asked("packages", **TOOLKIT)
    plan = packages.decide_came(role, node({"toolkit": "1:1.18.0-1"}))
    assert plan.refusal.startswith(
        "Found toolkit 1.18.0, base none after the installation, wanted version 1.19.1"
    )
    assert not packages.decide_came(role, node({"toolkit": "1.19.1-1", "base": "1.19.1-1"})).refusal


def test_a_bare_node_gets_the_probe_and_the_bootstrap() -> None:
    plan = gpu_bootstrap.decide(asked("gpu_bootstrap"), node())
    assert {file.path for file in plan.files} >= {gpu_presence.PROBE, gpu_bootstrap.SETTINGS}
    assert plan.enable == [gpu_presence.UNIT, gpu_bootstrap.UNIT]
    assert (plan.notify, plan.folders) == ([gpu_bootstrap.READY], {"/etc/gpukiln": "0755"})
    assert next(file.text for file in plan.files if file.path == gpu_bootstrap.SETTINGS) == (
        "# Ansible managed\nWAIT_S=180\nNODE_LABELS=\n"
    )


def test_what_only_verification_reads_starts_nothing_anew() -> None:
    before = gpu_bootstrap.decide(asked("gpu_bootstrap"), node())
    there = node(files={file.path: file.text for file in before.files})
    for file in before.files:
        there["files"][file.path]["mode"] = file.mode
    there["folders"]["/etc/gpukiln"] = {"mode": "0755", "uid": 0, "gid": 0}
    for unit in before.enable:
        there["units"][unit] = {"there": True, "enabled": "enabled", "active": "active", "reload": False}
    assert not gpu_bootstrap.decide(asked("gpu_bootstrap"), there).acts
    assert not gpu_bootstrap.decide_runtime(asked("gpu_bootstrap"), there).acts
    plan = gpu_bootstrap.decide(asked("gpu_bootstrap", mig="any"), there)
    assert ([file.path for file in plan.files], plan.notify) == ([gpu_bootstrap.EXPECTED], [])
    plan = gpu_bootstrap.decide(asked("gpu_bootstrap", wait_s=5), there)
    assert ([file.path for file in plan.files], plan.notify) == (
        [gpu_bootstrap.SETTINGS],
        [gpu_bootstrap.READY],
    )
    there["units"][gpu_bootstrap.UNIT]["active"] = "inactive"
    assert gpu_bootstrap.decide_runtime(asked("gpu_bootstrap"), there).start == [gpu_bootstrap.UNIT]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"node_labels": {"rack": "b 7"}}, "Found the node label rack=b 7"),
        ({"node_labels": {"node-role.kubernetes.io/gpu": "true"}}, "node label node-role.kubernetes.io/gpu="),
        ({"node_labels": {"k8s.io/gpu": "true"}}, "Found the node label k8s.io/gpu=true"),
        ({"node_labels": {"Rack/": "b7"}}, "Found the node label Rack/=b7"),
        ({"node_labels": {"rack": "b" * 64}}, "Found the node label rack=bbb"),
        ({"bandwidth_share": 0}, "Found gpu_bootstrap_bandwidth_share 0"),
        ({"bandwidth_share": 1.1}, "Found gpu_bootstrap_bandwidth_share 1.1"),
    ],
)
def test_what_the_bootstrap_refuses(given: dict[str, Any], found: str) -> None:
    assert found in gpu_bootstrap.decide(asked("gpu_bootstrap", **given), node()).refusal


@pytest.mark.parametrize(
    "name", ["rack", "example.com/rack", "node.kubernetes.io/x", "a.node.kubernetes.io/x_y.z"]
)
def test_labels_that_a_kubelet_takes(name: str) -> None:
    role = asked("gpu_bootstrap", node_labels={name: "b7"})
    assert not gpu_bootstrap.decide(role, node()).refusal


@pytest.mark.parametrize(("gpus", "found"), [([], False), ([{"address": "x", "id": "0x1eb8"}], True)])
def test_whether_there_is_a_gpu(gpus: list[dict[str, str]], found: bool) -> None:
    there = node(pci={"gpus": gpus, "switches": []})
    plan = Plan()
    assert gpu_presence.run(plan, there) is found
    assert not plan.start  # in a first run in check mode the unit is not there yet
    there["units"][gpu_presence.UNIT] = {"there": True, "enabled": "enabled", "active": "inactive"}
    gpu_presence.run(plan, there)
    assert plan.start == [gpu_presence.UNIT]
