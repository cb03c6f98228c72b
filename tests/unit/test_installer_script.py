"""The installer's script on loop devices, by the shell and the tools of its initramfs."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpukiln.disks.convert import compress
from gpukiln.exports import installer
from tests.support.harness import wait_for
from tests.support.served import served_folder

MIB = 1 << 20
IMAGE_MIB, DISK_MIB = 48, 64
SERIAL = "S3R1AL 7"
SIZE = "0.1GB"
RIGHT = {"device": "vda", "serial": "S3R1AL-7", "size": str(DISK_MIB * MIB)}

pytestmark = pytest.mark.usefixtures("require_root_machine")


@dataclass
class Computer:
    """A made-up machine: what of sysfs the script reads, and disks that are loop devices."""

    folder: Path
    disk: Path  # what vda is
    image: Path

    @property
    def here(self) -> Path:
        return self.folder / "gpukiln"

    def run(self, typed: str = "", **arguments: str) -> subprocess.CompletedProcess[str]:
        words = " ".join(f"gpukiln.{key}={value}" for key, value in arguments.items())
        (self.folder / "proc/cmdline").write_text(f"boot=gpukiln console=ttyS0 {words}\n")
        trees = {f"GPUKILN_{name.upper()}": str(self.folder / name) for name in ("sys", "dev", "proc")}
        return subprocess.run(
            [shutil.which("busybox"), "sh", self.here / "installer.sh"],
            input=typed,
            env={"PATH": f"{self.folder}/tools:{self.folder}/busybox", "GPUKILN_WAIT_S": "1", **trees},
            capture_output=True,
            text=True,
            check=False,
        )

    def describe(self, name: str, loop: Path, **more: str) -> None:
        """A disk in sysfs; its numbers are the loop device's, so that what is mounted is found."""
        of = self.folder / "sys/block" / name
        (of / "holders").mkdir(parents=True)
        real = Path("/sys/block") / loop.name
        files = {"size": (real / "size").read_text(), "dev": (real / "dev").read_text(), "ro": "0\n", **more}
        for file, text in files.items():
            (of / file).write_text(text)
        (self.folder / "dev" / name).symlink_to(loop)

    def settings(self, **more: str) -> None:
        """Change what the script reads beside itself."""
        with (self.here / "settings").open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in more.items())


@contextlib.contextmanager
def loop(file: Path, *options: str) -> Iterator[Path]:
    path = subprocess.check_output(["losetup", "--find", "--show", *options, file], text=True).strip()
    try:
        yield Path(path)
    finally:
        subprocess.run(["losetup", "--detach", path], check=True)
        # it lives on, with its label, while somebody else on this computer looks at every disk
        wait_for(lambda: backing_file(path) != str(file), 60)


def backing_file(path: str) -> str:
    """Of a loop device; an empty string where it has none."""
    with contextlib.suppress(OSError):
        return Path("/sys/block", Path(path).name, "loop/backing_file").read_text().strip()
    return ""


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """A GPT disk with data in two places and nothing between them."""
    disk = tmp_path_factory.mktemp("image") / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(IMAGE_MIB * MIB)
        for offset in (2, 30):
            file.seek(offset * MIB)
            file.write(os.urandom(3 * MIB))
    subprocess.run(
        ["sfdisk", "--quiet", "--no-reread", disk],
        input="label: gpt\nstart=4096, size=20480\nstart=40960\n",
        text=True,
        check=True,
    )
    return disk


