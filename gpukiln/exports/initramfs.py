"""An initramfs of a disk's own kernel, with packages that the disk lacks; the disk is not changed.

The disk's root is the lower layer of an overlay in which the packages are unpacked and mkinitramfs runs. The
disk is not booted, mounts end with the process that made them, and the overlay is discarded.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpukiln import programs
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.files import remove
from gpukiln.locks import locked
from gpukiln.parsing import parse_json, read_text
from gpukiln.sources.apt import RELEASES, debian_sources, download_packages
from gpukiln.sources.mirror import NAMESPACES
from gpukiln.state import state_home

NEEDS_MIB = 1024  # packages, an unpacked initramfs of a kernel with every driver, the packed one
MAX_LINKS = 8  # squared: a path that takes more steps is a loop
OWN_ARGUMENTS = re.compile(r"(root|BOOT_IMAGE|resume|rootflags)=.*|ro|rw|quiet|splash")
"""Kernel arguments that only hold for the disk itself."""
SERVER_DRIVERS = (
    *("ahci", "nvme", "megaraid_sas", "mpt3sas", "usb_storage"),
    *("bnxt_en", "i40e", "ice", "igb", "ixgbe", "mlx5_core", "tg3"),
)
"""Disks and network cards of servers with GPUs; Debian's cloud kernel lacks most of them."""
UNSUPPORTED_BASES = {
    "ubuntu": "Ubuntu has casper and dracut-live in its own archive, which this machine's apt does not read",
    "rhel": "its dracut-live (module livenet) comes from its own repositories, by dnf",
    "rocky": "its dracut-live (module livenet) comes from its own repositories, by dnf",
    "almalinux": "its dracut-live (module livenet) comes from its own repositories, by dnf",
    "amzn": "its initramfs is dracut's, from its own repositories, by dnf",
}
"""Why a base is not supported, by ID of os-release."""
# In a mount namespace of its own (NAMESPACES), so all mounts end with the shell. mkinitramfs needs /proc and
# /dev; force-unsafe-io, since an overlay that is discarded needs no fsync.
BUILD = """
set -eu
cd "$1"
mkdir lower tmp root
mount --bind "$2" lower
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=tmp root
mount -t proc proc root/proc
mount --rbind /dev root/dev
chroot root dpkg --force-unsafe-io --install --recursive /gpukiln-packages
chroot root mkinitramfs -o /gpukiln-initrd.img "$3"
"""


@dataclass(frozen=True)
class Kernel:
    """The kernel that a disk boots.

    Args:
        file: Below the root of the disk.
        arguments: Its command line, without the arguments for the disk itself.
        missing_drivers: Drivers of common servers that it lacks.
    """

    version: str
    file: Path
    arguments: tuple[str, ...]
    missing_drivers: tuple[str, ...]


def release_of(root: Path, purpose: str) -> str:
    """The code name of the Debian release of a root file system.

    Args:
        purpose: What the initramfs is for, for the message.

    Raises:
        IncompatibleError: It is no Debian whose packages this machine's mirror has.
    """
    file = resolve(root, "/etc/os-release")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    assignments: list[tuple[str, str]] = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    fields = {key: value.strip('"') for key, value in assignments}
    system, release = fields.get("ID", ""), fields.get("VERSION_CODENAME", "")
    if system == "debian" and release in RELEASES:
        return release
    name = fields.get("PRETTY_NAME") or "no system with an os-release"
    raise IncompatibleError(
        f"{purpose} needs Debian's live-boot and initramfs-tools, and the disk has {name}"
        + (f": {UNSUPPORTED_BASES[system]}" if system in UNSUPPORTED_BASES else ""),
        hint="export it as qcow2 or raw, or bake the image on the base debian-12",
    )


def image_name(root: Path) -> str:
    """The image's name in a disk's record, for screens and files that people read."""
    file = resolve(root, "/etc/gpukiln/image.json")
    try:
        name = parse_json(read_text(file)).get("image") if file.is_file() else None
    except (ValueError, AttributeError):  # a damaged record costs the name, not the export
        name = None
    return str(name or "an image without a record")


