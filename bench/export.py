"""What an export of an image's disk costs, against `qemu-img convert` of it, in one run: prints ratios.

    scripts/run python -m bench.export [IMAGE] [--forms qcow2,vhd] [--rounds 5]

IMAGE is a build id, an AMI of the embedded cloud in us-west-2, or the newest build. Both are on the disk
when they have ended: qemu-img's output is synced, as the export's is. The export hashes what it wrote and
writes what stands beside it.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gpukiln.disks import sparse
from gpukiln.exports import run
from gpukiln.exports.source import find_source
from gpukiln.images.builds import Builds
from gpukiln.progress import Progress
from gpukiln.release.find import find
from gpukiln.state import state_home

BAR = 1.2
QEMU = {
    "qcow2": ("qcow2",),
    "raw": ("raw",),
    "vhd": ("vpc", "-o", "subformat=dynamic,force_size=on"),
    "vmdk": ("vmdk", "-o", "subformat=streamOptimized"),
}


def seconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def convert(disk: Path, output: Path, form: str) -> None:
    """The floor: qemu-img, and its output on the disk."""
    name, *options = QEMU[form]
    subprocess.run(
        ["qemu-img", "convert", "-f", "raw", "-O", name, *options, str(disk), str(output)], check=True
    )
    subprocess.run(["sync", str(output)], check=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("image", nargs="?", default="last")
    parser.add_argument("--forms", default="qcow2,vhd")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found = find(
        asked.image, Builds(state_home()), region="us-west-2" if asked.image.startswith("ami-") else ""
    )
    disk = find_source(found.cloud, found.image_id).disk
    if disk is None:
        raise SystemExit("the disk does not lie on this machine: the bar is that of the embedded cloud")
    print(
        f"{found.image_id}: {disk.stat().st_size >> 30} GiB, {sparse.data_bytes(disk) >> 20} MiB of it data"
    )
    with tempfile.TemporaryDirectory(prefix="bench-", dir=state_home()) as name:
        folder = Path(name)
        for form in asked.forms.split(","):
            floor: list[float] = []
            ours: list[float] = []
            output = folder / f"disk.{form}"
            options = run.ExportOptions(output, to=form, unproven=True)
            quiet = Progress(console=Console(quiet=True))
            for _ in range(asked.rounds):  # in turn: what else runs here slows both
                floor.append(seconds(lambda form=form: convert(disk, folder / "floor", form)))
                ours.append(
                    seconds(
                        lambda options=options, quiet=quiet: run.export(
                            options, found.cloud, found.image_id, found.build, quiet
                        )
                    )
                )
                for file in folder.iterdir():
                    file.unlink()
            ratio = statistics.median(ours) / statistics.median(floor)
            steps = ", ".join(f"{step} {took} s" for step, took in quiet.durations.items())
            both = f"qemu-img {statistics.median(floor):6.2f} s  ami.export {statistics.median(ours):6.2f} s"
            end = "reached" if ratio <= BAR else "not reached"
            print(f"{form:8} {both}  {ratio:.2f} of it: {end} ({steps})")


if __name__ == "__main__":
    main()
