"""A workspace's machine may tag itself, be reached by session manager, and read what was named."""

from dataclasses import replace

import pytest

from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.workspaces import rights
from gpukiln.workspaces.contract import Capabilities, Workspace
from tests.support.release_cloud import Cloud, fault, tell

WANTED = Workspace("vision", "ann", "us-west-2")
REFERENCE = "arn:aws:secretsmanager:us-west-2:111122223333:secret:hf-AbCdEf"
NAME = "gpukiln-workspace-us-west-2-vision"


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
    [role] = iam.get_instance_profile(InstanceProfileName=NAME)["InstanceProfile"]["Roles"]
    assert role["RoleName"] == NAME
    assert rights.remove_profile(cloud, WANTED)
    assert not rights.remove_profile(cloud, WANTED)
    assert NAME not in [one["RoleName"] for one in iam.list_roles()["Roles"]]


def test_a_role_of_somebody_elses_is_left_alone(cloud):
    iam = cloud.client("iam")
    iam.create_role(RoleName=NAME, AssumeRolePolicyDocument="{}")
    for refused in (rights.instance_profile, rights.remove_profile):
        with pytest.raises(RefusedError, match="is none of ours"):
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
