"""Names of volumes in a machine: by volume id, and by the device name of the attachment."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# EC2 user guide, "Device names for volumes on Amazon EC2 instances" (HVM), and the root device of some AMIs
DEVICE_NAME = re.compile(r"/dev/(?P<kind>sd|xvd)(?P<letters>[a-z]|(?<=xvd)[a-d][a-z])|/dev/sda1")
EBS_LINK = "nvme-Amazon_Elastic_Block_Store_"  # as udev names a volume on EC2, by its NVMe serial
# sda to sdz are 1 to 26; xvd has two letters too, so its numbers begin behind 1000.
KINDS = {"sd": 0, "xvd": 1000}
NAME_SCRIPT = "usr/local/lib/embedded-ec2/device-name"

# QEMU has no free text except the serial, which is the volume's id. The device name is coded as the number
# that the firmware gives a PCI device (QEMU, docs: acpi-index; kernel, Documentation/ABI/testing/
# sysfs-bus-pci: acpi_index), so the guest's udev needs no network for it. On EC2 it is in the controller's
# identify data, which amazon-ec2-utils' ebsnvme-id reads.
UDEV_RULES = f"""\
# Volumes of the embedded EC2 under the names that they have on EC2.
SUBSYSTEM!="block", GOTO="embedded_ec2_end"
KERNEL!="vd*", GOTO="embedded_ec2_end"
ATTRS{{serial}}!="vol*", GOTO="embedded_ec2_end"
ENV{{DEVTYPE}}=="disk", ATTRS{{serial}}=="?*", SYMLINK+="disk/by-id/{EBS_LINK}$attr{{serial}}"
ENV{{DEVTYPE}}=="partition", ATTRS{{serial}}=="?*", SYMLINK+="disk/by-id/{EBS_LINK}$attr{{serial}}-part%n"
ATTRS{{acpi_index}}=="?*", PROGRAM="/{NAME_SCRIPT} $attr{{acpi_index}}", SYMLINK+="%c%n"
LABEL="embedded_ec2_end"
"""
DEVICE_NAME_SCRIPT = f"""\
#!/bin/sh
# The name a volume was attached with: 6 is sdf, {KINDS["xvd"] + 6} is xvdf, {KINDS["xvd"] + 27} is xvdaa.
set -eu
number=$1 kind=sd
if [ "$number" -gt {KINDS["xvd"]} ]; then number=$((number - {KINDS["xvd"]})) kind=xvd; fi
letter() {{ echo abcdefghijklmnopqrstuvwxyz | cut -c "$1"; }}
first=''
if [ "$number" -gt 26 ]; then first=$(letter $(((number - 1) / 26))); fi
echo "$kind$first$(letter $(((number - 1) % 26 + 1)))"
"""
GUEST_FILES = {
    "etc/udev/rules.d/70-embedded-ec2.rules": UDEV_RULES,
    NAME_SCRIPT: DEVICE_NAME_SCRIPT,
}


@dataclass(frozen=True)
class AttachedDisk:
    """A volume that is attached to a machine.

    Args:
        volume_id: `vol-…`.
        device: The requested name, `/dev/sdf`.
        file: The raw disk.
    """

    volume_id: str
    device: str
    file: Path

    @property
    def serial(self) -> str:
        """The volume's NVMe serial on EC2; 20 characters, virtio-blk's limit.

        >>> AttachedDisk("vol-0123456789abcdef0", "/dev/sdf", Path("d.raw")).serial
        'vol0123456789abcdef0'
        """
        return self.volume_id.replace("-", "")

    @property
    def link(self) -> str:
        """The name below /dev/disk/by-id."""
        return EBS_LINK + self.serial

    def qemu_node(self, *, durable: bool) -> dict[str, Any]:
        """The disk's file, in the form of `blockdev-add` and -blockdev.

        Args:
            durable: Whether a flush of the guest reaches this computer's disk.
        """
        # discard: a TRIM of the guest makes a hole in the sparse file.
        options = {"discard": "unmap", "cache": {"direct": False, "no-flush": not durable}}
        file = {"driver": "file", "filename": str(self.file), **options}
        return {"driver": "raw", "node-name": self.serial, "file": file, **options}

    @property
    def qemu_device(self) -> dict[str, Any]:
        """The device, in the form of `device_add` and -device."""
        return {
            "driver": "virtio-blk-pci",
            "id": self.serial,
            "drive": self.serial,
            "serial": self.serial,
            "acpi-index": device_number(self.device),
        }


def device_number(device: str) -> int:
    """The number that codes a device name for a virtual machine; DEVICE_NAME_SCRIPT decodes it.

    Args:
        device: A name that matches `DEVICE_NAME`.

    >>> device_number("/dev/sdf"), device_number("/dev/xvdf"), device_number("/dev/xvdaa")
    (6, 1006, 1027)
    """
    match = DEVICE_NAME.fullmatch(device)
    if match is None:
        raise ValueError(f"{device} is not a device name of EC2")
    number = 0
    for letter in match["letters"] or "a":  # /dev/sda1 is the first disk
        number = number * 26 + ord(letter) - ord("a") + 1
    return KINDS[match["kind"] or "sd"] + number
