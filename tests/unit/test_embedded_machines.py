"""Which machines of the embedded EC2 are containers, whose root can become root on the host."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID

from gpukiln.clouds.embedded import machines
from gpukiln.clouds.embedded.machines import MACHINE_TAG, is_vm
from gpukiln.instances.tags import IMPORT_TAG, tag_list

REGION = "us-west-2"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield boto3.client("ec2", region_name=REGION)


@pytest.mark.parametrize(
    ("imported", "asked", "virtual"),
    [
        (False, "", False),
        (False, "vm", True),
        (False, "container", False),
        (True, "", True),
        (True, "vm", True),
        (True, "container", False),
    ],
)
def test_a_strangers_disk_is_a_container_only_where_that_is_asked_for(
    ec2: Any, imported: bool, asked: str, virtual: bool
) -> None:
    assert machines.IMPORT_TAG == IMPORT_TAG  # of a package above that one
    image_id = ec2.register_image(Name="disk", RootDeviceName="/dev/xvda")["ImageId"]
    if imported:
        ec2.create_tags(Resources=[image_id], Tags=tag_list({IMPORT_TAG: "0" * 64}))
    tags = {MACHINE_TAG: asked} if asked else {"Name": "plain"}
    [started] = ec2.run_instances(
        ImageId=image_id,
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tag_list(tags)}],
    )["Instances"]
    backend: Any = get_backend("ec2")[DEFAULT_ACCOUNT_ID][REGION]
    assert is_vm(backend.get_instance(started["InstanceId"])) is virtual
