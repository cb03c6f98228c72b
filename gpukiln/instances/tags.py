"""Tags in EC2's forms, the tags of a build's resources, and the snapshots of an image."""

import os
import pwd
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import (
    BUILD_TAG,
    DEADLINE_TAG,
    MACHINE_TAG,
    OWNER_TAG,
    PURPOSE_TAG,
)
from gpukiln.instances.deadline import deadline_text

# Their resources are released or about to be; a terminated instance stays in DescribeInstances for about an
# hour.
ENDED_STATES = ("terminated", "shutting-down")


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags in EC2's form.

    >>> tag_list({"Name": "vision"})
    [{'Key': 'Name', 'Value': 'vision'}]
    """
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_specifications(tags: dict[str, str], *resources: str) -> list[dict[str, Any]]:
    """The same tags for several kinds of resources.

    Args:
        tags: Names and values.
        resources: For example `instance`, `volume`.
    """
    return [{"ResourceType": resource, "Tags": tag_list(tags)} for resource in resources]


def tags_of(described: Mapping[str, Any], key: str = "Tags") -> dict[str, str]:
    """The tags of a resource in an answer of AWS; SSM has them under the key TagList.

    >>> tags_of({"Tags": [{"Key": "Name", "Value": "vision"}]})
    {'Name': 'vision'}
    >>> tags_of({})
    {}
    """
    return {tag["Key"]: tag["Value"] for tag in described.get(key, ())}


def snapshots_of(image: Mapping[str, Any]) -> list[str]:
    """The snapshots of an image.

    Args:
        image: As DescribeImages gives it.

    >>> snapshots_of({"BlockDeviceMappings": [{"Ebs": {"SnapshotId": "snap-1"}}, {"NoDevice": ""}]})
    ['snap-1']
    """
    devices = [device.get("Ebs", {}) for device in image.get("BlockDeviceMappings", ())]
    return [device["SnapshotId"] for device in devices if device.get("SnapshotId")]


def remove_image(cloud: Cloud, image_id: str) -> None:
    """Remove an AMI with its snapshots; one that no longer exists is no error.

    Args:
        image_id: The AMI.

    Raises:
        UnavailableError: A call failed.
    """
    with explain_aws_errors(f"remove {image_id}"):
        ec2 = cloud.client("ec2")
        for image in calls.images(ec2, {"image-id": [image_id]}):
            # First: EC2 refuses to delete a snapshot that an image uses.
            ec2.deregister_image(ImageId=image_id)
            for snapshot in snapshots_of(image):
                ec2.delete_snapshot(SnapshotId=snapshot)


PRIVILEGED = {MACHINE_TAG: "privileged"}
"""Tag of a machine that mounts volumes, runs a container engine or compiles kernel modules. In the embedded
cloud it may be a container, whose root is then root on this computer (`clouds/embedded/container.py`)."""


def build_tags(build_id: str, purpose: str, deadline: datetime) -> dict[str, str]:
    """Tags of the resources that exist only while a build runs.

    Args:
        purpose: bake or verify.
        deadline: When they have to be removed.
    """
    return {
        BUILD_TAG: build_id,
        "Name": f"gpukiln {purpose} {build_id}",
        PURPOSE_TAG: purpose,
        DEADLINE_TAG: deadline_text(deadline),
        OWNER_TAG: owner(),
    }


def owner() -> str:
    """USER@HOST of the person who started a build."""
    try:
        # With sudo the person, not root.
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"
