"""What a runner's image is asked for: what went with it, what a job may change, and what its programs say."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.probe import runner

pytestmark = pytest.mark.usefixtures("nothing_hangs")
Program = Callable[[str, str], Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes a program of the image, a shell script that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


def test_somebodys_account_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if runner.SECRET_NAME.search(name):
            monkeypatch.delenv(name)
    assert runner.credentials(str(tmp_path)) == []
    texts = {
        ".netrc": "machine a\n",
        ".ssh/id_ed25519": "a key\n",
        ".config/pip/pip.conf": "index-url = https://me:secret@pypi.example.com/simple\n",
        "work/.env": f"key = {'AKIA' + 'B' * 16}\n",
        "bin/test.pem": "-----BEGIN " + "PRIVATE KEY-----\n",  # of the runner's own tests
        "work/notes": "https://pypi.example.com/simple\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("SOME_TOKEN", "x")
    monkeypatch.setenv("OTHER_TOKEN", "")
    wanted = [".netrc", ".ssh/id_ed25519", ".config/pip/pip.conf", "work/.env"]
    assert runner.credentials(str(tmp_path)) == sorted(
        ["$SOME_TOKEN", *(f"{tmp_path}/{name}" for name in wanted)]
    )


def test_a_cache_that_everybody_may_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path))
    told = f"{tmp_path} (by everybody)"
    tmp_path.chmod(0o2775)
    assert told not in runner.writable_paths()
    tmp_path.chmod(0o2775 | stat.S_IWOTH)
    assert told in runner.writable_paths()


def test_a_hook_is_run_as_the_actions_runner_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bash -e, and with a folder for its files."""
    started, completed = runner.HOOKS
    well, wrong = tmp_path / "well.sh", tmp_path / "wrong.sh"
    well.write_text('[ -d "$RUNNER_TEMP" ] && echo ready')
    wrong.write_text("false\necho never\n")
    monkeypatch.setenv(started, str(well))
    monkeypatch.setenv(completed, str(wrong))
    assert runner.hooks() == {
        started: {"path": str(well), "rc": 0, "out": "ready\n"},
        completed: {"path": str(wrong), "rc": 1, "out": ""},
    }


def test_versions_are_the_line_that_names_them(program: Program) -> None:
    program("nvcc", "echo 'Cuda compiler driver'; echo 'Cuda compilation tools, release 12.2, V12.2.140'")
    program("cmake", "echo; echo 'cmake version 3.25.1'")
    program("ninja", "echo no >&2; exit 3")
    assert runner.first_line(("nvcc", "--version"))["out"].endswith("release 12.2, V12.2.140")
    assert runner.first_line(("cmake", "--version")) == {"rc": 0, "out": "cmake version 3.25.1"}
    assert runner.first_line(("ninja", "--version")) == {"rc": 3, "out": "no"}


def test_a_second_compilation_is_counted_by_ccache(program: Program, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program(
        "ccache",
        f"""
        echo "$1 $2" >>{calls}
        [ "$1" = --print-stats ] || exit 0
        printf 'cache_miss\\t1\\ndirect_cache_hit\\t0\\npreprocessed_cache_hit\\t1\\n'
        """,
    )
    found = runner.ccache()
    assert (found["rc"], found["hits"], found["misses"]) == ([0, 0, 0], 1, 1)
    assert calls.read_text().splitlines() == ["--zero-stats ", "gcc -c", "gcc -c", "--print-stats "]


def test_packages_of_a_python_that_does_not_start(program: Program) -> None:
    program("python3", "echo broken >&2; exit 2")
    found = runner.python_packages()
    assert found == {"check": {"rc": 2, "out": "broken"}, "installed": {}, "imports": {"python3": "broken"}}


def test_the_actions_runner_is_there_when_it_can_be_started(tmp_path: Path) -> None:
    assert runner.actions_runner(str(tmp_path))["present"] is False
    (tmp_path / "run.sh").touch(mode=0o755)
    (tmp_path / "bin").mkdir()
    listener = tmp_path / "bin/Runner.Listener"
    listener.write_text("#!/bin/sh\necho 2.330.0\n")
    listener.chmod(0o755)
    assert runner.actions_runner(str(tmp_path)) == {"present": True, "rc": 0, "version": "2.330.0"}
