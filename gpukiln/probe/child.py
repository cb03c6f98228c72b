"""Runs what may never return in a child process. Runs on the judged machine, see gpukiln/probe/gather.py.

A call into a broken driver can't be interrupted, and a process that waits in the kernel not even be killed:
the child says what it does through a pipe, and is left to itself at last.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from gpukiln.probe.base import HungError, NotReachedError, process_state, watch

START_S = 10.0  # until the child says how long it may take
END_S = 2.0  # for a child to go once it is done, or killed
PR_SET_PDEATHSIG = 1  # prctl(2)
pids: list[int] = []  # of every child that was started
Tell = Callable[..., None]


class Hang(str):
    """How a child process ended that had to be given up."""

    __slots__ = ()


def in_child(
    work: Callable[[Tell], None], hear: Callable[[dict[str, Any]], None], grace_s: float = 0.0
) -> str:
    """Run something in a child process, and wait no longer than it said it may take.

    Args:
        work: What to run; given a function that tells keyword arguments to `hear`. `limit`: seconds from now
            on; `at`: what is being called.
        hear: Given each message.
        grace_s: For how long it may go on when the time of `watch` is up.

    Returns:
        How it ended, for people; empty where it ended well; a `Hang` where it did not end.

    Raises:
        NotReachedError: The time was up.
    """
    watch.limit(0)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(work, writer)
    os.close(writer)
    pids.append(pid)
    limit, at, broken, rest = START_S, "the start", "", b""
    deadline = time.monotonic() + limit
    watch.alive(limit + 2 * END_S + 1)
    try:
        while True:
            left = min(deadline - time.monotonic(), watch.left() + grace_s)
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                state = process_state(pid)
                gone = _end(pid) is not None
                killed = "killed" if gone else "and can't be killed"
                if deadline - time.monotonic() > 0:
                    raise NotReachedError(watch.time_up())
                return Hang(f"{at} does not return in {limit:.0f} s, {killed}: {state}")
            data = os.read(reader, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                at, broken = message.get("at", at), message.get("broken", broken)
                if "limit" in message:
                    limit = message["limit"]
                    deadline = time.monotonic() + limit
                    watch.alive(limit + 2 * END_S + 1)
                hear(message)
    finally:
        os.close(reader)
    status = _end(pid, END_S)
    return broken or (f"{at}: the process ended with status {status}" if status else "")


def call(function: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """Call a function in a child process.

    Args:
        function: What to call; what it returns is passed on as JSON.
        limit_s: Seconds that it may take.

    Raises:
        HungError: It did not end in time.
        RuntimeError: It ended without an answer, or raised something.
    """
    heard: dict[str, Any] = {}

    def work(tell: Tell) -> None:
        tell(limit=limit_s, at=function.__name__)
        tell(answer=function())

    problem = in_child(work, heard.update)
    if isinstance(problem, Hang):
        raise HungError(problem)
    if problem or "answer" not in heard:
        raise RuntimeError(problem or f"{function.__name__} gave no answer")
    return dict(heard["answer"])


def _be_child(work: Callable[[Tell], None], writer: int) -> None:
    """Be the child process: it keeps nobody waiting who reads the parent's output."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        def tell(**message: Any) -> None:
            os.write(writer, json.dumps(message).encode() + b"\n")

        try:
            work(tell)
        except Exception as error:
            tell(broken=str(error) or type(error).__name__)
    finally:
        os._exit(0)


def _end(pid: int, patience_s: float = 0.0) -> int | None:
    """Wait for a child, then kill it; one that the kernel doesn't let go is left to itself.

    Returns:
        Its status, negative for a signal; None where it is still there.
    """
    for patience in (patience_s, END_S):
        deadline = time.monotonic() + patience
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    return None
