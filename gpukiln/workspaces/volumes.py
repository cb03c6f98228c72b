"""The home of a workspace: a volume that outlives its machines, found by its tags."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import MANAGED, MANAGED_TAG, OWNER_TAG, WORKSPACE_TAG
from gpukiln.errors import BusyError, CheckFailedError, RefusedError, UnavailableError, UsageError
from gpukiln.instances.tags import tag_specifications, tags_of
from gpukiln.typed import unknown
from gpukiln.workspaces.contract import Workspace, filters, workspace_tags

PART = "home"
DEFAULT_GIB = 50
POLL_S = 2.0
WAIT_S = 300.0
SNAPSHOT_WAIT_S = 6 * 3600.0
LIVING = ("creating", "available", "in-use")


@dataclass(frozen=True)
class Home:
    """A home volume.

    Args:
        name: Of the workspace.
        instance_id: Of the machine that has it attached; empty: none has.
        made: Whether it was made by this call.
        created_at: ISO 8601; empty: not known.
    """

    volume_id: str
    name: str
    owner: str
    region: str
    zone: str
    size_gib: int
    instance_id: str = ""
    made: bool = False
    created_at: str = ""


def homes(cloud: Cloud, name: str = "") -> tuple[Home, ...]:
    """The homes of a region; of one workspace where its name is given."""
    with explain_aws_errors("look for home volumes"):
        ec2, wanted = cloud.client("ec2"), filters(PART, name)
        found = list(calls.pages(ec2, "describe_volumes", "Volumes", Filters=wanted))
    return tuple(_home(cloud, volume) for volume in found if volume["State"] in LIVING)


def home(
    cloud: Cloud,
    wanted: Workspace,
    zone: str,
    machine_id: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Home:
    """The home of a workspace in a zone: the one that is there, else a new one.

    Args:
        machine_id: The machine that it is made for. A token of CreateVolume stays used when its volume was
            deleted (aws-ebs-csi-driver issues 1428 and 1916), so each machine has one of its own.

    Raises:
        RefusedError: It is another one's, there are two, or it is in another zone.
        BusyError: Another machine has it.
        UnavailableError: The cloud refused, or it does not become available.
    """
    asked = volume_request(wanted)
    size = asked["Size"]
    if found := existing(cloud, wanted):
        if found.zone != zone:
            raise RefusedError(
                f"the home of {wanted.workspace_name} is in {found.zone}, and the machine in {zone}",
                hint=f"`invoke workspace.move {wanted.workspace_name} --zone {zone}` copies it there",
            )
        return found
    token = hashlib.sha256(f"{wanted.workspace_name} {machine_id} {zone} {size}".encode()).hexdigest()[:32]
    with explain_aws_errors("make the home volume"):
        made = cloud.client("ec2").create_volume(**asked, AvailabilityZone=zone, ClientToken=token)
    made_at = _wait(cloud, made["VolumeId"], sleep)
    name, owner = wanted.workspace_name, wanted.owner
    return Home(made["VolumeId"], name, owner, cloud.region, zone, size, made=True, created_at=made_at)


def volume_request(wanted: Workspace) -> dict[str, Any]:
    """Arguments of CreateVolume for a home, but zone and token."""
    return {
        "Size": wanted.compute_profile.storage_gib or DEFAULT_GIB,
        "VolumeType": "gp3",
        "Encrypted": True,
        "TagSpecifications": tag_specifications(workspace_tags(wanted, PART), "volume"),
    }


def existing(cloud: Cloud, wanted: Workspace) -> Home | None:
    """The home of a workspace in this region, wherever it is; None where it has none.

    Raises:
        RefusedError: It is another owner's, or there are two.
        BusyError: Another machine has it.
    """
    found = homes(cloud, wanted.workspace_name)
    if not found:
        return None
    if len(found) > 1:
        ids = ", ".join(f"{one.volume_id} in {one.zone}" for one in found)
        raise RefusedError(
            f"{wanted.workspace_name} has {len(found)} homes: {ids}",
            hint=f"keep one: take the tag {WORKSPACE_TAG} off the others, or remove them",
        )
    [one] = found
    if one.owner != wanted.owner:
        raise RefusedError(
            f"the home of {wanted.workspace_name}, {one.volume_id}, is {one.owner}'s",
            hint="another name, or ask its owner",
        )
    if one.instance_id:
        raise BusyError(
            f"the home of {wanted.workspace_name}, {one.volume_id}, is attached to {one.instance_id}",
            hint=f"`invoke workspace.show {wanted.workspace_name}` says what that is; detach it there first",
        )
    return one


def grow(cloud: Cloud, one: Home, size_gib: int) -> bool:
    """Make a home larger; its file system grows when the machine starts next. False: it is so large.

    Raises:
        UsageError: It is larger than that; a volume never shrinks.
    """
    if size_gib == one.size_gib:
        return False
    if size_gib < one.size_gib:
        raise UsageError(
            f"the home {one.volume_id} has {one.size_gib} GiB, wanted {size_gib}: a volume never shrinks",
            hint="make another workspace, and copy what is needed",
        )
    with explain_aws_errors("grow the home volume"):
        cloud.client("ec2").modify_volume(VolumeId=one.volume_id, Size=size_gib)
    return True


def move(
    cloud: Cloud,
    one: Home,
    zone: str,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Home:
    """Copy a home into another zone by a snapshot; the old one goes when the new one is there.

    Interrupted, the old home is as it was: the new one gets its tags last.

    Raises:
        UsageError: The region has no such zone.
        BusyError: A machine has it, be it stopped.
        CheckFailedError: The snapshot failed.
        UnavailableError: The cloud refused.
    """
    if one.instance_id:
        raise BusyError(
            f"{one.volume_id} is attached to {one.instance_id}, whose zone it can't leave",
            hint=f"`invoke workspace.down {one.name} --keep-home` ends the machine, and keeps the home",
        )
    zone = _zone_name(cloud, zone)
    if one.zone == zone:
        return one
    ec2 = cloud.client("ec2")
    marks = {MANAGED_TAG: MANAGED, "Name": f"{one.name} on its way to {zone}"}
    with explain_aws_errors("move the home volume"):
        said = ec2.describe_volumes(VolumeIds=[one.volume_id])["Volumes"][0]
        snapshot = ec2.create_snapshot(
            VolumeId=one.volume_id, TagSpecifications=tag_specifications(marks, "snapshot")
        )["SnapshotId"]
    new = ""
    try:
        _wait_for_snapshot(ec2, snapshot, say, sleep)
        with explain_aws_errors("move the home volume"):
            new = ec2.create_volume(
                AvailabilityZone=zone,
                SnapshotId=snapshot,
                VolumeType="gp3",
                Encrypted=True,
                TagSpecifications=tag_specifications(marks, "volume"),
            )["VolumeId"]
        made_at = _wait(cloud, new, sleep)
        with explain_aws_errors("move the home volume"):
            ec2.delete_tags(Resources=[one.volume_id], Tags=[{"Key": WORKSPACE_TAG}])
            tags = [{"Key": key, "Value": value} for key, value in tags_of(said).items()]
            ec2.create_tags(Resources=[new], Tags=tags)
    except BaseException:
        if new and not homes(cloud, one.name):  # its tag is what makes it the home
            ec2.create_tags(Resources=[one.volume_id], Tags=[{"Key": WORKSPACE_TAG, "Value": one.name}])
        if new:
            ec2.delete_volume(VolumeId=new)
        ec2.delete_snapshot(SnapshotId=snapshot)
        raise
    with explain_aws_errors("remove the old home volume"):
        ec2.delete_volume(VolumeId=one.volume_id)
        ec2.delete_snapshot(SnapshotId=snapshot)
    return Home(new, one.name, one.owner, one.region, zone, one.size_gib, made=True, created_at=made_at)


def _zone_name(cloud: Cloud, zone: str) -> str:
    """The name that the account has for a zone, of its name or its id: other calls take names alone.

    Raises:
        UsageError: The region has no such zone; names those that it has.
    """
    with explain_aws_errors("look up the region's zones"):
        rows = cloud.client("ec2").describe_availability_zones()["AvailabilityZones"]
    for row in rows:
        if zone in (row["ZoneName"], row.get("ZoneId")):
            return str(row["ZoneName"])
    raise unknown("zone", zone, [row["ZoneName"] for row in rows])


def remove(cloud: Cloud, one: Home) -> None:
    """Remove a home with all that is in it.

    Raises:
        BusyError: A machine has it.
        UnavailableError: The cloud refused.
    """
    if one.instance_id:
        raise BusyError(f"{one.volume_id} is attached to {one.instance_id}", hint="end the machine first")
    with explain_aws_errors("remove the home volume"):
        cloud.client("ec2").delete_volume(VolumeId=one.volume_id)


def _home(cloud: Cloud, volume: dict[str, Any]) -> Home:
    tags = tags_of(volume)
    attached = [one["InstanceId"] for one in volume.get("Attachments", ()) if one.get("State") != "detached"]
    return Home(
        volume["VolumeId"],
        tags.get(WORKSPACE_TAG, ""),
        tags.get(OWNER_TAG, ""),
        cloud.region,
        volume["AvailabilityZone"],
        int(volume["Size"]),
        attached[0] if attached else "",
        created_at=_created_at(volume),
    )


def _created_at(volume: dict[str, Any]) -> str:
    created: datetime = volume["CreateTime"]
    return created.isoformat(timespec="seconds")


def _wait(cloud: Cloud, volume_id: str, sleep: Callable[[float], None]) -> str:
    """Wait until a volume is available; when it was made, ISO 8601."""
    ec2, wanted = cloud.client("ec2"), calls.filters({"volume-id": [volume_id]})

    def available() -> str | None:
        with explain_aws_errors("wait for the home volume"):
            found = ec2.describe_volumes(Filters=wanted)["Volumes"]
        state = found[0]["State"] if found else "creating"  # EC2 shows it after a moment
        if state not in LIVING:
            raise UnavailableError(f"the home volume {volume_id} is {state}, wanted available")
        return _created_at(found[0]) if state == "available" else None

    return calls.wait_until(
        available,
        lambda: UnavailableError(
            f"the home volume {volume_id} is not available after {WAIT_S:.0f} s", hint="run the command again"
        ),
        timeout_s=WAIT_S,
        pause_s=POLL_S,
        sleep=sleep,
    )


def _wait_for_snapshot(
    ec2: Any, snapshot: str, say: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    told = ""

    def completed() -> bool | None:
        nonlocal told
        with explain_aws_errors("wait for the snapshot of the home"):
            [found] = ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"]
        if found["State"] == "completed":
            return True
        if found["State"] == "error":
            raise CheckFailedError(
                f"the snapshot {snapshot} of the home failed", hint="run the command again"
            )
        if found.get("Progress", "") != told:
            told = found.get("Progress", "")
            say(f"{snapshot}: {told}")
        return None

    calls.wait_until(
        completed,
        lambda: UnavailableError(
            f"the snapshot {snapshot} is not complete after {SNAPSHOT_WAIT_S / 3600:.0f} hours"
        ),
        timeout_s=SNAPSHOT_WAIT_S,
        pause_s=POLL_S,
        sleep=sleep,
    )
