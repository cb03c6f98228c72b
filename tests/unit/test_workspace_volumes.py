"""The home of a workspace outlives its machines, is never shared, and is never half moved."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import boto3
import pytest
from botocore.stub import Stubber

from gpukiln.errors import BusyError, RefusedError, UnavailableError, UsageError
from gpukiln.workspaces import volumes
from gpukiln.workspaces.contract import ComputeProfile, Workspace, workspace_tags
from tests.support.release_cloud import Cloud, fault, tell

ZONE, OTHER = "us-west-2a", "us-west-2b"
WANTED = Workspace("vision", "ann", "us-west-2", compute_profile=ComputeProfile(storage="20Gi"))


MACHINES = itertools.count()


def at_once(_: float) -> None:
    """Nobody waits here."""


@pytest.fixture
def cloud(layout):
    assert layout
    yield Cloud()
    tell("faults", [])
    ec2 = Cloud().client("ec2")
    for one in ec2.describe_volumes()["Volumes"]:
        ec2.delete_volume(VolumeId=one["VolumeId"])


def home(cloud, zone=ZONE):
    """For a machine that had none before."""
    return volumes.ensure_home(cloud, WANTED, zone, f"i-{next(MACHINES)}", sleep=at_once)


def everything(cloud):
    ec2 = cloud.client("ec2")
    snapshots = ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    return ec2.describe_volumes()["Volumes"], [one["SnapshotId"] for one in snapshots]


def test_a_home_is_made_once_and_found_again(cloud):
    made = home(cloud)
    assert (made.made, made.size_gib, made.zone) == (True, 20, ZONE)
    [volume] = cloud.client("ec2").describe_volumes()["Volumes"]
    assert (volume["VolumeType"], volume["Encrypted"]) == ("gp3", True)
    assert home(cloud) == replace(made, made=False)
    assert volumes.homes(cloud) == (replace(made, made=False),)


def test_a_home_is_made_again_after_it_was_removed_and_never_twice_for_one_machine(cloud):
    volumes.remove(cloud, home(cloud))
    made = home(cloud)
    assert made.made
    ec2 = cloud.client("ec2")
    ec2.delete_tags(Resources=[made.volume_id])  # as long as EC2 does not show them
    again = volumes.ensure_home(cloud, WANTED, ZONE, f"i-{next(MACHINES) - 1}", sleep=at_once)
    assert again.volume_id == made.volume_id


def test_a_home_pins_its_zone_and_is_nobody_elses(cloud):
    home(cloud)
    with pytest.raises(RefusedError, match=f"is in {ZONE}, and the machine is in {OTHER}") as refused:
        home(cloud, OTHER)
    assert refused.value.hint.startswith("`invoke workspace.move vision --zone us-west-2b`")
    with pytest.raises(RefusedError, match="is ann's"):
        volumes.find_home(cloud, replace(WANTED, owner="bob"))
    assert volumes.find_home(cloud, replace(WANTED, workspace_name="other")) is None


def test_two_homes_of_one_name_are_refused(cloud):
    first = home(cloud)
    ec2 = cloud.client("ec2")
    tags = ec2.describe_volumes()["Volumes"][0]["Tags"]
    second = ec2.create_volume(AvailabilityZone=OTHER, Size=1)["VolumeId"]
    ec2.create_tags(Resources=[second], Tags=tags)
    with pytest.raises(RefusedError, match="has 2 homes") as refused:
        volumes.find_home(cloud, WANTED)
    assert first.volume_id in refused.value.message
    assert second in refused.value.message


def test_a_home_that_another_machine_has_is_refused():
    """Attached volumes are what EC2's answer says: no machine is behind the API here."""
    client = boto3.Session("x", "x", region_name="us-west-2").client("ec2")
    tags = [{"Key": key, "Value": value} for key, value in workspace_tags(WANTED, "home").items()]
    volume = {
        "VolumeId": "vol-1",
        "State": "in-use",
        "CreateTime": datetime(2026, 11, 20, 10, tzinfo=UTC),
        "AvailabilityZone": ZONE,
        "Size": 20,
        "Tags": tags,
        "Attachments": [{"InstanceId": "i-1", "State": "attached"}],
    }
    with Stubber(client) as stub:
        for _ in range(2):
            stub.add_response("describe_volumes", {"Volumes": [volume]})
        cloud = SimpleNamespace(region="us-west-2", client=lambda _: client)
        with pytest.raises(BusyError, match="is attached to i-1"):
            volumes.find_home(cloud, WANTED)
        [attached] = volumes.homes(cloud)
    for refused in (lambda: volumes.remove(cloud, attached), lambda: move(cloud, attached)):
        with pytest.raises(BusyError, match="i-1"):
            refused()


def test_a_home_grows_and_never_shrinks(cloud):
    made = home(cloud)
    assert not volumes.grow(cloud, made, 20)
    assert volumes.grow(cloud, made, 40)
    assert volumes.homes(cloud)[0].size_gib == 40
    with pytest.raises(UsageError, match="never shrinks"):
        volumes.grow(cloud, made, 10)


def move(cloud, one):
    return volumes.move(cloud, one, OTHER, say=lambda _: None, sleep=at_once)


def test_a_home_moves_to_another_zone_and_nothing_is_left(cloud):
    made = home(cloud)
    moved = move(cloud, made)
    assert volumes.homes(cloud, "vision") == (replace(moved, made=False),)
    assert moved.zone == OTHER
    left, snapshots = everything(cloud)
    assert ([one["VolumeId"] for one in left], snapshots) == ([moved.volume_id], everything(cloud)[1])
    assert move(cloud, moved) == moved  # it is there
    volumes.remove(cloud, moved)
    assert volumes.homes(cloud) == ()


@pytest.mark.parametrize(
    "action",
    ["CreateSnapshot", "DescribeSnapshots", "CreateVolume", "DescribeVolumes", "DeleteTags", "CreateTags"],
)
def test_a_move_that_fails_leaves_the_home_where_it_was(cloud, action):
    made = home(cloud)
    before = everything(cloud)[1]
    tell("faults", [fault(action, "denied", times=1)])
    with pytest.raises(UnavailableError):
        move(cloud, made)
    tell("faults", [])
    assert volumes.homes(cloud, "vision") == (replace(made, made=False),)
    left, snapshots = everything(cloud)
    assert ([one["VolumeId"] for one in left], snapshots) == ([made.volume_id], before)
    assert move(cloud, made).zone == OTHER  # and the same command completes