@pytest.fixture(scope="module")
def medium(image, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("medium")
    (folder / "tree").mkdir()
    packed = compress(image, folder / "tree" / installer.PACKED)
    content = installer.read_content(image)
    (folder / "settings").write_text(installer.render_settings(image, content, packed, None, "an image"))
    (folder / "map").write_text(installer.render_map(content))
    label = installer.label_of(content)
    # this host's kernel may not know ISO 9660
    command = ["mkfs.ext4", "-q", "-L", label, "-d", folder / "tree", folder / "ext4", f"{IMAGE_MIB}m"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    """What the initramfs has: BusyBox's applets, and before them the tools that are copied."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "busybox").mkdir()
    subprocess.run(["busybox", "--install", "-s", folder / "busybox"], check=True)
    (folder / "tools").mkdir()
    for tool in installer.TOOLS:
        (folder / "tools" / Path(tool).name).symlink_to(tool)
    return folder


@pytest.fixture(scope="module")
def before() -> bytes:
    """What is on a disk that nothing was written to."""
    return os.urandom(DISK_MIB * MIB)


@pytest.fixture
def computer(image, medium, tools, before, tmp_path) -> Iterator[Computer]:
    for name in ("busybox", "tools"):
        (tmp_path / name).symlink_to(tools / name)
    for name in ("gpukiln", "dev", "proc/self", "sys/class/block"):
        (tmp_path / name).mkdir(parents=True)
    script = Path(installer.__file__).with_name("installer.sh")
    for file in (script, medium / "settings", medium / "map"):
        shutil.copy(file, tmp_path / "gpukiln")
    (tmp_path / "proc/swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n")
    (tmp_path / "proc/self/mountinfo").symlink_to("/proc/self/mountinfo")
    disk = tmp_path / "vda.raw"
    disk.write_bytes(before)
    with loop(disk) as target, loop(medium / "ext4", "--read-only") as cd:
        found = Computer(tmp_path, disk, image)
        found.describe("vda", target, serial="S3R1AL-7\n")
        # the medium is a partition of sdm
        found.describe("sdm", cd)
        (tmp_path / "sys/block/sdm" / cd.name).mkdir()
        (tmp_path / "sys/block/sdm" / cd.name / "partition").write_text("1\n")
        (tmp_path / "sys/class/block" / cd.name).symlink_to(f"../../block/sdm/{cd.name}")
        yield found


def has_the_image(computer: Computer) -> None:
    """All of the image is there, its holes are zero, and the partition table knows the disk's end."""
    written, wanted = computer.disk.read_bytes(), computer.image.read_bytes()
    table = 34 * 512  # bytes of a GPT at either end, which sgdisk moved
    assert written[table : IMAGE_MIB * MIB - table] == wanted[table:-table]
    behind = [
        offset
        for offset in range(len(written) - MIB, len(written), 512)
        if any(written[offset : offset + 512])
    ]
    assert len(behind) == 2  # of the second table: its header, and its entries
    verified = subprocess.run(
        ["sgdisk", "--verify", computer.disk], capture_output=True, text=True, check=True
    )
    assert "No problems found" in verified.stdout
    assert written[-512:].startswith(b"EFI PART")


def test_the_disk_that_was_named_is_written(computer):
    done = computer.run(**RIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Done: vda has an image" in done.stdout
    has_the_image(computer)
    assert not (computer.here / "medium" / installer.PACKED).exists()  # unmounted


def test_answers_that_are_right_at_last_write_it(computer):
    done = computer.run("vdz\nvda\nwrong\n0.1GB\n/dev/vda\nS3R1AL-7\n0.1GB\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no disk 'vdz' here; wanted is one of: sdm vda" in done.stdout
    assert "vda has another serial number than 'wrong'" in done.stdout
    has_the_image(computer)


def _partition(computer: Computer) -> None:
    (computer.folder / "sys/block/vda/vda1").mkdir()
    (computer.folder / "sys/block/vda/vda1/partition").write_text("1\n")
    (computer.folder / "sys/class/block/vda1").symlink_to("../../block/vda/vda1")


def _attribute(name: str, text: str):
    return lambda computer: (computer.folder / "sys/block/vda" / name).write_text(text)


def _held(computer: Computer) -> None:
    (computer.folder / "sys/block/vda/holders/md0").mkdir()


def _swap(computer: Computer) -> None:
    with (computer.folder / "proc/swaps").open("a") as file:
        file.write("/dev/vda partition 1 0 -2\n")


def _damaged(computer: Computer) -> None:
    computer.settings(zst_sha256="0" * 64)


REFUSED = [
    (None, RIGHT | {"serial": "S3R1AL-8"}, "serial number 'S3R1AL-7', gpukiln.serial is 'S3R1AL-8'"),
    (None, RIGHT | {"size": "64MB"}, "67108864 bytes (0.1GB), gpukiln.size is '64MB'"),
    (None, {"device": "vda", "size": SIZE}, "gpukiln.serial is not on the kernel's command line"),
    (None, {"serial": "S3R1AL-7", "size": SIZE}, "gpukiln.device is not on the kernel's command line"),
    (None, RIGHT | {"device": "vdb"}, "there is no disk 'vdb' here"),
    (None, RIGHT | {"device": "sdm"}, "sdm is the medium that this installer was started from"),
    (_partition, RIGHT | {"device": "/dev/vda1"}, "vda1 is a partition of vda"),
    (_attribute("size", f"{IMAGE_MIB * 2048 - 1}\n"), RIGHT, "the image needs 50331648"),
    (_attribute("ro", "1\n"), RIGHT, "vda can only be read"),
    (_attribute("serial", "\n"), RIGHT, "serial number 'none'"),
    (_held, RIGHT, "vda is part of md0"),
    (_swap, RIGHT, "vda is swapped to"),
    (_damaged, RIGHT, "the image on the medium is damaged"),
]


@pytest.mark.parametrize(("change", "arguments", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_what_does_not_match_is_refused(computer, before, change, arguments, reason):
    if change:
        change(computer)
    done = computer.run(**arguments)
    assert done.returncode == 6, done.stdout + done.stderr
    assert reason in done.stdout
    assert done.stdout.endswith("Nothing was written.\n")
    assert computer.disk.read_bytes() == before


@pytest.mark.parametrize(
    "typed", ["vdz\n" * 3, "vda\nwrong\n0.1GB\n" * 3, "vda\nS3R1AL-7\n64GB\n" * 3, "vda\nS3R1AL-7\n", ""]
)
def test_what_is_not_answered_right_three_times_is_refused(computer, before, typed):
    done = computer.run(typed)
    assert done.returncode == 6, done.stdout + done.stderr
    assert done.stdout.endswith("Nothing was written.\n")
    assert computer.disk.read_bytes() == before


def test_a_mounted_disk_is_refused(computer, tmp_path):
    device = (computer.folder / "dev/vda").readlink()
    subprocess.run(["mkfs.ext4", "-q", device], check=True)
    (tmp_path / "mnt").mkdir()
    subprocess.run(["mount", device, tmp_path / "mnt"], check=True)
    try:
        done = computer.run(**RIGHT)
        (computer.folder / "proc/self/mountinfo").unlink()
        (computer.folder / "proc/self/mountinfo").touch()
        unseen = computer.run(**RIGHT)  # by another mount namespace: the kernel knows it still
    finally:
        subprocess.run(["umount", tmp_path / "mnt"], check=True)
    assert (done.returncode, unseen.returncode) == (6, 6), unseen.stdout + unseen.stderr
    assert "vda is mounted" in done.stdout
    assert "vda is in use" in unseen.stdout
    subprocess.run(["e2fsck", "-f", "-n", device], check=True, capture_output=True)


def test_what_is_read_back_otherwise_is_no_success(computer):
    computer.settings(data_sha256="0" * 64)
    done = computer.run(**RIGHT)
    assert done.returncode == 1
    assert f"has the SHA-256 {installer.read_content(computer.image).sha256}, wanted 000" in done.stdout


def test_without_its_medium_it_says_why(computer, before):
    computer.settings(label="GPUKILN_ELSEWHERE")
    done = computer.run(**RIGHT)
    assert done.returncode == 4
    assert "GPUKILN_ELSEWHERE is not seen by this kernel" in done.stdout
    assert computer.disk.read_bytes() == before


@pytest.fixture
def served(medium, tmp_path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    packed = (medium / "tree" / installer.PACKED).read_bytes()
    (folder / "whole").write_bytes(packed)
    (folder / "half").write_bytes(packed[: len(packed) // 2])
    with served_folder(folder) as port:
        yield f"http://127.0.0.1:{port}"


def test_the_image_comes_over_http(computer, served):
    computer.settings(url=f"{served}/whole", label="GPUKILN_ELSEWHERE")
    done = computer.run(**RIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    has_the_image(computer)


@pytest.mark.parametrize("name", ["half", "missing"])
def test_an_image_that_does_not_come_whole_is_no_success(computer, served, name):
    computer.settings(url=f"{served}/{name}")
    done = computer.run(**RIGHT)
    assert done.returncode == 1
    assert "Failed: vda is not whole" in done.stdout
