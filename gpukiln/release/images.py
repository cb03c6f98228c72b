"""Changes of a release to a region's image; each reads the state first, so a second run changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.tags import ENCRYPTION_TAG, SOURCE_TAG
from gpukiln.errors import UnavailableError
from gpukiln.instances.tags import snapshots_of, tag_list, tag_specifications, tags_of
from gpukiln.release.regions import Site
from gpukiln.units import Duration

# Tags of a copy alone, by which it is found again; the source's tags are copied otherwise.
COPY_TAGS = (SOURCE_TAG, ENCRYPTION_TAG)
# A copy in the embedded cloud takes a second, one between AWS regions up to an hour.
FIRST_POLL_S, LAST_POLL_S = 0.5, 15.0
PROTECTED = "enabled"  # enabled-without-cooldown, enabled-with-cooldown (aws-cli's and Terraform's examples)
# Images a page: without a size DescribeImages answers with everything at once, and may time out.
PAGE = 200


@dataclass(frozen=True)
class LaunchPermissions:
    """The accounts that may launch an image.

    Args:
        accounts: Account ids.
        organizations: ARNs of organizations and organizational units.
        public: Whether every account may.
    """

    accounts: tuple[str, ...] = ()
    organizations: tuple[str, ...] = ()
    public: bool = False

    @property
    def permissions(self) -> list[dict[str, str]]:
        """The permissions in EC2's form.

        >>> LaunchPermissions(accounts=("111122223333",), public=True).permissions
        [{'UserId': '111122223333'}, {'Group': 'all'}]
        """
        # EC2 has one field for organizations and another for their units.
        units = [arn for arn in self.organizations if ":ou/" in arn]
        return [
            *({"UserId": account} for account in self.accounts),
            *({"OrganizationArn": arn} for arn in self.organizations if arn not in units),
            *({"OrganizationalUnitArn": arn} for arn in units),
            *([{"Group": "all"}] if self.public else []),
        ]


def find_images(site: Site, image_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Images by their ids; a deregistered one is left out."""
    # As a filter: an unknown id among ImageIds would fail the whole call.
    ids = sorted(set(image_ids))
    if not ids:
        return {}
    return {image["ImageId"]: image for image in _describe_images(site, {"image-id": ids})}


