"""What is rendered for machines that boot from HTTP or from the installer, and which disks are refused."""

import os

import pytest

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.exports.initramfs import Kernel, image_name, read_kernel, release_of, resolve
from gpukiln.exports.installer import BLOCK, grub_menu, read_content, render_map, write_installer
from gpukiln.exports.netboot import grub_snippet, ipxe_script, needed_mib, write_netboot

ARGUMENTS = ("console=tty0", "console=ttyS0,115200", "modprobe.blacklist=nouveau")


@pytest.fixture
def root(tmp_path):
    """As much of Debian's root as is looked at."""
    for folder in ("usr/lib/modules/6.1.0-9-amd64", "boot/grub", "etc/gpukiln"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "etc/os-release").symlink_to("../usr/lib/os-release")
    (tmp_path / "usr/lib/os-release").write_text(
        'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'
    )
    (tmp_path / "usr/lib/modules/6.1.0-9-amd64/modules.dep").write_text(
        "kernel/drivers/ata/ahci.ko: kernel/drivers/ata/libahci.ko\nkernel/drivers/usb/usb-storage.ko.xz:\n"
    )
    (tmp_path / "usr/lib/modules/6.1.0-9-amd64/modules.builtin").write_text("kernel/drivers/nvme/nvme.ko\n")
    (tmp_path / "boot/vmlinuz-6.1.0-9-amd64").write_text("a kernel")
    (tmp_path / "vmlinuz").symlink_to("boot/vmlinuz-6.1.0-9-amd64")
    (tmp_path / "boot/grub/grub.cfg").write_text(
        "menuentry 'Debian' {\n"
        f"  linux /vmlinuz root=UUID=1-2 ro quiet {' '.join(ARGUMENTS)}\n"
        "  initrd /initrd.img\n}\nmenuentry 'older' {\n  linux /boot/vmlinuz-5 root=UUID=1-2\n}\n"
    )
    return tmp_path


def kernel(*arguments: str) -> Kernel:
    return Kernel("6.1.0-9-amd64", os.devnull, arguments or ARGUMENTS, ())


def test_a_kernel_is_what_grub_boots_first_without_what_is_about_the_disk(root):
    found = read_kernel(root)
    assert (found.version, found.arguments) == ("6.1.0-9-amd64", ARGUMENTS)
    assert found.file.read_text() == "a kernel"
    assert not {"ahci", "nvme", "usb_storage"} & set(found.missing_drivers)
    assert "mlx5_core" in found.missing_drivers


@pytest.mark.parametrize("config", ["", "linux /vmlinuz-gone root=/dev/sda\n", "linux /etc/os-release\n"])
def test_a_disk_whose_grub_leads_to_no_kernel_is_refused(root, config):
    (root / "boot/grub/grub.cfg").write_text(config)
    with pytest.raises(IncompatibleError, match="names no kernel that exists"):
        read_kernel(root)


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ('ID=ubuntu\nPRETTY_NAME="Ubuntu 24.04"\nVERSION_CODENAME=noble\n', "casper and dracut-live"),
        ('ID="amzn"\nPRETTY_NAME="Amazon Linux 2023"\n', "its initramfs is dracut's"),
        ('ID="rocky"\nPRETTY_NAME="Rocky Linux 9.4"\n', "by dnf"),
        ('ID=debian\nPRETTY_NAME="Debian 10"\nVERSION_CODENAME=buster\n', "the disk has Debian 10"),
        ("", "the disk has no system with an os-release"),
    ],
)
def test_what_has_no_live_boot_is_refused_with_the_reason(root, release, reason):
    (root / "usr/lib/os-release").write_text(release)
    with pytest.raises(IncompatibleError, match=reason):
        release_of(root, "netboot")


def test_debian_is_taken(root):
    assert release_of(root, "netboot") == "bookworm"


def test_links_of_a_disk_stay_on_it(root):
    (root / "etc/passwd").symlink_to("/../../etc/shadow")
    assert resolve(root, "/etc/passwd") == root / "etc/shadow"
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(IncompatibleError, match="is a loop of links"):
        resolve(root, "/a")


