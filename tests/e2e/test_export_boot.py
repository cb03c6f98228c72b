"""A baked disk where there is no EC2: booted under BIOS and UEFI on several buses, verified; and back.

Each firmware, bus and network card is in one of three boots. Machines of the embedded cloud boot from virtio.
"""

import hashlib
import json
import subprocess

import pytest

from gpukiln.clouds.tags import IMAGE_TAG, NOT_VERIFIED
from gpukiln.exports.installer import read_content
from tests.support.exported_machine import ExportedMachine, overlay, seed
from tests.support.harness import Node

pytestmark = pytest.mark.e2e

NAME = "somewhere-else"
SIZE_GIB = 40  # the image is made with 30
EFI = "efi: EFI v"  # what a kernel prints that UEFI has booted


def export(cloud, image, name, *options):
    """A file that `ami.export` writes of an image or a build, and what it says."""
    output = cloud.home / name
    wanted = (image, "--region", "us-west-2", "--output", str(output), *options)
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
    options = ("--datasource", "nocloud", "--size", size)
    return export(image_cloud, image_cloud.document["build_id"], "exported.qcow2", *options)


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


@pytest.mark.parametrize(
    ("bus", "network_card", "message"),
    [
        ("sata", "virtio-net-pci", r"ata\d+\.00: ATA-\d+: QEMU HARDDISK"),
        # as Proxmox attaches a disk
        ("scsi", "e1000e", r"e1000e 0000:.*: Intel\(R\) PRO/1000 Network Connection"),
    ],
    ids=["sata", "scsi"],
)
def test_it_boots_by_bios(exported, tmp_path, bus, network_card, message):
    """Until its file systems are mounted and its network card has a driver: the rest is the same for each."""
    disk = overlay(exported[0], tmp_path / "disk.qcow2")
    with ExportedMachine(
        disk, None, tmp_path, firmware="bios", bus=bus, network_card=network_card
    ) as machine:
        machine.wait_for_console("Reached target .*Local File Systems")
        console = machine.wait_for_console(message)
    assert "EXT4-fs (sda1): re-mounted" in console
    assert EFI not in console


def test_an_imported_disk_boots_and_the_key_of_the_export_logs_in(image_cloud, key, tmp_path):
    """The base: what is imported is copied in blocks of 512 KiB, and the whole image has four times as many.

    cloud-init has no source. The disk is trusted, and so a container; test_embedded_machines.py has what
    happens to one that is not.
    """
    options = ("--unproven", "--datasource", "none", "--ssh-key", str(key.with_suffix(".pub")))
    file, _ = export(image_cloud, image_cloud.base_id(), "alone.qcow2", *options)
    described = ("--base", "debian-12", "--driver", "535.309.01", "--modules", "proprietary")
    command = ("ami.import", str(file), "--region", "us-west-2", "--trust", *described, "--json")
    made = json.loads(image_cloud.invoke(*command).stdout)
    assert (made["found"], made["boot_mode"]) == (False, "uefi-preferred")
    [image] = image_cloud.aws("ec2", "describe-images", "--image-ids", made["image_id"])["Images"]
    tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
    assert tags[IMAGE_TAG] == NOT_VERIFIED
    disk = file.with_suffix(".raw")
    subprocess.run(["qemu-img", "convert", "-O", "raw", file, disk], check=True)
    snapshot = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    assert read_content(image_cloud.home / f"cloud/snapshots/{snapshot}.raw") == read_content(disk)
    for used in (file, disk):
        used.unlink()
    with Node(image_cloud, key, tmp_path, made["image_id"]) as machine:
        status = machine.read("cloud-init status --long; systemctl is-system-running --wait")
        assert "DataSourceNone" in status
        assert status.splitlines()[-1] == "running"
        assert "169.254.169.254" not in machine.read("sudo cat /var/log/cloud-init.log")


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
