"""What builds left behind, of this machine or another one: found by its tags once its deadline has passed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import PartialError, UnavailableError
from gpukiln.images.builds import BUILD_TAG
from gpukiln.images.deadline import DEADLINE_TAG, deadline_text
from gpukiln.images.machines import GONE, OWNER_TAG
from gpukiln.records import build_started

SNAPSHOT_TAG = "gpukiln:digest"  # Packer gives it to the snapshot of every image
# For what carries no deadline: older builds', and snapshots, whose image may still be in the making
GRACE = timedelta(hours=24)


@dataclass(frozen=True)
class Leftover:
    """One thing that nobody needs any more.

    Args:
        kind: instance, volume, key pair, security group or snapshot.
        id: Its id; a key pair's name.
        build: The build that made it, or an empty string.
        owner: Who started that.
        since: When it should have been gone, ISO 8601 in UTC.
        reason: Why it is a leftover.
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


def find_leftovers(cloud: Cloud, *, now: datetime | None = None) -> list[Leftover]:
    """What is past its deadline in one region, in the order in which it can be removed.

    Args:
        cloud: The cloud and region.
        now: The moment to judge by; the present when None.

    Returns:
        The leftovers; what a build still needs is not among them.

    Raises:
        UnavailableError: The cloud could not be asked.
    """
    moment = now or datetime.now(UTC)
    with explain_aws_errors("look for what builds left"):
        ec2 = cloud.client("ec2")
        found = [*_of_builds(ec2), *_snapshots(ec2)]
    return [leftover for kind, id, tags, made in found if (leftover := _judge(kind, id, tags, made, moment))]


def remove_leftovers(cloud: Cloud, leftovers: list[Leftover], say: Callable[[str], None]) -> list[Leftover]:
    """Remove leftovers; what is gone already is no error, and one that can't be removed stops no other.

    Args:
        cloud: Where they are.
        leftovers: What `find_leftovers` found.
        say: Told what was removed.

    Returns:
        What was removed.

    Raises:
        PartialError: Something could not be removed; the details say what and why.
    """
    ec2 = cloud.client("ec2")
    removed: list[Leftover] = []
    failed: list[str] = []
    for leftover in leftovers:
        try:
            with explain_aws_errors(f"remove {leftover.kind} {leftover.id}"):
                _remove(ec2, leftover)
        except UnavailableError as error:
            if not _is_gone(error):
                failed.append(error.message)
                continue
        removed.append(leftover)
        say(f"removed {leftover.kind} {leftover.id}")
    if failed:
        raise PartialError(
            f"{len(removed)} of {len(leftovers)} leftovers were removed",
            hint="run it again: what was in use, such as a group of a machine that just ended, goes then",
            details=tuple(failed),
        )
    return removed


Found = tuple[str, str, dict[str, str], datetime | None]


def _of_builds(ec2: Any) -> Iterator[Found]:
    """Everything that carries a build's tag, machines first: they use the rest."""
    tagged = [{"Name": "tag-key", "Values": [BUILD_TAG]}]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=tagged):
        for reservation in page["Reservations"]:
            for one in reservation["Instances"]:
                if one["State"]["Name"] not in GONE:
                    yield "instance", one["InstanceId"], _tags(one), None
    # one that hangs on a machine ends with it
    available = [*tagged, {"Name": "status", "Values": ["available"]}]
    for page in ec2.get_paginator("describe_volumes").paginate(Filters=available):
        for one in page["Volumes"]:
            yield "volume", one["VolumeId"], _tags(one), None
    for one in ec2.describe_key_pairs(Filters=tagged)["KeyPairs"]:
        yield "key pair", one["KeyName"], _tags(one), None
    for page in ec2.get_paginator("describe_security_groups").paginate(Filters=tagged):
        for one in page["SecurityGroups"]:
            yield "security group", one["GroupId"], _tags(one), None


def _snapshots(ec2: Any) -> Iterator[Found]:
    """Snapshots of our images that no image has: their builds failed. EC2 refuses to delete one in use."""
    images = [
        image
        for page in ec2.get_paginator("describe_images").paginate(Owners=["self"])
        for image in page["Images"]
    ]
    used = {
        device.get("Ebs", {}).get("SnapshotId") for image in images for device in image["BlockDeviceMappings"]
    }
    tagged = [{"Name": "tag-key", "Values": [SNAPSHOT_TAG]}]
    for page in ec2.get_paginator("describe_snapshots").paginate(OwnerIds=["self"], Filters=tagged):
        for one in page["Snapshots"]:
            if one["SnapshotId"] not in used:
                yield "snapshot", one["SnapshotId"], _tags(one), one["StartTime"]


def _judge(kind: str, id: str, tags: dict[str, str], made: datetime | None, now: datetime) -> Leftover | None:
    """A leftover, or None while a build may need it."""
    build = tags.get(BUILD_TAG, "")
    if made:
        since, reason = made + GRACE, "no image has it"
    elif (deadline := _moment(tags.get(DEADLINE_TAG, ""))) is not None:
        since, reason = deadline, f"its deadline was {deadline_text(deadline)}"
    elif (started := build_started(build)) is not None:
        since, reason = started + GRACE, f"its build began {deadline_text(started)}, and it has no deadline"
    else:
        return None  # nobody can say how old it is
    if now < since:
        return None
    return Leftover(kind, id, build, tags.get(OWNER_TAG, ""), deadline_text(since), reason)


def _tags(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _remove(ec2: Any, leftover: Leftover) -> None:
    match leftover.kind:
        case "instance":
            ec2.terminate_instances(InstanceIds=[leftover.id])
            ec2.get_waiter("instance_terminated").wait(
                InstanceIds=[leftover.id], WaiterConfig={"Delay": 2, "MaxAttempts": 150}
            )
        case "volume":
            ec2.delete_volume(VolumeId=leftover.id)
        case "key pair":
            ec2.delete_key_pair(KeyName=leftover.id)
        case "security group":
            ec2.delete_security_group(GroupId=leftover.id)
        case "snapshot":
            ec2.delete_snapshot(SnapshotId=leftover.id)


def _is_gone(error: UnavailableError) -> bool:
    answer = getattr(error.__cause__, "response", {}).get("Error", {})
    return str(answer.get("Code", "")).endswith(".NotFound")
