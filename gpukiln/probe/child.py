"""Runs a function that may never return in a child process, by the rules of `gpukiln.probe.gather`.

A call into a broken driver can't be interrupted, and a process in uninterruptible sleep can't be killed. The
child reports its calls through a pipe, and is abandoned where it can't be killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from gpukiln.probe.base import HungError, NotReachedError, process_state, read, watch

START_S = 10.0  # until the child's first message, which has its limit
END_S = 2.0  # for a child to end after its work, or after SIGKILL
LOOK_S = 1.0  # between looks at a child that is silent
PR_SET_PDEATHSIG = 1  # prctl(2)
pids: list[int] = []  # of every child that was started
Send = Callable[..., None]


class Hang(str):
    """The reason why a child process was given up: it did not end within its limit."""

    __slots__ = ()


class SlowCall(Hang):
    """A `Hang` of a process that was still working: it might have ended later."""

    __slots__ = ()


def in_child(
    work: Callable[[Send], None],
    receive: Callable[[dict[str, Any]], None],
    grace_s: float = 0.0,
    *,
    stuck_s: float | None = None,
    silent: Callable[[float, str, str], None] | None = None,
) -> str:
    """Run a function in a child process, and wait no longer than the limit that the child reports.

    Args:
        work: What to run. Its argument is a function that sends keyword arguments to `receive`. `limit`: how
            many seconds the child may take from now on; `at`: the call that it is about to make.
        receive: Called with each message.
        grace_s: For how long it may continue after the deadline of `watch`.
        stuck_s: End the child before its limit after so many seconds in state D without using a processor. A
            limit that is reached otherwise is a `SlowCall`.
        silent: Called every `LOOK_S` while the child is silent, with the seconds of silence, its current
            call,
            and its state.

    Returns:
        How it ended, for messages; empty after success; a `Hang` where it did not end.

    Raises:
        NotReachedError: The time was up.
    """
    watch.limit(0)
    reader, writer = os.pipe()
    # fork instead of subprocess: the code exists only in memory on the machine, and results come back through
    # the pipe.
    pid = os.fork()
    if pid == 0:
        _run_child(work, writer)
    os.close(writer)
    pids.append(pid)
    limit, at, broken, rest = START_S, "the start", "", b""
    deadline = time.monotonic() + limit
    observed = stuck_s is not None or silent is not None
    received, stuck = time.monotonic(), _StuckTimer(pid)
    # This process itself is watched by its own parent, and must not seem silent while it waits.
    watch.alive(limit + 2 * END_S + 1)
    try:
        while True:
            left = min(deadline - time.monotonic(), watch.left() + grace_s)
            wait = min(left, LOOK_S) if observed else left
            if left <= 0 or not select.select([reader], [], [], max(wait, 0))[0]:
                silence = time.monotonic() - received
                still = stuck.seconds() if observed else 0.0
                hung = stuck_s is not None and still >= stuck_s
                if left > wait and not hung:
                    if silent is not None:
                        silent(silence, at, process_state(pid))
                    continue
                state = process_state(pid)
                gone = _reap(pid) is not None
                killed = "killed" if gone else "and can't be killed"
                if not hung and deadline - time.monotonic() > 0:
                    raise NotReachedError(watch.time_up())
                kind = SlowCall if stuck_s is not None and not hung else Hang
                return kind(f"{at} does not return in {silence if hung else limit:.0f} s, {killed}: {state}")
            received, stuck = time.monotonic(), _StuckTimer(pid)
            data = os.read(reader, 1 << 16)
            if not data:
                break
            # A read may end in the middle of a message.
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                at, broken = message.get("at", at), message.get("broken", broken)
                if "limit" in message:
                    limit = message["limit"]
                    deadline = time.monotonic() + limit
                    watch.alive(limit + 2 * END_S + 1)
                receive(message)
    finally:
        os.close(reader)
    status = _reap(pid, END_S)
    return broken or (f"{at}: the process ended with status {status}" if status else "")


class _StuckTimer:
    """Measures how long a process has been in state D without using a processor.

    State D alone is no hang: a starting driver sleeps in it too, between the steps of its work.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None
        self._work: tuple[int, int] | None = None

    def seconds(self) -> float:
        """The seconds between the first and the last observation."""
        state, work = self._state_and_work()
        if state != "D" or work != self._work:
            self._work = work
            self._since = time.monotonic() if state == "D" else None
        return 0.0 if self._since is None else time.monotonic() - self._since

    def _state_and_work(self) -> tuple[str, tuple[int, int]]:
        """State, and clock ticks and context switches so far (proc_pid_stat(5), proc_pid_status(5))."""
        fields = (read(f"/proc/{self._pid}/stat") or "").rpartition(")")[2].split()
        switches = re.findall(
            r"(?m)^\w*voluntary_ctxt_switches:\s*(\d+)", read(f"/proc/{self._pid}/status") or ""
        )
        if len(fields) < 13:
            return "", (0, 0)
        return fields[0], (int(fields[11]) + int(fields[12]), sum(map(int, switches)))


def call(function: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """Call a function in a child process.

    Args:
        function: What to call; its result is passed on as JSON.
        limit_s: Seconds that it may take.

    Raises:
        HungError: It did not end in time.
        RuntimeError: It ended without an answer, or raised something.
    """
    received: dict[str, Any] = {}

    def work(send: Send) -> None:
        send(limit=limit_s, at=function.__name__)
        send(answer=function())

    problem = in_child(work, received.update)
    if isinstance(problem, Hang):
        raise HungError(problem)
    if problem or "answer" not in received:
        raise RuntimeError(problem or f"{function.__name__} gave no answer")
    return dict(received["answer"])


def _run_child(work: Callable[[Send], None], writer: int) -> None:
    """Run the child process, detached from the parent's output, so that no reader of it has to wait."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        # Libraries print to stdout; the parent's output is JSON.
        for number in (0, 1, 2):
            os.dup2(null, number)
        # If the parent is killed, a child that hangs would stay on the machine.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        def send(**message: Any) -> None:
            os.write(writer, json.dumps(message).encode() + b"\n")

        try:
            work(send)
        except Exception as error:
            send(broken=str(error) or type(error).__name__)
    finally:
        # Without the parent's exit handlers and buffers, which fork has copied.
        os._exit(0)


def _reap(pid: int, patience_s: float = 0.0) -> int | None:
    """Wait for a child, then kill it; one that can't be killed is abandoned.

    Returns:
        Its status, negative for a signal; None where it still exists.
    """
    for patience in (patience_s, END_S):
        deadline = time.monotonic() + patience
        while True:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        # Only after the patience: a child that ends by itself has closed NVML.
        os.kill(pid, signal.SIGKILL)
    return None
