"""Tags in EC2's forms, and what an image is made of."""

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

ENDED_STATES = ("terminated", "shutting-down")


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags in EC2's form.

    Args:
        tags: Names and values.
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
    """The tags in what AWS says of one thing; SSM has them under another key."""
    return {tag["Key"]: tag["Value"] for tag in described.get(key, ())}


def snapshots_of(image: Mapping[str, Any]) -> list[str]:
    """The snapshots that an image points at.

    Args:
        image: As DescribeImages gives it.
    """
    devices = [device.get("Ebs", {}) for device in image.get("BlockDeviceMappings", ())]
    return [device["SnapshotId"] for device in devices if device.get("SnapshotId")]


def remove_image(cloud: Cloud, image_id: str) -> None:
    """Remove an AMI with its snapshots; one that is gone already is none.

    Args:
        image_id: The AMI.

    Raises:
        UnavailableError: The cloud refused.
    """
    with explain_aws_errors(f"remove {image_id}"):
        ec2 = cloud.client("ec2")
        for image in calls.images(ec2, {"image-id": [image_id]}):
            ec2.deregister_image(ImageId=image_id)
            for snapshot in snapshots_of(image):
                ec2.delete_snapshot(SnapshotId=snapshot)


PRIVILEGED = {MACHINE_TAG: "privileged"}
"""Of a machine that mounts volumes, runs a container engine or compiles kernel modules: in the embedded cloud
it may be a container, which then is root on this computer (`clouds/embedded/container.py`)."""


def build_tags(build_id: str, purpose: str, deadline: datetime) -> dict[str, str]:
    """Tags of what exists only while a build runs.

    Args:
        purpose: bake or verify.
        deadline: When it must be gone.
    """
    return {
        BUILD_TAG: build_id,
        "Name": f"gpukiln {purpose} {build_id}",
        PURPOSE_TAG: purpose,
        DEADLINE_TAG: deadline_text(deadline),
        OWNER_TAG: owner(),
    }


def owner() -> str:
    """Who to ask about a machine, and where its build ran."""
    try:
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"
