"""What a machine may do with the keys of its role: as its policies say, and with its own signature."""

import json
from contextlib import contextmanager

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gpukiln.clouds.embedded import role_policies
from gpukiln.clouds.iam import BOUNDARY_NAME, BOUNDARY_PATH, Scope, boundary_arn
from gpukiln.clouds.tags import MANAGED, MANAGED_TAG, WORKSPACE_TAG
from gpukiln.workspaces import agent
from gpukiln.workspaces import iam as rights
from gpukiln.workspaces.contract import Capabilities, Workspace
from tests.support.release_cloud import HOME, Cloud, make_image, server, tell

PARAMETER, OTHER = "/vision/key", "/theirs/key"


@contextmanager
def bounded(*secrets):
    """The account has the boundary of workspaces, with these secrets and parameters."""
    iam, account = Cloud().client("iam"), "123456789012"
    document = rights.boundary(Scope(account, [HOME]), secrets)
    named = {"PolicyName": BOUNDARY_NAME, "Path": BOUNDARY_PATH, "PolicyDocument": json.dumps(document)}
    arn = iam.create_policy(**named)["Policy"]["Arn"]
    assert arn == boundary_arn("aws", account)
    try:
        yield
    finally:
        iam.delete_policy(PolicyArn=arn)


class Machine:
    """An instance with a role, as the agent on it sees it."""

    def __init__(self, wanted):
        cloud = Cloud()
        profile = rights.instance_profile(cloud, wanted)
        self.role = f"iam/security-credentials/{profile}"
        tags = [{"Key": WORKSPACE_TAG, "Value": wanted.workspace_name}]
        asked = {"ImageId": make_image("roles"), "InstanceType": "g4dn.xlarge", "MinCount": 1, "MaxCount": 1}
        [launched] = cloud.client("ec2").run_instances(
            **asked,
            IamInstanceProfile={"Name": profile},
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            MetadataOptions={"InstanceMetadataTags": "enabled"},
        )["Instances"]
        self.id = launched["InstanceId"]
        self.url = tell("inside", {"instance_id": self.id})

    def get(self, path):
        return tell("metadata", {"region": HOME, "instance_id": self.id, "path": path})

    def client(self, service, *, of=None, secret="", url=""):
        keys = json.loads((of or self).get((of or self).role))
        return boto3.client(
            service,
            region_name=HOME,
            endpoint_url=url or self.url,
            aws_access_key_id=keys["AccessKeyId"],
            aws_secret_access_key=secret or keys["SecretAccessKey"],
            aws_session_token=keys["Token"],
            config=Config(retries={"total_max_attempts": 1}),
        )


@pytest.fixture
def machine():
    tell("reset")
    secrets, ssm = Cloud().client("secretsmanager"), Cloud().client("ssm")
    arn = secrets.create_secret(Name="token", SecretString="s")["ARN"]
    secrets.create_secret(Name="theirs", SecretString="s")
    for name in (PARAMETER, OTHER):
        ssm.put_parameter(Name=name, Value="v", Type="SecureString")
    named = Capabilities(secrets={"TOKEN": arn, "KEY": PARAMETER})
    yield Machine(Workspace("vision", "ann", HOME, capabilities=named))
    tell("reset")


def test_the_boundary_counts_as_well(machine):
    """IAM user guide, "Permissions boundaries for IAM entities": what both allow."""
    ssm, ec2, inside = machine.client("ssm"), machine.client("ec2"), ["/vision/*"]
    with bounded():
        code, message = refused(ssm.get_parameter, Name=PARAMETER)
        assert code == "AccessDeniedException"
        assert message.endswith("because no permissions boundary allows the ssm:GetParameter action")
    with bounded(*inside):
        assert ssm.get_parameter(Name=PARAMETER)["Parameter"]["Value"]
        assert "no identity-based policy" in refused(ssm.get_parameter, Name=OTHER)[1]
        tag = {"Resources": [machine.id], "Tags": [{"Key": "gpukiln:stage", "Value": "ready"}]}
        message = refused(ec2.create_tags, **tag)[1]
        assert "no permissions boundary" in message, "the machine lacks the tag"
        managed = [{"Key": MANAGED_TAG, "Value": MANAGED}]
        Cloud().client("ec2").create_tags(Resources=[machine.id], Tags=managed)
        ec2.create_tags(**tag)


def refused(call, **arguments):
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"], caught.value.response["Error"]["Message"]


def tagged(machine, *keys):
    return {"Resources": [machine.id], "Tags": [{"Key": key, "Value": "x"} for key in keys]}


