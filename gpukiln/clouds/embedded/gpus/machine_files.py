"""The files of a machine's simulated GPUs, and the changes on its disk.

The machine has them in FOLDER: a container gets a copy when it runs, a virtual machine mounts the folder by
virtiofs. A unit bind-mounts the library over that of the image's driver and creates the device nodes before
other units start. The image's own files stay unchanged.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.clouds.embedded.gpus.library import build, build_load, build_smi
from gpukiln.clouds.embedded.gpus.start import write_initial_state
from gpukiln.clouds.embedded.gpus.state import State

FOLDER = Path("/run/gpukiln-simulated")
MARKER = Path("/etc/gpukiln/simulated-gpus")
SHARE = "gpukiln-gpus"  # the tag of a virtual machine's share
UNIT = "gpukiln-simulated-gpus.service"
UP = "up"  # script
LIBRARY, SMI, LOAD = "libnvidia-ml.so", "nvidia-smi", "gpukiln-gpu-load"
# Debian (with its alternatives) and Ubuntu; RHEL, Amazon Linux and others; the defaults of ld.so(8).
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
)
MARKER_TEXT = """\
The machine with this disk had simulated GPUs. No result about GPUs on it is valid, and verification refuses
an image that is created from this disk.
"""
# Before sysinit.target: nvidia-persistenced, dcgm and engines start after it and must find the library.
UNIT_TEXT = """\
[Unit]
Description=Simulated GPUs (gpukiln): a double of NVML in place of the driver's
DefaultDependencies=no
After=local-fs.target systemd-modules-load.service
Before=sysinit.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh {script}
"""
# Below /run/systemd of a container.
CONTAINER_UNITS = {
    f"system/{UNIT}": UNIT_TEXT.format(
        script="-c 'until [ -e {0} ]; do sleep 0.05; done; . {0}'".format(FOLDER / UP)
    ),
    "system/sysinit.target.d/simulated-gpus.conf": f"[Unit]\nWants={UNIT}\n",
}
# 0x1a is the number of virtio's file systems (virtio 1.2, 5 Device Types); 195 is NVIDIA's major number, 255
# its control node (nvidia-modprobe, nvidia-modprobe-utils.h)
SCRIPT = f"""\
set -eu
if [ ! -e {FOLDER}/{LIBRARY} ]; then
  grep -qx 0x001a /sys/bus/virtio/devices/*/device || exit 0 # it was started without simulated GPUs
  mkdir -p {FOLDER}
  mount -t virtiofs {SHARE} {FOLDER}
fi
while read -r name target; do
  if ! grep -q " $target " /proc/self/mountinfo; then
    mount --bind {FOLDER}/"$name" "$target"
  fi
done < {FOLDER}/places
while read -r node minor; do
  # with NVIDIA's driver in this kernel such nodes would be real GPUs: they become /dev/null
  if grep -q '^195 ' /proc/devices; then
    numbers="1 3"
  else
    numbers="195 $minor"
  fi
  [ -e "/dev/$node" ] || mknod -m 666 "/dev/$node" c $numbers
done < {FOLDER}/nodes
"""
DOWN = f"""\
set -eu
while read -r name target; do
  if grep -q " $target " /proc/self/mountinfo; then
    umount "$target"
  fi
  [ -s "$target" ] || rm -f "$target" # an empty file that was created for the bind mount
done < {FOLDER}/places
while read -r node minor; do
  rm -f "/dev/$node"
done < {FOLDER}/nodes
rm -r {FOLDER}
"""


@dataclass(frozen=True)
class MachineFiles:
    """The files of one machine's simulated GPUs.

    Args:
        root: Root of the path: of this computer, or /proc/PID/root of a running container.
    """

    folder: Path
    root: Path = Path("/")

    @property
    def state(self) -> State:
        """The state that its GPUs answer from."""
        return State(self.folder / LIBRARY, self.root)

    def make(self, root: Path, built: Path, document: dict[str, Any], *, branch: int) -> None:
        """Create the files, in the state of a machine that has just started.

        Args:
            root: The machine's mounted root file system; it gets a marker, and empty files to mount over
                where it has no driver.
            built: Folder of the compiled files, shared by all machines.
            document: The document that its GPUs answer from.
            branch: Branch of the driver that the library stands for.

        Raises:
            UnavailableError: Compiling failed.
        """
        if self.folder.exists():  # a virtual machine could write to the folder and place links there
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        for name, source in (
            (LIBRARY, build(built, branch=branch)),
            (SMI, build_smi(built)),
            (LOAD, build_load(built)),
        ):
            shutil.copy(source, self.folder / name)
            (self.folder / name).chmod(0o755)
        places = in_root(root, _prepare_bind_targets)
        (self.folder / "places").write_text("".join(f"{name} {place}\n" for name, place in places))
        count = len(document["gpus"])
        nodes = device_nodes(count)
        (self.folder / "nodes").write_text("".join(f"{name} {minor}\n" for name, minor in nodes))
        (self.folder / UP).write_text(SCRIPT)
        write_initial_state(self.state, document)

    def put_unit(self, root: Path) -> None:
        """Install the unit on a virtual machine's disk; a container has it in /run."""
        in_root(root, _put_unit)


def device_nodes(count: int) -> list[tuple[str, int]]:
    """The device nodes of GPUs: name below /dev, minor number (nvidia-modprobe, nvidia-modprobe-utils.h).

    >>> device_nodes(2)
    [('nvidia0', 0), ('nvidia1', 1), ('nvidiactl', 255)]
    """
    return [(f"nvidia{n}", n) for n in range(count)] + [("nvidiactl", 255)]


def driver_version(root: Path) -> str | None:
    """The version of the image's driver, from its library's name; None where it has no driver."""
    version = in_root(root, lambda: _library_path(Path("/"))).name.partition(".so.")[2]
    return version if "." in version else None


def _prepare_bind_targets() -> list[tuple[str, Path]]:
    """The targets of the bind mounts, created where the image has none; and the marker."""
    top = Path("/")
    places = [(LIBRARY, top / _library_path(top)), (SMI, top / _smi_path(top))]
    for _name, place in places:
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(0o644)  # not executable: an empty program must not seem to run
    MARKER.parent.mkdir(parents=True, exist_ok=True)
    MARKER.write_text(MARKER_TEXT)
    return places


def _put_unit() -> None:
    script, unit = MARKER.parent / "simulated-gpus.sh", Path("/etc/systemd/system") / UNIT
    script.write_text(SCRIPT)
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(UNIT_TEXT.format(script=script))
    link = unit.parent / "sysinit.target.wants" / UNIT
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"../{UNIT}")


def _library_path(root: Path) -> Path:
    """Path of the driver's library below the root; without a driver a path where the loader would look."""
    folders = [Path(name) for name in LIBRARY_FOLDERS if (root / name).is_dir()]
    for folder in folders:
        for file in sorted((root / folder).glob("libnvidia-ml.so.*.*")):
            if not file.is_symlink():
                return folder / file.name
    triplets = [folder for folder in folders if folder.name.endswith("-linux-gnu")]
    return next(iter(triplets or folders), Path("usr/lib64")) / "libnvidia-ml.so.1"


def _smi_path(root: Path) -> Path:
    """Target of /usr/bin/nvidia-smi inside the root; Debian's alternatives are two links."""
    place = Path("usr/bin/nvidia-smi")
    # A limit, because links can form a cycle.
    for _ in range(10):
        if not (root / place).is_symlink():
            break
        joined = Path("/") / place.parent / (root / place).readlink()
        place = Path(os.path.normpath(joined)).relative_to("/")
    return place
