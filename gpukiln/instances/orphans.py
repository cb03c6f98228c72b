"""What builds left behind, of this machine or another one: found by its tags, and removed."""

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

# a machine with GPUs or of bare metal takes minutes to end; nothing is paid for it then
ENDS_S = 900
POLL_S = 2
# For what carries no deadline: older builds', and snapshots, whose image may still be in the making
GRACE = timedelta(hours=24)


@dataclass(frozen=True)
class Orphan:
    """One thing that nobody needs any more.

    Args:
        kind: instance, volume, key pair, security group, snapshot, image or private key.
        id: Its id; a key pair's name; a private key's path.
        build: The build that made it, or an empty string.
        owner: Who started that.
        since: When it should have been gone, ISO 8601 in UTC.
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
    """No build of this machine has ended."""
    return False


def find_orphans(
    cloud: Cloud, *, now: datetime | None = None, ended: Callable[[str], bool] = no_build_ended
) -> list[Orphan]:
    """What nobody needs any more in one region, in the order in which it can be removed.

    Args:
        cloud: The cloud and region.
        now: The moment to judge deadlines by; the present when None.
        ended: Whether a build, by its id, is known to have ended: then nothing waits for a deadline.

    Returns:
        The orphans; what a build still needs is not among them.

    Raises:
        UnavailableError: The cloud could not be asked.
    """
    moment = now or datetime.now(UTC)
    with explain_aws_errors("look for what builds left"):
        ec2 = cloud.client("ec2")
        resources = [*_tagged_resources(ec2), *_snapshots(ec2)]
    orphans = [_as_orphan(*resource, moment, ended) for resource in resources]
    return [orphan for orphan in orphans if orphan]


def remove_orphans(cloud: Cloud, orphans: list[Orphan], say: Callable[[str], None]) -> list[Orphan]:
    """Remove orphans; what is gone already is no error, and one that can't be removed stops no other.

    Args:
        cloud: Where they are.
        orphans: What `find_orphans` found.
        say: Told what was removed.

    Returns:
        What was removed.

    Raises:
        PartialError: Something could not be removed; the details say what and why.
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
            hint="run it again: what was in use, such as a group of a machine that just ended, goes then",
            details=tuple(failed),
        )
    return removed


def sweep(cloud: Cloud, build_id: str) -> list[str]:
    """Remove everything of a build but its image; what is gone already is no error.

    Args:
        build_id: The build; nobody may be working on it but the caller.

    Returns:
        What was removed.

    Raises:
        UnavailableError: Something could not be removed, after everything else was; the details say what.
    """
    with explain_aws_errors(f"look for what build {build_id} started"):
        resources = list(_tagged_resources(cloud.client("ec2"), [build_id], volumes=False))
    left = [Orphan(kind, id, build_id, "", "", "its build has ended") for kind, id, *_ in resources]
    try:
        return [orphan.id for orphan in remove_orphans(cloud, left, lambda _: None)]
    except PartialError as error:
        raise UnavailableError(
            f"something of build {build_id} is left: {error.details[0]}", details=error.details
        ) from error


def builds_with_orphans(cloud: Cloud) -> set[str]:
    """The builds of which a machine, a key pair or a security group exists.

    Args:
        cloud: Where to look.

    Returns:
        Build ids; those of running builds are among them.
    """
    with explain_aws_errors("look for what earlier builds left"):
        return {tags[BUILD_TAG] for _, _, tags, _ in _tagged_resources(cloud.client("ec2"), volumes=False)}


def unrecorded_images(cloud: Cloud, build_id: str) -> list[dict[str, Any]]:
    """The AMIs of a build whose record knows none: it was killed while or after its AMI was made.

    Returns:
        As DescribeImages gives them; stages are not among them.
    """
    with explain_aws_errors(f"look for the image of build {build_id}"):
        return calls.images(cloud.client("ec2"), {f"tag:{BUILD_ID_TAG}": [build_id]}, Owners=["self"])


def remove_unrecorded(cloud: Cloud, build_id: str) -> list[str]:
    """Remove the AMIs of a build that no record knows, with their snapshots.

    Returns:
        Their ids.

    Raises:
        UnavailableError: The cloud refused.
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
    """Everything that carries a build's tag, machines first: they use the rest."""
    tag_filter = {f"tag:{BUILD_TAG}": builds}
    for instance in calls.instances(ec2, tag_filter):
        if instance["State"]["Name"] != "terminated":
            yield "instance", instance["InstanceId"], tags_of(instance), None
    # one that hangs on a machine ends with it
    available = calls.filters({**tag_filter, "status": ["available"]})
    for volume in calls.pages(ec2, "describe_volumes", "Volumes", Filters=available) if volumes else ():
        yield "volume", volume["VolumeId"], tags_of(volume), None
    tagged = calls.filters(tag_filter)
    for key_pair in ec2.describe_key_pairs(Filters=tagged)["KeyPairs"]:
        yield "key pair", key_pair["KeyName"], tags_of(key_pair), None
    for group in calls.pages(ec2, "describe_security_groups", "SecurityGroups", Filters=tagged):
        yield "security group", group["GroupId"], tags_of(group), None


def _snapshots(ec2: Any) -> Iterator[TaggedResource]:
    """Snapshots of our images that no image has: their builds failed. EC2 refuses to delete one in use."""
    images = calls.images(ec2, {}, Owners=["self"])
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
    """A orphan, or None while a build may need it."""
    build = tags.get(BUILD_TAG, "")
    if build and ended(build):
        since, reason = now, "its build has ended, on this machine"
    elif created:
        since, reason = created + GRACE, "no image has it"
    elif (deadline := _parse_time(tags.get(DEADLINE_TAG, ""))) is not None:
        since, reason = deadline, f"its deadline was {deadline_text(deadline)}"
    elif (started := build_started(build)) is not None:
        since, reason = started + GRACE, f"its build began {deadline_text(started)}, and it has no deadline"
    else:
        return None  # nobody can say how old it is
    if now < since:
        return None
    return Orphan(kind, id, build, tags.get(OWNER_TAG, ""), deadline_text(since), reason)


def _parse_time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _remove(cloud: Cloud, kind: str, id: str) -> None:
    ec2 = cloud.client("ec2")
    match kind:
        case "instance":
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
    return str(answer.get("Code", "")).endswith(".NotFound")
