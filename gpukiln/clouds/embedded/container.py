"""A machine as a container (systemd-nspawn) on its mounted disk: fast."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from gpukiln.clouds.embedded import cgroups
from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.container_devices import ContainerDevices
from gpukiln.clouds.embedded.disk import fit_root, mount_root, run
from gpukiln.clouds.embedded.gpus import machine_files
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus
from gpukiln.clouds.embedded.machine import Machine, MachineSpec, children
from gpukiln.clouds.embedded.network import GATEWAY, GUEST, NAMESERVER, MachineNetwork
from gpukiln.errors import UnavailableError

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


class Container(Machine):
    """systemd-nspawn on the mounted disk: boots in seconds, with the host's kernel."""

    def __init__(self, spec: MachineSpec, network: MachineNetwork) -> None:
        super().__init__(spec, network)
        self._devices = ContainerDevices()
        self._joining: list[str] = []

    @property
    def _root(self) -> Path:
        return self.spec.folder / "root"

    def _mount(self) -> None:
        mount_root(self.spec.root.file, self._root)

    def _prepare(self) -> None:
        self._joining = cgroups.make(self.spec.instance_id)
        fit_root(self.spec.root.file)
        self._mount()
        if self.gpus:
            self.gpus.prepare(self._root)
        for name, text in self._units().items():
            file = self.spec.folder / "units" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def _units(self) -> dict[str, str]:
        return {**CONTAINER_UNITS, **(machine_files.CONTAINER_UNITS if self.gpus else {})}

    def _command(self) -> list[str]:
        # Writes are not synced one by one: the disk is copied only after a clean stop or a freeze, and the
        # disk of a machine that died is thrown away.
        return [
            *self._joining,
            *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no"),
            *("--console=read-only", "--link-journal=no", "--timezone=off", "--resolv-conf=off"),
            *(f"--machine={self.spec.instance_id}", f"--directory={self._root}"),
            *(f"--network-namespace-path={self.network.path}", "--capability=CAP_NET_ADMIN"),
            # runc gives a container a keyring of its own, which nspawn's list of calls leaves out.
            "--system-call-filter=add_key keyctl",
            *(f"--bind-ro={self.spec.folder}/units/{name}:/run/systemd/{name}" for name in self._units()),
            *([f"--bind={self.gpus.files.folder}:{machine_files.FOLDER}"] if self.gpus else []),
        ]

    def _ask_to_shut_down(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)  # nspawn passes an orderly shutdown on to PID 1

    def start(self) -> None:
        """Boot, with every disk."""
        super().start()
        try:
            if self.gpus:
                self.shown = self.gpus.files
                self._namespace(self.shown)
            self._open_cgroups()
            for disk in self.disks.values():
                self._plug(disk)
        except BaseException:
            self.kill()
            raise

    def _open_cgroups(self) -> None:
        """Let it write its own control groups."""
        mounts = Path(f"/proc/{self._init()}/mounts").read_text(encoding="utf-8").splitlines()
        for _, where, kind, options, *_ in map(str.split, mounts):
            if kind == "cgroup" and options.split(",")[0] == "ro":
                self.run_inside("mount", "-o", "remount,rw,bind", where)

    def _plug(self, disk: AttachedDisk) -> None:
        self._devices.add(self._init(), disk)

    def _unplug(self, disk: AttachedDisk, *, force: bool) -> bool:
        return self._devices.remove(self._init(), disk, force=force)

    def run_inside(self, *command: str) -> str:
        """Run a command in the running container, as root.

        Raises:
            UnavailableError: It failed; the details are the end of what it said.
        """
        return run(
            *("nsenter", f"--target={self._init()}", "--mount", "--uts", "--ipc", "--net", "--pid"), *command
        )

    def show_gpus(self, gpus: SimulatedGpus) -> None:
        """Give the running container its simulated GPUs now; its next starts have them from the beginning."""
        gpus.prepare(self._root)
        there = Path(f"/proc/{self._init()}/root{machine_files.FOLDER}")
        shutil.copytree(gpus.files.folder, there, dirs_exist_ok=True)
        self.gpus, self.shown = gpus, machine_files.MachineFiles(there)
        self._namespace(self.shown)
        self.run_inside("sh", str(machine_files.FOLDER / "up"))

    def hide_gpus(self) -> None:
        """Take them away again; the image's own files are seen as they are."""
        self.run_inside("sh", "-c", machine_files.DOWN)
        self.gpus = self.shown = None

    def _namespace(self, files: machine_files.MachineFiles) -> None:
        """Process ids of the container mean something in its own namespace alone."""
        name = str(Path(f"/proc/{self._init()}/ns/pid").readlink())
        files.state.change(lambda rows: rows.update(pid_namespace=name))

    def _resize(self, disk: AttachedDisk) -> None:
        if (
            disk is not self.spec.root
        ):  # the root's device can't be seen from inside: it grows at the next start
            self._devices.resize(disk)

    def _init(self) -> int:
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
        self.shown = None
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
            run("umount", "--lazy", str(self._root))

    @contextlib.contextmanager
    def frozen(self, volume_ids: set[str]) -> Iterator[None]:
        """Freeze the file systems on them."""
        mountpoints = self._devices.mountpoints(self._init(), volume_ids)
        if self.spec.root.volume_id in volume_ids:
            mountpoints.append(self._root)
        with contextlib.ExitStack() as thaw:
            for mountpoint in mountpoints:
                run("fsfreeze", "--freeze", str(mountpoint))
                thaw.callback(run, "fsfreeze", "--unfreeze", str(mountpoint))
            self._devices.flush(volume_ids)
            yield
