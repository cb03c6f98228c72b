"""A machine's GPUs: what they are and do, who may use them, who did.

The package runs from a checkout and, packed into one file (`gpukiln.gpus.zipapp`), on the machines
themselves: Python 3.9, the standard library and NVIDIA's bindings alone.

    from gpukiln.gpus import lease, snapshot

    for device in snapshot().devices:
        print(device.uuid, device.memory_free_mib)

    with lease(1, memory_mib=8192) as gpus:
        subprocess.run(["python3", "train.py"], env={**os.environ, **gpus.environment})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpukiln.gpus.lease_overlay import snapshot
    from gpukiln.gpus.leases import LeaseGrant, lease
    from gpukiln.gpus.model import Device, GpuProcess, Snapshot

__all__ = ["Device", "GpuProcess", "LeaseGrant", "Snapshot", "lease", "snapshot"]
_FROM = {"LeaseGrant": "leases", "lease": "leases", "snapshot": "lease_overlay"}


def __getattr__(name: str) -> Any:
    """What is exported, read when it is asked for: a file without compiled code pays for each module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpukiln.gpus.{_FROM.get(name, 'model')}"), name)
