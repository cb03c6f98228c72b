"""Base images: the data, and finding the newest one on a cloud."""

from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from gpukiln.catalog.bases import base, default_base, load_bases
from gpukiln.catalog.images import load_image
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.images.bases import ResolvedBase, resolve_base


class ParameterNotFoundError(ClientError):
    pass


class FakeSsm:
    class exceptions:  # noqa: N801 - boto3's name
        ParameterNotFound = ParameterNotFoundError

    def __init__(self, parameters: dict[str, str]) -> None:
        self.parameters = parameters

    def get_parameter(self, Name: str) -> Any:  # noqa: N803
        if Name not in self.parameters:
            raise ParameterNotFoundError({"Error": {"Code": "ParameterNotFound"}}, "GetParameter")
        return {"Parameter": {"Value": self.parameters[Name]}}

    def get_parameters(self, Names: list[str]) -> Any:  # noqa: N803
        assert len(Names) <= 10
        return {"Parameters": [{"Name": name} for name in Names if name in self.parameters]}

    def get_parameters_by_path(self, Path: str, Recursive: bool) -> Any:  # noqa: N803
        assert not Recursive
        return {"Parameters": [{"Name": name} for name in self.parameters if name.rpartition("/")[0] == Path]}


class FakeEc2:
    def __init__(self, images: list[dict[str, Any]], error: Exception | None = None) -> None:
        self.images, self.error, self.asked = images, error, {}

    def describe_images(self, **asked: Any) -> Any:
        self.asked = asked
        if self.error:
            raise self.error
        wanted = {row["Name"]: row["Values"] for row in asked["Filters"]}
        if "image-id" in wanted:
            return {"Images": [image for image in self.images if image["ImageId"] in wanted["image-id"]]}
        return {"Images": [image for image in self.images if image["OwnerId"] in asked["Owners"]]}


class FakeCloud:
    name = "aws"
    default_base = "eks-ubuntu-22.04"
    strict_sources = True

    def __init__(self, ssm: FakeSsm, ec2: FakeEc2, region: str = "us-west-2") -> None:
        self.ssm, self.ec2, self.region = ssm, ec2, region

    def client(self, service: str) -> Any:
        return {"ssm": self.ssm, "ec2": self.ec2}[service]


def resolve(name: str, cloud: FakeCloud, kubernetes: str = "1.34") -> ResolvedBase:
    return resolve_base(name, base(name), cloud, kubernetes=kubernetes, architecture="x86_64")


def ubuntu(kubernetes: str) -> str:
    return f"/aws/service/canonical/ubuntu/eks/22.04/{kubernetes}/stable/current/amd64/hvm/ebs-gp2/ami-id"


def image(image_id: str, **more: Any) -> dict[str, Any]:
    return {"ImageId": image_id, "Name": f"image {image_id}", "OwnerId": "099720109477", **more}


def test_the_shipped_bases_and_defaults() -> None:
    assert default_base("aws") == "eks-ubuntu-24.04"
    assert default_base("embedded") == "debian-12"
    assert base("debian-12").ssh_user == "admin"
    assert base("debian-12").parameter(kubernetes="1.34", architecture="x86_64") == (
        "/aws/service/debian/release/12/latest/amd64"
    )
    for found in load_bases().values():
        assert "{" not in found.parameter(kubernetes="1.34", architecture="arm64")
        assert "{" not in found.name_pattern(kubernetes="1.34", architecture="arm64")
    with pytest.raises(UsageError, match="default on 'azure'"):
        default_base("azure")


def test_a_mistyped_base_or_image_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="valid: debian-12, dlami") as caught:
        base("debain-12")
    assert caught.value.hint.startswith("did you mean debian-12? `invoke ami.bases`")
    with pytest.raises(UsageError, match="unknown image 'eks-gpuu'"):
        load_image("eks-gpuu")


def test_eks_images_have_another_owner_in_some_regions() -> None:
    eks = base("eks-al2023")
    assert eks.owners_in("us-west-2") == ("602401143452",)
    assert eks.owners_in("eu-south-1") == ("590381155156",)


def test_the_parameter_wins() -> None:
    cloud = FakeCloud(
        FakeSsm({ubuntu("1.34"): "ami-1"}),
        FakeEc2([image("ami-1", RootDeviceName="/dev/xvda"), image("ami-2", CreationDate="9999")]),
    )
    found = resolve("eks-ubuntu-22.04", cloud)
    assert (found.id, found.root_device) == ("ami-1", "/dev/xvda")
    assert found.resolved_by == f"SSM parameter {ubuntu('1.34')}"
    assert (found.ssh_user, found.os_family, found.release) == ("ubuntu", "debian", "22.04")


def test_a_parameter_without_its_image_is_an_error() -> None:
    cloud = FakeCloud(FakeSsm({ubuntu("1.34"): "ami-1"}), FakeEc2([]))
    with pytest.raises(UnavailableError, match="names ami-1, an image that us-west-2 does not have"):
        resolve("eks-ubuntu-22.04", cloud)


def test_the_fallback_takes_the_newest_of_the_owner() -> None:
    images = [
        image("ami-old", CreationDate="2026-01-01T00:00:00.000Z"),
        image("ami-new", CreationDate="2026-10-01T00:00:00.000Z"),
        image("ami-foreign", CreationDate="2026-11-01T00:00:00.000Z") | {"OwnerId": "666"},
    ]
    cloud = FakeCloud(FakeSsm({}), FakeEc2(images))
    found = resolve("eks-ubuntu-22.04", cloud)
    assert (found.id, found.root_device) == ("ami-new", "/dev/sda1")
    assert "ubuntu-eks/k8s_1.34/images" in str(cloud.ec2.asked["Filters"])


def test_nothing_published_names_the_nearest_kubernetes_version() -> None:
    cloud = FakeCloud(FakeSsm({ubuntu("1.32"): "ami-1", ubuntu("1.33"): "ami-2"}), FakeEc2([]))
    with pytest.raises(UnavailableError, match=r"us-west-2 has no base eks-ubuntu-22\.04") as caught:
        resolve("eks-ubuntu-22.04", cloud)
    assert caught.value.details == ("1.32", "1.33")
    assert "--set kubernetes.version=1.33" in caught.value.hint


def test_nothing_published_names_the_parameters_beside_it() -> None:
    arm = "/aws/service/debian/release/12/latest/arm64"
    with pytest.raises(UnavailableError) as caught:
        resolve("debian-12", FakeCloud(FakeSsm({arm: "ami-1"}), FakeEc2([])))
    assert arm in caught.value.hint
    with pytest.raises(UnavailableError) as caught:
        resolve("debian-12", FakeCloud(FakeSsm({}), FakeEc2([])))
    assert "another base" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoCredentialsError(), "no AWS credentials"),
        (
            ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeImages"),
            "DescribeImages answered UnauthorizedOperation",
        ),
    ],
)
def test_errors_of_aws_are_told_in_words(error: Exception, message: str) -> None:
    cloud = FakeCloud(FakeSsm({}), FakeEc2([], error))
    with pytest.raises(UnavailableError, match=message):
        resolve("eks-ubuntu-22.04", cloud)
