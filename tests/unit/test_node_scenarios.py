"""node.test: real Molecule on scenarios whose machine is this process's own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from gpukiln.errors import UsageError
from gpukiln.nodes.runs import RunStore
from gpukiln.nodes.scenarios import Scenario, ScenarioResult, choose_scenarios, load_scenarios, run_scenario
from gpukiln.nodes.view import render_outcomes, render_scenarios
from tests.support import documents
from tests.support.harness import PRIVILEGED

ROOT = Path(__file__).resolve().parents[2]
MOLECULE = """\
# What it
# proves.
dependency: {{enabled: false}}
driver: {{name: default, options: {{managed: false}}}}
platforms: [{{name: localhost{platform}}}]
scenario: {{test_sequence: [create, converge, destroy]}}
"""
PLAYBOOK = """\
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {{ansible_python_interpreter: "{{{{ ansible_playbook_python }}}}"}}
  tasks:
    - name: {name}
      ansible.builtin.command: {command}
"""


@pytest.fixture
def project(tmp_path):
    """Scenarios `good`, `bad`, `slow`; each says in a file that its machine was removed."""
    for name, command in (("good", "ls /"), ("bad", "ls /does-not-exist"), ("slow", "sleep 120")):
        folder = tmp_path / "molecule" / name
        folder.mkdir(parents=True)
        (folder / "molecule.yml").write_text(MOLECULE.format(platform=""))
        (folder / "create.yml").write_text(PLAYBOOK.format(name="Create", command="ls /"))
        (folder / "converge.yml").write_text(PLAYBOOK.format(name="Converge", command=command))
        (folder / "destroy.yml").write_text(
            PLAYBOOK.format(name="Remove", command=f"touch {tmp_path}/{name}-was-removed")
        )
    return tmp_path


def scenario(project: Path, name: str) -> Scenario:
    return load_scenarios(project / "molecule")[name]


def test_a_scenario_that_passes(project):
    said = []
    outcome = run_scenario(scenario(project, "good"), project / "good.log", said.append)
    assert (outcome.state, outcome.failure) == ("passed", "")
    assert list(outcome.steps) == ["create", "converge", "destroy"]
    assert said == ["create", "converge", "destroy"]
    assert "PLAY RECAP" in (project / "good.log").read_text()
    assert (project / "good-was-removed").exists()


def test_a_scenario_that_fails_is_removed_and_says_why(project):
    outcome = run_scenario(scenario(project, "bad"), project / "bad.log", lambda _: None)
    assert outcome.state == "failed"
    assert {"create", "converge"} < set(outcome.steps)
    assert "/does-not-exist" in outcome.failure
    assert (project / "bad-was-removed").exists()


def command_lines():
    return subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_ctrl_c_removes_the_machine(project):
    code = (
        "import sys; from pathlib import Path; from gpukiln.nodes import scenarios as s\n"
        f"slow = s.load_scenarios(Path({str(project / 'molecule')!r}))['slow']\n"
        f"s.run_scenario(slow, Path({str(project / 'slow.log')!r}), lambda said: print(said, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if line == "converge\n":
            break
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert "removing its machine" in rest
    assert "KeyboardInterrupt" in rest
    assert (project / "slow-was-removed").exists()
    until = time.monotonic() + 30  # who was killed is there until its parent has asked for it
    while "sleep 120" in command_lines() and time.monotonic() < until:
        time.sleep(0.2)
    assert "sleep 120" not in command_lines()


def test_scenarios_that_pull_an_image_run_only_when_named(project):
    folder = project / "molecule"
    (folder / "bad/molecule.yml").write_text(MOLECULE.format(platform=", image: debian"))
    chosen, others = choose_scenarios([], folder)
    assert [one.name for one in chosen] == ["good", "slow"]
    assert [one.name for one in others] == ["bad"]
    assert choose_scenarios(["bad", "bad"], folder) == ([others[0]], [])
    with pytest.raises(UsageError, match="unknown scenario 'goood'") as caught:
        choose_scenarios(["goood"], folder)
    assert "did you mean good" in caught.value.hint


def test_the_tables(project):
    (project / "molecule/bad/molecule.yml").write_text(MOLECULE.format(platform=", image: debian"))
    failed = ScenarioResult("bad", steps={"converge": 1.0}, failure="ls: cannot access '/does-not-exist'")
    console = Console(width=120, record=True, file=(project / "out").open("w"))
    console.print(render_outcomes([failed], [scenario(project, "bad")]))
    console.print(render_scenarios([scenario(project, "good")]))
    text = console.export_text()
    for words in ("failed", "converge", "/does-not-exist", "not run", "--scenario bad", "What it proves."):
        assert words in text


def test_durations_of_the_last_test_are_those_that_passed(tmp_path):
    run = RunStore(tmp_path).create("test")
    rows = [{"scenario": "a", "state": "passed", "seconds": 3.0}, {"scenario": "b", "state": "failed"}]
    run.write_document({"scenarios": rows})
    assert RunStore(tmp_path).last_test_durations() == {"a": 3.0}


def test_the_command_lists_every_scenario():
    done = subprocess.run(
        [Path(sys.executable).parent / "invoke", "node.test", "--list", "--json"],
        cwd=ROOT,
        env={**os.environ, "GPUKILN_HOME": "/does-not-exist"},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = documents.read(done.stdout)["scenarios"]
    assert {one["name"] for one in listed} == {
        file.parent.name for file in ROOT.glob("molecule/*/molecule.yml")
    }
    assert all(one["title"] for one in listed)


def test_the_machines_of_the_scenarios_may_run_container_engines():
    tag = PRIVILEGED[1].partition("Tags=[")[2].removesuffix("]")
    assert tag in (ROOT / "molecule/shared/create.yml").read_text()
