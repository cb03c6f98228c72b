"""The folder for everything that outlives a command: disks, records, logs."""

import os
from pathlib import Path


def state_home() -> Path:
    """`$GPUKILN_HOME`; else /var/lib/gpukiln for root, and ~/.local/state/gpukiln for other users."""
    if home := os.environ.get("GPUKILN_HOME"):
        # absolute: the server and its machines have another working folder.
        return Path(home).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/gpukiln")
    # The default of XDG_STATE_HOME (XDG Base Directory Specification).
    return Path.home() / ".local/state/gpukiln"
