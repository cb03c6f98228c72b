"""A baked disk where there is no EC2: booted under BIOS and UEFI on several buses, verified; and back.

Each firmware, bus and network card is in one of three boots. Machines of the embedded cloud boot from virtio.
"""

import hashlib
import json
import re
import subprocess

import pytest

from gpukiln.clouds.tags import IMAGE_TAG, NOT_VERIFIED
from gpukiln.disks.mount import mounted_root
from gpukiln.exports.installer import read_content
from tests.support.exported_machine import ExportedMachine, overlay, seed
from tests.support.harness import BOOT_S, WAIT_FOR_CLOUD_INIT, Node, wait_for

pytestmark = pytest.mark.e2e

NAME = "somewhere-else"
SIZE_GIB = 40  # the image is made with 30
EFI = "efi: EFI v"  # what a kernel prints that UEFI has booted


def export(cloud, name, *options):
    """A file that `ami.export` writes of the image that the suite bakes, and what it says."""
    output = cloud.home / name
    wanted = (cloud.document["build_id"], "--region", "us-west-2", "--output", str(output), *options)
    return output, json.loads(cloud.invoke("ami.export", *wanted, "--json").stdout)


def inventory(machine, key, folder):
    """What Ansible is told of a machine."""
    host = {
        "ansible_host": "127.0.0.1",
        "ansible_port": machine.port,
        "ansible_user": "admin",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
    }
    file = folder / "hosts.yml"
    file.write_text(json.dumps({"all": {"hosts": {NAME: host}}}))
    return str(file)


@pytest.fixture(scope="module")
def exported(image_cloud):
    size = f"{SIZE_GIB}GiB"
    return export(image_cloud, "exported.qcow2", "--datasource", "nocloud", "--size", size)


@pytest.fixture(scope="module")
def booted(image_cloud, exported, key, tmp_path_factory):
    """Its first boot, by UEFI from NVMe."""
    folder = tmp_path_factory.mktemp("first")
    cd = seed(folder, NAME, key.with_suffix(".pub").read_text().strip())
    disk = overlay(exported[0], image_cloud.home / "booted.qcow2")
    with ExportedMachine(disk, cd, folder, firmware="uefi", bus="nvme", network_card="vmxnet3") as machine:
        assert machine.state() == "running"
        yield machine


def test_the_command_says_what_the_disk_boots_on(exported):
    said = exported[1]
    assert said["verified"] is True
    assert said["virtual_bytes"] == SIZE_GIB << 30
    assert said["boots_on"]["firmware"] == ["bios", "uefi"]
    assert said["boots_on"]["disks"] == ["virtio", "scsi", "sata", "nvme"]
    assert {"e1000e", "vmxnet3"} <= set(said["boots_on"]["networks"])


def test_it_boots_from_sata_by_bios(exported, tmp_path):
    """Until its file systems are mounted: what follows is the same from each bus."""
    disk = overlay(exported[0], tmp_path / "disk.qcow2")
    with ExportedMachine(disk, None, tmp_path, firmware="bios", bus="sata") as machine:
        said = machine.wait_for_console("Reached target .*Local File Systems")
    assert "EXT4-fs (sda1): re-mounted" in said
    assert re.search(r"ata\d+\.00: ATA-\d+: QEMU HARDDISK", said)
    assert EFI not in said


