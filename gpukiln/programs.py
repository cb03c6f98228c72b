"""Runs another program within limits: one that hangs, or that waits on a full disk, ends with a sentence."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from gpukiln.errors import UnavailableError
from gpukiln.units import MIB, Memory

QUICK_S = 60.0  # for what asks only this machine
NETWORK_S = 600.0  # for what fetches little
LONG_S = 3600.0  # for what fetches or writes gigabytes
POLL_S = 0.5
FULL_BYTES = 64 << 10
"""With less than this a disk is full: programs wait for room, or fail, at their next write."""
ROOM_HINT = (
    "make room there (`invoke cloud.clean --images` shows what can go), or let $GPUKILN_HOME name a folder on"
    " another disk"
)


class LateError(UnavailableError):
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
        LateError: It took too long.
        UnavailableError: It is not installed, or the disk is full.
    """
    if folder is not None:
        require_room(folder, needs_mib * MIB)
    pipe = output if output is not None else subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.STDOUT if output is not None else subprocess.PIPE,
            env=environment,
            process_group=0,
        )
    except FileNotFoundError:
        raise UnavailableError(
            f"{command[0]} is not installed",
            hint="scripts/run installs what is missing: call it through that",
        ) from None
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
                    raise LateError(
                        f"`{' '.join(command[:3])}` did not end in {limit_s:.0f} s and was ended",
                        hint="check the network, the disk and the load of this machine, then try again",
                    ) from None
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out or b"", err or b"")


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


def require_room(folder: Path, need: int) -> None:
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
    found = os.statvfs(folder)
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)


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
        hint=ROOM_HINT,
    )
