"""A machine's GPUs: what they are and do, who may use them, who did.

The package runs from a checkout and, packed into one file (`gpukiln.gpus.zipapp`), on the machines
themselves: Python 3.9, the standard library and NVIDIA's bindings alone.

    from gpukiln.gpus import lease, snapshot

    for device in snapshot().devices:
        print(device.uuid, device.memory_free_mib)

    with lease(1, memory_mib=8192) as gpus:
        subprocess.run(["python3", "train.py"], env={**os.environ, **gpus.environment})
"""

from gpukiln.gpus.leases import Granted, lease
from gpukiln.gpus.marks import snapshot
from gpukiln.gpus.model import Device, Process, Snapshot

__all__ = ["Device", "Granted", "Process", "Snapshot", "lease", "snapshot"]
