"""Volumes of the embedded EC2 answer as EC2's do, and each is a file; what machines see is in tests/e2e."""

import json
import os
import re
import subprocess

import pytest
from botocore.exceptions import ClientError

from gpukiln.clouds.embedded import volume_files
from gpukiln.clouds.embedded.block_devices import DEVICE_NAME, DEVICE_NAME_SCRIPT, device_number
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.disks.loop import LoopDevice
from gpukiln.errors import UnavailableError
from tests.support.release_cloud import Cloud, server, tell

ZONE, OTHER_ZONE = "us-west-2a", "us-west-2b"


@pytest.fixture
def ec2():
    tell("reset")
    yield Cloud().client("ec2")
    for file in layout().volumes.iterdir():
        file.unlink()


def layout():
    return server()[1]


def image(**more):
    fields = {"region": "us-west-2", "image_id": "ami-0123456789abcdef0", "name": "one", "tags": {}}
    return tell("image", {**fields, **more})["ImageId"]


def launch(ec2, image_id, *devices):
    answer = ec2.run_instances(
        ImageId=image_id, MinCount=1, MaxCount=1, InstanceType="m5.xlarge", BlockDeviceMappings=list(devices)
    )
    return answer["Instances"][0]["InstanceId"]


def devices_of(ec2, instance_id):
    [reservation] = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
    return {entry["DeviceName"]: entry["Ebs"] for entry in reservation["Instances"][0]["BlockDeviceMappings"]}


def volume_of(ec2, volume_id):
    return ec2.describe_volumes(VolumeIds=[volume_id])["Volumes"][0]


def refusal(call, **arguments):
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"]


def disk(device, **ebs):
    return {"DeviceName": device, "Ebs": ebs}


def test_a_new_volume_is_a_sparse_file_that_outlives_the_server(ec2):
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "colour", "Value": "blue"}]}]
    made = ec2.create_volume(Size=5, AvailabilityZone=ZONE, VolumeType="gp3", TagSpecifications=tags)
    volume_id = made["VolumeId"]
    file = layout().volume(volume_id)
    assert (file.stat().st_size, file.stat().st_blocks) == (5 << 30, 0)
    file.write_bytes(b"content")
    tell("keep")
    tell("restore")  # forgets what is in memory
    volume = volume_of(ec2, volume_id)
    assert (volume["State"], volume["Size"], volume["VolumeType"]) == ("available", 5, "gp3")
    assert volume["CreateTime"] == made["CreateTime"]
    assert volume["Tags"] == [{"Key": "colour", "Value": "blue"}]
    assert file.read_bytes() == b"content"
    ec2.delete_volume(VolumeId=volume_id)
    assert list(layout().volumes.iterdir()) == []


def test_one_client_token_is_one_volume_also_when_that_was_deleted(ec2):
    asked = {"Size": 1, "AvailabilityZone": ZONE, "ClientToken": "one"}
    made = ec2.create_volume(**asked)["VolumeId"]
    assert ec2.create_volume(**asked)["VolumeId"] == made
    assert ec2.create_volume(**{**asked, "ClientToken": "two"})["VolumeId"] != made
    assert refusal(ec2.create_volume, **{**asked, "Size": 2}) == "IdempotentParameterMismatch"
    ec2.delete_volume(VolumeId=made)
    assert ec2.create_volume(**asked)["VolumeId"] == made
    assert refusal(ec2.describe_volumes, VolumeIds=[made]) == "InvalidVolume.NotFound"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"AvailabilityZone": ZONE}, "MissingParameter"),
        ({"AvailabilityZone": ZONE, "Size": 0}, "InvalidParameterValue"),
        ({"AvailabilityZone": ZONE, "Size": 16385}, "InvalidParameterValue"),
        ({"AvailabilityZone": "us-west-2q", "Size": 1}, "InvalidZone.NotFound"),
        ({"Size": 1}, "MissingParameter"),
        ({"AvailabilityZone": ZONE, "SnapshotId": "snap-0123456789abcdef1"}, "InvalidSnapshot.NotFound"),
    ],
)
def test_a_volume_that_can_not_be_is_refused_and_leaves_nothing(ec2, arguments, code):
    assert refusal(ec2.create_volume, **arguments) == code
    assert ec2.describe_volumes()["Volumes"] == []
    assert list(layout().volumes.iterdir()) == []


