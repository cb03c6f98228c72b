"""Disks for tests of exports and imports, and an export that is a process of its own, to be killed."""

import os
import random
import subprocess
import sys
from pathlib import Path

from gpukiln.exports import ebs
from tests.support.release_cloud import HOME, ROOT, Cloud, make_image, server

BLOCK = ebs.BLOCK
LAST = (1 << 30) // BLOCK - 1
INDEXES = (0, 1, 2, *range(7, 60, 2), 300, 301, LAST)
"""The blocks of a disk of 1 GiB that hold something: apart, together, and the last one."""


def fill(disk: Path, indexes=INDEXES, seed=1, mib=1024) -> None:
    """A sparse raw disk, as far as the blocks fit."""
    chance = random.Random(seed)  # noqa: S311 - content
    with disk.open("wb") as file:
        for index in (index for index in indexes if (index + 1) * BLOCK <= mib << 20):
            file.seek(index * BLOCK)
            file.write(chance.randbytes(BLOCK))
        file.truncate(mib << 20)


def image_with_disk(build="b1", seed=1, mib=1024, **more) -> tuple[str, Path]:
    """An image of release_cloud with such a disk; its id and the disk."""
    image_id = make_image(build, **more)
    disk = Cloud(more.get("region", HOME)).snapshot_disk(image_id.replace("ami-", "snap-"))
    fill(disk, seed=seed, mib=mib)
    return image_id, disk


BIOS_TABLE = (
    "label: gpt\n"
    "start=2048, size=2048, type=21686148-6449-6E6F-744E-656564454649\n"
    "start=20480, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709\n"
)

CHILD = """
import sys
from pathlib import Path
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.exports import ebs, run
from tests.support import release_cloud
release_cloud.server = lambda: (sys.argv[1], Layout(Path(sys.argv[2])))
ebs.FIRST_WAIT_S = 0.01
options = run.ExportOptions(Path(sys.argv[3]), direct=False)
run.export(options, release_cloud.Cloud(), sys.argv[4], None, release_cloud.quiet())
"""


def start_export(output: Path, image_id: str) -> subprocess.Popen:
    """An export by the EBS direct APIs."""
    url, layout = server()
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, url, str(layout.home), str(output), image_id],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def boot_disk(disk: Path, table: str, mib=64) -> None:
    """A raw disk with a partition table as `sfdisk` reads it, and something in its blocks."""
    fill(disk, range(2, 20, 3), mib=mib)
    subprocess.run(["sfdisk", "-q", "--no-reread", str(disk)], input=table.encode(), check=True)
