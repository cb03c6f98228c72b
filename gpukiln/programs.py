"""Runs programs: within limits (`run`), line by line (`stream`) or on the terminal (`run_on_terminal`).

All code that runs on this computer uses it, except the embedded cloud, which supervises its machines'
processes itself. Code that is sent to machines (probe, gpus, workspaces/agent.py) can't import it.
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

QUICK_S = 60.0  # for programs that only read this computer
NETWORK_S = 600.0  # for small downloads
LONG_S = 3600.0  # for programs that transfer or write gigabytes
POLL_S = 0.5
READ_S = 10.0  # wait for the last lines of a program that has ended
FULL_BYTES = 64 << 10
"""A disk with less free space counts as full: apt-get update, for example, waits forever for more space."""
SPACE_HINT = (
    "free space there (`invoke cloud.clean --images` lists what it would remove), or set GPUKILN_HOME to a"
    " folder on another disk"
)


class ProgramTimeoutError(UnavailableError):
    """A program did not end within its limit and was killed."""


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
    """Run a program to its end; its process group is killed at the limit, or when the disk is full.

    Args:
        command: The program and its arguments.
        limit_s: Seconds after which it is killed.
        folder: Folder that it writes to; the free space there is checked while it runs.
        needs_mib: About how much it writes there.
        output: File for its standard output and error; None: both are returned.
        given: Its standard input; None: /dev/null.
        environment: Its environment variables; None: this process's.

    Returns:
        Any exit status, and the output.

    Raises:
        ProgramTimeoutError: It ran until the limit.
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
        # A group of its own, so that the limit kills the children too.
        process_group=0,
    )
    deadline = time.monotonic() + limit_s
    try:
        while True:
            # Without a folder nothing has to be checked between start and limit.
            wait_s = min(POLL_S if folder else LONG_S, max(0.0, deadline - time.monotonic()))
            try:
                out, err = process.communicate(given, timeout=wait_s)
                break
            except subprocess.TimeoutExpired:
                given = None  # communicate() keeps the input of its first call
                if folder is not None and free_bytes(folder) < FULL_BYTES:
                    raise disk_full(folder, needs_mib) from None
                if time.monotonic() >= deadline:
                    raise ProgramTimeoutError(
                        f"`{' '.join(command[:3])}` did not end within {limit_s:.0f} s and was killed",
                        hint="check the network, the disk and the load of this machine, then try again",
                    ) from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out or b"", err or b"")


Signals = Sequence[tuple[signal.Signals, float]]
"""How a process group is ended: signals in order, each with the seconds to wait after it."""


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
    """Run a program to its end and pass each line that it prints to a function.

    The process group never outlives the call: Ctrl-C ends it (it reaches the group only from here), and so
    does an exception of `each`.

    Args:
        command: The program and its arguments.
        each: Gets each line of its output and its errors with its line break, in a thread of its own.
        ends: Signals for the group, or what is left of it, when the call ends.
        folder: Its working folder; None: this process's.
        environment: Its environment variables; None: this process's.
        interrupted: Called at Ctrl-C, before the program gets a signal.
        dies_with_us: Whether the group is killed when this process ends.

    Returns:
        Any exit status.

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
                    continue  # keep reading: the program would block on a full pipe
                try:
                    each(line)
                except BaseException as error:  # raised below, by the caller's thread
                    failed.append(error)
                    _signal(process.pid, ends[0][0])

    # daemon: a child that keeps the pipe open must not keep this process alive.
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
    """Run a program on this process's terminal until it ends; returns its exit status."""
    return subprocess.run(command, env=environment, check=False).returncode


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, **options)
    except FileNotFoundError:
        # Popen raises FileNotFoundError for the program and for its working folder.
        if shutil.which(command[0]):
            raise  # the working folder is missing
        raise UnavailableError(
            f"{command[0]} is not installed",
            hint="scripts/run installs missing tools: run the command through it",
        ) from None


def _guard(group: int) -> subprocess.Popen[bytes]:
    """Start a shell that kills a group when this process has ended, for whatever reason.

    PR_SET_PDEATHSIG would signal only the program itself, not its children.
    """
    # The read ends when this process, which holds the other end of the pipe, has ended.
    script = 'read -r _; kill -KILL "-$1"'
    return _start(["sh", "-c", script, "sh", str(group)], stdin=subprocess.PIPE, start_new_session=True)


def _signal(group: int, which: int) -> bool:
    """Signal a group; returns whether it has a process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, which)
        return True
    return False


def _end_group(process: subprocess.Popen[bytes], ends: Signals) -> None:
    """End the whole group, not only the program; its children get the same time to end."""
    for which, patience_s in ends:
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C goes on to the next signal
            _signal(process.pid, which)
            # Signal 0 only checks for a process (kill(2)); poll() reaps the program, which would count as
            # one.
            while _signal(process.pid, 0) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
    process.wait()


def tool(*command: str, stdin: str | None = None, folder: Path | None = None) -> str:
    """Run a program and raise where it fails.

    Args:
        stdin: Text for its standard input.
        folder: Folder that it writes to; the free space there is checked while it runs.

    Returns:
        Its standard output.

    Raises:
        UnavailableError: As for `run`; or the program failed, with the end of its output in the details.
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
    """Raise where a disk has too little free space.

    Args:
        folder: Folder on the disk.
        need: Bytes needed.

    Raises:
        UnavailableError: Fewer bytes are free.
    """
    if free_bytes(folder) < need:
        raise disk_full(folder, need // MIB)


def free_bytes(folder: Path) -> int:
    """Bytes that this user can write on a folder's disk; for a missing folder on its nearest parent's."""
    while not folder.exists():
        folder = folder.parent
    filesystem = os.statvfs(folder)
    # root may use the reserved blocks of ext4 (statvfs(3): f_bfree, f_bavail).
    return filesystem.f_frsize * (filesystem.f_bfree if os.geteuid() == 0 else filesystem.f_bavail)


def disk_full(folder: Path, needs_mib: int = 0) -> UnavailableError:
    """The error for a full disk.

    Args:
        needs_mib: About how much is needed; 0: unknown.
    """
    while not folder.exists():
        folder = folder.parent
    free, total = Memory(free_bytes(folder)).shown, Memory(shutil.disk_usage(folder).total).shown
    needs = f", about {Memory.of_mib(needs_mib).shown} are needed" if needs_mib else ""
    return UnavailableError(
        f"the disk of {folder} is full: {free} of {total} are free{needs}",
        hint=SPACE_HINT,
    )
