"""Gathers one section after the other, within the time limit whatever hangs.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH110
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

from gpukiln.probe.base import (
    NOT_REACHED,
    PATH,
    SECTION_S,
    NotReachedError,
    evidence,
    kernel_errors,
    run,
    watch,
)
from gpukiln.probe.child import Hang, Send, in_child

WAIT_S = 300  # how long the boot and cloud-init may still take
GRACE_S = 3  # for a section to report that the time is up
CLOUD_INIT_RESULT = "/run/cloud-init/result.json"


def gather(sections: dict[str, Callable[[], Any]], *, boot: bool = False) -> dict[str, Any]:
    """Gather the facts within the time of `watch`, whatever hangs.

    A child process gathers one section after the other. Where it is in uninterruptible sleep, which no signal
    ends, its section is given up, and another child continues with the next one.

    Args:
        sections: Name to function.
        boot: Whether to wait for the end of the boot first.
    """
    facts: dict[str, Any] = {"schema": 1, "hostname": os.uname().nodename}
    seconds: dict[str, float] = {}
    shown: dict[str, Any] = {}
    todo = list(sections)
    group = 0

    def receive(message: dict[str, Any]) -> None:
        nonlocal group
        group = message.get("group", group)
        watch.hung.update(message.get("hung", {}))
        if "section" in message:
            name, facts[message["section"]] = message["section"], message["found"]
            seconds[name], shown[name] = message["seconds"], message["evidence"]
            todo.remove(name)

    def work(send: Send) -> None:
        watch.send = send
        if boot:
            wait_for_boot()
        for name in list(todo):
            send(limit=SECTION_S, at=f"gathering {name}")
            send(**gather_section(name, sections[name]), hung=watch.hung)

    while todo:
        try:
            ended = in_child(work, receive, grace_s=GRACE_S)
        except NotReachedError as error:
            facts.update({name: {NOT_REACHED: str(error)} for name in todo})
            break
        if not todo:
            break
        boot, stuck = False, todo.pop(0)
        if isinstance(ended, Hang):
            watch.hung[stuck] = {"tool": stuck, "command": f"gathering {stuck}", "reason": str(ended)}
            facts[stuck] = {NOT_REACHED: str(ended)}
        else:
            facts[stuck] = {"_error": ended or "the process that gathers facts ended"}
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    hung = list(watch.hung.values())
    facts["hung"] = {"tools": hung, "kernel": kernel_errors() if hung else []}
    facts["seconds"], facts["evidence"] = seconds, shown
    return facts


def gather_section(name: str, section: Callable[[], Any]) -> dict[str, Any]:
    """A section's value, duration and evidence."""
    started = time.monotonic()
    evidence.clear()
    try:
        watch.limit(0)
        value = section()
    except NotReachedError as error:
        value = {NOT_REACHED: str(error)}
    except Exception as error:
        value = {"_error": f"{type(error).__name__}: {error}"}
    took = round(time.monotonic() - started, 2)
    return {"section": name, "found": value, "seconds": took, "evidence": evidence[:]}


def wait_for_boot() -> None:
    """Wait for the boot and cloud-init, for at most a third of the time."""
    wait = min(WAIT_S, watch.left() / 3)
    with contextlib.suppress(NotReachedError):
        run("systemctl", "is-system-running", "--wait", timeout=wait, waits=True)
        # What cloud-init writes at its end; asking it starts Python, for 3 s of an emulated processor.
        if shutil.which("cloud-init", path=PATH) and not os.path.exists(CLOUD_INIT_RESULT):
            run("cloud-init", "status", "--wait", timeout=wait, waits=True)
