"""Puts disks behind moto's volumes: an attached volume is a device in the machine.

Codes and texts of refusals: EC2 API reference, "Error codes for the Amazon EC2 API".
"""

import copy
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError, MissingParameterError
from moto.ec2.models import EC2Backend
from moto.ec2.models.elastic_block_store import Volume, VolumeAttachment
from moto.ec2.responses import EC2Response

from gpukiln.clouds.embedded import volume_files
from gpukiln.clouds.embedded.block_devices import DEVICE_NAME
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.errors import GpukilnError

MAX_GIB = 16384  # of a gp2 or gp3 volume (EBS user guide, "Amazon EBS volume types")
MAX_DATA_VOLUMES = 24  # a virtual machine's PCI bus has 32 slots, some for other devices
FIELDS = ("encrypted", "kms_key_id", "volume_type", "iops", "throughput", "multi_attach_enabled")
DETACH_AGAIN_S = 2
Members = dict[tuple[type, str], Any]  # replacements of classes' members
log = logging.getLogger(__name__)
_changing = threading.RLock()  # a volume has at most one attachment


def extend_volumes(machines: Machines) -> None:
    """Put disks behind volumes. Call once.

    Args:
        machines: The machines behind the instances.
    """
    for extension in (_disk_members(machines), _attachment_members(machines)):
        for (owner, name), member in extension.items():
            setattr(owner, name, member)


def _disk_members(machines: Machines) -> Members:
    layout = machines.layout
    create_volume, modify_volume = EC2Response.create_volume, EC2Response.modify_volume
    delete_volume = EC2Backend.delete_volume

    def create_once(self: Any) -> ActionResult:
        token = self._get_param("ClientToken")
        if not token:
            return create_volume_with_disk(self)
        with _changing:
            # a token stays used after its volume is deleted (aws-ebs-csi-driver issues 1428 and 1916)
            used: dict[str, tuple[Any, ActionResult]] = vars(self.ec2_backend).setdefault("volume_tokens", {})
            if token not in used:
                used[token] = self.params, create_volume_with_disk(self)
            request, answer = used[token]
        if request != self.params:
            message = "The client token was used with other parameters"
            raise EC2ClientError("IdempotentParameterMismatch", message)
        return answer

    def create_volume_with_disk(self: Any) -> ActionResult:
        _check_new_volume(self)
        answer = create_volume(self)
        volume: Any = answer.result
        try:
            with raise_as_ec2_error("the volume can't be created"):
                make_volume(layout, volume)
        except BaseException:
            self.ec2_backend.volumes.pop(volume.id, None)
            raise
        return answer

    def delete_volume_with_disk(self: Any, volume_id: str) -> Any:
        volume = delete_volume(self, volume_id)
        volume_files.remove(layout, volume_id)
        return volume

    def modify_volume_with_disk(self: Any) -> Any:
        volume, size = self.ec2_backend.get_volume(self._get_param("VolumeId")), self._get_param("Size")
        if size is None:
            return modify_volume(self)
        if int(size) < volume.size:
            raise EC2ClientError("InvalidParameterValue", "New size cannot be smaller than existing size")
        _check_size(int(size))
        self.error_on_dryrun()
        with _changing:
            with raise_as_ec2_error("the volume can't be grown"):
                machines.grow(volume, int(size))
            answer = modify_volume(self)
            if volume.attachment:
                volume.attachment.instance.block_device_mapping[volume.attachment.device].size = volume.size
        return answer

    return {
        (EC2Response, "create_volume"): create_once,
        (EC2Response, "modify_volume"): modify_volume_with_disk,
        (EC2Backend, "delete_volume"): delete_volume_with_disk,
    }


