"""The embedded EC2 refuses what EC2 refuses, with EC2's codes: each row is a call that once got through."""

import urllib.error
import urllib.request

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.release_cloud import HOME, Cloud, make_image, server, tell

NONE = "0123456789abcdef0"  # an id of nothing
WHOSE = {
    "i": "InstanceIds",
    "vol": "VolumeIds",
    "snap": "SnapshotIds",
    "subnet": "SubnetIds",
    "vpc": "VpcIds",
}


@pytest.fixture(scope="module")
def image_id():
    tell("reset")
    yield make_image("b1")
    tell("reset")


@pytest.fixture(scope="module")
def ec2(image_id):
    assert image_id
    return Cloud().client("ec2")


def code_of(call, **asked):
    with pytest.raises(ClientError) as refused:
        call(**asked)
    answer = refused.value.response
    assert 400 <= answer["ResponseMetadata"]["HTTPStatusCode"] < 500
    return answer["Error"]["Code"]


def only(name, *values):
    return {"Filters": [{"Name": name, "Values": [*values]}]}


def launch(ec2, image_id, **asked):
    return ec2.run_instances(**{"ImageId": image_id, "MinCount": 1, "MaxCount": 1, **asked})


@pytest.mark.parametrize(
    "call",
    [
        *("describe_images", "describe_snapshots", "describe_instances", "describe_volumes", "describe_tags"),
        *("describe_security_groups", "describe_subnets", "describe_vpcs", "describe_key_pairs"),
        *("describe_instance_types", "describe_instance_type_offerings", "describe_launch_templates"),
        *("describe_availability_zones", "describe_regions", "describe_network_interfaces"),
    ],
)
def test_an_unknown_filter(ec2, call):
    assert code_of(getattr(ec2, call), **only("colour", "blue")) == "InvalidParameterValue"


@pytest.mark.parametrize("call", ["images", "snapshots", "instances", "volumes", "security_groups", "vpcs"])
def test_a_token_that_nobody_gave(ec2, call):
    assert code_of(getattr(ec2, f"describe_{call}"), NextToken="garbage") == "InvalidParameterValue"


def test_a_resource_has_the_tags_that_describe_tags_lists(ec2, image_id):
    """Two ways to the same tags: by the resource's id, and by a filter over all tags."""
    [group] = ec2.describe_security_groups()["SecurityGroups"]
    ec2.create_tags(Resources=[image_id, group["GroupId"]], Tags=[{"Key": "colour", "Value": "blue"}])
    ec2.create_tags(Resources=[image_id], Tags=[{"Key": "colour", "Value": "red"}])
    [image] = ec2.describe_images(ImageIds=[image_id])["Images"]
    [group] = ec2.describe_security_groups(**only("tag:colour", "blue"))["SecurityGroups"]
    for name, resource, value in ((image_id, image, "red"), (group["GroupId"], group, "blue")):
        listed = ec2.describe_tags(**only("resource-id", name))["Tags"]
        assert {"Key": "colour", "Value": value} in resource["Tags"]
        assert resource["Tags"] == [{"Key": tag["Key"], "Value": tag["Value"]} for tag in listed]
    ec2.delete_tags(Resources=[group["GroupId"]], Tags=[{"Key": "colour"}])
    assert ec2.describe_security_groups(**only("tag:colour", "blue"))["SecurityGroups"] == []


def test_pages_go_on(ec2, image_id):
    for number in range(3):
        ec2.copy_image(SourceImageId=image_id, SourceRegion=HOME, Name=f"copy-{number}")
    pages = ec2.get_paginator("describe_images").paginate(
        Owners=["self"], Filters=[{"Name": "tag-key", "Values": ["x"]}], PaginationConfig={"PageSize": 1}
    )
    assert not [image for page in pages for image in page["Images"]]
    pages = ec2.get_paginator("describe_images").paginate(Owners=["self"], PaginationConfig={"PageSize": 1})
    assert len([image for page in pages for image in page["Images"]]) == 4
    assert ec2.describe_images(**only("tag:gpukiln:image", "eks-gpu"))["Images"]