def test_a_snapshot_whose_disk_is_gone_makes_no_volume(ec2):
    snapshot = tell(
        "image", {"region": "us-west-2", "image_id": "ami-0123456789abcdef0", "name": "one", "tags": {}}
    )
    layout().snapshot(snapshot["SnapshotId"]).unlink()
    asked = {"AvailabilityZone": ZONE, "SnapshotId": snapshot["SnapshotId"]}
    assert refusal(ec2.create_volume, **asked) == "InternalError"
    assert ec2.describe_volumes()["Volumes"] == []
    assert list(layout().volumes.iterdir()) == []


def test_a_snapshot_keeps_what_the_volume_was(ec2):
    volume_id = ec2.create_volume(Size=1, AvailabilityZone=ZONE)["VolumeId"]
    with layout().volume(volume_id).open("r+b") as file:
        file.write(b"one")
    snapshot_id = ec2.create_snapshot(VolumeId=volume_id)["SnapshotId"]
    assert layout().snapshot(snapshot_id).samefile(layout().volume(volume_id)), "no copy while nobody writes"
    ec2.modify_volume(VolumeId=volume_id, Size=2)
    assert volume_of(ec2, volume_id)["Size"] == 2
    [snapshot] = ec2.describe_snapshots(SnapshotIds=[snapshot_id])["Snapshots"]
    assert snapshot["VolumeSize"] == 1
    assert layout().snapshot(snapshot_id).stat().st_size == 1 << 30
    assert layout().volume(volume_id).stat().st_size == 2 << 30
    assert refusal(ec2.modify_volume, VolumeId=volume_id, Size=1) == "InvalidParameterValue"

    too_small = {"SnapshotId": snapshot_id, "AvailabilityZone": ZONE, "Size": 0}
    assert refusal(ec2.create_volume, **too_small) == "InvalidParameterValue"
    copied = ec2.copy_snapshot(SourceSnapshotId=snapshot_id, SourceRegion="us-west-2")["SnapshotId"]
    again = ec2.create_volume(SnapshotId=copied, AvailabilityZone=ZONE)["VolumeId"]
    ec2.delete_volume(VolumeId=volume_id)
    ec2.delete_snapshot(SnapshotId=snapshot_id)
    with layout().volume(again).open("rb") as file:
        assert file.read(3) == b"one"


def test_an_instance_shows_every_device_of_its_image_and_its_launch(ec2):
    source = ec2.create_volume(Size=3, AvailabilityZone=ZONE)["VolumeId"]
    data = ec2.create_snapshot(VolumeId=source)["SnapshotId"]
    root = ec2.describe_images(ImageIds=[image()])["Images"][0]["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    registered = ec2.register_image(
        Name="two",
        RootDeviceName="/dev/xvda",
        BlockDeviceMappings=[
            disk("/dev/xvda", SnapshotId=root),
            disk("/dev/sdb", SnapshotId=data, DeleteOnTermination=False),
            disk("/dev/sdc", VolumeSize=4),
        ],
    )["ImageId"]
    assert refusal(ec2.delete_snapshot, SnapshotId=data) == "InvalidSnapshot.InUse"
    plain = devices_of(ec2, launch(ec2, registered))
    ends = {device: ebs["DeleteOnTermination"] for device, ebs in plain.items()}
    assert ends == {"/dev/xvda": True, "/dev/sdb": False, "/dev/sdc": True}
    assert all(
        ebs["VolumeId"] and ebs["AttachTime"] and ebs["Status"] == "attached" for ebs in plain.values()
    )

    changed = launch(
        ec2,
        registered,
        disk("/dev/xvda", DeleteOnTermination=False),
        disk("/dev/sdb", VolumeSize=7),
        {"DeviceName": "/dev/sdc", "NoDevice": ""},
        disk("/dev/sdf", VolumeSize=2),
    )
    found = devices_of(ec2, changed)
    sizes = {device: volume_of(ec2, ebs["VolumeId"])["Size"] for device, ebs in found.items()}
    assert sizes == {"/dev/xvda": 1, "/dev/sdb": 7, "/dev/sdf": 2}
    ends = {device: ebs["DeleteOnTermination"] for device, ebs in found.items()}
    assert ends == {"/dev/xvda": False, "/dev/sdb": False, "/dev/sdf": True}
    assert volume_of(ec2, found["/dev/sdb"]["VolumeId"])["SnapshotId"] == data

    ec2.modify_instance_attribute(
        InstanceId=changed, BlockDeviceMappings=[disk("/dev/sdf", DeleteOnTermination=False)]
    )
    [attachment] = volume_of(ec2, found["/dev/sdf"]["VolumeId"])["Attachments"]
    assert attachment["DeleteOnTermination"] is False
    assert devices_of(ec2, changed)["/dev/sdf"]["DeleteOnTermination"] is False


