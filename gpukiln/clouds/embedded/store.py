"""Converts moto's images, snapshots, tags and parameters of a region to a document, and back.

moto's state is in memory. Its objects are created from the document by moto's constructors; attributes
without a parameter are set afterwards. `regions.py` stores the documents.
"""

from datetime import UTC, datetime
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami
from moto.ec2.models.elastic_block_store import Snapshot, Volume
from moto.ssm.models import Parameter

AMAZON = "898082745236"  # owner of AWS's images, which every start publishes again
IMAGE_FIELDS = (
    *("name", "description", "owner_id", "owner_alias", "virtualization_type", "architecture", "state"),
    *("platform", "image_type", "image_location", "hypervisor", "root_device_type", "root_device_name"),
    *("boot_mode", "instance_id", "launch_permissions"),
)
LATER_IMAGE_FIELDS = (  # added by image_calls.py and images.py; moto's images lack them
    *("deprecation_time", "deregistration_protection", "imds_support"),
    *("source_image_id", "source_image_region", "client_token", "client_request", "devices"),
)
PARAMETER_FIELDS = (
    *("name", "value", "parameter_type", "description", "allowed_pattern", "keyid", "version", "data_type"),
    *("labels", "tier"),
)


def dump_region(ec2: Any, ssm: Any) -> dict[str, Any]:
    """The stored part of a region.

    Args:
        ec2: moto's EC2 backend of the region.
        ssm: moto's SSM backend of the region.

    Returns:
        A JSON document.
    """
    return {
        "schema": 1,
        "image_block_public_access": getattr(ec2, "image_block_public_access", None),
        "images": {
            image.id: {
                **{field: getattr(image, field) for field in IMAGE_FIELDS},
                **{field: vars(image)[field] for field in LATER_IMAGE_FIELDS if field in vars(image)},
                "creation_date": image.creation_date.isoformat(),
                "snapshot": image.ebs_snapshot.id,
                "tags": ec2.tags.get(image.id, {}),
            }
            for image in ec2.amis.values()
            if image.owner_id != AMAZON
        },
        "snapshots": {
            snapshot.id: {
                "description": snapshot.description,
                "start_time": snapshot.start_time.isoformat(),
                "size_gib": snapshot.volume.size,
                "encrypted": snapshot.encrypted,
                "kms_key_id": snapshot.kms_key_id,
                "owner_id": snapshot.owner_id,
                "from_ami": snapshot.from_ami,
                "volume_id": snapshot.volume.id,
                "shared_with": sorted(snapshot.create_volume_permission_userids),
                "tags": ec2.tags.get(snapshot.id, {}),
            }
            for snapshot in ec2.snapshots.values()
            if snapshot.owner_id != AMAZON and snapshot.status == "completed"
        },
        "parameters": {
            name: [
                {
                    **{field: getattr(version, field) for field in PARAMETER_FIELDS},
                    "last_modified": version.last_modified_date.isoformat(),
                }
                for version in versions
            ]
            for name, versions in ssm._parameters.items()
            if versions and not versions[0].name.startswith("/aws/")  # every start publishes these again
        },
        "parameter_tags": {
            name: tags
            for name, tags in getattr(ssm, "_resource_tags", {}).get("Parameter", {}).items()
            if tags
        },
    }