def _attachment_members(machines: Machines) -> Members:
    attach, detach = EC2Backend.attach_volume, EC2Backend.detach_volume

    def attach_volume(self: Any) -> ActionResult:
        volume = self.ec2_backend.get_volume(self._get_param("VolumeId"))
        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        device = self._get_param("Device")
        with _changing:
            _check_attachment(volume, instance, device)
            self.error_on_dryrun()
            with raise_as_ec2_error("the volume can't be attached"):
                machines.attach(instance, volume.id, device)
            attachment = attach(self.ec2_backend, volume.id, instance.id, device)
        return _attachment(attachment, "attaching")

    def detach_volume(self: Any) -> ActionResult:
        ec2, force = self.ec2_backend, bool(self._get_param("Force"))
        with _changing:
            attachment = _attachment_to_end(self)
            self.error_on_dryrun()
            attachment.force = attachment.force or force
            if attachment.status == "attached":
                _set_status(attachment, "detaching")
                threading.Thread(target=detach_when_released, args=(ec2, attachment), daemon=True).start()
        return _attachment(attachment, "detaching")

    def detach_when_released(ec2: Any, attachment: Any) -> None:
        """Request a volume from its machine until the machine releases it, as EC2 does."""
        volume, instance = attachment.volume, attachment.instance
        while volume.attachment is attachment:
            try:
                if machines.detach(instance, volume.id, force=attachment.force):
                    with _changing:
                        if volume.attachment is attachment:
                            detach(ec2, volume.id, instance.id, attachment.device)
                    return
            except (
                OSError,
                GpukilnError,
                EC2ClientError,
            ):  # EC2ClientError: the instance was terminated meanwhile
                log.exception("%s is not detached from %s", volume.id, instance.id)
            _set_status(attachment, "busy")
            time.sleep(DETACH_AGAIN_S)

    return {
        (EC2Response, "attach_volume"): attach_volume,
        (EC2Response, "detach_volume"): detach_volume,
        (VolumeAttachment, "delete_on_termination"): property(_delete_on_termination),
        (VolumeAttachment, "force"): False,
    }


def make_volume(layout: Layout, volume: Any) -> None:
    """Create the disk of a data volume.

    Args:
        layout: The cloud's files.

    Raises:
        UnavailableError: The disk can't be created.
    """
    volume_files.write_description(layout, volume.id, describe(volume))
    # The description came first: a disk without one would be kept for ever.
    source = layout.snapshot(volume.snapshot_id) if volume.snapshot_id else None
    try:
        volume_files.make_disk(layout, volume.id, size_gib=volume.size, source=source)
    except BaseException:
        volume_files.remove(layout, volume.id)
        raise


def describe(volume: Any) -> dict[str, Any]:
    """A volume's description, stored with its disk."""
    attachment = volume.attachment
    return {
        "region": volume.ec2_backend.region_name,
        "zone": volume.zone.name if volume.zone else None,
        "size_gib": volume.size,
        "snapshot_id": volume.snapshot_id,
        "create_time": volume.create_time.isoformat(),
        **{field: getattr(volume, field) for field in FIELDS},
        "tags": dict(volume.ec2_backend.tags.get(volume.id, {})),
        # an attachment ends with the machine, which ends with the server
        "attachment": attachment
        and {
            "instance_id": attachment.instance.id,
            "device": attachment.device,
            "delete_on_termination": attachment.delete_on_termination,
        },
    }


def save(layout: Layout, ec2: Any) -> None:
    """Write the descriptions of a region's volumes.

    Args:
        layout: The cloud's files.
        ec2: moto's EC2 backend of the region.
    """
    for volume in list(ec2.volumes.values()):
        volume_files.write_description(layout, volume.id, describe(volume))


def load(layout: Layout, ec2: Any) -> None:
    """Create a region's volumes from their descriptions; none is attached.

    Args:
        layout: The cloud's files.
        ec2: moto's EC2 backend of the region.
    """
    for volume_id, known in volume_files.descriptions(layout, ec2.region_name).items():
        volume = Volume(  # type: ignore[abstract]  # moto makes them likewise
            ec2,
            volume_id,
            known["size_gib"],
            ec2.get_zone_by_name(known.get("zone")),
            snapshot_id=known.get("snapshot_id"),
        )
        for field in FIELDS:
            setattr(volume, field, known.get(field))
        if created := known.get("create_time"):
            volume.create_time = datetime.fromisoformat(created)
        volume.add_tags(known.get("tags") or {})
        ec2.volumes[volume_id] = volume


def detach_captured_volume(snapshot: Any) -> None:
    """Give a snapshot a copy of its volume, so that later changes of the volume don't change its size.

    Args:
        snapshot: moto's snapshot.
    """
    snapshot.volume = copy.copy(snapshot.volume)
    snapshot.volume.attachment = None


@contextmanager
def raise_as_ec2_error(what: str) -> Iterator[None]:
    """Raise failures of the block as errors that EC2 answers."""
    try:
        yield
    except (OSError, GpukilnError) as error:
        hint = f"; next: {error.hint}" if isinstance(error, GpukilnError) and error.hint else ""
        raise EC2ClientError("InternalError", f"{what}: {error}{hint}") from error