def _describe_images(site: Site, filters: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    return calls.images(site.ec2, filters, page_size=PAGE, Owners=["self"], IncludeDeprecated=True)


def is_encrypted(image: Mapping[str, Any]) -> bool:
    """Whether any disk of an image is encrypted.

    Args:
        image: As DescribeImages gives it.
    """
    return any(device.get("Ebs", {}).get("Encrypted") for device in image.get("BlockDeviceMappings", ()))


def find_copies(site: Site, source: Mapping[str, Any], key: str | None) -> tuple[str, list[str]]:
    """The copies of an image that a region has.

    Args:
        key: KMS key that it was to be encrypted with, `default` for the account's, None for none.

    Returns:
        The copy that is available or pending, or an empty string; and the ids of those that failed.
    """
    tagged = {f"tag:{SOURCE_TAG}": [source["ImageId"]], f"tag:{ENCRYPTION_TAG}": [key or "none"]}
    copies = _describe_images(site, tagged)
    # An available copy first, then the oldest: two runs at once then choose the same one.
    copies.sort(key=lambda image: (image["State"] != "available", image["CreationDate"], image["ImageId"]))
    usable = [str(image["ImageId"]) for image in copies if image["State"] in ("available", "pending")]
    return usable[0] if usable else "", [str(image["ImageId"]) for image in copies if not usable]


def _has_name(site: Site, source: Mapping[str, Any]) -> bool:
    """Whether another image of this account has the name in this region, where names are unique."""
    # A copy of the same source with this name is the copy itself, from an earlier run.
    others = calls.images(site.ec2, {"name": [source["Name"]]}, Owners=["self"])
    return any(tags_of(image).get(SOURCE_TAG) != source["ImageId"] for image in others)


def ensure_copy(
    site: Site, source: Mapping[str, Any], source_region: str, *, key: str | None, tags: Mapping[str, str]
) -> str:
    """The copy of an image in a region, started when there is none.

    Args:
        source: The image, as DescribeImages gives it.
        key: KMS key to encrypt the copy with, `default` for the account's, None for none.
        tags: Tags of the copy and its snapshots.

    Returns:
        Its id; it may still be pending.
    """
    copy_id, failed = find_copies(site, source, key)
    if copy_id:
        return copy_id
    site.check_interrupted()
    # The same token gives the same copy, should an answer get lost before the copy can be found by its tags.
    # A failed copy needs a new token, so their ids are in it; the day allows a removed copy to be made again.
    about = [source["ImageId"], site.region, key or "none", *failed, f"{datetime.now(UTC):%Y-%m-%d}"]
    token = hashlib.sha256(" ".join(about).encode()).hexdigest()
    # In the source's own region, next to a failed copy or a foreign image, the name is taken.
    is_second = site.region == source_region or failed or _has_name(site, source)
    # Without KmsKeyId EC2 uses the account's default key for EBS.
    encryption: dict[str, Any] = {"Encrypted": True} if key else {}
    if key and key != "default":
        encryption["KmsKeyId"] = key
    answer = site.ec2.copy_image(
        SourceImageId=source["ImageId"],
        SourceRegion=source_region,
        Name=f"{source['Name']}-{token[:6]}" if is_second else source["Name"],
        Description=source.get("Description", ""),
        ClientToken=token,
        TagSpecifications=tag_specifications(
            {**tags, SOURCE_TAG: source["ImageId"], ENCRYPTION_TAG: key or "none"}, "image", "snapshot"
        ),
        **encryption,
    )
    return str(answer["ImageId"])


def wait_until_available(
    site: Site, image_id: str, *, timeout_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for a copy.

    Args:
        image_id: The copy.
        timeout_s: Seconds that it gets.
        say: Shows what it waits for.

    Returns:
        The image.

    Raises:
        UnavailableError: It failed, it is gone, or it takes too long.
    """
    state = ""

    def available() -> dict[str, Any] | None:
        nonlocal state
        # A new copy is not visible at once: EC2 is eventually consistent.
        image = find_images(site, [image_id]).get(image_id, {"State": "not visible yet"})
        state = image["State"]
        # States that never become available; the next run starts a new copy for a failed one.
        if state in ("failed", "error", "invalid", "deregistered"):
            reason = image.get("StateReason", {}).get("Message", "no reason given")
            raise UnavailableError(
                f"{image_id} in {site.region} is {state}: {reason}",
                hint="run the same command again: it makes a new copy",
            )
        return image if state == "available" else None

    def pause(seconds: float) -> None:
        say(f"{site.region}: {image_id} is {state}")
        site.pause(seconds)

    return calls.wait_until(
        available,
        lambda: UnavailableError(
            f"{image_id} in {site.region} is still {state} after {Duration(timeout_s).shown}",
            hint="AWS continues the copy; run the same command again later (--timeout MINUTES)",
        ),
        timeout_s=timeout_s,
        pause_s=FIRST_POLL_S,
        longest_pause_s=LAST_POLL_S,
        sleep=pause,
    )


def ensure_tags(site: Site, image: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Tag an image and its snapshots, where a tag is missing or has another value.

    Args:
        tags: Values by name.
    """
    ids = snapshots_of(image)  # without ids every snapshot would be described
    snapshots = site.ec2.describe_snapshots(SnapshotIds=ids)["Snapshots"] if ids else []
    # The copy's snapshots get tags too, so that prune and IAM policies recognise them.
    for resource, name in (
        (image, image["ImageId"]),
        *((snapshot, snapshot["SnapshotId"]) for snapshot in snapshots),
    ):
        there = tags_of(resource)
        if missing := {key: value for key, value in tags.items() if there.get(key) != value}:
            site.check_interrupted()
            site.ec2.create_tags(Resources=[name], Tags=tag_list(missing))


def ensure_imds(site: Site, image: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Make a copy require IMDSv2 where its source does.

    Args:
        image: The copy.
        source: The image that it is a copy of.
    """
    required = source.get("ImdsSupport")
    if required and image.get("ImdsSupport") != required:
        site.check_interrupted()
        site.ec2.modify_image_attribute(ImageId=image["ImageId"], ImdsSupport={"Value": required})


def launch_permissions(site: Site, image_id: str) -> list[dict[str, str]]:
    """The launch permissions of an image, without its owner's."""
    answer = site.ec2.describe_image_attribute(ImageId=image_id, Attribute="launchPermission")
    return [dict(permission) for permission in answer["LaunchPermissions"]]


def ensure_shared(site: Site, image_id: str, sharing: LaunchPermissions) -> None:
    """Add launch permissions to an image; none is removed."""
    if not sharing.permissions:
        return
    # Only missing ones are added: permissions that a person gave stay.
    there = launch_permissions(site, image_id)
    if missing := [permission for permission in sharing.permissions if permission not in there]:
        site.check_interrupted()
        site.ec2.modify_image_attribute(ImageId=image_id, LaunchPermission={"Add": missing})


def make_live(site: Site, image: Mapping[str, Any]) -> None:
    """Remove an image's deprecation and protect it from being deregistered."""
    # EC2 itself deprecates each public image two years after its creation: a date that far ahead stays.
    deprecation = deprecated_at(image)
    if deprecation and not (image.get("Public") and deprecation > datetime.now(UTC) + timedelta(366)):
        site.check_interrupted()
        site.ec2.disable_image_deprecation(ImageId=image["ImageId"])
    if not is_protected(image):
        site.check_interrupted()
        site.ec2.enable_image_deregistration_protection(ImageId=image["ImageId"])


def retire(site: Site, image: Mapping[str, Any], *, after: timedelta) -> None:
    """Deprecate an image that no channel points at any more, and end its protection.

    Args:
        after: The time until it is deprecated; an earlier deprecation stays.
    """
    # EC2 refuses a time in the past, and rounds to the minute.
    at = datetime.now(UTC) + max(after, timedelta(minutes=5))
    # Five minutes of tolerance: EC2 rounds, and a second run must not move the time again.
    if not (there := deprecated_at(image)) or there > at + timedelta(minutes=5):
        site.check_interrupted()
        site.ec2.enable_image_deprecation(ImageId=image["ImageId"], DeprecateAt=at)
    if is_protected(image):
        site.check_interrupted()
        site.ec2.disable_image_deregistration_protection(ImageId=image["ImageId"])


def is_protected(image: Mapping[str, Any]) -> bool:
    """Whether an image can't be deregistered now.

    Args:
        image: As DescribeImages gives it.
    """
    return str(image.get("DeregistrationProtection", "")).startswith(PROTECTED)


def deprecated_at(image: Mapping[str, Any]) -> datetime | None:
    """The time of an image's deprecation; None: it has none.

    Args:
        image: As DescribeImages gives it.
    """
    return parse_time(image["DeprecationTime"]) if image.get("DeprecationTime") else None


def parse_time(text: str) -> datetime:
    """Parse a time in EC2's form.

    >>> parse_time("2026-04-01T12:30:00.000Z").isoformat()
    '2026-04-01T12:30:00+00:00'
    >>> parse_time("2026-04-01T12:30:00Z") > parse_time("2026-04-01T12:29:59.000Z")
    True

    Args:
        text: ISO 8601, UTC.
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
