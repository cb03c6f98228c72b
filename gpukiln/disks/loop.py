"""Loop devices that are gone when nobody holds them: nothing stays attached when this process is killed."""

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from gpukiln.errors import UnavailableError

# include/uapi/linux/loop.h
LOOP_CLR_FD, LOOP_SET_CAPACITY, LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C01, 0x4C07, 0x4C0A, 0x4C82
LO_FLAGS_READ_ONLY, LO_FLAGS_AUTOCLEAR = 1, 4
CONFIGURATION = struct.Struct("=II 5Q4I 64s64s32s2Q 64x")  # struct loop_config: fd, block size, loop_info64


class LoopDevice:
    """A file as a block device, for as long as somebody has it open; this object has.

    Args:
        offset: Bytes of the file before the device's first.
        size: Bytes of the device; 0 is up to the file's end.

    Raises:
        UnavailableError: This host gives no loop device.
    """

    def __init__(self, file: Path, *, offset: int = 0, size: int = 0, read_only: bool = False) -> None:
        backing = os.open(file, os.O_RDONLY if read_only else os.O_RDWR)
        flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_READ_ONLY if read_only else 0)
        name = os.fsencode(file)[-63:]
        configuration = CONFIGURATION.pack(
            backing, 0, 0, 0, 0, offset, size, 0, 0, 0, flags, name, b"", b"", 0, 0
        )
        try:
            self._fd, self.number = _configure(configuration)
        except OSError as error:
            raise UnavailableError(f"no loop device for {file}: {error}") from error
        finally:
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
        """Whether somebody has claimed it, as a mounted file system does."""
        try:
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
        """Let it go; the kernel frees it when the last who has it open, a mount for example, is gone."""
        self.flush()
        os.close(self._fd)


def _configure(configuration: bytes) -> tuple[int, int]:
    """Take a free device; another process may be faster."""
    with Path("/dev/loop-control").open("r+b", buffering=0) as control:
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
    raise OSError(errno.EBUSY, "every loop device that is free is taken by somebody else at once")
