"""A region's images, snapshots, tags and parameters come back from its file as they were."""

import json
import threading
from types import SimpleNamespace

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ssm.models import SimpleSystemManagerBackend

from gpukiln.clouds.embedded import images, regions, store
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.server import Application


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


def test_a_disk_that_is_removed_while_another_change_is_written_is_gone(tmp_path, monkeypatch):
    layout = Layout(tmp_path)
    layout.create()
    ec2_backends.reset()
    ec2 = ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"]
    store.add_snapshot(ec2, "snap-1", size_gib=1, encrypted=True, from_ami=None, tags={})
    layout.snapshot("snap-1").write_bytes(b"a disk")
    application = Application(layout, None, None, None, lambda: None)
    application.save()
    assert regions.description_files(layout, "snap-1")

    read, removing, written = (threading.Event() for _ in range(3))
    dump, description_files = store.dump_region, regions.description_files

    def read_slowly(*of):
        document = dump(*of)
        if of[0] is ec2:
            read.set()
            removing.wait(0.5)
        return document

    def removed_slowly(*of):
        removing.set()
        written.wait(5)
        return description_files(*of)

    def save():
        application.save()
        written.set()

    monkeypatch.setattr(store, "dump_region", read_slowly)
    monkeypatch.setattr(regions, "description_files", removed_slowly)
    saving = threading.Thread(target=save)
    saving.start()
    assert read.wait(30)
    members = images._snapshot_members(SimpleNamespace(layout=layout))
    members[EC2Backend, "delete_snapshot"](ec2, "snap-1")
    saving.join()
    assert not list(layout.snapshots.iterdir())
