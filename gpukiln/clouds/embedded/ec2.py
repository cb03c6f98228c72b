"""Puts real machines and disks behind moto's EC2: what the API says is what runs.

moto's model classes are extended in place, so every caller (Packer, boto3, the AWS CLI) reaches moto's own
parsing, checks and answers. A call that changes a machine returns at once with the honest in-between state
(pending, stopping, shutting-down); a thread does the work and sets the state that follows.
"""

import base64
import logging
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.responses.general import General
from moto.ssm.models import SimpleSystemManagerBackend

from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded import store
from gpukiln.clouds.embedded.disk import copy_disk, free_bytes, grow_disk, used_bytes
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import Machine, MachineSpec, make_machine, remove_folder
from gpukiln.clouds.embedded.metadata import MetadataServer
from gpukiln.clouds.embedded.instance_metadata import describe_instance
from gpukiln.clouds.embedded.network import free_ssh_port
from gpukiln.errors import GpukilnError, UnavailableError

MACHINE_TAG = "gpukiln:machine"  # "container" (the default) or "vm"
ROOM = 2 << 30  # bytes to be free beyond a copy before a disk is copied
STATES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
log = logging.getLogger(__name__)


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
                hint="`invoke cloud.clean --images` removes images that are not needed",
            )
        consoles = self.layout.root / "consoles"
        consoles.mkdir(exist_ok=True)
        spec = MachineSpec(
            instance_id=instance.id,
            kind="vm" if _is_vm(instance) else "container",
            folder=self.layout.machines / instance.id,
            console=consoles / f"{instance.id}.log",
            address=instance.private_ip,
            ssh_port=self.ssh_port,
            vcpus=os.cpu_count() or 1,
        )
        spec.folder.mkdir(parents=True)
        copy_disk(source, spec.disk)
        sizes = [device.size for _, device in instance.get_block_device_mapping if device.size]
        grow_disk(spec.disk, max(sizes, default=0))
        machine = make_machine(spec)
        self._by_id[instance.id] = machine
        return machine

    def start(self, instance: Any, machine: Machine) -> None:
        """Boot a machine with its network and its metadata service.

        Args:
            instance: moto's instance.
            machine: Its machine.
        """
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

    def _stop_metadata(self, instance_id: str) -> None:
        if server := self._metadata.pop(instance_id, None):
            server.stop()


def set_state(instance: Any, name: str, *, reason: str = "") -> None:
    """Set what DescribeInstances says.

    Args:
        instance: moto's instance.
        name: The state.
        reason: Why, for a state nobody asked for.
    """
    instance._state.name, instance._state.code = name, STATES[name]
    if reason:
        instance._reason = reason
        instance.state_reason = StateReason(reason, "Server.InternalError")


def install(machines: Machines) -> None:
    """Extend moto. Call once, before the first request.

    Args:
        machines: Where machines run.
    """
    layout = machines.layout
    _publish_base(layout)
    _extend_instances(machines)
    _extend_images(machines)

    def create_default_vpc(self: Any) -> Any:
        vpc = self.create_vpc(cidr_block=machines.vpc_cidr(self.region_name), is_default=True)
        for zone in self.describe_availability_zones():
            self.create_default_subnet(zone.name)
        return vpc

    def get_console_output(self: Any) -> Any:
        from moto.core.responses import ActionResult  # noqa: PLC0415 - beside its one use

        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        text = base64.b64encode(machines.console(instance.id)).decode()
        result = {"InstanceId": instance.id, "Timestamp": utcnow(), "Output": Base64EncodedString(text)}
        return ActionResult(result)

    EC2Backend.create_default_vpc = create_default_vpc
    General.get_console_output = get_console_output


def _publish_base(layout: Layout) -> None:
    """Every region knows the kept images and parameters, and the base image under its public parameter."""
    ec2_init, ssm_init = EC2Backend.__init__, SimpleSystemManagerBackend.__init__

    def init_ec2(self: Any, region_name: str, account_id: str) -> None:
        ec2_init(self, region_name, account_id)
        store.load_ec2(self, store.read_region(layout.regions, region_name))
        base = base_image.current_base(layout)
        if base.image_id not in self.amis:
            snapshot = store.add_snapshot(
                self,
                base.snapshot_id,
                size_gib=base_image.SIZE_GIB,
                owner_id=base_image.OWNER,
                from_ami=base.image_id,
            )
            store.add_image(
                self,
                base.image_id,
                snapshot,
                {
                    "name": base.name,
                    "description": "Debian 12, built from this machine's mirror",
                    "owner_id": base_image.OWNER,
                    "architecture": "x86_64",
                    "virtualization_type": "hvm",
                    "hypervisor": "xen",
                    "root_device_type": "ebs",
                    "root_device_name": base_image.ROOT_DEVICE,
                    "boot_mode": "legacy-bios",
                },
            )

    def init_ssm(self: Any, region_name: str, account_id: str) -> None:
        ssm_init(self, region_name, account_id)
        store.load_ssm(self, store.read_region(layout.regions, region_name))
        image_id = base_image.current_base(layout).image_id
        store.add_parameter(self, {"name": base_image.SSM_PARAMETER, "value": image_id})

    EC2Backend.__init__ = init_ec2
    SimpleSystemManagerBackend.__init__ = init_ssm


