"""The metadata of a moto instance."""

import base64
from typing import Any

from gpukiln.clouds.embedded import role_credentials, spot
from gpukiln.clouds.embedded.metadata import InstanceMetadata, PublicKeys


def describe_instance(instance: Any) -> InstanceMetadata:
    """All that the metadata service answers for an instance.

    Args:
        instance: moto's instance.

    Returns:
        Its present metadata.
    """
    backend = instance.ec2_backend
    zone, region = instance.availability_zone, backend.region_name
    hostname, address = instance.private_dns_name, instance.private_ip
    nic = instance.nics[0]
    tree: dict[str, Any] = {
        "ami-id": instance.image_id,
        "ami-launch-index": instance.ami_launch_index,
        "block-device-mapping": _block_devices(instance),
        "hostname": hostname,
        "instance-action": "none",
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": hostname,
        "local-ipv4": address,
        "mac": nic.mac_address,
        "network": {
            "interfaces": {
                "macs": {
                    nic.mac_address: {
                        "device-number": 0,
                        "local-ipv4s": address,
                        "local-hostname": hostname,
                        "owner-id": instance.owner_id,
                        "subnet-id": instance.subnet_id,
                        "vpc-id": instance.vpc_id,
                    }
                }
            }
        },
        "placement": {"availability-zone": zone, "region": region},
        "security-groups": "\n".join(group.name for group in instance.security_groups),
        "services": {"domain": "amazonaws.com", "partition": "aws"},
        **spot.metadata_of(instance),
        **role_credentials.metadata_of(instance),
    }
    if key := backend.key_pairs.get(instance.key_name):
        tree["public-keys"] = PublicKeys({"0": {"openssh-key": key.public_key.strip()}}, name=key.key_name)
    options = instance.metadata_options
    tags = backend.tags.get(instance.id, {})
    # Off by default, as on EC2.
    if options.instance_metadata_tags == "enabled" and tags:
        tree["tags"] = {"instance": dict(tags)}
    return InstanceMetadata(
        tree=tree,
        user_data=base64.b64decode(instance.user_data.as_bytes()) if instance.user_data else None,
        identity={
            "accountId": instance.owner_id,
            "architecture": instance.architecture,
            "availabilityZone": zone,
            "imageId": instance.image_id,
            "instanceId": instance.id,
            "instanceType": instance.instance_type,
            "pendingTime": instance.launch_time.isoformat(timespec="seconds") + "Z",
            "privateIp": address,
            "region": region,
            # The version of the document's format (EC2 user guide, "Instance identity documents").
            "version": "2017-09-30",
        },
        tokens_required=options.http_tokens == "required",
    )


def _block_devices(instance: Any) -> dict[str, str]:
    """The category block-device-mapping: ami, root, ebsN (AWS, "Instance metadata categories")."""
    root = instance.root_device_name
    others = [device for device, _ in instance.get_block_device_mapping if device != root]
    numbered = {f"ebs{number}": device.removeprefix("/dev/") for number, device in enumerate(others, 1)}
    return {"ami": root, **numbered, "root": root}
