"""Where the suite runs in two processes, what shares an image stays in one of them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_modules_that_share_an_image_run_in_one_process():
    modules = ["tests/e2e/test_build.py", "tests/e2e/test_rehearsal.py"]
    command = [sys.executable, "-m", "pytest", "-v", "--no-e2e", "-n2", "--dist=loadscope", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ran = set(re.findall(r"^\[(gw\d)\].* (tests/e2e/\w+\.py)::", done.stdout, re.MULTILINE))
    assert {module for _, module in ran} == set(modules), done.stdout
    assert len({worker for worker, _ in ran}) == 1  # two modules of two images get one each
