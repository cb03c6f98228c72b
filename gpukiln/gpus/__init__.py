"""A machine's GPUs: what they are and do, who leases them, who has used them.

The package runs from a checkout and, packed into one file (`gpukiln.gpus.zipapp`), on the machines
themselves: Python 3.9, the standard library and NVIDIA's bindings alone.

Central values: `Snapshot` (model.py) is everything that is known of the GPUs at one moment, `Lease`
(store.py)
says who has which devices, `Finding` (gpukiln/findings.py) is a fault with its evidence and remedy.

Reading GPUs:
    collect.py      makes the snapshot from NVML, which `gpukiln/probe/nvml.py` calls in a child process
    amd.py          adds AMD's GPUs, which amd-smi reports
    gpu_facts.py    the table of fields that snapshots and the host suite share; a new field is one line there
                    and one line of `Device`
    processes.py    users, commands and containers of the processes on GPUs
    sampling.py     samples of the moving fields, for `watch`; insights.py has the rules about them
Faults:
    faults.py       the table of faults: severity, remedy and source of each
    kernel_log.py   events of the kernel's log; nvlinks.py: which NVLinks should be active
    health.py       the health of one GPU; rules.py: the rules that the host suite and `gpukiln-gpu health`
    share
Leases:
    store.py        SQLite and the locks that jobs inherit, for root alone; leases.py: what is done with them
    service.py      the root service for members of the group; client.py: how they ask it
    selection.py    which GPUs a request gets; topology.py: which are linked best
    lease_overlay.py  the snapshot with its leases; config.py: limits and price
    run.py          a command under a lease; engines.py: a container under a lease
Changing GPUs:
    reset.py, mig.py (mig-parted's format), mig_change.py
CUDA:
    cuda.py         installations, and whether the driver runs them; environments.py: `gpukiln-gpu env`
The program:
    verb.py, verbs/  each verb, declared once for `gpukiln-gpu` (cli.py) and for `gpukiln gpu`
    (commands/gpu.py)
    manual.py, zipapp.py  the man page, and the one file; facts.py: the part of the catalogue that machines
    have

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

# The library for programs of users (docs/gpus.md, "As a library"): everything else of the package may change.
__all__ = ["Device", "GpuProcess", "LeaseGrant", "Snapshot", "lease", "snapshot"]
# The module of each exported name; the others are of model.py.
_FROM = {"LeaseGrant": "leases", "lease": "leases", "snapshot": "lease_overlay"}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first read: a zipapp has no compiled code, so each module costs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpukiln.gpus.{_FROM.get(name, 'model')}"), name)
