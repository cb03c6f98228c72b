"""The same image by other builders, where they are installed: mkosi and diskimage-builder.

Each gets the packages of `bench.hand` and the machine's own mirror, which is written only into the
benchmark's temporary folder. Neither is made to do what gpukiln's roles do beside installing packages.
"""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from email import message_from_string
from functools import cached_property
from pathlib import Path

from bench.hand import IMAGE, require_image, run
from bench.rows import Measured, VoidError, stopwatch
from gpukiln.clouds.embedded.base import RELEASE, SIZE_GIB
from gpukiln.disks.build import build_disk
from gpukiln.sources.apt import COMPONENTS, debian_sources

CHANGED_FILE = "etc/gpukiln/bench"
NEW = 24  # the release of mkosi from which on it asks apt itself, and names options as it does now
INITRAMFS = "#!/bin/sh\nexec update-initramfs -c -k all\n"  # 14 keeps packages from making it
SYSTEMD_RUNS = Path("/run/systemd/system")  # sd_booted(3); without it nspawn has no unit to make
# What it leaves mounted when it fails is gone with it: a folder with /dev in it must not be removed.
PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")
HOW = {
    "mkosi": "`apt-get install mkosi` is 14 on Debian 12; bookworm-backports has 24, Debian 13 has 25",
    "disk-image-create": "`apt-get install debootstrap sudo` and `pip install diskimage-builder`, on PATH",
}


def release_of(tool: str) -> str:
    """The release of a tool.

    Args:
        tool: The program.

    Returns:
        For example `24.3`.

    Raises:
        VoidError: It is not installed, in one line with how to install it; or it says no version.
    """
    if not shutil.which(tool):
        raise VoidError(f"{tool} is not installed: {HOW[tool]}")
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    if found := re.search(r"\d+[\d.]*", done.stdout):
        return found[0]
    raise VoidError(
        f"`{tool} --version` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
    )


def entries(sources: str) -> list[tuple[str, str]]:
    """Address and suite of each entry of a deb822 sources file, in its order.

    Args:
        sources: What `debian_sources` gave.
    """
    stanzas = [message_from_string(stanza) for stanza in re.split(r"\n\s*\n", sources.strip())]
    return [(str(stanza["URIs"]), str(stanza["Suites"])) for stanza in stanzas]


def _mirror() -> str:
    return next(uri for uri, suite in entries(debian_sources(RELEASE)) if suite == RELEASE)


