"""What the roles decide that nodes ask for: DCGM, CI runners, a desktop. Tables, without any machine."""

from typing import Any

import pytest

from roles.ci_runner import decide as ci_runner
from roles.dcgm import decide as dcgm
from roles.gpu_presence import decide as gpu_presence
from roles.kasmvnc import decide as kasmvnc
from roles.plan import Node, Plan, Role
from tests.support.roles import asked, node

GPU = {"gpus": [{"address": "x", "id": "0x1eb8"}], "switches": []}
RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}


def with_plan(plan: Plan, there: Node) -> Node:
    """The node after its files were written and its units were enabled."""
    there["files"] |= node(files={file.path: file.text for file in plan.files})["files"]
    for file in plan.files:
        there["files"][file.path]["mode"] = file.mode
    there["units"] |= dict.fromkeys(plan.enable, RUNS)
    return there


# --- DCGM -----------------------------------------------------------------------------------------------

ENGINE = [
    "datacenter-gpu-manager-4-core",
    "datacenter-gpu-manager-4-cuda12",
    "datacenter-gpu-manager-4-proprietary",
    "datacenter-gpu-manager-4-proprietary-cuda12",
]
ALL = [*ENGINE, dcgm.EXPORTER]
VERSIONS = {"version": "4.6.1", "exporter_version": "4.8.4", "cuda": 12}


def a_dcgm(system: str = "debian-12", /, **given: Any) -> Role:
    return asked("dcgm", system, **{**VERSIONS, **given})


def before_dcgm(packages: dict[str, str] | None = None, /, role: Role | None = None, **more: Any) -> Node:
    repository = dcgm._repository(role or a_dcgm())
    there = {
        "globs": {name: [] for name in repository.looks["globs"]},
        "keyrings": {repository.keyring: [repository.fingerprint]},
    }
    return node(packages or {}, {repository.path: repository.text}, **{**there, **more})


def installed(role: Role) -> Node:
    """A node on which all of it is there."""
    engine, exporter = role["version"], role["exporter_version"]
    versions = dict.fromkeys(ENGINE, f"=1:{engine}-1") | {dcgm.EXPORTER: f"={exporter}-1"}
    there = before_dcgm(versions, role=role)
    return with_plan(dcgm.decide(role, there), there)


@pytest.mark.parametrize("system", ["debian-12", "ubuntu-22.04", "rocky-9", "amazon-2023"])
def test_dcgm_is_installed_once(system: str) -> None:
    role = a_dcgm(system)
    plan = dcgm.decide(role, before_dcgm(role=role))
    assert (plan.packages, plan.do["engine"], plan.do["exporter"]) == (ALL, ENGINE, [dcgm.EXPORTER])
    assert plan.do["repository"] is plan.do["fetch"] is True
    assert plan.enable == [gpu_presence.UNIT, dcgm.ENGINE_UNIT, dcgm.EXPORTER_UNIT]
    assert plan.notify == [], "nothing runs that would have to be restarted"
    there = installed(role)
    rests = dcgm.decide(role, there)
    assert (rests.acts, rests.do["repository"], rests.do["engine"]) == (False, False, [])


def test_dcgm_waits_for_a_gpu_and_the_exporter_asks_it() -> None:
    plan = dcgm.decide(a_dcgm(exporter_address=":9400"), before_dcgm())
    texts = {file.path: file.text for file in plan.files}
    for unit in (dcgm.ENGINE_UNIT, dcgm.EXPORTER_UNIT):
        dropin = texts[f"/etc/systemd/system/{unit}.d/gpukiln.conf"]
        assert dropin.startswith("# Ansible managed\n[Unit]\n")
        assert "ConditionPathExists=/run/nvidia-gpu-present\n" in dropin
    assert (
        "ExecStart=/usr/bin/dcgm-exporter --address :9400"
        " --collectors /etc/dcgm-exporter/default-counters.csv \\\n"
        "  --remote-hostengine-info localhost:5555\n"
    ) in dropin


