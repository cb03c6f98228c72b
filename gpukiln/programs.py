"""Runs another program: within limits (`run`), with its lines as they come (`stream`), on the terminal.

The one way for what runs on this computer. What is sent to machines (probe, gpus, workspaces/agent.py) can't
import it, and the embedded cloud (clouds/embedded) supervises its machines' processes itself.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from gpukiln.errors import UnavailableError
from gpukiln.units import MIB, Memory

QUICK_S = 60.0  # for what asks only this machine
NETWORK_S = 600.0  # for what fetches little
LONG_S = 3600.0  # for what fetches or writes gigabytes
POLL_S = 0.5
READ_S = 10.0  # for the last lines of a program that has ended
FULL_BYTES = 64 << 10
"""With less than this a disk is full: programs wait for room, or fail, at their next write."""
SPACE_HINT = (
    "make room there (`invoke cloud.clean --images` shows what can go), or let $GPUKILN_HOME name a folder on"
    " another disk"
)


class ProgramTimeoutError(UnavailableError):
    """A program did not end in its time, and was ended."""


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    folder: Path | None = None,
    needs_mib: int = 0,
    output: IO[bytes] | None = None,
    given: bytes | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end; it and what it started are killed at its limit, or when the disk is full.

    Args:
        command: The program and its arguments.
        limit_s: How long it may take.
        folder: Where it writes; looked at while it runs.
        needs_mib: What it writes there, about.
        output: Where its output and its errors go; None: into the answer.
        given: Its standard input.
        environment: Its environment; None: this process's.

    Returns:
        The exit status, whatever it is, and the output.

    Raises:
        ProgramTimeoutError: It took too long.
        UnavailableError: It is not installed, or the disk is full.
    """
    if folder is not None:
        require_space(folder, needs_mib * MIB)
    pipe = output if output is not None else subprocess.PIPE
    process = _start(
        command,
        stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
        stdout=pipe,
        stderr=subprocess.STDOUT if output is not None else subprocess.PIPE,
        env=environment,
        process_group=0,
    )
    deadline = time.monotonic() + limit_s
    try:
        while True:
            wait_s = min(POLL_S if folder else LONG_S, max(0.0, deadline - time.monotonic()))
            try:
                out, err = process.communicate(given, timeout=wait_s)
                break
            except subprocess.TimeoutExpired:
                given = None  # communicate goes on with what it was first given
                if folder is not None and free_bytes(folder) < FULL_BYTES:
                    raise disk_full(folder, needs_mib) from None
                if time.monotonic() >= deadline:
                    raise ProgramTimeoutError(
                        f"`{' '.join(command[:3])}` did not end in {limit_s:.0f} s and was ended",
                        hint="check the network, the disk and the load of this machine, then try again",
                    ) from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out or b"", err or b"")


Signals = Sequence[tuple[signal.Signals, float]]
"""What ends a process group: signals in their order, and the seconds after each."""


def stream(
    command: Sequence[str],
    each: Callable[[str], None],
    *,
    ends: Signals,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    interrupted: Callable[[], None] = lambda: None,
    dies_with_us: bool = False,
) -> int:
    """Run a program to its end, and hand on each line that it writes.

    Its process group never outlives the call: Ctrl-C, which reaches it from here alone, ends it, as does an
    error of `each`.

    Args:
        command: The program and its arguments.
        each: Gets each line of its output and its errors with its end, in a thread of its own.
        ends: For what is left of the group when the program has ended, or is to end.
        folder: Its working folder; None: this process's.
        environment: Its environment; None: this process's.
        interrupted: Called at Ctrl-C, before the program is told.
        dies_with_us: Whether the group is killed when this process is.

    Returns:
        The exit status, whatever it is.

    Raises:
        UnavailableError: It is not installed.
    """
    process = _start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    guard: subprocess.Popen[bytes] | None = None
    failed: list[BaseException] = []

    def read() -> None:
        with io.TextIOWrapper(cast("BinaryIO", process.stdout), "utf-8", "replace") as lines:
            for line in lines:
                if failed:
                    continue  # read on: at a full pipe the program could not end
                try:
                    each(line)
                except BaseException as error:  # raised below, by the caller's thread
                    failed.append(error)
                    _signal(process.pid, ends[0][0])

    reader = threading.Thread(target=read, daemon=True)
    try:
        guard = _guard(process.pid) if dies_with_us else None
        reader.start()
        process.wait()
    except KeyboardInterrupt:
        interrupted()
        raise
    finally:
        _end_group(process, ends)
        if guard:
            guard.kill()
            guard.communicate()
        if reader.ident:
            reader.join(READ_S)  # a child with a session of its own may hold the pipe longer
    if failed:
        raise failed[0]
    return process.returncode


