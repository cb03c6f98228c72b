"""The facts of a healthy container that was given one of its host's eight GPUs by CDI.

Nothing is installed in it for the GPU: the container toolkit brings the driver's libraries and nvidia-smi.
Log, kernel and units are the host's. NVML lists what the container may open.
"""

from typing import Any

from tests.doubles.nvml_machine import made_up_gpu
from tests.support.host_machine import library
from tests.support.host_runner_faults import container

Data = dict[str, Any]
DRIVER = "580.178.04"
ADDRESS, NVML_ADDRESS = "0000:43:00.0", "00000000:43:00.0"
LOG_GAP = "journalctl: not found; dmesg: read kernel buffer failed: Operation not permitted"


def one_of_eight() -> Data:
    """All facts, those of the profile runner and those of the profile node, as gather.py prints them."""
    links = [
        {
            "link": n,
            "state": True,
            "version": 4,
            "remote_bus_id": f"00000000:0{n % 4 + 7}:00.0",
            "errors": {"replay": 0, "recovery": 0, "crc_flit": 0, "crc_data": 0},
        }
        for n in range(18)
    ]
    gpu = {
        **made_up_gpu(0, 1),
        "bus_id": NVML_ADDRESS,
        "name": "NVIDIA H100 80GB HBM3",
        "nvlinks": links,
        "clocks": {"sm": 345, "mem": 2619, "max_sm": 1980, "max_mem": 2619},
        "memory": {"total": 81559, "used": 4, "reserved": 0, "free": 81559 - 4},
        "pcie": {"gen": 5, "width": 16, "max_gen": 5, "max_width": 16},
    }
    computed = {
        "index": 0,
        "bus_id": ADDRESS,
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "ok": True,
        "busy": False,
        "error": None,
        "elements": 1 << 24,
        "kernel_ms": 0.8,
        "h2d_gb_s": 54.1,
        "d2h_gb_s": 54.9,
        "link": {
            "speed": "32.0 GT/s PCIe",
            "width": "16",
            "max_speed": "32.0 GT/s PCIe",
            "max_width": "16",
            "gb_s": 63.02,
        },
    }
    row = {
        "bus_id": NVML_ADDRESS,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-1",
        "driver": DRIVER,
        "persistence": "Enabled",
    }
    return {
        **container(),
        "expected": {"mig": None, "bandwidth_share": None},
        "packages": {"installed": {}, "holds": []},
        "driver": {
            "nvidia_smi": {"rc": 0, "first_line": "", "version": DRIVER},
            "persistenced": None,
            "libraries": {"libnvidia-ml.so": [DRIVER], "libcuda.so": [DRIVER]},
            "library_files": {
                name: [library(name, version=DRIVER)] for name in ("libnvidia-ml.so", "libcuda.so")
            },
        },
        "gpus": {
            "pci": [{"address": ADDRESS, "device": "0x2330", "driver": "nvidia", "lost": False}],
            "container": True,
            "module": DRIVER,
            "nouveau": False,
            "smi": {"rc": 0, "out": ""},
            "rows": [row],
            "xids": [],
            "log_gap": LOG_GAP,
            "log_lost": None,
            "cdi": {},
        },
        "nvml": {
            "available": True,
            "error": None,
            "driver": DRIVER,
            "nvml": f"13.{DRIVER}",
            "cuda_driver": "13.0",
            "confidential": {"on": False, "ready": False},
            "gpus": [gpu],
        },
        "cuda": {
            "error": None,
            "driver_version": "13.0",
            "count": 1,
            "gpus": [computed],
            "mig": False,
            "xids": [],
            "log_gap": "dmesg: read kernel buffer failed: Operation not permitted",
            "pids": [],
            "all_reduce": {"tried": False, "reason": "one GPU"},
        },
        "container": {},
        "monitoring": {"nvtop": {"rc": 127, "out": "nvtop: not found"}, "dcgm": {"ran": False}},
        "docker": {"installed": False},
        "gpu_tools": {"sha256": None, "rc": None, "out": "", "state": None},
        "containerd": {
            "installed": False,
            "rc": 127,
            "error": "containerd: not found",
            "runtimes": [],
            "joined": {},
        },
        "nodeadm": {"installed": False},
        "storage": {
            "file_systems": [
                {
                    "path": "/",
                    "holds": ["/var", "/var/log"],
                    "size": 500 << 30,
                    "free": 300 << 30,
                    "inodes": 0,
                    "inodes_free": 0,
                }
            ],
            "root": None,
        },
        "boot": {"booted": False, "virtualization": ""},
    }
