"""All machines of the embedded cloud by instance id, with their disks, networks and metadata services."""

import os
import shutil
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, get_args

from werkzeug.exceptions import NotFound

from gpukiln.clouds.embedded import accelerator, volume_files
from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.cluster.control_plane import NAME as CLUSTER
from gpukiln.clouds.embedded.cluster.control_plane import ClusterFiles, ControlPlane
from gpukiln.clouds.embedded.cluster.node import MEMORY_MIB, NodeFiles
from gpukiln.clouds.embedded.cluster.relay import API_PORT as API_PORT_OF_CLUSTER
from gpukiln.clouds.embedded.cluster.relay import KUBELET_PORT, Relay
from gpukiln.clouds.embedded.container import ContainerMachine
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus, is_simulated
from gpukiln.clouds.embedded.instance_metadata import describe_instance
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import Kind, LocalMachine, MachineSpec, remove_folder
from gpukiln.clouds.embedded.machine_api import Application, MachineApi
from gpukiln.clouds.embedded.metadata import MetadataServer
from gpukiln.clouds.embedded.network import API_PORT, MachineNetwork, free_ssh_port
from gpukiln.clouds.embedded.virtual_machine import VirtualMachine
from gpukiln.clouds.tags import CLUSTER_TAG, MACHINE_TAG
from gpukiln.disks.grow import grow_file
from gpukiln.disks.sparse import copy_disk, used_bytes
from gpukiln.errors import UnavailableError
from gpukiln.programs import require_space

KINDS: tuple[Kind, ...] = get_args(Kind)


def requested_kind(tags: Mapping[str, str]) -> Kind:
    """The kind of machine that an instance's tags request.

    Raises:
        ValueError: There is no such kind; the message has the valid ones.

    >>> requested_kind({}), requested_kind({"gpukiln:machine": "vm"})
    ('container', 'vm')
    """
    requested = tags.get(MACHINE_TAG, "container")
    for kind in KINDS:
        if requested == kind:
            return kind
    raise ValueError(f"The tag {MACHINE_TAG} is {requested!r}, wanted one of {', '.join(KINDS)}")