def add_snapshot(
    ec2: Any,
    snapshot_id: str,
    *,
    size_gib: int,
    description: str = "",
    encrypted: bool = False,
    kms_key_id: str | None = None,
    owner_id: str | None = None,
    from_ami: str | None = None,
    volume_id: str = "vol-ffffffff",
    shared_with: tuple[str, ...] = (),
    start_time: str | None = None,
    tags: dict[str, str] | None = None,
) -> Any:
    """Create a snapshot with a given id.

    Args:
        ec2: moto's EC2 backend.
        description: As given at its creation.
        encrypted: Whether it counts as encrypted.
        owner_id: Account that owns it.
        from_ami: AMI whose registration made it.
        volume_id: The volume of the snapshot, which may no longer exist.
        shared_with: Accounts that may use it.
        start_time: ISO 8601.

    Returns:
        moto's snapshot.
    """
    # the volume mostly no longer exists, but DescribeSnapshots still has its id
    volume = Volume(ec2, volume_id, size_gib, None, snapshot_id=None, encrypted=encrypted)  # type: ignore[abstract]  # moto makes them likewise
    snapshot = Snapshot(
        ec2, snapshot_id, volume, description, encrypted, kms_key_id, owner_id=owner_id, from_ami=from_ami
    )
    snapshot.create_volume_permission_userids.update(shared_with)
    if start_time:
        snapshot.start_time = datetime.fromisoformat(start_time)
    snapshot.add_tags(tags or {})
    ec2.snapshots[snapshot_id] = snapshot
    return snapshot


def add_image(ec2: Any, image_id: str, snapshot: Any, fields: dict[str, Any]) -> Any:
    """Create an image with a given id and snapshot.

    Args:
        ec2: moto's EC2 backend.
        snapshot: moto's snapshot of its root device.
        fields: Attributes of moto's Ami; creation_date as ISO 8601; tags.

    Returns:
        moto's image.
    """
    fields = dict(fields)
    tags = fields.pop("tags", {})
    created = fields.pop("creation_date", None)
    image = Ami(ec2, image_id, region_name=f"{ec2.region_name}a", name=fields.get("name"))
    # moto creates a snapshot with each Ami.
    ec2.snapshots.pop(image.ebs_snapshot.id, None)
    image.ebs_snapshot = snapshot
    for field, value in fields.items():
        setattr(image, field, value)
    image.creation_date = datetime.fromisoformat(created) if created else utcnow()
    image.add_tags(tags)
    ec2.amis[image_id] = image
    return image


def add_parameter(ssm: Any, fields: dict[str, Any]) -> None:
    """Add one version of a parameter, also below /aws, where PutParameter is denied.

    Args:
        ssm: moto's SSM backend.
        fields: Attributes of moto's Parameter; last_modified as ISO 8601.
    """
    fields = dict(fields)
    modified = fields.pop("last_modified", None)
    when = datetime.fromisoformat(modified) if modified else datetime.now(UTC).replace(tzinfo=None)
    defaults = dict.fromkeys(("description", "allowed_pattern", "keyid"))
    parameter = Parameter(  # type: ignore[abstract]
        account_id=ssm.account_id,
        **{
            **defaults,
            "parameter_type": "String",
            "version": 1,
            "data_type": "text",
            **fields,
            "last_modified_date": when,
        },
    )
    parameter.value = fields["value"]  # the stored value of a SecureString is encoded already
    ssm._parameters[fields["name"]].append(parameter)


def load_ec2(ec2: Any, document: dict[str, Any]) -> None:
    """Create a region's images and snapshots from its document.

    Args:
        ec2: moto's EC2 backend of the region.
        document: What `dump_region` returned.
    """
    if state := document.get("image_block_public_access"):
        ec2.image_block_public_access = state
    snapshots = {
        snapshot_id: add_snapshot(ec2, snapshot_id, **{**fields, "shared_with": tuple(fields["shared_with"])})
        for snapshot_id, fields in document["snapshots"].items()
    }
    for image_id, image in document["images"].items():
        fields = {name: value for name, value in image.items() if name != "snapshot"}
        add_image(ec2, image_id, snapshots.get(image["snapshot"]), fields)


def load_ssm(ssm: Any, document: dict[str, Any]) -> None:
    """Create a region's parameters from its document.

    Args:
        ssm: moto's SSM backend of the region.
        document: What `dump_region` returned.
    """
    for versions in document["parameters"].values():
        for fields in versions:
            add_parameter(ssm, fields)
    for name, tags in document.get("parameter_tags", {}).items():
        ssm._resource_tags["Parameter"][name].update(tags)