def check_snapshot_size(ec2: Any, snapshot_id: str, size_gib: int | None, *, code: str) -> int:
    """The size of a volume that is created from a snapshot.

    Args:
        ec2: moto's EC2 backend of the region.
        snapshot_id: The snapshot; moto refuses one that it does not know.
        size_gib: The requested size; None: the snapshot's size.
        code: EC2's error code for a volume that is too small.
    """
    snapshot = ec2.get_snapshot(snapshot_id)
    if size_gib is not None and size_gib < snapshot.volume.size:
        text = f"Volume of size {size_gib}GB is smaller than snapshot '{snapshot_id}'"
        raise EC2ClientError(code, f"{text}, expect size >= {snapshot.volume.size}GB")
    return int(size_gib or snapshot.volume.size)


def _check_size(size_gib: int) -> None:
    if not 1 <= size_gib <= MAX_GIB:
        raise EC2ClientError(
            "InvalidParameterValue", f"Volume size must be between 1 GiB and {MAX_GIB} GiB, not {size_gib}"
        )


def _check_new_volume(response: Any) -> None:
    ec2, zone = response.ec2_backend, response._get_param("AvailabilityZone")
    size, snapshot_id = response._get_param("Size"), response._get_param("SnapshotId")
    if not zone:
        raise MissingParameterError("availabilityZone")
    if zone not in [known.name for known in ec2.describe_availability_zones()]:
        raise EC2ClientError("InvalidZone.NotFound", f"The zone '{zone}' does not exist.")
    if size is not None:
        _check_size(int(size))
    if snapshot_id:
        size = None if size is None else int(size)
        check_snapshot_size(ec2, snapshot_id, size, code="InvalidParameterValue")


def _check_attachment(volume: Any, instance: Any, device: str | None) -> None:
    if not device:
        raise MissingParameterError("device")
    if not DEVICE_NAME.fullmatch(device):
        text = f"Value ({device}) for parameter device is invalid. {device} is not a valid EBS device name."
        raise EC2ClientError("InvalidParameterValue", text)
    if volume.attachment is not None:
        raise EC2ClientError("VolumeInUse", f"{volume.id} is already attached to an instance")
    if instance.state not in ("running", "stopped"):
        raise EC2ClientError("IncorrectState", f"Instance '{instance.id}' is not 'running'.")
    if volume.availability_zone != instance.availability_zone:
        raise EC2ClientError(
            "InvalidVolume.ZoneMismatch",
            f"The volume '{volume.id}' is not in the same availability zone as instance '{instance.id}'",
        )
    if device in instance.block_device_mapping:
        text = f"Invalid value '{device}' for unixDevice. Attachment point {device} is already in use"
        raise EC2ClientError("InvalidParameterValue", text)
    if len(instance.block_device_mapping) > MAX_DATA_VOLUMES:
        raise EC2ClientError(
            "AttachmentLimitExceeded", f"'{instance.id}' has {MAX_DATA_VOLUMES} data volumes, the most here"
        )


def _attachment_to_end(response: Any) -> Any:
    volume = response.ec2_backend.get_volume(response._get_param("VolumeId"))
    instance_id, device = response._get_param("InstanceId"), response._get_param("Device")
    attachment = volume.attachment
    if attachment is None:
        raise EC2ClientError("IncorrectState", f"Volume '{volume.id}' is in the 'available' state.")
    if instance_id not in (None, attachment.instance.id) or device not in (None, attachment.device):
        raise EC2ClientError(
            "InvalidAttachment.NotFound",
            f"The volume '{volume.id}' is not attached to instance '{instance_id}' as device '{device}'.",
        )
    if attachment.device == attachment.instance.root_device_name:
        raise EC2ClientError(
            "OperationNotPermitted",
            f"Unable to detach root volume '{volume.id}' from instance '{attachment.instance.id}'",
        )
    if attachment.instance.state not in ("running", "stopped"):
        raise EC2ClientError("IncorrectState", f"Instance '{attachment.instance.id}' is not 'running'.")
    return attachment


def _set_status(attachment: Any, status: str) -> None:
    attachment.status = status
    mapping = attachment.instance.block_device_mapping.get(attachment.device)
    if mapping is not None:
        mapping.status = status


def _attachment(attachment: Any, state: str) -> ActionResult:
    return ActionResult(
        {
            "VolumeId": attachment.volume.id,
            "InstanceId": attachment.instance.id,
            "Device": attachment.device,
            "State": state,
            "AttachTime": attachment.attach_time,
            "DeleteOnTermination": attachment.delete_on_termination,
        }
    )


def _delete_on_termination(self: Any) -> bool:
    mapping = self.instance.block_device_mapping.get(self.device)
    return bool(mapping and mapping.delete_on_termination)
