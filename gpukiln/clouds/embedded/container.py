"""A machine as a container (systemd-nspawn) on its mounted disk: fast.

Root of a container is nobody on this computer: its user ids are others here (user_namespaces(7)), and its
disk is mounted so that it does not notice (systemd-nspawn(1), --private-users-ownership=map). It makes no
device nodes, so it has those alone that it was given. What needs more asks for a privileged container, whose
root is this computer's: mounting a volume, a container engine, rules of a firewall.
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
# The network belongs to this computer: who has no rights over it can't configure it, and need not.
UNPRIVILEGED_UNITS = {
    f"system/systemd-networkd{name}.d/container.conf": "[Unit]\nConditionVirtualization=!container\n"
    for name in (".service", ".socket", "-wait-online.service")
} | {
    # nspawn leaves it no right to port 53; then its stub-resolv.conf names the servers themselves
    "resolved.conf.d/no-stub.conf": "[Resolve]\nDNSStubListener=no\n",
}
NVIDIA_MAJOR = 195  # linux/Documentation/admin-guide/devices.txt
UNPRIVILEGED_SETTINGS = {  # of its network: what root may do on a machine without rights over it
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 2147483647",
}
USERS = 1 << 16  # user ids of a container
FIRST_USER = 0x7000_0000  # behind those that systemd-nspawn takes by itself (systemd, UIDS-GIDS.md)
RANGES = 4095


def first_user(instance_id: str) -> int:
    """User id on this computer of the root of a container without privileges.

    Two containers may have the same, which gives neither a way to the other: processes, files and control
    groups are in namespaces of their own.
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
        if units.exists():  # its root could write there
            shutil.rmtree(units)
        for name, text in self._units().items():
            file = units / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for path in (units, *units.rglob("*")):
            os.chown(path, self._user, self._user)

    def _environment(self) -> dict[str, str]:
        # a privileged container's network settings are its own: Docker switches forwarding on
        return {} if self._user else {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}

    def _units(self) -> dict[str, str]:
        return {
            **CONTAINER_UNITS,
            **(UNPRIVILEGED_UNITS if self._user else {}),
            **(machine_files.CONTAINER_UNITS if self.gpus else {}),
        }

    def _privilege_arguments(self) -> list[str]:
        """The command line up to nspawn's options that say what the container may."""
        nspawn = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no"]
        if not self._user:
            return [
                *nspawn,
                *(f"--network-namespace-path={self.network.path}", "--capability=CAP_NET_ADMIN"),
                # runc gives a container a keyring of its own, which nspawn's list of calls leaves out.
                "--system-call-filter=add_key keyctl",
            ]
        # Who has a user namespace of its own can't enter the network's: nspawn begins there.
        return [
            *("nsenter", f"--net={self.network.path}", *nspawn),
            *(f"--private-users={self._user}:{USERS}", "--private-users-ownership=map"),
        ]

    def _command(self) -> list[str]:
        # Writes are not synced one by one: the disk is copied only after a clean stop or a freeze, and the
        # disk of a machine that died is thrown away.
        return [
            *self._joining,
            *self._privilege_arguments(),
            *("--console=read-only", "--link-journal=no", "--timezone=off", "--resolv-conf=off"),
            *(f"--machine={self.spec.instance_id}", f"--directory={self._root}"),
            *self._unit_binds(),
        ]

    def _unit_binds(self) -> list[str]:
        units = self.spec.folder / "units"
        if self._user:
            # nspawn would make the folders above a file with an owner that is nobody in the container
            # (systemd 252, mount_bind), and systemd writes there
            return [f"--bind={units}:/run/systemd"]
        return [f"--bind-ro={units}/{name}:/run/systemd/{name}" for name in self._units()]

    def _ask_to_shut_down(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)  # nspawn passes an orderly shutdown on to PID 1

    def start(self) -> None:
        """Boot, with every disk."""
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
        """Let it write its own control groups."""
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
            UnavailableError: It failed; the details are the end of what it said.
        """
        user = ["--user"] if self._user else []  # with it nsenter becomes the container's root
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
        """Give the running container its simulated GPUs now; its next starts have them from the beginning."""
        gpus.prepare(self._root)
        self._copy_gpu_files(gpus)
        self.run_inside("sh", str(machine_files.FOLDER / machine_files.UP))

    def _copy_gpu_files(self, gpus: SimulatedGpus) -> None:
        """Give the running container a copy of what was prepared, the one thing that its root can change."""
        files = [
            (file.name, file.read_bytes(), stat.S_IMODE(file.stat().st_mode))
            for file in gpus.files.folder.iterdir()
        ]
        files.sort(key=lambda file: file[0] == machine_files.UP)  # last: the unit waits for it
        init = self._init_pid()
        root = Path(f"/proc/{init}/root")
        if self._user:
            self._devices.add_characters(init, _gpu_nodes(gpus.files))
        self.gpus, self.gpu_files = gpus, machine_files.MachineFiles(machine_files.FOLDER, root)
        # Process ids of the container mean something in its own namespace alone.
        namespace = str(Path(f"/proc/{init}/ns/pid").readlink())
        gpus.files.state.change(lambda rows: rows.update(pid_namespace=namespace))
        in_root(root, lambda: _write_files(machine_files.FOLDER, files, owner=self._user))

    def hide_gpus(self) -> None:
        """Take them away again; the image's own files are seen as they are."""
        self.run_inside("sh", "-c", machine_files.DOWN)
        self.gpus = self.gpu_files = None

    def _resize(self, disk: AttachedDisk) -> None:
        if (
            disk is not self.spec.root
        ):  # the root's device can't be seen from inside: it grows at the next start
            self._devices.resize(disk)

    def _init_pid(self) -> int:
        """The container's first process, once it is one: until then it has this host's devices."""
        for _ in range(100):
            for child in children(self.process.pid) if self.process else ():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{child}/exe").readlink().name != "systemd-nspawn":
                        return child
            time.sleep(0.1)
        raise UnavailableError(f"{self.spec.instance_id} has no first process after 10 s")

    def release(self) -> None:
        """Unmount the disk, let the others go."""
        self.gpu_files = None
        self._devices.release()
        cgroups.remove(self.spec.instance_id)
        if self._root.is_mount():
            # processes of the container may need a moment to die after nspawn has ended
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
        """Freeze the file systems on them."""
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
    """Device numbers by name: null (1, 3) where this kernel has NVIDIA's driver, and they were real GPUs."""
    taken = f"{NVIDIA_MAJOR} " in Path("/proc/devices").read_text()  # of this computer: a machine may lie
    return {
        name: os.makedev(*((1, 3) if taken else (NVIDIA_MAJOR, minor)))
        for name, minor in machine_files.device_nodes(gpu_count(files.state.rows()))
    }


def _write_files(folder: Path, files: Sequence[tuple[str, bytes, int]], *, owner: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content, mode in files:
        part = folder / f"{name}.new"
        part.write_bytes(content)
        part.chmod(mode)
        os.chown(part, owner, owner)
        part.replace(folder / name)
    os.chown(folder, owner, owner)
