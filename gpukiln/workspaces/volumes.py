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
# Enough for the weights of a model of 8B parameters in 16 bit (16 GB) and a Python environment.
DEFAULT_GIB = 50
POLL_S = 2.0
WAIT_S = 300.0
# The first snapshot of a volume copies all of its blocks; a large home takes hours.
SNAPSHOT_WAIT_S = 6 * 3600.0
# deleting, deleted and error: no home any more.
LIVE_STATES = ("creating", "available", "in-use")


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
        ec2, home_filters = cloud.client("ec2"), filters(PART, name)
        rows = list(calls.pages(ec2, "describe_volumes", "Volumes", Filters=home_filters))
    return tuple(_home(cloud, volume) for volume in rows if volume["State"] in LIVE_STATES)


def ensure_home(
    cloud: Cloud,
    workspace: Workspace,
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
    asked = volume_request(workspace)
    size = asked["Size"]
    if current_home := find_home(cloud, workspace):
        # EBS volumes are zonal; only a snapshot moves the data.
        if current_home.zone != zone:
            raise RefusedError(
                f"the home of {workspace.workspace_name} is in {current_home.zone}, "
                f"and the machine is in {zone}",
                hint=f"`invoke workspace.move {workspace.workspace_name} --zone {zone}` copies it there",
            )
        return current_home
    token = hashlib.sha256(f"{workspace.workspace_name} {machine_id} {zone} {size}".encode()).hexdigest()[:32]
    with explain_aws_errors("make the home volume"):
        volume = cloud.client("ec2").create_volume(**asked, AvailabilityZone=zone, ClientToken=token)
    made_at = _wait_for_volume(cloud, volume["VolumeId"], sleep)
    name, owner = workspace.workspace_name, workspace.owner
    return Home(volume["VolumeId"], name, owner, cloud.region, zone, size, made=True, created_at=made_at)


def volume_request(workspace: Workspace) -> dict[str, Any]:
    """Arguments of CreateVolume for a home, but zone and token."""
    return {
        "Size": workspace.compute_profile.storage_gib or DEFAULT_GIB,
        "VolumeType": "gp3",
        # With the account's default key; the contract has no option for plain volumes.
        "Encrypted": True,
        "TagSpecifications": tag_specifications(workspace_tags(workspace, PART), "volume"),
    }


def find_home(cloud: Cloud, workspace: Workspace) -> Home | None:
    """The home of a workspace in this region, wherever it is; None where it has none.

    Raises:
        RefusedError: It is another owner's, or there are two.
        BusyError: Another machine has it.
    """
    found_homes = homes(cloud, workspace.workspace_name)
    if not found_homes:
        return None
    # Two homes are left by a move that was killed between its tags; only the user knows which one is current.
    if len(found_homes) > 1:
        ids = ", ".join(f"{home.volume_id} in {home.zone}" for home in found_homes)
        raise RefusedError(
            f"{workspace.workspace_name} has {len(found_homes)} homes: {ids}",
            hint=f"keep one: take the tag {WORKSPACE_TAG} off the others, or remove them",
        )
    [home] = found_homes
    if home.owner != workspace.owner:
        raise RefusedError(
            f"the home of {workspace.workspace_name}, {home.volume_id}, is {home.owner}'s",
            hint="another name, or ask its owner",
        )
    if home.instance_id:
        raise BusyError(
            f"the home of {workspace.workspace_name}, {home.volume_id}, is attached to {home.instance_id}",
            hint=f"`invoke workspace.show {workspace.workspace_name}` shows it; detach the home first",
        )
    return home


def grow(cloud: Cloud, home: Home, size_gib: int) -> bool:
    """Make a home larger; its file system grows when the machine starts next. False: it is so large.

    Raises:
        UsageError: It is larger than that; a volume never shrinks.
    """
    if size_gib == home.size_gib:
        return False
    if size_gib < home.size_gib:
        raise UsageError(
            f"the home {home.volume_id} has {home.size_gib} GiB, wanted {size_gib}: a volume never shrinks",
            hint="make another workspace, and copy what is needed",
        )
    with explain_aws_errors("grow the home volume"):
        # EC2 limits how often a volume can be modified; its own message then names the limit.
        cloud.client("ec2").modify_volume(VolumeId=home.volume_id, Size=size_gib)
    return True


def move(
    cloud: Cloud,
    home: Home,
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
    if home.instance_id:
        raise BusyError(
            f"{home.volume_id} is attached to {home.instance_id}, whose zone it can't leave",
            hint=f"`invoke workspace.down {home.name} --keep-home` ends the machine, and keeps the home",
        )
    zone = _zone_name(cloud, zone)
    # Nothing to copy: the same command may be typed again.
    if home.zone == zone:
        return home
    ec2 = cloud.client("ec2")
    marks = {MANAGED_TAG: MANAGED, "Name": f"{home.name} on its way to {zone}"}
    with explain_aws_errors("move the home volume"):
        said = ec2.describe_volumes(VolumeIds=[home.volume_id])["Volumes"][0]
        snapshot = ec2.create_snapshot(
            VolumeId=home.volume_id, TagSpecifications=tag_specifications(marks, "snapshot")
        )["SnapshotId"]
    # Its id, once there is one: the clean-up below must remove it.
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
        made_at = _wait_for_volume(cloud, new, sleep)
        with explain_aws_errors("move the home volume"):
            # The old home loses its tag first, so that no moment has two homes.
            ec2.delete_tags(Resources=[home.volume_id], Tags=[{"Key": WORKSPACE_TAG}])
            tags = [{"Key": key, "Value": value} for key, value in tags_of(said).items()]
            ec2.create_tags(Resources=[new], Tags=tags)
    except BaseException:
        if new and not homes(cloud, home.name):  # its tag is what makes it the home
            ec2.create_tags(Resources=[home.volume_id], Tags=[{"Key": WORKSPACE_TAG, "Value": home.name}])
        if new:
            ec2.delete_volume(VolumeId=new)
        ec2.delete_snapshot(SnapshotId=snapshot)
        raise
    with explain_aws_errors("remove the old home volume"):
        ec2.delete_volume(VolumeId=home.volume_id)
        ec2.delete_snapshot(SnapshotId=snapshot)
    return Home(new, home.name, home.owner, home.region, zone, home.size_gib, made=True, created_at=made_at)


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


def remove(cloud: Cloud, home: Home) -> None:
    """Remove a home with all that is in it.

    Raises:
        BusyError: A machine has it.
        UnavailableError: The cloud refused.
    """
    if home.instance_id:
        raise BusyError(f"{home.volume_id} is attached to {home.instance_id}", hint="end the machine first")
    with explain_aws_errors("remove the home volume"):
        cloud.client("ec2").delete_volume(VolumeId=home.volume_id)


def _home(cloud: Cloud, volume: dict[str, Any]) -> Home:
    tags = tags_of(volume)
    # A detached attachment stays listed for a moment.
    attached = [
        attachment["InstanceId"]
        for attachment in volume.get("Attachments", ())
        if attachment.get("State") != "detached"
    ]
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


def _wait_for_volume(cloud: Cloud, volume_id: str, sleep: Callable[[float], None]) -> str:
    """Wait until a volume is available; when it was made, ISO 8601."""
    ec2, volume_filters = cloud.client("ec2"), calls.filters({"volume-id": [volume_id]})

    def available() -> str | None:
        with explain_aws_errors("wait for the home volume"):
            rows = ec2.describe_volumes(Filters=volume_filters)["Volumes"]
        state = rows[0]["State"] if rows else "creating"  # EC2 shows it after a moment
        if state not in LIVE_STATES:
            raise UnavailableError(f"the home volume {volume_id} is {state}, wanted available")
        return _created_at(rows[0]) if state == "available" else None

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
    last_progress = ""

    def completed() -> bool | None:
        nonlocal last_progress
        with explain_aws_errors("wait for the snapshot of the home"):
            [snapshot_row] = ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"]
        if snapshot_row["State"] == "completed":
            return True
        if snapshot_row["State"] == "error":
            raise CheckFailedError(
                f"the snapshot {snapshot} of the home failed", hint="run the command again"
            )
        if snapshot_row.get("Progress", "") != last_progress:
            last_progress = snapshot_row.get("Progress", "")
            say(f"{snapshot}: {last_progress}")
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
