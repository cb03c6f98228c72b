"""Partition tables and copies of raw disks."""

import errno
import json
import os
from pathlib import Path

import pytest

from gpukiln.disks import sparse
from gpukiln.disks.table import read_table, root_partition
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.programs import tool
from tests.support.disks import gpt


@pytest.mark.parametrize(
    "table",
    [
        "label: gpt\n15 : start=2048, size=4096, type=U\n1 : start=8192, size=8192, type=L\n",
        "label: dos\n2 : start=2048, size=4096, type=c\n4 : start=8192, type=83\n",
        # logical partitions, as Debian's installer makes one for the swap
        "label: dos\n1 : start=2048, size=4096, type=83\n3 : start=8192, type=5\n"
        "5 : start=10240, size=4096, type=82\n6 : start=16384, size=20480, type=83\n"
        "7 : start=40960, type=83\n",
    ],
)
def test_a_partition_table_is_read_as_sfdisk_reads_it(tmp_path: Path, table: str) -> None:
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(32 << 20)
    tool("sfdisk", "--quiet", str(disk), stdin=table)
    wanted = json.loads(tool("sfdisk", "--json", str(disk)))["partitiontable"]
    found = read_table(disk)
    assert found.label == wanted["label"]
    assert {
        (f"{disk}{part.number}", part.offset // 512, part.size // 512, part.type.lower())
        for part in found.partitions
    } == {(part["node"], part["start"], part["size"], part["type"].lower()) for part in wanted["partitions"]}


def test_a_chain_of_logical_partitions_that_leads_back_ends(tmp_path: Path) -> None:
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(32 << 20)
    tool("sfdisk", "--quiet", str(disk), stdin="label: dos\nstart=2048, type=5\n5 : start=4096, size=2048\n")
    with disk.open("r+b") as file:
        file.seek(2048 * 512 + 446 + 16 + 8)
        file.write(b"\1")  # the next one is in the sector behind this
        file.seek(2048 * 512)
        file.write(file.read(512))
    assert len(read_table(disk).partitions) == 61


def test_a_damaged_table_is_refused_and_not_read_from_its_copy(tmp_path: Path) -> None:
    """Linux reads the copy at the disk's end only with `gpt` on its command line (kernel-parameters.txt)."""
    with pytest.raises(IncompatibleError, match="GPT is damaged"):
        root_partition(gpt(tmp_path, 512 + 40, b"\1", sealed=False))


@pytest.mark.parametrize(
    ("error", "says"), [(errno.ENOSPC, "the disk of .* is full"), (errno.EIO, "can't be copied to .*x.raw: ")]
)
def test_a_copy_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, says: str
) -> None:
    (tmp_path / "disk.raw").write_bytes(b"x" * 8192)

    def fails(*_: int) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", fails)
    with pytest.raises(UnavailableError, match=says):
        sparse.copy_disk(tmp_path / "disk.raw", tmp_path / "x.raw")
    assert [path.name for path in tmp_path.iterdir()] == ["disk.raw"]


def test_a_block_is_listed_once_however_many_holes_it_has(tmp_path: Path) -> None:
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as file:
        for offset in (8 << 10, 40 << 10, 65 << 10, 300 << 10):
            file.seek(offset)
            file.write(b"x")
        file.truncate(1 << 20)
    with sparse.opened(disk) as number:
        assert list(sparse.blocks(number, 64 << 10)) == [0, 1, 4]
