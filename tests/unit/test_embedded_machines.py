"""Which machines of the embedded EC2 are virtual: those whose disk, or its origin, comes from outside."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID

from gpukiln.clouds.embedded import accelerator, container, snapshot_blocks, volume_files
from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.clouds.embedded.gpus.machine_files import MachineFiles
from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machines import Machines, requested_kind
from gpukiln.clouds.embedded.volume_files import is_untrusted, mark_untrusted
from gpukiln.clouds.tags import MACHINE_TAG, TRUST_TAG
from gpukiln.disks.sparse import copy_disk
from gpukiln.errors import UnavailableError
from gpukiln.instances import tags

REGION = "us-west-2"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's")


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield boto3.client("ec2", region_name=REGION)


@pytest.mark.parametrize("asked", ["", "container", "privileged", "vm"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_strangers_disk_is_a_virtual_machine_whatever_tags_say(
    ec2: Any, tmp_path: Path, asked: str, outside: bool
) -> None:
    image_id = ec2.register_image(Name="disk", RootDeviceName="/dev/xvda")["ImageId"]
    [started] = ec2.run_instances(
        ImageId=image_id,
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tags.tag_specifications({MACHINE_TAG: asked} if asked else {"a": "b"}, "instance"),
    )["Instances"]
    layout = Layout(tmp_path)
    layout.snapshots.mkdir(parents=True)
    backend: Any = get_backend("ec2")[DEFAULT_ACCOUNT_ID][REGION]
    instance = backend.get_instance(started["InstanceId"])
    [(device, attached)] = instance.get_block_device_mapping
    instance.root_device_name = device
    volume = backend.volumes[attached.volume_id]
    volume.snapshot_id = "snap-0123456789abcdef0"
    disk = layout.snapshot(volume.snapshot_id)
    disk.write_bytes(b"disk")
    if outside:
        mark_untrusted(disk)
    assert Machines(layout).kind(instance) == ("vm" if outside else asked or "container")


def test_a_kind_that_is_none_names_those_that_are() -> None:
    with pytest.raises(ValueError, match="'privilegd', wanted one of container, privileged, vm"):
        requested_kind({MACHINE_TAG: "privilegd"})


@pytest.mark.parametrize(("trust", "outside"), [("", True), ("no", True), ("yes", False)])
def test_a_snapshot_that_is_written_block_by_block_is_from_outside(
    tmp_path: Path, trust: str, outside: bool
) -> None:
    layout = Layout(tmp_path)
    layout.snapshots.mkdir(parents=True)
    asked: dict[str, Any] = {"VolumeSize": 1}
    if trust:
        asked["Tags"] = [{"Key": TRUST_TAG, "Value": trust}]
    with mock_aws():
        ec2: Any = get_backend("ec2")[DEFAULT_ACCOUNT_ID][REGION]
        service = snapshot_blocks.SnapshotBlocks(layout)
        status, _headers, _body = service._start(ec2, asked)
    assert status == 201
    [file] = layout.snapshots.rglob("*snap-*")
    assert is_untrusted(file) is outside


def test_what_is_made_of_a_disk_from_outside_is_so_too(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for folder in (layout.snapshots, layout.volumes):
        folder.mkdir(parents=True)
    first, copied = layout.snapshot("snap-1"), layout.snapshot("snap-2")
    first.write_bytes(b"disk")
    mark_untrusted(first)
    volume = volume_files.make_disk(layout, "vol-1", size_gib=1, source=first)
    os.link(volume, copied)  # a snapshot of a volume that nobody writes to is a second name
    volume_files.make_writable(volume)  # and then a copy, in place
    assert all(map(is_untrusted, (first, volume, copied)))
    ours = layout.snapshot("snap-3")
    ours.write_bytes(b"disk")
    copy_disk(ours, layout.snapshot("snap-4"))
    assert not is_untrusted(layout.snapshot("snap-4"))
    assert not is_untrusted(layout.snapshot("snap-5"))  # it has no disk


def test_a_link_on_a_disk_leads_to_the_disk(tmp_path: Path) -> None:
    """With plain paths this very link leads to the file of this computer."""
    root, ours = tmp_path / "root", tmp_path / "ours"
    (root / str(tmp_path)[1:]).mkdir(parents=True)
    ours.write_text("of this computer")
    (root / "link").symlink_to(ours)
    (root / "up").symlink_to("../ours")
    for name, inside in (("link", root / str(ours)[1:]), ("up", root / "ours")):
        assert (root / name).resolve() == ours
        in_root(root, lambda name=name: Path("/", name).write_text("of the disk"))  # type: ignore[misc]
        assert inside.read_text() == "of the disk"
    assert ours.read_text() == "of this computer"
    with pytest.raises(FileNotFoundError, match="/none"):
        in_root(root, lambda: Path("/none").read_text())
    assert Path.cwd() != Path("/")  # other threads are where they were


def test_nodes_are_null_where_this_kernel_has_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MachineFiles(tmp_path)
    monkeypatch.setattr(State, "rows", lambda _: {"gpus.count": "2"})
    nodes = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255)}
    for devices, wanted in (
        ("Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n", nodes),
        ("Character devices:\n  1 mem\n195 nvidia-frontend\n", dict.fromkeys(nodes, (1, 3))),
    ):
        monkeypatch.setattr(Path, "read_text", lambda _, devices=devices: devices)
        found = container._gpu_nodes(files)
        assert {name: (os.major(number), os.minor(number)) for name, number in found.items()} == wanted


@pytest.mark.parametrize(("text", "processors"), [("", os.cpu_count()), ("1", 1), ("3", 3)])
def test_the_environment_sets_the_processors_of_virtual_machines(
    monkeypatch: pytest.MonkeyPatch, text: str, processors: int
) -> None:
    monkeypatch.setenv(accelerator.PROCESSORS, text)
    assert accelerator.processors() == processors


@pytest.mark.parametrize(
    ("kvm", "vcpus", "wanted"), [(False, 1, "1,maxcpus=2"), (False, 2, "2"), (True, 1, "1"), (True, 2, "2")]
)
def test_the_only_processor_of_an_emulated_machine_keeps_its_memory_barriers(
    monkeypatch: pytest.MonkeyPatch, kvm: bool, vcpus: int, wanted: str
) -> None:
    """Without them, a guest and a device can both miss what the other has just written.

    Measured with QEMU 7.2: a guest and a program share a page (ivshmem); each writes one word, executes
    `lock addl`, and reads the other's. Of 300,000 rounds, both read the old value in 43 and in 216 with
    `-smp 1`, and in none with `1,maxcpus=2` and with 2.
    """
    monkeypatch.setattr(accelerator, "_kvm_works", lambda: kvm)
    assert accelerator.arguments(vcpus)[-2:] == ("-smp", wanted)


def test_an_emulated_processor_without_erms_has_no_fsrm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with QEMU 10.0.2: with FSRM alone, Linux 6.1 stops while it starts its security modules."""
    monkeypatch.setattr(accelerator, "_kvm_works", lambda: False)
    arguments = accelerator.arguments(1)
    processor = arguments[arguments.index("-cpu") + 1].split(",")
    assert ("erms=off" in processor) is ("fsrm=off" in processor)


@pytest.mark.parametrize(
    ("flags", "works"),
    [("fpu vmx ssse3", True), ("fpu svm", True), ("fpu hypervisor lm", False), ("", False)],
)
def test_kvm_is_not_tried_on_a_processor_without_virtualization(
    tmp_path: Path, flags: str, works: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: svm_is_no_bug\n")
    assert accelerator._has_virtualization(tmp_path / "cpuinfo") == works


@pytest.mark.parametrize("text", ["0", "256", "-1", "two", "1.5"])
def test_another_number_of_processors_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(accelerator.PROCESSORS, text)
    with pytest.raises(
        UnavailableError, match=f"GPUKILN_MACHINE_CPUS is '{text}', wanted a number from 1 to 255"
    ):
        accelerator.processors()
