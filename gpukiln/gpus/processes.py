"""The processes in a driver's list: user, command and container, from /proc."""

from __future__ import annotations

import datetime
import os
import pwd
import re
from pathlib import Path
from typing import Any

from gpukiln.gpus.model import GpuProcess, ProcessContainer
from gpukiln.probe.base import read
from gpukiln.redact import redact

PROC = "/proc"
DEVICE_NODES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")  # one of them is open in a process with a GPU
COMMAND_CHARS = 500  # of a command line in a report
# The part of a control group's path that names a container, in the forms of each engine for cgroup v1 and v2.
CONTAINERS = (
    ("docker", re.compile(r"docker[-/](?P<id>[0-9a-f]{64})")),
    ("podman", re.compile(r"libpod[-/](?:conmon-)?(?P<id>[0-9a-f]{64})")),
    ("crio", re.compile(r"crio-(?P<id>[0-9a-f]{64})")),
    ("containerd", re.compile(r"cri-containerd[-:/](?P<id>[0-9a-f]{64})")),
    (
        "containerd",
        re.compile(r"/system\.slice/containerd\.service/[^/]*:cri-containerd:(?P<id>[0-9a-f]{64})"),
    ),
    ("containerd", re.compile(r"/(?:default|moby|k8s\.io)/(?P<id>[\w.-]+)$")),
    ("unknown", re.compile(r"/(?P<id>[0-9a-f]{64})(?:\.scope)?$")),
)
POD = re.compile(r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")


def describe(
    listed: list[tuple[str | None, dict[str, Any]]], *, simulated: bool = False
) -> tuple[GpuProcess, ...]:
    """The processes with what /proc has of each.

    Args:
        listed: For each process the UUID of its device and the row of the collector.
        simulated: Whether the GPUs are simulated: their double lists processes of this namespace only.
    """
    first = _first_namespace()
    return tuple(_describe(device, row, _is_here(row, first, simulated)) for device, row in listed)


def _is_here(row: dict[str, Any], first: bool, simulated: bool) -> bool:
    """Whether the driver's PID is this process's PID in this namespace."""
    # The driver reports PIDs of the initial namespace. In another one the same number may be another process:
    # only a process with a GPU's device node open is accepted.
    return first or (simulated and row.get("name") is not None) or _holds_device(int(row["pid"]))


def _holds_device(pid: int) -> bool:
    """Whether a process of this namespace has a GPU's device node open."""
    try:
        links = [os.readlink(link) for link in Path(PROC, str(pid), "fd").iterdir()]  # noqa: PTH115 - a text
    except OSError:  # it has ended, or is another user's
        return False
    return any(link.startswith(DEVICE_NODES) for link in links)


def _describe(device: str | None, row: dict[str, Any], here: bool) -> GpuProcess:
    pid, unavailable = int(row["pid"]), {}
    memory = row["memory"]
    if memory is None:
        unavailable["memory_mib"] = "NOT_AVAILABLE"
    names = ("user", "uid", "command", "started_at", "container")
    try:
        if not here:
            raise FileNotFoundError
        uid = Path(PROC, str(pid)).stat().st_uid
    except FileNotFoundError:
        state = "gone" if here else "foreign"
        why = "the process has ended" if state == "gone" else "it is in another PID namespace"
        unavailable.update(dict.fromkeys(names, why))
        return GpuProcess(pid, device, row["kind"], state, memory_mib=memory, unavailable=unavailable)
    command = _command(pid)
    if command is None:
        unavailable["command"] = "NO_PERMISSION"
    container = container_of(read(f"{PROC}/{pid}/cgroup") or "")
    if container is None:
        unavailable["container"] = "it is not in a container"
    started = started_at(pid)
    if started is None:
        unavailable["started_at"] = "the process has ended"
    return GpuProcess(
        pid,
        device,
        row["kind"],
        "running",
        memory_mib=memory,
        user=user_name(uid),
        uid=uid,
        command=command,
        started_at=started,
        container=container,
        unavailable=unavailable,
    )


def _first_namespace() -> bool:
    """Whether this is the initial PID namespace."""
    try:
        # PROC_PID_INIT_INO (Linux, include/linux/proc_ns.h).
        return Path(PROC, "self/ns/pid").stat().st_ino == 0xEFFFFFFC
    except OSError:
        return False


def user_name(uid: int) -> str:
    """The login name of a UID; the UID where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(pid: int) -> str | None:
    try:
        text = read(f"{PROC}/{pid}/cmdline")
    except OSError:
        return None
    words = (text or "").rstrip("\0").split("\0")
    return redact(" ".join(words))[:COMMAND_CHARS] or None


def start_ticks(pid: int, proc: str = PROC) -> int | None:
    """When a process started, in clock ticks since the boot; None where it has ended."""
    # PIDs are reused: PID and start time together identify a process (proc_pid_stat(5), field 22).
    try:
        text = read(f"{proc}/{pid}/stat")
    except OSError:
        return None
    if not text:
        return None
    # The name in field 2 may have blanks and brackets. A zombie (Z) has ended, only its parent has not read
    # the exit code.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def started_at(pid: int) -> str | None:
    """When a process started, RFC 3339 in UTC."""
    ticks = start_ticks(pid)
    boot = re.search(r"(?m)^btime (\d+)$", read(f"{PROC}/stat") or "")
    if ticks is None or boot is None:
        return None
    seconds = int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def container_of(cgroup: str) -> ProcessContainer | None:
    """The container of a control group; None where it is not one of a container.

    >>> container_of("0::/system.slice/docker-" + "ab" * 32 + ".scope").engine
    'docker'
    >>> container_of("0::/user.slice/user-1000.slice/session-3.scope")

    Args:
        cgroup: Text of /proc/PID/cgroup, of version 1 or 2.
    """
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        pod = POD.search(path)
        for engine, pattern in CONTAINERS:
            if match := pattern.search(path):
                # With the cgroup driver cgroupfs the path of a pod ends in a bare id, which names no engine.
                known = "containerd" if engine == "unknown" and pod else engine
                return ProcessContainer(known, match["id"], pod["uid"].replace("_", "-") if pod else None)
    return None
