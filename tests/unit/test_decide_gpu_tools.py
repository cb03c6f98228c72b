"""What the role gpu_tools decides: tables, without any machine."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from gpukiln.gpus import zipapp
from roles.gpu_tools import decide as gpu_tools
from roles.plan import Node, Plan
from tests.support.roles import asked, node

NO_GROUP = {"group": {"rc": 2, "stdout": "", "stderr": ""}}
A_GROUP = {"group": {"rc": 0, "stdout": "gpu:x:990:\n", "stderr": ""}}
CUTS = {"version": "v1", "mig-configs": {"one": [{"devices": "all", "mig-enabled": True}]}}
RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all tests: the role packs its program there once, and pytest removes the folder of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUKILN_HOME", str(tmp_path_factory.mktemp("home")))
        gpu_tools._files.cache_clear()
        yield
    gpu_tools._files.cache_clear()


def bare(**more: Any) -> Node:
    return node(answers=NO_GROUP, globs={pattern: [] for pattern in gpu_tools.EARLIER}, **more)


def converged(plan: Plan) -> Node:
    """A node on which a plan was carried out."""
    there = node(
        files={file.path: file.text for file in plan.files},
        answers=A_GROUP,
        globs={pattern: [] for pattern in gpu_tools.EARLIER},
    )
    for file in plan.files:
        there["files"][file.path]["mode"] = file.mode
    content, _ = zipapp.files()[gpu_tools.PROGRAM[1:]]
    sha256 = hashlib.sha256(content).hexdigest()
    there["files"][gpu_tools.PROGRAM] = {"mode": "0755", "uid": 0, "gid": 0, "sha256": sha256}
    for path in (*gpu_tools.FOLDERS, *plan.folders):
        there["folders"][path] = {"mode": "0755", "uid": 0, "gid": 0}
    there["folders"][gpu_tools.STATE] = {"mode": "0700", "uid": 0, "gid": 0}
    for name in plan.enable:
        there["units"][name] = RUNS
    return there


def test_a_bare_node_gets_all_of_it_and_the_second_time_nothing() -> None:
    role = asked("gpu_tools", health=True, limits={"hours": 48, "users": {"ann": {"gpus": 2}}})
    plan = gpu_tools.decide(role, bare())
    assert plan.do["group"]
    assert plan.do["state"]
    assert "/usr/local/share/man/man1" in plan.folders
    assert Path(plan.do["program"]).read_bytes() == zipapp.files()[gpu_tools.PROGRAM[1:]][0]
    assert plan.do["place"] == "/usr/local/bin"
    assert {f"/{name}" for name in zipapp.files()} - {gpu_tools.PROGRAM} < {file.path for file in plan.files}
    assert plan.enable == [gpu_tools.LEASES_SOCKET, gpu_tools.HEALTH_TIMER]
    settings = next(file.text for file in plan.files if file.path == gpu_tools.SETTINGS)
    assert tomli.loads(settings) == {"limits": {"hours": 48, "users": {"ann": {"gpus": 2}}}}
    there = converged(plan)
    assert not gpu_tools.decide(role, there).acts
    assert not gpu_tools.decide_runtime(role, there).acts
    there["units"][gpu_tools.HEALTH_TIMER] = {**RUNS, "active": "inactive"}
    assert gpu_tools.decide_runtime(role, there).start == [gpu_tools.HEALTH_TIMER]


def test_a_folder_that_its_group_could_write_into_is_taken_over_by_the_program() -> None:
    role = asked("gpu_tools")
    there = converged(gpu_tools.decide(role, bare()))
    there["folders"][gpu_tools.STATE] = {"mode": "2770", "uid": 0, "gid": 990}
    plan = gpu_tools.decide(role, there)
    assert (plan.do["state"], plan.do["take_over"]) == (False, True)
    assert plan.lines == [f"+{gpu_tools.STATE}/, root's alone"]


def test_another_program_is_replaced_alone() -> None:
    role = asked("gpu_tools")
    there = converged(gpu_tools.decide(role, bare()))
    there["files"][gpu_tools.PROGRAM]["sha256"] = "0" * 64
    plan = gpu_tools.decide(role, there)
    assert plan.do["program"].endswith(gpu_tools.PROGRAM)
    assert (plan.do["place"], plan.files, plan.lines) == ("", [], [f"+{gpu_tools.PROGRAM}"])


@pytest.mark.parametrize(
    ("account", "members"),
    [(None, ["ann"]), ({"groups": ["ann"]}, ["ann"]), ({"groups": ["ann", "gpu"]}, [])],
)
def test_users_become_members(account: dict[str, Any] | None, members: list[str]) -> None:
    role = asked("gpu_tools", users=["ann"])
    there = converged(gpu_tools.decide(role, bare()))
    there["accounts"]["ann"] = account
    assert gpu_tools.decide(role, there).do["users"] == members


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "ExecStart=/usr/local/bin/gpukiln-gpu health"),
        ({"health_textfile": "/var/lib/x"}, "health --textfile /var/lib/x"),
        ({"health_textfile": "/t", "health_hook": "/h"}, "health --textfile /t --hook /h"),
    ],
)
def test_what_the_health_unit_runs(given: dict[str, str], line: str) -> None:
    plan = gpu_tools.decide(asked("gpu_tools", health=True, **given), bare())
    [text] = [file.text for file in plan.files if file.path.endswith(gpu_tools.HEALTH)]
    assert any(one.endswith(line) for one in text.splitlines())
    assert "\n# 1: something is sick" in text


def test_units_of_an_earlier_choice_are_stopped_and_taken_away() -> None:
    cut = f"{gpu_tools.UNITS}/{gpu_tools.CUT}"
    link = f"{gpu_tools.UNITS}/multi-user.target.wants/{gpu_tools.CUT}"
    there = bare()
    there["globs"] |= {gpu_tools.EARLIER[0]: [cut], gpu_tools.EARLIER[3]: [link]}
    plan = gpu_tools.decide(asked("gpu_tools"), there)
    assert (plan.do["stop"], plan.absent) == ([gpu_tools.CUT], [cut, link])
    kept = gpu_tools.decide(asked("gpu_tools", mig_config=CUTS, mig_select="one"), there)
    assert (kept.do["stop"], kept.absent, kept.enable) == ([], [], [gpu_tools.LEASES_SOCKET, gpu_tools.CUT])
    assert gpu_tools.MIG in [file.path for file in kept.files]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"mig_select": "two", "mig_config": CUTS},
            "Found gpu_tools_mig_select two, wanted a key of mig-configs",
        ),
        ({"mig_select": "two"}, "in gpu_tools_mig_config: it has none."),
        ({"limits": {"gpu": 4}}, "gpu_tools_limits, gpu_tools_busy or gpu_tools_price: [limits] has 'gpu'"),
        ({"price": {"usd_hour": "much"}}, "gpu_tools_limits, gpu_tools_busy or gpu_tools_price: "),
    ],
)
def test_what_is_refused(given: dict[str, Any], found: str) -> None:
    plan = gpu_tools.decide(asked("gpu_tools", **given), bare())
    assert found in plan.refusal
    assert not plan.acts
