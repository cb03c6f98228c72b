"""Docker Engine and Podman for the tests, of Debian's packages, without installing them.

Installed, Docker Engine would start a daemon that changes the firewall. Unpacked beside the sources,
a program is only there; apt has checked where it is from.
"""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from filelock import FileLock

from gpukiln.catalog.load import ROOT

KEPT = ROOT / ".cache/engines"
PACKAGES = {  # 76 MB to fetch, 290 MB unpacked
    "docker": ("docker.io", "containerd", "runc"),
    "podman": ("podman", "conmon", "runc"),
}
PROGRAMS = {"docker": ("docker", "dockerd"), "podman": ("podman",)}

# Docker starts it with the container's state as its input where a container is given GPUs, and wants exit 0
# (NVIDIA/nvidia-container-toolkit, cmd/nvidia-container-runtime-hook; OCI runtime specification, prestart).
GPU_HOOK = "#!/bin/sh\nexec cat >/dev/null\n"
IN_ROOT = ("/bin/sh", "/bin/cat", "/bin/sleep", "/usr/bin/env", "/usr/bin/id", "/bin/chmod")


def small_root(root: Path) -> Path:
    """A root file system of a few programs of this machine and their libraries, as a tar."""
    root.chmod(0o755)
    (root / "tmp").mkdir()
    for program in IN_ROOT:
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in (program, *re.findall(r"(/\S+) \(0x", said)):
            target = root / (file.removeprefix("/usr") if file in IN_ROOT else file).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    tar = root.with_suffix(".tar")
    with tarfile.open(tar, "w") as archive:
        archive.add(root, "/")
    return tar


def offer(name: str, patch: pytest.MonkeyPatch) -> None:
    """Put an engine on PATH, where it is not installed; skip the test where it can't be had.

    Args:
        name: docker or podman.
        patch: Takes it away again.
    """
    if all(shutil.which(program) for program in PROGRAMS[name]):
        return
    by_hand = f"`apt-get install {' '.join(PACKAGES[name])}`, then scripts/run pytest tests/e2e"
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip(f"{name} is not installed, and there is no apt to fetch it with")
    folder = KEPT / name
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(KEPT / f"{name}.lock"):  # several processes of a run may need it at once
        why = "" if folder.is_dir() else unpack(PACKAGES[name], folder)
    if why:
        pytest.skip(f"{name} is not installed, and can't be fetched ({why}): `apt-get update`, or {by_hand}")
    bins = [str(folder / "usr/sbin"), str(folder / "usr/bin")]
    patch.setenv("PATH", ":".join([*bins, os.environ["PATH"]]))
    for program in PROGRAMS[name]:
        libraries = subprocess.run(
            ["ldd", str(shutil.which(program))], capture_output=True, text=True, check=False
        ).stdout
        if lacking := [line.split()[0] for line in libraries.splitlines() if "not found" in line]:
            pytest.skip(f"{name} is not installed, and lacks {', '.join(lacking)} here: {by_hand}")


def unpack(packages: tuple[str, ...], folder: Path) -> str:
    """Fetch and unpack packages; returns why not, or an empty string."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (files := partial / "packages").mkdir(parents=True)
    # root's own folder: apt's user could not write there
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *packages]
    try:
        done = subprocess.run(
            command,
            cwd=files,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return "no end in 300 s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["apt-get download failed"])[0]
    for package in files.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(partial)], check=True)
    shutil.rmtree(files)
    partial.rename(folder)
    return ""