def test_only_dcgm_comes_from_that_repository() -> None:
    plan = dcgm.decide(a_dcgm(), before_dcgm())
    [text] = [file.text for file in plan.files if file.path == dcgm.PREFERENCES]
    assert "Pin: origin developer.download.nvidia.com\nPin-Priority: -1\n" in text
    role = a_dcgm(driver_source="nvidia")
    there = installed(a_dcgm())
    assert dcgm.decide(role, there).absent == [dcgm.PREFERENCES]
    for source, only in (("distribution", ["datacenter-gpu-manager-*"]), ("nvidia", None)):
        rocky = a_dcgm("rocky-9", driver_source=source)
        plan = dcgm.decide(rocky, before_dcgm(role=rocky))
        assert plan.do["rpm"].get("includepkgs") == only
        assert dcgm.PREFERENCES not in [file.path for file in plan.files]


def test_dcgms_predecessors_go() -> None:
    role = a_dcgm()
    there = installed(role)
    there["packages"] |= node({"datacenter-gpu-manager": "1:3.3.9"})["packages"]
    assert dcgm.decide(role, there).do["repository"] is True
    there = installed(role)
    there["globs"]["/etc/apt/sources.list.d/cuda-*.list"] = ["/etc/apt/sources.list.d/cuda-debian12.list"]
    assert dcgm.decide(role, there).do["repository"] is True


def test_what_is_not_held_is_held_and_another_version_is_installed() -> None:
    role = a_dcgm()
    there = installed(role)
    there["packages"][dcgm.EXPORTER][0]["held"] = False
    plan = dcgm.decide(role, there)
    assert (plan.packages, plan.lines, plan.do["engine"]) == (
        [dcgm.EXPORTER],
        [f"hold {dcgm.EXPORTER}"],
        [],
    )
    plan = dcgm.decide(a_dcgm(version="4.6.2"), installed(role))
    # enabled again, so that systemd reads the new unit, and restarted
    assert (plan.do["engine"], plan.enable, plan.notify) == (ENGINE, [dcgm.ENGINE_UNIT], [dcgm.RESTART])


def test_a_node_without_the_exporter() -> None:
    plan = dcgm.decide(a_dcgm(exporter=False), before_dcgm())
    assert (plan.packages, plan.do["exporter"]) == (ENGINE, [])
    assert dcgm.EXPORTER_UNIT not in plan.enable
    assert not [file for file in plan.files if dcgm.EXPORTER_UNIT in file.path]


def test_counters_of_ones_own() -> None:
    role = a_dcgm(exporter_counters="c.csv", counters_text="DCGM_FI_DEV_SM_CLOCK\n")
    texts = {file.path: file.text for file in dcgm.decide(role, before_dcgm()).files}
    assert texts[dcgm.COUNTERS] == "DCGM_FI_DEV_SM_CLOCK\n"
    assert any(f"--collectors {dcgm.COUNTERS} " in text for text in texts.values())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"exporter_address": "9400"}, "Found dcgm_exporter_address 9400, wanted HOST:PORT"),
        ({"exporter_address": "a b:1"}, "Found dcgm_exporter_address a b:1, wanted HOST:PORT"),
        ({"repository": {}}, "Found the repository cuda at no address"),
    ],
)
def test_what_dcgm_refuses(given: dict[str, Any], found: str) -> None:
    assert found in dcgm.decide(a_dcgm(**given), before_dcgm()).refusal


@pytest.mark.parametrize("address", ["127.0.0.1:9400", ":9400", "[::]:9400", "localhost:1", "[fe80::1]:9400"])
def test_where_the_exporter_may_listen(address: str) -> None:
    assert not dcgm.decide(a_dcgm(exporter_address=address), before_dcgm()).refusal


@pytest.mark.parametrize(
    ("pci", "units", "start", "gpus"),
    [
        ({"gpus": [], "switches": []}, {"active": "inactive"}, [], 0),
        (GPU, {"active": "inactive"}, [dcgm.ENGINE_UNIT, dcgm.EXPORTER_UNIT], 1),
        (GPU, {"there": False, "active": ""}, [], 1),
        (GPU, {}, [], 1),
    ],
)
def test_dcgm_is_started_where_there_is_a_gpu(
    pci: dict[str, Any], units: dict[str, Any], start: list[str], gpus: int
) -> None:
    there = before_dcgm(pci=pci)
    there["units"] |= {name: {**RUNS, **units} for name in (dcgm.ENGINE_UNIT, dcgm.EXPORTER_UNIT)}
    there["units"][gpu_presence.UNIT] = RUNS
    plan = dcgm.decide_runtime(a_dcgm(exporter_address="0.0.0.0:9400"), there)
    assert (plan.start, plan.do) == (start, {"gpus": gpus, "url": "http://127.0.0.1:9400/metrics"})


