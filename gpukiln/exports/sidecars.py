"""The files next to an exported disk: its digest, and what is known of the image."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.attest.attestation import ENVELOPE, SBOM, STATEMENT
from gpukiln.attest.image_contents import IMAGE_RECORD
from gpukiln.clouds.tags import BUILD_ID_TAG, SBOM_TAG, STATEMENT_TAG
from gpukiln.exports.source import Source
from gpukiln.files import write_atomic
from gpukiln.images.builds import Build

# `sha256sum --check FILE.sha256` checks the disk; `ami.import` reads FILE.json.
DIGEST, ABOUT = ".sha256", ".json"
DOCUMENTS = {  # ending after FILE: the file of the build's folder, its title
    ".record.json": ("record.json", "the build's record"),
    ".image.json": (IMAGE_RECORD, "the image's own record"),
    ".sbom.cdx.json": (SBOM, "SBOM"),
    ".provenance.intoto.json": (STATEMENT, "provenance"),
    ".provenance.dsse.json": (ENVELOPE, "signed provenance"),
}
# The AMI's tags have the digests of these two: a file that was changed since is not exported with the disk.
_TAGGED = {SBOM: SBOM_TAG, STATEMENT: STATEMENT_TAG}


@dataclass(frozen=True)
class Sidecars:
    """The documents of an image.

    Args:
        files: By the ending after FILE, the file that is copied there.
        missing: By the title of a document that can't be written, the reason.
    """

    files: dict[str, Path]
    missing: dict[str, str]


def find_sidecars(source: Source, build: Build | None) -> Sidecars:
    """Find the documents that are written next to the disk of an image.

    Args:
        build: The image's build, where this machine has it.
    """
    files: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for ending, (name, what) in DOCUMENTS.items():
        if why := _why_missing(source, build, name):
            missing[what] = why
        elif build:
            files[ending] = build.folder / name
    return Sidecars(files, missing)


def _why_missing(source: Source, build: Build | None, name: str) -> str:
    if build is None:
        known = source.tags.get(BUILD_ID_TAG)
        if not known:
            return f"{source.image_id} has no tag {BUILD_ID_TAG}: gpukiln did not build it"
        return f"this machine has no build {known}: export it on the one that built it"
    file, attest = build.folder / name, f"`invoke ami.attest {build.id}`"
    if not file.exists():
        return "it was not signed" if name == ENVELOPE else f"build {build.id} has none: {attest} writes it"
    tag = _TAGGED.get(name)
    if tag and source.tags.get(tag) != hashlib.sha256(file.read_bytes()).hexdigest():
        return f"{file} is not what the image's tag {tag} names: {attest} writes both again"
    return ""


def write(output: Path, digests: dict[str, str], about: dict[str, Any], sidecars: Sidecars) -> list[Path]:
    """Write the files next to a disk, each whole, and remove those of an earlier export.

    Args:
        output: The disk's file, which need not exist yet.
        digests: File name: SHA-256, in the form that `sha256sum --check` reads.
        about: The document of FILE.json.

    Returns:
        The files that were written.
    """
    # A document of the disk that FILE was before would describe another image.
    for ending in DOCUMENTS:
        if ending not in sidecars.files:
            sidecar_path(output, ending).unlink(missing_ok=True)
    written = []
    for ending, file in sidecars.files.items():
        written.append(sidecar_path(output, ending))
        write_atomic(written[-1], file.read_bytes(), mode=0o644)
    # sha256sum(1): digest, a space, a space for text mode, name
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    for ending, text in ((DIGEST, lines), (ABOUT, json.dumps(about, indent=2) + "\n")):
        written.append(sidecar_path(output, ending))
        write_atomic(written[-1], text, mode=0o644)
    return written


def sidecar_path(output: Path, ending: str) -> Path:
    """The path of a file next to the disk.

    >>> sidecar_path(Path("gpu.qcow2"), ".sha256").name
    'gpu.qcow2.sha256'
    >>> sidecar_path(Path("out/gpu.iso"), ".sbom.cdx.json").name
    'gpu.iso.sbom.cdx.json'
    """
    return output.with_name(f"{output.name}{ending}")


def sidecar_paths(output: Path) -> list[Path]:
    """The paths of all files that may be next to the disk."""
    return [sidecar_path(output, ending) for ending in (*DOCUMENTS, DIGEST, ABOUT)]


def files_below(path: Path) -> Iterator[Path]:
    """A file, or every file of a folder."""
    # No links: what a link points to may lie outside the export, and would be hashed as a part of it.
    if path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink())
    else:
        yield path


def remove_disk(path: Path) -> None:
    """Remove a disk that is to be written again."""
    # A link is removed, and not the folder that it points to.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
