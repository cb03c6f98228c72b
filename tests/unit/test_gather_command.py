"""The command that gathers a machine's facts, as it is sent there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.probe.packing import NO_PYTHON, facts_in, gather_command
from tests.doubles.nvml_machine import made_up_machine
from tests.support import nvml_double

ARGUMENT_MAX = 120 << 10  # bytes; Linux ends at 128 KiB, and ssh and sudo come on top


def test_the_command_fits_into_one_argument() -> None:
    assert len(gather_command().encode()) < ARGUMENT_MAX


def test_no_shell_and_no_template_changes_the_command() -> None:
    command = gather_command("node", "0123abcd", 60)
    assert command.endswith("' node 0123abcd 60")
    body = command.partition("python3 -c '")[2].rpartition("'")[0]
    assert "'" not in body
    assert "{" not in command, "Ansible would take it for a template"
    assert "\\" not in command
    packed = next(line for line in body.splitlines() if line.startswith("t="))
    assert not set("$`!%#") & set(packed.partition(".translate")[0])


def test_the_bindings_sent_along_read_nvml_with_no_package_installed(tmp_path: Path) -> None:
    """As on the judged machine: the interpreter sees neither this checkout nor its environment."""
    code = gather_command().partition("python3 -c '")[2].rpartition("'")[0]
    lines = [line for line in code.splitlines() if not line.startswith("exec(S[")]
    lines += [
        "import json, sys",
        "from gpukiln.probe.nvml import nvml_facts",
        "before = 'pynvml' in sys.modules",
        "print(json.dumps([before, nvml_facts([]), nvml_facts([{'address': '0000:00:1e.0'}])]))",
    ]
    spec = tmp_path / "spec"
    nvml.write_state(spec, made_up_machine())
    env = nvml.environment(nvml_double.build(tmp_path), spec)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "\n".join(lines)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, made_up_machine(0), made_up_machine()]


def test_what_the_login_shell_prints_is_not_taken_for_facts(tmp_path: Path) -> None:
    """As ~/.bashrc of a user who logs in by ssh, which bash reads there too."""
    noise = tmp_path / "bashrc"
    noise.write_text('echo "welcome to {gpu-1}"; trap "echo bye" EXIT; printf "no line end"\n')
    mark = "0123456789abcdef"
    done = subprocess.run(
        ["bash", "-c", gather_command("runner", mark, 0)],
        env={**os.environ, "BASH_ENV": str(noise)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("welcome")
    facts = json.loads(facts_in(done.stdout, mark))
    assert facts["schema"] == 1
    assert facts["cuda"] == {"_not_reached": "the 0 s that gathering facts may take were up"}
    with pytest.raises(ValueError, match="no facts"):
        facts_in(done.stdout, "fedcba9876543210")


def test_without_python_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", gather_command("node", "0123", 60)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (NO_PYTHON, "python3: not found\n")
