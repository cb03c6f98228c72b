"""The order of failures in reports: first those that keep the GPUs from working."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpukiln.verify.verdict import CheckResult

# Why the driver does not load on the running kernel. Where it is loaded, they matter at the next boot only.
LOADING = (
    "modules.present",
    "modules.vermagic",
    "modules.signature",
    "modules.loads",
    "modules.rivals",
    "modules.nouveau-blocked",
    "modules.firmware",
    "modules.initramfs",
    "modules.version",
)
# While one of these fails, no job can use a GPU. A check stands before those whose failure it explains.
BLOCKING = (
    "hardware.gpus",
    "versions.answers",
    "versions.driver-installed",
    "gpu.driver-loaded",
    *LOADING,
    "versions.driver-complete",
    "versions.library-path",
    "gpu.nvml",
    "gpu.nvidia-smi",
    "versions.driver-agrees",
    "gpu.confidential",
    "multi-gpu.fabric",
    "compute.kernel",
)
DEGRADED_LAYERS = (
    "gpu",
    "multi-gpu",
    "compute",
)  # a GPU works, but is damaged or slow
CONSUMER_LAYERS = ("boot", "runtime", "cluster", "container", "services")  # what assigns GPUs to jobs
BREAKS_LATER = (
    "versions.companions",
    "versions.holds",
    *LOADING,
)  # fails at the next boot, start or upgrade


def most_urgent_first(checks: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """The failed checks, first those that keep the GPUs from working.

    Args:
        checks: All results, in the order of the layers, which results of equal weight keep.
    """
    results = tuple(checks)
    # With the driver loaded, a missing module of another kernel blocks nothing now.
    not_loaded = any(check.id == "gpu.driver-loaded" and check.outcome == "failed" for check in results)
    weight = _weight(not_loaded=not_loaded)
    # sorted() is stable: equal weights keep the order of the layers.
    return tuple(sorted((check for check in results if check.outcome == "failed"), key=weight))


def _weight(*, not_loaded: bool) -> Callable[[CheckResult], tuple[int, int]]:
    def weight(check: CheckResult) -> tuple[int, int]:
        if check.id in BLOCKING and (not_loaded or check.id not in LOADING):
            return 0, BLOCKING.index(check.id)
        if check.layer in DEGRADED_LAYERS:
            return 1, 0
        if check.layer in CONSUMER_LAYERS:
            return 2, 0
        return (3 if check.layer == "modules" or check.id in BREAKS_LATER else 4), 0

    return weight
