"""ami.export: every form, of a file and by the EBS direct APIs, whatever happens to a call or a process."""

import hashlib
import json
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, replace

import pytest

from gpukiln import programs
from gpukiln.clouds.tags import SBOM_TAG
from gpukiln.disks import sparse
from gpukiln.errors import GpukilnError, IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.exports import ebs, formats, run, sidecars
from gpukiln.exports.formats import FORMATS, format_of
from gpukiln.exports.netboot import Netboot
from gpukiln.files import atomic_path
from gpukiln.images.builds import Record
from tests.support.exports import BIOS_TABLE, BLOCK, INDEXES, boot_disk, image_with_disk, start_export
from tests.support.kill_points import (
    digest_of_data,
    files_in,
    mask_varying,
    run_killed_at,
    select_steps,
    steps_of,
)
from tests.support.release_cloud import HOME, Cloud, fault, fault_each, make_image, quiet, tell, verdict

GET = "GetSnapshotBlock"
NO_CALLS: list = []


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path, empty_cloud):  # noqa: ARG001 - each test begins with an empty cloud
    monkeypatch.setattr(ebs, "FIRST_WAIT_S", 0.005)
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "out"
    made.mkdir()
    return made


def export(output, image_id, build=None, **more):
    return run.export(run.ExportOptions(output, **more), Cloud(), image_id, build, quiet())


def gets():
    """GetSnapshotBlock's calls since the last time: fault of each."""
    return [kind for _, action, kind in tell("calls") if action == GET]


def hidden(folder):
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("."))


def require_same(disk, file, form="qcow2"):
    """The disk in a file is the one that was exported; what is behind its end is zeros."""
    if form == "raw.zst":
        raw = file.with_name("again")
        with raw.open("wb") as out:
            subprocess.run(["zstd", "-q", "-d", "-c", str(file)], check=True, stdout=out)
        file, form = raw, "raw"
    command = ["qemu-img", "compare", "-f", "raw", "-F", {"vhd": "vpc"}.get(form, form), str(disk), str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "to", [name for name in FORMATS if name in ("qcow2", "raw", "raw.zst", "vmdk", "vhd")]
)
def test_every_form_holds_the_disk(folder, to):
    image_id, disk = image_with_disk(mib=64)
    file = folder / f"disk{FORMATS[to].endings[0]}"
    done = export(file, image_id)
    assert (done.to, done.virtual_bytes, done.verified) == (to, 64 << 20, True)
    require_same(disk, file, to)
    subprocess.run(["sha256sum", "--quiet", "--check", f"{file.name}.sha256"], cwd=folder, check=True)
    about = json.loads((folder / f"{file.name}.json").read_text())
    assert about["sha256"] == done.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert about["bytes"] == done.bytes == file.stat().st_size
    assert about["tags"]["gpukiln:driver"] == "535.309.01"
    assert set(done.missing) == {what for _, what in sidecars.DOCUMENTS.values()}
    assert done.boots_on is None  # what is on it is no file system
    assert done.boots_on_unknown
    assert hidden(folder) == []


def test_ebs_gives_the_same_disk_with_its_holes(folder):
    image_id, disk = image_with_disk()
    done = export(folder / "a.raw", image_id, direct=False)
    assert (done.blocks_read, done.blocks_kept) == (len(INDEXES), 0)
    assert digest_of_data(folder / "a.raw") == digest_of_data(disk)
    assert sparse.data_bytes(folder / "a.raw") == len(INDEXES) * BLOCK
    assert hidden(folder) == []


def test_a_listing_has_pages_and_some_are_empty(folder, monkeypatch):
    monkeypatch.setattr(ebs, "PAGE", 100)
    image_id, disk = image_with_disk()
    with disk.open("r+b") as file:
        for index in range(400, 700, 2):
            file.seek(index * BLOCK)
            file.write(b"x")
    export(folder / "a.qcow2", image_id, direct=False)
    assert [action for _, action, _ in tell("calls")].count("ListSnapshotBlocks") == 2
    require_same(disk, folder / "a.qcow2")


