"""Finds, by tags, the resources that builds of this or another computer left, and removes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import (
    BUILD_ID_TAG,
    BUILD_TAG,
    DEADLINE_TAG,
    DIGEST_TAG,
    IMPORT_TAG,
    OWNER_TAG,
    STAGE_KEY_TAG,
)
from gpukiln.errors import PartialError, UnavailableError
from gpukiln.instances.deadline import deadline_text
from gpukiln.instances.tags import remove_image, tags_of
from gpukiln.records import build_started

# A machine with GPUs or of bare metal takes minutes to terminate; it costs nothing meanwhile.
ENDS_S = 900
POLL_S = 2
# For resources without a deadline: those of older versions, and snapshots, whose image may still be pending.
GRACE = timedelta(hours=24)


@dataclass(frozen=True)
class Orphan:
    """A resource that no build needs any more.

    Args:
        kind: instance, volume, key pair, security group, snapshot, image or private key.
        id: Its id; a key pair's name; a private key's path.
        build: The build that created it, or an empty string.
        owner: The person who started the build.
        since: When it should have been removed, ISO 8601 in UTC.
        reason: Why it is an orphan.
    """

    kind: str
    id: str
    build: str
    owner: str
    since: str
    reason: str

    def __str__(self) -> str:
        of = f" of {self.build}" if self.build else ""
        return f"{self.kind} {self.id}{of}, started by {self.owner or 'an unknown person'}: {self.reason}"


def no_build_ended(_: str) -> bool:
    """The default of `find_orphans`: no build is known to have ended."""
    return False


def find_orphans(
    cloud: Cloud, *, now: datetime | None = None, ended: Callable[[str], bool] = no_build_ended
) -> list[Orphan]:
    """The orphans of one region, in the order in which they can be removed.

    Args:
        cloud: The cloud and region.
        now: The moment that deadlines are compared with; None: the present.
        ended: Whether the build with an id is known to have ended; its resources are orphans before the
            deadline.

    Returns:
        The orphans, without what a build still needs.

    Raises:
        UnavailableError: A call failed.
    """
    moment = now or datetime.now(UTC)
    with explain_aws_errors("look for orphans"):
        ec2 = cloud.client("ec2")
        resources = [*_tagged_resources(ec2), *_snapshots(ec2)]
    orphans = [_as_orphan(*resource, moment, ended) for resource in resources]
    return [orphan for orphan in orphans if orphan]


def remove_orphans(cloud: Cloud, orphans: list[Orphan], say: Callable[[str], None]) -> list[Orphan]:
    """Remove orphans. One that no longer exists is no error, and one that can't be removed stops no other.

    Args:
        orphans: As `find_orphans` returns them.
        say: Gets a line about each removed orphan.

    Returns:
        The removed orphans.

    Raises:
        PartialError: Some could not be removed; the details give each reason.
    """
    removed: list[Orphan] = []
    failed: list[str] = []
    for orphan in orphans:
        try:
            with explain_aws_errors(f"remove {orphan.kind} {orphan.id}"):
                _remove(cloud, orphan.kind, orphan.id)
        except UnavailableError as error:
            if not _is_gone(error):
                failed.append(error.message)
                continue
        removed.append(orphan)
        say(f"removed {orphan.kind} {orphan.id}")
    if failed:
        raise PartialError(
            f"{len(removed)} of {len(orphans)} orphans were removed",
            hint="run the command again: EC2 releases a security group some time after its machine has ended",
            details=tuple(failed),
        )
    return removed


def sweep(cloud: Cloud, build_id: str) -> list[str]:
    """Remove every resource of a build except its image; one that no longer exists is no error.

    Args:
        build_id: The build; no other process may be working on it.

    Returns:
        Ids of the removed resources.

    Raises:
        UnavailableError: Some could not be removed, and all others were; the details give each reason.
    """
    with explain_aws_errors(f"look for the resources of build {build_id}"):
        resources = list(_tagged_resources(cloud.client("ec2"), [build_id], volumes=False))
    left = [Orphan(kind, id, build_id, "", "", "its build has ended") for kind, id, *_ in resources]
    try:
        return [orphan.id for orphan in remove_orphans(cloud, left, lambda _: None)]
    except PartialError as error:
        raise UnavailableError(
            f"a resource of build {build_id} is left: {error.details[0]}", details=error.details
        ) from error


def builds_with_orphans(cloud: Cloud) -> set[str]:
    """The builds that have a machine, a key pair or a security group.

    Returns:
        Build ids, of running builds too.
    """
    with explain_aws_errors("look for orphans of earlier builds"):
        return {tags[BUILD_TAG] for _, _, tags, _ in _tagged_resources(cloud.client("ec2"), volumes=False)}


def unrecorded_images(cloud: Cloud, build_id: str) -> list[dict[str, Any]]:
    """The AMIs of a build whose record has none, because it was killed during or after CreateImage.

    Returns:
        As DescribeImages gives them, without stages.
    """
    with explain_aws_errors(f"look for the image of build {build_id}"):
        return calls.images(cloud.client("ec2"), {f"tag:{BUILD_ID_TAG}": [build_id]}, Owners=["self"])


def remove_unrecorded(cloud: Cloud, build_id: str) -> list[str]:
    """Remove the AMIs of a build that no record has, with their snapshots.

    Returns:
        Their ids.

    Raises:
        UnavailableError: A call failed.
    """
    removed = []
    with explain_aws_errors(f"remove the image of build {build_id}"):
        ec2 = cloud.client("ec2")
        for image in unrecorded_images(cloud, build_id):
            ec2.deregister_image(ImageId=image["ImageId"])
            removed.append(image["ImageId"])
        # by their own tag: an AMI that is pending names no snapshot yet
        of_build = [{"Name": f"tag:{BUILD_ID_TAG}", "Values": [build_id]}]
        for snapshot in ec2.describe_snapshots(OwnerIds=["self"], Filters=of_build)["Snapshots"]:
            ec2.delete_snapshot(SnapshotId=snapshot["SnapshotId"])
    return removed


TaggedResource = tuple[str, str, dict[str, str], datetime | None]


def _tagged_resources(
    ec2: Any, builds: Sequence[str] = ("*",), *, volumes: bool = True
) -> Iterator[TaggedResource]:
    """Every resource with a build's tag; machines first, because they use the others."""
    tag_filter = {f"tag:{BUILD_TAG}": builds}
    for instance in calls.instances(ec2, tag_filter):
        if instance["State"]["Name"] != "terminated":
            yield "instance", instance["InstanceId"], tags_of(instance), None
    # an attached volume ends with its machine
    available = calls.filters({**tag_filter, "status": ["available"]})
    for volume in calls.pages(ec2, "describe_volumes", "Volumes", Filters=available) if volumes else ():
        yield "volume", volume["VolumeId"], tags_of(volume), None
    tagged = calls.filters(tag_filter)
    for key_pair in ec2.describe_key_pairs(Filters=tagged)["KeyPairs"]:
        yield "key pair", key_pair["KeyName"], tags_of(key_pair), None
    for group in calls.pages(ec2, "describe_security_groups", "SecurityGroups", Filters=tagged):
        yield "security group", group["GroupId"], tags_of(group), None


