"""Files that are whole or not there, and files that nobody else may read; sent to machines, Python 3.9."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file in one step: readers find the old text or the new one, also after a loss of power.

    What a killed process leaves is named `.NAME.….partial`, beside the file.

    Raises:
        OSError: It could not be written; what stood there stands there still.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
            file.flush()
            os.fdatasync(descriptor)  # before the rename, or the name may outlive what it names
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_private(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file for writing that nobody else may read, whatever the umask and whatever it was before."""

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        os.fchmod(number, 0o600)
        return number

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=opener)
