"""Where everything lives that outlives a command: disks, records, logs."""

import os
from pathlib import Path


def state_home() -> Path:
    """`$GPUKILN_HOME`, or /var/lib/gpukiln for root, or ~/.local/state/gpukiln."""
    if home := os.environ.get("GPUKILN_HOME"):
        return Path(home).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/gpukiln")
    return Path.home() / ".local/state/gpukiln"
