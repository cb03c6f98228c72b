"""The volumes of a new instance: its AMI's block device mapping, changed by the launch's."""

from typing import Any

from moto.ec2.exceptions import EC2ClientError, MissingParameterError

from gpukiln.clouds.embedded.block_devices import DEVICE_NAME
from gpukiln.clouds.embedded.volumes import check_snapshot_size

CODE = "InvalidBlockDeviceMapping"


def mapping_of_image(image: Any) -> list[dict[str, Any]]:
    """An image's block device mapping, the root device first.

    Args:
        image: moto's image.
    """
    root = {
        "DeviceName": image.root_device_name,
        "Ebs": {
            "SnapshotId": image.ebs_snapshot.id,
            "VolumeSize": image.ebs_snapshot.volume.size,
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
            "Encrypted": image.ebs_snapshot.encrypted,
        },
    }
    return [root, *image.devices]


def merge_mappings(image: Any, *requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mapping of a launch or a new image, checked.

    Args:
        image: moto's image, or whatever `mapping_of_image` takes.
        requests: Block device mappings; each overrides those before it.

    Returns:
        One mapping for each device, with the size of the volume.

    Raises:
        EC2ClientError: EC2 would refuse it.
    """
    root = image.root_device_name
    devices = {entry["DeviceName"]: dict(entry["Ebs"]) for entry in mapping_of_image(image)}
    for request in requests:
        names = [entry.get("DeviceName") for entry in request]
        for entry in request:
            name = entry.get("DeviceName")
            if not name:
                raise MissingParameterError("deviceName")
            # Within one request; a launch may override a device of its template.
            if names.count(name) > 1:
                raise EC2ClientError(
                    CODE, f"The device '{name}' is used in more than one block-device mapping"
                )
            if not DEVICE_NAME.fullmatch(name) and name != root:
                raise EC2ClientError(CODE, f"Invalid device name {name}")
            if entry.get("NoDevice") is not None:
                if name == root:
                    raise EC2ClientError(CODE, f"The root device '{name}' can't be left out")
                devices.pop(name, None)
            elif "Ebs" in entry:
                given = {field: value for field, value in entry["Ebs"].items() if value is not None}
                known = devices.setdefault(name, {"DeleteOnTermination": True})
                if name == root and given.get("SnapshotId", known["SnapshotId"]) != known["SnapshotId"]:
                    raise EC2ClientError(CODE, "snapshotId cannot be modified on root device")
                if given.get("SnapshotId", known.get("SnapshotId")) != known.get("SnapshotId"):
                    # Another snapshot has another default size.
                    known.pop("VolumeSize", None)
                known.update(given)
            elif not entry.get("VirtualName"):  # an instance store volume: machines here have none
                raise MissingParameterError("ebs")
    return [_check_mapping(image.ec2_backend, name, ebs) for name, ebs in devices.items()]


def _check_mapping(ec2: Any, name: str, ebs: dict[str, Any]) -> dict[str, Any]:
    size = int(ebs["VolumeSize"]) if ebs.get("VolumeSize") is not None else None
    if snapshot_id := ebs.get("SnapshotId"):
        size = check_snapshot_size(ec2, snapshot_id, size, code=CODE)
    if size is None:
        raise MissingParameterError("size or snapshotId")
    if size < 1:
        raise EC2ClientError(CODE, f"Volume size of {name} must be at least 1 GiB")
    return {"DeviceName": name, "Ebs": {**ebs, "VolumeSize": size}}


def create_volume(ec2: Any, zone: str | None, ebs: dict[str, Any]) -> Any:
    """Create moto's volume for a checked mapping; its disk is created with the machine.

    Args:
        ec2: moto's EC2 backend.
        zone: Name of the availability zone.
        ebs: The mapping's `Ebs`.

    Raises:
        EC2ClientError: Its type does not go with its other properties.
    """
    encrypted = bool(ebs.get("Encrypted"))
    return ec2.create_volume(
        size=ebs["VolumeSize"],
        zone_name=zone,
        snapshot_id=ebs.get("SnapshotId"),
        encrypted=encrypted,
        kms_key_id=ebs.get("KmsKeyId") if encrypted else None,
        volume_type=ebs.get("VolumeType"),
        iops=ebs.get("Iops"),
        throughput=ebs.get("Throughput"),
    )