@pytest.mark.parametrize(
    ("answer", "found", "answered"),
    [
        ({"rc": 0, "stdout": "1 GPU found.\n", "stderr": ""}, "", None),
        ({"rc": 0, "stdout": "0 GPUs found.\n", "stderr": ""}, "Found 0 GPUs by DCGM (0 GPUs found.)", True),
        ({"rc": 1, "stdout": "", "stderr": "Error: x\n"}, "Found 0 GPUs by DCGM (Error: x)", False),
        ({"rc": 255, "stdout": "", "stderr": ""}, "Found 0 GPUs by DCGM (it says nothing)", False),
    ],
)
def test_a_gpu_that_dcgm_does_not_see(answer: dict[str, Any], found: str, answered: bool | None) -> None:
    plan = dcgm.decide_sees(a_dcgm(), node(pci=GPU, answers={"discovery": answer}))
    assert found in plan.refusal
    assert bool(plan.refusal) == bool(found)
    assert plan.do.get("answered") is answered


# --- CI runners -----------------------------------------------------------------------------------------

RUNNER = {"user": "runner", "folder": "/opt/r", "unit": "actions.r.service", "gpus": [0, "GPU-aa"]}
NO_GROUP = {"rc": 2, "stdout": "", "stderr": ""}
ENV_FILE, DROPIN = "/opt/r/.env", "/etc/systemd/system/actions.r.service.d/gpukiln.conf"
ANSWERS = {"docker": NO_GROUP, "ccache": {"rc": 0, "stdout": "ccache:x:120:runner\n", "stderr": ""}}
ALICE = {"uid": 1001, "gid": 1001, "home": "/home/alice", "shell": "/bin/sh", "groups": ["alice", "ccache"]}
OWN = {**ALICE, "uid": 990, "groups": ["runner", "ccache"]}


def a_runner(system: str = "debian-12", /, **given: Any) -> Role:
    return asked("ci_runner", system, **{"runners": [RUNNER], **given})


def bare(**answers: Any) -> Node:
    return node(answers={"docker": NO_GROUP, "ccache": NO_GROUP, **answers})


def test_a_bare_machine_gets_its_runner() -> None:
    plan = ci_runner.decide(a_runner(), bare())
    assert (plan.packages, plan.do["source"], plan.do["group"]) == (["ccache"], "archive", "ccache")
    assert plan.do["users"] == [{"name": "runner", "groups": ["ccache"], "shell": "/bin/bash"}]
    assert plan.do["cache"] is True
    assert plan.do["settings"].startswith("# Ansible managed\nmax_size = 20G\n")
    assert plan.do["folders"] == [{"path": "/opt/r", "user": "runner"}]
    [environment] = plan.do["environments"]
    assert environment["block"].splitlines() == [
        "ACTIONS_RUNNER_HOOK_JOB_STARTED=/usr/local/lib/gpukiln/hooks/gpu-job-started.sh",
        "ACTIONS_RUNNER_HOOK_JOB_COMPLETED=/usr/local/lib/gpukiln/hooks/gpu-job-completed.sh",
        "GPU_JOB_MAX_MEMORY_MIB=1024",
        "GPU_JOB_GRACE_S=10",
        "CCACHE_DIR=/var/cache/ccache",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=0,GPU-aa",
    ]
    texts = {file.path: (file.text, file.mode) for file in plan.files}
    assert 'Environment="CUDA_VISIBLE_DEVICES=0,GPU-aa"\n' in texts[DROPIN][0]
    assert texts[DROPIN][0].endswith("KillMode=mixed\n")
    assert texts[f"{ci_runner.HOOKS}/gpu-job-started.sh"][1] == texts[ci_runner.PROCESSES][1] == "0755"
    assert plan.enable == [gpu_presence.UNIT]


