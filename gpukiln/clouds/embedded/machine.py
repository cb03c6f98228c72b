"""A machine that boots from a disk: the common part of containers and virtual machines."""

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
from gpukiln.clouds.embedded.cluster.node import NodeFiles
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
    """The properties of a machine.

    Args:
        instance_id: The EC2 instance it stands for.
        kind: container (in a user namespace), privileged (a container whose root is this computer's root) or
            vm.
        root: The root volume.
        console: File for the console's output.
        address: Private IPv4 address in 127.0.0.0/8.
        ssh_port: Port on that address that is forwarded to SSH.
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
    """A machine; start, stop and kill are safe in any state.

    Args:
        spec: Its properties.
        network: Its network; started and stopped with the machine.
    """

    def __init__(self, spec: MachineSpec, network: MachineNetwork) -> None:
        self.spec = spec
        self.network = network
        self.process: subprocess.Popen[bytes] | None = None
        self.disks: dict[str, AttachedDisk] = {}  # by volume id, without the root
        self.gpus: SimulatedGpus | None = None  # those of its next start
        self.node: NodeFiles | None = None  # of its next start; None: it joins no cluster of this computer
        self.gpu_files: MachineFiles | None = None  # of the present GPUs; None: it has none

    @property
    def running(self) -> bool:
        """Whether its process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Boot.

        Raises:
            UnavailableError: A tool is missing or failed.
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
        # A wrong argument or a missing device ends nspawn and QEMU within this time.
        time.sleep(0.3)
        if not self.running:
            code = self.process.returncode
            self.release()
            # the reason goes into EC2's XML, which can't have control characters
            said = ESCAPES.sub("", self.spec.console.read_text(errors="replace"))
            tail = [line for line in said.splitlines() if line][-5:]
            raise UnavailableError(
                f"{self.spec.instance_id} ended at once with exit code {code}", details=tuple(tail)
            )

    def _environment(self) -> dict[str, str]:
        return {}

    def stop(self, timeout_s: float = 90) -> None:
        """Shut the system down cleanly; kill it where it does not end in time.

        Args:
            timeout_s: Seconds to wait before the kill.
        """
        if self.process and self.running:
            try:
                self._ask_to_shut_down()
            except (OSError, UnavailableError) as error:  # it may be ending
                log.warning("%s can't be asked to shut down: %s", self.spec.instance_id, error)
                timeout_s = min(timeout_s, 5)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the machine at once, like a power failure."""
        if self.process and self.running:
            # a container outlives nspawn; when its first process is killed, the kernel kills the rest
            below = children(self.process.pid)
            for pid in (*below, self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            for child in below:  # the server is PID 1 of its namespace, so it inherits and has to reap them
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        self.release()

    def attach(self, disk: AttachedDisk) -> None:
        """Attach a disk; a running machine gets it by hot-plug.

        Raises:
            UnavailableError: The machine refused it.
        """
        if self.running:
            self._plug(disk)
        self.disks[disk.volume_id] = disk

    def detach(self, volume_id: str, *, force: bool) -> bool:
        """Detach a disk.

        Args:
            volume_id: Its volume, not the root.
            force: Also while the machine uses it.

        Returns:
            Whether the machine has released it.
        """
        disk = self.disks[volume_id]
        if self.running and not self._unplug(disk, force=force):
            return False
        del self.disks[volume_id]
        return True

    def resize(self, volume_id: str) -> None:
        """Make the new size of a disk's file visible to a running machine.

        Args:
            volume_id: The root volume or one of `disks`.
        """
        if self.running:
            self._resize(self.disks.get(volume_id, self.spec.root))

    @abstractmethod
    def release(self) -> None:
        """Release mounts, sockets and loop devices of a machine that has ended."""

    @abstractmethod
    def frozen(self, volume_ids: set[str]) -> contextlib.AbstractContextManager[None]:
        """Hold writes to disks while the block runs, so that copies of them are consistent."""

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
    """Remove a machine's folder, unmounting its root first.

    Args:
        folder: The machine's folder.
    """
    root = folder / "root"
    if os.path.ismount(root):
        tool("umount", "--lazy", str(root))
    shutil.rmtree(folder, ignore_errors=False)


def children(pid: int) -> list[int]:
    """PIDs of the children of a process, from all its threads (proc(5), /proc/PID/task/TID/children).

    Args:
        pid: The process.
    """
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(child) for child in file.read_text().split()]
    return pids
