"""Control groups of container machines on cgroup v1, where each controller has a hierarchy of its own.

There systemd-nspawn makes only systemd's own hierarchy writable for a machine and binds the controllers
read-only (systemd, src/nspawn/nspawn-cgroup.c), so that no container engine could start anything in it. With
--keep-unit it also puts every container into the one group `payload` below its own (create_subcgroup), where
the systemd of one machine would have the processes of another. Each machine gets a group of its own in every
hierarchy, and writes below it. With cgroup v2 nspawn delegates the single hierarchy itself, and this module
does nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PREFIX = "gpukiln-"
ENDING_S = 5.0  # seconds for a machine's processes to leave their groups
# Joins the groups, then becomes the program: 0 means the writing process in its own PID namespace.
JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'
DELEGATED = ("cgroup.procs", "tasks", "cgroup.threads", "cgroup.subtree_control")
"""Files that a group's owner writes (kernel, cgroup-v2.rst, "Delegation"; v1: systemd's cg_set_access)."""


def hierarchies(proc: Path = Path("/proc")) -> dict[str, Path]:
    """The group of this process in each hierarchy, by its controllers' names; empty: only cgroup v2.

    Systemd's own is `name=systemd`; cgroup v2 in addition to v1 (systemd's "hybrid" mode) has the name "".
    """
    mounts: dict[str, Path] = {}
    for line in (proc / "mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), Path(where))
        elif kind == "cgroup2":
            mounts[""] = Path(where)
    if set(mounts) == {""}:
        return {}
    groups = {}
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if (first := names.partition(",")[0]) in mounts:
            groups[names] = mounts[first] / path.lstrip("/")
    return groups


def make(instance_id: str, *, owner: int = 0) -> list[str]:
    """Create the groups of a machine.

    Args:
        owner: User id on this host of the machine's root.

    Returns:
        The prefix of the command line that starts it in them; empty on cgroup v2.
    """
    joined = []
    for names, parent in hierarchies().items():
        group = parent / f"{PREFIX}{instance_id}"
        group.mkdir(exist_ok=True)
        if "cpuset" in names.split(","):  # a process can join only when both are set (cpuset(7))
            for what in ("cpuset.cpus", "cpuset.mems"):
                (group / what).write_text((parent / what).read_text())
        for path in (group, *(group / name for name in DELEGATED)):
            if path.exists():
                os.chown(path, owner, owner)
        joined.append(str(group / "cgroup.procs"))
    return ["sh", "-c", JOIN, "sh", *joined, "--"] if joined else []


def remove(instance_id: str) -> None:
    """Remove the groups of a machine that has ended; a group whose processes don't end stays."""
    until = time.monotonic() + ENDING_S
    for parent in hierarchies().values():
        group = parent / f"{PREFIX}{instance_id}"
        while group.exists():
            # The innermost groups first; rmdir removes a group though it has files (cgroups(7)).
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):  # the kernel refuses while a process is in it
                    Path(folder).rmdir()
            if time.monotonic() >= until:
                break
            time.sleep(0.05 if group.exists() else 0)