class Mkosi:
    """The image by mkosi, as a directory that is packed as the floor's is.

    mkosi's own disk images need partition nodes of loop devices (14) or systemd-repart 254 (24).

    Args:
        folder: An empty folder; what mkosi keeps for its next build stays in it.
        log: For what it prints.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._log = folder, log
        self._builds = 0

    @cached_property
    def _release(self) -> str:
        return release_of("mkosi")

    @property
    def _is_new(self) -> bool:
        return int(self._release.partition(".")[0]) >= NEW

    def build(self, *more: str, anew: bool = False) -> Measured:
        """Build, keeping what an incremental build can go on from.

        Args:
            more: Packages beside the image's.
            anew: Whether the packages are others than before. 14 has to be told, newer ones see it.

        Returns:
            What it took.

        Raises:
            VoidError: mkosi is missing or failed, or it is not the image.
        """
        folder, release = self._folder, self._release
        self._builds += 1
        etc = folder / "tree/etc/apt"
        for name in (etc / "sources.list.d", "extra/etc/gpukiln", "out", "work", "cache", "kept", "cwd"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._write_sources(etc)
        (folder / "prepare").write_text(INITRAMFS)
        (folder / "prepare").chmod(0o755)
        (folder / "extra" / CHANGED_FILE).write_text(f"build {self._builds}\n")
        (folder / "disk.raw").unlink(missing_ok=True)
        forced = ["--force"] * (2 if anew and not self._is_new else 1)
        with stopwatch() as result:
            run(self._log, "mkosi", *self._options(more), *forced, "build", cwd=folder / "cwd")
            build_disk(folder / "out/image", folder / "disk.raw", size_gib=SIZE_GIB)
        if not self._is_new:
            # Without a build script 14 has no such image, but goes on from the other one only if it is there.
            (folder / "out/image.cache-pre-dev").mkdir(exist_ok=True)
        require_image(folder / "out/image")
        return replace(result[0], note=release)

    def _options(self, more: tuple[str, ...]) -> list[str]:
        folder = self._folder
        options = [
            *("--distribution=debian", f"--release={RELEASE}", "--format=directory", "--incremental"),
            *(f"--workspace-dir={folder}/work", f"--extra-tree={folder}/extra"),
            *(f"--repositories={COMPONENTS.replace(' ', ',')}", f"--package={','.join([*IMAGE, *more])}"),
        ]
        if self._is_new:
            return [
                *options,
                *("--output=image", f"--output-dir={folder}/out", "--bootable=no", "--with-docs=no"),
                *(f"--package-manager-tree={folder}/tree", f"--package-cache-dir={folder}/cache"),
                f"--cache-dir={folder}/kept",
            ]
        return [
            *options,
            *(f"--output={folder}/out/image", f"--mirror={_mirror()}"),
            *(
                f"--skeleton-tree={folder}/tree",
                f"--cache={folder}/cache",
                f"--prepare-script={folder}/prepare",
            ),
            *(() if SYSTEMD_RUNS.is_dir() else ("--nspawn-keep-unit",)),
        ]

    def _write_sources(self, etc: Path) -> None:
        """Where packages come from, under the names with which mkosi would write its own addresses."""
        if not self._is_new:
            for name in (
                "sources.list",
                *(f"sources.list.d/{RELEASE}-{n}.list" for n in ("updates", "security")),
            ):
                (etc / name).write_text("")
        (etc / "sources.list.d/mkosi.sources").write_text(debian_sources(RELEASE))


class DiskImageBuilder:
    """The image by diskimage-builder: one ext4 file system, no boot loader.

    Its disks with partitions need nodes of loop devices, which are not everywhere.

    Args:
        folder: An empty folder; its caches stay in it.
        log: For what it prints.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._log = folder, log

    def build(self) -> Measured:
        """Build, keeping the packages and the bootstrapped system for the next build.

        Returns:
            What it took.

        Raises:
            VoidError: It is missing or failed, or it is not the image.
        """
        folder, release = self._folder, release_of("disk-image-create")
        for name in ("cache", "locks", "work"):
            (folder / name).mkdir(exist_ok=True)
        sources = entries(debian_sources(RELEASE))
        lines = [f"source{n}:deb {uri} {suite} {COMPONENTS}" for n, (uri, suite) in enumerate(sources)]
        environment = {
            **os.environ,
            "TMP_DIR": str(folder / "work"),
            "DIB_LOCKFILES": str(folder / "locks"),
            "DIB_RELEASE": RELEASE,
            "DIB_DISTRIBUTION_MIRROR": _mirror(),
            "DIB_DEBIAN_COMPONENTS": COMPONENTS.replace(" ", ","),
            "DIB_APT_SOURCES_CONF": "\n".join(lines),
            "DIB_DEBOOTSTRAP_CACHE": "1",
            "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "1",
            "DIB_NO_TIMESTAMP": "1",
        }
        image = folder / "image.raw"
        image.unlink(missing_ok=True)
        with stopwatch() as result:
            run(
                self._log,
                *("disk-image-create", "-n", "-a", "amd64", "-t", "raw", "-o", str(image), "--no-tmpfs"),
                *("--image-size", str(SIZE_GIB), "--image-cache", str(folder / "cache")),
                *("-p", ",".join(IMAGE), "debian-minimal"),
                under=PRIVATE_MOUNTS,
                env=environment,
            )
        mountpoint = folder / "mnt"
        mountpoint.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "ro,loop", "-t", "ext4", str(image), str(mountpoint)], check=True)
        try:
            require_image(mountpoint)
        finally:
            subprocess.run(["umount", str(mountpoint)], check=True)
        return replace(result[0], note=release)
