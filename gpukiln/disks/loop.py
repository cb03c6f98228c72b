"""Loop devices that the kernel frees with their last open handle, so that a killed process leaves none."""

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from gpukiln.errors import UnavailableError

# include/uapi/linux/loop.h
LOOP_CLR_FD, LOOP_SET_CAPACITY, LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C01, 0x4C07, 0x4C0A, 0x4C82
# AUTOCLEAR: detached at the last close (loop(4)), even where this process was killed.
LO_FLAGS_READ_ONLY, LO_FLAGS_AUTOCLEAR = 1, 4
CONFIGURATION = struct.Struct("=II 5Q4I 64s64s32s2Q 64x")  # struct loop_config: fd, block size, loop_info64


class LoopDevice:
    """A file as a block device, attached while this object or a mount has it open.

    Args:
        offset: Byte of the file at which the device begins.
        size: Bytes of the device; 0: up to the file's end.

    Raises:
        UnavailableError: The kernel refused to attach a loop device.
    """

    def __init__(self, file: Path, *, offset: int = 0, size: int = 0, read_only: bool = False) -> None:
        backing = os.open(file, os.O_RDONLY if read_only else os.O_RDWR)
        flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_READ_ONLY if read_only else 0)
        # lo_file_name has 64 bytes with its end; the end of the path says more than its beginning. Only
        # losetup shows it.
        name = os.fsencode(file)[-63:]
        configuration = CONFIGURATION.pack(
            backing, 0, 0, 0, 0, offset, size, 0, 0, 0, flags, name, b"", b"", 0, 0
        )
        try:
            self._fd, self.number = _configure(configuration)
        except OSError as error:
            raise UnavailableError(f"no loop device for {file}: {error}") from error
        finally:
            # The kernel holds its own reference to the file.
            os.close(backing)

    @property
    def device(self) -> int:
        """Its device number."""
        return os.fstat(self._fd).st_rdev

    @property
    def path(self) -> Path:
        """Its node on this host."""
        return Path(f"/dev/loop{self.number}")

    def busy(self) -> bool:
        """Whether the device is claimed exclusively, for example by a mounted file system."""
        try:
            # O_EXCL without O_CREAT on a block device fails with EBUSY where it is in use (open(2)).
            os.close(os.open(self.path, os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            raise
        return False

    def flush(self) -> None:
        """Write what is in memory to the file."""
        os.fsync(self._fd)

    def resize(self) -> None:
        """Take the file's new size."""
        fcntl.ioctl(self._fd, LOOP_SET_CAPACITY, 0)

    def close(self) -> None:
        """Close this handle; the kernel detaches the file with the last one, for example a mount."""
        self.flush()
        os.close(self._fd)


def _configure(configuration: bytes) -> tuple[int, int]:
    """Attach to a free device; another process may take it first, so the next free one is tried."""
    with Path("/dev/loop-control").open("r+b", buffering=0) as control:
        # LOOP_CTL_GET_FREE reserves nothing.
        for _ in range(50):
            number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, LOOP_CONFIGURE, configuration)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.01)
                continue
            return device, number
    raise OSError(errno.EBUSY, "other processes took every free loop device first")