def has_runner() -> Node:
    """A machine whose runner is as it should be, with a line of somebody else in its file."""
    plan = ci_runner.decide(a_runner(), bare())
    there = with_plan(plan, node({"ccache": "4.7-1"}, answers=ANSWERS))
    block = plan.do["environments"][0]["block"]
    text = f"LANG=C\n{ci_runner.BEGIN}\n{block}\n{ci_runner.END}\nTOKEN=s3cret\n"
    texts = {ENV_FILE: text, "/var/cache/ccache/ccache.conf": plan.do["settings"]}
    there["files"] |= node(files=texts)["files"]
    there["files"][ENV_FILE] |= {"mode": "0600", "uid": 990}
    there["files"]["/var/cache/ccache/ccache.conf"] |= {"mode": "0640", "gid": 120}
    there["folders"]["/opt/r"] = {"mode": "0755", "uid": 990, "gid": 0}
    there["folders"]["/var/cache/ccache"] = {"mode": "3770", "uid": 0, "gid": 120}
    there["accounts"] |= {"runner": OWN, "alice": ALICE}
    return there


def test_a_runner_that_is_as_it_should_be_is_left_alone() -> None:
    there = has_runner()
    assert ci_runner.decide(a_runner(ccache_members=["alice"]), there).diffs() == []
    plan = ci_runner.decide(a_runner(grace_s=20), there)
    assert [one["path"] for one in plan.do["environments"]] == [ENV_FILE]
    assert [file.path for file in plan.files] == [DROPIN]
    said = str(plan.diffs())
    assert f"+{ENV_FILE}: GPU_JOB_GRACE_S=20" in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("place", "name", "change", "key"),
    [
        ("files", ENV_FILE, {"mode": "0644"}, "environments"),
        ("files", ENV_FILE, {"uid": 0}, "environments"),
        ("folders", "/opt/r", {"uid": 0}, "folders"),
        ("folders", "/opt/r", {"mode": "0500"}, "folders"),
        ("folders", "/var/cache/ccache", {"mode": "0755"}, "cache"),
        ("files", "/var/cache/ccache/ccache.conf", {"gid": 0}, "settings"),
        ("accounts", "runner", {"groups": ["runner"]}, "users"),
        ("answers", "ccache", NO_GROUP, "group"),
    ],
)
def test_what_is_not_as_it_should_be_is_put_right(
    place: str, name: str, change: dict[str, Any], key: str
) -> None:
    there = has_runner()
    there[place][name] = {**there[place][name], **change}
    plan = ci_runner.decide(a_runner(), there)
    assert plan.acts
    assert plan.do[key]


def test_somebodys_shell_stays() -> None:
    there = has_runner()
    there["accounts"]["runner"] = {**OWN, "groups": ["runner"]}
    [user] = ci_runner.decide(a_runner(), there).do["users"]
    assert user == {"name": "runner", "groups": ["ccache"], "shell": ""}


def test_a_runner_without_cache_and_with_docker() -> None:
    role = a_runner(ccache=False, docker=True, runners=[{"user": "r", "unit": "r.service"}])
    plan = ci_runner.decide(role, bare(docker={"rc": 0, "stdout": "docker:x:998:\n", "stderr": ""}))
    assert (plan.packages, plan.do["group"], plan.do["cache"], plan.do["settings"]) == ([], "", False, "")
    assert plan.do["users"] == [{"name": "r", "groups": ["docker"], "shell": "/bin/bash"}]
    assert (plan.do["folders"], plan.do["environments"]) == ([], [])
    [text] = [file.text for file in plan.files if "r.service.d" in file.path]
    assert "CCACHE_DIR" not in text
    assert "CUDA_" not in text


