"""Machines that boot from a disk: a container (systemd-nspawn) is fast, a virtual machine (QEMU) proves."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpukiln.clouds.embedded import accelerator
from gpukiln.clouds.embedded.disk import mount_root, run
from gpukiln.clouds.embedded.network import GATEWAY, GUEST, NAMESERVER, MachineNetwork
from gpukiln.errors import UnavailableError

Kind = Literal["container", "vm"]
# Files that a container sees below /run/systemd, so that its disk need not know that it is one.
CONTAINER_UNITS = {
    # slirp4netns has configured the interface already
    "network/10-eth0.network": (
        f"[Match]\nName=eth0\n[Network]\nAddress={GUEST}/24\nGateway={GATEWAY}\nDNS={NAMESERVER}\n"
        # nobody advertises a router: waiting for one would take 12 s of every boot
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "resolved.conf.d/cloud.conf": f"[Resolve]\nDNS={NAMESERVER}\n",
    # the root is mounted already, and its device can't be seen from inside
    "system/systemd-remount-fs.service.d/container.conf": "[Unit]\nConditionVirtualization=!container\n",
}


@dataclass(frozen=True)
class MachineSpec:
    """What to boot.

    Args:
        instance_id: The EC2 instance it stands for.
        kind: Container or virtual machine.
        folder: The machine's own folder; its disk is volume.raw in it.
        console: File that gets the console's output.
        address: Private IPv4 address in 127.0.0.0/8.
        ssh_port: Port of that address that leads to SSH.
        vcpus: Virtual processors of a virtual machine.
        memory_mib: Memory of a virtual machine in MiB.
    """

    instance_id: str
    kind: Kind
    folder: Path
    console: Path
    address: str
    ssh_port: int
    vcpus: int = 2
    memory_mib: int = 2048

    @property
    def disk(self) -> Path:
        """The root volume."""
        return self.folder / "volume.raw"


class Machine(ABC):
    """A machine: start, stop and kill are safe in any state.

    Args:
        spec: What to boot.
        network: Its network; started and stopped with the machine.
    """

    def __init__(self, spec: MachineSpec, network: MachineNetwork) -> None:
        self.spec = spec
        self.network = network
        self.process: subprocess.Popen[bytes] | None = None

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
                # the container's own network settings are its own: Docker switches forwarding on
                env={**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        time.sleep(0.3)
        if not self.running:
            code = self.process.returncode
            self.release()
            tail = self.spec.console.read_text(errors="replace").splitlines()[-5:]
            raise UnavailableError(
                f"{self._command()[0]} ended at once, exit code {code}", details=tuple(tail)
            )

    def stop(self, timeout_s: float = 90) -> None:
        """Shut the system down cleanly, and pull the plug when it does not end in time.

        Args:
            timeout_s: Seconds to wait before the plug is pulled.
        """
        if self.process and self.running:
            self._ask_to_shut_down()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Pull the plug."""
        if self.process and self.running:
            # a container outlives its nspawn; with its first process the kernel ends all of it
            children = _children(self.process.pid)
            for pid in (*children, self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            for child in children:  # the server is the first process of its namespace and inherits them
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        self.release()

    @abstractmethod
    def release(self) -> None:
        """Give back what a running machine holds: mounts, sockets."""

    @abstractmethod
    def freeze(self) -> None:
        """Hold writes to the disk so that a copy of it is consistent."""

    @abstractmethod
    def thaw(self) -> None:
        """Let writes go on."""

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _ask_to_shut_down(self) -> None: ...


class Container(Machine):
    """systemd-nspawn on the mounted disk: boots in seconds, with the host's kernel."""

    @property
    def _root(self) -> Path:
        return self.spec.folder / "root"

    def _mount(self) -> None:
        mount_root(self.spec.disk, self._root)

    def _prepare(self) -> None:
        self._mount()
        for name, text in CONTAINER_UNITS.items():
            file = self.spec.folder / "units" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def _command(self) -> list[str]:
        # Writes are not synced one by one: the disk is copied only after a clean stop or a freeze, and the
        # disk of a machine that died is thrown away.
        return [
            *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no"),
            *("--console=read-only", "--link-journal=no", "--timezone=off", "--resolv-conf=off"),
            *(f"--machine={self.spec.instance_id}", f"--directory={self._root}"),
            *(f"--network-namespace-path={self.network.path}", "--capability=CAP_NET_ADMIN"),
            *(f"--bind-ro={self.spec.folder}/units/{name}:/run/systemd/{name}" for name in CONTAINER_UNITS),
        ]

    def _ask_to_shut_down(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)  # nspawn passes an orderly shutdown on to PID 1

    def release(self) -> None:
        """Unmount the disk."""
        if self._root.is_mount():
            # processes of the container may need a moment to die after nspawn has ended
            for _ in range(50):
                if (
                    subprocess.run(["umount", str(self._root)], capture_output=True, check=False).returncode
                    == 0
                ):
                    return
                time.sleep(0.1)
            run("umount", "--lazy", str(self._root))

    def freeze(self) -> None:
        """Freeze the file system."""
        run("fsfreeze", "--freeze", str(self._root))

    def thaw(self) -> None:
        """Thaw the file system."""
        run("fsfreeze", "--unfreeze", str(self._root))


class VirtualMachine(Machine):
    """QEMU on the raw disk: its own bootloader, kernel and hardware."""

    @property
    def _control(self) -> Path:
        return self.spec.folder / "qmp.sock"

    def _prepare(self) -> None:
        (self.spec.folder / "resolv.conf").write_text(f"nameserver {NAMESERVER}\n")

    def _command(self) -> list[str]:
        spec = self.spec
        mac = "06:" + ":".join(spec.instance_id[-10:][i : i + 2] for i in range(0, 10, 2))
        # by a UUID that starts with ec2 a guest knows where it is, as on Nitro
        digits = "ec2" + spec.instance_id.removeprefix("i-").rjust(29, "0")
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        qemu = [
            *("qemu-system-x86_64", *accelerator.arguments(), "-smp", str(spec.vcpus)),
            *("-m", str(spec.memory_mib), "-display", "none", "-nodefaults", "-no-user-config"),
            *(
                "-smbios",
                f"type=1,manufacturer=Amazon EC2,product=gpukiln embedded,uuid={uuid},serial={uuid}",
            ),
            *("-drive", f"file={spec.disk},format=raw,if=none,id=root,cache=unsafe,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-netdev", f"user,id=net,net=10.0.3.0/24,hostfwd=tcp:{GUEST}:22-:22"),
            *("-device", f"virtio-net-pci,netdev=net,mac={mac}"),
            *("-device", "virtio-rng-pci", "-serial", "stdio"),
            *("-qmp", f"unix:{self._control},server=on,wait=off"),
        ]
        # QEMU's own resolver reads /etc/resolv.conf: inside the namespace only slirp4netns' answers.
        enter = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return [
            *("nsenter", f"--net={self.network.path}", "unshare", "--mount", "--propagation", "private"),
            *("sh", "-c", enter, str(spec.folder / "resolv.conf"), *qemu),
        ]

    def _qmp(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(10)
            control.connect(str(self._control))
            stream = control.makefile("rw")
            stream.readline()  # the greeting
            for request in ("qmp_capabilities", command):
                stream.write(json.dumps({"execute": request}) + "\n")
                stream.flush()
                while "return" not in (answer := json.loads(stream.readline())):
                    if "error" in answer:
                        raise UnavailableError(f"QEMU refused {request}: {answer['error']['desc']}")

    def _ask_to_shut_down(self) -> None:
        with contextlib.suppress(OSError):  # it may end between the question and the call
            self._qmp("system_powerdown")

    def release(self) -> None:
        """Remove the control socket."""
        self._control.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Pause the machine."""
        self._qmp("stop")

    def thaw(self) -> None:
        """Let the machine go on."""
        self._qmp("cont")


def make_machine(spec: MachineSpec) -> Machine:
    """A machine of the kind asked for, not started.

    Args:
        spec: What to boot.

    Returns:
        The machine.
    """
    network = MachineNetwork(
        f"gk-{spec.instance_id}", spec.folder, address=spec.address, ssh_port=spec.ssh_port
    )
    return (VirtualMachine if spec.kind == "vm" else Container)(spec, network)


def remove_folder(folder: Path) -> None:
    """Remove what a machine left behind; nothing may be mounted below it.

    Args:
        folder: The machine's folder.
    """
    root = folder / "root"
    if os.path.ismount(root):
        run("umount", "--lazy", str(root))
    shutil.rmtree(folder, ignore_errors=False)


def _children(pid: int) -> list[int]:
    """Children of a process, of all of its threads (proc(5): /proc/PID/task/TID/children)."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found
