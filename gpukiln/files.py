"""Files that are whole or not there."""

import os
import tempfile
from pathlib import Path


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
