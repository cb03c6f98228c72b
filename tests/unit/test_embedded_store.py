"""A region's images, snapshots, tags and parameters come back from its file as they were."""

import json

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import EC2Backend
from moto.ssm.models import SimpleSystemManagerBackend

from gpukiln.clouds.embedded import regions, store
from gpukiln.clouds.embedded.layout import Layout


def region():
    return (
        EC2Backend("us-west-2", DEFAULT_ACCOUNT_ID),
        SimpleSystemManagerBackend("us-west-2", DEFAULT_ACCOUNT_ID),
    )


def filled():
    ec2, ssm = region()
    ec2.amis.clear()
    ec2.snapshots.clear()
    snapshot = store.add_snapshot(
        ec2,
        "snap-1",
        size_gib=8,
        encrypted=True,
        from_ami="ami-1",
        tags={"a": "b"},
        shared_with=("111122223333",),
    )
    image = store.add_image(
        ec2,
        "ami-1",
        snapshot,
        {
            "name": "one",
            "root_device_name": "/dev/xvda",
            "root_device_type": "ebs",
            "tags": {"colour": "blue"},
        },
    )
    image.deprecation_time, image.client_request = "2026-12-01T00:00:00.000Z", {"Name": "one"}
    ec2.image_block_public_access = "unblocked"
    store.add_parameter(ssm, {"name": "/mine", "value": "v1", "last_modified": "2026-11-21T00:00:00"})
    store.add_parameter(ssm, {"name": "/mine", "value": "v2", "version": 2})
    store.add_parameter(ssm, {"name": "/aws/service/x", "value": "published anew at every start"})
    return store.dump_region(ec2, ssm)


def test_round_trip(tmp_path):
    document = filled()
    layout = Layout(tmp_path)
    layout.create()
    regions.write_region(layout, "us-west-2", document)
    read = regions.read_region(layout, "us-west-2")
    ec2, ssm = region()
    ec2.amis.clear()
    ec2.snapshots.clear()
    store.load_ec2(ec2, read)
    store.load_ssm(ssm, read)
    assert store.dump_region(ec2, ssm) == json.loads(json.dumps(document))
    assert ec2.amis["ami-1"].ebs_snapshot is ec2.snapshots["snap-1"]
    assert ec2.amis["ami-1"].deprecation_time == "2026-12-01T00:00:00.000Z"
    assert ec2.image_block_public_access == "unblocked"
    assert ssm.get_parameter("/mine").value == "v2"
    assert ssm.get_parameter("/mine:1").last_modified_date.isoformat() == "2026-11-21T00:00:00"
    assert [versions[0]["name"] for versions in document["parameters"].values()] == ["/mine"]
