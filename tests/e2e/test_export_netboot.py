"""An image on machines without a disk of it: booted from HTTP, written to a named disk by the installer."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpukiln.clouds.embedded import accelerator
from gpukiln.clouds.embedded.base import current_base
from gpukiln.clouds.embedded.cluster.control_plane import free_ports
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.disks.loop import LoopDevice
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.sparse import copy_disk
from gpukiln.exports.installer import read_content, write_installer
from gpukiln.exports.netboot import write_netboot
from gpukiln.programs import tool
from tests.support.harness import BOOT_S, WAIT_FOR_CLOUD_INIT, one_connection, ssh, wait_for
from tests.support.served import served_folder

OVMF = Path("/usr/share/OVMF")
ROOT_MIB = 720  # fewer zeros to be written and read by an emulated processor
# Nor is this packed, fetched, written and read back by one. The machines have virtio, NVMe and a CD.
MODULES = {
    "": ("sound",),
    "drivers": (
        *("bluetooth", "comedi", "gpu", "hid", "hwmon", "i2c", "iio", "infiniband", "isdn", "media", "misc"),
        *("mmc", "mtd", "platform", "staging", "target", "usb", "video", "watchdog"),
        *("net/can", "net/ethernet", "net/phy", "net/usb", "net/wireless", "net/wwan", "scsi/*/"),
    ),
    "fs": ("btrfs", "ceph", "f2fs", "nfs", "nfsd", "ocfs2", "smb", "xfs"),
    "net": ("bluetooth", "bridge", "mac80211", "netfilter", "sched", "sunrpc", "wireless"),
}
UNUSED = (
    *(f"usr/share/{name}" for name in ("doc", "i18n", "locale", "man", "perl")),
    *("var/lib/apt/lists", "var/cache/apt"),
    *(f"lib/modules/*/kernel/{kind}/{name}" for kind, names in MODULES.items() for name in names),
)
RECORD = {"schema": 1, "image": "small"}
BLACKLIST = "modprobe.blacklist=nouveau"


@pytest.fixture(scope="module")
def disk(here) -> Path:
    """The base's disk, made small, with a record and with a kernel's argument as images have them."""
    layout = Layout(here.home)
    small = here.home / "small.raw"
    copy_disk(layout.snapshot(current_base(layout).snapshot_id), small)
    with mounted_root(small, writable=True) as root:
        for path in (path for pattern in UNUSED for path in root.glob(pattern)):
            shutil.rmtree(path)
        [modules] = (root / "lib/modules").iterdir()
        tool("depmod", "--basedir", str(root), modules.name)
        (root / "etc/gpukiln").mkdir()
        (root / "etc/gpukiln/image.json").write_text(json.dumps(RECORD))
        config = root / "boot/grub/grub.cfg"
        config.write_text(config.read_text().replace(" ro ", f" ro {BLACKLIST} ", 1))
        tool("fstrim", str(root))  # what was removed is zero
    table = json.loads(tool("sfdisk", "--json", str(small)))["partitiontable"]
    start = next(part["start"] for part in table["partitions"] if part["node"].endswith("raw1"))
    with contextlib.closing(LoopDevice(small, offset=start * 512)) as loop:
        tool("e2fsck", "-f", "-p", str(loop.path))
        tool("resize2fs", str(loop.path), f"{ROOT_MIB}M")
    lines = [line for line in tool("sfdisk", "--dump", str(small)).splitlines() if "last-lba" not in line]
    dump = re.sub(rf"(start= *{start}, size= *)\d+", rf"\g<1>{ROOT_MIB * 2048}", "\n".join(lines))
    with small.open("r+b") as file:
        file.truncate(start * 512 + (ROOT_MIB + 2 << 20))
    tool("sfdisk", "--quiet", "--no-reread", "--wipe=never", str(small), stdin=dump)
    return small


@contextlib.contextmanager
def qemu(log: Path, *arguments: str, memory_mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """A machine whose serial port is its standard input, and the log."""
    command = [
        *("qemu-system-x86_64", *accelerator.arguments(accelerator.processors()), "-m", str(memory_mib)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-device", "virtio-rng-pci"),
        *("-serial", "stdio", *arguments),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_machine_without_a_disk_boots_the_image_from_http(here, disk, key, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(here.home))
    folder, log, port = here.home / "served", tmp_path / "console.log", free_ports(1)[0]
    folder.mkdir()
    with served_folder(folder) as web:
        url = f"http://10.0.2.2:{web}/image"
        made = write_netboot(disk, folder / "image", url=url)
        tool("sh", "-c", f"cd {folder}/image && sha256sum --check --strict SHA256SUMS")
        public = key.with_suffix(".pub").read_text().strip()
        (folder / "image/seed/user-data").write_text(f"#cloud-config\nssh_authorized_keys: ['{public}']\n")
        network = f"user,id=net,bootfile={url}/boot.ipxe,hostfwd=tcp:127.0.0.1:{port}-:22"
        arguments = ("-netdev", network, "-device", "virtio-net-pci,netdev=net", "-boot", "order=n")
        with qemu(log, *arguments, memory_mib=made.memory_mib):

            def run(command: str) -> subprocess.CompletedProcess[str]:
                return ssh("127.0.0.1", str(port), key, command, options=one_connection(tmp_path / "ssh"))

            try:
                wait_for(lambda: run(WAIT_FOR_CLOUD_INIT).returncode == 0, BOOT_S)
            except AssertionError:
                pytest.fail(log.read_text(errors="replace")[-3000:])
            state = run("systemctl is-system-running --wait; systemctl --failed --no-legend").stdout
            assert state == "running\n"
            assert run("findmnt -no FSTYPE /").stdout == "overlay\n"
            assert json.loads(run("cat /etc/gpukiln/image.json").stdout) == RECORD
            assert BLACKLIST in run("cat /proc/cmdline").stdout
            assert f"{url}/seed/" in run("cloud-init status --long").stdout


def answer(process: subprocess.Popen[bytes], log: Path, *answers: tuple[str, str]) -> None:
    """Type each answer when its question has been asked, or what is wanted has been said."""
    seen = 0
    for question, text in answers:
        deadline = time.monotonic() + BOOT_S
        while (found := log.read_bytes().find(question.encode(), seen)) < 0:
            assert time.monotonic() < deadline, f"{question}: {log.read_text(errors='replace')[-3000:]}"
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        seen = found + len(question)
        if text:
            assert process.stdin
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()


def test_the_installer_writes_the_disk_that_is_named(here, disk, tmp_path, monkeypatch):
    """By UEFI, from a CD to NVMe; a right device with a wrong serial number is asked again."""
    monkeypatch.setenv("GPUKILN_HOME", str(here.home))
    medium, target, log = here.home / "installer.iso", here.home / "target.raw", tmp_path / "console.log"
    made = write_installer(disk, medium)
    assert made.bytes < disk.stat().st_blocks * 512
    with target.open("wb") as file:
        file.truncate(4 << 30)
    shutil.copy(OVMF / "OVMF_VARS_4M.fd", tmp_path / "vars.fd")
    arguments: Sequence[str] = (
        *("-machine", "q35", "-nic", "none"),
        *("-drive", f"if=pflash,format=raw,unit=0,readonly=on,file={OVMF}/OVMF_CODE_4M.fd"),
        *("-drive", f"if=pflash,format=raw,unit=1,file={tmp_path}/vars.fd"),
        *("-drive", f"if=none,id=cd,format=raw,readonly=on,media=cdrom,file={medium}"),
        *("-device", "virtio-scsi-pci", "-device", "scsi-cd,drive=cd,bootindex=0"),
        *("-drive", f"if=none,id=disk,format=raw,discard=unmap,cache=unsafe,file={target}"),
        *("-device", "nvme,drive=disk,serial=NVME-0042"),
    )
    with qemu(log, *arguments, memory_mib=1536) as process:
        answer(
            process,
            log,
            ("Device to be overwritten: ", "nvme0n1"),
            ("Its serial number, as above: ", "NVME-0043"),
            ("Its size, as above or in bytes: ", "4.3GB"),
            ("another serial number than 'NVME-0043'", ""),
            ("Device to be overwritten: ", "/dev/nvme0n1"),
            ("Its serial number, as above: ", "NVME-0042"),
            ("Its size, as above or in bytes: ", "4.3GB"),
            ("Done: nvme0n1 has small", ""),
            ("Take the medium out, then: reboot -f", "poweroff -f"),
        )
        process.wait(timeout=60)
    table = 34 * 512  # bytes at either end of the image; the second copy is moved to the disk's end
    with target.open("r+b") as file, disk.open("rb") as wanted:
        file.truncate(disk.stat().st_size)
        for place in (0, disk.stat().st_size - table):
            wanted.seek(place)
            file.seek(place)
            file.write(wanted.read(table))
    # what sgdisk changed is put back, the rest is as it was written
    assert read_content(target).sha256 == read_content(disk).sha256
