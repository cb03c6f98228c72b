"""The packages and modules of an rpm repository, read from its metadata without dnf and rpm.

Checksums are verified, signatures are not: a plan only reads versions, and the build's dnf verifies the
signature of each package that it installs.
"""

import gzip
import hashlib
import io
import lzma
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from xml.etree import ElementTree as ET

import yaml

from gpukiln.errors import UnavailableError
from gpukiln.parsing import check_yaml
from gpukiln.sources.apt import strip_credentials

# The list of packages of a large repository is tens of megabytes.
TIMEOUT_S = 60.0
REPOMD = "{http://linux.duke.edu/metadata/repo}"
PRIMARY = "{http://linux.duke.edu/metadata/common}"
OPENERS: Mapping[str, Callable[[bytes], bytes]] = {
    "xml": bytes,
    "yaml": bytes,
    "gz": gzip.decompress,
    "xz": lzma.decompress,
}
"""The decompressor by file name extension; Python 3.11 has none for zst."""


@dataclass(frozen=True)
class RpmMetadata:
    """The content of an rpm repository.

    Args:
        versions: For each package its versions, as version-release.
        streams: For each module its streams.
    """

    versions: Mapping[str, frozenset[str]]
    streams: Mapping[str, frozenset[str]]


# A plan asks the same repository for several components.
@lru_cache(maxsize=8)
def read_metadata(url: str) -> RpmMetadata | None:
    """Read a repository's lists of packages and modules.

    Args:
        url: The repository, an http, https or file address; below it is repodata/repomd.xml.

    Returns:
        Its contents; None where its lists have a compression that is not supported here.

    Raises:
        UnavailableError: It can't be read, or a file differs from its checksum in repomd.xml.
    """
    root = url.rstrip("/")
    files = {}
    for data in _parse(_fetch(f"{root}/repodata/repomd.xml"), root).findall(f"{REPOMD}data"):
        location, checksum = data.find(f"{REPOMD}location"), data.find(f"{REPOMD}checksum")
        if location is not None and checksum is not None:
            files[data.get("type")] = (location.get("href", ""), checksum.get("type", ""), checksum.text)
    listed = {name: files[name] for name in ("primary", "modules") if name in files}
    # For example zst, which Python 3.11 can't read: dnf finds the version at build time then.
    if any(href.rpartition(".")[2] not in OPENERS for href, _, _ in listed.values()):
        return None
    texts = {name: _fetch_verified(root, *of) for name, of in listed.items()}
    return RpmMetadata(
        versions=_parse_versions(texts["primary"], root) if "primary" in texts else {},
        streams=_parse_streams(texts.get("modules", b""), root),
    )


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - a repository of components.yaml
            content: bytes = answer.read()
    except (OSError, ValueError, HTTPException) as error:
        raise UnavailableError(
            f"{strip_credentials(url)} can't be read: {strip_credentials(str(error))}",
            hint="check the network, then try again",
        ) from error
    return content


def _fetch_verified(root: str, href: str, kind: str, expected: str | None) -> bytes:
    packed = _fetch(f"{root}/{href}")
    # createrepo wrote `sha` for SHA-1.
    digest = hashlib.new("sha1" if kind == "sha" else kind, packed).hexdigest()
    if digest != expected:
        raise UnavailableError(
            f"{strip_credentials(root)}/{href} has the {kind} {digest}, wanted {expected}",
            hint="the repository is being updated, or its mirror is damaged; try again later",
        )
    return OPENERS[href.rpartition(".")[2]](packed)


def _parse(text: bytes, root: str) -> ET.Element:
    try:
        return ET.fromstring(text)  # noqa: S314 - expat limits what entities may grow to
    except ET.ParseError as error:
        raise UnavailableError(f"{strip_credentials(root)} has a damaged repomd.xml: {error}") from error


def _parse_versions(text: bytes, root: str) -> dict[str, frozenset[str]]:
    by_package: dict[str, set[str]] = {}
    try:
        for _, element in ET.iterparse(io.BytesIO(text)):  # noqa: S314 - expat limits what entities may grow to
            version = element.find(f"{PRIMARY}version") if element.tag == f"{PRIMARY}package" else None
            if version is not None:
                name = element.findtext(f"{PRIMARY}name", "")
                by_package.setdefault(name, set()).add(f"{version.get('ver')}-{version.get('rel')}")
                # Without it the tree of all packages would stay in memory.
                element.clear()
    except ET.ParseError as error:
        raise UnavailableError(
            f"{strip_credentials(root)} has a damaged list of packages: {error}"
        ) from error
    return {name: frozenset(versions) for name, versions in by_package.items()}


def _parse_streams(text: bytes, root: str) -> dict[str, frozenset[str]]:
    by_module: dict[str, set[str]] = {}
    try:
        # libyaml's composer recurses and ends the process with a segmentation fault at some ten thousand
        # levels.
        check_yaml(text)
        # The C loader is much faster, and some builds of PyYAML lack it.
        for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(document, dict) and document.get("document") == "modulemd":
                data = document["data"]
                by_module.setdefault(str(data["name"]), set()).add(str(data["stream"]))
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnavailableError(f"{strip_credentials(root)} has a damaged list of modules: {error}") from error
    return {name: frozenset(streams) for name, streams in by_module.items()}
