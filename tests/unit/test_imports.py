"""ami.import: what becomes an image and what does not, whatever happens to a call or to the process."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpukiln.clouds.embedded.volume_files import is_untrusted
from gpukiln.disks import identify, sparse
from gpukiln.errors import IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.exports import ebs, import_disk, run
from gpukiln.images.subject import subject_from_tags
from gpukiln.instances.orphans import find_orphans, remove_orphans
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline.verdict_tags import summaries_from_tags
from tests.support.exports import boot_disk, image_with_disk
from tests.support.kill_points import files_in, mask_varying, run_killed_at, select_steps, steps_of
from tests.support.release_cloud import HOME, Cloud, fault, fault_each, images, quiet, server, tell

BIOS = "label: gpt\nstart=2048, size=2048, type=21686148-6449-6E6F-744E-656564454649\n"
ROOT = "start=20480, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709\n"
LINUX = "start=20480, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4\n"
ARM = "start=20480, type=B921B045-1DF0-41C3-AF44-4C6F280D3FAE\n"
ESP = "start=4096, size=8192, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n"
SAYS = import_disk.ImportOptions(base="debian-12", driver="535.309.01", modules="proprietary")
PUT = "PutSnapshotBlock"


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path, empty_cloud):  # noqa: ARG001 - each test begins with an empty cloud
    monkeypatch.setattr(ebs, "FIRST_WAIT_S", 0.005)
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))


@pytest.fixture
def golden(tmp_path):
    file = tmp_path / "golden.img"
    boot_disk(file, BIOS + ROOT)
    return file


def look(file, says=SAYS):
    return import_disk.read_disk_file(file, says, quiet())


def bring_in(file, says=SAYS):
    return import_disk.import_image(look(file, says), Cloud(), quiet())


def snapshots():
    """Those of imports, with their states."""
    ours = [{"Name": "tag-key", "Values": ["gpukiln:import"]}]
    found = Cloud().client("ec2").describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]
    return {one["SnapshotId"]: one["State"] for one in found}


def left(tmp_path):
    folder = tmp_path / "home/imports"
    return sorted(one.name for one in folder.iterdir() if one.suffix != ".lock") if folder.exists() else []


def puts():
    return [kind for _, action, kind in tell("calls") if action == PUT]


def require_same(file, snapshot_id):
    disk = Cloud().snapshot_disk(snapshot_id)
    command = ["qemu-img", "compare", "-f", "raw", "-F", "raw", str(file), str(disk)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert disk.stat().st_size == 1 << 30
    assert sparse.data_bytes(disk) < 12 << 20  # what is zeros was not sent


def test_a_disk_becomes_an_image_that_nobody_proved(golden, tmp_path):
    made = bring_in(golden)
    assert (made.found, made.architecture, made.boot_mode, made.size_gib) == (
        False,
        "x86_64",
        "legacy-bios",
        1,
    )
    [image] = images(HOME).values()
    assert image["ImageId"] == made.image_id
    assert (image["State"], image["RootDeviceName"], image["BootMode"]) == (
        "available",
        "/dev/xvda",
        "legacy-bios",
    )
    tags = tags_of(image)
    assert (tags["gpukiln:image"], tags["gpukiln:import"]) == ("not-proven", made.sha256)
    assert summaries_from_tags(made.image_id, tags) == {}
    subject = subject_from_tags(made.image_id, tags)  # ami.verify needs no more
    assert (subject.ssh_user, subject.driver, subject.profile) == ("admin", "535.309.01", "image")
    assert snapshots() == {made.snapshot_id: "completed"}
    require_same(golden, made.snapshot_id)
    assert left(tmp_path) == []
    with pytest.raises(Exception, match="it has no verdict of a machine"):
        run.plan(run.ExportOptions(tmp_path / "a.raw"), Cloud(), made.image_id, None)

    again = bring_in(golden)
    assert (again.found, again.image_id, again.blocks_written) == (True, made.image_id, 0)


def test_a_qcow2_becomes_the_same_disk(golden, tmp_path):
    file = tmp_path / "golden.qcow2"
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(golden), str(file)], check=True)
    made = bring_in(file)
    require_same(golden, made.snapshot_id)
    assert left(tmp_path) == []


def test_what_was_exported_comes_back_without_a_word(tmp_path):
    image_id, disk = image_with_disk(mib=64)
    boot_disk(disk, BIOS + ROOT)
    run.export(run.ExportOptions(tmp_path / "a.qcow2"), Cloud(), image_id, None, quiet())
    made = bring_in(tmp_path / "a.qcow2", import_disk.ImportOptions())
    tags = tags_of(images(HOME)[made.image_id])
    assert tags["gpukiln:driver"] == "535.309.01"
    assert (tags["gpukiln:image"], tags.get("gpukiln:verdict")) == ("not-proven", None)
    require_same(disk, made.snapshot_id)


def test_every_call_may_be_lost_and_every_block_damaged(golden):
    tell(
        "faults",
        [
            *(fault_each(PUT, kind) for kind in ("lost", "throttled", "corrupted", "broken")),
            *(fault(action, "lost") for action in ("StartSnapshot", "CompleteSnapshot", "RegisterImage")),
        ],
    )
    made = bring_in(golden)
    tell("faults", [])
    assert list(images(HOME)) == [made.image_id]
    assert snapshots() == {made.snapshot_id: "completed"}
    require_same(golden, made.snapshot_id)


def test_interrupted_it_goes_on_with_the_rest(golden, tmp_path, monkeypatch):
    disk, written = look(golden), []

    def interrupted(*_):
        raise KeyboardInterrupt

    direct = ebs._put_block

    def put(client, snapshot_id, index, data):
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(index)
        direct(client, snapshot_id, index, data)

    with monkeypatch.context() as patch:
        patch.setattr(ebs, "WORKERS", 1)
        patch.setattr(ebs, "_put_block", put)
        with pytest.raises(KeyboardInterrupt):
            import_disk.import_image(disk, Cloud(), quiet())
    assert images(HOME) == {}
    assert list(snapshots().values()) == ["pending"]
    puts()
    made = import_disk.import_image(disk, Cloud(), quiet())
    assert made.blocks_kept == 4
    assert len(puts()) == made.blocks_written > 0
    assert snapshots() == {made.snapshot_id: "completed"}
    require_same(golden, made.snapshot_id)
    assert left(tmp_path) == []

    # ended between the snapshot and the image: the next run makes the image of it
    other = replace(disk, sha256="0" * 64, tags={**disk.tags, "gpukiln:import": "0" * 64})
    monkeypatch.setattr(import_disk, "_register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_disk.import_image(other, Cloud(), quiet())
    monkeypatch.undo()
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    puts()
    import_disk.import_image(other, Cloud(), quiet())
    assert len(snapshots()) == len(images(HOME)) == 2
    assert puts() == []


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_killed_anywhere_and_typed_again_it_is_as_if_never_killed(golden, tmp_path, form):
    file, home = tmp_path / f"disk.{form}", tmp_path / "home"
    subprocess.run(["qemu-img", "convert", "-O", form, str(golden), str(file)], check=True)

    def empty():
        tell("reset")
        shutil.rmtree(home, ignore_errors=True)

    def state():
        for snapshot_id in snapshots():
            require_same(golden, snapshot_id)
        there = Cloud().client("ec2").describe_snapshots(SnapshotIds=[*snapshots()])["Snapshots"]
        folder = server()[1].snapshots
        unfinished = sorted(one.name for one in folder.glob(".*"))
        return mask_varying([list(images(HOME).values()), there]), unfinished, files_in(home)

    bring_in(file)
    undisturbed = state()
    empty()
    steps = steps_of(lambda: bring_in(file), home)
    assert {"StartSnapshot", PUT, "CompleteSnapshot", "RegisterImage"} <= set(steps)
    for number in select_steps(steps):
        empty()
        assert run_killed_at(number, lambda: bring_in(file), home)
        bring_in(file)
        assert state() == undisturbed, steps[number - 1]


def test_a_snapshot_that_is_gone_is_begun_anew(golden, monkeypatch):
    disk = look(golden)
    with monkeypatch.context() as patch:
        patch.setattr(ebs, "_wait_completed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_disk.import_image(disk, Cloud(), quiet())
    [snapshot_id] = snapshots()
    Cloud().client("ec2").delete_snapshot(SnapshotId=snapshot_id)
    made = import_disk.import_image(disk, Cloud(), quiet())
    assert made.snapshot_id != snapshot_id
    require_same(golden, made.snapshot_id)


@pytest.mark.parametrize("action", [PUT, "CompleteSnapshot", "RegisterImage"])
def test_a_refusal_leaves_no_half_snapshot(golden, tmp_path, action):
    tell("faults", [fault(action, "denied", times=1000)])
    with pytest.raises(UnavailableError, match=r"AccessDenied|UnauthorizedOperation"):
        bring_in(golden)
    assert snapshots() == {}
    assert images(HOME) == {}
    tell("faults", [])
    bring_in(golden)
    assert left(tmp_path) == []


def test_where_deleting_it_is_refused_too_the_sweep_finds_it(golden):
    tell("faults", [fault(PUT, "denied", times=1000), fault("DeleteSnapshot", "denied", times=5)])
    with pytest.raises(UnavailableError) as refused:
        bring_in(golden)
    assert "cloud.sweep" in refused.value.__notes__[0]
    tell("faults", [])
    [snapshot_id] = snapshots()
    assert find_orphans(Cloud()) == []  # somebody may be writing it
    found = find_orphans(Cloud(), now=datetime.now(UTC) + timedelta(days=2))
    assert [(one.kind, one.id) for one in found] == [("snapshot", snapshot_id)]
    remove_orphans(Cloud(), found, lambda _: None)
    assert snapshots() == {}
    assert not list(Cloud().snapshot_disk(snapshot_id).parent.glob(".*.partial"))


def test_a_throttle_that_lasts_keeps_what_is_written(golden, monkeypatch):
    monkeypatch.setattr(ebs, "ATTEMPTS", 2)
    tell("faults", [fault(PUT, "throttled", skip=3, times=1000)])
    with pytest.raises(UnavailableError, match="RequestThrottled") as failed:
        bring_in(golden)
    assert "the same command resumes" in failed.value.__notes__[0]
    tell("faults", [])
    assert bring_in(golden).blocks_kept == 3


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (BIOS + ROOT, ("gpt", "x86_64", "legacy-bios")),
        ("label: gpt\n" + ESP + ROOT, ("gpt", "x86_64", "uefi")),
        (BIOS + ESP + LINUX, ("gpt", "x86_64", "uefi-preferred")),
        (BIOS + ESP + ARM, ("gpt", "arm64", "uefi")),
        ("label: dos\nstart=2048, type=83, bootable\n", ("dos", "x86_64", "legacy-bios")),
        (
            "label: dos\nstart=2048, size=2048, type=ef\nstart=8192, type=83\n",
            ("dos", "x86_64", "uefi-preferred"),
        ),
    ],
)
def test_machine_and_firmware_are_read_off_the_disk(tmp_path, table, found):
    boot_disk(tmp_path / "disk", table)
    looked = identify.inspect_disk(tmp_path / "disk")
    assert (looked.table, looked.architecture, looked.boot_mode) == found


def test_a_disk_for_another_machine_than_its_profile_is_refused(tmp_path):
    boot_disk(tmp_path / "disk", BIOS + ESP + ARM)
    with pytest.raises(IncompatibleError, match="a disk for arm64"):
        bring_in(tmp_path / "disk")
    assert snapshots() == {}


def test_the_loader_in_the_esp_says_the_machine(tmp_path):
    boot_disk(tmp_path / "disk", "label: gpt\n" + ESP + LINUX)
    with (tmp_path / "disk").open("r+b") as file:
        file.seek(4096 * 512 + (1 << 20) - 3)
        file.write(b"BOOTAA64EFI")
    assert identify.inspect_disk(tmp_path / "disk").architecture == "arm64"


def damaged(golden, how):
    with golden.open("r+b") as file:
        if how == "cut":
            file.truncate(16 << 20)
        elif how == "cut in the table":
            file.truncate(1024)
        elif how == "no table":
            file.write(bytes(512))
        elif how == "GPT damaged":
            file.seek(512 + 60)
            file.write(b"x")
        elif how == "no GPT":
            file.seek(512)
            file.write(bytes(512))
        elif how == "empty":
            file.truncate(0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "is truncated or empty"),
        ("cut in the table", "truncated within its GPT"),
        ("no table", "has no partition table"),
        ("GPT damaged", "GPT is damaged"),
        ("no GPT", "a protective MBR and no GPT"),
        ("empty", "has no partition table"),
    ],
)
def test_what_is_no_disk_is_refused_before_anything_is_asked(golden, how, says):
    damaged(golden, how)
    with pytest.raises(IncompatibleError, match=says):
        bring_in(golden)
    assert snapshots() == {}


def test_a_disk_that_nothing_boots_and_a_partition_are_refused(tmp_path):
    boot_disk(tmp_path / "disk", "label: gpt\n" + LINUX)
    with pytest.raises(IncompatibleError, match="does not boot"):
        look(tmp_path / "disk")
    boot_disk(tmp_path / "empty", "label: gpt\n")
    with pytest.raises(IncompatibleError, match="its table has no partition"):
        look(tmp_path / "empty")
    with pytest.raises(UsageError, match="is no file"):
        look(tmp_path / "none")


@pytest.mark.parametrize("kind", ["backing file", "data file"])
def test_a_qcow2_that_names_other_files_is_refused(golden, tmp_path, kind):
    """Converting it would put a file of this machine into an image."""
    file = tmp_path / "evil.qcow2"
    options = (
        ["-b", str(golden), "-F", "raw"] if kind == "backing file" else ["-o", f"data_file={tmp_path}/x"]
    )
    size = [] if kind == "backing file" else ["64M"]
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, str(file), *size], check=True)
    with pytest.raises(IncompatibleError, match=f"needs its {kind}"):
        bring_in(file)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"KDMV", "has the format vmdk, wanted raw or qcow2"),
        (b"conectix", "has the format vhd, wanted raw or qcow2"),
        (b"\x28\xb5\x2f\xfd", "has the format zstd, wanted raw or qcow2"),
        (b"QFI\xfb", "not a complete qcow2 file"),
    ],
)
def test_other_forms_are_named(tmp_path, head, says):
    file = tmp_path / "disk.img"
    file.write_bytes(head + bytes(4096))
    with pytest.raises(IncompatibleError, match=says) as refused:
        look(file)
    assert refused.value.hint


def test_somebody_has_to_say_what_is_on_it(golden):
    with pytest.raises(UsageError, match=r"the description of .* is incomplete.*: --driver, --modules"):
        look(golden, import_disk.ImportOptions(base="debian-12"))
    with pytest.raises(UsageError, match="there is no such kind"):
        look(golden, replace(SAYS, modules="closed"))
    with pytest.raises(UsageError):
        look(golden, replace(SAYS, base="windows"))
    with pytest.raises(IncompatibleError):
        look(golden, replace(SAYS, instance_types=("p6-b200.48xlarge",)))
    golden.with_name("golden.img.json").write_text(json.dumps({"tags": ["wrong"]}))
    with pytest.raises(UsageError, match="can't be read"):
        look(golden)


def test_a_file_that_is_written_to_is_refused(golden, monkeypatch):
    def changed(file, _):
        os.utime(file, (1, 1))
        return "0" * 64

    monkeypatch.setattr(sparse, "sha256", changed)
    with pytest.raises(UnavailableError, match="changed while it was read"):
        look(golden)


def test_another_image_of_its_name_is_not_taken_for_it(golden):
    made = bring_in(golden)
    Cloud().client("ec2").delete_tags(Resources=[made.image_id], Tags=[{"Key": "gpukiln:import"}])
    with pytest.raises(UnavailableError, match="was not made of"):
        bring_in(golden)


def test_a_disk_is_trusted_when_it_is_imported_or_never(golden):
    """What was made of the image meanwhile has its mark, which no second import takes away."""
    trusting = replace(SAYS, trust=True)
    made = bring_in(golden, trusting)
    assert not is_untrusted(Cloud().snapshot_disk(made.snapshot_id))
    assert bring_in(golden, trusting).found
    with pytest.raises(RefusedError, match=f"{made.image_id} was imported from .* with --trust") as refused:
        bring_in(golden)
    assert refused.value.hint.endswith(f"aws ec2 delete-snapshot --snapshot-id {made.snapshot_id}")
    ec2 = Cloud().client("ec2")
    ec2.deregister_image(ImageId=made.image_id)
    ec2.delete_snapshot(SnapshotId=made.snapshot_id)
    again = bring_in(golden)
    assert is_untrusted(Cloud().snapshot_disk(again.snapshot_id))
    with pytest.raises(RefusedError, match="without --trust"):
        bring_in(golden, trusting)
