"""The objects that pods come from: Jobs, Deployments, those of JobSet, Ray, Kubeflow, LeaderWorkerSet; Kueue.

What an object says of itself stands in its conditions and events, and what Kueue says of it in its Workload.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.typed import unknown

# What is typed -> the kind, with the versions that clusters serve, the newest first.
KINDS: dict[str, tuple[str, ...]] = {
    "job": ("batch/v1/Job",),
    "cronjob": ("batch/v1/CronJob",),
    "deployment": ("apps/v1/Deployment",),
    "replicaset": ("apps/v1/ReplicaSet",),
    "statefulset": ("apps/v1/StatefulSet",),
    "daemonset": ("apps/v1/DaemonSet",),
    "jobset": ("jobset.x-k8s.io/v1alpha2/JobSet",),
    "rayjob": ("ray.io/v1/RayJob",),
    "raycluster": ("ray.io/v1/RayCluster",),
    "rayservice": ("ray.io/v1/RayService",),
    "pytorchjob": ("kubeflow.org/v1/PyTorchJob",),
    "mpijob": ("kubeflow.org/v2beta1/MPIJob", "kubeflow.org/v1/MPIJob"),
    "leaderworkerset": ("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",),
}
SHORT_NAMES = {  # of kubectl, by the CRDs' shortNames
    "cj": "cronjob",
    "deploy": "deployment",
    "rs": "replicaset",
    "sts": "statefulset",
    "ds": "daemonset",
    "lws": "leaderworkerset",
}
# What a kind has its pods made by, where it does not make them itself.
CHILD_KINDS = {
    "CronJob": ("job",),
    "Deployment": ("replicaset",),
    "JobSet": ("job",),
    "RayJob": ("raycluster", "job"),
    "RayService": ("raycluster",),
    "MPIJob": ("job",),
    "LeaderWorkerSet": ("statefulset",),
}
WORKLOAD = ("kueue.x-k8s.io/v1beta2/Workload", "kueue.x-k8s.io/v1beta1/Workload")
QUEUE = "kueue.x-k8s.io/queue-name"
# Conditions of a Workload that keep it from running (kueue: apis/kueue/v1beta2/workload_types.go).
BLOCKING_CONDITIONS = {"QuotaReserved": "False", "Admitted": "False", "PodsReady": "False", "Evicted": "True"}


def kind_of(word: str) -> str:
    """The key of `KINDS` for what was typed, for example deploy, jobs or job.batch; empty: it is none."""
    plain = word.lower().partition(".")[0]
    for name in (plain, plain.removesuffix("s")):
        if SHORT_NAMES.get(name, name) in KINDS:
            return SHORT_NAMES.get(name, name)
    return ""


def workload(cluster: Cluster, kind: str, name: str, namespace: str) -> Manifest:
    """An object that pods come from.

    Raises:
        UsageError: There is none of that name.
        UnavailableError: It may not be read.
    """
    for api in KINDS[kind]:
        if manifest := cluster.get(api, name, namespace):
            return manifest
    there = [manifest["metadata"]["name"] for api in KINDS[kind] for manifest in cluster.list(api, namespace)]
    plain = KINDS[kind][0].rpartition("/")[2]
    error = unknown(f"{plain} of {namespace}", name, set(there))
    raise UsageError(error.message, hint=error.hint or "--namespace and --context say where")


def descendants(
    cluster: Cluster, root: Manifest, pods: list[Manifest]
) -> tuple[list[Manifest], list[Manifest]]:
    """What an object made, directly or by others: objects, itself first, and pods.

    Args:
        pods: Of the cluster.
    """
    namespace = root["metadata"]["namespace"]
    others = [
        manifest
        for kind in CHILD_KINDS.get(root["kind"], ())
        for api in KINDS[kind]
        for manifest in cluster.list(api, namespace)
    ]
    here = [pod for pod in pods if pod["metadata"]["namespace"] == namespace]
    members: dict[str, Manifest] = {root["metadata"]["uid"]: root}
    known = 0
    while known < len(members):  # a worker's StatefulSet of LeaderWorkerSet is its leader pod's
        known = len(members)
        members |= {
            manifest["metadata"]["uid"]: manifest
            for manifest in (*others, *here)
            if _is_owned(manifest, members)
        }
    owned = list(members.values())
    return [manifest for manifest in owned if manifest["kind"] != "Pod"], [
        manifest for manifest in owned if manifest["kind"] == "Pod"
    ]


def owners(manifest: Manifest) -> list[Manifest]:
    references: list[Manifest] = manifest["metadata"].get("ownerReferences") or []
    return references


def _is_owned(manifest: Manifest, by: Collection[str]) -> bool:
    return any(owner.get("uid") in by for owner in owners(manifest))


def is_suspended(manifest: Manifest) -> bool:
    """Whether its controller starts nothing until it is resumed; Kubeflow's jobs say so in runPolicy."""
    spec = manifest.get("spec", {})
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def lacks_pods(manifest: Manifest, *, has_pods: bool) -> bool:
    """Whether an object has fewer pods than it wants; of other kinds than Kubernetes' own: none at all."""
    spec, status = manifest.get("spec", {}), manifest.get("status", {})
    if manifest["kind"] == "Job":
        ended = any(condition["status"] == "True" for condition in status.get("conditions") or ())
        at_once = spec.get("parallelism", 1)
        left = spec.get("completions", at_once) - status.get("succeeded", 0)
        return not ended and status.get("active", 0) < min(at_once, left)
    if manifest["kind"] in ("ReplicaSet", "StatefulSet"):
        return int(status.get("replicas", 0)) < int(spec.get("replicas", 1))
    if manifest["kind"] == "DaemonSet":
        return int(status.get("currentNumberScheduled", 0)) < int(status.get("desiredNumberScheduled", 0))
    return not has_pods