def test_every_block_meets_every_fault(folder):
    image_id, disk = image_with_disk()
    kinds = ("lost", "throttled", "corrupted", "cut", "broken", "stale")
    tell("faults", [fault_each(GET, kind) for kind in kinds])
    export(folder / "a.qcow2", image_id, direct=False)
    made = gets()
    assert {kind: made.count(kind) for kind in kinds} == dict.fromkeys(kinds, len(INDEXES))
    assert made.count("") == len(INDEXES)
    require_same(disk, folder / "a.qcow2")


def test_killed_at_half_it_reads_only_the_rest(folder):
    """With a fault in every block, before the kill and after it."""
    image_id, disk = image_with_disk()
    tell("faults", [fault_each(GET, "slow"), fault_each(GET, "throttled"), fault_each(GET, "corrupted")])
    journal = folder / ".a.qcow2.journal"
    child = start_export(folder / "a.qcow2", image_id)
    deadline = time.monotonic() + 60
    while not journal.exists() or len(journal.read_text().splitlines()) <= len(INDEXES) // 2:
        assert child.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (folder / "a.qcow2").exists()
    had = len(journal.read_text().splitlines()) - 1
    assert len(INDEXES) // 2 <= had < len(INDEXES)
    time.sleep(0.5)  # what the server still answers to the killed one
    gets()
    tell("faults", [fault_each(GET, kind) for kind in ("lost", "throttled", "corrupted", "stale")])
    done = export(folder / "a.qcow2", image_id, direct=False)
    assert (done.blocks_kept, done.blocks_read) == (had, len(INDEXES) - had)
    assert gets().count("") == len(INDEXES) - had
    require_same(disk, folder / "a.qcow2")
    assert hidden(folder) == []


def write_folder(disk, part, progress, url):  # noqa: ARG001 - as `ExportFormat.make` is called
    """A form that is a folder, made as netboot and the installer make theirs."""
    with atomic_path(part) as partial:
        tree = partial.with_name(f"{partial.name}-tree")
        tree.mkdir()
        (tree / "initrd.img").write_text("initrd")
        partial.mkdir()
        for name in ("vmlinuz", "filesystem.squashfs"):
            (partial / name).write_text(name)
        shutil.rmtree(tree)
    return ""


@pytest.mark.parametrize(
    ("name", "options", "first"),
    [
        ("a.qcow2", {"direct": False}, ""),
        ("a.raw", {"direct": False}, "os.remove .journal"),  # before that it is as the one above, and slow
        ("a.raw.zst", {"force": True}, ""),
        ("netboot", {"to": "netboot", "force": True}, ""),
    ],
)
def test_killed_anywhere_and_typed_again_it_is_as_if_never_killed(
    folder, proven, tmp_path, monkeypatch, name, options, first
):
    """With `force` there is an older export, of which other files stand beside it."""
    monkeypatch.setitem(FORMATS, "netboot", replace(FORMATS["netboot"], make=write_folder))
    [build] = proven.all()
    image_id, disk = image_with_disk(build.id, mib=24)  # each run of some fifty takes its digest
    boot_disk(disk, BIOS_TABLE, mib=24)
    output, home = folder / name, tmp_path / "home"

    def empty():
        shutil.rmtree(folder)
        shutil.rmtree(home, ignore_errors=True)
        folder.mkdir()
        if "force" in options:
            write_folder(disk, output, None, "") if "to" in options else output.write_text("of before")
            for ending in sidecars.DOCUMENTS:
                sidecars.sidecar_path(output, ending).write_text("of before")

    def work():
        done = asdict(export(output, image_id, build, **options))
        return [{**done, "durations_s": 0, "blocks_read": 0, "blocks_kept": 0}]

    def state(done):
        return mask_varying(done), files_in(folder, home)

    empty()
    undisturbed = state(work())
    empty()
    steps = steps_of(work, folder, home)
    for number in select_steps(steps, first=1 + steps.index(first or steps[0])):
        empty()
        assert run_killed_at(number, work, folder, home)
        assert state(work()) == undisturbed, steps[number - 1]