def test_the_agent_tags_its_machine_and_reads_what_was_named(machine, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", machine.url)
    aws = agent.Aws(machine, HOME)
    aws.tag({"gpukiln:stage": "home done & more"})
    assert machine.get("tags/instance/gpukiln:stage") == "home done & more"
    arn = Cloud().client("secretsmanager").describe_secret(SecretId="token")["ARN"]
    assert (aws.secret(arn), aws.secret(PARAMETER)) == ("s", "v")
    with pytest.raises(
        agent.StageError, match=r"AccessDeniedException.*ssm:GetParameter on resource: .*/theirs/key"
    ):
        aws.secret(OTHER)
    with pytest.raises(agent.StageError, match=r"UnauthorizedOperation.*ec2:CreateTags on resource"):
        aws.tag({"gpukiln:owner": "somebody"})


def test_what_the_policies_do_not_allow_is_refused(machine):
    ec2, secrets, ssm = (machine.client(service) for service in ("ec2", "secretsmanager", "ssm"))
    ec2.create_tags(**tagged(machine, "gpukiln:stage", "gpukiln:health"))
    assert refused(ec2.create_tags, **tagged(machine, "gpukiln:stage", "Name"))[0] == (
        "UnauthorizedOperation"
    )
    volume = "vol-0123456789abcdef0"
    asked = {**tagged(machine, "gpukiln:stage"), "Resources": [machine.id, volume]}
    assert f":volume/{volume} because no" in refused(ec2.create_tags, **asked)[1]
    code, told = refused(secrets.get_secret_value, SecretId="theirs")
    assert code == "AccessDeniedException"
    assert "secret:theirs-" in told
    assert secrets.get_secret_value(SecretId="token")["SecretString"] == "s"
    assert refused(secrets.get_secret_value, SecretId="nothing")[0] == "AccessDeniedException"
    assert refused(ec2.terminate_instances, InstanceIds=[machine.id])[0] == "UnauthorizedOperation"
    assert refused(ssm.put_parameter, Name=PARAMETER, Value="x", Overwrite=True)[0] == "AccessDeniedException"
    assert machine.client("sts").get_caller_identity()["Arn"].endswith(f"/{machine.id}")


def test_a_right_that_is_taken_is_gone_at_once(machine):
    iam = Cloud().client("iam")
    name = machine.role.rpartition("/")[2]
    deny = {"Effect": "Deny", "Action": "ssm:Get*", "Resource": "*"}
    document = {"Version": "2012-10-17", "Statement": [deny]}
    iam.put_role_policy(RoleName=name, PolicyName="not", PolicyDocument=json.dumps(document))
    assert "an explicit deny" in refused(machine.client("ssm").get_parameter, Name=PARAMETER)[1]
    ec2 = machine.client("ec2")
    iam.delete_role_policy(RoleName=name, PolicyName=rights.POLICY)
    assert refused(ec2.create_tags, **tagged(machine, "gpukiln:stage"))[0] == "UnauthorizedOperation"


def test_only_a_machines_own_keys_and_signature_count_inside_it(machine):
    other = Machine(Workspace("sound", "ann", HOME))
    theirs = machine.client("ec2", of=other)
    assert refused(theirs.create_tags, **tagged(other, "gpukiln:stage"))[0] == "AuthFailure"
    forged = machine.client("ec2", secret="x" * 40)
    assert "not able to validate" in refused(forged.describe_instances)[1]
    forged = machine.client("ssm", secret="x" * 40)
    assert refused(forged.get_parameter, Name=PARAMETER)[0] == "InvalidSignatureException"
    accounts = boto3.client(
        "ec2",
        region_name=HOME,
        endpoint_url=machine.url,
        aws_access_key_id=server()[1].access_key,
        aws_secret_access_key="x",  # noqa: S106 - the server looks at the key's id
        config=Config(retries={"total_max_attempts": 1}),
    )
    assert f"not that of {machine.id}'s role" in refused(accounts.describe_instances)[1]


def test_outside_the_keys_of_a_role_may_do_the_same(machine):
    outside = machine.client("ssm", url=server()[0])
    assert outside.get_parameter(Name=PARAMETER)["Parameter"]["Name"] == PARAMETER
    assert refused(outside.get_parameter, Name=OTHER)[0] == "AccessDeniedException"


ALLOW = {"Effect": "Allow", "Action": "ec2:CreateTags", "Resource": "*"}


@pytest.mark.parametrize(
    ("changes", "covers"),
    [
        ({}, True),
        ({"Action": ["ec2:Create?ags", "x:*"]}, True),
        ({"Action": "EC2:createtags"}, True),
        ({"Action": "ec2:DeleteTags"}, False),
        ({"Resource": "arn:aws:ec2:*:*:volume/*"}, False),
        ({"Resource": ["x", "arn:aws:ec2:*:*:instance/*"]}, True),
        ({"Condition": {"StringLike": {"aws:TagKeys": "gpu*"}}}, True),
        ({"Condition": {"ForAllValues:StringLike": {"aws:TagKeys": "gpu*"}}}, False),
        ({"Condition": {"ForAllValues:StringEquals": {"aws:Nothing": "x"}}}, True),
        ({"Condition": {"StringEquals": {"aws:Nothing": "x"}}}, False),
        ({"Condition": {"Bool": {"aws:TagKeys": "gpu"}}}, False),
        ({"Effect": "Deny", "Condition": {"Bool": {"aws:TagKeys": "gpu"}}}, True),
        ({"Effect": "Deny", "Condition": {"StringEquals": {"aws:TagKeys": "none"}}}, False),
    ],
)
def test_what_a_statement_is_about(changes, covers):
    context = {"aws:tagkeys": ["gpu", "Name"]}
    asked = ("ec2:CreateTags", "arn:aws:ec2:us-west-2:1:instance/i-1", context)
    assert role_policies._statement_covers({**ALLOW, **changes}, *asked) is covers


def test_what_a_statement_does_not_name_never_widens():
    for effect, covers in (("Allow", False), ("Deny", True)):
        assert (
            role_policies._statement_covers(
                {"Effect": effect, "NotAction": "s3:*"}, "ec2:RunInstances", None, {}
            )
            is covers
        )
    deny = {**ALLOW, "Effect": "Deny"}
    assert role_policies._statement_covers(deny, "ec2:CreateTags", None, {})
    assert not role_policies._statement_covers({**deny, "Resource": "arn"}, "ec2:CreateTags", None, {})
