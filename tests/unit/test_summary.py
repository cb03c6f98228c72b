"""What a run of the tests ends with: what was not run, and where the time went."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT

TESTS = {
    "unit/test_lint.py": "def test_linter(): pass",
    "unit/test_a.py": """
import time

import pytest


@pytest.fixture
def slow():
    time.sleep(0.6)
    yield
    time.sleep(0.6)


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
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = e2e\n")
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
    lines = [re.sub(r"\d+\.\d", "N", line).strip() for line in time.splitlines()[1:]]
    assert lines[:4] == [
        "N s  linters, 1 tests",
        "N s  unit, 4 tests",
        "N s  by the clock",
        "N s  tests/unit/test_a.py::test_slow",
    ]
    assert "test_fails" not in lines[4]
    assert "1 failed, 4 passed" in said  # test_the_next_one_has_its_own too
    [slow] = re.findall(r"([\d.]+) s  tests/unit/test_a.py::test_slow", time)
    assert 1.2 <= float(slow) < 10
