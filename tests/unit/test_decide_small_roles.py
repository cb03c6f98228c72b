"""What small roles decide: tables, without any machine."""

from typing import Any

import pytest

from roles.docker_compose import decide as docker_compose
from roles.gpu_bootstrap import decide as gpu_bootstrap
from roles.gpu_presence import decide as gpu_presence
from roles.nvidia_persistence import decide as nvidia_persistence
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
    assert packages.decide(role, node()).ask["commands"]["madison"][1] == "madison"
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
    assert (plan.notify, plan.folders) == ([], {"/etc/gpukiln": "0755"})
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


GPU = {"gpus": [{"address": "x", "id": "0x1eb8"}], "switches": []}
RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}


def with_plan(plan: Plan, **more: Any) -> Any:
    """A node on which a plan was carried out."""
    there = node(dict.fromkeys(plan.packages, "=1-1"), {file.path: file.text for file in plan.files}, **more)
    for file in plan.files:
        there["files"][file.path]["mode"] = file.mode
    for name in plan.enable:
        there["units"][name] = RUNS
    return there


@pytest.mark.parametrize(
    ("system", "given", "package", "user"),
    [
        ("debian-12", {}, ["nvidia-persistenced"], "nvpd"),
        ("ubuntu-22.04", {}, ["nvidia-compute-utils-535-server"], "nvidia-persistenced"),
        ("rocky-9", {}, ["nvidia-persistenced"], "nvidia-persistenced"),
    ],
)
def test_the_daemon_of_an_archive(system: str, given: dict[str, Any], package: list[str], user: str) -> None:
    role = asked("nvidia_persistence", system, **given)
    plan = nvidia_persistence.decide(role, node())
    assert (plan.packages, plan.notify) == (package, [])
    assert nvidia_persistence.UNIT in plan.enable
    dropin = next(file.text for file in plan.files if file.path == nvidia_persistence.DROPIN)
    assert f"ExecStart=/usr/bin/nvidia-persistenced --user {user} --persistence-mode\n" in dropin
    there = with_plan(plan)
    assert not nvidia_persistence.decide(role, there).acts
    there["files"][nvidia_persistence.DROPIN]["text"] = "[Service]\n"
    assert nvidia_persistence.decide(role, there).notify == [nvidia_persistence.RESTART]


def test_only_debians_own_daemon_is_held() -> None:
    role = asked("nvidia_persistence")
    there = with_plan(nvidia_persistence.decide(role, node()))
    there["packages"]["nvidia-persistenced"][0]["held"] = False
    assert nvidia_persistence.decide(role, there).packages == ["nvidia-persistenced"]
    ubuntu = asked("nvidia_persistence", "ubuntu-22.04")
    there = with_plan(nvidia_persistence.decide(ubuntu, node()))
    there["packages"]["nvidia-compute-utils-535-server"][0]["held"] = False
    assert not nvidia_persistence.decide(ubuntu, there).acts


@pytest.mark.parametrize(("uid", "makes"), [(None, "nvidia-persistenced"), (990, None)])
def test_the_daemon_of_nvidias_installer(uid: int | None, makes: str | None) -> None:
    role = asked("nvidia_persistence", source="runfile", arguments=["--verbose"])
    there = node(accounts={"nvidia-persistenced": {"uid": uid} if uid else None})
    plan = nvidia_persistence.decide(role, there)
    assert plan.do.get("user") == makes
    assert {nvidia_persistence.OWN_UNIT, nvidia_persistence.DROPIN} <= {file.path for file in plan.files}
    assert any("--persistence-mode --verbose\n" in file.text for file in plan.files)


def test_a_driver_without_a_daemon_is_refused() -> None:
    role = asked("nvidia_persistence", source="nvidia")
    said = nvidia_persistence.decide(role, node()).refusal
    assert said.startswith("Found no /usr/lib/systemd/system/nvidia-persistenced.service, wanted the one")
    in_check_mode = asked("nvidia_persistence", source="nvidia", check=True)
    assert not nvidia_persistence.decide(in_check_mode, node()).refusal
    unit = "[Service]\nExecStart=/usr/bin/nvidia-persistenced --user nvpd2 --no-persistence-mode\n"
    plan = nvidia_persistence.decide(role, node(files={nvidia_persistence.DRIVERS_UNIT: unit}))
    assert any("--user nvpd2 --persistence-mode" in file.text for file in plan.files)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"rc": 0, "stdout": "Enabled\nEnabled\n", "stderr": ""}, ""),
        (
            {"rc": 0, "stdout": "Enabled\nDisabled\n", "stderr": ""},
            "persistence Enabled\nDisabled with",
        ),
        (
            {"rc": 9, "stdout": "NVIDIA-SMI has failed", "stderr": ""},
            "persistence NVIDIA-SMI has failed",
        ),
        ({"rc": 127, "stdout": "", "stderr": "found no program nvidia-smi"}, "persistence found no program"),
    ],
)
def test_persistence_that_is_not_on_is_refused(answer: dict[str, Any], found: str) -> None:
    role = asked("nvidia_persistence")
    there = node(pci=GPU)
    there["units"] |= {nvidia_persistence.UNIT: RUNS, gpu_presence.UNIT: RUNS}
    assert nvidia_persistence.decide_runtime(role, there).ask == nvidia_persistence.look_on(role)
    there["answers"]["persistence"] = answer
    assert found in nvidia_persistence.decide_runtime(role, there).refusal
    assert bool(nvidia_persistence.decide_runtime(role, there).refusal) == bool(found)


def test_the_daemon_is_started_where_there_is_a_gpu() -> None:
    role = asked("nvidia_persistence")
    there = node(pci=GPU)
    there["units"] |= {nvidia_persistence.UNIT: {**RUNS, "active": "inactive"}, gpu_presence.UNIT: RUNS}
    assert nvidia_persistence.decide_runtime(role, there).start == [nvidia_persistence.UNIT]
    without = {**there, "pci": {"gpus": [], "switches": []}}
    assert not nvidia_persistence.decide_runtime(role, without).acts
