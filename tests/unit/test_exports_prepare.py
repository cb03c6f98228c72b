"""Disks are prepared where they lie: cloud-init's source, the size, the record."""

import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from gpukiln.clouds.embedded.hardware import firmware_of
from gpukiln.disks.build import EFI_FILE, ESP_START, build_disk
from gpukiln.disks.grow import fit_root
from gpukiln.disks.loop import LoopDevice
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.sparse import copy_disk
from gpukiln.disks.table import BOOT_CODE, SECTOR, root_partition
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.exports.firmware import BootSupport, find_boot_support
from gpukiln.exports.prepare import CONFIG, RECORD, prepare
from gpukiln.programs import tool

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me@here"
IMAGE = '{"image": "eks-gpu"}\n'
OTHERS = {
    "etc/cloud/cloud.cfg.d/20_ec2.cfg": "datasource_list: [Ec2]\nnetwork:\n  config: disabled\n",
    "etc/cloud/cloud.cfg.d/99-local.cfg": "datasource_list: [Azure]\n",
    "etc/cloud/ds-identify.cfg": "datasource: Ec2\n",
    RECORD: IMAGE,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A disk as the base's, with little on it."""
    root = tmp_path_factory.mktemp("root")
    for name, text in OTHERS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    disk = tmp_path_factory.mktemp("disk") / "made.raw"
    build_disk(root, disk, size_gib=1)
    return disk


@pytest.fixture
def disk(made, tmp_path):
    copy_disk(made, tmp_path / "disk.raw")
    return tmp_path / "disk.raw"


def texts(disk: Path) -> dict[str, str]:
    with mounted_root(disk) as root:
        return {name: (root / name).read_text() for name in (*OTHERS, CONFIG) if (root / name).exists()}


def change(disk: Path, commands: str) -> None:
    """What somebody did to the root file system, as debugfs is told."""
    offset = root_partition(disk).offset
    tool("debugfs", "-w", "-f", "-", f"{disk}?offset={offset}", stdin=commands)


@pytest.mark.parametrize(
    ("datasource", "keys", "settings"),
    [
        ("nocloud", (), {"datasource_list": ["NoCloud", "None"]}),
        ("none", (KEY,), {"datasource_list": ["None"], "ssh_authorized_keys": [KEY]}),
    ],
)
def test_cloud_init_asks_nobody_but_the_source(disk, datasource, keys, settings):
    prepare(disk, datasource=datasource, ssh_keys=keys)
    found = texts(disk)
    assert yaml.safe_load(found[CONFIG]) == settings
    listed = f"datasource_list: [{', '.join(settings['datasource_list'])}]"  # as ds-identify wants it
    assert listed in found[CONFIG].splitlines()
    assert found.keys() == {"etc/cloud/cloud.cfg.d/99-local.cfg", CONFIG, RECORD}
    # cloud-init reads them in this order, and the last one wins
    assert max(name for name in found if name.startswith("etc/cloud/")) == CONFIG


def test_the_record_says_what_the_machine_is_and_what_was_proven(disk):
    proven = hashlib.sha256(IMAGE.encode()).hexdigest()
    prepare(disk, datasource="nocloud")
    assert json.loads(texts(disk)[RECORD]) == {
        "image": "eks-gpu",
        "exported": {"datasource": "nocloud", "record_sha256": proven},
    }
    prepare(disk, datasource="none", ssh_keys=[KEY])
    exported = json.loads(texts(disk)[RECORD])["exported"]
    assert exported == {"datasource": "none", "record_sha256": proven}


def test_a_key_alone_leaves_the_source_as_it_was(disk):
    prepare(disk, ssh_keys=["# of the team", KEY, ""])
    found = texts(disk)
    assert yaml.safe_load(found.pop(CONFIG)) == {"ssh_authorized_keys": [KEY]}
    assert found == OTHERS


def test_a_disk_without_a_record_is_somebodys(disk):
    change(disk, f"rm /{RECORD}\n")
    prepare(disk, datasource="nocloud")
    assert RECORD not in texts(disk)


def test_a_disk_grows_and_its_table_with_it(disk):
    prepare(disk, size_gib=3)
    assert disk.stat().st_size == 3 << 30
    assert texts(disk) == OTHERS
    assert "No problems found" in tool("sgdisk", "--verify", str(disk))
    fit_root(disk)
    part = root_partition(disk)
    assert part.offset + part.size > (3 << 30) - (2 << 20)
    with mounted_root(disk) as root:
        assert int(tool("stat", "-f", "-c", "%b", str(root))) * 4096 > 2.8 * (1 << 30)


def mounts_of(disk: Path) -> list[str]:
    """Where a disk is mounted."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, folder, *_ = line.split()
        backing = Path("/sys/block", Path(device).name, "loop/backing_file")
        if device.startswith("/dev/loop") and backing.exists() and backing.read_text().strip() == str(disk):
            found.append(folder)
    return found


def test_what_a_killed_process_had_mounted_is_unmounted_by_the_next(disk, tmp_path):
    def killed() -> None:
        with mounted_root(disk, writable=True):
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        killed()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    [folder] = mounts_of(disk)
    with mounted_root(disk, writable=True) as used:  # what is used stays
        copy_disk(disk, tmp_path / "other.raw")
        with mounted_root(tmp_path / "other.raw"):
            assert mounts_of(disk) == [str(used)] != [folder]
    assert mounts_of(disk) == []
    assert not Path(folder).exists()


def test_a_disk_that_another_device_still_holds_is_mounted(disk):
    """As the device of before lives on while another process looks at it."""
    with contextlib.closing(LoopDevice(disk, offset=root_partition(disk).offset)):
        assert texts(disk) == OTHERS
        prepare(disk, datasource="nocloud")
        assert CONFIG in texts(disk)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"datasource": "openstack"}, "not one of nocloud, none"),
        ({"datasource": "none"}, "no user could log in"),
        ({"datasource": "none", "ssh_keys": ["# mine"]}, "no user could log in"),
        ({"ssh_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}, "no SSH public key"),
        ({"size_gib": 0}, "can't be shrunk to 0 GiB"),
    ],
)
def test_what_is_refused_leaves_the_disk_alone(disk, asked, said):
    before = disk.stat()
    with pytest.raises(UsageError, match=said):
        prepare(disk, **asked)
    assert (disk.stat().st_mtime_ns, disk.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_a_link_on_the_disk_leads_to_no_file_of_this_computer(disk, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    change(
        disk,
        f"rm /etc/cloud/cloud.cfg.d/20_ec2.cfg\nrm /etc/cloud/cloud.cfg.d/99-local.cfg\n"
        f"rmdir /etc/cloud/cloud.cfg.d\nsymlink /etc/cloud/cloud.cfg.d {here}\n",
    )
    with pytest.raises(IncompatibleError, match="leads out of it"):
        prepare(disk, datasource="nocloud")
    assert not list(here.iterdir())
    assert str(disk.parent) not in Path("/proc/mounts").read_text()


def test_a_disk_without_cloud_init_is_exported_as_it_is(disk):
    change(
        disk,
        "rm /etc/cloud/ds-identify.cfg\nrm /etc/cloud/cloud.cfg.d/20_ec2.cfg\n"
        "rm /etc/cloud/cloud.cfg.d/99-local.cfg\nrmdir /etc/cloud/cloud.cfg.d\nrmdir /etc/cloud\n",
    )
    size = disk.stat().st_size
    with pytest.raises(IncompatibleError, match="has no cloud-init"):
        prepare(disk, datasource="nocloud", size_gib=2, begin=lambda: pytest.fail("it is not changed"))
    assert disk.stat().st_size == size


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        # the disks of before the EFI system partition
        (
            "label: gpt\n14 : start=2048, size=2048, type=21686148-6449-6E6F-744E-656564454649\n"
            "1 : start=4096, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709\n",
            (1, 4096, "bios"),
        ),
        # Debian's installer: a root beside its swap
        (
            "label: gpt\n1 : start=2048, size=4096, type=U\n2 : start=6144, size=90000, type=L\n"
            "3 : start=98304, type=S\n",
            (2, 6144, "uefi"),
        ),
        (
            "label: gpt\n1 : start=2048, size=9000, type=L\n2 : start=12288, size=90000, type=L\n",
            (2, 12288, "bios"),
        ),
        ("label: dos\n1 : start=2048, type=83, bootable\n", (1, 2048, "bios")),
    ],
)
def test_the_root_is_where_the_partition_table_says(tmp_path, table, wanted):
    disk = tmp_path / "other.raw"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    tool("sfdisk", "--quiet", str(disk), stdin=table)
    part = root_partition(disk)
    assert (part.number, part.offset // 512, firmware_of(disk)) == wanted


MODULES = "usr/lib/modules"


@pytest.mark.parametrize(
    ("kernels", "wanted"),
    [
        (
            {
                f"{MODULES}/6.1.0-9-amd64/modules.dep": "kernel/drivers/ata/ahci.ko: kernel/libata.ko\n",
                f"{MODULES}/6.1.0-9-amd64/modules.builtin": "",
                f"{MODULES}/6.1.0-56-cloud-amd64/modules.dep": (
                    "kernel/drivers/block/virtio_blk.ko.xz:\nkernel/drivers/scsi/virtio_scsi.ko.xz:\n"
                    "kernel/drivers/net/virtio_net.ko.xz: kernel/net/e1000e.ko.xz\n"
                ),
                f"{MODULES}/6.1.0-56-cloud-amd64/modules.builtin": "kernel/drivers/nvme/host/nvme.ko\n",
                f"{MODULES}/6.1.0-99-gone/modules.builtin": "kernel/drivers/ata/ahci.ko\n",
            },
            BootSupport("6.1.0-56-cloud-amd64", ("bios", "uefi"), ("virtio", "scsi", "nvme"), ("virtio",)),
        ),
        ({}, BootSupport("", ("bios", "uefi"), (), ())),
    ],
)
def test_what_a_disk_boots_on(tmp_path, kernels, wanted):
    root, disk = tmp_path / "root", tmp_path / "disk.raw"
    for name, text in {"etc/fstab": "", **kernels}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "lib").symlink_to("usr/lib")
    build_disk(root, disk, size_gib=1)
    assert find_boot_support(disk) == wanted
    tool("mdel", "-i", f"{disk}@@{ESP_START * SECTOR}", f"::{EFI_FILE}")
    with disk.open("r+b") as file:
        file.write(bytes(BOOT_CODE))
    assert find_boot_support(disk).firmware == ()


def test_a_uefi_boots_a_disk_with_an_mbr(tmp_path):
    """UEFI 2.10, 5.2.2: an EFI system partition of an MBR has the type 0xEF."""
    disk, loader, root = tmp_path / "mbr.raw", tmp_path / "loader", tmp_path / "root"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    tool("sfdisk", "--quiet", str(disk), stdin="label: dos\nstart=2048, size=8192, type=ef\nstart=16384\n")
    tool("mkfs.fat", "--offset", "2048", str(disk), "4096")
    for folder in ("::EFI", "::EFI/BOOT"):
        tool("mmd", "-i", f"{disk}@@{2048 * SECTOR}", folder)
    loader.write_bytes(b"a boot loader")
    tool("mcopy", "-i", f"{disk}@@{2048 * SECTOR}", str(loader), f"::{EFI_FILE}")
    root.mkdir()
    tool("mkfs.ext4", "-q", "-F", "-d", str(root), "-E", f"offset={16384 * SECTOR}", str(disk), "40M")
    assert find_boot_support(disk).firmware == ("uefi",)


def test_a_disk_without_a_root_is_told(tmp_path):
    disk = tmp_path / "other.raw"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    tool("sfdisk", "--quiet", str(disk), stdin="label: gpt\n1 : start=2048, type=V\n")
    with pytest.raises(UnavailableError, match="types are E6D6D379-F507-44C2-A23C-238F2A3DF928"):
        prepare(disk, datasource="nocloud")
