"""Control groups of container machines, where the kernel has them by controller (cgroup v1).

There systemd-nspawn lets a machine write systemd's own hierarchy alone and binds the controllers read-only
(systemd, src/nspawn/nspawn-cgroup.c), so that no container engine could start anything in it. Each machine
gets a group of its own in every controller, and writes below it. With the one hierarchy of cgroup v2 nspawn
delegates it by itself, and nothing here is done.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PREFIX = "gpukiln-"
ENDING_S = 5.0  # that the processes of a machine may take to leave their groups
# The program that follows joins the groups first; 0 is whoever writes, whatever its number is elsewhere.
JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'


def hierarchies(proc: Path = Path("/proc")) -> dict[str, Path]:
    """The group of this process in each controller of cgroup v1, by the controllers' names."""
    mounts: dict[str, Path] = {}
    for line in (proc / "mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), Path(where))
    found = {}
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if names and not names.startswith("name=") and names.partition(",")[0] in mounts:
            found[names] = mounts[names.partition(",")[0]] / path.lstrip("/")
    return found


def make(instance_id: str) -> list[str]:
    """Make the groups of a machine.

    Returns:
        The beginning of the command line that starts it in them; empty where there is nothing to do.
    """
    joined = []
    for names, parent in hierarchies().items():
        group = parent / f"{PREFIX}{instance_id}"
        group.mkdir(exist_ok=True)
        if "cpuset" in names.split(","):  # nothing may join it before it has both
            for what in ("cpuset.cpus", "cpuset.mems"):
                (group / what).write_text((parent / what).read_text())
        joined.append(str(group / "cgroup.procs"))
    return ["sh", "-c", JOIN, "sh", *joined, "--"] if joined else []


def remove(instance_id: str) -> None:
    """Remove the groups of a machine that has ended; one whose processes do not end stays."""
    until = time.monotonic() + ENDING_S
    for parent in hierarchies().values():
        group = parent / f"{PREFIX}{instance_id}"
        while group.exists():
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):  # a process is in it: the kernel refuses
                    Path(folder).rmdir()
            if time.monotonic() >= until:
                break
            time.sleep(0.05 if group.exists() else 0)
