"""Writes rendered files into a folder and reports new, changed and other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpukiln.errors import UsageError
from gpukiln.files import write_atomic


@dataclass(frozen=True)
class RenderedFile:
    """A file of a rendering.

    Args:
        path: Relative to the folder.
        change: Compared with the folder's file before; null: there is no folder.
    """

    path: str
    text: str
    change: Literal["new", "changed", "same"] | None = None


@dataclass(frozen=True)
class Rendering:
    """The files of a rendering, and other files in the same folder."""

    files: tuple[RenderedFile, ...]
    others: tuple[str, ...] = ()

    def lines(self, folder: str) -> Iterator[str]:
        """Lines of output that list the written files."""
        above = folder.rstrip("/")
        for file in self.files:
            yield f"{file.change:8} {above}/{file.path}"
        for path in self.others:
            yield f"{'other':8} {above}/{path}"


def write(folder: Path | None, files: Mapping[str, str], *, dry_run: bool = False) -> Rendering:
    """Write files, each whole or not at all; other files in the folder stay and are reported.

    Args:
        folder: None: nothing is written.
        dry_run: Only compare with the files that are there.

    Raises:
        UsageError: The folder is a file.
        OSError: A file could not be written.
    """
    if folder is None:
        return Rendering(tuple(RenderedFile(path, text) for path, text in files.items()))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, wanted a folder", hint="--output another-name")
    rendered = []
    for name, text in files.items():
        path = folder / name
        before = path.read_bytes() if path.is_file() else None
        same = before == text.encode()
        if not same and not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not 0600: the files are meant for a repository.
            write_atomic(path, text, mode=0o644)
        rendered.append(RenderedFile(name, text, "new" if before is None else "same" if same else "changed"))
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return Rendering(tuple(rendered), tuple(sorted(there - set(files))))
