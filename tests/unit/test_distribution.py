"""Where the suite runs in several processes, what shares an image or a machine stays in one of them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def who_ran(*modules):
    """Pairs of a process and the name of a test."""
    command = [sys.executable, "-m", "pytest", "-v", "--no-e2e", "-n3", "--dist=loadscope", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^\[(gw\d)\].* (tests/e2e/\w+\.py::\S+)", done.stdout, re.MULTILINE))


def test_the_modules_that_share_an_image_run_in_one_process():
    modules = ["tests/e2e/test_build.py", "tests/e2e/test_rehearsal.py"]
    ran = who_ran(*modules)
    assert {test.partition("::")[0] for _, test in ran} == set(modules)
    assert len({worker for worker, _ in ran}) == 1  # two modules of two images get one each


def test_each_machine_of_a_module_is_in_one_process_and_they_are_apart():
    ran = who_ran("tests/e2e/test_runtime_platforms.py")
    machines = {(worker, test[test.index("[") :]) for worker, test in ran}
    assert len(machines) == len({worker for worker, _ in machines}) == 3
