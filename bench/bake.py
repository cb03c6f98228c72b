"""What a cold build costs against the same work by hand, in one run: prints a ratio, promises no time.

By hand: one mmdebstrap with the base's and the driver's packages (DKMS compiles the module for the image's
kernel), then packing the disk. gpukiln: base image, Packer, Ansible, capture; the boot and the checks of the
proof are counted apart, because nobody does them by hand.

    scripts/run python -m bench.bake
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpukiln.clouds.embedded.base import PACKAGES, RELEASE, SIZE_GIB
from gpukiln.clouds.embedded.disk import build_disk
from gpukiln.images.apt import debian_sources

ROOT = Path(__file__).resolve().parents[1]
DRIVER = [
    "linux-headers-cloud-amd64",
    "nvidia-kernel-dkms",
    "nvidia-smi",
    "libcuda1",
    "libnvidia-cfg1",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "docker.io",
    "containerd",
    "iptables",
    "nvtop",
]
PROOF = ("plan", "boot from the image", "verify", "remove the machine")


def by_hand(folder: Path) -> float:
    """Seconds of the floor.

    Args:
        folder: An empty folder.
    """
    sources = folder / "debian.sources"
    sources.write_text(debian_sources(RELEASE))
    started = time.monotonic()
    subprocess.run(
        [
            *("eatmydata", "mmdebstrap", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io"),
            *("--aptopt=APT::Install-Recommends false", f"--include={','.join([*PACKAGES, *DRIVER])}"),
            *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
            *(RELEASE, str(folder / "root"), str(sources)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    build_disk(folder / "root", folder / "disk.raw", size_gib=SIZE_GIB)
    took = time.monotonic() - started
    modules = list((folder / "root").glob("lib/modules/*/updates/dkms/nvidia-current.ko*"))
    if not modules:
        raise SystemExit("the floor is void: DKMS built no module")
    return took


def by_gpukiln(home: Path) -> dict[str, float]:
    """Seconds of each step of a cold build.

    Args:
        home: An empty state folder.
    """
    environment = {**os.environ, "GPUKILN_HOME": str(home)}
    command = ["invoke", "ami.build", "--region", "us-west-2", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    subprocess.run(
        ["invoke", "cloud.clean", "--images", "--base", "--force"], cwd=ROOT, env=environment, check=True
    )
    steps: dict[str, float] = json.loads(done.stdout)["durations_s"]
    return steps


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "hand").mkdir()
        floor = by_hand(Path(folder) / "hand")
        print(f"by hand: packages, DKMS, packing    {floor:7.0f} s   1.00", flush=True)
        steps = by_gpukiln(Path(folder) / "home")
    work = sum(seconds for step, seconds in steps.items() if step not in PROOF)
    proof = sum(seconds for step, seconds in steps.items() if step in PROOF)
    print(f"gpukiln: base, bake, capture        {work:7.0f} s   {work / floor:.2f}")
    print(f"gpukiln: boot and proof             {proof:7.0f} s   {proof / floor:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
