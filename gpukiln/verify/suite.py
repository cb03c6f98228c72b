"""Runs tests/host on a machine, in a process of its own, and returns the verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gpukiln import recipes
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.files import open_private
from gpukiln.parsing import parse_json
from gpukiln.typed import load
from gpukiln.verify.checks import LAYERS, PROFILES
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import CheckResult, Verdict

ROOT = recipes.root()
SUITE = ROOT / "tests" / "host"
COMPLETED = (0, 1)  # pytest: all passed, some failed
# Short enough for results to appear at once, long enough to need no processor.
POLL_S = 0.1
MAX_SECONDS = 1800.0
# Parts of max_seconds: for checks and reports after the facts; for stopping all processes.
REPORT_S, STOP_S = 8.0, 1.0
GATHERING = "gathering facts"


def run_suite(
    target: Target,
    *,
    profile: str,
    out_dir: Path,
    on_check: Callable[[CheckResult], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    layers: Sequence[str] = (),
    require: Sequence[str] = (),
    expect_gpus: int | None = None,
    instance_type: str = "",
    simulated: bool = False,
    max_seconds: float = MAX_SECONDS,
) -> Verdict:
    """Verify a machine.

    Args:
        target: The machine; sshd must answer.
        profile: Key of `checks.PROFILES`.
        out_dir: Folder for report.html, results.json, facts.json, junit.xml, checks.jsonl and verify.log;
            made if missing.
        on_check: Called with each result as it comes.
        on_start: Called with the current activity: gathering the facts, or a check's title.
        layers: Only these layers; empty means all.
        require: Layers in which a check that is not run counts as failed.
        expect_gpus: GPUs that the machine must have; None takes the profile's number.
        instance_type: EC2's type of the machine, for the verdict.
        simulated: Whether simulated GPUs are verified, as far as possible; no release accepts the verdict.
        max_seconds: Seconds within which this returns, whatever hangs. Checks whose facts are missing then
            are not reached.

    Returns:
        The verdict; a failed check raises nothing.

    Raises:
        UsageError: The profile or a layer is unknown.
        UnavailableError: The machine can't be reached, or the suite itself failed or took too long.
    """
    _require_known("profile", [profile], list(PROFILES))
    _require_known("layer", [*layers, *require], list(LAYERS))
    if not SUITE.is_dir():
        raise UnavailableError(f"the host suite is missing: {SUITE}", hint="install gpukiln again")
    # With a very small limit the facts still get half of it.
    reserve_s = min(REPORT_S, max_seconds / 2)
    out_dir = out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    out_dir.chmod(0o700)  # evidence may have names and addresses of the machine: only for this user
    log, events = out_dir / "verify.log", out_dir / "checks.jsonl"
    # An interrupted run must not show the results of the last one.
    for stale in (events, *(out_dir / name for name in ("results.json", "report.html", "junit.xml"))):
        stale.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpukiln-verify-") as scratch:
        config = Path(scratch) / "ssh_config"
        config.write_text(target.ssh_config(), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(SUITE),
            "-q",
            "--tb=short",
            "-p",
            "testinfra.plugin",
            "-p",
            # The suite may lie in an installed wheel, where pytest can't write its cache.
            "no:cacheprovider",
            "-o",
            # The addopts of this project's pyproject.toml are for its own tests.
            "addopts=",
            "--rootdir",
            str(ROOT),
            # pytest's default folder is shared by all runs of a user, and its oldest entries are removed.
            f"--basetemp={scratch}/pytest",
            f"--hosts={target.hostspec}",
            f"--ssh-config={config}",
            f"--profile={profile}",
            f"--gpukiln-report={out_dir}",
            f"--gpukiln-target={target.name}",
            *(f"--layer={x}" for x in layers),
            *(f"--require={x}" for x in require),
            *([f"--gpukiln-instance-type={instance_type}"] if instance_type else []),
            *([] if expect_gpus is None else [f"--expect-gpus={expect_gpus}"]),
            *(["--simulated"] if simulated else []),
            f"--gpukiln-until={time.time() + max_seconds - reserve_s:.3f}",
        ]
        status, last = _run(command, log, _EventReader(events, on_check, on_start), max_seconds - STOP_S)
    if last.get("event") == "unreachable":
        raise UnavailableError(
            f"{target.name} can't be verified: {last['message']}",
            hint=f"{target.address} needs python3 and passwordless sudo; see {log}",
        )
    if status is None:
        raise UnavailableError(
            f"{target.name} can't be verified: the host suite did not end within {max_seconds:.0f} s; "
            f"last: {last.get('id', last.get('event', 'nothing'))}",
            hint=f"see {log}",
        )
    if status not in COMPLETED:
        raise UnavailableError(
            f"the host suite itself failed: pytest exits with {status}, wanted 0 or 1",
            hint=f"see {log}",
            details=_tail(log),
        )
    try:
        document = parse_json((out_dir / "results.json").read_text(encoding="utf-8"))
        return load(Verdict, document, where="results.json")
    except (OSError, ValueError, UsageError) as error:
        raise UnavailableError(f"the host suite wrote no verdict: {error}", hint=f"see {log}") from error


def _require_known(what: str, given: list[str], choices: list[str]) -> None:
    for value in given:
        if value not in choices:
            raise UsageError(f"{what} {value!r} is unknown, wanted one of {', '.join(choices)}")


class _EventReader:
    """Reads the events while the suite writes them, and calls `on_check` and `on_start`."""

    def __init__(
        self,
        path: Path,
        on_check: Callable[[CheckResult], None] | None,
        on_start: Callable[[str], None] | None,
    ) -> None:
        self.path, self.on_check, self.on_start = path, on_check, on_start
        self.offset = 0
        self.last: dict[str, Any] = {}

    def poll(self) -> None:
        """Process the new complete lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        # The last line may be written only in part.
        whole = data.rfind(b"\n") + 1
        self.offset += whole
        for line in data[:whole].splitlines():
            self._dispatch(parse_json(line))

    def _dispatch(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind != "end":
            self.last = event
        if kind == "gather_start" and self.on_start:
            self.on_start(GATHERING)
        elif kind == "check_start" and self.on_start:
            self.on_start(event["title"])
        elif kind == "check_end" and self.on_check:
            fields = {k: event[k] for k in CheckResult.__dataclass_fields__}
            self.on_check(TypeAdapter(CheckResult).validate_python(fields))


def _run(
    command: list[str], log: Path, follow: _EventReader, timeout_s: float
) -> tuple[int | None, dict[str, Any]]:
    """Run the command in a process group of its own, which ends with this call.

    Returns:
        The exit status, None after a timeout; and the last event.
    """
    # PYTEST_ADDOPTS and PYTEST_PLUGINS of an outer pytest would change this one.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    # What else is installed has no part in it, and takes a second to import.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The suite may belong to root, and a checkout stays clean.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])  # ansible
    deadline = time.monotonic() + timeout_s
    with open_private(log) as file:
        child = subprocess.Popen(  # not by `programs`: the events are polled while it runs
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C then reaches only gpukiln, which ends the group in order.
            start_new_session=True,
            umask=0o077,
        )
        try:
            while child.poll() is None and time.monotonic() < deadline:
                follow.poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
            status = child.poll()
        finally:
            _stop(child)
    follow.poll()
    return status, follow.last


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the process group: pytest and its ssh."""
    # SIGTERM first, so that pytest and ssh can end in order; SIGKILL for what ignores it.
    for sign, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
            return


def _tail(log: Path, lines: int = 12) -> tuple[str, ...]:
    return tuple(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
