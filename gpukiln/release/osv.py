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

LARGEST = 2 << 30  # bytes; the whole of osv.dev for a distribution has some hundred MiB
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
class Range:
    """Versions of one kind: ECOSYSTEM has the package manager's; the others don't concern packages."""

    type: str
    events: tuple[OsvEvent, ...]


@dataclass(frozen=True)
class OsvPackage:
    """A package: for Debian and Ubuntu the source package."""

    ecosystem: str
    name: str


@dataclass(frozen=True)
class Affected:
    """Which versions of a package have the flaw."""

    package: OsvPackage | None = None
    ranges: tuple[Range, ...] = ()
    versions: tuple[str, ...] = ()
    ecosystem_specific: dict[str, Any] | None = None


@dataclass(frozen=True)
class OsvEntry:
    """The part of an OSV entry that is used; what else an entry holds is allowed and left alone."""

    id: str
    modified: str
    affected: tuple[Affected, ...] = ()
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
        UsageError: A file can't be read or holds something else; the message names the record.
    """
    entries = []
    for path in paths:
        found = 0
        for where, document in _documents(path):
            if not isinstance(document, dict):
                raise UsageError(f"{where} is no record of OSV", hint=HINT)
            entry = load(OsvEntry, document, where=where)
            found += 1
            if not entry.withdrawn:
                entries.append(entry)
        if not found:
            raise UsageError(f"{path} holds no record", hint=HINT)
    return entries


def _documents(path: Path) -> Iterator[tuple[str, object]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
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
    try:
        document = parse_json(content, largest=LARGEST)
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


def is_affected(version: str, affected: Affected, os_family: str) -> bool | None:
    """Whether a version has a flaw, by the evaluation that the schema prescribes.

    Args:
        version: The version of the package.
        affected: What the record says of that package.
        os_family: debian or redhat.

    Returns:
        None where a version of the two can't be compared.
    """
    if version in affected.versions:
        return True
    for one in affected.ranges:
        if one.type == "ECOSYSTEM":
            inside = _inside(version, one.events, os_family)
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
        if event.introduced is not None:
            inside |= event.introduced == "0" or installed >= point
        elif event.fixed is not None:
            inside &= installed < point
        else:
            inside &= installed <= point
    return inside


def first_fixed(version: str, affected: Affected, os_family: str) -> str:
    """The version that mends a flaw for whoever has a version.

    Args:
        version: The version that is installed and affected.
        affected: What the record says of that package.
        os_family: debian or redhat.

    Returns:
        The lowest fixed version above it; an empty string: there is none yet.
    """
    installed = parse(version, os_family)
    fixes = []
    for one in affected.ranges:
        for event in one.events:
            point = parse(event.fixed, os_family) if event.fixed else None
            if event.fixed and point and installed and point > installed:
                fixes.append((point, event.fixed))
    return min(fixes, key=lambda pair: pair[0])[1] if fixes else ""
