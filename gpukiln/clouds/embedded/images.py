"""Puts disks behind moto's images and snapshots: machines start with copies of an AMI's disks."""

import os
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.responses import EC2Response

from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.launch_devices import CODE, mapping_of_image, merge_mappings
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.clouds.embedded.volumes import Members, detach_captured_volume, raise_as_ec2_error


def extend_images(machines: Machines) -> None:
    """Put disks behind images and snapshots. Call once.

    Args:
        machines: The machines behind the instances.
    """
    for extension in (
        _image_members(machines),
        _registration_members(),
        _copy_members(machines),
        _snapshot_members(machines),
    ):
        for (owner, name), member in extension.items():
            setattr(owner, name, member)


def _image_members(machines: Machines) -> Members:
    backend_create_image, create_snapshot = EC2Backend.create_image, EC2Backend.create_snapshot

    def create_image_with_disk(
        self: Any,
        instance_id: str,
        name: str,
        description: str,
        tag_specifications: list[dict[str, Any]],
        mappings: list[dict[str, Any]] | None = None,
    ) -> Any:
        instance = self.get_instance(instance_id)
        if instance.state not in ("running", "stopped"):
            raise EC2ClientError("IncorrectState", f"{instance_id} is {instance.state}")
        snapshot_tags = _tags_of(tag_specifications, "snapshot")
        # NoDevice excludes a volume from the image (API reference, BlockDeviceMapping).
        left_out = {entry["DeviceName"] for entry in mappings or () if entry.get("NoDevice") is not None}
        others = [
            specification
            for specification in tag_specifications
            if specification["ResourceType"] != "snapshot"
        ]
        image: Any = backend_create_image(self, instance_id, name, description, others)
        snapshots = {image.ebs_snapshot.id: image.ebs_snapshot}
        captured = {}
        try:
            image.root_device_name = instance.root_device_name
            for device, attached in instance.get_block_device_mapping:
                volume = self.volumes[attached.volume_id]
                if device == instance.root_device_name:
                    captured[image.ebs_snapshot.id] = volume
                    _describe_as_captured(self, instance, image, volume)
                elif device not in left_out:
                    snapshot = create_snapshot(
                        self, volume.id, image.ebs_snapshot.description, None, image.id
                    )
                    detach_captured_volume(snapshot)
                    snapshots[snapshot.id], captured[snapshot.id] = snapshot, volume
                    image.devices = [*image.devices, _device_mapping(device, snapshot, attached, volume)]
            image.devices = merge_mappings(image, mappings or [])[1:]
            with raise_as_ec2_error("the disk can't be captured"):
                machines.capture(captured)
        except BaseException:
            self.amis.pop(image.id, None)
            for snapshot_id in snapshots:
                self.snapshots.pop(snapshot_id, None)
            raise
        for snapshot in snapshots.values():
            snapshot.add_tags(snapshot_tags)
        return image

    def create_image(self: Any) -> ActionResult:
        self.error_on_dryrun()
        image = self.ec2_backend.create_image(
            self._get_param("InstanceId"),
            self._get_param("Name"),
            self._get_param("Description", ""),
            tag_specifications=self._get_param("TagSpecifications", []),
            mappings=self._get_param("BlockDeviceMappings", []),
        )
        return ActionResult({"ImageId": image.id})

    return {
        (EC2Backend, "create_image"): create_image_with_disk,
        (EC2Response, "create_image"): create_image,
        (Ami, "devices"): (),
        (Ami, "block_device_mappings"): property(mapping_of_image),
    }


