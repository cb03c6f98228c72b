"""GPU nodes and GPU jobs on Kubernetes: renders manifests, checks them, and tests and diagnoses clusters.

The central values are `Pool` (pools.py: where pods may land), `Manifest` (manifest.py: an object as a plain
dict; every quantity is a string) and `Cluster` (cluster.py: the only connection to an API server). `from
gpukiln.kubernetes import gpu_job` gives a library user a Job; see docs/k8s-jobs.md.

addons, nodes, jobs    render manifests; what they render is checked by the same rules as manifests of users
check                  finds mistakes in manifests, charts' values, scripts and documents before they are
applied machines               a node of each instance type, before one exists: allocatable resources and
labels node_classes           the same, as a Karpenter EC2NodeClass changes it
pools                  node pools in manifests, live nodes, or all instance types: candidates for a pod
scheduling             whether a pod fits a node, for files (check/fit.py) and live nodes (doctor.py) alike
workloads              objects that own pods, and why Kueue does not admit them
symptoms               known log and event messages, with cause and fix
cluster, rbac          the API server, and the permissions that each command needs
follow                 submits a Job and follows it
doctor                 diagnoses GPUs and pods of a live cluster
cluster_verification   runs test pods and gathers the facts that tests/host/test_cluster.py checks
canary, eks            an image verified as a node: a machine that joins, is tested, and is removed
folder                 writes rendered files into a folder
quantity, scalars, manifest, images    quantities, YAML scalars, YAML streams, image names
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpukiln.kubernetes.jobs.job import GpuJob
    from gpukiln.kubernetes.jobs.request import gpu_job

__all__ = ["GpuJob", "gpu_job"]


def __getattr__(name: str) -> Any:
    """Import `request` at first use: it loads the catalogue, which is slow."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpukiln.kubernetes.jobs import request  # noqa: PLC0415 - see above

    return getattr(request, name)