def run_on_terminal(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> int:
    """Run a program that has this process's terminal until it ends; returns its exit status."""
    return subprocess.run(command, env=environment, check=False).returncode


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, **options)
    except FileNotFoundError:
        if shutil.which(command[0]):
            raise  # its working folder is missing
        raise UnavailableError(
            f"{command[0]} is not installed",
            hint="scripts/run installs what is missing: call it through that",
        ) from None


def _guard(group: int) -> subprocess.Popen[bytes]:
    """Kill a group when this process is gone, however it ended.

    A signal of the kernel's for that (PR_SET_PDEATHSIG) reaches only the program itself, not what it starts.
    """
    script = 'read -r _; kill -KILL "-$1"'
    return _start(["sh", "-c", script, "sh", str(group)], stdin=subprocess.PIPE, start_new_session=True)


def _signal(group: int, which: int) -> bool:
    """Whether the group has somebody who got it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, which)
        return True
    return False


def _end_group(process: subprocess.Popen[bytes], ends: Signals) -> None:
    """End all of the group, not the program alone: its children may need a moment for their own."""
    for which, patience_s in ends:
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(KeyboardInterrupt):  # again: the next signal
            _signal(process.pid, which)
            while _signal(process.pid, 0) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
    process.wait()


def tool(*command: str, stdin: str | None = None, folder: Path | None = None) -> str:
    """Run a program that has to succeed.

    Args:
        stdin: Text for its standard input.
        folder: Where it writes; looked at while it runs.

    Returns:
        Its standard output.

    Raises:
        UnavailableError: See `run`; or it failed, and the details are the end of its output.
    """
    given = None if stdin is None else stdin.encode()
    done = run(command, limit_s=LONG_S, folder=folder, given=given)
    if done.returncode:
        lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise UnavailableError(
            f"{command[0]} failed with exit code {done.returncode}", details=tuple(lines[-8:])
        )
    return done.stdout.decode(errors="replace")


def require_space(folder: Path, need: int) -> None:
    """Refuse to write what finds no room.

    Args:
        folder: Where it would be written.
        need: Its bytes.

    Raises:
        UnavailableError: Fewer are free.
    """
    if free_bytes(folder) < need:
        raise disk_full(folder, need // MIB)


def free_bytes(folder: Path) -> int:
    """What this user can still write on a folder's disk; of the nearest that is there, when it is not yet."""
    while not folder.exists():
        folder = folder.parent
    filesystem = os.statvfs(folder)
    return filesystem.f_frsize * (filesystem.f_bfree if os.geteuid() == 0 else filesystem.f_bavail)


def disk_full(folder: Path, needs_mib: int = 0) -> UnavailableError:
    """The error for a disk without room.

    Args:
        folder: Where something was to be written.
        needs_mib: What is needed, about; 0: not known.
    """
    while not folder.exists():
        folder = folder.parent
    free, total = Memory(free_bytes(folder)).shown, Memory(shutil.disk_usage(folder).total).shown
    needs = f", about {Memory.of_mib(needs_mib).shown} are needed" if needs_mib else ""
    return UnavailableError(
        f"no room on the disk of {folder}: {free} of {total} are free{needs}",
        hint=SPACE_HINT,
    )