def _extend_instances(machines: Machines) -> None:
    run_instances, terminate = EC2Backend.run_instances, Instance.terminate

    def in_background(instance: Any, work: Callable[[], None]) -> None:
        def guarded() -> None:
            with machines.lock(instance.id):
                try:
                    work()
                except Exception as error:  # a thread's last resort: it must reach DescribeInstances
                    log.exception("%s", instance.id)
                    details = "; ".join(error.details) if isinstance(error, GpukilnError) else ""
                    machines.remove(instance.id)
                    set_state(instance, "terminated", reason=f"{error} {details}".strip())

        threading.Thread(target=guarded, name=instance.id).start()

    def watch(instance: Any, machine: Machine) -> None:
        """A machine that ends by itself is stopped, or terminated where the launch said so."""

        def wait() -> None:
            process = machine.process
            if process:
                process.wait()
            with machines.lock(instance.id):
                if instance._state.name != "running" or machine.process is not process:
                    return
                machines.stop(instance.id, clean=False)
                if instance.instance_initiated_shutdown_behavior == "terminate":
                    machines.remove(instance.id)
                    terminate(instance)
                else:
                    set_state(instance, "stopped")

        threading.Thread(target=wait, daemon=True).start()

    def boot(instance: Any, machine: Machine) -> None:
        machines.start(instance, machine)
        set_state(instance, "running")
        watch(instance, machine)

    def run_and_boot(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("subnet_id") and not kwargs.get("nics"):
            # EC2 takes the zone's default subnet; moto would take an address outside of every VPC
            zone = kwargs.get("placement") or f"{self.region_name}a"
            kwargs["subnet_id"] = next(iter(self.subnets[zone]))
        reservation = run_instances(self, *args, **kwargs)
        for instance in reservation.instances:
            set_state(instance, "pending")
            if not _is_vm(instance):
                # cloud-init takes a token only where the firmware says EC2, and a container shows no firmware:
                # tokens work there but can't be required, and DescribeInstances says so
                instance.metadata_options.http_tokens = "optional"
            in_background(instance, lambda instance=instance: boot(instance, machines.create(instance)))
        return reservation

    def start(self: Any) -> Any:
        before = _copy_state(self)
        if self._state.name == "stopped":
            set_state(self, "pending")
            in_background(self, lambda: boot(self, _existing(machines, self)))
        return before

    def stop(self: Any) -> Any:
        before = _copy_state(self)
        if self._state.name in ("running", "pending"):
            set_state(self, "stopping")

            def work() -> None:
                machines.stop(self.id, clean=True)
                set_state(self, "stopped")

            in_background(self, work)
        return before

    def terminate_machine(self: Any) -> Any:
        before = _copy_state(self)
        if self._state.name in ("terminated", "shutting-down"):
            return before
        terminate(self)
        set_state(self, "shutting-down")

        def work() -> None:
            machines.remove(self.id)
            set_state(self, "terminated")

        in_background(self, work)
        return before

    def reboot(self: Any) -> None:
        def work() -> None:
            machine = _existing(machines, self)
            set_state(self, "pending")  # EC2 says running; nobody can log in meanwhile
            machines.stop(self.id, clean=True)
            boot(self, machine)

        in_background(self, work)

    def setup_defaults(self: Any) -> None:
        ami = self.ec2_backend.amis.get(self.image_id)
        size = ami.ebs_snapshot.volume.size if ami else base_image.SIZE_GIB
        volume = self.ec2_backend.create_volume(size=size, zone_name=self._placement.zone)
        self.ec2_backend.attach_volume(volume.id, self.id, self.root_device_name, True)

    EC2Backend.run_instances = run_and_boot
    Instance.start, Instance.stop, Instance.reboot = start, stop, reboot
    Instance.terminate = terminate_machine
    Instance.setup_defaults = setup_defaults


def _extend_images(machines: Machines) -> None:
    layout = machines.layout
    create_image, copy_image = EC2Backend.create_image, EC2Backend.copy_image
    create_snapshot, delete_snapshot = EC2Backend.create_snapshot, EC2Backend.delete_snapshot

    def create_image_with_disk(
        self: Any, instance_id: str, name: str, description: str, tag_specifications: list[dict[str, Any]]
    ) -> Any:
        instance = self.get_instance(instance_id)
        snapshot_tags = {
            tag["Key"]: tag["Value"]
            for specification in tag_specifications
            if specification["ResourceType"] == "snapshot"
            for tag in specification["Tags"]
        }
        others = [one for one in tag_specifications if one["ResourceType"] != "snapshot"]
        source = self.amis.get(instance.image_id)
        root = dict(instance.get_block_device_mapping).get(instance.root_device_name)
        image = create_image(self, instance_id, name, description, others)
        snapshot = image.ebs_snapshot
        try:
            size = _capture(machines, instance, snapshot.id)
        except BaseException:
            self.amis.pop(image.id, None)
            self.snapshots.pop(snapshot.id, None)
            raise
        snapshot.volume.size = size
        if root is not None:
            snapshot.volume.id = root.volume_id
            snapshot.encrypted = bool(root.encrypted)
        snapshot.add_tags(snapshot_tags)
        image.root_device_type = "ebs"
        image.root_device_name = instance.root_device_name
        if source is not None:
            image.hypervisor, image.boot_mode = source.hypervisor, source.boot_mode
        return image

    def create_snapshot_with_disk(
        self: Any, volume_id: str, description: str, owner_id: str | None = None, from_ami: str | None = None
    ) -> Any:
        snapshot = create_snapshot(self, volume_id, description, owner_id, from_ami)
        attachment = snapshot.volume.attachment
        if from_ami is None and attachment is not None:
            try:
                _capture(machines, attachment.instance, snapshot.id)
            except BaseException:
                self.snapshots.pop(snapshot.id, None)
                raise
        return snapshot

    def copy_image_with_disk(
        self: Any, source_image_id: str, source_region: str, name: str | None = None, description: str | None = None
    ) -> Any:
        image = copy_image(self, source_image_id, source_region, name, description)
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 - it exists only after moto has loaded

        source = ec2_backends[self.account_id][source_region].amis[source_image_id]
        for field in ("root_device_type", "root_device_name", "hypervisor", "boot_mode"):
            setattr(image, field, getattr(source, field))
        image.ebs_snapshot.volume.size = source.ebs_snapshot.volume.size
        disk = layout.snapshot(source.ebs_snapshot.id)
        if disk.exists():  # snapshots never change, so a second name is a copy
            os.link(disk, layout.snapshot(image.ebs_snapshot.id))
        return image

    def delete_snapshot_with_disk(self: Any, snapshot_id: str) -> Any:
        snapshot = delete_snapshot(self, snapshot_id)
        layout.snapshot(snapshot_id).unlink(missing_ok=True)
        return snapshot

    def block_device_mappings(self: Any) -> list[dict[str, Any]]:
        return [
            {
                "DeviceName": self.root_device_name,
                "Ebs": {
                    "SnapshotId": self.ebs_snapshot.id,
                    "VolumeSize": self.ebs_snapshot.volume.size,
                    "DeleteOnTermination": True,
                    "VolumeType": "gp3",
                    "Encrypted": self.ebs_snapshot.encrypted,
                },
            }
        ]

    EC2Backend.create_image, EC2Backend.copy_image = create_image_with_disk, copy_image_with_disk
    EC2Backend.create_snapshot, EC2Backend.delete_snapshot = create_snapshot_with_disk, delete_snapshot_with_disk
    Ami.block_device_mappings = property(block_device_mappings)


def _capture(machines: Machines, instance: Any, snapshot_id: str) -> int:
    """Copy an instance's disk into a snapshot before the call is answered.

    Returns:
        Size of the disk in GiB.
    """
    with machines.lock(instance.id):
        machine = _existing(machines, instance)
        frozen = machine.running
        if frozen:
            machine.freeze()
        try:
            copy_disk(machine.spec.disk, machines.layout.snapshot(snapshot_id))
        finally:
            if frozen:
                machine.thaw()
        return machine.spec.disk.stat().st_size >> 30


def _is_vm(instance: Any) -> bool:
    return bool(instance.ec2_backend.tags.get(instance.id, {}).get(MACHINE_TAG) == "vm")


def _existing(machines: Machines, instance: Any) -> Machine:
    machine = machines.get(instance.id)
    if machine is None:
        raise UnavailableError(f"{instance.id} has no machine: it is {instance.state}")
    return machine


def _copy_state(instance: Any) -> Any:
    state = type(instance._state)(instance._state.name, instance._state.code)
    return state
