"""A workspace's machine may tag itself, be reached by session manager, and read what was named."""

import json
from dataclasses import replace

import pytest

from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.instances.tags import tag_list
from gpukiln.workspaces import iam as rights
from gpukiln.workspaces.contract import Capabilities, Workspace, workspace_tags
from tests.support.release_cloud import Cloud, fault, tell

WANTED = Workspace("vision", "ann", "us-west-2")
REFERENCE = "arn:aws:secretsmanager:us-west-2:111122223333:secret:hf-AbCdEf"
NAME = "gpukiln-workspace-us-west-2-vision"
BOUNDARY = "arn:aws:iam::123456789012:policy/gpukiln/gpukiln-workspace-boundary"


@pytest.fixture
def cloud(layout):
    assert layout
    yield Cloud()
    tell("faults", [])
    rights.remove_profile(Cloud(), WANTED)


def with_(**capabilities):
    return replace(WANTED, capabilities=Capabilities(**capabilities))


def statements(wanted):
    return {one["Sid"]: one for one in rights.policy(wanted)["Statement"]}


def test_the_least_that_a_machine_needs():
    least = statements(WANTED)
    assert set(least) == {"TagItself", "SessionManager"}
    conditions = least["TagItself"]["Condition"]
    assert conditions["StringEquals"] == {"aws:ResourceTag/gpukiln:workspace": "vision"}
    assert "gpukiln:workspace" not in conditions["ForAllValues:StringEquals"]["aws:TagKeys"]


def test_what_is_named_may_be_read_and_nothing_beside_it():
    found = statements(
        with_(secrets={"HF_TOKEN": REFERENCE, "KEY": "/team/key"}, artifact_cache="s3://bucket/vision")
    )
    assert found["ReadSecrets"]["Resource"] == [REFERENCE]
    assert found["ReadParameters"]["Resource"] == ["arn:aws:ssm:us-west-2:*:parameter/team/key"]
    assert found["UseCache"]["Resource"] == "arn:aws:s3:::bucket/vision/*"
    assert set(statements(with_(artifact_cache="fs-0123456789abcdef0"))) == set(statements(WANTED))


@pytest.mark.parametrize(
    "capabilities",
    [{"secrets": {"KEY": "hunter2 "}}, {"secrets": {"KEY": "*"}}, {"artifact_cache": "s3://bucket/*"}],
)
def test_what_is_no_reference_is_refused(capabilities):
    with pytest.raises(UsageError):
        rights.policy(with_(**capabilities))


def test_a_profile_is_made_once_and_goes_whole(cloud):
    iam = cloud.client("iam")
    assert rights.instance_profile(cloud, with_(identity_mode="none")) == ""
    assert rights.instance_profile(cloud, replace(WANTED, instance_profile_name="theirs")) == "theirs"
    for _ in range(2):
        assert rights.instance_profile(cloud, WANTED) == NAME
    profile = iam.get_instance_profile(InstanceProfileName=NAME)["InstanceProfile"]
    [role] = profile["Roles"]
    assert role["RoleName"] == NAME
    assert profile["Path"] == role["Path"] == "/gpukiln/workspace/"
    assert boundary_of(iam) == BOUNDARY
    assert rights.remove_profile(cloud, WANTED)
    assert not rights.remove_profile(cloud, WANTED)
    assert NAME not in [one["RoleName"] for one in iam.list_roles()["Roles"]]


def boundary_of(iam):
    return iam.get_role(RoleName=NAME)["Role"]["PermissionsBoundary"]["PermissionsBoundaryArn"]


@pytest.mark.parametrize(
    "has",
    [
        {},
        {"Path": "/gpukiln/workspace/"},
        {"Path": "/gpukiln/workspace/", "PermissionsBoundary": "arn:aws:iam::123456789012:policy/other"},
        {"PermissionsBoundary": BOUNDARY},
    ],
    ids=["earlier version", "unbound", "bound otherwise", "elsewhere"],
)
def test_a_role_of_ours_without_the_boundary_is_replaced(cloud, has):
    """The policy of the caller can't change it, nor pass it to a machine."""
    iam = cloud.client("iam")
    tags = tag_list(workspace_tags(WANTED, rights.PART))
    iam.create_role(
        RoleName=NAME, AssumeRolePolicyDocument=json.dumps(rights.trust(WANTED)), Tags=tags, **has
    )
    iam.put_role_policy(
        RoleName=NAME, PolicyName=rights.POLICY, PolicyDocument=json.dumps(rights.policy(WANTED))
    )
    iam.create_instance_profile(InstanceProfileName=NAME)
    iam.add_role_to_instance_profile(InstanceProfileName=NAME, RoleName=NAME)
    assert rights.instance_profile(cloud, WANTED) == NAME
    profile = iam.get_instance_profile(InstanceProfileName=NAME)["InstanceProfile"]
    assert profile["Path"] == profile["Roles"][0]["Path"] == "/gpukiln/workspace/"
    assert boundary_of(iam) == BOUNDARY
    assert iam.list_role_policies(RoleName=NAME)["PolicyNames"] == [rights.POLICY]


def test_an_account_without_the_boundary_is_said(cloud):
    """IAM answers so for a boundary that is not there (CreateRole, NoSuchEntity)."""
    tell("faults", [fault("CreateRole", "missing")])
    with pytest.raises(UnavailableError, match="gpukiln-workspace-boundary") as caught:
        rights.instance_profile(cloud, WANTED)
    assert "cloud.policy --for workspace-boundary --account 123456789012" in caught.value.hint


def test_a_role_of_somebody_elses_is_left_alone(cloud):
    iam = cloud.client("iam")
    iam.create_role(RoleName=NAME, AssumeRolePolicyDocument="{}")
    for refused in (rights.instance_profile, rights.remove_profile):
        with pytest.raises(RefusedError, match="is not managed by gpukiln"):
            refused(cloud, WANTED)
    assert iam.get_role(RoleName=NAME)
    iam.delete_role(RoleName=NAME)


@pytest.mark.parametrize(
    "action",
    [
        "CreateRole",
        "PutRolePolicy",
        "CreateInstanceProfile",
        "GetInstanceProfile",
        "AddRoleToInstanceProfile",
    ],
)
def test_the_same_call_completes_what_failed(cloud, action):
    tell("faults", [fault(action, "denied")])
    with pytest.raises(UnavailableError):
        rights.instance_profile(cloud, WANTED)
    tell("faults", [])
    assert rights.instance_profile(cloud, WANTED) == NAME
    tell("faults", [fault("DeleteInstanceProfile", "denied")])
    with pytest.raises(UnavailableError):
        rights.remove_profile(cloud, WANTED)
    tell("faults", [])
    assert rights.remove_profile(cloud, WANTED)
