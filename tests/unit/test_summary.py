"""What a run of the tests ends with: what was not run, and where the time went."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from tests import processor

TESTS = {
    "unit/test_lint.py": "def test_linter(): pass",
    "unit/test_a.py": """
import os
import subprocess
import time

import pytest


@pytest.fixture
def slow():
    time.sleep(0.6)
    yield
    time.sleep(0.6)
    subprocess.run(["sh", "-c", "(dd if=/dev/zero of=/dev/null bs=1M count=20000 2>/dev/null; touch done) &"])
    while not os.path.exists("done"):
        time.sleep(0.05)


def test_slow(slow): pass
def test_fails(): assert False
def test_skipped(): pytest.skip("no GPU")
""",
    "unit/test_input.py": """
import os


def test_leaves_it_as_a_killed_ssh_does(): os.set_blocking(0, False)
def test_the_next_one_has_its_own(): assert os.get_blocking(0)
""",
    "e2e/test_b.py": "def test_machine(): pass",
}


@pytest.fixture(params=["0", "2"], ids=["one process", "two processes"])
def said(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    for name, text in TESTS.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in ("conftest.py", "folders.py", "processor.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = e2e\npythonpath = .\n")
    command = [sys.executable, "-m", "pytest", "-n", request.param, "--no-e2e", "tests"]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_run_tells_what_it_left_out_and_where_its_time_went(said: str) -> None:
    not_run, _, time = said.partition(" not run =")[2].partition(" time =")
    assert re.search(r"left out by --no-e2e  \(1\)\n {4}tests/e2e/test_b.py::test_machine\n", not_run)
    assert re.search(r"no GPU  \(1\)\n {4}tests/unit/test_a.py::test_skipped\n", not_run)
    lines = [" ".join(re.sub(r"\d+\.\d", "N", line).split()) for line in time.splitlines()[1:]]
    assert lines[:4] == [
        "clock processor",
        "N s N s linters, 1 tests",
        "N s N s unit, 4 tests",
        "N s N s altogether",
    ]
    assert "test_fails" not in time.partition("short test summary")[0]
    assert "1 failed, 4 passed" in said  # test_the_next_one_has_its_own too
    [(slow, used)] = re.findall(r"([\d.]+) s +([\d.]+) s  tests/unit/test_a.py::test_slow", time)
    assert 1.2 <= float(slow) < 10
    assert 0.1 <= float(used) < 10  # what its child computed, a grandchild that lost its parent included


def test_what_the_kernel_notes_of_processes_is_read() -> None:
    """Records of `python3 -c ...` and of the shell that started it, in the form of Linux 6.18 (acct_v3)."""
    python, shell = (
        processor.RECORD.pack(0, 3, 0, 0, 0, 0, number, parent, 0, 1.0, user, system, *[0] * 6, name)
        for number, parent, user, system, name in (
            (71, 70, 0x2000 | 50, 7, b"python3"),
            (70, 60, 1, 0, b"sh"),
        )
    )
    noted = python + shell
    assert list(processor.records(noted + b"cut")) == [(71, 70, 4.07, "python3"), (70, 60, 0.01, "sh")]
    assert processor.kinds(noted, {60}) == {"Python": 4.07, "other": 0.01}
    assert processor.kinds(noted, {99}) == {}


def test_the_accounting_of_another_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.ACCOUNTED, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(processor, "OTHERS_ACCOUNT", (tmp_path / "pacct",))
    (tmp_path / f"gpukiln-tests-{2**30}-a.acct").touch()  # of a run that was killed
    assert processor.may_account(tmp_path)
    (other := tmp_path / f"gpukiln-tests-{os.getpid()}-a.acct").touch()
    assert not processor.may_account(tmp_path)
    other.unlink()
    (tmp_path / "pacct").touch()
    assert not processor.may_account(tmp_path)


def test_a_test_that_replaces_how_files_are_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = processor.group()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: "Character devices:")
        patch.setattr(Path, "exists", lambda _: True)
        assert processor.used(group) > 0


def test_the_budget_is_of_a_whole_run_on_a_quiet_computer(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_a(): sum(range(10**6))")
    for name in ("conftest.py", "folders.py", "processor.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    over = {}
    for given, python_start_s in (((), 1.0), (("tests",), 1.0), ((), 1e-9)):
        (tmp_path / "pyproject.toml").write_text(
            '[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["."]\nmarkers = ["e2e"]\n'
            f"[tool.gpukiln.tests]\nprocessor_s = 0.001\npython_start_s = {python_start_s}\n"
        )
        command = [sys.executable, "-m", "pytest", *given]
        done = subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        over[given, python_start_s] = re.findall(
            r"over budget: \d+ s of a processor, 0 s in pyproject.toml", done.stdout
        )
        assert re.search(
            r"on a quiet computer: a start of Python took [\d.]+ ms, there [\d.]+ ms", done.stdout
        )
    assert [len(lines) for lines in over.values()] == [1, 0, 0]
