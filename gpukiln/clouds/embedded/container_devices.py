"""The block devices of a container: loop devices over volumes, with nodes in the container's /dev.

A container in a user namespace can neither create nor mount block devices (user_namespaces(7)); it reads and
writes those that are created here. A privileged one may do both: CAP_MKNOD and CAP_SYS_ADMIN are
systemd-nspawn's defaults, and with --keep-unit no device policy is put on it.
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
        """Add a volume as a device of a running container.

        Args:
            init: Process id of the container's first process.

        Raises:
            UnavailableError: The kernel has no free loop device.
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
        """Create character devices in a running container, with mode 0666.

        Args:
            init: Process id of the container's first process.
            nodes: Device numbers by their names below /dev; existing nodes stay.

        Raises:
            OSError: The container's /dev can't be written.
        """
        in_root(_root(init), lambda: _make_nodes(nodes, 0o666 | stat.S_IFCHR, self._owner))

    def remove(self, init: int, disk: AttachedDisk, *, force: bool) -> bool:
        """Remove a device.

        Args:
            init: Process id of the container's first process.
            force: Also while a file system on it is mounted; the loop device then lives until the unmount.

        Returns:
            Whether it was removed.
        """
        loop = self._loops[disk.volume_id]
        if not force and loop.busy():
            return False
        in_root(_root(init), lambda: _remove_names(disk))
        self._loops.pop(disk.volume_id).close()
        return True

    def resize(self, disk: AttachedDisk) -> None:
        """Make the new size of a volume's file visible to the container."""
        self._loops[disk.volume_id].resize()

    def flush(self, volume_ids: set[str]) -> None:
        """Write the page cache of the volumes' devices to their files.

        Args:
            volume_ids: Volumes; those that are not attached here are skipped.
        """
        for volume_id in volume_ids & set(self._loops):
            self._loops[volume_id].flush()

    def mountpoints(self, init: int, volume_ids: set[str]) -> list[Path]:
        """Mount points of volumes in a container, one for each device.

        Args:
            init: Process id of the container's first process.
            volume_ids: Volumes; those that are not attached here are skipped.
        """
        devices = {self._loops[volume_id].device for volume_id in volume_ids & set(self._loops)}
        by_device: dict[str, Path] = {}
        for line in Path(f"/proc/{init}/mountinfo").read_text().splitlines():
            _, _, device, _, mountpoint, *_ = line.split()  # a blank in a path is \040 (proc(5))
            if device in {f"{os.major(number)}:{os.minor(number)}" for number in devices}:
                place = mountpoint.encode().decode("unicode_escape").lstrip("/")
                by_device[device] = Path(f"/proc/{init}/root") / place
        return list(by_device.values())

    def release(self) -> None:
        """Release all loop devices."""
        while self._loops:
            self._loops.popitem()[1].close()


def _root(init: int) -> Path:
    return Path(f"/proc/{init}/root")


def _make_nodes(nodes: Mapping[str, int], mode: int, owner: int) -> None:
    # mknod applies the umask to the mode.
    before = os.umask(0)  # of this thread: `in_root`
    for name, device in nodes.items():
        with contextlib.suppress(FileExistsError):
            os.mknod(f"/dev/{name}", mode, device)
            # follow_symlinks: root of the container may have placed a link there.
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
