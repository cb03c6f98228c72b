"""File systems as the kernel describes them: how full, and whether the root one was grown."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukiln.probe import storage

GIB = 1 << 30
SECTORS = GIB // 512


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk of 100 GiB in sysfs, whose first partition, of 8 GiB, is the root of a file system of 8 GiB."""
    path = tmp_path / "devices/nvme0n1"
    write(path / "size", 100 * SECTORS)
    write(path / "nvme0n1p1/partition", 1)
    write(path / "nvme0n1p1/start", 2048)
    write(path / "nvme0n1p1/size", 8 * SECTORS)
    (tmp_path / "block").mkdir()
    (tmp_path / "block/259:1").symlink_to(path / "nvme0n1p1")
    write(tmp_path / "mountinfo", "28 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw")
    monkeypatch.setattr(storage, "SYS_BLOCK", str(tmp_path / "block"))
    monkeypatch.setattr(storage, "MOUNTINFO", str(tmp_path / "mountinfo"))
    size = SimpleNamespace(f_blocks=8 * GIB // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: size)
    return path


@pytest.mark.usefixtures("disk")
def test_a_partition_that_did_not_grow_leaves_space_after_it() -> None:
    found = storage.root_file_system()
    assert found == {"size": 8 * GIB, "partition": 8 * GIB, "after": 92 * GIB - 2048 * 512}


def test_nothing_can_grow_where_another_partition_follows(disk: Path) -> None:
    write(disk / "nvme0n1p2/start", 9 * SECTORS)
    found = storage.root_file_system()
    assert found is not None
    assert found["after"] == 0


def test_a_partition_before_the_root_one_is_in_nothing_s_way(disk: Path) -> None:
    """As on Debian's cloud images, whose root partition is number 1 and lies last."""
    write(disk / "nvme0n1p15/start", 34)
    found = storage.root_file_system()
    assert found is not None
    assert found["after"] > 90 * GIB


@pytest.mark.usefixtures("disk")
def test_a_root_on_no_partition_is_not_compared() -> None:
    write(Path(storage.MOUNTINFO), "28 1 0:31 / / rw,relatime - overlay overlay rw")
    assert storage.root_file_system() is None


def test_each_file_system_is_listed_once_with_what_lies_on_it() -> None:
    found = storage.storage()["file_systems"]
    root = next(row for row in found if row["path"] == "/")
    assert len({row["path"] for row in found}) == len(found)
    size = os.statvfs("/")
    assert (root["size"], root["inodes"]) == (size.f_blocks * size.f_frsize, size.f_files)
    assert "/" not in root["holds"]


def test_read_only_file_systems_are_always_full(monkeypatch: pytest.MonkeyPatch) -> None:
    size = SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1, f_frsize=4096)
    monkeypatch.setattr(storage, "root_file_system", lambda: None)
    monkeypatch.setattr(os, "statvfs", lambda _path: size)
    assert storage.storage()["file_systems"] == []


def test_data_folders_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/etc/docker/daemon.json": json.dumps({"data-root": "/data/docker"}),
        "/etc/containerd/config.toml": 'version = 2\nroot = "/data/containerd"\n[plugins]\n',
    }
    monkeypatch.setattr(storage, "read", files.get)
    assert {"/data/docker", "/data/containerd"} <= set(storage.folders())
    monkeypatch.setattr(storage, "read", {"/etc/docker/daemon.json": "{"}.get)
    assert {"/var/lib/docker", "/var/lib/containerd"} <= set(storage.folders())
