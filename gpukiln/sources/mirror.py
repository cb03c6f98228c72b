"""Creates a Debian root file system from this machine's mirror, without the mirror's credentials."""

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import UnavailableError
from gpukiln.sources.apt import apt_settings, debian_sources

NAMESPACES = (
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL"),
    "--mount-proc",
)
"""Namespaces for a program: all its processes end with it, and nothing stays mounted."""
# Snapshots of an archive have expired Release files, and need Check-Valid-Until; a machine may reach the
# network through a proxy only.
CARRIED_OPTIONS = re.compile(r"Acquire::(Check-Valid-Until|Check-Date|https?::Proxy)\b")


def mirror_sources(release: str) -> str:
    """The mirror with the component main only, as in Debian's own images.

    Args:
        release: The code name.

    Returns:
        A deb822 sources file without credentials.

    Raises:
        UnavailableError: The machine has no Debian entry, or one with credentials.
    """
    text = debian_sources(release)
    if "@" in re.sub(r"^Signed-By:.*$", "", text, flags=re.MULTILINE):
        raise UnavailableError(
            "this machine's apt sources have a user name or password, which must not get into an image",
            hint="move them to /etc/apt/auth.conf.d, and use a mirror or proxy that needs none",
        )
    return re.sub(r"^Components: .*$", "Components: main", text, flags=re.MULTILINE)


def mirror_options() -> list[str]:
    """This machine's apt settings that its mirror needs, without credentials and local proxies."""
    if not shutil.which("apt-config"):
        return []
    lines = apt_settings().splitlines()
    kept = [line.rstrip(";") for line in lines if CARRIED_OPTIONS.match(line) and not line.endswith('"";')]
    # A proxy on this computer's loopback does not exist on a machine.
    return [line for line in kept if not re.search(r"@|//(localhost|127\.)", line)]


def write_file(root: Path, name: str, text: str) -> None:
    """Write a file of a root file system; a script gets mode 0755."""
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(0o755 if text.startswith("#!") else 0o644)


def install_debian(
    release: str,
    target: Path,
    *,
    form: str,
    variant: str,
    packages: Iterable[str],
    sources: Path,
    log: Path,
    files: Mapping[str, str] | None = None,
) -> None:
    """Create a root file system.

    Args:
        release: The code name.
        form: What the target becomes: directory or tar.
        variant: mmdebstrap's variant, which decides on the packages (mmdebstrap(1)).
        packages: Further packages.
        sources: The path for the sources file, which is also kept in the root file system.
        log: Where mmdebstrap's output goes.
        files: Text by path, written before packages are installed, for their scripts to read.

    Raises:
        UnavailableError: The mirror can't be reached, or mmdebstrap is missing or failed.
    """
    if not shutil.which("mmdebstrap"):
        raise UnavailableError("mmdebstrap is not installed", hint="apt-get install mmdebstrap")
    sources.write_text(mirror_sources(release))
    command = [
        # If gpukiln is killed, mmdebstrap would go on and keep mounts in the target.
        *("setpriv", "--pdeathsig", "KILL", *NAMESPACES),
        *(
            "mmdebstrap",
            # mmdebstrap's other modes need user namespaces or fakeroot; gpukiln runs as root here anyway.
            "--mode=root",
            f"--format={form}",
            f"--variant={variant}",
            f"--include={','.join(packages)}",
        ),
        # force-unsafe-io saves dpkg's fsync for each file; a root file system that is not complete is thrown
        # away.
        *("--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io"),
        *(f"--aptopt={option}" for option in mirror_options()),
        # Nobody reads manuals and translations on a machine, and they take space in every image.
        *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
        *(release, str(target), str(sources)),
    ]
    # It also removes the fsync calls of maintainer scripts, where it is installed.
    if shutil.which("eatmydata"):
        command.insert(0, "eatmydata")
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # sync-in copies its mode to the root folder, which every user must be able to enter
        Path(folder).chmod(0o755)
        for name, text in (files or {}).items():
            write_file(Path(folder), name, text)
        if files:
            # The essential hook runs before the other packages are installed (mmdebstrap(1)), whose scripts
            # read these files.
            command[-3:-3] = [f"--essential-hook=sync-in {folder} /"]
        # the disk or image that is made of the target is in the same folder and needs space too
        done = programs.run(command, limit_s=programs.LONG_S, folder=target.parent, output=output)
    if done.returncode:
        said = log.read_text(errors="replace")
        if "No space left on device" in said:
            raise programs.disk_full(target.parent)
        tail = [line for line in said.splitlines() if line[:2] in ("E:", "W:")]
        raise UnavailableError(
            f"Debian can't be installed from this machine's mirror (log: {log})", details=tuple(tail[-6:])
        )
