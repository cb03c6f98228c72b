"""scripts/run itself, on machines made of stubs: what it says, installs and answers."""

import os
import shutil
import signal
import subprocess
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run"
REAL_TOOLS = (
    *("bash", "cat", "cp", "env", "flock", "grep", "ls", "mkdir", "mv"),
    *("readlink", "rm", "sed", "sha256sum", "sleep", "tail"),
)
PACKAGES = [
    line.split()[0]
    for line in (ROOT / "scripts" / "system-packages").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]

# Stands in for python3: makes an "environment" that holds itself, and a pip that notes its arguments.
PYTHON = """
echo "$0 $*" >>"$CALLS"
[ "$1" != -I ] || shift
case "$1 $2" in
  "-c import sys"*) exit ${OLD_PYTHON:-0} ;;
  "-c import ens"*) exit ${NO_VENV:-0} ;;
  "--version "*) echo "Python 3.9.2" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python3" ;;
  "-m pip") sleep ${PIP_SLEEP:-0}; echo "pip was here"; exit ${PIP_STATUS:-0} ;;
esac
"""


@dataclass
class Machine:
    """A PATH of stubs, and the environment's folder."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def stub(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/bash\n{textwrap.dedent(body)}")
        path.chmod(0o755)

    def environment(self, **settings: str) -> dict[str, str]:
        return {
            "PATH": str(self.folder / "bin"),
            "HOME": str(self.folder),
            "CALLS": str(self.folder / "calls"),
            "GPUKILN_VENV": str(self.venv),
            "GPUKILN_PYTHON": str(self.folder / "bin" / "python3"),
            **self.settings,
            **settings,
        }

    def run(self, *command: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *command],
            env=self.environment(**settings),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Debian machine with every package, as root."""
    (tmp_path / "bin").mkdir()
    for tool in REAL_TOOLS:
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is not on PATH")
        (tmp_path / "bin" / tool).symlink_to(found)
    made = Machine(tmp_path)
    made.stub("python3", PYTHON)
    made.stub("uname", "echo Linux")
    made.stub("id", 'case $1 in -u) echo "${FAKE_UID:-0}" ;; *) echo someone ;; esac')
    made.stub("dpkg", "exit 0")
    made.stub("apt-get", 'echo "apt-get $*" >>"$CALLS"; echo "E: told to fail" >&2; exit ${APT_STATUS:-0}')
    made.stub("apt-cache", '[ "$3" != "${UNKNOWN-}" ]')
    made.stub(
        "dpkg-query",
        """
        shift 2
        shift
        for name in "$@"; do [ "$name" = "${LACKS-}" ] || echo "$name installed"; done
        """,
    )
    return made


def test_without_a_command_it_prints_usage(machine: Machine) -> None:
    answer = machine.run()
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "Usage: scripts/run COMMAND" in answer.stderr


