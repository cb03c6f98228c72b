"""What stands beside an exported disk: its digest, and what is known of the image."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.attest.attestation import ENVELOPE, SBOM, STATEMENT
from gpukiln.attest.installed import IMAGE_RECORD
from gpukiln.clouds.tags import BUILD_ID_TAG, SBOM_TAG, STATEMENT_TAG
from gpukiln.exports.source import Source
from gpukiln.files import write_whole
from gpukiln.images.builds import Build

DIGEST, ABOUT = ".sha256", ".json"
DOCUMENTS = {  # ending beside FILE: the file of the build's folder, what it is
    ".record.json": ("record.json", "the build's record"),
    ".image.json": (IMAGE_RECORD, "what the image says of itself"),
    ".sbom.cdx.json": (SBOM, "SBOM"),
    ".provenance.intoto.json": (STATEMENT, "provenance"),
    ".provenance.dsse.json": (ENVELOPE, "signed provenance"),
}
_TAGGED = {SBOM: SBOM_TAG, STATEMENT: STATEMENT_TAG}


@dataclass(frozen=True)
class Sidecars:
    """What is known of an image.

    Args:
        files: Ending beside FILE: the file that is copied there.
        missing: What is not there: why.
    """

    files: dict[str, Path]
    missing: dict[str, str]


def find_sidecars(source: Source, build: Build | None) -> Sidecars:
    """What can be put beside the disk of an image.

    Args:
        build: Its build, where this machine has it.
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
        return (
            "nobody signed it" if name == ENVELOPE else f"build {build.id} has none: {attest} writes papers"
        )
    tag = _TAGGED.get(name)
    if tag and source.tags.get(tag) != hashlib.sha256(file.read_bytes()).hexdigest():
        return f"{file} is not what the image's tag {tag} names: {attest} writes both again"
    return ""


def write(output: Path, digests: dict[str, str], about: dict[str, Any], beside: Sidecars) -> list[Path]:
    """Write all of it, each file whole; what an earlier export left and this one has not goes.

    Args:
        output: The disk's file, which need not be there yet.
        digests: File name: SHA-256, in the form that `sha256sum --check` reads.
        about: The document of FILE.json.

    Returns:
        What was written.
    """
    for ending in DOCUMENTS:
        if ending not in beside.files:
            sidecar_path(output, ending).unlink(missing_ok=True)
    written = []
    for ending, file in beside.files.items():
        written.append(sidecar_path(output, ending))
        write_whole(written[-1], file.read_bytes(), mode=0o644)
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    for ending, text in ((DIGEST, lines), (ABOUT, json.dumps(about, indent=2) + "\n")):
        written.append(sidecar_path(output, ending))
        write_whole(written[-1], text, mode=0o644)
    return written


def sidecar_path(output: Path, ending: str) -> Path:
    """The name of a file beside the disk."""
    return output.with_name(f"{output.name}{ending}")


def sidecar_paths(output: Path) -> list[Path]:
    """Everything that may stand beside the disk."""
    return [sidecar_path(output, ending) for ending in (*DOCUMENTS, DIGEST, ABOUT)]


def files_below(path: Path) -> Iterator[Path]:
    """A file, or every file of a folder."""
    if path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink())
    else:
        yield path


def remove_disk(path: Path) -> None:
    """Remove a disk that is to be written again: no other's digest may stand beside it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