class Machines:
    """All machines of this cloud, by instance id.

    Args:
        layout: The embedded cloud's files.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.ssh_port = free_ssh_port("127.64.0.1")
        self._by_id: dict[str, LocalMachine] = {}
        self.cluster = ControlPlane(ClusterFiles(layout.cluster), self._kubelet)
        self.api: Application = NotFound()  # what machines can call
        self._served: dict[str, list[MetadataServer | MachineApi | Relay]] = {}
        self._locks: dict[str, threading.RLock] = {}

    def lock(self, instance_id: str) -> threading.RLock:
        """The lock for changes of one machine."""
        return self._locks.setdefault(instance_id, threading.RLock())

    def get(self, instance_id: str) -> LocalMachine | None:
        """The machine of an instance; None where it has none or has none any more."""
        return self._by_id.get(instance_id)

    def all(self) -> list[LocalMachine]:
        """All machines, running or stopped."""
        return list(self._by_id.values())

    def console(self, instance_id: str) -> bytes:
        """The last 64 KiB of a machine's console, as EC2 returns them.

        Args:
            instance_id: Its instance; it may be terminated.
        """
        file = self.layout.root / "consoles" / f"{instance_id}.log"
        return file.read_bytes()[-65536:] if file.exists() else b""

    def kind(self, instance: Any) -> Kind:
        """The kind of an instance's machine: vm where its disk was written from outside this cloud.

        A container would have this computer's kernel mount the file systems of such a disk.

        Args:
            instance: moto's instance.
        """
        if machine := self.get(instance.id):
            return machine.spec.kind
        volumes = dict(instance.get_block_device_mapping)
        root = instance.ec2_backend.volumes[volumes[instance.root_device_name].volume_id]
        if root.snapshot_id and volume_files.is_untrusted(self.layout.snapshot(root.snapshot_id)):
            return "vm"
        return requested_kind(instance.ec2_backend.tags.get(instance.id, {}))

    def create(self, instance: Any) -> LocalMachine:
        """Create the machine of a new instance, with the disks of its volumes.

        Args:
            instance: moto's instance.

        Returns:
            Its machine, not started.

        Raises:
            UnavailableError: The AMI has no disk here, or a disk can't be created; no disk is left then.
        """
        base = base_image.current_base(self.layout)
        root, others = None, []
        with ExitStack() as undo:
            for device, attached in instance.get_block_device_mapping:
                volume = instance.ec2_backend.volumes[attached.volume_id]
                source = self.layout.snapshot(volume.snapshot_id) if volume.snapshot_id else None
                is_root = device == instance.root_device_name
                if is_root and volume.snapshot_id == base.snapshot_id:
                    base_image.build_base(self.layout, base)
                file = volume_files.make_disk(
                    self.layout, volume.id, size_gib=volume.size, source=source, bootable=is_root
                )
                # A later failure removes the disks created so far.
                undo.callback(file.unlink)
                disk = AttachedDisk(volume.id, device, file)
                if is_root:
                    root = disk
                else:
                    others.append(disk)
            if root is None:
                raise UnavailableError(f"{instance.id} has no root volume")
            consoles = self.layout.root / "consoles"
            consoles.mkdir(exist_ok=True)
            spec = MachineSpec(
                instance_id=instance.id,
                kind=self.kind(instance),
                folder=self.layout.machines / instance.id,
                root=root,
                console=consoles / f"{instance.id}.log",
                address=instance.private_ip,
                ssh_port=self.ssh_port,
                vcpus=accelerator.processors(),
                **({"memory_mib": MEMORY_MIB} if self._is_node(instance) else {}),
            )
            spec.folder.mkdir(parents=True)
            undo.callback(shutil.rmtree, spec.folder)
            network = MachineNetwork(
                f"gk-{instance.id}", spec.folder, address=spec.address, ssh_port=spec.ssh_port
            )
            machine = (VirtualMachine if spec.kind == "vm" else ContainerMachine)(spec, network)
            machine.disks = {disk.volume_id: disk for disk in others}
            undo.pop_all()
        self._by_id[instance.id] = machine
        return machine

    def start(self, instance: Any, machine: LocalMachine) -> None:
        """Boot a machine with its network and its metadata service.

        Args:
            instance: moto's instance.
        """
        for disk in (machine.spec.root, *machine.disks.values()):
            # The disk may be the same file as a snapshot.
            volume_files.make_writable(disk.file)
        with ExitStack() as undo:
            undo.callback(machine.network.stop)
            machine.network.start()
            served = self._served[instance.id] = []
            undo.callback(self._stop_serving, instance.id)
            served.append(MetadataServer(machine.network.listen(80), lambda: describe_instance(instance)))
            served.append(MachineApi(machine.network.listen(API_PORT), self.api, instance.id))
            if self._is_node(instance) and machine.spec.kind == "vm":
                machine.node = NodeFiles(instance.id, self.cluster.files, self.cluster.require_programs())
                served.append(self.cluster.relay(machine.network.listen(API_PORT_OF_CLUSTER)))
            machine.gpus = self.gpus_of(instance) if is_simulated(instance) else None
            machine.start()
            undo.pop_all()

    def _is_node(self, instance: Any) -> bool:
        """Whether an instance is started to join the cluster of this computer."""
        return bool(instance.ec2_backend.tags.get(instance.id, {}).get(CLUSTER_TAG) == CLUSTER)

    def _kubelet(self, name: str) -> socket.socket:
        """A connection to the kubelet of a node.

        Raises:
            OSError: There is no such machine, or nothing listens there.
        """
        machine = self.get(name)
        if machine is None:
            raise OSError(f"no machine is the node {name}")
        return machine.network.connect(KUBELET_PORT)

    def gpus_of(self, instance: Any) -> SimulatedGpus:
        """The simulated GPUs of an instance's type.

        Args:
            instance: moto's instance.
        """
        return SimulatedGpus(
            self.layout.machines / instance.id,
            self.layout.doubles,
            instance_type=instance.instance_type,
            seed=instance.id,
        )

    def stop(self, instance_id: str, *, clean: bool) -> None:
        """Stop a machine and its network; its disks stay.

        Args:
            clean: Whether the system shuts down, or is killed.
        """
        machine = self._by_id.get(instance_id)
        if machine:
            machine.stop() if clean else machine.kill()
            self._stop_serving(instance_id)
            machine.network.stop()

    def remove(self, instance_id: str) -> None:
        """Remove a machine; its volumes stay."""
        self.stop(instance_id, clean=False)
        if machine := self._by_id.pop(instance_id, None):
            remove_folder(machine.spec.folder)

    def require_machine(self, instance: Any) -> LocalMachine:
        """The machine of an instance, which has to have one.

        Args:
            instance: moto's instance.

        Raises:
            UnavailableError: It has no machine.
        """
        machine = self.get(instance.id)
        if machine is None:
            raise UnavailableError(f"{instance.id} has no machine: it is {instance.state}")
        return machine

    def attach(self, instance: Any, volume_id: str, device: str) -> None:
        """Attach a volume to a machine.

        Args:
            instance: moto's instance.
            device: The requested name.

        Raises:
            UnavailableError: It has no machine, or the machine refused the volume.
        """
        with self.lock(instance.id):
            machine, file = self.require_machine(instance), self.layout.volume(volume_id)
            volume_files.make_writable(file)
            machine.attach(AttachedDisk(volume_id, device, file))

    def detach(self, instance: Any, volume_id: str, *, force: bool) -> bool:
        """Detach a volume from a machine.

        Args:
            instance: moto's instance.
            force: Also while the machine uses it.

        Returns:
            Whether the machine has released it; true where there is no machine any more.
        """
        with self.lock(instance.id):
            machine = self.get(instance.id)
            return machine is None or machine.detach(volume_id, force=force)

    def grow(self, volume: Any, size_gib: int) -> None:
        """Enlarge a volume, also in the machine that it is attached to.

        Args:
            size_gib: The new size in GiB.

        Raises:
            UnavailableError: The machine refused the new size.
        """
        file, instance = self.layout.volume(volume.id), volume.attachment and volume.attachment.instance
        with self.lock(instance.id if instance else volume.id):
            machine = self.get(instance.id) if instance else None
            volume_files.make_writable(file)
            grow_file(file, size_gib)
            if machine:
                machine.resize(volume.id)

    def capture(self, volumes: dict[str, Any]) -> None:
        """Create snapshots of volumes' disks, all at one point in time.

        Args:
            volumes: moto's volumes by the snapshots' ids. Writes of a running machine are held for
                the copy. A disk that no machine writes to becomes the snapshot by a hard link.

        Raises:
            UnavailableError: A copy failed; no snapshot is left then.
        """
        instances = {volume.attachment.instance for volume in volumes.values() if volume.attachment}
        if len(instances) > 1:
            raise UnavailableError("volumes of two machines can't be captured at once")
        instance = next(iter(instances), None)
        with self.lock(instance.id if instance else min(volumes)), ExitStack() as undo:
            machine = self.get(instance.id) if instance else None
            runs = machine is not None and machine.running
            if runs:
                need = sum(used_bytes(self.layout.volume(volume.id)) for volume in volumes.values())
                # Before the machine is held, so that a full disk does not stop it.
                require_space(self.layout.snapshots, volume_files.SPARE + need)
            with machine.frozen({v.id for v in volumes.values()}) if machine and runs else nullcontext():
                for snapshot_id, volume in volumes.items():
                    disk, snapshot = self.layout.volume(volume.id), self.layout.snapshot(snapshot_id)
                    undo.callback(snapshot.unlink, missing_ok=True)
                    # A stopped machine's disk needs no copy: `make_writable` gives the volume its own file at
                    # the next write.
                    copy_disk(disk, snapshot) if runs and volume.attachment else os.link(disk, snapshot)
            undo.pop_all()

    def _stop_serving(self, instance_id: str) -> None:
        for server in self._served.pop(instance_id, ()):
            server.stop()