def _registration_members() -> Members:
    backend_register_image = EC2Backend.register_image

    def register_image(self: Any) -> ActionResult:
        """RegisterImage from snapshots, with one for the root device."""
        ec2, mappings = self.ec2_backend, self._get_param("BlockDeviceMappings", [])
        root_device = self._get_param("RootDeviceName") or "/dev/sda1"
        snapshots = [
            entry.get("Ebs", {}).get("SnapshotId") for entry in mappings if entry["DeviceName"] == root_device
        ]
        if not snapshots or not snapshots[0]:
            raise EC2ClientError(CODE, "No root snapshot specified in device mapping.")
        root = ec2.get_snapshot(snapshots[0])
        self.error_on_dryrun()
        image: Any = backend_register_image(ec2, self._get_param("Name"), self._get_param("Description", ""))
        # moto creates a snapshot for each image; this one has the snapshot that the request gives.
        ec2.snapshots.pop(image.ebs_snapshot.id)
        image.ebs_snapshot, image.root_device_name, image.root_device_type = root, root_device, "ebs"
        image.architecture = self._get_param("Architecture") or "x86_64"
        image.virtualization_type = self._get_param("VirtualizationType") or "hvm"
        image.boot_mode = self._get_param("BootMode") or "legacy-bios"
        try:
            image.devices = merge_mappings(image, mappings)[1:]
        except BaseException:
            ec2.amis.pop(image.id)
            raise
        for snapshot_id in _snapshot_ids(
            image
        ):  # DeleteSnapshot then refuses until the image is deregistered
            ec2.snapshots[snapshot_id].from_ami = image.id
        image.add_tags(_tags_of(self._get_param("TagSpecifications", []), "image"))
        return ActionResult({"ImageId": image.id})

    return {(EC2Response, "register_image"): register_image}


def _copy_members(machines: Machines) -> Members:
    copy_image, copy_snapshot = EC2Backend.copy_image, EC2Backend.copy_snapshot

    def copy_snapshot_with_disk(self: Any, source_snapshot_id: str, *args: Any, **kwargs: Any) -> Any:
        snapshot = copy_snapshot(self, source_snapshot_id, *args, **kwargs)
        _link_copy(machines.layout, source_snapshot_id, snapshot.id)
        return snapshot

    def copy_image_with_disk(
        self: Any,
        source_image_id: str,
        source_region: str,
        name: str | None = None,
        description: str | None = None,
    ) -> Any:
        image: Any = copy_image(self, source_image_id, source_region, name, description)
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 - it exists only after moto has loaded

        source: Any = ec2_backends[self.account_id][source_region].amis[source_image_id]
        # moto copies only some attributes.
        for field in ("root_device_type", "root_device_name", "hypervisor", "boot_mode", "imds_support"):
            setattr(image, field, getattr(source, field))
        vars(image).update(source_image_id=source_image_id, source_image_region=source_region)
        image.ebs_snapshot.volume.size = source.ebs_snapshot.volume.size
        _link_copy(machines.layout, source.ebs_snapshot.id, image.ebs_snapshot.id)
        for entry in source.devices:
            ebs = dict(entry["Ebs"])
            if snapshot_id := ebs.get("SnapshotId"):
                copied = self.copy_snapshot(snapshot_id, source_region, f"Copied for {image.id}", None)
                ebs["SnapshotId"], copied.from_ami = copied.id, image.id
            image.devices = [*image.devices, {**entry, "Ebs": ebs}]
        return image

    return {
        (EC2Backend, "copy_image"): copy_image_with_disk,
        (EC2Backend, "copy_snapshot"): copy_snapshot_with_disk,
    }