def test_without_a_source_the_key_of_the_export_logs_in(image_cloud, key, tmp_path):
    """By BIOS from virtio-scsi, as Proxmox attaches a disk; the container engines run in the first boot."""
    options = ("--datasource", "none", "--ssh-key", str(key.with_suffix(".pub")))
    exported, _ = export(image_cloud, "alone.qcow2", *options)
    # One that can be mounted. Exporting it as raw takes 17 s of a processor more: the digest of 30 GiB.
    file = exported.with_suffix(".raw")
    subprocess.run(["qemu-img", "convert", "-O", "raw", exported, file], check=True)
    exported.unlink()
    with mounted_root(file, writable=True) as root:
        for unit in ("docker.socket", "docker.service", "containerd.service"):
            (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    disk = overlay(file, image_cloud.home / "alone-booted.qcow2")
    with ExportedMachine(disk, None, tmp_path, firmware="bios", bus="scsi", network_card="e1000e") as machine:
        wait_for(lambda: machine.ssh(key, WAIT_FOR_CLOUD_INIT).returncode == 0, BOOT_S)
        status = machine.read(key, "cloud-init status --long; systemctl is-system-running --wait")
        assert "DataSourceNone" in status
        assert status.splitlines()[-1] == "running"
        assert "169.254.169.254" not in machine.read(key, "sudo cat /var/log/cloud-init.log")
    for used in (disk, file):
        used.unlink()


def test_an_imported_disk_is_an_image_that_boots(image_cloud, key, tmp_path):
    """It is what was exported, and nobody says that it was verified.

    It is trusted, and so a container; test_embedded_machines.py has what happens to one that is not.
    """
    file, _ = export(image_cloud, "golden.qcow2")
    command = ("ami.import", str(file), "--region", "us-west-2", "--trust", "--json")
    made = json.loads(image_cloud.invoke(*command).stdout)
    file.unlink()
    assert (made["found"], made["boot_mode"]) == (False, "uefi-preferred")
    [image] = image_cloud.aws("ec2", "describe-images", "--image-ids", made["image_id"])["Images"]
    tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
    assert tags[IMAGE_TAG] == NOT_VERIFIED
    assert not [name for name in tags if name.startswith("gpukiln:verdict")]
    [exported] = image_cloud.aws(
        "ec2", "describe-images", "--image-ids", image_cloud.document["bake"]["image_id"]
    )["Images"]
    disks = [
        image_cloud.home / f"cloud/snapshots/{one['BlockDeviceMappings'][0]['Ebs']['SnapshotId']}.raw"
        for one in (exported, image)
    ]
    assert read_content(disks[0]) == read_content(disks[1])
    with Node(image_cloud, key, tmp_path, made["image_id"]) as machine:
        assert machine.read("systemctl is-system-running --wait") == "running\n"


def test_it_is_told_by_the_seed_alone(booted, key):
    status = booted.read(key, "cloud-init status --long; hostname")
    assert "DataSourceNoCloud [seed=/dev/sr0]" in status
    assert status.splitlines()[-1] == NAME
    # EC2's metadata, which nobody answers here, is not waited for
    assert "169.254.169.254" not in booted.read(key, "sudo cat /var/log/cloud-init.log")
    assert int(booted.read(key, "lsblk -bndo SIZE /dev/nvme0n1")) == SIZE_GIB << 30
    assert int(booted.read(key, "df --output=size -B1 / | tail -1")) > (SIZE_GIB - 2) << 30
    assert booted.ssh(key, "test -d /sys/firmware/efi").returncode == 0
    assert EFI in booted.said()


def test_its_record_says_where_it_went(image_cloud, booted, key):
    record = json.loads(booted.read(key, "cat /etc/gpukiln/image.json"))
    proven = (image_cloud.home / "builds" / image_cloud.document["build_id"] / "image.json").read_bytes()
    exported = {"datasource": "nocloud", "record_sha256": hashlib.sha256(proven).hexdigest()}
    assert record == {**json.loads(proven), "exported": exported}


def test_the_suite_finds_what_it_found_on_the_ami(image_cloud, booted, key, tmp_path):
    """Nothing that passed there is not run here."""
    hosts = inventory(booted, key, tmp_path)
    done = image_cloud.invoke("node.verify", "--inventory", hosts, "--expect-gpus", "0", "--json", ok=False)
    [judged] = json.loads(done.stdout)["hosts"]
    found = {check["id"]: check for check in judged["verdict"]["checks"]}
    [on_ami] = image_cloud.document["verdicts"]
    passed = {check["id"] for check in on_ami["checks"] if check["outcome"] == "passed"}
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(passed & found.keys()) > 20
    assert {name: found[name] for name in passed & found.keys() if found[name]["outcome"] != "passed"} == {}
