"""Gathers the free space of a GPU node's file systems, and whether the root file system was grown.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH110, PTH112, PTH120, PTH207, S108
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any

from gpukiln.probe.base import read

SYS_BLOCK = "/sys/dev/block"
MOUNTINFO = "/proc/self/mountinfo"
SECTOR = 512  # the unit of sysfs, whatever the disk's sector size is (Linux, include/linux/blk_types.h)
# Folders to which a node writes while it works, boots or is updated.
FOLDERS = ("/", "/boot", "/boot/efi", "/etc", "/run", "/tmp", "/var", "/var/log", "/var/tmp")


def storage() -> dict[str, Any]:
    """{file_systems: [{path, holds, size, free, inodes, inodes_free}], root}; sizes in bytes.

    path is the mount point; holds: the other folders of `folders()` on it. free is the space for unprivileged
    users (f_bavail). inodes is 0 where a file system has no fixed number of them (btrfs,
    FAT). Read-only ones are left out, because they are always full. For root see `root_file_system`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for folder in folders():
        real = os.path.realpath(folder)
        if not os.path.isdir(real):
            continue
        size = os.statvfs(real)
        # f_blocks is 0 for file systems without storage, such as cgroup2.
        if size.f_flag & os.ST_RDONLY or not size.f_blocks:
            continue
        path = mount_point(real)
        row = rows.setdefault(
            path,
            {
                "path": path,
                "holds": [],
                "size": size.f_blocks * size.f_frsize,
                "free": size.f_bavail * size.f_frsize,
                "inodes": size.f_files,
                "inodes_free": size.f_favail,
            },
        )
        if real != path:
            row["holds"].append(folder)
    return {"file_systems": list(rows.values()), "root": root_file_system()}


def folders() -> list[str]:
    """Folders with enough free space, with the configured data folders of Docker and containerd."""
    try:
        docker = json.loads(read("/etc/docker/daemon.json") or "{}").get("data-root")
    except (ValueError, AttributeError):  # the check runtime.daemon-json reports it
        docker = None
    containerd = re.search(r"(?m)^root *= *[\"']([^\"']+)", read("/etc/containerd/config.toml") or "")
    data = (docker or "/var/lib/docker", containerd[1] if containerd else "/var/lib/containerd")
    return [*FOLDERS, *data, "/var/lib/kubelet"]


def mount_point(path: str) -> str:
    """Where the file system of a folder is mounted."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def root_file_system() -> dict[str, Any] | None:
    """{size, partition, after}: bytes of the file system, of its partition, and unused ones that follow it.

    None where it is on no partition of a disk (a container, LVM, a RAID, an image in memory). after is 0
    where another partition follows, so that it can't grow.
    """
    rows = [line.split() for line in (read(MOUNTINFO) or "").splitlines()]
    device = [fields[2] for fields in rows if fields[4] == "/"][-1:]
    sysfs = os.path.realpath(f"{SYS_BLOCK}/{device[0]}") if device else ""
    if not os.path.exists(f"{sysfs}/partition"):
        return None
    disk = os.path.dirname(sysfs)
    start, length = (int(read(f"{sysfs}/{name}") or 0) for name in ("start", "size"))
    others = [int(read(path) or 0) for path in glob.glob(f"{disk}/*/start")]
    size = os.statvfs("/")
    after = 0 if max(others) > start else int(read(f"{disk}/size") or 0) - start - length
    return {"size": size.f_blocks * size.f_frsize, "partition": length * SECTOR, "after": after * SECTOR}
