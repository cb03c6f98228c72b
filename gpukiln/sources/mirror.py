"""Makes a Debian root file system from this machine's own mirror, without its credentials."""

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
"""What a program runs under, so that all that it started ends with it and nothing stays mounted."""
CARRIED_OPTIONS = re.compile(r"Acquire::(Check-Valid-Until|Check-Date|https?::Proxy)\b")


def mirror_sources(release: str) -> str:
    """The mirror as Debian's own images would name it: main only.

    Args:
        release: The code name.

    Returns:
        A deb822 sources file that holds no secret.

    Raises:
        UnavailableError: The machine has no Debian entry, or one with credentials.
    """
    text = debian_sources(release)
    if "@" in re.sub(r"^Signed-By:.*$", "", text, flags=re.MULTILINE):
        raise UnavailableError(
            "this machine's apt sources hold a user name or password, which must not get into an image",
            hint="move them to /etc/apt/auth.conf.d and use a mirror or proxy that machines reach without",
        )
    return re.sub(r"^Components: .*$", "Components: main", text, flags=re.MULTILINE)


def mirror_options() -> list[str]:
    """This machine's apt settings without which its mirror can't be used; no credentials, no local proxy."""
    if not shutil.which("apt-config"):
        return []
    lines = apt_settings().splitlines()
    kept = [line.rstrip(";") for line in lines if CARRIED_OPTIONS.match(line) and not line.endswith('"";')]
    return [line for line in kept if not re.search(r"@|//(localhost|127\.)", line)]


def write_file(root: Path, name: str, text: str) -> None:
    """Write a file of a root file system; a script can be run."""
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
    """Make a root file system.

    Args:
        release: The code name.
        form: What the target becomes: directory or tar.
        variant: What of the distribution is in it, see mmdebstrap(1).
        packages: What is installed beside.
        sources: Where the sources file is written, which stays in the root file system, too.
        log: Where mmdebstrap's output goes.
        files: By path what is written before the packages are installed, whose scripts read it.

    Raises:
        UnavailableError: The mirror can't be reached, or mmdebstrap is missing or failed.
    """
    if not shutil.which("mmdebstrap"):
        raise UnavailableError("mmdebstrap is not installed", hint="apt-get install mmdebstrap")
    sources.write_text(mirror_sources(release))
    command = [
        *("setpriv", "--pdeathsig", "KILL", *NAMESPACES),
        *(
            "mmdebstrap",
            "--mode=root",
            f"--format={form}",
            f"--variant={variant}",
            f"--include={','.join(packages)}",
        ),
        *("--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io"),
        *(f"--aptopt={option}" for option in mirror_options()),
        *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
        *(release, str(target), str(sources)),
    ]
    if shutil.which("eatmydata"):
        command.insert(0, "eatmydata")
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        Path(folder).chmod(0o755)  # as the root becomes, of which it is a copy
        for name, text in (files or {}).items():
            write_file(Path(folder), name, text)
        if files:
            command[-3:-3] = [f"--essential-hook=sync-in {folder} /"]
        # beside the target lies what becomes of it: the disk, or the image
        done = programs.run(command, limit_s=programs.LONG_S, folder=target.parent, output=output)
    if done.returncode:
        said = log.read_text(errors="replace")
        if "No space left on device" in said:
            raise programs.disk_full(target.parent)
        tail = [line for line in said.splitlines() if line[:2] in ("E:", "W:")]
        raise UnavailableError(
            f"no Debian can be installed from this machine's mirror (log: {log})", details=tuple(tail[-6:])
        )