@pytest.mark.parametrize("how", ["line cut", "block damaged", "another disk", "no disk", "garbage"])
def test_a_journal_is_believed_only_where_the_disk_agrees(folder, how):
    image_id, disk = image_with_disk()
    tell("faults", [fault(GET, "denied", skip=20, times=1000)])
    with pytest.raises(UnavailableError) as refused:
        export(folder / "a.qcow2", image_id, direct=False)
    assert "reads only the rest" in refused.value.__notes__[0]
    work, journal = folder / ".a.qcow2.disk", folder / ".a.qcow2.journal"
    had = len(journal.read_text().splitlines()) - 1
    assert had >= 10
    lost = had
    if how == "line cut":
        journal.write_text(journal.read_text()[:-30])
        lost = 1
    elif how == "block damaged":
        first = int(journal.read_text().splitlines()[1].split()[0])
        with work.open("r+b") as file:
            file.seek(first * BLOCK + 5)
            file.write(b"damaged")
        lost = 1
    elif how == "another disk":
        image_id, disk = image_with_disk("b2", seed=2)
    elif how == "no disk":
        work.unlink()
    else:
        journal.write_bytes(b"\xff\xfe" * 99)
    tell("faults", [])
    done = export(folder / "a.qcow2", image_id, direct=False)
    assert done.blocks_kept == had - lost
    require_same(disk, folder / "a.qcow2")


def test_what_was_changed_after_it_was_read_is_read_again(folder, monkeypatch):
    """A disk that is prepared is no snapshot's any more: a kill in between must not keep it."""
    image_id, disk = image_with_disk()

    def prepare(raw, *, datasource, size_gib, ssh_keys, begin):
        assert ssh_keys == ()
        assert (datasource, size_gib, raw.stat().st_size) == ("nocloud", 2, 1 << 30)
        begin()
        with raw.open("r+b") as file:
            file.seek(5 * BLOCK)  # a hole
            file.write(b"prepared")
        raise UnavailableError("no room")

    monkeypatch.setattr(run, "prepare", prepare)
    with pytest.raises(UnavailableError, match="no room"):
        export(folder / "a.qcow2", image_id, direct=False, datasource="nocloud", size_gib=2)
    assert list(folder.iterdir()) == []
    done = export(folder / "a.qcow2", image_id, direct=False)
    assert done.blocks_read == len(INDEXES)
    require_same(disk, folder / "a.qcow2")
    with pytest.raises(UnavailableError, match="no room"):
        export(
            folder / "b.qcow2", image_id, datasource="nocloud", size_gib=2
        )  # of a copy, not of the cloud's
    require_same(disk, folder / "a.qcow2")


def test_the_seed_of_a_folder_may_change(folder, monkeypatch):
    def write_netboot(_disk, part, **_):
        (part / "seed").mkdir(parents=True)
        (part / "vmlinuz").write_text("a kernel")
        (part / "seed/user-data").write_text("#cloud-config")
        return Netboot(part, "6.1", 2048, (), {})

    monkeypatch.setattr(formats, "write_netboot", write_netboot)
    image_id, _ = image_with_disk()
    done = export(folder / "served", image_id, to="netboot")
    assert done.bytes == len("a kernel") + len("#cloud-config")
    (folder / "served/seed/user-data").write_text("#cloud-config\nssh_authorized_keys: []\n")
    check = ["sha256sum", "--check", "--strict", "served.sha256"]
    checked = subprocess.run(check, cwd=folder, check=True, capture_output=True, text=True)
    assert checked.stdout == "served/vmlinuz: OK\n"


def test_what_was_read_outlives_a_preparation_that_is_refused(folder):
    image_id, disk = image_with_disk()  # of which nobody can say what is on it
    with pytest.raises(IncompatibleError, match="has no partition table") as refused:
        export(folder / "a.qcow2", image_id, direct=False, datasource="nocloud")
    assert "the next run reads only the rest" in refused.value.__notes__[0]
    done = export(folder / "a.qcow2", image_id, direct=False)
    assert (done.blocks_read, done.blocks_kept) == (0, len(INDEXES))
    require_same(disk, folder / "a.qcow2")


def test_a_block_that_never_comes_right_ends_it(folder, monkeypatch):
    monkeypatch.setattr(ebs, "ATTEMPTS", 3)
    image_id, _ = image_with_disk()
    tell("faults", [fault(GET, "corrupted", times=10_000)])
    with pytest.raises(UnavailableError, match="not what its checksum says") as failed:
        export(folder / "a.qcow2", image_id, direct=False)
    assert "check the network" in failed.value.hint
    assert not (folder / "a.qcow2").exists()


