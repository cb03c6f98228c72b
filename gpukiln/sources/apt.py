"""The Debian mirror of this machine: its address, and the package versions that it has.

The machine's own apt state is neither read nor changed, and root is not needed.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import UnavailableError
from gpukiln.files import remove
from gpukiln.locks import locked
from gpukiln.units import MIB

ETC = Path("/etc/apt")
# Debian releases whose entries are taken over; a machine may list other archives in the same files.
RELEASES = ("bullseye", "bookworm", "trixie", "forky")
# The driver is in non-free, its firmware since bookworm in non-free-firmware.
COMPONENTS = "main contrib non-free non-free-firmware"
MAX_AGE_S = 3600
"""How long fetched package lists count as fresh, in seconds."""
LISTS_MIB = 150
"""Disk space for the lists of Debian 12 with its security suite and apt's index: 123 MiB in 2026."""
# For the packages of `download_packages`, which are small tools.
PACKAGES_MIB = 50


@dataclass(frozen=True)
class _Entry:
    uri: str
    suite: str
    options: tuple[tuple[str, str], ...]


def strip_credentials(text: str) -> str:
    """Remove user names and passwords from every address in a text for messages.

    Returns:
        The text with `scheme://user:password@host` shortened to `scheme://host`.

    >>> strip_credentials("http://user:secret@mirror.example/debian")
    'http://mirror.example/debian'
    >>> strip_credentials("http://mirror.example/debian")
    'http://mirror.example/debian'
    """
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)


def debian_sources(release: str = "bookworm", *, etc: Path = ETC) -> str:
    """The Debian archive through this machine's mirror, for a private apt or a new root file system.

    Addresses and keys are those of the machine's own Debian entries, of whatever release.

    Args:
        release: The code name of the release that is wanted.
        etc: The machine's /etc/apt.

    Returns:
        A deb822 sources file for the release, its updates and its security suite, with every component.
        It may contain credentials: write it only where no other user can read it, and never print it.

    Raises:
        UnavailableError: The machine has no Debian entry.
    """
    stanzas: dict[tuple[str, str], str] = {}
    for entry in _machine_entries(etc):
        code_name, _, suffix = entry.suite.partition("-")
        # Without backports and proposed-updates, whose versions an image should not get by accident.
        if code_name not in RELEASES or suffix not in ("", "updates", "security"):
            continue
        suite = f"{release}-{suffix}" if suffix else release
        lines = ["Types: deb", f"URIs: {entry.uri}", f"Suites: {suite}", f"Components: {COMPONENTS}"]
        # A key that is embedded in the file begins on the next line (sources.list(5), Signed-By), without a
        # space before the line end.
        lines += [f"{key}: {value}".replace(": \n", ":\n", 1) for key, value in entry.options]
        stanzas.setdefault((entry.uri, suite), "\n".join(lines) + "\n")
    if not any(suite == release for _, suite in stanzas):
        raise UnavailableError(
            f"no Debian archive found in {etc}/sources.list and {etc}/sources.list.d",
            hint=f"run this on Debian, or add an entry for {release}",
        )
    return "\n".join(stanzas.values())


def _machine_entries(etc: Path) -> Iterator[_Entry]:
    folder = etc / "sources.list.d"
    for path in (etc / "sources.list", *sorted(folder.glob("*.list"))):
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                yield from _parse_line(line)
    for path in sorted(folder.glob("*.sources")):
        for stanza in re.split(r"\n[ \t]*\n", path.read_text(encoding="utf-8")):
            yield from _parse_stanza(stanza)


