"""A folder of this computer in a virtual machine by virtiofs: the machine sees changes at once.

Not 9p: the cloud kernels of Debian and Red Hat don't have it.
"""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

from gpukiln.clouds.embedded.gpus.machine_files import SHARE
from gpukiln.errors import UnavailableError

# Debian 12 has QEMU's own; later releases have a package virtiofsd
PROGRAMS = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "virtiofsd")
START_S = 10


class VirtiofsShare:
    """The daemon that serves a folder to one virtual machine.

    Args:
        folder: What the machine sees.
        machine: Folder for the socket and the log.
    """

    def __init__(self, folder: Path, machine: Path) -> None:
        self._folder, self._socket, self._log = folder, machine / "share.sock", machine / "share.log"
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the daemon and wait for its socket.

        Raises:
            UnavailableError: virtiofsd is not installed, or it failed.
        """
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise UnavailableError(
                "simulated GPUs of a virtual machine need virtiofsd, which is not installed",
                hint="apt-get install qemu-system-common (Debian 12) or virtiofsd",
            )
        self._socket.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(
                [
                    *(program, f"--socket-path={self._socket}", "-o", f"source={self._folder}"),
                    # cache=none: the machine sees changes of the state at once.
                    *("-o", "cache=none", "-o", "sandbox=chroot"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self._socket.exists():
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = tuple(self._log.read_text(errors="replace").splitlines()[-3:])
                raise UnavailableError(
                    "virtiofsd did not start", details=tail, hint=f"see its log: {self._log}"
                )
            time.sleep(0.02)

    def arguments(self, memory_mib: int) -> tuple[str, ...]:
        """QEMU's arguments: the daemon reads and writes the machine's memory, so that has to be shared."""
        return (
            *("-object", f"memory-backend-memfd,id=ram,size={memory_mib}M,share=on"),
            *("-machine", "memory-backend=ram"),
            *("-chardev", f"socket,id=share,path={self._socket}"),
            *("-device", f"vhost-user-fs-pci,chardev=share,tag={SHARE}"),
        )

    def stop(self) -> None:
        """Stop the daemon; it also ends with its machine."""
        if self._daemon:
            with contextlib.suppress(ProcessLookupError):
                self._daemon.kill()
            self._daemon.wait()
            self._daemon = None
