"""Gathers whether the GPUs of this machine are simulated, and files of the simulation on its disk.

The embedded cloud gives an instance such GPUs: a simulated NVML library and a
simulated nvidia-smi, both mounted over the image's own files. A machine booted from an image that
was baked there must not carry them. Runs on the machine that is verified, by the rules of
`gpukiln.probe.gather`.
"""

# ruff: noqa: PTH112, PTH113, PTH118, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from gpukiln.probe.base import pci_gpus, read, run

FOLDER = "/run/gpukiln-simulated"
NOTE = "/etc/gpukiln/simulated-gpus"
UNIT = "gpukiln-simulated-gpus.service"
UNITS = f"/etc/systemd/system/{UNIT}"
WANTS_LINKS = f"/etc/systemd/system/*.wants/{UNIT}"
MOUNTINFO = "/proc/self/mountinfo"
LIBRARY, NVIDIA_SMI = "libnvidia-ml.so", "nvidia-smi"
# The state at the end of the simulated library begins with this header, at this distance from the file's end.
HEADER, STATE_BYTES = b"gpukiln simulated GPUs 1".ljust(32, b"\0"), 4096 + 2 * 524288
SMI_MARK, SMI_BYTES = b"gpukiln simulated nvidia-smi", 16 << 20
LIBRARIES = (
    *(
        f"/usr/lib/{machine}-linux-gnu{below}"
        for machine in ("x86_64", "aarch64")
        for below in ("", "/nvidia", "/nvidia/current")
    ),
    *("/usr/lib64", "/usr/lib64/nvidia", "/usr/lib", "/usr/lib/nvidia", "/usr/lib/nvidia/current"),
    *("/usr/local/lib", "/usr/local/lib64", "/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"),
)
# Where the dynamic linker looks after its cache: ld.so(8), on Debian and on others.
DEFAULT_FOLDERS = (
    *(f"{top}/{machine}-linux-gnu" for top in ("/lib", "/usr/lib") for machine in ("x86_64", "aarch64")),
    *("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
)
PROGRAMS = (
    *("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/local/nvidia/bin"),
    *("/usr/lib/nvidia", "/usr/lib/nvidia/current", "/usr/lib64/nvidia", "/opt/bin"),
)


def simulated() -> dict[str, Any]:
    """{machine: whether its GPUs are simulated, disk: paths of the simulation on the disk}."""
    return {"machine": is_simulated(), "disk": sorted(_disk_paths())}


def is_simulated() -> bool:
    """Whether the NVML library of this machine is the simulated one."""
    return os.path.isdir(FOLDER) or any(is_double(path) for path in _library_paths())


def gpus_to_ask() -> bool:
    """Whether NVML and nvidia-smi have GPUs; simulated ones are on no bus."""
    return bool(pci_gpus()) or is_simulated()


def is_double(path: str) -> bool:
    """Whether a file is the simulated NVML library, by its header."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A real NVML library is smaller or has other bytes there.
            if size < STATE_BYTES:
                return False
            file.seek(size - STATE_BYTES)
            return file.read(len(HEADER)) == HEADER
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _is_stand_in(path: str) -> bool:
    """Whether a file is the simulated nvidia-smi."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return SMI_MARK in file.read(SMI_BYTES)


def _cached_libraries() -> list[str]:
    """The paths of the library in the dynamic linker's cache."""
    said = run("ldconfig", "-p")["out"]
    return re.findall(rf"(?m)^\s*{re.escape(LIBRARY)}\S* .*=> (\S+)$", said)


def _library_paths() -> Iterator[str]:
    """The paths where programs find the library."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield os.path.join(folder, f"{LIBRARY}.1")
    yield from _cached_libraries()
    # ldconfig leaves out a file that it can't map, such as one on virtiofs; the linker finds it all the same.
    for folder in DEFAULT_FOLDERS:
        yield os.path.join(folder, f"{LIBRARY}.1")


def _disk_paths() -> set[str]:
    """Files of the simulation on the disk; not a file that is mounted over another one."""
    mounted = _mount_points()

    def real(paths: Iterable[str]) -> set[str]:
        return {os.path.realpath(path) for path in paths} - mounted

    libraries = [path for folder in LIBRARIES for path in glob.glob(f"{folder}/{LIBRARY}*")]
    programs = [f"{folder}/{NVIDIA_SMI}" for folder in PROGRAMS]
    left = {path for path in (NOTE, UNITS, *glob.glob(WANTS_LINKS)) if os.path.lexists(path)} - mounted
    left |= {
        path for path in real([*libraries, *_cached_libraries()]) if not _in_memory(path) and is_double(path)
    }
    return left | {path for path in real(programs) if not _in_memory(path) and _is_stand_in(path)}


def _in_memory(path: str) -> bool:
    """Whether a link leads into the folder from which the embedded cloud mounts."""
    return path.startswith(f"{os.path.realpath(FOLDER)}/")


def _mount_points() -> set[str]:
    """Proc_pid_mountinfo(5): the fifth field, in which octal numbers stand for blanks."""
    lines = [line.split(" ") for line in (read(MOUNTINFO) or "").splitlines()]
    points = (fields[4] for fields in lines if len(fields) > 4)
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in points}