def test_help_is_an_answer_not_an_error(machine: Machine) -> None:
    answer = machine.run("--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Usage: scripts/run COMMAND" in answer.stdout
    assert not machine.calls


def test_an_unknown_option_is_not_taken_for_a_command(machine: Machine) -> None:
    answer = machine.run("--verbose")
    assert answer.returncode == 2
    assert "unknown option '--verbose'" in answer.stderr


def test_first_call_makes_the_environment_and_the_second_does_nothing(machine: Machine) -> None:
    first = machine.run("bash", "-c", "echo ran")
    assert (first.returncode, first.stdout) == (0, "ran\n"), first.stderr
    assert "installing" in first.stderr
    assert any("--require-hashes" in call for call in machine.calls)
    before = machine.calls
    second = machine.run("bash", "-c", "echo ran")
    assert (second.returncode, second.stdout, second.stderr) == (0, "ran\n", "")
    assert machine.calls == before


def test_command_gets_path_configuration_directory_and_status(machine: Machine, tmp_path: Path) -> None:
    machine.run("bash", "-c", ":")
    show = 'echo "${PATH%%:*} $ANSIBLE_CONFIG $PWD"; exit 7'
    inside = machine.run("bash", "-c", show, cwd=ROOT / "scripts")
    assert inside.returncode == 7
    assert inside.stdout.split() == [
        f"{machine.venv}/bin",
        f"{ROOT}/ansible.cfg",
        f"{ROOT}/scripts",
    ]
    outside = machine.run("bash", "-c", show, cwd=tmp_path)
    assert outside.stdout.split()[-1] == str(ROOT)


def test_a_command_of_gpukiln_runs_in_the_callers_directory(machine: Machine, tmp_path: Path) -> None:
    machine.run("bash", "-c", ":")
    program = Path(machine.venv) / "bin" / "gpukiln"
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    assert machine.run("gpukiln", cwd=tmp_path).stdout == f"{tmp_path}\n"


def test_works_through_a_symlink(machine: Machine, tmp_path: Path) -> None:
    link = tmp_path / "kiln"
    link.symlink_to(os.path.relpath(SCRIPT, tmp_path))
    answer = subprocess.run(
        [str(link), "bash", "-c", "echo $PWD"],
        env=machine.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.stdout.strip() == str(ROOT), answer.stderr


def test_root_gets_the_missing_packages_installed(machine: Machine) -> None:
    answer = machine.run("bash", "-c", ":", LACKS="mmdebstrap")
    assert answer.returncode == 0
    assert "installing 1 system packages: mmdebstrap" in answer.stderr
    installs = [call for call in machine.calls if "apt-get" in call and " install " in call]
    assert installs == [
        "apt-get -o DPkg::Lock::Timeout=600 install --yes --no-install-recommends mmdebstrap",
    ]


def test_nothing_missing_means_no_apt(machine: Machine) -> None:
    machine.run("bash", "-c", ":")
    assert not [call for call in machine.calls if call.startswith("apt-get")]


def test_a_package_that_apt_does_not_have_is_named_and_the_rest_goes_on(machine: Machine) -> None:
    answer = machine.run("bash", "-c", "echo ran", LACKS="mmdebstrap", UNKNOWN="mmdebstrap")
    assert (answer.returncode, answer.stdout) == (0, "ran\n")
    assert "apt knows no package here for: mmdebstrap" in answer.stderr


def test_a_tool_from_elsewhere_is_not_missing(machine: Machine) -> None:
    machine.stub("packer", "exit 0")
    answer = machine.run("bash", "-c", ":", LACKS="packer")
    assert answer.returncode == 0
    assert "packer" not in answer.stderr


def test_without_root_the_exact_line_is_printed_and_the_command_runs(machine: Machine) -> None:
    answer = machine.run("bash", "-c", "echo ran", FAKE_UID="1000", LACKS="slirp4netns")
    assert (answer.returncode, answer.stdout) == (0, "ran\n")
    assert "sudo apt-get update && sudo apt-get install --no-install-recommends slirp4netns" in answer.stderr
    assert "works without them" in answer.stderr
    again = machine.run("bash", "-c", "echo ran", FAKE_UID="1000", LACKS="slirp4netns")
    assert "slirp4netns" in again.stderr, "what is still missing is said each time"


def test_without_root_and_nothing_missing_it_says_what_needs_root_once(machine: Machine) -> None:
    first = machine.run("bash", "-c", ":", FAKE_UID="1000")
    assert "needs root" in first.stderr
    assert machine.run("bash", "-c", ":", FAKE_UID="1000").stderr == ""


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_without_apt_it_lists_the_tools_and_still_runs(machine: Machine, system: str) -> None:
    (machine.folder / "bin" / "apt-get").unlink()
    machine.stub("uname", f"echo {system}")
    answer = machine.run("bash", "-c", "echo ran")
    assert (answer.returncode, answer.stdout) == (0, "ran\n")
    assert f"this machine has no apt (found: {system})" in answer.stderr
    assert " ".join(PACKAGES) in answer.stderr
    assert ("needs Linux" in answer.stderr) == (system == "Darwin")


def test_an_old_python_is_named(machine: Machine) -> None:
    answer = machine.run("bash", "-c", ":", OLD_PYTHON="1")
    assert answer.returncode == 4
    assert "wanted 3.11 or later" in answer.stderr
    assert "is Python 3.9.2" in answer.stderr


def test_a_python_without_venv_is_named(machine: Machine) -> None:
    answer = machine.run("bash", "-c", ":", NO_VENV="1")
    assert answer.returncode == 4
    assert "lacks the venv module" in answer.stderr


@pytest.mark.parametrize(
    ("failure", "said"), [("APT_STATUS", "told to fail"), ("PIP_STATUS", "pip was here")]
)
def test_a_failed_installation_shows_the_logs_tail_and_path(
    machine: Machine, failure: str, said: str
) -> None:
    answer = machine.run("bash", "-c", "echo ran", LACKS="fdisk", **{failure: "3"})
    assert (answer.returncode, answer.stdout) == (4, "")
    assert said in answer.stderr
    assert "failed (exit 3)" in answer.stderr
    assert f"full log: {machine.venv}.setup/logs/setup.log" in answer.stderr
    repaired = machine.run("bash", "-c", "echo ran")
    assert (repaired.returncode, repaired.stdout) == (0, "ran\n")


def start(machine: Machine, **settings: str) -> subprocess.Popen[str]:
    """Starts a first call and returns once its pip runs."""
    process = subprocess.Popen(
        # A parent that ignores Ctrl-C hands that on, and a shell can't trap what it was told to ignore.
        ["env", "--default-signal=INT", str(SCRIPT), "bash", "-c", "echo ran"],
        env=machine.environment(**settings),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 30
    while not any(" -m pip " in call for call in machine.calls):
        assert time.monotonic() < until, "pip was never started"
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_installation_is_not_taken_for_complete(machine: Machine, how: signal.Signals) -> None:
    process = start(machine, PIP_SLEEP="3")
    (os.kill if how == signal.SIGKILL else os.killpg)(process.pid, how)
    stdout, stderr = process.communicate(timeout=30)
    assert stdout == ""
    if how != signal.SIGKILL:
        assert process.returncode == 128 + how
        assert "interrupted during the installation" in stderr
    before = len(machine.calls)
    again = machine.run("bash", "-c", "echo ran")
    assert again.stdout == "ran\n"
    assert any(" -m pip " in call for call in machine.calls[before:]), "it is installed again from the start"


def test_a_second_call_waits_for_the_first_and_says_so(machine: Machine) -> None:
    process = start(machine, PIP_SLEEP="2")
    second = machine.run("bash", "-c", "echo second")
    assert "another call is installing" in second.stderr
    assert second.stdout == "second\n"
    assert process.communicate(timeout=30)[0] == "ran\n"
    assert sum(" -m pip " in call for call in machine.calls) == 1


@pytest.mark.parametrize("spoil", ["moved", "list", "interpreter"])
def test_what_the_stamp_stands_for_is_looked_at(machine: Machine, spoil: str) -> None:
    machine.run("bash", "-c", ":")
    stamp = machine.venv / ".setup-python"
    key, interpreter = stamp.read_text().splitlines()
    stale = {
        "moved": f"{key}-elsewhere\n{interpreter}\n",
        "list": f"0{key[1:] if key[0] != '0' else '1' + key[1:]}x\n{interpreter}\n",
        "interpreter": f"{key}\n/nowhere/python3.10\n",
    }
    stamp.write_text(stale[spoil])
    assert "installing" in machine.run("bash", "-c", ":").stderr
    assert machine.run("bash", "-c", ":").stderr == ""
