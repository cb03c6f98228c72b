"""A folder of rendered files: what is new in it, what changed, and what somebody else put there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpukiln.errors import UsageError
from gpukiln.files import write_whole


@dataclass(frozen=True)
class Written:
    """A file of a rendering.

    Args:
        path: In the folder.
        change: Against what was there before; other: it is there, and this rendering has no such file.
    """

    path: str
    change: Literal["new", "changed", "same", "other"]


def write(folder: Path, files: Mapping[str, str]) -> list[Written]:
    """Write files, each whole or not at all; what else is in the folder stays, and is told.

    Raises:
        UsageError: The folder is a file.
        OSError: One could not be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, wanted a folder", hint="--output another-name")
    found = []
    for name, text in files.items():
        path = folder / name
        before = path.read_bytes() if path.is_file() else None
        same = before == text.encode()
        if not same:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text, mode=0o644)
        found.append(Written(name, "new" if before is None else "same" if same else "changed"))
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return [*found, *(Written(name, "other") for name in sorted(there - set(files)))]