@pytest.mark.parametrize(
    ("call", "asked", "code"),
    [
        ("describe_images", {"ImageIds": ["ami-xyz"]}, "InvalidAMIID.Malformed"),
        ("describe_images", {"ImageIds": [f"ami-{NONE}"]}, "InvalidAMIID.NotFound"),
        ("deregister_image", {"ImageId": "xyz"}, "InvalidAMIID.Malformed"),
        ("describe_instances", {"InstanceIds": ["i-xyz"]}, "InvalidInstanceID.Malformed"),
        ("terminate_instances", {"InstanceIds": [f"i-{NONE}"]}, "InvalidInstanceID.NotFound"),
        ("describe_snapshots", {"SnapshotIds": ["snap-1"]}, "InvalidSnapshotID.Malformed"),
        ("delete_snapshot", {"SnapshotId": f"snap-{NONE}"}, "InvalidSnapshot.NotFound"),
        ("describe_volumes", {"VolumeIds": ["vol-1"]}, "InvalidVolumeID.Malformed"),
        ("delete_volume", {"VolumeId": f"vol-{NONE}"}, "InvalidVolume.NotFound"),
        ("describe_security_groups", {"GroupIds": ["sg-1"]}, "InvalidGroupId.Malformed"),
        ("describe_security_groups", {"GroupIds": [f"sg-{NONE}"]}, "InvalidGroup.NotFound"),
        ("describe_subnets", {"SubnetIds": ["subnet-1"]}, "InvalidSubnetID.Malformed"),
        ("describe_vpcs", {"VpcIds": ["vpc-1"]}, "InvalidVpcID.Malformed"),
        (
            "describe_network_interfaces",
            {"NetworkInterfaceIds": ["1"]},
            "InvalidNetworkInterfaceId.Malformed",
        ),
    ],
)
def test_an_id_that_is_none_or_of_nothing(ec2, call, asked, code):
    assert code_of(getattr(ec2, call), **asked) == code


@pytest.mark.parametrize(
    ("resource", "code"),
    [
        (f"ami-{NONE}", "InvalidAMIID.NotFound"),
        (f"snap-{NONE}", "InvalidSnapshot.NotFound"),
        (f"i-{NONE}", "InvalidInstanceID.NotFound"),
        (f"vol-{NONE}", "InvalidVolume.NotFound"),
        (f"eni-{NONE}", "InvalidNetworkInterfaceID.NotFound"),
        (f"lt-{NONE}", "InvalidLaunchTemplateId.NotFound"),
        ("ami-xyz", "InvalidAMIID.Malformed"),
        ("xyz", "InvalidID"),
    ],
)
def test_tags_on_what_does_not_exist(ec2, resource, code):
    assert code_of(ec2.create_tags, Resources=[resource], Tags=[{"Key": "a", "Value": "b"}]) == code


@pytest.mark.parametrize("key", ["aws:mine", "AWS:mine", "x" * 129])
def test_tags_that_nobody_may_set(ec2, image_id, key):
    tag = {"Key": key, "Value": "b"}
    assert code_of(ec2.create_tags, Resources=[image_id], Tags=[tag]) == "InvalidParameterValue"
    given = [{"ResourceType": "instance", "Tags": [tag]}]
    assert code_of(launch, ec2=ec2, image_id=image_id, TagSpecifications=given) == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"ImageId": "ami-xyz"}, "InvalidAMIID.Malformed"),
        ({"ImageId": f"ami-{NONE}"}, "InvalidAMIID.NotFound"),
        ({"MinCount": 0, "MaxCount": 0}, "InvalidParameterValue"),
        ({"MinCount": 2}, "InvalidParameterCombination"),
        ({"InstanceType": "m7g.large"}, "InvalidParameterValue"),
        ({"InstanceType": "m5.xlrge"}, "InvalidParameterValue"),
        ({"ImageId": "resolve:ssm:/none"}, "InvalidParameterValue"),
    ],
)
def test_a_launch_that_can_not_be(ec2, image_id, asked, code):
    assert code_of(launch, ec2=ec2, image_id=image_id, **asked) == code
    assert not ec2.describe_instances()["Reservations"]


def test_a_launch_of_nothing(ec2):
    assert code_of(ec2.run_instances, MinCount=1, MaxCount=1) == "MissingParameter"


def test_the_architecture_is_told_as_ec2_tells_it(ec2, image_id):
    with pytest.raises(ClientError, match=r"'arm64' of the specified instance type does not match.*'x86_64'"):
        launch(ec2, image_id, InstanceType="g5g.xlarge")


def test_a_template_says_what_a_launch_does_not(ec2, image_id):
    """And is judged likewise."""
    for name, data in (
        ("whole", {"ImageId": image_id}),
        ("empty", {}),
        ("arm", {"InstanceType": "m7g.large"}),
    ):
        ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"EbsOptimized": True, **data})
    by = {"MinCount": 1, "MaxCount": 1}
    assert (
        code_of(ec2.run_instances, LaunchTemplate={"LaunchTemplateName": "empty"}, **by) == "MissingParameter"
    )
    arm = {"LaunchTemplate": {"LaunchTemplateName": "arm"}, "ImageId": image_id}
    assert code_of(ec2.run_instances, **arm, **by) == "InvalidParameterValue"
    [made] = ec2.run_instances(LaunchTemplate={"LaunchTemplateName": "whole"}, **by)["Instances"]
    assert made["ImageId"] == image_id
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])


