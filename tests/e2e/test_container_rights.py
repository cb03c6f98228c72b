"""What root of a container machine can do to the computer that runs it: nothing, unless it is privileged.

Each attack succeeds on a privileged one, which is what every container was before there were user namespaces.
"""

import os
import tempfile
from pathlib import Path

import pytest

from gpukiln.disks.loop import LoopDevice
from tests.support.harness import Node, command_lines

pytestmark = pytest.mark.e2e
SECRET = b"a disk of somebody else"
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.fixture(scope="module", params=["container", "privileged"])
def machine(here, key, request, tmp_path_factory):
    tags = f"ResourceType=instance,Tags=[{{Key=gpukiln:machine,Value={request.param}}}]"
    options = ["--instance-type", "g4dn.xlarge", "--tag-specifications", tags]
    with Node(here, key, tmp_path_factory.mktemp("node"), options=options) as node:
        node.privileged = request.param == "privileged"
        yield node


@pytest.fixture
def loop(tmp_path):
    """A loop device of this computer's, which the machine has no part in."""
    disk = tmp_path / "disk"
    disk.write_bytes(SECRET.ljust(1 << 20, b"\0"))
    device = LoopDevice(disk)
    yield device
    device.close()


def test_it_is_a_whole_machine(machine):
    assert machine.read("systemctl is-system-running --wait").strip() == "running"
    outer = machine.read("cat /proc/self/uid_map").split()[1]
    assert (outer == "0") is machine.privileged
    machine.read("sudo apt-get update -qq && sudo apt-get install -qq --yes --no-install-recommends tini")


def test_disks_of_others_can_not_be_read(machine, loop):
    number = loop.device
    node = "/dev/of-another"
    make = f"sudo mknod {node} b {os.major(number)} {os.minor(number)}"
    read = f"{make} && sudo head -c {len(SECRET)} {node}; sudo rm -f {node}"
    assert (machine.ssh(read).stdout == SECRET.decode()) is machine.privileged


def test_a_node_that_is_on_the_disk_already_leads_nowhere(here, machine, loop):
    """Whoever made the image could make it; here this computer does, in the mounted file system."""
    instance_id = machine.instance["InstanceId"]
    [nspawn] = [
        pid
        for pid, line in command_lines()
        if line.startswith("systemd-nspawn") and f"--machine={instance_id}" in line
    ]
    folder = here.home / f"cloud/machines/{instance_id}/root"
    node = Path(f"/proc/{nspawn}/root{folder}/srv/loop")  # the server's mounts are its own
    os.mknod(node, 0o60666, loop.device)
    try:
        assert (
            machine.ssh(f"head -c {len(SECRET)} /srv/loop").stdout == SECRET.decode()
        ) is machine.privileged
    finally:
        node.unlink()


def test_settings_of_the_kernel_stay(machine):
    """A program named in core_pattern runs as root of the computer; here it is written as it was."""
    before = CORE_PATTERN.read_text().strip()
    write = f"sudo mount -o remount,rw /proc/sys; echo '{before}' | sudo tee {CORE_PATTERN}"
    assert (machine.ssh(write).returncode == 0) is machine.privileged
    assert CORE_PATTERN.read_text().strip() == before


@pytest.fixture
def target():
    """A folder of this computer's; not below /tmp, which is another file system in a machine."""
    with tempfile.TemporaryDirectory(prefix="gpukiln-", dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_link_in_the_machine_is_followed_in_the_machine(here, machine, target):
    """The server writes its files for simulated GPUs into a machine that runs: its root may be waiting."""
    machine.read(f"sudo mkdir -p {target} && sudo ln -sfn {target} /run/gpukiln-simulated")
    machine.read(f"sudo mkdir -p {target}/etc && sudo ln -sfn {target}/etc /etc/gpukiln")
    here.invoke("cloud.gpus", machine.instance["InstanceId"], "--on")
    assert list(target.iterdir()) == []
    assert "simulated-gpus" in machine.read(f"ls {target}/etc")
    here.invoke("cloud.gpus", machine.instance["InstanceId"], "--off")


def test_what_stands_in_for_the_gpus_state_is_refused(here, machine):
    node = machine.instance["InstanceId"]
    machine.read("sudo rm -f /run/gpukiln-simulated")
    here.invoke("cloud.gpus", node, "--on")
    state = "/run/gpukiln-simulated/libnvidia-ml.so"
    for other, words in (("ln -s /etc/shadow", "symbolic links"), ("mkfifo", "no regular file")):
        machine.read(f"sudo rm {state} && sudo {other} {state}")
        done = here.invoke("cloud.gpus", node, "--set", "0.temperature=90", ok=False)
        assert (done.returncode, words in done.stderr) == (4, True), done.stderr


def test_no_node_leads_to_a_gpu_of_this_computer(here, machine):
    """A privileged one makes its nodes itself, by its /proc/devices; for others that decides nothing."""
    node = machine.instance["InstanceId"]
    here.invoke("cloud.gpus", node, "--off")
    machine.read(
        "cat /proc/devices >/tmp/devices; sed -i '1a195 nvidia-frontend' /tmp/devices; "
        "sudo mount --bind /tmp/devices /proc/devices"
    )
    here.invoke("cloud.gpus", node, "--on")
    numbers = "stat -c %t:%T /dev/nvidia0"
    assert machine.read(numbers).strip() == ("1:3" if machine.privileged else "c3:0")
    here.invoke("cloud.gpus", node, "--off")
    machine.read("sudo umount /proc/devices")
    here.invoke("cloud.gpus", node, "--on")
    assert machine.read(numbers).strip() == "c3:0"


def test_only_a_privileged_one_mounts(machine, here):
    volume = here.aws("ec2", "create-volume", "--availability-zone", "us-west-2a", "--size", "1")["VolumeId"]
    here.aws("ec2", "wait", "volume-available", "--volume-ids", volume)
    ids = ("--volume-id", volume, "--instance-id", machine.instance["InstanceId"])
    here.aws("ec2", "attach-volume", *ids, "--device", "/dev/sdf")
    machine.read("until [ -e /dev/sdf ]; do sleep 0.1; done; sudo mkfs.ext4 -q /dev/sdf")  # it is its own
    mounted = machine.ssh("sudo mount /dev/sdf /mnt && sudo umount /mnt").returncode == 0
    assert mounted is machine.privileged
    here.aws("ec2", "detach-volume", "--volume-id", volume)
    here.aws("ec2", "wait", "volume-available", "--volume-ids", volume)
    here.aws("ec2", "delete-volume", "--volume-id", volume)


def test_a_kind_that_is_none_is_refused(here, key, machine):
    tags = "ResourceType=instance,Tags=[{Key=gpukiln:machine,Value=privilegd}]"
    with pytest.raises(AssertionError, match=r"privilegd.*wanted one of container, privileged, vm"):
        here.launch(here.base_id(), key, "--tag-specifications", tags)
    filters = "Name=instance-state-name,Values=pending,running"
    [left] = here.aws("ec2", "describe-instances", "--filters", filters)["Reservations"]
    assert left["Instances"][0]["InstanceId"] == machine.instance["InstanceId"]
