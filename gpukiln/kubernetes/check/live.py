"""What a cluster has, to be judged as files are; and whether its API server would take what files have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.errors import IncompatibleError, RefusedError, UnavailableError
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.workload import Broken
from gpukiln.kubernetes.pools import pool_of_nodes, pools_in

if TYPE_CHECKING:
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.pools import Pool

# What is judged; those that another object made are its owner's fault.
KINDS = (
    "Pod",
    "Job",
    "CronJob",
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "ReplicaSet",
    "karpenter.sh/v1/NodePool",
    "karpenter.k8s.aws/v1/EC2NodeClass",
    "ray.io/v1/RayCluster",
    "ray.io/v1/RayJob",
    "ray.io/v1/RayService",
    "kubeflow.org/v1/PyTorchJob",
    "kubeflow.org/v2beta1/MPIJob",
    "jobset.x-k8s.io/v1alpha2/JobSet",
    "actions.github.com/v1alpha1/AutoscalingRunnerSet",
)
CLUSTER_WIDE = ("NodePool", "EC2NodeClass")
# What only the server writes, and nobody is asked to mend.
WRITTEN = ("status",)


def read_cluster(
    reading: Reading, cluster: Cluster, namespace: str = "", *, everywhere: bool = False
) -> None:
    """Take what a cluster has, namespace by namespace; a kind that may not be listed is told as unchecked.

    Args:
        namespace: Empty: the context's.

    Raises:
        UnavailableError: It can't be asked at all.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    name = f"context {cluster.context}"
    told: list[UnavailableError] = []
    for kind in KINDS:
        try:
            listed = cluster.list(kind, namespace, everywhere=everywhere)
        except UnavailableError as error:
            told.append(error)
            reading.unchecked.append((name, 1, f"{kind}: {error.message}"))
            continue
        for one in listed:
            metadata = one.get("metadata", {})
            owned = any(owner.get("controller", True) for owner in metadata.get("ownerReferences") or ())
            if not owned:
                one = {key: value for key, value in one.items() if key not in WRITTEN}  # noqa: PLW2901 - the same
                found.setdefault(f"{name} namespace {metadata.get('namespace', '(none)')}", []).append(one)
    if len(told) == len(KINDS):
        raise told[0]
    for file, objects in sorted(found.items()):
        reading.objects(objects, file)


def live_pools(reading: Reading, cluster: Cluster) -> tuple[Pool, ...]:
    """Where pods may land: the nodes that offer GPUs, and Karpenter's pools, which may start more.

    Nothing is known where nodes may not be listed; that is told as unchecked.
    """
    try:
        nodes = pool_of_nodes(cluster.list("Node"))
    except UnavailableError as error:
        reading.unchecked.append((f"context {cluster.context}", 1, f"Node: {error.message}"))
        return ()
    pools = pools_in(one.object for one in reading.things if one.role == "object")
    return (*((nodes,) if nodes.nodes else ()), *pools)


def ask_server(reading: Reading, cluster: Cluster) -> None:
    """Let the API server judge every object by a dry run; nothing is kept.

    Raises:
        UnavailableError: It can't be asked.
    """
    for thing in reading.things:
        if thing.role != "object" or not thing.api or not thing.kind:
            continue
        if not thing.name:
            reading.unchecked.append((thing.file, thing.line, f"{thing.kind} without a name: not sent"))
            continue
        try:
            cluster.create(dict(thing.object), dry_run=True)
        except RefusedError:
            continue  # one of that name is there: it was validated and admitted before it was compared
        except IncompatibleError as error:
            reading.broken.append(Broken(thing.file, thing.line, error.message, thing))
        except UnavailableError as error:
            if not _of_object(error):
                raise
            reading.broken.append(Broken(thing.file, thing.line, error.message, thing))


def _of_object(error: UnavailableError) -> bool:
    """Whether a server answered that there is no such kind or namespace, or that the sender may not."""
    return any(text in error.message for text in ("has no kind", "not found", "forbidden", "could not find"))
