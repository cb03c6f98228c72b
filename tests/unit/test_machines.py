"""What a build started is found by its tag and removed, and nothing else (moto is the cloud's API)."""

from datetime import timedelta

import boto3
import pytest
from moto import mock_aws

from gpukiln.clouds.select import make_cloud
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.images import machines
from gpukiln.images.deadline import LIMITS
from gpukiln.images.machines import builds_with_leftovers, ssh_access, sweep, tag_specifications


class Cloud:
    ssh_port = 22
    ssh_cidr = "203.0.113.7/32"
    subnet_id = None

    def client(self, service):
        return boto3.client(service, region_name="us-west-2")


@pytest.fixture
def cloud(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # a thousand images, loaded for every test
    with mock_aws():
        yield Cloud()


def start(cloud, build_id):
    ec2 = cloud.client("ec2")
    tags = {"gpukiln:build": build_id}
    ec2.create_key_pair(KeyName=f"key-{build_id}", TagSpecifications=tag_specifications(tags, "key-pair"))
    group = ec2.create_security_group(
        GroupName=f"group-{build_id}",
        Description="test",
        TagSpecifications=tag_specifications(tags, "security-group"),
    )["GroupId"]
    instance = ec2.run_instances(
        ImageId="ami-0123456789abcdef0",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tag_specifications(tags, "instance"),
    )["Instances"][0]["InstanceId"]
    return [instance, f"key-{build_id}", group]


def test_a_sweep_removes_what_carries_the_build_and_nothing_else(cloud):
    mine, others = start(cloud, "one"), start(cloud, "two")
    assert sorted(sweep(cloud, "one")) == sorted(mine)
    ec2 = cloud.client("ec2")
    assert [key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]] == ["key-two"]
    states = {
        instance["InstanceId"]: instance["State"]["Name"]
        for reservation in ec2.describe_instances()["Reservations"]
        for instance in reservation["Instances"]
    }
    assert states[mine[0]] == "terminated"
    assert states[others[0]] == "running"


def test_a_second_sweep_finds_nothing(cloud):
    start(cloud, "one")
    sweep(cloud, "one")
    assert sweep(cloud, "one") == []


def test_builds_with_something_left_are_found(cloud):
    start(cloud, "one")
    start(cloud, "two")
    assert builds_with_leftovers(cloud) == {"one", "two"}
    sweep(cloud, "one")
    assert builds_with_leftovers(cloud) == {"two"}


def test_access_is_for_one_network_and_one_key_and_ends(cloud, tmp_path):
    ec2 = cloud.client("ec2")
    with ssh_access(cloud, "one", purpose="bake", folder=tmp_path) as access:
        [group] = ec2.describe_security_groups(GroupIds=[access.group_id])["SecurityGroups"]
        [rule] = group["IpPermissions"]
        assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
        assert [entry["CidrIp"] for entry in rule["IpRanges"]] == ["203.0.113.7/32"]
        assert access.private_key.stat().st_mode & 0o077 == 0
        assert "PRIVATE KEY" in access.private_key.read_text()
    assert not access.private_key.exists()
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    assert builds_with_leftovers(cloud) == set()


def test_a_failed_clean_up_does_not_hide_the_reason(cloud, tmp_path, monkeypatch):
    def fails(*_):
        raise UnavailableError("the network is gone")

    monkeypatch.setattr(machines, "sweep", fails)
    with (
        pytest.raises(CheckFailedError, match="the task failed") as caught,
        ssh_access(cloud, "one", purpose="bake", folder=tmp_path),
    ):
        raise CheckFailedError("the task failed")
    assert "the network is gone" in caught.value.__notes__[0]
    assert not list(tmp_path.iterdir())


def test_a_failure_after_the_deadline_says_that_the_machine_shut_itself_down(cloud, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "bake", timedelta(seconds=-1))
    with (
        pytest.raises(UnavailableError) as caught,
        ssh_access(cloud, "one", purpose="bake", folder=tmp_path),
    ):
        raise UnavailableError("Packer ended with exit code 1")
    [note] = caught.value.__notes__
    assert "it shut itself down" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "azure"}, "no cloud 'azure'"),
        ({"name": "embedded", "profile": "prod"}, "--profile is for --cloud aws"),
        ({"name": "aws", "ssh_cidr": "203.0.113.7/8"}, "--ssh-cidr"),
        ({"name": "aws", "region": "us-wst-2"}, "us-west-2"),
        ({"name": "aws", "region": ""}, "--region is missing"),
    ],
)
def test_a_cloud_that_is_none(options, message):
    with pytest.raises(UsageError) as caught:
        make_cloud(**{"region": "us-west-2", **options})
    assert message in caught.value.message
