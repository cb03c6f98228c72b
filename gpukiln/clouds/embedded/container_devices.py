"""The block devices of a container: loop devices over volumes, with nodes in the container's /dev.

A container in a user namespace makes none itself, and mounts none (user_namespaces(7)): it reads and writes
those that are made here. A privileged one may do both: CAP_MKNOD and CAP_SYS_ADMIN are systemd-nspawn's
defaults, and with --keep-unit no device policy is put on it.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.disks.loop import LoopDevice


class ContainerDevices:
    """The devices of one container.

    Args:
        owner: User id on this computer of the container's root.
    """

    def __init__(self, *, owner: int) -> None:
        self._owner = owner
        self._loops: dict[str, LoopDevice] = {}  # by volume id

    def add(self, init: int, disk: AttachedDisk) -> None:
        """Make a volume a device of a running container.

        Args:
            init: Process id of the container's first process.

        Raises:
            UnavailableError: This host has no loop device.
            OSError: The container's /dev can't be written.
        """
        loop = LoopDevice(disk.file)
        try:
            in_root(_root(init), lambda: _remove_names(disk))
            in_root(_root(init), lambda: _make_names(disk, loop.device, self._owner))
        except BaseException:
            loop.close()
            raise
        self._loops[disk.volume_id] = loop

    def add_characters(self, init: int, nodes: Mapping[str, int]) -> None:
        """Make character devices in a running container, for everybody in it.

        Args:
            init: Process id of the container's first process.
            nodes: Numbers of devices by their names below /dev; those that are there stay.

        Raises:
            OSError: The container's /dev can't be written.
        """
        in_root(_root(init), lambda: _make_nodes(nodes, 0o666 | stat.S_IFCHR, self._owner))

    def remove(self, init: int, disk: AttachedDisk, *, force: bool) -> bool:
        """Take a device away.

        Args:
            init: Process id of the container's first process.
            force: Also while a file system on it is mounted; the loop device then lives until it is not.

        Returns:
            Whether it was taken.
        """
        loop = self._loops[disk.volume_id]
        if not force and loop.busy():
            return False
        in_root(_root(init), lambda: _remove_names(disk))
        self._loops.pop(disk.volume_id).close()
        return True

    def resize(self, disk: AttachedDisk) -> None:
        """Let the container see that a volume's file has grown."""
        self._loops[disk.volume_id].resize()

    def flush(self, volume_ids: set[str]) -> None:
        """Write what the host keeps in memory to the volumes' files.

        Args:
            volume_ids: Volumes; those that are not here are passed over.
        """
        for volume_id in volume_ids & set(self._loops):
            self._loops[volume_id].flush()

    def mountpoints(self, init: int, volume_ids: set[str]) -> list[Path]:
        """Where file systems on volumes are mounted in a container, one place for each.

        Args:
            init: Process id of the container's first process.
            volume_ids: Volumes; those that are not here are passed over.
        """
        devices = {self._loops[volume_id].device for volume_id in volume_ids & set(self._loops)}
        found: dict[str, Path] = {}
        for line in Path(f"/proc/{init}/mountinfo").read_text().splitlines():
            _, _, device, _, mountpoint, *_ = line.split()  # proc(5): a blank in a path is \040
            if device in {f"{os.major(number)}:{os.minor(number)}" for number in devices}:
                place = mountpoint.encode().decode("unicode_escape").lstrip("/")
                found[device] = Path(f"/proc/{init}/root") / place
        return list(found.values())

    def release(self) -> None:
        """Let every loop device go."""
        while self._loops:
            self._loops.popitem()[1].close()


def _root(init: int) -> Path:
    return Path(f"/proc/{init}/root")


def _make_nodes(nodes: Mapping[str, int], mode: int, owner: int) -> None:
    before = os.umask(0)  # of this thread: `in_root`
    for name, device in nodes.items():
        with contextlib.suppress(FileExistsError):
            os.mknod(f"/dev/{name}", mode, device)
            os.chown(f"/dev/{name}", owner, owner, follow_symlinks=False)
    os.umask(before)


def _make_names(disk: AttachedDisk, device: int, owner: int) -> None:
    name = disk.device.removeprefix("/dev/")
    _make_nodes({name: device}, 0o660 | stat.S_IFBLK, owner)
    links = Path("/dev/disk/by-id")
    links.mkdir(parents=True, exist_ok=True)
    (links / disk.link).symlink_to(f"../../{name}")


def _remove_names(disk: AttachedDisk) -> None:
    Path(disk.device).unlink(missing_ok=True)
    (Path("/dev/disk/by-id") / disk.link).unlink(missing_ok=True)
