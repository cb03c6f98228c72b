"""A machine as a container (systemd-nspawn) on its mounted disk: it boots in seconds.

Root of a container has no rights on this computer: its user ids are mapped (user_namespaces(7)), and so is
the ownership of its disk (systemd-nspawn(1), --private-users-ownership=map). It can create no device nodes,
so it has only those that it was given. Mounting a volume, a container engine and firewall rules need a
privileged container, whose root is this computer's root.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpukiln.clouds.embedded import cgroups
from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.clouds.embedded.container_devices import ContainerDevices
from gpukiln.clouds.embedded.gpus import machine_files
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus
from gpukiln.clouds.embedded.gpus.state import gpu_count
from gpukiln.clouds.embedded.machine import LocalMachine, MachineSpec, children
from gpukiln.clouds.embedded.network import GATEWAY, GUEST, NAMESERVER, MachineNetwork
from gpukiln.disks.grow import fit_root
from gpukiln.disks.mount import mount_root
from gpukiln.errors import UnavailableError
from gpukiln.programs import tool

# Files below /run/systemd of the container, so that the image itself needs no configuration for containers.
CONTAINER_UNITS = {
    # slirp4netns has configured the interface already
    "network/10-eth0.network": (
        f"[Match]\nName=eth0\n[Network]\nAddress={GUEST}/24\nGateway={GATEWAY}\nDNS={NAMESERVER}\n"
        # there is no IPv6 router: waiting for one would take 12 s of every boot
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "resolved.conf.d/cloud.conf": f"[Resolve]\nDNS={NAMESERVER}\n",
    # the root is mounted already, and its device is not visible in the container
    "system/systemd-remount-fs.service.d/container.conf": "[Unit]\nConditionVirtualization=!container\n",
}
# An unprivileged container has no rights over its network namespace, which is configured already.
UNPRIVILEGED_UNITS = {
    f"system/systemd-networkd{name}.d/container.conf": "[Unit]\nConditionVirtualization=!container\n"
    for name in (".service", ".socket", "-wait-online.service")
} | {
    # it has no right to bind port 53; without the stub, stub-resolv.conf has the real servers
    "resolved.conf.d/no-stub.conf": "[Resolve]\nDNSStubListener=no\n",
}
NVIDIA_MAJOR = 195  # linux/Documentation/admin-guide/devices.txt
UNPRIVILEGED_SETTINGS = {  # sysctls of its network namespace, for what root may do without rights over it
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 2147483647",
}
USERS = 1 << 16  # number of user ids of a container
FIRST_USER = 0x7000_0000  # behind the range that systemd-nspawn allocates itself (systemd, UIDS-GIDS.md)
# FIRST_USER + RANGES * USERS stays below 2**31, the largest id that all tools accept.
RANGES = 4095


def first_user(instance_id: str) -> int:
    """User id on this computer of an unprivileged container's root.

    Two containers may share an id. They still can't reach each other: processes, files and control groups are
    in namespaces of their own.

    >>> first_user("i-0123456789abcdef0") % USERS
    0
    """
    return FIRST_USER + zlib.crc32(instance_id.encode()) % RANGES * USERS


class ContainerMachine(LocalMachine):
    """systemd-nspawn on the mounted disk: boots in seconds, with the host's kernel."""

    def __init__(self, spec: MachineSpec, network: MachineNetwork) -> None:
        super().__init__(spec, network)
        self._user = 0 if spec.kind == "privileged" else first_user(spec.instance_id)
        self._devices = ContainerDevices(owner=self._user)
        self._joining: list[str] = []

    @property
    def _root(self) -> Path:
        return self.spec.folder / "root"

    def _mount(self) -> None:
        mount_root(self.spec.root.file, self._root, devices=not self._user)

    def _prepare(self) -> None:
        self._joining = cgroups.make(self.spec.instance_id, owner=self._user)
        if self._user:
            settings = (f"{name}={value}" for name, value in UNPRIVILEGED_SETTINGS.items())
            tool("nsenter", f"--net={self.network.path}", "sysctl", "--quiet", "--write", *settings)
        fit_root(self.spec.root.file)
        self._mount()
        if self.gpus:
            self.gpus.prepare(self._root)
        units = self.spec.folder / "units"
        if units.exists():  # the container's root could write there
            shutil.rmtree(units)
        for name, text in self._units().items():
            file = units / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for path in (units, *units.rglob("*")):
            os.chown(path, self._user, self._user)

    def _environment(self) -> dict[str, str]:
        # a privileged container owns its network settings: Docker enables forwarding
        return {} if self._user else {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}

    def _units(self) -> dict[str, str]:
        return {
            **CONTAINER_UNITS,
            **(UNPRIVILEGED_UNITS if self._user else {}),
            **(machine_files.CONTAINER_UNITS if self.gpus else {}),
        }

    def _privilege_arguments(self) -> list[str]:
        """The command line up to nspawn's options for the container's privileges."""
        nspawn = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no"]
        if not self._user:
            return [
                *nspawn,
                *(f"--network-namespace-path={self.network.path}", "--capability=CAP_NET_ADMIN"),
                # runc creates a keyring for each container; nspawn's system call filter forbids that by
                # default.
                "--system-call-filter=add_key keyctl",
            ]
        # From a user namespace of its own nspawn could not enter the network namespace, so it starts there.
        return [
            *("nsenter", f"--net={self.network.path}", *nspawn),
            *(f"--private-users={self._user}:{USERS}", "--private-users-ownership=map"),
        ]

    def _command(self) -> list[str]:
        # No sync of single writes: the disk is copied only after a clean stop or a freeze, and the disk of a
        # machine that crashed is discarded.
        return [
            *self._joining,
            *self._privilege_arguments(),
            # read-only: the console goes to a file, and nothing is typed into it.
            *("--console=read-only", "--link-journal=no", "--timezone=off", "--resolv-conf=off"),
            *(f"--machine={self.spec.instance_id}", f"--directory={self._root}"),
            *self._unit_binds(),
        ]

    def _unit_binds(self) -> list[str]:
        units = self.spec.folder / "units"
        if self._user:
            # For single files nspawn would create the parent folders with an owner that is not mapped in the
            # container (systemd 252, mount_bind), and systemd writes to them.
            return [f"--bind={units}:/run/systemd"]
        return [f"--bind-ro={units}/{name}:/run/systemd/{name}" for name in self._units()]

    def _ask_to_shut_down(self) -> None:
        if self.process:
            self.process.send_signal(
                signal.SIGTERM
            )  # nspawn passes it to PID 1 as a request for an orderly shutdown

    def start(self) -> None:
        """Boot with all disks."""
        super().start()
        try:
            if self.gpus:
                self._copy_gpu_files(self.gpus)
            if not self._user:
                self._open_cgroups()
            for disk in self.disks.values():
                self._plug(disk)
        except BaseException:
            self.kill()
            raise

    def _open_cgroups(self) -> None:
        """Make its control groups writable (cgroup v1 binds them read-only)."""
        mounts = Path(f"/proc/{self._init_pid()}/mounts").read_text(encoding="utf-8").splitlines()
        for _, where, kind, options, *_ in map(str.split, mounts):
            if kind == "cgroup" and options.split(",")[0] == "ro":
                self.run_inside("mount", "-o", "remount,rw,bind", where)

    def _plug(self, disk: AttachedDisk) -> None:
        self._devices.add(self._init_pid(), disk)

    def _unplug(self, disk: AttachedDisk, *, force: bool) -> bool:
        return self._devices.remove(self._init_pid(), disk, force=force)

    def run_inside(self, *command: str) -> str:
        """Run a command in the running container, as root.

        Raises:
            UnavailableError: It failed; the details are the end of its output.
        """
        user = ["--user"] if self._user else []  # with --user nsenter becomes the container's root
        return tool(
            *(
                "nsenter",
                f"--target={self._init_pid()}",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                *user,
            ),
            *command,
        )

    def show_gpus(self, gpus: SimulatedGpus) -> None:
        """Add simulated GPUs to the running container; later starts have them from the beginning."""
        gpus.prepare(self._root)
        self._copy_gpu_files(gpus)
        self.run_inside("sh", str(machine_files.FOLDER / machine_files.UP))

    def _copy_gpu_files(self, gpus: SimulatedGpus) -> None:
        """Copy the prepared files into the running container; its root can change only this copy."""
        files = [
            (file.name, file.read_bytes(), stat.S_IMODE(file.stat().st_mode))
            for file in gpus.files.folder.iterdir()
        ]
        files.sort(key=lambda file: file[0] == machine_files.UP)  # last, because the unit waits for this file
        init = self._init_pid()
        root = Path(f"/proc/{init}/root")
        if self._user:
            self._devices.add_characters(init, _gpu_nodes(gpus.files))
        self.gpus, self.gpu_files = gpus, machine_files.MachineFiles(machine_files.FOLDER, root)
        # Process ids in the state are those of the container's PID namespace.
        namespace = str(Path(f"/proc/{init}/ns/pid").readlink())
        gpus.files.state.change(lambda rows: rows.update(pid_namespace=namespace))
        in_root(root, lambda: _write_files(machine_files.FOLDER, files, owner=self._user))

    def hide_gpus(self) -> None:
        """Remove the simulated GPUs; the image's own files are visible again."""
        self.run_inside("sh", "-c", machine_files.DOWN)
        self.gpus = self.gpu_files = None

    def _resize(self, disk: AttachedDisk) -> None:
        if (
            disk is not self.spec.root
        ):  # the root's device is not visible in the container: it grows at the next start
            self._devices.resize(disk)

    def _init_pid(self) -> int:
        """PID of the container's first process; before it replaces nspawn it has this computer's devices."""
        for _ in range(100):
            for child in children(self.process.pid) if self.process else ():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{child}/exe").readlink().name != "systemd-nspawn":
                        return child
            time.sleep(0.1)
        raise UnavailableError(f"{self.spec.instance_id} has not started its first process after 10 s")

    def release(self) -> None:
        """Unmount the disk and release the other devices."""
        self.gpu_files = None
        self._devices.release()
        cgroups.remove(self.spec.instance_id)
        if self._root.is_mount():
            # the container's processes may end a moment after nspawn
            for _ in range(50):
                if (
                    subprocess.run(["umount", str(self._root)], capture_output=True, check=False).returncode
                    == 0
                ):
                    return
                time.sleep(0.1)
            tool("umount", "--lazy", str(self._root))

    @contextlib.contextmanager
    def frozen(self, volume_ids: set[str]) -> Iterator[None]:
        """Freeze the file systems on the volumes."""
        mountpoints = self._devices.mountpoints(self._init_pid(), volume_ids)
        if self.spec.root.volume_id in volume_ids:
            mountpoints.append(self._root)
        with contextlib.ExitStack() as thaw:
            for mountpoint in mountpoints:
                tool("fsfreeze", "--freeze", str(mountpoint))
                thaw.callback(tool, "fsfreeze", "--unfreeze", str(mountpoint))
            self._devices.flush(volume_ids)
            yield


def _gpu_nodes(files: machine_files.MachineFiles) -> dict[str, int]:
    """Device numbers by name; (1, 3), /dev/null, where this kernel's driver would make them real GPUs."""
    taken = (
        f"{NVIDIA_MAJOR} " in Path("/proc/devices").read_text()
    )  # this computer's list: a machine could fake its own
    return {
        name: os.makedev(*((1, 3) if taken else (NVIDIA_MAJOR, minor)))
        for name, minor in machine_files.device_nodes(gpu_count(files.state.rows()))
    }


def _write_files(folder: Path, files: Sequence[tuple[str, bytes, int]], *, owner: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content, mode in files:
        # Renamed into place: a program may have the library open.
        part = folder / f"{name}.new"
        part.write_bytes(content)
        part.chmod(mode)
        os.chown(part, owner, owner)
        part.replace(folder / name)
    os.chown(folder, owner, owner)
