"""The image that is compared, and the floor: the same made by hand."""

import shutil
import subprocess
from pathlib import Path

from bench.rows import Measured, VoidError, stopwatch
from gpukiln.clouds.embedded.base import PACKAGES, RELEASE, SIZE_GIB
from gpukiln.disks.build import build_disk
from gpukiln.sources.apt import debian_sources, strip_credentials

DRIVER = [
    "linux-headers-amd64",
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
IMAGE = [*PACKAGES, *DRIVER]
"""What is installed by hand, by mkosi and by diskimage-builder: what gpukiln's base and roles install."""


def require_image(root: Path) -> None:
    """Refuse an image that lacks what takes the time.

    Args:
        root: Its root file system.

    Raises:
        VoidError: There is no module that DKMS compiled in it, or no initramfs.
    """
    if not list(root.glob("lib/modules/*/updates/dkms/nvidia-current.ko*")):
        raise VoidError("DKMS built no module")
    if not list(root.glob("boot/initrd.img-*")):
        raise VoidError("there is no initramfs")


def run(
    log: Path,
    *command: str,
    under: tuple[str, ...] = (),
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> None:
    """Run a tool.

    Args:
        log: File for what it prints; may hold the addresses of the machine's mirror.
        command: The tool and its arguments.
        under: What starts it.
        env: Its environment; ours when None.

    Raises:
        VoidError: It failed.
    """
    with log.open("ab") as output:
        done = subprocess.run(
            [*under, *command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode:
        tail = strip_credentials(" ".join(log.read_text(errors="replace").strip().splitlines()[-1:]))
        raise VoidError(f"{command[0]} ended with {done.returncode}: {tail} (log: {log})")


def by_hand(folder: Path, log: Path) -> Measured:
    """The floor: one mmdebstrap with all packages, then packing the disk.

    Args:
        folder: An empty folder, which is empty again afterwards.
        log: For what the tools print.

    Returns:
        What it took.

    Raises:
        VoidError: A tool failed, or it is not the image.
    """
    sources, root = folder / "debian.sources", folder / "root"
    sources.write_text(debian_sources(RELEASE))
    with stopwatch() as result:
        run(
            log,
            *("eatmydata", "mmdebstrap", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io"),
            *("--aptopt=APT::Install-Recommends false", f"--include={','.join(IMAGE)}"),
            *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
            *(RELEASE, str(root), str(sources)),
        )
        build_disk(root, folder / "disk.raw", size_gib=SIZE_GIB)
    require_image(root)
    for left in (root, sources, folder / "disk.raw"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return result[0]
