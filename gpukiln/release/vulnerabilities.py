"""The known vulnerabilities of an image: shipped data of NVIDIA's components, OSV files of packages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpukiln.catalog import drivers
from gpukiln.catalog.container_toolkit import flaws
from gpukiln.catalog.load import version_key
from gpukiln.errors import UsageError
from gpukiln.release.compared_image import ComparedImage
from gpukiln.release.osv import OsvAffected, OsvEntry, first_fixed, is_affected

DRIVER, TOOLKIT = "nvidia_driver", "nvidia_container_toolkit"
ECOSYSTEMS = {
    # the names of https://ossf.github.io/osv-schema/#defined-ecosystems; Amazon Linux has none there
    "debian": ("Debian:{release}",),
    "ubuntu": ("Ubuntu:{release}:LTS", "Ubuntu:{release}"),
    "rocky": ("Rocky Linux:{release}",),
    "almalinux": ("AlmaLinux:{release}",),
}


@dataclass(frozen=True)
class Vulnerability:
    """A known flaw of something on an image.

    Args:
        id: Its name in the data, for example CVE-2025-23266 or DEBIAN-CVE-2026-1234.
        package: The component or the source package.
        version: The version on the image.
        fixed: The version without it; an empty string: none is known.
        severity: As the data says it, or an empty string.
        source: The data that has it.
        aliases: Other names of it.
    """

    id: str
    package: str
    version: str
    fixed: str
    severity: str
    summary: str
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The same for the same flaw on two images."""
        return self.id, self.package


@dataclass(frozen=True)
class VulnerabilityReport:
    """The vulnerabilities of one image.

    Args:
        vulnerabilities: Its flaws, sorted by package and name.
        notes: What was not checked, and why.
    """

    vulnerabilities: tuple[Vulnerability, ...]
    notes: tuple[str, ...]


def known_vulnerabilities(image: ComparedImage, osv: Iterable[OsvEntry] | None) -> VulnerabilityReport:
    """Find the known flaws of an image.

    Args:
        osv: The records for its packages; None: no file was given, so packages are not checked.

    Returns:
        The flaws, and what was not checked.
    """
    notes: list[str] = []
    flaws = [*_toolkit(image, notes), *_driver(image, notes)]
    if osv is None:
        notes.append("packages were not checked: no --vulnerabilities FILE was given")
    else:
        flaws += _packages(image, osv, notes)
    # A binary package of the same source yields the flaw again.
    unique = {row.key: row for row in flaws}
    ordered = sorted(unique.values(), key=lambda row: (row.package, row.id))
    return VulnerabilityReport(tuple(ordered), tuple(dict.fromkeys(notes)))


def _toolkit(image: ComparedImage, notes: list[str]) -> Iterator[Vulnerability]:
    version = image.version(TOOLKIT)
    if version is None:
        return
    try:
        rows = flaws(version)
    except UsageError as error:
        notes.append(f"{TOOLKIT} was not checked: {error.message}")
        return
    for row in rows:
        source = f"NVIDIA bulletin {row.bulletin}"
        yield Vulnerability(row.cve, TOOLKIT, version, row.fixed, row.severity, row.about, source)


def _driver(image: ComparedImage, notes: list[str]) -> Iterator[Vulnerability]:
    version = image.version(DRIVER)
    if version is None:
        return
    try:
        key = version_key(version)
    except UsageError as error:
        notes.append(f"{DRIVER} was not checked: {error.message}")
        return
    # A bulletin names the fixed version of each branch it covers.
    for bulletin in drivers.bulletins():
        fixed, source = bulletin.fixed.get(key[0]), f"NVIDIA bulletin {bulletin.bulletin}"
        if fixed is None:
            # a branch newer than all that the bulletin names was published after it
            if key[0] < max(bulletin.fixed):
                notes.append(f"{source} ({bulletin.month}) names no fix for driver branch {key[0]}")
        elif key < version_key(fixed):
            about = f"one of the most severe flaws of the driver, {bulletin.month}"
            for cve in bulletin.cves:
                yield Vulnerability(cve, DRIVER, version, fixed, "", about, source)


def _packages(image: ComparedImage, osv: Iterable[OsvEntry], notes: list[str]) -> Iterator[Vulnerability]:
    base = image.record.plan.base
    # A distribution may have several names: Ubuntu's LTS releases have a suffix in OSV.
    names = [name.format(release=base.release) for name in ECOSYSTEMS.get(base.distribution, ())]
    if not names:
        notes.append(f"packages were not checked: OSV has no data for {base.distribution} {base.release}")
        return
    # Source names were recorded later than package names.
    if not image.installed.details:
        notes.append(
            f"{image.record.build_id} was baked before source packages were recorded: a flaw of a package"
            " whose source has another name is missed"
        )
    # Built once: OSV's data of Debian has tens of thousands of records.
    index: dict[str, list[tuple[OsvEntry, OsvAffected]]] = {}
    for record in osv:
        for affected in record.affected:
            if affected.package and affected.package.ecosystem in names:
                index.setdefault(affected.package.name, []).append((record, affected))
    if not index:
        notes.append(f"packages were not checked: no record is for {' or '.join(names)}")
        return
    sources = {image.installed.source(*pair) for pair in image.baked.packages.items()}
    uncertain = 0
    for source, version in sorted(sources):
        for record, affected in index.get(source, ()):
            match = is_affected(version, affected, image.os_family)
            # Counted, not reported each: one odd version can appear in hundreds of records.
            uncertain += match is None
            if match:
                yield _from_osv(record, affected, source, version, image.os_family)
    if uncertain:
        notes.append(f"{uncertain} ranges can't be compared with the versions on {image.record.build_id}")


def _from_osv(
    record: OsvEntry, affected: OsvAffected, source: str, version: str, family: str
) -> Vulnerability:
    # Publishers differ in where they have it: of the record or of the package, as severity or urgency.
    said = {**(record.database_specific or {}), **(affected.ecosystem_specific or {})}
    severity = said.get("severity") or said.get("urgency") or ""
    return Vulnerability(
        id=record.id,
        package=source,
        version=version,
        fixed=first_fixed(version, affected, family),
        severity=severity if isinstance(severity, str) else "",
        summary=record.summary,
        source="OSV",
        aliases=tuple(dict.fromkeys((*record.aliases, *record.upstream))),
    )
