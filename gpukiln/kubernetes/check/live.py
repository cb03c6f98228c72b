"""Reads objects of a cluster, to check them like files; validates files by a dry run on its API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.errors import BusyError, GpukilnError, IncompatibleError, RefusedError, UnavailableError
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import NEWEST
from gpukiln.kubernetes.check.rules_form import NO_OBJECTS
from gpukiln.kubernetes.check.schema import OLDEST
from gpukiln.kubernetes.check.workload import Rejection, UncheckedItem, at
from gpukiln.kubernetes.cluster import AnswerError, MissingError
from gpukiln.kubernetes.pools import pool_of_nodes, pools_in

if TYPE_CHECKING:
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.pools import Pool

# Kinds that are read. Objects with an owner are skipped, because the fault is in the owner.
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
# Fields that only the server writes; users can't fix them.
SERVER_FIELDS = ("status",)


def read_cluster(
    reading: Reading, cluster: Cluster, namespace: str = "", *, everywhere: bool = False
) -> None:
    """Read the objects of a cluster; a kind that can't be listed is reported as unchecked.

    Args:
        namespace: Empty: that of the context.

    Raises:
        UnavailableError: No kind can be listed.
    """
    by_namespace: dict[str, list[dict[str, Any]]] = {}
    name = f"context {cluster.context}"
    errors: list[GpukilnError] = []
    for kind in KINDS:
        try:
            listed = cluster.list(kind, namespace, everywhere=everywhere)
        except (UnavailableError, BusyError) as error:
            errors.append(error)
            reading.unchecked.append(UncheckedItem(name, 1, f"{kind}: {error.message}"))
            continue
        for item in listed:
            metadata = item.get("metadata", {})
            # A pod of a Deployment is checked as the template of its Deployment.
            owned = any(owner.get("controller", True) for owner in metadata.get("ownerReferences") or ())
            if not owned:
                item = {key: value for key, value in item.items() if key not in SERVER_FIELDS}  # noqa: PLW2901 - the same
                by_namespace.setdefault(f"{name} namespace {metadata.get('namespace', '(none)')}", []).append(
                    item
                )
    # One kind may be forbidden; if every kind fails, the cluster itself is the problem.
    if len(errors) == len(KINDS):
        raise errors[0]
    for file, objects in sorted(by_namespace.items()):
        reading.objects(objects, file)


def live_pools(reading: Reading, cluster: Cluster) -> tuple[Pool, ...]:
    """Where pods may land: the nodes that offer GPUs, and Karpenter's pools, which may start more.

    Empty if listing nodes is not allowed; that is reported as unchecked.
    """
    try:
        nodes = pool_of_nodes(cluster.list("Node"))
    except (UnavailableError, BusyError) as error:
        reading.unchecked.append(UncheckedItem(f"context {cluster.context}", 1, f"Node: {error.message}"))
        return ()
    # A live node shows what runs now; a pool, what the autoscaler may still start.
    pools = pools_in(resource.object for resource in reading.resources if resource.role == "object")
    return (*((nodes,) if nodes.nodes else ()), *pools)


def schema_version(reading: Reading, cluster: Cluster) -> str:
    """The cluster's version for `schema.minors`, or the nearest version with a schema.

    Raises:
        UnavailableError: The API server does not answer.
    """
    _, minor = cluster.version()
    # Schemas change little from one minor version to the next.
    nearest = min(max(minor, OLDEST), NEWEST)
    if nearest != minor:
        what = f"Kubernetes 1.{minor} has no schema here; that of 1.{nearest} is used"
        reading.unchecked.append(UncheckedItem(f"context {cluster.context}", 1, what))
    return f"1.{nearest}"


def dry_run_objects(reading: Reading, cluster: Cluster) -> None:
    """Let the API server validate and admit every object by a dry run; it stores nothing.

    Raises:
        UnavailableError: The API server does not answer.
    """
    objects = [
        resource
        for resource in reading.resources
        if resource.role == "object"
        and resource.api
        and resource.kind
        and (resource.api, resource.kind) not in NO_OBJECTS
    ]
    # A dry run stores nothing: an object in a namespace of the same files finds no namespace.
    namespaces = {resource.name for resource in objects if resource.kind == "Namespace"}
    defined = {
        (at(resource.object, ("spec", "group")), at(resource.object, ("spec", "names", "kind")))
        for resource in objects
        if resource.kind == "CustomResourceDefinition"
    }
    for resource in objects:
        gap = ""
        if not resource.name:
            gap = f"{resource.kind} without a name: not sent"
        try:
            if not gap:
                cluster.create(dict(resource.object), dry_run=True)
        except RefusedError:
            continue  # the name exists: the server checks that after validation and admission
        except MissingError as error:
            if (
                resource.namespace in namespaces
                or (resource.api.rpartition("/")[0], resource.kind) in defined
            ):
                gap = (
                    f"{resource.label}: {error.message}; these files create it: "
                    "apply that first, then check again"
                )
            else:
                reading.rejections.append(Rejection(resource.file, resource.line, error.message, resource))
        except (IncompatibleError, AnswerError) as error:
            reading.rejections.append(Rejection(resource.file, resource.line, error.message, resource))
        except BusyError as error:
            gap = f"{resource.label}: {error.message}"
        if gap:
            reading.unchecked.append(UncheckedItem(resource.file, resource.line, gap))
