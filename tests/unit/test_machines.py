"""What a build started is found by its tag and removed, and nothing else (moto is the cloud's API)."""

import os
import stat
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from gpukiln.clouds import aws
from gpukiln.clouds.aws import AwsCloud
from gpukiln.clouds.select import make_cloud
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.instances import access
from gpukiln.instances.access import access_line, key_files, ssh_access
from gpukiln.instances.deadline import LIMITS
from gpukiln.instances.orphans import builds_with_orphans, sweep
from gpukiln.instances.tags import tag_specifications


class Cloud:
    ssh_port = 22
    ssh_cidr = "203.0.113.7/32"
    subnet_id = None

    def client(self, service):
        return boto3.client(service, region_name="us-west-2")


@pytest.fixture
def cloud(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr(access, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # a thousand images, loaded for every test
    with mock_aws():
        yield Cloud()


@pytest.fixture
def said():
    return []


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
    assert builds_with_orphans(cloud) == {"one", "two"}
    sweep(cloud, "one")
    assert builds_with_orphans(cloud) == {"two"}


def test_access_is_for_one_network_and_one_key_and_ends(cloud, tmp_path, said):
    ec2 = cloud.client("ec2")
    with ssh_access(cloud, "one", purpose="bake", say=said.append) as entry:
        [group] = ec2.describe_security_groups(GroupIds=[entry.group_id])["SecurityGroups"]
        [rule] = group["IpPermissions"]
        assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
        assert [entry["CidrIp"] for entry in rule["IpRanges"]] == ["203.0.113.7/32"]
        assert "PRIVATE KEY" in entry.private_key.read_text()
        assert key_files("one") == [entry.private_key]
        assert not list((tmp_path / "builds").rglob("*"))  # which CI uploads
    assert not entry.private_key.exists()
    assert said == []
    assert ec2.describe_key_pairs()["KeyPairs"] == []
    assert builds_with_orphans(cloud) == set()


def test_a_key_is_nobody_elses_from_its_first_byte_on(cloud, tmp_path, said, monkeypatch):
    modes, open_file = [], os.open

    def watched(path, flags, mode=0o777, **options):
        number = open_file(path, flags, mode, **options)
        if Path(path).parent.name == "keys":
            modes.append((stat.S_IMODE(os.fstat(number).st_mode), bool(flags & os.O_EXCL)))
        return number

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)
    try:
        with ssh_access(cloud, "one", purpose="bake", say=said.append) as entry:
            assert entry.private_key.parent == tmp_path / "keys"
            assert stat.S_IMODE(entry.private_key.parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert modes == [(0o600, True)]


def test_a_failed_clean_up_does_not_hide_the_reason(cloud, monkeypatch, said):
    monkeypatch.setattr(access, "sweep", unreachable)
    with (
        pytest.raises(CheckFailedError, match="the task failed") as caught,
        ssh_access(cloud, "one", purpose="bake", say=said.append),
    ):
        raise CheckFailedError("the task failed")
    assert "the network is gone" in caught.value.__notes__[0]
    assert key_files("one") == []


def unreachable(*_):
    raise UnavailableError("the network is gone")


def test_a_clean_up_that_fails_after_success_is_told_and_fails_nothing(cloud, monkeypatch, said):
    monkeypatch.setattr(access, "sweep", unreachable)
    with ssh_access(cloud, "one", purpose="bake", say=said.append):
        pass
    [line] = said
    assert "the network is gone" in line
    assert "cloud.sweep" in line
    assert key_files("one") == []
    monkeypatch.undo()
    assert builds_with_orphans(cloud) == {"one"}  # as it says: the next sweep finds it


def test_a_failure_after_the_deadline_says_that_the_machine_shut_itself_down(cloud, monkeypatch, said):
    monkeypatch.setitem(LIMITS, "bake", timedelta(seconds=-1))
    with (
        pytest.raises(UnavailableError) as caught,
        ssh_access(cloud, "one", purpose="bake", say=said.append),
    ):
        raise UnavailableError("Packer ended with exit code 1")
    [note] = caught.value.__notes__
    assert "shut itself down at its deadline" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "azure"}, "unknown cloud 'azure'"),
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


@pytest.fixture
def checkip(monkeypatch):
    """What stands in for checkip.amazonaws.com: its answer can be set."""

    class Answers(BaseHTTPRequestHandler):
        text = b"198.51.100.23\n"

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.text)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(aws, "ADDRESS_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # its address would be the wrong one
    yield Answers
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("checkip")
def test_ssh_is_open_to_this_machines_own_address():
    cloud = AwsCloud("us-west-2")
    assert cloud.ssh_cidr == "198.51.100.23/32"
    assert access_line(cloud) == "SSH of its machines is open to 198.51.100.23/32"


@pytest.mark.usefixtures("checkip")
def test_everybody_is_let_in_only_when_asked_for_and_it_is_told():
    assert "to every address" in access_line(AwsCloud("us-west-2", ssh_cidr="0.0.0.0/0"))


@pytest.mark.parametrize("answer", [b"<html>a captive portal</html>", b"", b"2001:db8::1"])
def test_an_answer_that_is_no_address_is_asked_for(checkip, answer):
    checkip.text = answer
    with pytest.raises(UnavailableError) as caught:
        _ = AwsCloud("us-west-2").ssh_cidr
    assert "--ssh-cidr" in caught.value.hint


def test_without_network_the_address_is_asked_for_and_nothing_is_started(cloud, monkeypatch, said):
    monkeypatch.setattr(aws, "ADDRESS_URL", "http://127.0.0.1:9")
    there = AwsCloud("us-west-2")
    with (
        pytest.raises(UnavailableError, match="lookup of this computer's public address failed"),
        ssh_access(there, "one", purpose="bake", say=said.append),
    ):
        pass
    assert builds_with_orphans(cloud) == set()


@pytest.mark.usefixtures("checkip")
def test_a_subnet_without_public_addresses_needs_the_network_named(cloud):
    ec2 = cloud.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    assert AwsCloud("us-west-2", subnet_id=subnet).ssh_cidr == "198.51.100.23/32"
    ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": False})
    with pytest.raises(UsageError, match="no public address") as caught:
        _ = AwsCloud("us-west-2", subnet_id=subnet).ssh_cidr
    assert "--ssh-cidr" in caught.value.hint