def _snapshot_members(machines: Machines) -> Members:
    create_snapshot, delete_snapshot = EC2Backend.create_snapshot, EC2Backend.delete_snapshot

    def create_snapshot_with_disk(
        self: Any, volume_id: str, description: str, owner_id: str | None = None, from_ami: str | None = None
    ) -> Any:
        snapshot = create_snapshot(self, volume_id, description, owner_id, from_ami)
        # CreateImage captures all disks of an instance at once and calls this for each with the AMI's id.
        if from_ami is None:
            _capture_all(machines, self, [snapshot])
        return snapshot

    def create_snapshots_with_disks(
        self: Any, instance_spec: dict[str, Any], description: str, tags: dict[str, str]
    ) -> Any:
        """CreateSnapshots of all volumes of an instance, at one point in time."""
        instance = self.get_instance(instance_spec["InstanceId"])
        left_out = set(instance_spec.get("ExcludeDataVolumeIds", ()))
        snapshots = [
            create_snapshot(self, attached.volume_id, description)
            for device, attached in instance.get_block_device_mapping
            if attached.volume_id not in left_out
            and not (instance_spec.get("ExcludeBootVolume") and device == instance.root_device_name)
        ]
        _capture_all(machines, self, snapshots)
        for snapshot in snapshots:
            snapshot.add_tags(tags)
        return snapshots

    def delete_snapshot_with_disk(self: Any, snapshot_id: str) -> Any:
        layout = machines.layout
        # Otherwise a concurrent save could write the description again after its removal.
        with regions.changing:
            snapshot = delete_snapshot(self, snapshot_id)
            regions.description_file(layout, snapshot_id, self.region_name).unlink(missing_ok=True)
            layout.unfinished_snapshot(snapshot_id).unlink(missing_ok=True)
            if not regions.description_files(
                layout, snapshot_id
            ):  # the disk of a base image belongs to other regions too
                layout.snapshot(snapshot_id).unlink(missing_ok=True)
        return snapshot

    return {
        (EC2Backend, "create_snapshot"): create_snapshot_with_disk,
        (EC2Backend, "create_snapshots"): create_snapshots_with_disks,
        (EC2Backend, "delete_snapshot"): delete_snapshot_with_disk,
    }


def _capture_all(machines: Machines, ec2: Any, snapshots: list[Any]) -> None:
    volumes = {snapshot.id: snapshot.volume for snapshot in snapshots}
    for snapshot in snapshots:
        detach_captured_volume(snapshot)
    try:
        with raise_as_ec2_error("the disk can't be captured"):
            machines.capture(volumes)
    except BaseException:
        for snapshot in snapshots:
            ec2.snapshots.pop(snapshot.id, None)
        raise


def _link_copy(layout: Layout, snapshot_id: str, copy_id: str) -> None:
    """Copy a snapshot's disk by a hard link: snapshots never change."""
    disk = layout.snapshot(snapshot_id)
    if disk.exists():
        os.link(disk, layout.snapshot(copy_id))


def _tags_of(specifications: list[dict[str, Any]], kind: str) -> dict[str, str]:
    return {
        tag["Key"]: tag["Value"]
        for specification in specifications
        if specification["ResourceType"] == kind
        for tag in specification["Tags"]
    }


def _snapshot_ids(image: Any) -> list[str]:
    snapshot_ids = [entry["Ebs"].get("SnapshotId") for entry in mapping_of_image(image)]
    return [snapshot_id for snapshot_id in snapshot_ids if snapshot_id]


def _device_mapping(device: str, snapshot: Any, attached: Any, volume: Any) -> dict[str, Any]:
    return {
        "DeviceName": device,
        "Ebs": {
            "SnapshotId": snapshot.id,
            "VolumeSize": volume.size,
            "DeleteOnTermination": bool(attached.delete_on_termination),
            "VolumeType": volume.volume_type,
            "Encrypted": bool(volume.encrypted),
        },
    }


def _describe_as_captured(ec2: Any, instance: Any, image: Any, volume: Any) -> None:
    """Set on the image what EC2 takes from the instance and its root volume; moto sets constants."""
    snapshot = image.ebs_snapshot
    snapshot.volume.id, snapshot.volume.size = volume.id, volume.size
    snapshot.encrypted, snapshot.kms_key_id = bool(volume.encrypted), volume.kms_key_id
    image.root_device_type = "ebs"
    source = ec2.amis.get(instance.image_id)
    if source is not None:
        image.hypervisor, image.boot_mode = source.hypervisor, source.boot_mode
