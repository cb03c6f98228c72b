"""What is typed after `invoke`: help, the list of commands, what is typed wrong, and where results go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.commands.program import COMMAND, Program
from tasks import namespace


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Run a command line; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))

    def run(line=""):
        with pytest.raises(SystemExit) as ended:
            Program(namespace).run(["invoke", *line.split()])
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return run


@pytest.mark.parametrize("line", ["", "-h", "--help", "--list", "-l"])
def test_without_a_command_the_commands_are_listed(typed, line):
    code, out, err = typed(line)
    assert (code, err) == (0, "")
    for name, task in namespace.task_names.items():
        assert task == []
        [said] = [text for text in out.splitlines() if text.split()[:1] == [name]]
        assert namespace[name].__doc__.splitlines()[0] in said


def test_the_commands_of_one_noun_bear_their_names(typed):
    _, out, _ = typed("--list docker")
    names = [line.split()[0] for line in out.splitlines() if line]
    assert names == sorted(name for name in namespace.task_names if name.startswith("docker."))


def test_every_command_that_takes_words_behind_two_dashes_takes_all_of_them():
    takes = {}
    for name in namespace.task_names:
        for argument in namespace[name].get_arguments():
            if argument.name == COMMAND:
                takes[name] = argument.kind
    assert set(takes) == {"gpu.run", "k8s.job", "workspace.ssh"}
    assert set(takes.values()) == {list}


WITH_A_LETTER = ("gpu.env", "gpu.lease", "gpu.run")  # -n, how many GPUs


@pytest.mark.parametrize("name", sorted(namespace.task_names))
def test_h_is_help_and_no_other_option_has_a_letter(typed, name):
    code, shown, err = typed(f"{name} -h")
    assert (code, err) == (0, "")
    assert shown.startswith(f"Usage: invoke {name}")
    options = [line.split()[0] for line in shown.splitlines() if line.startswith("  -")]
    assert [one for one in options if one[:2] != "--"] == ["-n"] * (name in WITH_A_LETTER)
    for line in (f"-h {name}", f"--help {name}", f"{name} --help"):
        assert typed(line) == (0, shown, "")


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("ami.pln", "unknown command 'ami.pln'", "did you mean ami.plan?"),
        ("ami.pln -h", "unknown command 'ami.pln'", "did you mean ami.plan?"),
        ("-h ami.pln", "unknown command 'ami.pln'", "did you mean ami.plan?"),
        ("xyzzy", "unknown command 'xyzzy'", "`invoke --list` lists them"),
        ("docker", "unknown command 'docker'; valid: docker.build,", "`invoke --list docker` says"),
        ("--list dokcer", "no command begins with 'dokcer'", "`invoke --list` lists them"),
        ("ami.plan --regoin x", "unknown option of ami.plan '--regoin'", "did you mean --region?"),
        ("ami.plan -r x", "unknown option of ami.plan '-r'", "`invoke ami.plan -h` shows"),
        ("ami.build --dry", "unknown option of ami.build '--dry'", "did you mean --dry-run?"),
        ("ami.show --jsno", "unknown option of ami.show '--jsno'", "did you mean --json?"),
        ("--lits", "unknown option '--lits'", "did you mean --list?"),
        ("ami.plan --region", "--region lacks its value", "`invoke ami.plan -h` shows"),
        ("ami.plan us-west-2", "ami.plan takes no argument 'us-west-2'", "`invoke ami.plan -h` shows"),
        ("ami.show", "ami.show lacks BUILD\n  BUILD: build id, AMI id or `last`", "`invoke ami.show -h`"),
        ("ami.plan --region us-west-22", "unknown region 'us-west-22'", "did you mean us-west-2?"),
    ],
)
def test_what_is_typed_wrong_ends_with_2_and_names_what_is_near(typed, line, error, hint):
    code, out, err = typed(line)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {error}")
    assert f"\nnext: {hint}" in err


def test_another_number_is_no_slip_of_the_hand(typed):
    code, _, err = typed("ami.plan --region us-west-2 --set nvidia_driver.branch=591")
    assert code == 2
    assert "unknown driver branch '591'" in err
    assert "did you mean" not in err


@pytest.mark.parametrize(
    "program",
    [
        [sys.executable, str(ROOT / "tasks.py")],
        [str(Path(sys.executable).parent / "invoke")],
        [sys.executable, "-m", "invoke"],
    ],
)
def test_every_way_to_start_is_the_same_program(tmp_path, program):
    def run(*words):
        return subprocess.run(
            [*program, *words],
            cwd=ROOT,
            env={**os.environ, "GPUKILN_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run().stdout.startswith("Usage: invoke COMMAND")
    wrong = run("ami.lst")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: unknown command 'ami.lst'\nnext: did you mean ami.list?\n",
    )
    assert json.loads(run("ami.bases", "--json").stdout)["schema"] == "ami.bases/1"
    completed = run("--complete", "--", "invoke ami.plan --")
    assert "--region" in completed.stdout.splitlines()
