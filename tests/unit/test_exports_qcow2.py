"""qcow2 files that are written from begin to end, as qemu-img finds them."""

import errno
import hashlib
import os
import subprocess
import time

import pytest

from gpukiln.disks import qcow2, sparse
from gpukiln.disks.qcow2 import CLUSTER, REFCOUNTS, Qcow2Layout
from tests.support.release_cloud import quiet

TIB = 1 << 40


def qemu_img(*arguments):
    done = subprocess.run(["qemu-img", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (1 << 20, ()),
        (1 << 20, (0, (1 << 20) - 1)),
        (3 * CLUSTER + 512, (3 * CLUSTER + 7,)),
        (2 * CLUSTER + 100, (2 * CLUSTER + 99,)),  # no whole sector
        (2 << 30, ((512 << 20) - 1, 512 << 20, 1 << 30)),  # at the border of two tables, and one without
        (5 * TIB, (5, 4 * TIB - 1, 4 * TIB, 5 * TIB - 1)),  # the first table has more than a cluster
    ],
)
def test_qemu_reads_the_same_disk(tmp_path, size, places):
    disk, file = tmp_path / "disk.raw", tmp_path / "disk.qcow2"
    with disk.open("wb") as opened:
        opened.truncate(size)
        for place in places:
            opened.seek(place)
            opened.write(b"x")
    digest = qcow2.write(disk, file, quiet())
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "No errors were found" in qemu_img("check", "-f", "qcow2", file)
    assert "identical" in qemu_img("compare", "-f", "raw", "-F", "qcow2", disk, file)
    assert file.stat().st_size < 10 * CLUSTER + len(places) * 2 * CLUSTER


@pytest.mark.parametrize("data", [0, REFCOUNTS - 5, REFCOUNTS - 4, REFCOUNTS - 3, 3 * REFCOUNTS, 400_000])
def test_reference_counts_count_themselves(data):
    layout = Qcow2Layout.of(64 * TIB, tuple(range(data)))
    assert (layout.refcount_blocks - 1) * REFCOUNTS < layout.clusters <= layout.refcount_blocks * REFCOUNTS
    assert layout.refcount_table == 1


@pytest.mark.parametrize("call", ["preadv", "copy_file_range"])
def test_a_disk_that_becomes_shorter_is_none(tmp_path, monkeypatch, call):
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"x" * 3 * CLUSTER)
    really = getattr(os, call)

    def shorter(*arguments):
        os.truncate(disk, 2 * CLUSTER)
        return really(*arguments)

    monkeypatch.setattr(os, call, shorter)
    with pytest.raises(OSError, match="shorter"):
        qcow2.write(disk, tmp_path / "disk.qcow2", quiet())


def test_a_file_may_lie_on_another_file_system(tmp_path, monkeypatch):
    """The kernel refuses to copy between two (copy_file_range(2))."""
    disk, copied = tmp_path / "disk.raw", tmp_path / "copy.raw"
    with disk.open("wb") as file:
        file.write(os.urandom(3 * CLUSTER + 5))
        file.seek(2 * sparse.CHUNK)
        file.write(os.urandom(CLUSTER))
    refused = OSError(errno.EXDEV, "Invalid cross-device link")
    monkeypatch.setattr(os, "copy_file_range", lambda *_: (_ for _ in ()).throw(refused))
    sparse.copy(disk, copied, lambda _: None)
    assert copied.read_bytes() == disk.read_bytes()
    assert sparse.data_bytes(copied) == sparse.data_bytes(disk)
    qcow2.write(disk, tmp_path / "disk.qcow2", quiet())
    assert "identical" in qemu_img("compare", "-f", "raw", "-F", "qcow2", disk, tmp_path / "disk.qcow2")


def test_no_room_ends_hashing_too(tmp_path, monkeypatch):
    """Of a large disk it would take minutes, which nobody waits for after Ctrl-C."""
    disk, hashed = tmp_path / "disk.raw", []
    disk.write_bytes(b"x" * 40 * sparse.CHUNK)

    def full(*_):
        while not hashed:
            time.sleep(0.001)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(qcow2.Meter, "add", lambda _, count: (time.sleep(0.01), hashed.append(count)))
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space"):
        qcow2.write(disk, tmp_path / "disk.qcow2", quiet())
    assert 1 <= len(hashed) < 20
