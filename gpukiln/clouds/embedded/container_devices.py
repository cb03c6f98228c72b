"""The block devices of a container: loop devices over volumes, with nodes in the container's /dev.

The container needs no right beyond those that it has: it may make and mount devices (CAP_MKNOD and
CAP_SYS_ADMIN are systemd-nspawn's defaults), and with --keep-unit no device policy is put on it.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.loop import LoopDevice


class ContainerDevices:
    """The loop devices of one container, by volume id."""

    def __init__(self) -> None:
        self._loops: dict[str, LoopDevice] = {}

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
            _remove_names(init, disk)
            _make_names(init, disk, loop.device)
        except BaseException:
            loop.close()
            raise
        self._loops[disk.volume_id] = loop

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
        _remove_names(init, disk)
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


@contextlib.contextmanager
def _folder(path: str, *names: str, make: bool = False) -> Iterator[int]:
    """A folder below another one, by its descriptor; no link on the way is followed to another place."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    current = os.open(path, flags)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=current)
            below = os.open(name, flags, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def _make_names(init: int, disk: AttachedDisk, device: int) -> None:
    name = disk.device.removeprefix("/dev/")
    with _folder(f"/proc/{init}/root/dev") as folder:
        os.mknod(name, 0o660 | stat.S_IFBLK, device, dir_fd=folder)
    with _folder(f"/proc/{init}/root/dev", "disk", "by-id", make=True) as folder:
        os.symlink(f"../../{name}", disk.link, dir_fd=folder)


def _remove_names(init: int, disk: AttachedDisk) -> None:
    with contextlib.suppress(FileNotFoundError), _folder(f"/proc/{init}/root/dev") as folder:
        os.unlink(disk.device.removeprefix("/dev/"), dir_fd=folder)
    with (
        contextlib.suppress(FileNotFoundError),
        _folder(f"/proc/{init}/root/dev", "disk", "by-id") as folder,
    ):
        os.unlink(disk.link, dir_fd=folder)