def kueue_conditions(cluster: Cluster, namespace: str, uids: Collection[str]) -> list[Manifest] | None:
    """Why Kueue does not let something run: conditions and admission checks of its Workload.

    Args:
        uids: Of the object, and of what it belongs to.

    Returns:
        Conditions, with type, status, reason and message; None: Kueue has no Workload of it.

    Raises:
        UnavailableError: Workloads may not be read.
    """
    there = next(filter(None, (cluster.list(api, namespace) for api in WORKLOAD)), [])
    own = [kueue_workload for kueue_workload in there if _is_owned(kueue_workload, uids)]
    return [condition for kueue_workload in own for condition in _conditions(kueue_workload)] if own else None


def _conditions(kueue_workload: Manifest) -> Iterator[Manifest]:
    status = kueue_workload.get("status", {})
    if kueue_workload.get("spec", {}).get("active") is False:
        yield {"type": "Active", "status": "False", "message": "it was deactivated (spec.active)"}
    for condition in status.get("conditions") or ():
        if BLOCKING_CONDITIONS.get(condition["type"]) == condition["status"]:
            yield condition
    for check in status.get("admissionChecks") or ():
        if check.get("state") != "Ready":
            words = {"type": f"admission check {check['name']}", "status": check.get("state", "Pending")}
            yield {**words, "message": check.get("message", "")}
    if not status.get("conditions"):
        queue = kueue_workload.get("spec", {}).get("queueName", "")
        why = f"Kueue has not looked at it: is there a queue {queue}?"
        yield {"type": "QuotaReserved", "status": "Unknown", "message": why}


def condition_text(condition: Manifest) -> str:
    """A condition as one line."""
    said = ": ".join(filter(None, (condition.get("reason", ""), condition.get("message", ""))))
    return f"{condition['type']} is {condition['status']}" + (f": {said}" if said else "")


def pod_template_spec(manifest: Manifest) -> dict[str, Any]:
    """The spec of the pods that it makes itself; empty where it makes none, or has several kinds of them."""
    spec: dict[str, Any] = (manifest.get("spec", {}).get("template") or {}).get("spec") or {}
    return spec
