"""The metrics that the pinned exporter collects; rules and dashboard use these and no others.

Names, types and units: NVIDIA/dcgm-exporter, deployment/values.yaml (customMetrics) of the 4.8 releases; row
remap pending and retired pages: NVIDIA/DCGM, dcgmlib/dcgm_fields.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpukiln.units import MIB


@dataclass(frozen=True)
class Metric:
    """One metric of the exporter.

    Args:
        title: Its description on the dashboard.
        unit: As Grafana names units; empty: none.
        scale: Factor from the exporter's unit to that unit.
    """

    name: str
    kind: Literal["gauge", "counter"]
    title: str
    unit: str = ""
    scale: float = 1


# MiB, MHz and the like are the units of the exporter; the factors convert them for Grafana.
METRICS: tuple[Metric, ...] = (
    Metric("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilisation", "percent"),
    Metric("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Share of time that the engine computes", "percentunit"),
    Metric("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Share of cycles of the tensor cores", "percentunit"),
    Metric("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Share of cycles of the memory interface", "percentunit"),
    Metric("DCGM_FI_DEV_FB_USED", "gauge", "GPU memory used", "bytes", MIB),
    Metric("DCGM_FI_DEV_FB_FREE", "gauge", "GPU memory free", "bytes", MIB),
    Metric("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature", "celsius"),
    Metric("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature", "celsius"),
    Metric("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw", "watt"),
    Metric("DCGM_FI_DEV_SM_CLOCK", "gauge", "Clock of the multiprocessors", "hertz", 1e6),
    Metric("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Clock of the memory", "hertz", 1e6),
    Metric("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", "Sent over PCIe", "Bps"),
    Metric("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", "Received over PCIe", "Bps"),
    Metric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the driver was loaded in mJ"),
    Metric("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Retries on PCIe"),
    Metric("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "Time that heat held the clocks down"),
    Metric("DCGM_EXP_XID_ERRORS_COUNT", "gauge", "Xid errors within the window by number"),
    Metric("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter", "Corrected errors of memory since the last reset"),
    Metric("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Uncorrected errors of memory since the last reset"),
    Metric("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for corrected errors"),
    Metric("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for uncorrected errors"),
    Metric("DCGM_FI_DEV_ROW_REMAP_PENDING", "gauge", "Whether a row waits for a reset to be remapped"),
    Metric("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether a row could not be remapped"),
    Metric("DCGM_FI_DEV_RETIRED_PENDING", "gauge", "Pages that wait for a reset to be retired"),
)


DRIVER = "DCGM_FI_DRIVER_VERSION"  # no series of its own: the exporter adds it to all others as a label


def counters() -> str:
    """The exporter's list of counters, which replaces its default list."""
    rows = (f"{metric.name}, {metric.kind}, {metric.title}.\n" for metric in METRICS)
    return "".join((*rows, f"{DRIVER}, label, Driver version.\n"))
