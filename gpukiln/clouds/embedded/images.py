"""Puts disks behind moto's images and snapshots: an AMI's disk is what its machines boot."""

import os
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami

from gpukiln.clouds.embedded.machines import Machines
from gpukiln.clouds.embedded.regions import description_file, description_files
from gpukiln.errors import GpukilnError


def extend_images(machines: Machines) -> None:
    """Put disks behind images and snapshots. Call once.

    Args:
        machines: Where machines run.
    """
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
        for field in ("root_device_type", "root_device_name", "hypervisor", "boot_mode", "imds_support"):
            setattr(image, field, getattr(source, field))
        vars(image).update(source_image_id=source_image_id, source_image_region=source_region)
        image.ebs_snapshot.volume.size = source.ebs_snapshot.volume.size
        disk = layout.snapshot(source.ebs_snapshot.id)
        if disk.exists():  # snapshots never change, so a second name is a copy
            os.link(disk, layout.snapshot(image.ebs_snapshot.id))
        return image

    def delete_snapshot_with_disk(self: Any, snapshot_id: str) -> Any:
        snapshot = delete_snapshot(self, snapshot_id)
        description_file(layout, snapshot_id, self.region_name).unlink(missing_ok=True)
        if not description_files(layout, snapshot_id):  # a base image's is other regions' too
            layout.snapshot(snapshot_id).unlink(missing_ok=True)
        return snapshot

    replaced: dict[tuple[type, str], Any] = {
        (EC2Backend, "create_image"): create_image_with_disk,
        (EC2Backend, "copy_image"): copy_image_with_disk,
        (EC2Backend, "create_snapshot"): create_snapshot_with_disk,
        (EC2Backend, "delete_snapshot"): delete_snapshot_with_disk,
        (Ami, "block_device_mappings"): property(_block_device_mappings),
    }
    for (owner, name), member in replaced.items():
        setattr(owner, name, member)


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
