"""Every machine of the embedded cloud, by instance id: disk, network, metadata service and life."""

import os
import shutil
import threading
import zlib
from contextlib import ExitStack
from typing import Any

from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.disk import copy_disk, free_bytes, grow_disk, used_bytes
from gpukiln.clouds.embedded.instance_metadata import describe_instance
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import Machine, MachineSpec, make_machine, remove_folder
from gpukiln.clouds.embedded.metadata import MetadataServer
from gpukiln.clouds.embedded.network import free_ssh_port
from gpukiln.errors import UnavailableError

MACHINE_TAG = "gpukiln:machine"  # "container" (the default) or "vm"
ROOM = 2 << 30  # bytes to be free beyond a copy before a disk is copied


def is_vm(instance: Any) -> bool:
    """Whether an instance's tags ask for a virtual machine.

    Args:
        instance: moto's instance.
    """
    return bool(instance.ec2_backend.tags.get(instance.id, {}).get(MACHINE_TAG) == "vm")


class Machines:
    """Every machine of this cloud, by instance id.

    Args:
        layout: The embedded cloud's files.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.ssh_port = free_ssh_port("127.64.0.1")
        self._by_id: dict[str, Machine] = {}
        self._metadata: dict[str, MetadataServer] = {}
        self._locks: dict[str, threading.RLock] = {}

    def vpc_cidr(self, region: str) -> str:
        """The address range of a region's default VPC, in loopback, apart from other clouds on this host.

        Args:
            region: Name of the region.

        Returns:
            A /16 network.
        """
        number = zlib.crc32(f"{self.layout.home}:{region}".encode())
        return f"127.{64 + number % 180}.0.0/16"

    def lock(self, instance_id: str) -> threading.RLock:
        """Changes of one machine happen one after the other.

        Args:
            instance_id: Its instance.

        Returns:
            The lock.
        """
        return self._locks.setdefault(instance_id, threading.RLock())

    def get(self, instance_id: str) -> Machine | None:
        """The machine of an instance, or None when it has none (any more).

        Args:
            instance_id: The instance.
        """
        return self._by_id.get(instance_id)

    def all(self) -> list[Machine]:
        """Every machine there is, running or stopped."""
        return list(self._by_id.values())

    def console(self, instance_id: str) -> bytes:
        """What a machine wrote on its console, the last 64 KiB as on EC2.

        Args:
            instance_id: Its instance; it may be terminated.
        """
        file = self.layout.root / "consoles" / f"{instance_id}.log"
        return file.read_bytes()[-65536:] if file.exists() else b""

    def create(self, instance: Any) -> Machine:
        """Make the disk of a new instance.

        Args:
            instance: moto's instance.

        Returns:
            Its machine, not started.

        Raises:
            UnavailableError: The AMI has no disk here, or the disk can't be copied.
        """
        ami = instance.ec2_backend.amis.get(instance.image_id)
        if ami is None:
            raise UnavailableError(f"{instance.image_id} is not an AMI of the embedded cloud")
        source = self.layout.snapshot(ami.ebs_snapshot.id)
        base = base_image.current_base(self.layout)
        if not source.exists() and ami.ebs_snapshot.id == base.snapshot_id:
            base_image.build_base(self.layout, base)
        if not source.exists():
            raise UnavailableError(f"{ami.id} points at {ami.ebs_snapshot.id}, which has no disk")
        need, free = used_bytes(source) + ROOM, free_bytes(self.layout.machines)
        if free < need:
            raise UnavailableError(
                f"{free >> 20} MiB are free in {self.layout.machines}, {need >> 20} MiB are needed",
                hint="`invoke cloud.clean --images` shows images that can go",
            )
        consoles = self.layout.root / "consoles"
        consoles.mkdir(exist_ok=True)
        spec = MachineSpec(
            instance_id=instance.id,
            kind="vm" if is_vm(instance) else "container",
            folder=self.layout.machines / instance.id,
            console=consoles / f"{instance.id}.log",
            address=instance.private_ip,
            ssh_port=self.ssh_port,
            vcpus=os.cpu_count() or 1,
        )
        spec.folder.mkdir(parents=True)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, spec.folder)
            copy_disk(source, spec.disk)
            sizes = [device.size for _, device in instance.get_block_device_mapping if device.size]
            grow_disk(spec.disk, max(sizes, default=0))
            machine = make_machine(spec)
            undo.pop_all()
        self._by_id[instance.id] = machine
        return machine

    def start(self, instance: Any, machine: Machine) -> None:
        """Boot a machine with its network and its metadata service.

        Args:
            instance: moto's instance.
            machine: Its machine.
        """
        if machine.spec.disk.stat().st_nlink > 1:  # a snapshot has it too, and must stay as it is
            copy_disk(machine.spec.disk, machine.spec.disk)
        with ExitStack() as undo:
            undo.callback(machine.network.stop)
            machine.network.start()
            metadata = MetadataServer(machine.network.listen(80), lambda: describe_instance(instance))
            self._metadata[instance.id] = metadata
            undo.callback(self._stop_metadata, instance.id)
            machine.start()
            undo.pop_all()

    def stop(self, instance_id: str, *, clean: bool) -> None:
        """Shut a machine down and take its network away; its disk stays.

        Args:
            instance_id: Its instance.
            clean: Whether the system may shut down, or the plug is pulled.
        """
        machine = self._by_id.get(instance_id)
        if machine:
            machine.stop() if clean else machine.kill()
            self._stop_metadata(instance_id)
            machine.network.stop()

    def remove(self, instance_id: str) -> None:
        """Remove a machine with its disk.

        Args:
            instance_id: Its instance.
        """
        self.stop(instance_id, clean=False)
        if machine := self._by_id.pop(instance_id, None):
            remove_folder(machine.spec.folder)

    def existing(self, instance: Any) -> Machine:
        """The machine of an instance that must have one.

        Args:
            instance: moto's instance.

        Raises:
            UnavailableError: It has none.
        """
        machine = self.get(instance.id)
        if machine is None:
            raise UnavailableError(f"{instance.id} has no machine: it is {instance.state}")
        return machine

    def capture(self, instance: Any, snapshot_id: str) -> int:
        """Make an instance's disk a snapshot.

        Args:
            instance: moto's instance. A running one is held still while its disk is copied. The disk of a
                stopped one is the snapshot, until the instance is started again.
            snapshot_id: The snapshot.

        Returns:
            Size of the disk in GiB.

        Raises:
            UnavailableError: It has no machine, or the copy failed.
        """
        with self.lock(instance.id):
            machine = self.existing(instance)
            disk, snapshot = machine.spec.disk, self.layout.snapshot(snapshot_id)
            if not machine.running:
                os.link(disk, snapshot)
                return disk.stat().st_size >> 30
            machine.freeze()
            try:
                copy_disk(disk, snapshot)
            finally:
                machine.thaw()
            return disk.stat().st_size >> 30

    def _stop_metadata(self, instance_id: str) -> None:
        if server := self._metadata.pop(instance_id, None):
            server.stop()
