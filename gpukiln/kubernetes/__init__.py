"""GPU nodes and GPU jobs on Kubernetes: rendered, checked before they are applied, proven on a cluster.

`from gpukiln.kubernetes import gpu_job` is the library's way to a Job; see docs/k8s-jobs.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpukiln.kubernetes.jobs.request import GpuJob, gpu_job

__all__ = ["GpuJob", "gpu_job"]


def __getattr__(name: str) -> Any:
    """What is slow to import comes when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpukiln.kubernetes.jobs import request  # noqa: PLC0415 - see above

    return getattr(request, name)
