"""What is typed after `invoke`: help, the list of commands, what is typed wrong, and where results go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln import __version__
from gpukiln.catalog.load import ROOT
from gpukiln.cli.command import print_json, results
from gpukiln.cli.completion import SCRIPTS, complete
from gpukiln.cli.main import GPUKILN, INVOKE, NOUNS, command, main, names
from gpukiln.cli.streams import program
from gpukiln.commands.offer import OfferList
from gpukiln.options import options_of
from tests.support.exit_codes import invoke


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Run a command line; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))

    def run(line=""):
        with pytest.raises(SystemExit) as ended:
            invoke([*line.split()])
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return run


@pytest.mark.parametrize("line", ["", "-h", "--help", "--list", "-l"])
def test_without_a_command_the_commands_are_listed(typed, line):
    code, out, err = typed(line)
    assert (code, err) == (0, "")
    for name in names():
        [said] = [text for text in out.splitlines() if text.split()[:1] == [name]]
        assert command(name).__doc__.splitlines()[0] in said


def test_the_commands_of_one_noun_bear_their_names(typed):
    _, out, _ = typed("--list docker")
    assert [line.split()[0] for line in out.splitlines() if line] == names("docker")


def test_every_command_that_takes_words_behind_two_dashes_takes_all_of_them():
    takes = {name for name in names() if any(one.rest for one in options_of(command(name)))}
    assert takes == {"gpu.run", "k8s.job", "workspace.ssh"}


WITH_A_LETTER = ("gpu.env", "gpu.lease", "gpu.run")  # -n, how many GPUs


@pytest.mark.parametrize("name", names())
def test_h_is_help_and_no_other_option_has_a_letter(typed, name):
    code, shown, err = typed(f"{name} -h")
    assert (code, err) == (0, "")
    assert shown.startswith(f"Usage: invoke {name}")
    options = [line.split()[0].rstrip(",") for line in shown.splitlines() if line.startswith("  -")]
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
        ("docker", "unknown command 'docker'; valid: docker.build,", "`invoke --list docker` shows"),
        ("--list dokcer", "no command begins with 'dokcer'", "`invoke --list` lists them"),
        ("ami.plan --regoin x", "unknown option of ami.plan '--regoin'", "did you mean --region?"),
        ("ami.plan -r x", "unknown option of ami.plan '-r'", "`invoke ami.plan -h` lists"),
        ("ami.build --dry", "unknown option of ami.build '--dry'", "did you mean --dry-run?"),
        ("ami.show --jsno", "unknown option of ami.show '--jsno'", "did you mean --json?"),
        ("--lits", "unknown option '--lits'", "did you mean --list?"),
        ("ami.plan --region", "--region lacks its value", "`invoke ami.plan -h` lists"),
        ("ami.plan us-west-2", "ami.plan takes no argument 'us-west-2'", "`invoke ami.plan -h` lists"),
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
    completed = run("--complete", "--", "ami.plan", "--")
    assert "--region" in completed.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], "ami cloud docker gpu k8s node offer workspace project init config completion"),
        (["wor"], "workspace"),
        (["offer", ""], "check list refresh show size"),
        (["ami", "rele"], "release"),
        (["ami", "timings", "--"], "--help --last --json"),
        (["offer", "show", "--region"], "--regions --region"),
        (["gpu", "run", "--", ""], ""),
        (["x", "y", ""], "ami cloud docker gpu k8s node offer workspace project init config completion"),
    ],
)
def test_what_may_follow_is_completed(words, found):
    assert complete(words, GPUKILN) == found.split()


def test_bash_completes_by_asking_the_program(tmp_path):
    program = tmp_path / "gpukiln"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpukiln.cli.main "$@"\n')
    program.chmod(0o755)
    script = f"""{SCRIPTS["bash"].replace("PROGRAM", "gpukiln")}
        COMP_WORDS=(gpukiln offer s) COMP_CWORD=2; _gpukiln; echo "${{COMPREPLY[@]}}" """
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("show size\n", "")


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("offer lsit", 2, "error: unknown command 'offer lsit'\nnext: did you mean offer list?\n"),
        ("offer", 2, "`gpukiln --list offer` shows what each does"),
        ("ami plan --regoin x", 2, "unknown option of ami plan '--regoin'"),
        ("ami plan --region a --regions b", 2, "--regions is given twice"),
        ("ami show", 2, "ami show lacks BUILD"),
        ("completion csh", 2, "completion is for bash, zsh, fish, and csh is named"),
        ("offer show", 2, "next: gpukiln offer show g6.xlarge, for example"),
        ("offer.list --gpu T4:1 --regions nowhere", 2, "nowhere"),
    ],
)
def test_the_installed_program_says_how_its_commands_are_typed(capsys, line, code, told):
    assert main(line.split()) == code
    assert told in capsys.readouterr().err


def test_results_name_commands_as_they_are_typed(capsys, monkeypatch):
    monkeypatch.setattr(
        OfferList, "run", lambda _: results().print_text("`invoke ami.build --x` bakes; invoke --list")
    )
    assert main(["offer", "list"]) == 0
    assert capsys.readouterr().out == "`gpukiln ami build --x` bakes; gpukiln --list\n"
    assert main(["offer.list"], INVOKE) == 0
    assert capsys.readouterr().out == "`invoke ami.build --x` bakes; invoke --list\n"


def test_hints_in_json_name_commands_as_they_are_typed(capsys):
    for name, shown in ((GPUKILN, "gpukiln ami build --x"), (INVOKE, "invoke ami.build --x")):
        with program(name):
            print_json({"schema": "ami.build/1", "hint": "`invoke ami.build --x` builds"})
        document = json.loads(capsys.readouterr().out)
        assert document == {"schema": "ami.build/1", "hint": f"`{shown}` builds"}


def test_help_is_of_the_program_a_noun_or_a_command(capsys):
    shown = {}
    for line in ("--help", "offer --help", "offer list --help", "--version", "completion fish"):
        assert main(line.split()) == 0
        shown[line] = capsys.readouterr().out
    assert [line.split()[0] for line in shown["--help"].splitlines()[2 : 2 + len(NOUNS)]] == [*NOUNS]
    assert "  offer list      List every machine" in shown["offer --help"]
    assert shown["offer list --help"].startswith("Usage: gpukiln offer list [--OPTION...]\n")
    assert (
        "--hours NUMBER                hours a month that it runs (default: 730)"
        in shown["offer list --help"]
    )
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)[:12]
    assert shown["--version"] in {f"gpukiln {__version__}, commit {commit}{end}\n" for end in ("", "-dirty")}
    assert shown["completion fish"].startswith("complete -c gpukiln ")


def test_region_and_regions_are_one_option():
    for name in names():
        flags = {flag for one in options_of(command(name)) for flag in one.flags}
        assert ("--region" in flags) == ("--regions" in flags), name


def test_help_of_the_program_imports_no_command():
    code = (
        "import sys; from gpukiln.cli.main import main; main(['--help']);"
        "print(sorted(one for one in sys.modules if one.startswith('gpukiln.') and one.count('.') == 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(
        [
            "gpukiln.cli",
            *(f"gpukiln.{one}" for one in ("errors", "files", "options", "programs", "recipes", "units")),
        ]
    )
