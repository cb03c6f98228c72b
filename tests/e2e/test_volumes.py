"""Volumes are disks: the AWS CLI makes and attaches them, and a container and a virtual machine use them.

The virtual machine has simulated GPUs, too: for them alone another would have to boot.
"""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.harness import SIMULATED, Node, command_lines, wait_for

pytestmark = pytest.mark.e2e

KIND = "ResourceType=instance,Tags=[{{Key=gpukiln:machine,Value={}}}{}]"
ZONE = "us-west-2a"


# What differs between the two is how a running one gets and gives a disk; a boot in emulation takes minutes.
both = pytest.mark.parametrize("machine", ["privileged", "vm"], indirect=True, scope="module")
container = pytest.mark.parametrize("machine", ["privileged"], indirect=True, scope="module")
virtual = pytest.mark.parametrize("machine", ["vm"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def configured(here, key, tmp_path_factory):
    """An image that boots without cloud-init, which is most of a boot without KVM: it has run before."""
    with Node(here, key, tmp_path_factory.mktemp("configured")) as node:
        node.read("sudo touch /etc/cloud/cloud-init.disabled")
        return node.capture("configured")


@pytest.fixture(scope="module")
def machine(request, here, key):
    """One of a kind, with a second disk from its launch on."""
    is_vm = request.param == "vm"
    image = request.getfixturevalue("configured") if is_vm else here.base_id()
    options = ["--tag-specifications", KIND.format(request.param, f",{SIMULATED}" if is_vm else "")]
    if is_vm:
        options += ["--instance-type", "g4dn.xlarge"]
    devices = [
        {"DeviceName": "/dev/xvda", "Ebs": {"DeleteOnTermination": False}},
        {"DeviceName": "/dev/sdb", "Ebs": {"VolumeSize": 1}},
    ]
    launched = here.launch(image, key, *options, "--block-device-mappings", json.dumps(devices))
    made = Machine(here, key, launched, is_vm=is_vm)
    wait_for(made.is_up, 600)
    yield made
    if not made.has_ended:
        here.terminate(made.instance)


class Machine:
    """A machine, and the volumes that one test leaves to the next."""

    data, again, image, snapshot, has_ended = "", "", "", {}, False

    def __init__(self, here, key, instance, *, is_vm):
        self.here, self.key, self.instance, self.id = here, key, instance, instance["InstanceId"]
        self.is_vm = is_vm
        self.client = here.client()

    def ec2(self, *arguments):
        return self.here.aws("ec2", *arguments)

    def refused(self, call, **arguments):
        """EC2's error code for a call that it refuses."""
        with pytest.raises(ClientError) as caught:
            getattr(self.client, call)(**arguments)
        return caught.value.response["Error"]["Code"]

    def root(self, command):
        done = self.here.ssh(self.instance, self.key, f"sudo sh -ec '{command}'")
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def is_up(self):
        return self.here.ssh(self.instance, self.key, "true").returncode == 0

    def described(self):
        [reservation] = self.client.describe_instances(InstanceIds=[self.id])["Reservations"]
        return reservation["Instances"][0]

    def state(self):
        return self.described()["State"]["Name"]

    def devices(self):
        mappings = self.described()["BlockDeviceMappings"]
        return {mapping["DeviceName"]: mapping["Ebs"] for mapping in mappings}

    def volume(self, volume_id):
        return self.client.describe_volumes(VolumeIds=[volume_id])["Volumes"][0]

    def wait_until(self, state, volume_id):
        wait_for(lambda: self.volume(volume_id)["State"] == state, 60)


def by_id(volume_id):
    return f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume_id.replace('-', '')}"


def loop_devices(home: Path) -> list[str]:
    listed = subprocess.run(
        ["losetup", "--list", "--noheadings", "--output=BACK-FILE"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if str(home) in line]


@both
def test_a_machine_begins_with_the_disks_that_its_launch_asked_for(machine):
    devices = machine.devices()
    assert set(devices) == {"/dev/xvda", "/dev/sdb"}
    assert not devices["/dev/xvda"]["DeleteOnTermination"]
    assert devices["/dev/sdb"]["DeleteOnTermination"]
    assert {device["Status"] for device in devices.values()} == {"attached"}
    assert machine.root("blockdev --getsize64 /dev/sdb") == f"{1 << 30}\n"


@both
def test_an_attached_volume_is_found_by_its_id_and_under_the_asked_name(here, machine):
    m = machine
    tags = "ResourceType=volume,Tags=[{Key=colour,Value=blue}]"
    size = ("--size", "1", "--availability-zone", ZONE, "--encrypted")
    m.data = data = m.ec2("create-volume", *size, "--tag-specifications", tags)["VolumeId"]
    m.wait_until("available", data)
    answer = m.ec2("attach-volume", "--volume-id", data, "--instance-id", m.id, "--device", "/dev/xvdf")
    assert answer["State"] == "attaching"
    volume = m.volume(data)
    assert (volume["State"], volume["Encrypted"]) == ("in-use", True)
    [attachment] = volume["Attachments"]
    assert attachment["AttachTime"]
    assert (attachment["State"], attachment["Device"]) == ("attached", "/dev/xvdf")
    assert attachment["InstanceId"] == m.id
    assert attachment["DeleteOnTermination"] is False
    found = f"test -b /dev/xvdf -a -b {by_id(data)}"
    wait_for(lambda: here.ssh(m.instance, m.key, found).returncode == 0, 20)
    m.root(f"mkfs.ext4 -q {by_id(data)} && mkdir -p /data && mount /dev/xvdf /data && echo one > /data/file")

    elsewhere = {"VolumeId": data, "InstanceId": m.id, "Device": "/dev/xvdg"}
    assert m.refused("attach_volume", **elsewhere) == "VolumeInUse"
    assert m.refused("delete_volume", VolumeId=data) == "VolumeInUse"


@both
def test_a_volume_grows_and_is_captured_while_it_is_used(machine):
    m, data = machine, machine.data
    m.client.modify_volume(VolumeId=data, Size=2)
    assert m.volume(data)["Size"] == 2
    [change] = m.client.describe_volumes_modifications(VolumeIds=[data])["VolumesModifications"]
    assert (change["OriginalSize"], change["TargetSize"]) == (1, 2)
    wait_for(lambda: m.root("blockdev --getsize64 /dev/xvdf") == f"{2 << 30}\n", 10)
    # a mounted file system is not enlarged here: in a container that needs a right that not every host has
    m.root("umount /data && e2fsck -fp /dev/xvdf && resize2fs /dev/xvdf 2>&1 && mount /dev/xvdf /data")
    assert int(m.root("df --output=size /data | tail -1")) > 1.8 * 2**20

    m.snapshot = m.client.create_snapshot(VolumeId=data)
    m.root("echo two > /data/file")
    assert m.snapshot["VolumeSize"] == 2


@both
def test_a_volume_is_given_back_when_it_is_not_mounted(here, machine):
    m, data = machine, machine.data
    if m.is_vm:  # its kernel gives a mounted disk away
        m.root("umount /data")
    assert m.ec2("detach-volume", "--volume-id", data)["State"] == "detaching"
    if not m.is_vm:
        wait_for(lambda: m.volume(data)["Attachments"][0]["State"] == "busy", 10)
        m.root("umount /data")
    m.wait_until("available", data)
    gone = f"test -e /dev/xvdf -o -e {by_id(data)}"
    assert here.ssh(m.instance, m.key, gone).returncode == 1
    assert "/dev/xvdf" not in m.devices()


@virtual
def test_its_simulated_gpus_are_there_from_its_start_and_change(here, machine):
    m = machine

    def gpus(*arguments):
        [known] = json.loads(here.invoke("cloud.gpus", m.id, *arguments, "--json").stdout)["machines"]
        return known["gpus"]

    assert "Tesla T4" in m.root("nvidia-smi -L")
    gpus("--set", "0.temperature=77")
    assert m.root("nvidia-smi --query-gpu=temperature.gpu --format=csv,noheader").strip() == "77"
    # a virtual machine's processes are known inside it only
    pid = m.root("nohup sleep 600 >/dev/null 2>&1 & echo $!").strip()
    m.root(f"/run/gpukiln-simulated/gpukiln-gpu-load 0 {shlex.quote(pid)} 100 10")
    assert gpus()[0]["processes"] == [int(pid)]
    refused = here.invoke("cloud.gpus", m.id, "--reset", "0", ok=False)
    assert refused.returncode == 3
    assert "gpu-reset" in refused.stderr


@container
def test_a_volume_of_a_snapshot_is_there_after_the_next_start_and_in_an_image(here, machine):
    m = machine
    made = m.client.create_volume(SnapshotId=m.snapshot["SnapshotId"], Size=3, AvailabilityZone=ZONE)
    m.again = made["VolumeId"]
    m.client.stop_instances(InstanceIds=[m.id])
    here.wait("instance_stopped", m.instance)
    m.client.attach_volume(VolumeId=m.again, InstanceId=m.id, Device="/dev/sdf")
    m.image = m.client.create_image(InstanceId=m.id, Name=f"with data {m.id}")["ImageId"]
    m.client.start_instances(InstanceIds=[m.id])
    here.wait("instance_running", m.instance)
    wait_for(m.is_up, 600)
    assert set(m.devices()) == {"/dev/xvda", "/dev/sdb", "/dev/sdf"}
    assert m.root("mount /dev/sdf /data && cat /data/file && echo three > /data/file") == "one\n"
    assert m.root("blockdev --getsize64 /dev/sdf /dev/sdb").split() == [str(3 << 30), str(1 << 30)]

    [described] = m.client.describe_images(ImageIds=[m.image])["Images"]
    sizes = {entry["DeviceName"]: entry["Ebs"]["VolumeSize"] for entry in described["BlockDeviceMappings"]}
    assert sizes == {"/dev/xvda": 8, "/dev/sdb": 1, "/dev/sdf": 3}


@container
def test_a_mounted_volume_is_taken_by_force_and_the_machine_lives(machine):
    machine.ec2("detach-volume", "--volume-id", machine.again, "--force")
    machine.wait_until("available", machine.again)
    assert machine.is_up()


@container
def test_the_machines_end_keeps_what_was_to_be_kept(here, machine):
    m = machine
    volumes = {device: ebs["VolumeId"] for device, ebs in m.devices().items()}
    here.terminate(m.instance)
    m.has_ended = True
    m.wait_until("available", volumes["/dev/xvda"])
    assert m.refused("describe_volumes", VolumeIds=[volumes["/dev/sdb"]]) == "InvalidVolume.NotFound"
    assert loop_devices(here.home) == []
    # of the image's machine its second disk is left, as of the machine that the image is of
    other = _a_machine_of_its_image_has_its_data_until_the_server_is_killed(here, m)
    left = {row["volume"]: row["size_gib"] for row in here.status()["volumes"]}
    assert left == {m.data: 2, m.again: 3, volumes["/dev/xvda"]: 8, other: 3}
    m.client.delete_volume(VolumeId=other)
    assert m.volume(m.data)["Tags"] == [{"Key": "colour", "Value": "blue"}]
    for volume in (m.data, m.again, volumes["/dev/xvda"]):
        m.client.delete_volume(VolumeId=volume)
    m.client.deregister_image(ImageId=m.image)
    assert list((here.home / "cloud/volumes").iterdir()) == []


def _a_machine_of_its_image_has_its_data_until_the_server_is_killed(here, m):
    other = here.launch(m.image, m.key, "--tag-specifications", KIND.format("privileged", ""))
    [kept] = m.client.describe_volumes(
        Filters=[
            {"Name": "attachment.instance-id", "Values": [other["InstanceId"]]},
            {"Name": "attachment.device", "Values": ["/dev/sdf"]},
        ]
    )["Volumes"]
    wait_for(lambda: here.ssh(other, m.key, "sudo mount /dev/sdf /mnt").returncode == 0)
    assert here.ssh(other, m.key, "cat /mnt/file").stdout == "one\n"
    assert len(loop_devices(here.home)) == 3  # its root's too
    [server] = [pid for pid, line in command_lines() if line.startswith("unshare") and str(here.home) in line]
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: loop_devices(here.home) == [], 20)
    here.cloud_environment()  # starts the next one
    return kept["VolumeId"]
