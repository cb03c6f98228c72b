"""Describes a machine, and samples links and clocks of its GPUs during a computation.

Runs on the machine that is examined, with Python 3.9 or newer.
"""

# ruff: noqa: PTH110, PTH118, PTH119, PTH120, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

from gpukiln.probe.base import PCI, NotReachedError, kernel_errors, pci_gpus, read, run_unrecorded
from gpukiln.probe.child import PR_SET_PDEATHSIG
from gpukiln.probe.nvml import address
from gpukiln.probe.pcie import link

EVERY_S = 0.1
COMMANDS = {
    "nvidia-smi": ("nvidia-smi",),
    "nvidia-smi-q": ("nvidia-smi", "-q"),
    "nvidia-smi-topo": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-topo-read": ("nvidia-smi", "topo", "-p2p", "r"),
    "nvidia-smi-topo-nvlink": ("nvidia-smi", "topo", "-p2p", "n"),
    "nvidia-smi-nvlink": ("nvidia-smi", "nvlink", "-s"),
    "nvidia-smi-nvlink-capabilities": ("nvidia-smi", "nvlink", "-c"),
    "nvidia-smi-nvlink-errors": ("nvidia-smi", "nvlink", "-e"),
    "nvidia-smi-mig": ("nvidia-smi", "mig", "-lgip"),
    "nvidia-smi-conf-compute": ("nvidia-smi", "conf-compute", "-q"),
}
FILES = (
    "/etc/os-release",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/*/information",
    "/proc/driver/nvidia-caps/*",
    "/sys/module/nvidia*/version",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
)
PCI_FILES = (
    "vendor",
    "device",
    "class",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "power_state",
)
NODES = (
    "/dev/nvidia*",
    "/dev/nvidia-caps/*",
    "/proc/driver/nvidia/gpus/*",
    "/proc/driver/nvidia/capabilities/gpu*/mig/*",
)


def describe_machine() -> dict[str, Any]:
    """The user, the machine, and NVIDIA's hardware and files on it."""
    facts: dict[str, Any] = {
        "root": os.geteuid() == 0,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory": (read("/proc/meminfo") or "").partition("\n")[0],
        "container": [path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NVIDIA_", "CUDA_"))},
        "gpus": pci_gpus(),
        "nodes": sorted(path for pattern in NODES for path in glob.glob(pattern)),
        "files": {path: _text(path) for pattern in FILES for path in sorted(glob.glob(pattern))},
        "pci": {gpu["address"]: _pci_path(gpu["address"]) for gpu in pci_gpus()},
        "kernel_says": kernel_errors(),
    }
    for name, argv in (
        ("virtualization", ("systemd-detect-virt",)),
        ("pci_of_nvidia", ("lspci", "-nn", "-d", "10de:")),
        ("modules", ("sh", "-c", "lsmod | grep -i -e nvidia -e nouveau")),
        ("libraries", ("sh", "-c", "ldconfig -p | grep -e libcuda.so -e libnvidia-ml.so")),
        ("fabric_manager", ("systemctl", "is-active", "nvidia-fabricmanager", "nvidia-persistenced")),
        ("kernel_log", ("sh", "-c", "dmesg | grep -e NVRM -e nvidia | tail -n 200")),
    ):
        try:
            said = run_unrecorded(*argv, timeout=5)
            facts[name] = {"rc": said["rc"], "out": said["out"][:20000], "err": said["err"][:300]}
        except NotReachedError as error:
            facts[name] = {"not_reached": str(error)}
    return facts


def _text(path: str) -> str:
    try:
        return (read(path) or "")[:4000]
    except OSError as error:
        return f"(can't be read: {error.strerror})"


def _pci_path(bus_id: str) -> list[dict[str, str]]:
    """The device and every bridge above it, by sysfs."""
    rows = []
    folder = os.path.realpath(os.path.join(PCI, bus_id))
    while re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", os.path.basename(folder)):
        values = {name: _text(os.path.join(folder, name)).strip() for name in PCI_FILES}
        rows.append({"address": os.path.basename(folder), **values})
        folder = os.path.dirname(folder)
    return rows


@contextlib.contextmanager
def sampling(path: str, limit_s: float) -> Iterator[None]:
    """Have another process write links and clocks of every GPU to a CSV file ten times a second meanwhile."""
    pid = os.fork()
    if pid == 0:
        try:
            _sample(path, time.monotonic() + limit_s)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        for _ in range(20):  # one in uninterruptible sleep can't be killed, and is abandoned
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0.05)


def _sample(path: str, until: float) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole process group; the parent ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began, addresses, ask_nvml = time.monotonic(), [gpu["address"] for gpu in pci_gpus()], _nvml_reader()
    with open(path, "w", encoding="utf-8") as file:
        file.write("second,gpu,speed,width,sm_mhz,memory_mhz,gen,lanes,state,watt,degrees,reasons\n")
        while time.monotonic() < until:
            now = time.monotonic()
            for number, bus_id in enumerate(addresses):
                shown = link(bus_id)
                row = [f"{now - began:.3f}", number, shown["speed"], shown["width"], *ask_nvml(bus_id)]
                file.write(",".join(map(str, row)) + "\n")
            file.flush()
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - now)))


def _nvml_reader() -> Any:
    """A function that returns a GPU's clocks in NVML's units; dashes where NVML does not work.

    Independent of the collector (`gpukiln.probe.nvml`), which the first run on a real GPU is to check.
    """
    try:
        import pynvml  # noqa: PLC0415 - only where there is a GPU

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        known = {address(pynvml.nvmlDeviceGetPciInfo(handle).busId): handle for handle in handles}
    except Exception:
        return lambda _address: ["-"] * 8

    def one(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError as error:
            return f"error {error.value}"

    def ask_of(bus_id: str) -> list[Any]:
        if bus_id not in known:
            return ["-"] * 8
        handle = known[bus_id]
        return [
            one("nvmlDeviceGetClockInfo", handle, 1),
            one("nvmlDeviceGetClockInfo", handle, 2),
            one("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            one("nvmlDeviceGetCurrPcieLinkWidth", handle),
            one("nvmlDeviceGetPerformanceState", handle),
            one("nvmlDeviceGetPowerUsage", handle),
            one("nvmlDeviceGetTemperature", handle, 0),
            one("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
        ]

    return ask_of
