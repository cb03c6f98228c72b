"""A machine as a virtual machine (QEMU) on its raw disk, with the image's own kernel for verification."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpukiln.clouds.embedded import accelerator
from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.cluster.relay import KUBELET_PORT
from gpukiln.clouds.embedded.gpus.share import VirtiofsShare
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus
from gpukiln.clouds.embedded.hardware import firmware_arguments, firmware_of
from gpukiln.clouds.embedded.machine import LocalMachine
from gpukiln.clouds.embedded.network import GUEST, NAMESERVER
from gpukiln.clouds.embedded.qmp import Qmp
from gpukiln.disks.mount import mounted_root
from gpukiln.errors import UnavailableError

UNPLUG_S = 10  # seconds for a guest to release a device before the next request


class VirtualMachine(LocalMachine):
    """QEMU on the raw disk: its own bootloader, kernel and hardware."""

    _share: VirtiofsShare | None = None

    @property
    def _control(self) -> Path:
        return self.spec.folder / "qmp.sock"

    def _prepare(self) -> None:
        (self.spec.folder / "resolv.conf").write_text(f"nameserver {NAMESERVER}\n")
        if self.gpus:
            self._prepare_gpus(self.gpus)
        if self.node:
            with mounted_root(self.spec.root.file, writable=True) as root:
                self.node.prepare(root)

    def _prepare_gpus(self, gpus: SimulatedGpus) -> None:
        with mounted_root(self.spec.root.file, writable=True) as root:
            gpus.prepare(root)
            gpus.files.put_unit(root)
            # the initial PID namespace has this number on every kernel (linux/proc_ns.h, PROC_PID_INIT_INO)
            gpus.files.state.change(lambda rows: rows.update(pid_namespace=f"pid:[{0xEFFFFFFC}]"))
        self._share = VirtiofsShare(gpus.files.folder, self.spec.folder)
        self._share.start()
        self.gpu_files = gpus.files

    def _command(self) -> list[str]:
        spec = self.spec
        # 06: a locally administered unicast address.
        mac = "06:" + ":".join(spec.instance_id[-10:][i : i + 2] for i in range(0, 10, 2))
        # guests recognise EC2 by a UUID that begins with ec2, as on Nitro
        digits = "ec2" + spec.instance_id.removeprefix("i-").rjust(29, "0")
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        ports = (22, KUBELET_PORT) if self.node else (22,)
        forwards = ",".join(f"hostfwd=tcp:{GUEST}:{port}-:{port}" for port in ports)
        # -nodefaults, -no-user-config: only the devices below, whatever QEMU's configuration is.
        qemu = [
            *("qemu-system-x86_64", *accelerator.arguments(spec.vcpus)),
            *("-m", str(spec.memory_mib), "-display", "none", "-nodefaults", "-no-user-config"),
            *firmware_arguments(firmware_of(spec.root.file), spec.folder),
            *(
                "-smbios",
                f"type=1,manufacturer=Amazon EC2,product=gpukiln embedded,uuid={uuid},serial={uuid}",
            ),
            # the root disk of a crashed machine is discarded, so flushes are not needed
            *("-blockdev", json.dumps(spec.root.qemu_node(durable=False))),
            *("-device", json.dumps({**spec.root.qemu_device, "bootindex": 0})),
            *(word for disk in self.disks.values() for word in _qemu_arguments(disk)),
            *("-netdev", f"user,id=net,net=10.0.3.0/24,{forwards}"),
            *("-device", f"virtio-net-pci,netdev=net,mac={mac}"),
            *("-device", "virtio-rng-pci", "-serial", "stdio"),
            # wait=off: QEMU starts without a client.
            *("-qmp", f"unix:{self._control},server=on,wait=off"),
            *(self._share.arguments(spec.memory_mib) if self._share else ()),
        ]
        # QEMU's resolver reads /etc/resolv.conf, and in the namespace only slirp4netns' name server is
        # reachable.
        enter = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return [
            *("nsenter", f"--net={self.network.path}", "unshare", "--mount", "--propagation", "private"),
            *("sh", "-c", enter, str(spec.folder / "resolv.conf"), *qemu),
        ]

    def _ask_to_shut_down(self) -> None:
        with Qmp(self._control) as qemu:
            qemu.execute("system_powerdown")

    def release(self) -> None:
        """Remove the control socket and stop the share."""
        self._control.unlink(missing_ok=True)
        self.gpu_files = None
        if self._share:
            self._share.stop()
            self._share = None

    def _plug(self, disk: AttachedDisk) -> None:
        with Qmp(self._control) as qemu:
            qemu.execute("blockdev-add", **disk.qemu_node(durable=True))
            try:
                qemu.execute("device_add", **disk.qemu_device)
            except UnavailableError:
                qemu.execute("blockdev-del", **{"node-name": disk.serial})
                raise

    def _unplug(self, disk: AttachedDisk, *, force: bool) -> bool:
        with Qmp(self._control) as qemu:
            # requests the guest, which may still be booting; QEMU refuses a second request before its answer
            with contextlib.suppress(UnavailableError):
                qemu.execute("device_del", id=disk.serial)
            if _wait_for(UNPLUG_S, lambda: not _has_device(qemu, disk)):
                # the device disappears a moment before its file is released
                return _wait_for(UNPLUG_S, lambda: _deleted_node(qemu, disk))
            if not force:
                return False
            # forced: the guest keeps a device on which every access fails
            hole = f"hole-{disk.serial}"
            fails = {
                "driver": "blkdebug",
                "node-name": hole,
                "image": {"driver": "null-co", "size": disk.file.stat().st_size},
                "inject-error": [{"event": "none", "errno": 5}],
            }
            with contextlib.suppress(UnavailableError):  # it exists since an earlier request
                qemu.execute("blockdev-add", **fails)
            path = f"/machine/peripheral/{disk.serial}"
            qemu.execute("qom-set", path=path, property="drive", value=hole)
            return _wait_for(UNPLUG_S, lambda: _deleted_node(qemu, disk))

    def _resize(self, disk: AttachedDisk) -> None:
        with Qmp(self._control) as qemu:
            size = disk.file.stat().st_size
            qemu.execute("block_resize", **{"node-name": disk.serial, "size": size})

    @contextlib.contextmanager
    def frozen(self, volume_ids: set[str]) -> Iterator[None]:
        """Pause the machine."""
        del volume_ids
        with Qmp(self._control) as qemu:
            qemu.execute("stop")
        try:
            yield
        finally:
            with Qmp(self._control) as qemu:
                qemu.execute("cont")


def _qemu_arguments(disk: AttachedDisk) -> tuple[str, ...]:
    node, device = json.dumps(disk.qemu_node(durable=True)), json.dumps(disk.qemu_device)
    return ("-blockdev", node, "-device", device)


def _has_device(qemu: Qmp, disk: AttachedDisk) -> bool:
    devices = qemu.execute("qom-list", path="/machine/peripheral")
    return disk.serial in [entry["name"] for entry in devices]


def _deleted_node(qemu: Qmp, disk: AttachedDisk) -> bool:
    try:
        qemu.execute("blockdev-del", **{"node-name": disk.serial})
    except UnavailableError:  # still in use
        return False
    return True


def _wait_for(seconds: float, question: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
