"""A made-up machine, as gpukiln/probe/nvml.py would describe it. Not recorded on any host."""

import copy
from typing import Any

Data = dict[str, Any]
LOST = {"_error": "GPU is lost", "code": 15}
UNKNOWN = {"_error": "Unknown Error", "code": 999}


def made_up_gpu(index: int, gpus: int) -> Data:
    """One healthy, idle GPU of a made-up machine with several behind one NVSwitch."""
    links = [
        {
            "link": n,
            "state": True,
            "version": 4,
            "remote_bus_id": f"00000000:C{n % 6}:00.0",
            "errors": {"replay": 0, "recovery": 0, "crc_flit": 0, "crc_data": 0},
        }
        for n in range(12)
    ]
    return {
        "index": index,
        "error": None,
        "bus_id": f"00000000:00:{0x1E + index:02X}.0",
        "name": "NVIDIA A100-SXM4-40GB",
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "serial": f"1320000000{index:03d}",
        "persistence": True,
        "ecc": {
            "current": True,
            "pending": True,
            "volatile_uncorrected": 0,
            "volatile_corrected": 2,
            "aggregate_uncorrected": 1,
            "aggregate_corrected": 7,
        },
        "remapped_rows": {"correctable": 0, "uncorrectable": 1, "pending": False, "failed": False},
        "retired_pages_pending": None,
        "clocks": {"sm": 210, "mem": 1215, "max_sm": 1410, "max_mem": 1215},
        "throttle": {"mask": 1},
        "temperature": {
            "gpu": 31,
            "slowdown": 92,
            "margin": None,
            "tlimit": {"shutdown": None, "slowdown": None, "memory": None, "gpu": None},
        },
        "power": {"draw": 52.3, "limit": 400.0},
        "pcie": {"gen": 1, "width": 16, "max_gen": 4, "max_width": 16},
        "mig": {"current": False, "pending": False},
        "memory": {"total": 40960, "used": 3, "reserved": 0, "free": 40957},
        "nvlinks": links,
        "fabric": {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0, "health": None},
        "processes": [],
        "peers": [
            {
                "index": n,
                "ancestor": 20,
                "p2p": {"read": 0, "write": 0, "nvlink": 0, "atomics": 0, "pci": None},
            }
            for n in range(gpus)
            if n != index
        ],
    }


def made_up_machine(gpus: int = 2) -> Data:
    """The section `nvml` of a made-up machine without a fault.

    Args:
        gpus: How many it has, 0 to 2.
    """
    if not gpus:
        return {
            "available": False,
            "error": None,
            "driver": None,
            "nvml": None,
            "cuda_driver": None,
            "confidential": {"on": None, "ready": None},
            "gpus": [],
        }
    return {
        "available": True,
        "error": None,
        "driver": "535.309.01",
        "nvml": "12.535.309.01",
        "cuda_driver": "12.2",
        "confidential": {"on": False, "ready": False},
        "gpus": [made_up_gpu(n, gpus) for n in range(gpus)],
    }


def nvlinks_later(machine: Data, seconds: float = 30.0) -> Data:
    """The section `nvlinks` of a machine where nothing happened meanwhile.

    Args:
        machine: The section `nvml`, with its `at`.
        seconds: How long after it.
    """
    gpus = [{"index": gpu["index"], "nvlinks": gpu["nvlinks"]} for gpu in machine["gpus"]]
    return {"error": None, "gpus": copy.deepcopy(gpus), "at": machine["at"] + seconds}
