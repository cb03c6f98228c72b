"""What a build started is found by its tag and removed, and nothing else (moto is the cloud's API)."""

import boto3
import pytest
from moto import mock_aws

from gpukiln.images.machines import sweep, tag_specifications


class Cloud:
    ssh_port = 22

    def client(self, service):
        return boto3.client(service, region_name="us-west-2")


@pytest.fixture
def cloud(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
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
    image = ec2.describe_images()["Images"][0]["ImageId"]
    instance = ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=tag_specifications(tags, "instance")
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