def read_kernel(root: Path) -> Kernel:
    """The kernel of the first entry of a disk's GRUB menu.

    Raises:
        IncompatibleError: No entry of its grub.cfg names a kernel that exists.
    """
    config = resolve(root, "/boot/grub/grub.cfg")
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    first = re.search(r"^\s*linux\s+(\S+)(.*)$", text, re.MULTILINE)
    file = resolve(root, first[1]) if first else root
    if first is None or not file.is_file() or not file.name.startswith("vmlinuz-"):
        raise IncompatibleError(
            "the disk's /boot/grub/grub.cfg names no kernel that exists",
            hint="bake the image again; `update-grub` on a machine of the image writes the file",
        )
    version = file.name.removeprefix("vmlinuz-")
    # File names have dashes or underscores; the names of modules have underscores (modprobe(8)).
    have = "".join(
        resolve(root, f"/lib/modules/{version}/{name}").read_text(encoding="utf-8").replace("-", "_")
        for name in ("modules.dep", "modules.builtin")
    )
    missing_drivers = tuple(name for name in SERVER_DRIVERS if f"/{name}.ko" not in have)
    arguments = tuple(word for word in first[2].split() if not OWN_ARGUMENTS.fullmatch(word))
    return Kernel(version, file, arguments, missing_drivers)


def resolve(root: Path, path: str) -> Path:
    """Follow the links of a path as a process with this root directory would: never out of it."""
    # Path.resolve would follow an absolute link to a file of this computer.
    rest, reached = list(PurePosixPath(path.lstrip("/")).parts), root
    for _ in range(MAX_LINKS * MAX_LINKS):
        if not rest:
            return reached
        part = rest.pop(0)
        if part == "..":
            reached = reached.parent if reached != root else root
        elif (reached / part).is_symlink():
            target = PurePosixPath((reached / part).readlink())
            reached = root if target.is_absolute() else reached
            rest = [name for name in target.parts if name != "/"] + rest
        else:
            reached /= part
    raise IncompatibleError(f"{path} of the disk is a loop of links", hint="bake the image again")


def build_initramfs(
    root: Path,
    kernel: Kernel,
    *,
    release: str,
    packages: Sequence[str],
    files: Mapping[str, str],
    target: Path,
) -> None:
    """Make an initramfs of a root file system with further packages and files.

    Args:
        root: Where it is mounted; only read.
        packages: Debian packages; their dependencies are added.
        files: By the path below the root, the text; a text with a shebang becomes executable.

    Raises:
        UnavailableError: The mirror can't be reached, or a tool failed; the message names the log.
    """
    home = state_home() / "exports"
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "lock"):  # so every folder that exists here is an orphan of a killed process
        for orphan in home.glob("scratch-*"):
            remove(orphan)
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=home) as folder:
            upper = Path(folder) / "upper"
            upper.mkdir(mode=0o755)
            _write(upper, files)
            download_packages(
                packages,
                into=upper / "gpukiln-packages",
                status=root / "var/lib/dpkg/status",
                cache=home / "apt",
                sources=debian_sources(release),
            )
            _run_build(Path(folder), root, kernel.version, home / "initramfs.log")
            shutil.copyfile(upper / "gpukiln-initrd.img", target)


def _write(upper: Path, files: Mapping[str, str]) -> None:
    texts = {
        # MODULES=most: the machine that boots it is not known. RESUME=none: it waits for no swap partition.
        # The second file keeps the packages' triggers from rebuilding the disk's own initramfs.
        "etc/initramfs-tools/conf.d/gpukiln": "MODULES=most\nBUSYBOX=y\nRESUME=none\nCOMPRESS=zstd\n",
        "etc/initramfs-tools/update-initramfs.conf": "update_initramfs=no\n",
        **files,
    }
    for name, text in texts.items():
        file = upper / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if text.startswith("#!") else 0o644)


def _run_build(folder: Path, root: Path, version: str, log: Path) -> None:
    command = [
        # the shell ends with this process, and its mounts with the shell
        *("setpriv", "--pdeathsig", "KILL", *NAMESPACES),
        *("sh", "-c", BUILD, "sh", str(folder), str(root), version),
    ]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    with log.open("wb") as output:
        done = programs.run(
            command,
            limit_s=programs.LONG_S,
            folder=folder,
            needs_mib=NEEDS_MIB,
            output=output,
            environment=environment,
        )
    if done.returncode:
        raise UnavailableError(
            f"the initramfs of kernel {version} can't be made (log: {log})",
            details=tuple(log.read_text(errors="replace").splitlines()[-6:]),
        )
