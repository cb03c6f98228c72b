"""Keys of an instance's role; roles and secrets are kept; one client token is one launch."""

import json
from types import SimpleNamespace

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import IAMBackend
from moto.secretsmanager.models import SecretsManagerBackend

from gpukiln.clouds.embedded import account_store, regions
from tests.support.release_cloud import Cloud, make_image, server, tell

TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})
POLICY = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "ec2:CreateTags", "Resource": "*"}],
    }
)


@pytest.fixture
def ec2():
    tell("reset")
    return Cloud().client("ec2")


def launch(ec2, **more):
    asked = {"ImageId": make_image("roles"), "InstanceType": "g4dn.xlarge", "MinCount": 1, "MaxCount": 1}
    return lambda **other: ec2.run_instances(**{**asked, **more, **other})["Instances"][0]["InstanceId"]


def test_one_client_token_is_one_instance_and_other_parameters_are_refused(ec2):
    run = launch(ec2, ClientToken="one")
    assert run() == run()
    assert run(ClientToken="two") != run()
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        run(InstanceType="g5.xlarge")


def test_keys_that_nobody_gave_are_refused():
    client = boto3.client(
        "ec2",
        region_name="us-west-2",
        endpoint_url=server()[0],
        aws_access_key_id="ASIAIOSFODNN7EXAMPLE",
        aws_secret_access_key="x",  # noqa: S106 - nobody's
        aws_session_token="x",  # noqa: S106 - nobody's
        config=Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(ClientError, match="access key is not this cloud's"):
        client.describe_instances()


def test_the_keys_of_a_role_count_until_its_instance_ends():
    from gpukiln.clouds.embedded import role_credentials  # noqa: PLC0415 - beside what it takes

    role = SimpleNamespace(name="mine", arn=f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:role/mine")
    profile = SimpleNamespace(arn="arn", id="AIPA", roles=[role])
    backend = SimpleNamespace(
        account_id=DEFAULT_ACCOUNT_ID,
        partition="aws",
        region_name="us-west-2",
        iam_instance_profile_associations={"i-1": SimpleNamespace(iam_instance_profile=profile)},
    )
    instance = SimpleNamespace(id="i-1", state="running", ec2_backend=backend)
    tree = role_credentials.metadata_of(instance)["iam"]
    keys = json.loads(tree["security-credentials"]["mine"])
    assert json.loads(tree["info"])["InstanceProfileArn"] == "arn"
    assert keys["Code"] == "Success"
    assert role_credentials.metadata_of(instance)["iam"]["security-credentials"]["mine"] == json.dumps(
        keys, indent=2
    )
    assert role_credentials.holder(keys["AccessKeyId"], keys["Token"])[0] is instance
    assert role_credentials.holder(keys["AccessKeyId"], "another") is None
    instance.state = "terminated"
    assert role_credentials.holder(keys["AccessKeyId"], keys["Token"]) is None
    assert role_credentials.metadata_of(SimpleNamespace(id="i-2", ec2_backend=backend)) == {}


def test_roles_profiles_and_secrets_come_back():
    iam, secrets = (
        IAMBackend("aws", DEFAULT_ACCOUNT_ID),
        SecretsManagerBackend("us-west-2", DEFAULT_ACCOUNT_ID),
    )
    iam.create_role("mine", TRUST, "/", None, "what for", [{"Key": "a", "Value": "b"}], "3600")
    iam.put_role_policy("mine", "inline", POLICY)
    iam.create_instance_profile("mine", "/", ["mine"], None)
    secrets.create_secret("token", "s", None, None, [], None, None, [], False)
    document = json.loads(
        json.dumps({"iam": account_store.dump_iam(iam), "secrets": account_store.dump_secrets(secrets)})
    )
    again = IAMBackend("aws", DEFAULT_ACCOUNT_ID), SecretsManagerBackend("us-west-2", DEFAULT_ACCOUNT_ID)
    account_store.load_iam(again[0], json.loads(json.dumps(document)))
    account_store.load_secrets(again[1], document)
    assert account_store.dump_iam(again[0]) == document["iam"]
    assert account_store.dump_secrets(again[1]) == document["secrets"]
    assert again[0].get_instance_profile("mine").roles == [again[0].get_role("mine")]
    assert again[1].get_secret_value("token", "", "")["SecretString"] == "s"


def test_what_the_api_was_told_is_in_the_files(ec2):
    iam, secrets = Cloud().client("iam"), Cloud().client("secretsmanager")
    iam.create_role(RoleName="filed", AssumeRolePolicyDocument=POLICY, Tags=[{"Key": "a", "Value": "b"}])
    iam.create_instance_profile(InstanceProfileName="filed")
    iam.add_role_to_instance_profile(InstanceProfileName="filed", RoleName="filed")
    secrets.create_secret(Name="filed", SecretString="s")
    launch(ec2, IamInstanceProfile={"Name": "filed"})()
    tell("keep")
    kept = regions.read_region(server()[1], "us-east-1")["iam"]
    assert kept["instance_profiles"]["filed"]["roles"] == ["filed"]
    assert "filed" in regions.read_region(server()[1], "us-west-2")["secrets"]