def test_two_images_of_one_name(ec2, image_id):
    asked = {"SourceImageId": image_id, "SourceRegion": HOME}
    name = ec2.describe_images(ImageIds=[image_id])["Images"][0]["Name"]
    assert code_of(ec2.copy_image, **asked, Name=name) == "InvalidAMIName.Duplicate"
    assert code_of(ec2.copy_image, **asked, Name="a*b") == "InvalidAMIName.Malformed"
    first = ec2.copy_image(**asked, Name="mine", ClientToken="1")
    assert ec2.copy_image(**asked, Name="mine", ClientToken="1")["ImageId"] == first["ImageId"]
    assert code_of(ec2.copy_image, **asked, Name="mine", ClientToken="2") == "InvalidAMIName.Duplicate"
    assert Cloud("us-east-1").client("ec2").copy_image(**asked, Name=name)["ImageId"], (
        "another region's are apart"
    )


@pytest.mark.parametrize(
    ("service", "ask", "code"),
    [
        ("ec2", lambda client: client.describe_images(), "AuthFailure"),
        ("ssm", lambda client: client.get_parameter(Name="/x"), "InvalidSignatureException"),
        ("ecr", lambda client: client.describe_repositories(), "InvalidSignatureException"),
    ],
)
def test_a_region_that_aws_has_not(service, ask, code):
    url, layout = server()
    client = boto3.client(
        service,
        region_name="us-moon-1",
        endpoint_url=url,
        aws_access_key_id=layout.access_key,
        aws_secret_access_key="x",  # noqa: S106 - the server looks at the key's id
        config=Config(retries={"total_max_attempts": 1}),
    )
    assert code_of(ask, client=client) == code
    assert not (layout.regions / "us-moon-1.json").exists()


def raw(action, **asked):
    """A call that no SDK would send."""
    url, layout = server()
    scope = f"AWS4-HMAC-SHA256 Credential={layout.access_key}/20261122/{HOME}/ec2/aws4_request, x"
    body = "&".join(f"{name}={value}" for name, value in {"Action": action, **asked}.items())
    request = urllib.request.Request(url, body.encode(), {"Authorization": scope})  # noqa: S310 - our own server
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)  # noqa: S310 - our own server
    return refused.value.code, refused.value.read().decode()


@pytest.mark.parametrize(
    ("action", "asked", "code"),
    [
        ("MakeCoffee", {}, "InvalidAction"),
        ("RunInstances", {"MinCount": "1"}, "MissingParameter"),
        ("RunInstances", {"MinCount": "many", "MaxCount": "1"}, "InvalidParameterValue"),
        ("CreateImage", {"InstanceId": f"i-{NONE}"}, "MissingParameter"),
        ("DescribeSpotPriceHistory", {"NextToken": "x"}, "InvalidParameterValue"),
        ("CreateIpam", {}, "UnsupportedOperation"),
    ],
)
def test_what_no_sdk_sends(action, asked, code):
    status, body = raw(action, **asked)
    assert status == 400
    assert f"<Code>{code}</Code>" in body


def test_tags_that_instance_metadata_shows_are_names_of_paths(ec2, image_id):
    shown = {"InstanceType": "m5.large", "MetadataOptions": {"InstanceMetadataTags": "enabled"}}

    def tags(*keys):
        return [{"Key": key, "Value": "v"} for key in keys]

    def with_tags(*keys):
        return {**shown, "TagSpecifications": [{"ResourceType": "instance", "Tags": tags(*keys)}]}

    def shows(instance, path):
        return tell("metadata", {"region": HOME, "instance_id": instance["InstanceId"], "path": path})

    assert code_of(launch, ec2=ec2, image_id=image_id, **with_tags("a/b")) == "InvalidParameterValue"
    [one] = launch(ec2, image_id, **with_tags("gpukiln:home"))["Instances"]
    assert one["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    assert shows(one, "tags/instance/gpukiln:home") == shows(one, "tags/instance/gpukiln%3Ahome") == "v"
    assert shows(one, "tags/instance/new") is None
    ec2.create_tags(Resources=[one["InstanceId"]], Tags=tags("new"))
    assert shows(one, "tags/instance/new") == "v"
    for key in ("two words", "_index"):
        asked = {"Resources": [one["InstanceId"]], "Tags": tags(key)}
        assert code_of(ec2.create_tags, **asked) == "InvalidParameterValue"
    changed = ec2.modify_instance_metadata_options(InstanceId=one["InstanceId"], HttpTokens="required")
    assert changed["InstanceMetadataOptions"]["InstanceMetadataTags"] == "enabled"

    [other] = launch(ec2, image_id, InstanceType="m5.large")["Instances"]
    ec2.create_tags(Resources=[other["InstanceId"]], Tags=tags("a/b"))
    assert shows(other, "tags/instance/a") is None
    asked = {"InstanceId": other["InstanceId"], "InstanceMetadataTags": "enabled"}
    assert code_of(ec2.modify_instance_metadata_options, **asked) == "InvalidParameterValue"