@pytest.mark.parametrize(
    ("system", "source"), [("ubuntu-22.04", "archive"), ("amazon-2023", "spal"), ("rocky-9", "epel")]
)
def test_where_ccache_comes_from(system: str, source: str) -> None:
    assert ci_runner.decide(a_runner(system), bare()).do["source"] == source


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"runners": [{"user": "x"}]}, "Found the runner {'user': 'x'}, wanted a user's name"),
        ({"runners": [{"user": "X Y", "folder": "/a"}]}, "Found the runner {'user': 'X Y'"),
        ({"runners": [{"user": "x", "folder": "a"}]}, "Found the runner {'user': 'x', 'folder': 'a'}"),
        (
            {"runners": [{"user": "x", "unit": "a.timer"}]},
            "Found the runner {'user': 'x', 'unit': 'a.timer'}",
        ),
        ({"runners": [{"user": "x", "folder": "/a", "gpus": ["a"]}]}, "'gpus': ['a']}, wanted"),
        (
            {"ccache_members": ["carol"]},
            "Found no users carol, wanted them in the group of the compiler cache",
        ),
        ({"docker": True}, "Found no group docker, wanted it for runner. Install Docker first"),
    ],
)
def test_what_a_runner_is_refused_for(given: dict[str, Any], found: str) -> None:
    assert found in ci_runner.decide(a_runner(**given), bare()).refusal


def test_whether_there_is_a_gpu_is_looked_for_once() -> None:
    there = has_runner()
    assert not ci_runner.decide_runtime(a_runner(), there).acts
    there["units"][gpu_presence.UNIT] = {**RUNS, "active": "inactive"}
    assert ci_runner.decide_runtime(a_runner(), there).start == [gpu_presence.UNIT]


# --- a desktop ------------------------------------------------------------------------------------------

PINNED = {"url": "https://example.com/k.deb", "sha256": "a" * 64, "version": "1.5.0"}


def test_a_desktop_is_installed_once() -> None:
    role = asked("kasmvnc", desktop_packages=["dbus", "thunar"], **PINNED)
    plan = kasmvnc.decide(role, node({"dbus": "1-1"}))
    assert plan.do == {"fetch": True, "components": []}
    assert plan.lines == ["+kasmvncserver 1.5.0 of https://example.com/k.deb", "+thunar"]
    assert (plan.packages, plan.enable) == (["thunar"], [])
    texts = {file.path: file.text for file in plan.files}
    assert "  websocket_port: 6800\n" in texts[kasmvnc.SETTINGS]
    assert (
        "-interface 127.0.0.1 -websocketPort 6800 \\\n  -xstartup /usr/local/lib" in texts[kasmvnc.UNIT_FILE]
    )
    there = with_plan(plan, node({"kasmvncserver": "1.5.0-1", "dbus": "1-1", "thunar": "1-1"}))
    assert not kasmvnc.decide(role, there).acts
    newer = asked("kasmvnc", desktop_packages=["dbus"], **{**PINNED, "version": "1.6.0"})
    assert kasmvnc.decide(newer, there).do["fetch"] is True
    ubuntu = asked("kasmvnc", "ubuntu-22.04", **PINNED)
    assert kasmvnc.decide(ubuntu, node()).do["components"] == ["universe"]


@pytest.mark.parametrize(
    ("system", "given", "found"),
    [
        ("rocky-9", {}, "Found Rocky 9.4, wanted Debian or Ubuntu: no package of KasmVNC"),
        ("amazon-2023", {}, "Found Amazon 2023, wanted Debian or Ubuntu"),
        (
            "debian-12",
            {"sha256": ""},
            "for debian-12 on x86_64 (kasmvnc_url https://example.com/k.deb, kasmvnc_sha256 none)",
        ),
        ("debian-12", {"url": ""}, "(kasmvnc_url none, kasmvnc_sha256 aaaa"),
        ("debian-12", {"url": "file:///k.deb"}, "Nothing is fetched without a checksum"),
        ("debian-12", {"sha256": "A" * 64}, "Nothing is fetched without a checksum"),
    ],
)
def test_what_a_desktop_is_refused_for(system: str, given: dict[str, str], found: str) -> None:
    assert found in kasmvnc.decide(asked("kasmvnc", system, **{**PINNED, **given}), node()).refusal


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"kasmvncserver": "1.5.0-1"}, ""),
        ({"kasmvncserver": "1.4.0-1"}, "kasmvncserver 1.4.0"),
        ({}, "missing"),
    ],
)
def test_a_package_of_another_version_is_refused(there: dict[str, str], found: str) -> None:
    said = kasmvnc.decide_came(asked("kasmvnc", **PINNED), node(there)).refusal
    assert found in said
    assert bool(said) == bool(found)