@pytest.mark.parametrize(
    ("device", "code"),
    [
        (disk("/dev/sdf"), "MissingParameter"),
        (disk("/dev/nvme1n1", VolumeSize=1), "InvalidBlockDeviceMapping"),
        (disk("/dev/xvda", SnapshotId="snap-0123456789abcdef1"), "InvalidBlockDeviceMapping"),
        (disk("/dev/sdf", SnapshotId="snap-0123456789abcdef1"), "InvalidSnapshot.NotFound"),
        ({"DeviceName": "/dev/xvda", "NoDevice": ""}, "InvalidBlockDeviceMapping"),
        (disk("/dev/sdf", VolumeSize=1, VolumeType="io1"), "InvalidParameterDependency"),
    ],
)
def test_a_launch_with_a_device_that_can_not_be_starts_nothing(ec2, device, code):
    assert refusal(launch_with, ec2=ec2, image_id=image(), device=device) == code
    assert ec2.describe_instances()["Reservations"] == []
    assert ec2.describe_volumes()["Volumes"] == []


def launch_with(*, ec2, image_id, device):
    launch(ec2, image_id, device)


def test_what_can_not_be_attached_or_taken_is_refused_as_by_ec2(ec2):
    instance = launch(ec2, image(), disk("/dev/sdb", VolumeSize=1))
    there = {device: ebs["VolumeId"] for device, ebs in devices_of(ec2, instance).items()}
    free = ec2.create_volume(Size=1, AvailabilityZone=ZONE)["VolumeId"]
    far = ec2.create_volume(Size=1, AvailabilityZone=OTHER_ZONE)["VolumeId"]

    def attach(volume_id, device, instance_id=instance):
        return refusal(ec2.attach_volume, VolumeId=volume_id, Device=device, InstanceId=instance_id)

    assert attach(there["/dev/sdb"], "/dev/sdf") == "VolumeInUse"
    assert attach(far, "/dev/sdf") == "InvalidVolume.ZoneMismatch"
    assert attach(free, "/dev/sdb") == "InvalidParameterValue"
    assert attach(free, "nonsense") == "InvalidParameterValue"
    assert attach("vol-0123456789abcdef1", "/dev/sdf") == "InvalidVolume.NotFound"
    assert attach(free, "/dev/sdf", "i-0123456789abcdef1") == "InvalidInstanceID.NotFound"
    assert attach(free, "/dev/sdp") == "InternalError"  # the test's machines do not take it there
    assert volume_of(ec2, free)["State"] == "available"
    assert refusal(ec2.delete_volume, VolumeId=there["/dev/sdb"]) == "VolumeInUse"
    assert refusal(ec2.detach_volume, VolumeId=free) == "IncorrectState"
    assert refusal(ec2.detach_volume, VolumeId=there["/dev/xvda"]) == "OperationNotPermitted"
    elsewhere = {"VolumeId": there["/dev/sdb"], "Device": "/dev/sdz"}
    assert refusal(ec2.detach_volume, **elsewhere) == "InvalidAttachment.NotFound"


