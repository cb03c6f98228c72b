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
    for one in (plain, plain.removesuffix("s")):
        if SHORT_NAMES.get(one, one) in KINDS:
            return SHORT_NAMES.get(one, one)
    return ""


def workload(cluster: Cluster, kind: str, name: str, namespace: str) -> Manifest:
    """An object that pods come from.

    Raises:
        UsageError: There is none of that name.
        UnavailableError: It may not be read.
    """
    for api in KINDS[kind]:
        if found := cluster.get(api, name, namespace):
            return found
    there = [one["metadata"]["name"] for api in KINDS[kind] for one in cluster.list(api, namespace)]
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
        one
        for kind in CHILD_KINDS.get(root["kind"], ())
        for api in KINDS[kind]
        for one in cluster.list(api, namespace)
    ]
    here = [one for one in pods if one["metadata"]["namespace"] == namespace]
    members: dict[str, Manifest] = {root["metadata"]["uid"]: root}
    known = 0
    while known < len(members):  # a worker's StatefulSet of LeaderWorkerSet is its leader pod's
        known = len(members)
        members |= {one["metadata"]["uid"]: one for one in (*others, *here) if _is_owned(one, members)}
    found = list(members.values())
    return [one for one in found if one["kind"] != "Pod"], [one for one in found if one["kind"] == "Pod"]


def owners(thing: Manifest) -> list[Manifest]:
    references: list[Manifest] = thing["metadata"].get("ownerReferences") or []
    return references


def _is_owned(thing: Manifest, by: Collection[str]) -> bool:
    return any(one.get("uid") in by for one in owners(thing))


def is_suspended(thing: Manifest) -> bool:
    """Whether its controller starts nothing until it is resumed; Kubeflow's jobs say so in runPolicy."""
    spec = thing.get("spec", {})
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def lacks_pods(thing: Manifest, *, has_pods: bool) -> bool:
    """Whether an object has fewer pods than it wants; of other kinds than Kubernetes' own: none at all."""
    spec, status = thing.get("spec", {}), thing.get("status", {})
    if thing["kind"] == "Job":
        ended = any(one["status"] == "True" for one in status.get("conditions") or ())
        at_once = spec.get("parallelism", 1)
        left = spec.get("completions", at_once) - status.get("succeeded", 0)
        return not ended and status.get("active", 0) < min(at_once, left)
    if thing["kind"] in ("ReplicaSet", "StatefulSet"):
        return int(status.get("replicas", 0)) < int(spec.get("replicas", 1))
    if thing["kind"] == "DaemonSet":
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
    own = [one for one in there if _is_owned(one, uids)]
    return [condition for one in own for condition in _conditions(one)] if own else None


def _conditions(one: Manifest) -> Iterator[Manifest]:
    status = one.get("status", {})
    if one.get("spec", {}).get("active") is False:
        yield {"type": "Active", "status": "False", "message": "it was deactivated (spec.active)"}
    for condition in status.get("conditions") or ():
        if BLOCKING_CONDITIONS.get(condition["type"]) == condition["status"]:
            yield condition
    for check in status.get("admissionChecks") or ():
        if check.get("state") != "Ready":
            words = {"type": f"admission check {check['name']}", "status": check.get("state", "Pending")}
            yield {**words, "message": check.get("message", "")}
    if not status.get("conditions"):
        queue = one.get("spec", {}).get("queueName", "")
        why = f"Kueue has not looked at it: is there a queue {queue}?"
        yield {"type": "QuotaReserved", "status": "Unknown", "message": why}


def condition_text(condition: Manifest) -> str:
    """A condition as one line."""
    said = ": ".join(filter(None, (condition.get("reason", ""), condition.get("message", ""))))
    return f"{condition['type']} is {condition['status']}" + (f": {said}" if said else "")


def pod_template_spec(thing: Manifest) -> dict[str, Any]:
    """The spec of the pods that it makes itself; empty where it makes none, or has several kinds of them."""
    found: dict[str, Any] = (thing.get("spec", {}).get("template") or {}).get("spec") or {}
    return found
