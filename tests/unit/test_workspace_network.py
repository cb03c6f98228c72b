"""A workspace's machine is reached by nobody who was not named, and reaches what was asked for."""

from dataclasses import replace

import pytest

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.workspaces import network
from gpukiln.workspaces.contract import Capabilities, Workspace
from tests.support.release_cloud import Cloud, fault, tell

WANTED = Workspace("vision", "ann", "us-west-2")


@pytest.fixture
def cloud(layout):
    assert layout
    yield Cloud()
    tell("faults", [])
    network.remove_groups(Cloud(), "vision")


@pytest.fixture
def vpc(cloud):
    [found] = cloud.client("ec2").describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    return found["VpcId"]


def rules(cloud, group):
    [found] = cloud.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"]
    return tuple(
        sorted(
            (one["IpProtocol"], one.get("FromPort"), *(row["CidrIp"] for row in one["IpRanges"]))
            for one in found[side]
            if one["IpRanges"]
        )
        for side in ("IpPermissions", "IpPermissionsEgress")
    )


@pytest.mark.parametrize(
    ("word", "ports"), [("none", {443, 2049}), ("https-only", {443, 2049}), ("open", {None})]
)
def test_a_cache_on_efs_is_reached_in_the_vpc_alone(word, ports):
    wanted = replace(
        WANTED, capabilities=Capabilities(network_egress=word, artifact_cache="fs-0123456789abcdef0")
    )
    rules = network.egress_rules(wanted)
    assert {rule.get("FromPort") for rule in rules} == ports
    nfs = [one["CidrIp"] for rule in rules if rule.get("FromPort") == 2049 for one in rule["IpRanges"]]
    assert nfs == ([] if word == "open" else list(network.PRIVATE_NETWORKS))


def egress(word):
    return replace(WANTED, capabilities=Capabilities(network_egress=word))


def test_nobody_gets_in_and_https_gets_out(cloud, vpc):
    group = network.security_group(cloud, WANTED, vpc)
    assert rules(cloud, group) == ([], [("tcp", 443, "0.0.0.0/0")])
    assert network.security_group(cloud, WANTED, vpc) == group  # again: nothing changes
    assert rules(cloud, group) == ([], [("tcp", 443, "0.0.0.0/0")])


def test_what_is_asked_for_later_takes_the_place_of_what_was(cloud, vpc):
    group = network.security_group(cloud, WANTED, vpc)
    own = replace(egress("open"), ssh_from="203.0.113.7/32")
    assert network.security_group(cloud, own, vpc) == group
    assert rules(cloud, group) == ([("tcp", 22, "203.0.113.7/32")], [("-1", None, "0.0.0.0/0")])
    assert network.security_group(cloud, egress("none"), vpc) == group
    ingress, out = rules(cloud, group)
    assert ingress == []
    assert {row[2] for row in out} <= {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}


@pytest.mark.parametrize(
    ("cidr", "told"), [("0.0.0.0/0", "is every address"), ("::/0", "is every address"), ("me", "'me'")]
)
def test_everybody_is_nobody_to_let_in(cidr, told):
    with pytest.raises(UsageError, match=told):
        network.ingress_rules(replace(WANTED, ssh_from=cidr))


@pytest.mark.parametrize(
    "action",
    [
        "DescribeSecurityGroups",
        "CreateSecurityGroup",
        "AuthorizeSecurityGroupEgress",
        "RevokeSecurityGroupEgress",
    ],
)
def test_the_same_call_completes_what_failed(cloud, vpc, action):
    tell("faults", [fault(action, "denied")])
    with pytest.raises(UnavailableError):
        network.security_group(cloud, WANTED, vpc)
    tell("faults", [])
    group = network.security_group(cloud, WANTED, vpc)
    assert rules(cloud, group) == ([], [("tcp", 443, "0.0.0.0/0")])
    assert network.remove_groups(cloud, "vision") == [group]
    assert network.remove_groups(cloud, "vision") == []