def test_names_of_devices_reach_a_guest_as_a_number(tmp_path):
    script = tmp_path / "device-name"
    script.write_text(DEVICE_NAME_SCRIPT)
    names = [
        "/dev/sda",
        "/dev/sdf",
        "/dev/sdz",
        "/dev/xvda",
        "/dev/xvdf",
        "/dev/xvdz",
        "/dev/xvdaa",
        "/dev/xvddz",
    ]
    numbers = [device_number(name) for name in names]
    assert len(set(numbers)) == len(names)
    assert max(numbers) < 16384  # the most that QEMU takes
    told = [subprocess.check_output(["sh", script, str(number)], text=True).strip() for number in numbers]
    assert [f"/dev/{name}" for name in told] == names
    assert device_number("/dev/sda1") == device_number("/dev/sda")


@pytest.mark.parametrize(
    "name", ["/dev/sdaa", "/dev/nvme1n1", "sdf", "/dev/sdf1", "/dev/xvdea", "/dev/../sdf", "/dev/sd"]
)
def test_what_is_no_device_name(name):
    assert not DEVICE_NAME.fullmatch(name)


@pytest.fixture
def home(tmp_path):
    made = Layout(tmp_path)
    made.create()
    return made


def volume(home, number, **description):
    volume_id = f"vol-{number:017x}"
    home.volume(volume_id).write_bytes(b"kept")
    volume_files.write_description(home, volume_id, {"region": "us-west-2", "size_gib": 1, **description})
    return volume_id


def ending(*, ends):
    return {"instance_id": "i-1", "device": "/dev/sdf", "delete_on_termination": ends}


def test_a_new_server_removes_what_ended_with_its_machine_and_nothing_that_it_can_not_read(home):
    kept = [volume(home, 1), volume(home, 2, attachment=ending(ends=False))]
    gone = volume(home, 3, attachment=ending(ends=True))
    for number, text in enumerate(["", "{", "[]", '{"region": "us-west-2"}', "null"], 4):
        kept.append(volume(home, number, attachment=ending(ends=True)))
        home.volume(kept[-1]).with_suffix(".json").write_text(text)
    home.volume("vol-0").write_bytes(b"without a description")
    (home.volumes / ".vol-1.raw.0a1b.partial").touch()
    volume_files.sweep(home)
    assert {file.stem for file in home.volumes.glob("*.raw")} == {*kept, "vol-0"}
    assert not list(home.volumes.glob(f"{gone}*"))
    assert not list(home.volumes.glob("*.partial"))
    assert set(volume_files.descriptions(home, "us-west-2")) == set(kept[:2])
    assert {row["volume"]: row["size_gib"] for row in volume_files.stored_volumes(home)}["vol-0"] is None


def test_no_room_makes_no_volume(home, monkeypatch):
    usage = os.statvfs_result((4096, 4096, 1, 1, 1, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: usage)
    with pytest.raises(UnavailableError, match=r"the disk of .* is full: .* about 2 GiB are needed"):
        volume_files.make_disk(home, "vol-1", size_gib=1, source=None)
    assert list(home.volumes.iterdir()) == []


@pytest.mark.usefixtures("require_root_machine")
def test_a_loop_device_is_gone_with_who_made_it(tmp_path):
    file = tmp_path / "volume.raw"
    file.touch()
    os.truncate(file, 1 << 20)
    loop = LoopDevice(file)
    assert not loop.busy()
    os.truncate(file, 2 << 20)
    loop.resize()
    size = subprocess.check_output(["blockdev", "--getsize64", loop.path], text=True)
    assert int(size) == 2 << 20
    assert backing_files(file)
    loop.close()
    assert not backing_files(file)


def backing_files(file):
    listed = subprocess.run(
        ["losetup", "--json", "--list"], capture_output=True, text=True, check=True
    ).stdout
    devices = json.loads(listed or '{"loopdevices": []}')["loopdevices"]
    return [device for device in devices if re.search(re.escape(str(file)), device["back-file"])]