@pytest.mark.parametrize(("kind", "says"), [("denied", "AccessDenied"), ("expired", "ExpiredToken")])
def test_a_refusal_is_told_at_once(folder, kind, says):
    image_id, _ = image_with_disk()
    tell("faults", [fault("ListSnapshotBlocks", kind, times=10)])
    with pytest.raises(UnavailableError, match=says) as refused:
        export(folder / "a.qcow2", image_id, direct=False)
    assert [kind for _, action, kind in tell("calls") if action == "ListSnapshotBlocks"] == [kind]
    assert refused.value.hint
    assert list(folder.iterdir()) == []


def test_ctrl_c_keeps_what_was_read_and_nothing_else(folder, monkeypatch):
    image_id, _ = image_with_disk()
    monkeypatch.setattr(run, "_digests", lambda *_: interrupted())
    with pytest.raises(KeyboardInterrupt):
        export(folder / "a.qcow2", image_id, direct=False)
    assert hidden(folder) == [".a.qcow2.disk", ".a.qcow2.journal"]
    with pytest.raises(KeyboardInterrupt):
        export(folder / "b.qcow2", image_id)
    assert not [name for name in hidden(folder) if ".b." in name]
    monkeypatch.undo()
    monkeypatch.setenv("GPUKILN_HOME", str(folder.parent / "home"))
    assert export(folder / "a.qcow2", image_id, direct=False).blocks_read == 0


def interrupted():
    raise KeyboardInterrupt


def test_without_room_nothing_is_begun(folder, monkeypatch):
    image_id, _ = image_with_disk(mib=64)
    monkeypatch.setattr(programs, "free_bytes", lambda _: 1 << 20)
    for output, direct in (("a.qcow2", True), ("b.raw", False)):
        with pytest.raises(UnavailableError, match="is full: "):
            export(folder / output, image_id, direct=direct)
    assert [kind for kind in gets() if not kind] == NO_CALLS
    assert not [one for one in folder.iterdir() if not one.name.startswith(".")]