def _parse_line(line: str) -> Iterator[_Entry]:
    """Read `deb [signed-by=...] URI SUITE COMPONENT...` (man sources.list).

    >>> list(_parse_line("deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main"))
    [_Entry(uri='http://mirror.example/debian', suite='bookworm', options=(('Signed-By', '/k.gpg'),))]
    >>> list(_parse_line("# deb http://mirror.example/debian bookworm main"))
    []
    """
    # `deb-src` lines do not match: source packages are not needed.
    match = re.match(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+\S", line.partition("#")[0].strip())
    if match:
        options = dict(item.split("=", 1) for item in (match[1] or "").split() if "=" in item)
        names = {"signed-by": "Signed-By", "trusted": "Trusted"}
        kept = tuple((names[key.lower()], value) for key, value in options.items() if key.lower() in names)
        yield _Entry(match[2], match[3], kept)


def _parse_stanza(text: str) -> Iterator[_Entry]:
    """Read one stanza of a deb822 sources file (man sources.list)."""
    fields: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        # Continuation lines, of an embedded key (deb822(5)).
        if line[0] in " \t":
            fields[key] += f"\n{line}"
        elif ":" in line:
            key, _, value = line.partition(":")
            key = key.strip().lower()
            fields[key] = value.strip()
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in (
        "no",
        "false",
    ):
        return
    names = {"signed-by": "Signed-By", "trusted": "Trusted"}
    options = tuple((name, fields[key]) for key, name in names.items() if key in fields)
    for uri in fields.get("uris", "").split():
        for suite in fields.get("suites", "").split():
            yield _Entry(uri, suite, options)


def candidate_versions(
    packages: Sequence[str],
    *,
    cache: Path,
    sources: str | None = None,
    refresh: bool = False,
) -> dict[str, str]:
    """The version of each package that apt would install from this machine's Debian mirror.

    Package lists in `cache` that are older than an hour are fetched again.

    Args:
        packages: Package names.
        cache: A folder for the private apt state.
        sources: A deb822 sources file; the machine's own Debian archive when None.
        refresh: Whether to fetch the lists even when they are fresh.

    Returns:
        Name to version; a package that the archive does not have is absent.

    Raises:
        UnavailableError: There is no apt here, no Debian entry, or the mirror can't be reached.
    """
    # Checked here for a message that names the reason: developers may work on Fedora or macOS.
    if not shutil.which("apt-get"):
        raise UnavailableError("found no apt-get, which asks the Debian mirror", hint="run this on Debian")
    text = debian_sources() if sources is None else sources
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        config = _write_config(cache, text)
        _fetch_lists(cache, config, text, needs_mib=LISTS_MIB if sources is None else 1, refresh=refresh)
        return parse_policy(_run_apt(config, "apt-cache", "policy", *packages))


def download_packages(
    packages: Sequence[str], *, into: Path, status: Path, cache: Path, sources: str
) -> None:
    """Fetch packages and their missing dependencies for a root file system; apt verifies their signatures.

    Args:
        into: The folder for the packages; created.
        status: dpkg's status file of that root file system.
        cache: A folder for the private apt state, see `candidate_versions`.
        sources: A deb822 sources file.

    Raises:
        UnavailableError: The mirror can't be reached, or lacks a package.
    """
    (into / "partial").mkdir(parents=True)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        config = _write_config(cache, sources)
        _fetch_lists(cache, config, sources, needs_mib=LISTS_MIB, refresh=False)
        # With that root file system's own status apt resolves what it lacks, not what this machine lacks. As
        # the user _apt it could not write into `into`.
        options = {"Dir::State::status": status, "Dir::Cache::archives": into, "APT::Sandbox::User": "root"}
        _run_apt(
            config,
            *("apt-get", "-qq", "--yes", "--no-install-recommends", "--download-only"),
            *(f"--option={key}={value}" for key, value in options.items()),
            *("install", *packages),
            needs_mib=PACKAGES_MIB,
        )
    # apt creates both; the folder becomes part of a root file system.
    for path in (into / "partial", into / "lock"):
        remove(path)


def _fetch_lists(cache: Path, config: Path, text: str, *, needs_mib: int, refresh: bool) -> None:
    stamp = cache / "fetched"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if not refresh and _is_fresh(stamp, digest):
        return
    # If apt fails or is killed now, the lists count as old.
    stamp.unlink(missing_ok=True)
    present = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    # Fetching again replaces the lists, so that their present size is available.
    needs = max(1, needs_mib - present // MIB)
    _run_apt(config, "apt-get", "-qq", "update", "--error-on=any", needs_mib=needs)
    stamp.write_text(digest, encoding="utf-8")


def _is_fresh(stamp: Path, digest: str) -> bool:
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != digest:
        return False
    return time.time() - stamp.stat().st_mtime < MAX_AGE_S


def _write_config(cache: Path, sources: str) -> Path:
    """Write a private apt configuration that takes over only proxies and timeouts from the machine's."""
    for folder in ("lists/partial", "archives/partial", "empty"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    _write_private(cache / "archive.sources", sources)
    if not (cache / "status").exists():
        (cache / "status").touch()
    settings = {
        # Each of these keeps apt from reading the machine's own files, so that a result does not depend on
        # its preferences and holds.
        "Dir::Etc::main": "/dev/null",
        "Dir::Etc::parts": cache / "empty",
        "Dir::Etc::sourcelist": cache / "archive.sources",
        "Dir::Etc::sourceparts": cache / "empty",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": cache / "empty",
        "Dir::State::lists": cache / "lists",
        "Dir::State::status": cache / "status",
        "Dir::Cache": cache,
        "Dir::Cache::archives": cache / "archives",
        # The embedded cloud has machines of this architecture only.
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        # Translations of package descriptions are not needed here.
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    dump = apt_settings()
    # Proxies and certificates of a company are in these settings.
    network = re.findall(r"^Acquire::(?:https?|ftp|tor).*$", dump, flags=re.MULTILINE | re.IGNORECASE)
    own = [f'{key} "{value}";' for key, value in settings.items()]
    path = cache / "apt.conf"
    _write_private(path, "\n".join([*network, *own, ""]))
    return path


def apt_settings() -> str:
    """This machine's settings of apt, as `apt-config dump` prints them."""
    done = programs.run(["apt-config", "dump"], limit_s=programs.QUICK_S)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UnavailableError(
            f"apt can't read its settings: {said[0] if said else f'exit {done.returncode}'}",
            hint="fix /etc/apt/apt.conf and /etc/apt/apt.conf.d: `apt-config dump` shows the error",
        )
    return done.stdout.decode(errors="replace")


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, because addresses may contain credentials.

    A file with the same text is left alone: apt rebuilds its cache when a file that it read is newer.
    """
    # pkgcache.bin is rebuilt when a sources file is newer, which takes seconds.
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def _run_apt(config: Path, *command: str, needs_mib: int = 0) -> str:
    """Run apt. With `needs_mib` it writes next to its configuration; on a full disk it would wait forever."""
    done = programs.run(
        command,
        limit_s=programs.NETWORK_S if needs_mib else programs.QUICK_S,
        folder=config.parent if needs_mib else None,
        needs_mib=needs_mib,
        # The messages and `apt-cache policy` are parsed.
        environment={**os.environ, "APT_CONFIG": str(config), "LC_ALL": "C"},
    )
    if done.returncode:
        lines = strip_credentials(done.stderr.decode(errors="replace")).strip().splitlines()
        # apt's own first line is about a list that can't be parsed; the cause is in a later one.
        if any("No space left on device" in line for line in lines):
            raise programs.disk_full(config.parent, needs_mib)
        wrong = [line for line in lines if line.startswith("E:")] or lines or ["no message"]
        raise UnavailableError(
            f"the Debian mirror can't be used: {wrong[0]}",
            hint="check the network and /etc/apt, then try again",
            details=tuple(line for line in lines if line != wrong[0]),
        )
    return done.stdout.decode()


def parse_policy(text: str) -> dict[str, str]:
    r"""Read the output of `apt-cache policy`.

    Args:
        text: The output in the C locale.

    Returns:
        Package name to candidate version, without the packages that have none.

    >>> parse_policy("nvtop:\n  Installed: (none)\n  Candidate: 3.0.1-1\n")
    {'nvtop': '3.0.1-1'}
    >>> parse_policy("nvtop:\n  Installed: (none)\n  Candidate: (none)\n")
    {}
    """
    rows = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (.*)$", text, flags=re.MULTILINE)
    return {name: version for name, version in rows if version != "(none)"}


def upstream_version(version: str) -> str:
    """The part of a Debian version that the author of the software chose.

    Args:
        version: For example "535.309.01-0+deb12u1" or "1:1.2-3".

    Returns:
        For example "535.309.01".

    >>> upstream_version("535.309.01-0+deb12u1")
    '535.309.01'
    >>> upstream_version("1:1.2-3")
    '1.2'
    """
    without_epoch = version.rpartition(":")[2]
    return without_epoch.rpartition("-")[0] or without_epoch
