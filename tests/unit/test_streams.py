"""Standard output that is closed, full or read by nobody: told in one line, with the right code."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.cli.command import exit_code_of

CLOSED = "error: standard output is closed\n"
FULL = "error: standard output can't be written: No space left on device\n"


@pytest.mark.parametrize(
    ("redirected", "code", "told"),
    [
        (">/dev/full", 4, FULL),
        (">&-", 4, CLOSED),
        ("| head -n 1", 0, ""),
        ("2>&1 | true", 0, ""),
        ("2>/dev/full >/dev/null", 0, ""),
        ("2>&- >/dev/null", 0, ""),
        (">&- 2>&-", 4, ""),
    ],
)
def test_what_can_not_be_written_is_told(tmp_path: Path, redirected: str, code: int, told: str) -> None:
    # says something to both, and prints more than a pipe holds
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from gpukiln.cli import main\n"
        "from gpukiln.cli.command import Command, print_json, say\n"
        "class Work(Command):\n"
        "    def run(self):\n"
        "        say('working')\n        print_json(['x' * 100] * 10_000)\n        say('worked')\n"
        "main.command = lambda _: Work\n"
        "sys.exit(main.main(['ami', 'list']))\n"
    )
    script = f"set -o pipefail; {sys.executable} program.py {redirected}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert told in done.stderr
    assert ("error" in done.stderr) is bool(told)
    assert "cloud.clean" not in done.stderr


def test_a_pipe_to_something_else_that_breaks_is_a_failure(capsys):
    """Only the end of who reads standard output is none."""

    def work():
        raise BrokenPipeError(32, "Broken pipe")

    assert exit_code_of(work) == 4
    assert "Broken pipe" in capsys.readouterr().err
