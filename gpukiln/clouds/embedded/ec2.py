"""Puts real machines and disks behind moto's EC2: what the API says is what runs.

moto's model classes are extended in place, so every caller (Packer, boto3, the AWS CLI) reaches moto's own
parsing, checks and answers. A call that changes a machine returns at once with the honest in-between state
(pending, stopping, shutting-down); a thread does the work and sets the state that follows.
"""

import base64
import os
from collections.abc import Callable
from typing import Any

from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance
from moto.ec2.responses.general import General
from moto.ssm.models import SimpleSystemManagerBackend

from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded import store
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.lifecycle import Lifecycle
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.errors import GpukilnError


def install(machines: Machines) -> None:
    """Extend moto. Call once, before the first request.

    Args:
        machines: Where machines run.
    """
    layout = machines.layout
    _publish_base(layout)
    _extend_instances(Lifecycle(machines, terminate=Instance.terminate))
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

    _replace(EC2Backend, create_default_vpc=create_default_vpc)
    _replace(General, get_console_output=get_console_output)


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

    _replace(EC2Backend, __init__=init_ec2)
    _replace(SimpleSystemManagerBackend, __init__=init_ssm)


def _extend_instances(lifecycle: Lifecycle) -> None:
    run_instances = EC2Backend.run_instances

    def run_and_boot(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("subnet_id") and not kwargs.get("nics"):
            # EC2 takes the zone's default subnet; moto would take an address outside of every VPC
            zone = kwargs.get("placement") or f"{self.region_name}a"
            kwargs["subnet_id"] = next(iter(self.subnets[zone]))
        reservation = run_instances(self, *args, **kwargs)
        for instance in reservation.instances:
            lifecycle.launch(instance)
        return reservation

    def setup_defaults(self: Any) -> None:
        ami = self.ec2_backend.amis.get(self.image_id)
        size = ami.ebs_snapshot.volume.size if ami else base_image.SIZE_GIB
        volume = self.ec2_backend.create_volume(size=size, zone_name=self._placement.zone)
        self.ec2_backend.attach_volume(volume.id, self.id, self.root_device_name, True)

    _replace(EC2Backend, run_instances=run_and_boot)
    _replace(
        Instance,
        start=_method(lifecycle.start),
        stop=_method(lifecycle.stop),
        terminate=_method(lifecycle.terminate),
        reboot=_method(lifecycle.reboot),
        setup_defaults=setup_defaults,
    )


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
        image = create_image(self, instance_id, name, description, others)
        snapshot = image.ebs_snapshot
        try:
            size = _capture(machines, instance, snapshot.id)
        except BaseException:
            self.amis.pop(image.id, None)
            self.snapshots.pop(snapshot.id, None)
            raise
        snapshot.volume.size = size
        snapshot.add_tags(snapshot_tags)
        _describe_as_captured(self, instance, image)
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
        self: Any,
        source_image_id: str,
        source_region: str,
        name: str | None = None,
        description: str | None = None,
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

    _replace(EC2Backend, create_image=create_image_with_disk, copy_image=copy_image_with_disk)
    _replace(EC2Backend, create_snapshot=create_snapshot_with_disk, delete_snapshot=delete_snapshot_with_disk)
    _replace(Ami, block_device_mappings=property(_block_device_mappings))


def _capture(machines: Machines, instance: Any, snapshot_id: str) -> int:
    """Copy a machine's disk; what fails is an answer of EC2's and not a crash of the server."""
    try:
        return machines.capture(instance, snapshot_id)
    except (OSError, GpukilnError) as error:
        raise EC2ClientError("InternalError", f"the disk can't be captured: {error}") from error


def _describe_as_captured(ec2: Any, instance: Any, image: Any) -> None:
    """Moto describes every image alike; EC2 says what the instance and its root volume are."""
    root = dict(instance.get_block_device_mapping).get(instance.root_device_name)
    if root is not None:
        volume, snapshot = ec2.volumes[root.volume_id], image.ebs_snapshot
        snapshot.volume.id = volume.id
        snapshot.encrypted, snapshot.kms_key_id = bool(volume.encrypted), volume.kms_key_id
    image.root_device_type = "ebs"
    image.root_device_name = instance.root_device_name
    source = ec2.amis.get(instance.image_id)
    if source is not None:
        image.hypervisor, image.boot_mode = source.hypervisor, source.boot_mode


def _block_device_mappings(self: Any) -> list[dict[str, Any]]:
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


def _method(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of an instance as a method of its class; a bound method would not be given the instance."""

    def method(self: Any) -> Any:
        return function(self)

    return method


def _replace(owner: type, **members: Any) -> None:
    for name, member in members.items():
        setattr(owner, name, member)
