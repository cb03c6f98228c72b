"""Vulnerability data in the OSV format (https://ossf.github.io/osv-schema/), from files of the user."""

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.parsing import LimitError, parse_json
from gpukiln.release.versions import parse
from gpukiln.typed import load

MAX_BYTES = 2 << 30  # all records of osv.dev for a distribution have some hundred MiB
HINT = (
    "wanted: a record, a list or lines of records in the OSV format, or a zip of them, for example"
    " https://osv-vulnerabilities.storage.googleapis.com/Debian:12/all.zip"
)


@dataclass(frozen=True)
class OsvEvent:
    """A version at which a range begins or ends; one of the fields is given."""

    introduced: str | None = None
    fixed: str | None = None
    last_affected: str | None = None
    limit: str | None = None


@dataclass(frozen=True)
class OsvRange:
    """Ranges of versions; the type ECOSYSTEM has the package manager's, GIT and SEMVER no packages'."""

    type: str
    events: tuple[OsvEvent, ...]


@dataclass(frozen=True)
class OsvPackage:
    """A package: for Debian and Ubuntu the source package."""

    ecosystem: str
    name: str


@dataclass(frozen=True)
class OsvAffected:
    """Which versions of a package have the flaw."""

    package: OsvPackage | None = None
    ranges: tuple[OsvRange, ...] = ()
    versions: tuple[str, ...] = ()
    ecosystem_specific: dict[str, Any] | None = None


@dataclass(frozen=True)
class OsvEntry:
    """The fields of an OSV entry that are used; other fields are ignored."""

    id: str
    modified: str
    affected: tuple[OsvAffected, ...] = ()
    aliases: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    summary: str = ""
    withdrawn: str | None = None
    database_specific: dict[str, Any] | None = field(default=None)


def load_named(text: str) -> list[OsvEntry] | None:
    """The entries of the files that `--vulnerabilities` names; None: it names none.

    Raises:
        UsageError: A file can't be read, or the text has no name.
    """
    if not text:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--vulnerabilities {text!r} names no file", hint="leave it out, or name one")
    return load_osv(Path(name) for name in names)


def load_osv(paths: Iterable[Path]) -> list[OsvEntry]:
    """Read OSV entries; withdrawn ones are left out.

    Args:
        paths: JSON, JSON lines, or zip files.

    Raises:
        UsageError: A file can't be read or is no OSV data; the message names the record.
    """
    entries = []
    # Each file is checked by itself, so that an empty one is not hidden by another.
    for path in paths:
        records = 0
        for where, document in _documents(path):
            if not isinstance(document, dict):
                raise UsageError(f"{where} is no record of OSV", hint=HINT)
            entry = load(OsvEntry, document, where=where)
            records += 1
            # Withdrawn records were published in error and must not be reported (OSV schema, withdrawn).
            if not entry.withdrawn:
                entries.append(entry)
        if not records:
            raise UsageError(f"{path} has no record", hint=HINT)
    return entries


def _documents(path: Path) -> Iterator[tuple[str, object]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # osv.dev's all.zip has one file a record.
                for name in archive.namelist():
                    if name.endswith(".json"):
                        yield from _parse(archive.read(name), f"{path}: {name}")
        else:
            yield from _parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}", hint=HINT) from error
    except zipfile.BadZipFile as error:
        raise UsageError(f"{path} is a damaged zip file: {error}", hint="fetch it again") from error


def _parse(content: bytes, where: str) -> Iterator[tuple[str, object]]:
    # One document, or one a line (JSON lines): the second is tried where the whole is no JSON.
    try:
        document = parse_json(content, largest=MAX_BYTES)
    except LimitError as error:
        raise UsageError(f"{where} is no record of OSV: {error}", hint=HINT) from error
    except ValueError as error:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) < 2:
            raise UsageError(f"{where} is no JSON: {error}", hint=HINT) from error
        for number, line in enumerate(lines, 1):
            try:
                yield f"{where}, record {number}", parse_json(line)
            except ValueError as wrong:
                raise UsageError(f"{where} is no JSON, line {number}: {wrong}", hint=HINT) from wrong
        return
    if isinstance(document, dict) and isinstance(document.get("vulns"), list):
        document = document["vulns"]  # as the API of osv.dev answers
    if isinstance(document, list):
        yield from ((f"{where}, record {number}", row) for number, row in enumerate(document, 1))
    else:
        yield where, document


def is_affected(version: str, affected: OsvAffected, os_family: str) -> bool | None:
    """Whether a version has a flaw, by the algorithm of the schema (section "Evaluation").

    >>> events = (OsvEvent(introduced="0"), OsvEvent(fixed="1.2-3"))
    >>> affected = OsvAffected(ranges=(OsvRange("ECOSYSTEM", events),))
    >>> is_affected("1.2-2", affected, "debian"), is_affected("1.2-3", affected, "debian")
    (True, False)

    Args:
        version: The version of the package.
        affected: What the record says of that package.
        os_family: debian or redhat.

    Returns:
        None where a version of the two can't be compared.
    """
    # Listed versions are affected whatever the ranges say (OSV schema, affected[].versions).
    if version in affected.versions:
        return True
    for versions in affected.ranges:
        if versions.type == "ECOSYSTEM":
            inside = _inside(version, versions.events, os_family)
            if inside is not False:
                return inside
    return False


def _inside(version: str, events: Iterable[OsvEvent], os_family: str) -> bool | None:
    installed = parse(version, os_family)
    if installed is None:
        return None
    points = []
    for event in events:
        text = event.introduced or event.fixed or event.last_affected
        if text is None:
            continue
        point = parse(text, os_family)
        if point is None:
            return None
        points.append((point, event))
    inside = False
    for point, event in sorted(points, key=lambda pair: pair[0]):
        # The schema's algorithm: events in the order of versions, each switches the state.
        if event.introduced is not None:
            # "0" is before every version, also before those of Debian with a tilde
            inside |= event.introduced == "0" or installed >= point
        elif event.fixed is not None:
            inside &= installed < point
        else:
            inside &= installed <= point
    return inside


def first_fixed(version: str, affected: OsvAffected, os_family: str) -> str:
    """The version that fixes a flaw for an installed version.

    Args:
        version: The version that is installed and affected.
        affected: What the record says of that package.
        os_family: debian or redhat.

    Returns:
        The lowest fixed version above it; an empty string: there is none yet.
    """
    installed = parse(version, os_family)
    fixes = []
    for versions in affected.ranges:
        for event in versions.events:
            point = parse(event.fixed, os_family) if event.fixed else None
            if event.fixed and point and installed and point > installed:
                fixes.append((point, event.fixed))
    return min(fixes, key=lambda pair: pair[0])[1] if fixes else ""
