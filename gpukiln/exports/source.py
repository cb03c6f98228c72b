"""The root disk of an image: its facts, and its bytes as a raw file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.ec2 import images
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.exports import ebs
from gpukiln.instances.tags import tags_of


@dataclass(frozen=True)
class Source:
    """An image and its root disk.

    Args:
        size_gib: The size of the disk.
        tags: The image's tags.
        others: Device names of the image's further disks, which are not exported.
        disk: The disk's file on this machine; None: the disk is read by the EBS direct APIs.
    """

    image_id: str
    name: str
    region: str
    cloud: str
    architecture: str
    boot_mode: str
    snapshot_id: str
    size_gib: int
    encrypted: bool
    tags: Mapping[str, str]
    others: tuple[str, ...] = ()
    disk: Path | None = None


def find_source(cloud: Cloud, image_id: str, *, direct: bool = True) -> Source:
    """Find an image's root disk by DescribeImages.

    Args:
        cloud: The cloud, in the image's region.
        direct: Whether a disk file of the embedded cloud is read in place.

    Raises:
        UsageError: There is no such image, or it has no disk.
        UnavailableError: The cloud could not be asked, or the image is not ready.
    """
    # Without IncludeDeprecated EC2 hides a deprecated image from everybody but its owner.
    with explain_aws_errors("look up the image"):
        matches = images(cloud.client("ec2"), {"image-id": [image_id]}, IncludeDeprecated=True)
    where = f"{cloud.region} ({cloud.name})"
    if not matches:
        raise UsageError(
            f"there is no image {image_id} in {where}", hint="check --region, --cloud and --profile"
        )
    image: Mapping[str, Any] = matches[0]
    if image["State"] != "available":
        raise UnavailableError(f"{image_id} is {image['State']}, wanted available", hint="wait until it is")
    disks = {
        device["DeviceName"]: device["Ebs"]
        for device in image["BlockDeviceMappings"]
        # Instance-store devices have no Ebs, and an empty volume that an image asks for has no snapshot.
        if device.get("Ebs", {}).get("SnapshotId")
    }
    root = disks.pop(image.get("RootDeviceName", ""), None)
    if root is None:
        raise UsageError(
            f"{image_id} has no root disk on EBS", hint="only images whose root is a snapshot have one"
        )
    disk = cloud.snapshot_disk(root["SnapshotId"]) if direct else None
    if disk is not None and not disk.exists():
        raise UnavailableError(
            f"the disk of {root['SnapshotId']} is missing: {disk}",
            hint="`invoke cloud.status` reports missing files of the embedded cloud; the first build makes"
            " the disk of a base image",
        )
    return Source(
        image_id=image_id,
        name=str(image.get("Name", "")),
        region=cloud.region,
        cloud=cloud.name,
        architecture=str(image.get("Architecture", "")),
        boot_mode=str(image.get("BootMode", "")),
        snapshot_id=root["SnapshotId"],
        size_gib=int(root["VolumeSize"]),
        encrypted=bool(root.get("Encrypted")),
        tags=tags_of(image),
        others=tuple(disks),
        disk=disk,
    )


def read_disk(
    cloud: Cloud,
    source: Source,
    disk: Path,
    journal: Path,
    *,
    begin: Callable[[int], None],
    moved: Callable[[int], None],
) -> ebs.BlockCounts:
    """Read the disk into a raw file by the EBS direct APIs, see `ebs.read_snapshot`."""
    # One attempt: botocore does not repeat a call whose body is cut short, `call_with_retries` does, and two
    # layers of retries would multiply.
    client = cloud.client("ebs", attempts=1)
    return ebs.read_snapshot(client, source.snapshot_id, disk, journal, begin=begin, moved=moved)