def test_an_image_is_called_as_its_record_does(root):
    assert image_name(root) == "an image without a record"
    (root / "etc/gpukiln/image.json").write_text('{"image": "gpu-base"}')
    assert image_name(root) == "gpu-base"


def test_ipxe_is_told_all_that_the_kernel_needs():
    lines = ipxe_script(kernel(), "folder", "http://10.0.0.1:8080/gpu").splitlines()
    assert lines[0] == "#!ipxe"
    assert lines[1] == "set base http://10.0.0.1:8080/gpu"
    assert lines[2] == (
        "kernel ${base}/vmlinuz initrd=initrd.img boot=live nonetworking fetch=${base}/filesystem.squashfs"
        " console=tty0 console=ttyS0,115200 modprobe.blacklist=nouveau"
        " ds=nocloud;dsmode=net;s=${base}/seed/ cc:{datasource_list:[NoCloud,None]}"
    )
    assert "set base http://${next-server}/folder" in ipxe_script(kernel(), "folder", None)


def test_grub_is_told_the_same_in_its_quotes():
    text = grub_snippet(kernel(), "folder", "http://10.0.0.1:8080/gpu")
    assert "set base=http://10.0.0.1:8080/gpu\n" in text
    assert "linux (http,10.0.0.1:8080)/gpu/vmlinuz " in text
    assert '"ds=nocloud;dsmode=net;s=$base/seed/" "cc:{datasource_list:[NoCloud,None]}"' in text
    assert "(http,$net_default_server)/folder/initrd.img" in grub_snippet(kernel(), "folder", None)


@pytest.mark.parametrize("url", ["https://server/x", "http://server/a b", "http://server/$x", "ftp://server"])
def test_an_address_that_cannot_be_fetched_at_boot_is_refused(tmp_path, url):
    with pytest.raises(UsageError, match="can't fetch"):
        write_netboot(tmp_path / "disk.raw", tmp_path / "folder", url=url)
    with pytest.raises(UsageError, match="can't fetch"):
        write_installer(tmp_path / "disk.raw", tmp_path / "file.iso", url=url)


def test_what_is_there_is_not_overwritten(tmp_path):
    with pytest.raises(UsageError, match="exists already"):
        write_netboot(tmp_path / "disk.raw", tmp_path)
    (tmp_path / "file.iso").touch()
    with pytest.raises(UsageError, match="exists already"):
        write_installer(tmp_path / "disk.raw", tmp_path / "file.iso")


def test_a_word_that_grub_would_read_otherwise_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no argument of a kernel's command line"):
        write_installer(tmp_path / "disk.raw", tmp_path / "file.iso", arguments=["a=b; reboot"])


def test_memory_is_the_squashfs_and_the_system_in_steps():
    assert needed_mib(143_347_712) == 1280
    assert needed_mib(4 << 30) == 4096 + 1024 + 256


def test_the_installer_asks_where_the_image_itself_talks():
    def asked_first(*arguments: str) -> str:
        return grub_menu(kernel(*arguments), ["gpukiln.device=vda"], "it's").split("menuentry")[1]

    serial = asked_first(*ARGUMENTS)
    assert "(serial console)" in serial
    assert "'Write its to a disk" in serial  # no quote of a name ends GRUB's
    assert (
        "linux /boot/vmlinuz boot=gpukiln console=tty0 console=ttyS0,115200 modprobe.blacklist=nouveau"
        " gpukiln.device=vda\n"
    ) in serial
    assert "console=ttyS0,115200 console=tty0\n" in asked_first("console=ttyS0", "console=tty0").replace(
        " gpukiln.device=vda", ""
    )


def test_holes_and_zeros_are_not_content(tmp_path):
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(9 * BLOCK + 512)
        for block, data in ((2, b"a" * BLOCK), (3, b"b"), (5, bytes(BLOCK)), (7, b"c"), (9, b"d")):
            file.seek(block * BLOCK)
            file.write(data)
    content = read_content(disk)
    assert content.extents == ((2 * BLOCK, 2 * BLOCK), (7 * BLOCK, BLOCK), (9 * BLOCK, 512))
    assert render_map(content).splitlines()[-1] == f"{9 * BLOCK} 512"
