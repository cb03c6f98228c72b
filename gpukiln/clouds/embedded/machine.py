"""A machine that boots from a disk: what a container and a virtual machine have in common."""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.gpus.machine_files import MachineFiles
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus
from gpukiln.clouds.embedded.network import MachineNetwork
from gpukiln.errors import UnavailableError
from gpukiln.programs import tool

log = logging.getLogger(__name__)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n\x20-\x7e]")  # ECMA-48 sequences, control characters
Kind = Literal["container", "privileged", "vm"]


@dataclass(frozen=True)
class MachineSpec:
    """What to boot.

    Args:
        instance_id: The EC2 instance it stands for.
        kind: A container in a user namespace; a privileged one, whose root is this computer's; a virtual
            machine.
        folder: The machine's own folder.
        root: The root volume.
        console: File that gets the console's output.
        address: Private IPv4 address in 127.0.0.0/8.
        ssh_port: Port of that address that leads to SSH.
        vcpus: Virtual processors of a virtual machine.
        memory_mib: Memory of a virtual machine in MiB.
    """

    instance_id: str
    kind: Kind
    folder: Path
    root: AttachedDisk
    console: Path
    address: str
    ssh_port: int
    vcpus: int = 2
    memory_mib: int = 2048


class LocalMachine(ABC):
    """A machine: start, stop and kill are safe in any state.

    Args:
        spec: What to boot.
        network: Its network; started and stopped with the machine.
    """

    def __init__(self, spec: MachineSpec, network: MachineNetwork) -> None:
        self.spec = spec
        self.network = network
        self.process: subprocess.Popen[bytes] | None = None
        self.disks: dict[str, AttachedDisk] = {}  # by volume id, beside the root
        self.gpus: SimulatedGpus | None = None  # that it starts with
        self.gpu_files: MachineFiles | None = None  # of the GPUs that it has now

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Boot.

        Raises:
            UnavailableError: A tool is missing or refused to start.
        """
        self._prepare()
        with self.spec.console.open("ab") as console:
            self.process = subprocess.Popen(
                self._command(),
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        time.sleep(0.3)
        if not self.running:
            code = self.process.returncode
            self.release()
            # an answer of EC2's is XML, which has no place for escapes
            said = ESCAPES.sub("", self.spec.console.read_text(errors="replace"))
            tail = [line for line in said.splitlines() if line][-5:]
            raise UnavailableError(
                f"{self.spec.instance_id} ended at once, exit code {code}", details=tuple(tail)
            )

    def _environment(self) -> dict[str, str]:
        return {}

    def stop(self, timeout_s: float = 90) -> None:
        """Shut the system down cleanly, and pull the plug when it does not end in time.

        Args:
            timeout_s: Seconds to wait before the plug is pulled.
        """
        if self.process and self.running:
            try:
                self._ask_to_shut_down()
            except (OSError, UnavailableError) as error:  # perhaps it ends just now
                log.warning("%s can't be asked to shut down: %s", self.spec.instance_id, error)
                timeout_s = min(timeout_s, 5)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Pull the plug."""
        if self.process and self.running:
            # a container outlives its nspawn; with its first process the kernel ends all of it
            below = children(self.process.pid)
            for pid in (*below, self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            for child in below:  # the server is the first process of its namespace and inherits them
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        self.release()

    def attach(self, disk: AttachedDisk) -> None:
        """Give the machine another disk, now where it runs.

        Raises:
            UnavailableError: It does not take it.
        """
        if self.running:
            self._plug(disk)
        self.disks[disk.volume_id] = disk

    def detach(self, volume_id: str, *, force: bool) -> bool:
        """Take a disk away.

        Args:
            volume_id: Its volume; the root can't be taken.
            force: Also while the machine uses it.

        Returns:
            Whether the machine has given it back.
        """
        disk = self.disks[volume_id]
        if self.running and not self._unplug(disk, force=force):
            return False
        del self.disks[volume_id]
        return True

    def resize(self, volume_id: str) -> None:
        """Let a running machine see the new size of a disk whose file has grown.

        Args:
            volume_id: The root volume or one of `disks`.
        """
        if self.running:
            self._resize(self.disks.get(volume_id, self.spec.root))

    @abstractmethod
    def release(self) -> None:
        """Give back what a running machine holds: mounts, sockets, loop devices."""

    @abstractmethod
    def frozen(self, volume_ids: set[str]) -> contextlib.AbstractContextManager[None]:
        """Writes to disks are held for the length of a block, so that copies of them are consistent."""

    @abstractmethod
    def _plug(self, disk: AttachedDisk) -> None: ...

    @abstractmethod
    def _unplug(self, disk: AttachedDisk, *, force: bool) -> bool: ...

    @abstractmethod
    def _resize(self, disk: AttachedDisk) -> None: ...

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _ask_to_shut_down(self) -> None: ...


def remove_folder(folder: Path) -> None:
    """Remove what a machine left behind; nothing may be mounted below it.

    Args:
        folder: The machine's folder.
    """
    root = folder / "root"
    if os.path.ismount(root):
        tool("umount", "--lazy", str(root))
    shutil.rmtree(folder, ignore_errors=False)


def children(pid: int) -> list[int]:
    """Children of a process, of all of its threads (proc(5): /proc/PID/task/TID/children).

    Args:
        pid: The process.
    """
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(child) for child in file.read_text().split()]
    return pids
