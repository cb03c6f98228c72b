"""Compares two root file systems, name by name."""

import hashlib
import os
import stat
from pathlib import Path

# What two bakes of anything differ in, and why.
MAY_DIFFER = {
    "boot/initrd.img-*": "cpio and its programs write times",
    "etc/gpukiln/image.json": "the time of the build",
    "etc/hostname": "cloud-init writes the name of each machine",
    "etc/shadow-": "the copy before the last change, which cloud-init makes on each machine",
    "etc/sudoers.d/90-cloud-init-users": "cloud-init writes the time",
    "var/cache/ldconfig/aux-cache": "times and inodes of libraries",
    "var/log/wtmp": "boots",
}


def look(root: Path) -> dict[str, str]:
    """Per name its kind, mode, owners and content.

    Args:
        root: A mounted root file system.
    """
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                content = str(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                content = ""
            row = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid} {content}"
            found[str(path.relative_to(root))] = row
    return found


def differences(one: Path, other: Path) -> list[str]:
    """What differs and must not: names with both rows.

    Args:
        one: A mounted root file system.
        other: Another one.
    """
    left, right = look(one), look(other)
    assert len(left) > 10_000, f"{one} is no image"
    return [
        f"{name}: {left.get(name, 'absent')} -> {right.get(name, 'absent')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name) and not any(Path(name).match(pattern) for pattern in MAY_DIFFER)
    ]