def _snapshots(ec2: Any) -> Iterator[TaggedResource]:
    """Snapshots with tags of gpukiln that no image uses, because their builds failed."""
    images = calls.images(ec2, {}, Owners=["self"])
    # EC2 would refuse to delete a snapshot in use; this saves the call and the error.
    used = {
        device.get("Ebs", {}).get("SnapshotId") for image in images for device in image["BlockDeviceMappings"]
    }
    for tag in (DIGEST_TAG, STAGE_KEY_TAG, IMPORT_TAG):
        tagged = calls.filters({"tag-key": [tag]})
        for snapshot in calls.pages(
            ec2, "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=tagged
        ):
            if snapshot["SnapshotId"] not in used:
                yield "snapshot", snapshot["SnapshotId"], tags_of(snapshot), snapshot["StartTime"]


def _as_orphan(
    kind: str,
    id: str,
    tags: dict[str, str],
    created: datetime | None,
    now: datetime,
    ended: Callable[[str], bool],
) -> Orphan | None:
    """An orphan, or None while a build may need it."""
    build = tags.get(BUILD_TAG, "")
    # Before the deadline: this computer knows that nobody works on the build.
    if build and ended(build):
        since, reason = now, "its build has ended, on this machine"
    elif created:
        since, reason = created + GRACE, "no image uses it"
    elif (deadline := _parse_time(tags.get(DEADLINE_TAG, ""))) is not None:
        since, reason = deadline, f"its deadline was {deadline_text(deadline)}"
    elif (started := build_started(build)) is not None:
        since, reason = (
            started + GRACE,
            f"its build began at {deadline_text(started)}, and it has no deadline",
        )
    else:
        return None  # its age is unknown
    if now < since:
        return None
    return Orphan(kind, id, build, tags.get(OWNER_TAG, ""), deadline_text(since), reason)


def _parse_time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Tags can be edited by people: a time without a zone is read as UTC.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _remove(cloud: Cloud, kind: str, id: str) -> None:
    ec2 = cloud.client("ec2")
    match kind:
        case "instance":
            # Waited for: the security group and the volumes can go only after it.
            ec2.terminate_instances(InstanceIds=[id])
            waiter = ec2.get_waiter("instance_terminated")
            waiter.wait(InstanceIds=[id], WaiterConfig={"Delay": POLL_S, "MaxAttempts": ENDS_S // POLL_S})
        case "volume":
            ec2.delete_volume(VolumeId=id)
        case "key pair":
            ec2.delete_key_pair(KeyName=id)
        case "security group":
            ec2.delete_security_group(GroupId=id)
        case "snapshot":
            ec2.delete_snapshot(SnapshotId=id)
        case "image":
            remove_image(cloud, id)
        case "private key":
            Path(id).unlink(missing_ok=True)


def _is_gone(error: UnavailableError) -> bool:
    answer = getattr(error.__cause__, "response", {}).get("Error", {})
    # InvalidInstanceID.NotFound, InvalidGroup.NotFound, InvalidSnapshot.NotFound and so on.
    return str(answer.get("Code", "")).endswith(".NotFound")
