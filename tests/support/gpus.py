"""Snapshots of made-up machines for tests of leases and selection, and machines of the double of NVML."""

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from gpukiln.gpus import health
from gpukiln.gpus.collect import now
from gpukiln.gpus.model import Device, Driver, GpuProcess, Peer, Snapshot


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def device(index: int = 0, **values: Any) -> Device:
    """A healthy idle A100 of eight that are joined by NVLinks."""
    made = {
        "uuid": uuid(index),
        "kind": "gpu",
        "index": index,
        "name": "NVIDIA A100-SXM4-40GB",
        "compute_capability": "8.0",
        "memory_total_mib": 40960,
        "memory_used_mib": 0,
        "memory_reserved_mib": 518,
        "memory_free_mib": 40442,
        "utilization_percent": 0,
        "temperature_c": 33,
        "numa_node": index // 4,
        "compute_mode": "default",
        "mig_enabled": False,
        "peers": tuple(Peer(uuid(n), n, 12, "one NUMA node", "ok") for n in range(8) if n != index),
        **values,
    }
    return health.with_health(Device(**made))


def snapshot(*devices: Device, processes: tuple[GpuProcess, ...] = (), **values: Any) -> Snapshot:
    made = {
        "node": socket.gethostname(),
        "taken_at": now(),
        "source": "nvml",
        "scope": "host",
        "simulated": True,
        "state": "ok",
        "message": "",
        "fix": "",
        "driver": Driver(version="535.309.01", branch=535, cuda="12.2"),
        "devices": devices or tuple(device(n) for n in range(8)),
        "processes": processes,
        "errors": (),
        **values,
    }
    return Snapshot(**made)


@dataclasses.dataclass
class Double:
    """A machine with simulated GPUs, as programs of this computer see it.

    Args:
        state: What can be changed while they look.
        environment: Of the programs.
    """

    state: State
    environment: dict[str, str]


def double(
    built: Path, folder: Path, instance_type: str, *, driver: str = "535.309.01", cuda: str = "12.2"
) -> Double:
    """Make a machine of an instance type; nothing is wrong with it.

    Args:
        built: The library, see `tests.support.nvml_double.build`.
        folder: For its state, and for its leases.
    """
    path = folder / f"{instance_type}.state"
    append_region(path)
    state = State(path)
    state.write(initial_rows(make_profile(instance_type, seed="i-1", driver=driver, cuda=cuda)))
    environment = {
        **library.environment(built, path),
        "GPUKILN_GPUS_STATE": str(folder / "leases"),
        "GPUKILN_GPUS_CONFIG": str(folder / "gpus.toml"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PATH": os.environ["PATH"],
    }
    return Double(state, environment)
