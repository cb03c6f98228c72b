"""The packages of an image by its own record (roles/image_record), and package URLs (purl)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from gpukiln.errors import UsageError
from gpukiln.images.bases import ResolvedBase
from gpukiln.parsing import parse_json
from gpukiln.typed import load, strict

IMAGE_RECORD = "image.json"
PRESENT = ("installed", "preinstalled")
"""Status of the components that an image has."""
NAMESPACES = {"amazon": "amzn"}  # purl-spec, types/rpm: the vendor as os-release's ID names it


@strict
class InstalledPackage:
    """Details of an installed package, in addition to its version.

    Args:
        architecture: As the package manager names it.
        installed_kib: Its installed size in KiB.
        licenses: The licences that its copyright file names; empty where that is not machine-readable.
    """

    source: str
    source_version: str
    architecture: str
    installed_kib: int
    licenses: tuple[str, ...]


@dataclass(frozen=True)
class ImageContents:
    """The image's own record, where a build folder has it.

    Args:
        details: By package; empty for an image that was baked before these were recorded.
        built_at: ISO 8601, or an empty string.
        content: The file's bytes, which are those of /etc/gpukiln/image.json in the image; None: no file.
    """

    details: dict[str, InstalledPackage]
    built_at: str = ""
    content: bytes | None = None

    def source(self, package: str, version: str) -> tuple[str, str]:
        """The source package of a package.

        Args:
            package: Its name.
            version: Its version, which is returned where the source is not known.

        Returns:
            Name and version of the source; the package's own where it is not known.
        """
        known = self.details.get(package)
        return (known.source, known.source_version) if known else (package, version)

    @property
    def size_kib(self) -> int | None:
        """The installed size of all packages in KiB; None where it is not known."""
        return sum(package.installed_kib for package in self.details.values()) or None


def read_image_contents(folder: Path) -> ImageContents:
    """Read the image's own record out of a build's folder.

    Args:
        folder: The folder of the build.

    Returns:
        The record; an empty one where the file does not exist.

    Raises:
        UsageError: The file is damaged.
    """
    path = folder / IMAGE_RECORD
    # Build folders of images that were baked before the record was copied have no such file.
    if not path.exists():
        return ImageContents({})
    content = path.read_bytes()
    try:
        document: dict[str, Any] = parse_json(content)
        details = document.get("package_details", {})
        built_at = document.get("built_at", "")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="bake the image again") from error
    return ImageContents(load(dict[str, InstalledPackage], details, where=str(path)), built_at, content)


def package_url(base: ResolvedBase, name: str, version: str, installed: ImageContents) -> PackageURL:
    """The package URL (purl) of a package, with the qualifiers by which scanners find its advisories.

    Args:
        base: The image's base.
        installed: The image's record.

    Returns:
        For example `pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12&upstream=glibc`; `upstream` is
        the qualifier of Syft and Grype for the source package.
    """
    known = installed.details.get(name)
    # Grype and OSV look up advisories by distribution and release; without the qualifier they find none.
    qualifiers = {"distro": f"{base.distribution}-{base.release}"}
    if known:
        qualifiers["arch"] = known.architecture
        source, source_version = known.source, known.source_version
        # Binary packages may have another version than their source, for example with +b1 of a Debian binNMU.
        if source_version != version:
            qualifiers["upstream"] = f"{source}@{source_version}"
        # Advisories of Debian and Ubuntu name source packages, so that `upstream` is needed where the names
        # differ.
        elif source != name:
            qualifiers["upstream"] = source
    kind = "deb" if base.os_family == "debian" else "rpm"
    namespace = NAMESPACES.get(base.distribution, base.distribution)
    return PackageURL(kind, namespace, name, version, qualifiers)
