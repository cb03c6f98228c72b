"""A workspace is what its tags say; it is stopped, started, and removed whole."""

import itertools
from dataclasses import replace

import pytest

from gpukiln.clouds.tags import WORKSPACE_TAG
from gpukiln.errors import RefusedError, UnavailableError
from gpukiln.instances.tags import tag_specifications
from gpukiln.workspaces import iam, lifecycle, network, volumes
from gpukiln.workspaces.contract import ComputeProfile, Workspace, workspace_tags
from tests.support.release_cloud import Cloud, fault, running, tell

NAMES = itertools.count(1)
ZONE = "us-west-2a"


def at_once(_):
    """Nobody waits here."""


@pytest.fixture
def cloud(layout):
    assert layout
    yield Cloud()
    tell("faults", [])


@pytest.fixture
def wanted():
    profile = ComputeProfile(storage="5Gi")
    return Workspace(f"vision-{next(NAMES)}", "ann", "us-west-2", compute_profile=profile)


@pytest.fixture
def up(cloud, wanted, image_id):
    """A workspace with all that belongs to one."""

    def make(**tags):
        ec2 = cloud.client("ec2")
        [vpc] = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
        group = network.security_group(cloud, wanted, vpc["VpcId"])
        iam.instance_profile(cloud, wanted)
        volumes.ensure_home(cloud, wanted, ZONE, group, sleep=at_once)
        told = {**workspace_tags(wanted, "machine"), **tags}
        ec2.run_instances(
            ImageId=image_id,
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            SecurityGroupIds=[group],
            Placement={"AvailabilityZone": ZONE},
            TagSpecifications=tag_specifications(told, "instance", "volume"),
        )
        return found()

    def found():
        [one] = lifecycle.find_workspaces(cloud, wanted.workspace_name)
        return one

    make.again = found
    return make


def test_a_workspace_is_found_by_its_tags_alone(cloud, up):
    made = up(**{"gpukiln:stage": "done", "gpukiln:health": "healthy"})
    [machine] = made.machines
    assert (made.owner, made.state, machine.zone) == ("ann", "running", ZONE)
    assert (machine.stage, machine.health, machine.busy) == ("done", "healthy", "")
    assert [one.size_gib for one in made.homes] == [5]
    assert len(made.group_ids) == 1
    assert made in lifecycle.find_workspaces(cloud)
    assert lifecycle.find_workspaces(cloud, "nobody") == ()


def test_what_has_no_tag_of_ours_is_nobodys(cloud, image_id):
    ec2 = cloud.client("ec2")
    tags = [{"Key": WORKSPACE_TAG, "Value": "theirs"}]
    spec = [{"ResourceType": "instance", "Tags": tags}]
    ec2.run_instances(
        ImageId=image_id, InstanceType="g5.xlarge", MinCount=1, MaxCount=1, TagSpecifications=spec
    )
    assert lifecycle.find_workspaces(cloud, "theirs") == ()


def test_down_leaves_nothing_or_the_home_alone(cloud, wanted, up):
    made = up()
    lifecycle.remove_workspace(cloud, wanted, made, keep_home=True, sleep=at_once)
    kept = up.again()
    assert (kept.state, kept.machines, kept.group_ids) == ("home", (), ())
    assert kept.homes == made.homes
    assert running() == {}
    lifecycle.remove_workspace(cloud, wanted, kept, keep_home=False, sleep=at_once)
    assert lifecycle.find_workspaces(cloud, wanted.workspace_name) == ()
    assert not iam.remove_profile(cloud, wanted)


def test_a_start_forgets_what_the_boot_before_said(cloud, wanted, up):
    made = up(**{"gpukiln:stage": "done", "gpukiln:busy": "a session of ann"})
    assert lifecycle.stop(cloud, made, sleep=at_once)
    assert lifecycle.start(cloud, up.again(), sleep=at_once)
    [machine] = up.again().machines
    assert (machine.stage, machine.busy) == ("starts", "")
    lifecycle.remove_workspace(
        cloud, wanted, up.again(), keep_home=False, sleep=at_once
    )  # nobody works on it now
    assert lifecycle.find_workspaces(cloud, wanted.workspace_name) == ()


def test_who_works_there_is_not_put_away(cloud, wanted, up):
    made = up(**{"gpukiln:busy": "ann on pts/0"})
    with pytest.raises(RefusedError, match="ann on pts/0"):
        lifecycle.remove_workspace(cloud, wanted, made, keep_home=True, sleep=at_once)
    with pytest.raises(RefusedError, match="is ann's"):
        lifecycle.remove_workspace(cloud, replace(wanted, owner="bob"), made, keep_home=False, sleep=at_once)
    assert running()
    lifecycle.remove_workspace(cloud, wanted, made, keep_home=False, force=True, sleep=at_once)
    assert lifecycle.find_workspaces(cloud, wanted.workspace_name) == ()


@pytest.mark.parametrize(
    "action",
    [
        "TerminateInstances",
        "DescribeInstances",
        "GetRole",
        "DeleteRole",
        "DescribeVolumes",
        "DeleteVolume",
        "DeleteSecurityGroup",
    ],
)
def test_down_that_failed_is_completed_by_the_same_command(cloud, wanted, up, action):
    made = up()
    tell("faults", [fault(action, "denied")])
    with pytest.raises(UnavailableError):
        lifecycle.remove_workspace(cloud, wanted, made, keep_home=False, sleep=at_once)
    tell("faults", [])
    lifecycle.remove_workspace(cloud, wanted, up.again(), keep_home=False, sleep=at_once)
    assert lifecycle.find_workspaces(cloud, wanted.workspace_name) == ()
    assert running() == {}
    assert not iam.remove_profile(cloud, wanted)


def test_what_has_no_machine_says_what_starts_one(cloud, wanted, up):
    made = up()
    lifecycle.remove_workspace(cloud, wanted, made, keep_home=True, sleep=at_once)
    for asked in (lifecycle.stop, lifecycle.start):
        with pytest.raises(UnavailableError, match="has no machine now: home") as told:
            asked(cloud, up.again())
        assert (
            told.value.hint
            == f"`invoke workspace.up --name {wanted.workspace_name}` starts one with its home"
        )
    lifecycle.remove_workspace(cloud, wanted, up.again(), keep_home=False, sleep=at_once)
