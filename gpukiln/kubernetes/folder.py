"""A folder of rendered files: what is new in it, what changed, and what somebody else put there."""

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
        path: In its folder.
        change: Against what the folder had before; null: nothing was written.
    """

    path: str
    text: str
    change: Literal["new", "changed", "same"] | None = None


@dataclass(frozen=True)
class Rendering:
    """The files of a rendering, and other files that are in their folder."""

    files: tuple[RenderedFile, ...]
    others: tuple[str, ...] = ()

    def lines(self, folder: str) -> Iterator[str]:
        """What was written, for people."""
        above = folder.rstrip("/")
        for one in self.files:
            yield f"{one.change:8} {above}/{one.path}"
        for path in self.others:
            yield f"{'other':8} {above}/{path}"


def write(folder: Path | None, files: Mapping[str, str]) -> Rendering:
    """Write files, each whole or not at all; what else is in the folder stays, and is reported.

    Args:
        folder: None: nothing is written.

    Raises:
        UsageError: The folder is a file.
        OSError: One could not be written.
    """
    if folder is None:
        return Rendering(tuple(RenderedFile(path, text) for path, text in files.items()))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, wanted a folder", hint="--output another-name")
    found = []
    for name, text in files.items():
        path = folder / name
        before = path.read_bytes() if path.is_file() else None
        same = before == text.encode()
        if not same:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text, mode=0o644)
        found.append(RenderedFile(name, text, "new" if before is None else "same" if same else "changed"))
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return Rendering(tuple(found), tuple(sorted(there - set(files))))
