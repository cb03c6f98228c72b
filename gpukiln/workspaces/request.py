"""What RunInstances is asked for a workspace's machine: for `workspace.up` and for Terraform the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpukiln.instances.tags import PRIVILEGED, tag_specifications
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.tags import workspace_tags

PART = "machine"
HOME_DEVICE = "/dev/sdf"  # EC2 user guide, "Device names for volumes": /dev/sd[f-p] for what is attached
# Hop limit 2: containers reach instance metadata, too (EC2 user guide, "Use IMDSv2").
METADATA = {
    "HttpEndpoint": "enabled",
    "HttpTokens": "required",
    "HttpPutResponseHopLimit": 2,
    "InstanceMetadataTags": "enabled",  # the agent reads there which volume is its home
}


def machine_request(
    wanted: Workspace,
    *,
    image: Mapping[str, Any],
    user_data: bytes,
    group_id: str,
    profile: str,
    key_name: str = "",
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments of RunInstances but type, subnet, market, number and token, which the launch walk adds.

    Args:
        image: As DescribeImages gives it, of which ImageId and RootDeviceName count.
        user_data: As it is; the client of AWS encodes it.
        profile: Name of the instance profile; empty: the machine has no rights.
        key_name: Of a key pair; empty: none.
        tags: More tags of the machine.
    """
    ours = workspace_tags(wanted, PART)
    may_be_none: dict[str, Any] = {}
    if profile:
        may_be_none["IamInstanceProfile"] = {"Name": profile}
    if key_name:
        may_be_none["KeyName"] = key_name
    return {
        "ImageId": image["ImageId"],
        "UserData": user_data,
        "SecurityGroupIds": [group_id],
        **may_be_none,
        "MetadataOptions": dict(METADATA),
        # A one-time spot instance can't be stopped (EC2 user guide, "Stop a Spot Instance"): its shutdown
        # ends it, and the home, which was attached later, is kept.
        "InstanceInitiatedShutdownBehavior": "terminate" if wanted.spot else "stop",
        "BlockDeviceMappings": [
            {
                "DeviceName": image["RootDeviceName"],  # its size stays the image's
                "Ebs": {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
        ],
        "TagSpecifications": [
            *tag_specifications({**ours, **PRIVILEGED, **(tags or {})}, "instance"),
            *tag_specifications(ours, "volume"),
        ],
    }