def test_a_disk_that_fills_up_is_told_so(folder, monkeypatch):
    image_id, _ = image_with_disk()
    monkeypatch.setattr(
        ebs, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(UnavailableError, match="is full: "):
        export(folder / "a.qcow2", image_id, direct=False)


def test_a_tool_that_fails_leaves_nothing(folder, monkeypatch):
    image_id, _ = image_with_disk(mib=64)
    broken = formats.ExportFormat("", (".qcow2",), formats._qemu_img("qcow2", "-o", "nonsense=1"))
    monkeypatch.setitem(FORMATS, "qcow2", broken)
    with pytest.raises(UnavailableError, match=r"qemu-img convert ended with 1: .*nonsense"):
        export(folder / "a.qcow2", image_id)
    assert list(folder.iterdir()) == []


def test_what_is_there_is_replaced_only_when_asked(folder):
    image_id, _ = image_with_disk(mib=64)
    file = folder / "a.qcow2"
    file.write_text("somebody's")
    (folder / "a.qcow2.sbom.cdx.json").write_text("of another export")
    with pytest.raises(RefusedError, match="exists") as refused:
        export(file, image_id)
    assert "--force" in refused.value.hint
    assert file.read_text() == "somebody's"
    export(file, image_id, force=True)
    assert file.stat().st_size > BLOCK
    assert not (folder / "a.qcow2.sbom.cdx.json").exists()


@pytest.mark.parametrize(
    ("name", "to", "says"),
    [
        ("a.bin", "", "no ending of a known format"),
        ("a.qcow2", "raw", "ending of qcow2"),
        ("a.raw.zst", "raw", "ending of raw.zst"),
        ("a.qcow2", "ova", "no such form"),
        ("none/a.qcow2", "", "there is no folder"),
    ],
)
def test_names_that_say_nothing_or_another_form_are_refused(folder, name, to, says):
    image_id, _ = image_with_disk(mib=64)
    with pytest.raises(UsageError, match=says):
        export(folder / name, image_id, to=to)
    assert list(folder.iterdir()) == []


def test_the_longest_ending_counts_and_any_name_will_do_with_a_form(folder):
    assert format_of("", folder / "a.raw.zst") == format_of("", folder / "a.img.zst") == "raw.zst"
    assert format_of("raw", folder / "disk") == "raw"


def test_a_disk_never_shrinks(folder):
    image_id, _ = image_with_disk(mib=64)
    with pytest.raises(UsageError, match="is less than the disk's size"):
        export(folder / "a.raw", image_id, size_gib=0)


def test_what_was_not_proven_is_refused(folder):
    failed = make_image("b1", judged=verdict(failed=[("gpu.nvml", "no NVML")]))
    with pytest.raises(RefusedError, match=r"was not verified: it failed on g4dn.xlarge") as refused:
        export(folder / "a.raw", failed)
    assert "ami.verify" in refused.value.hint
    image_id, _ = image_with_disk("b2", mib=64)
    Cloud().client("ec2").delete_tags(Resources=[image_id], Tags=[{"Key": "gpukiln:verdict:g4dn.xlarge"}])
    with pytest.raises(RefusedError, match="it has no verdict of a machine"):
        export(folder / "a.raw", image_id)
    done = export(folder / "a.raw", image_id, unproven=True)
    assert not done.verified
    assert json.loads((folder / "a.raw.json").read_text())["verified"] is False


def test_a_record_that_says_it_failed_counts_too(folder, proven):
    image_id, _ = image_with_disk(mib=64)
    [build] = proven.all()
    record = build.read()
    build.write(Record(build.id, "verified", record.plan, record.bake, (verdict(failed=[("a.b", "no")]),)))
    with pytest.raises(RefusedError, match=r"failed on g4dn.xlarge"):
        export(folder / "a.raw", image_id, build)


def test_the_papers_of_a_build_stand_beside_it(folder, proven):
    image_id, _ = image_with_disk(mib=64)
    [build] = proven.all()
    (build.folder / "sbom.cdx.json").write_text("{}")
    (build.folder / "provenance.intoto.json").write_text("another than the tag names")
    digest = hashlib.sha256(b"{}").hexdigest()
    Cloud().client("ec2").create_tags(Resources=[image_id], Tags=[{"Key": SBOM_TAG, "Value": digest}])
    done = export(folder / "a.raw", image_id, build)
    assert (folder / "a.raw.sbom.cdx.json").read_text() == "{}"
    assert (folder / "a.raw.record.json").read_text() == build.record_file.read_text()
    assert "is not what the image's tag" in done.missing["provenance"]
    assert set(done.missing) == {"provenance", "signed provenance", "the image's own record"}
    assert {one.name for one in done.files} == {one.name for one in folder.iterdir()} - {"a.raw"}


def test_two_exports_of_one_file_do_not_meet(folder):
    image_id, _ = image_with_disk(mib=64)
    with run._output_lock(folder / "a.raw"), pytest.raises(GpukilnError, match="another process writes"):
        export(folder / "a.raw", image_id)


def test_images_that_are_not_there_or_not_whole(folder):
    with pytest.raises(UsageError, match=r"there is no image"):
        export(folder / "a.raw", "ami-0123456789abcdef1")
    image_id, disk = image_with_disk(mib=64)
    disk.unlink()
    with pytest.raises(UnavailableError, match="is missing"):
        export(folder / "a.raw", image_id)
    tell("state", {"region": HOME, "image_id": image_id, "state": "pending"})
    with pytest.raises(UnavailableError, match="is pending"):
        export(folder / "a.raw", image_id)


def test_the_meter_tells_rate_and_time_left():
    from gpukiln.progress import Meter  # noqa: PLC0415 - beside its one use

    meter = Meter(quiet(), 2048 << 20)
    meter.add(512 << 20)
    assert meter.text(4.0) == "512 MiB of 2 GiB, 128 MiB/s, 12s left"
    meter.reach(2048 << 20)
    assert meter.text(8.0) == "2 GiB of 2 GiB, 256 MiB/s, 0s left"


def test_a_missing_tool_names_what_installs_it(folder, monkeypatch):
    image_id, _ = image_with_disk(mib=64)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("a.vmdk", "a.raw.zst"):
        with pytest.raises(UnavailableError, match="is not installed"):
            export(folder / name, image_id)
    assert list(folder.iterdir()) == []
