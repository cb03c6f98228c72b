"""Objects that own pods: Jobs, Deployments, and those of JobSet, Ray, Kubeflow, LeaderWorkerSet; and Kueue.

The state of an object is in its conditions and events, and Kueue's view of it in a Workload object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.typed import unknown

# Name on the command line -> kind, with the API versions that clusters serve, the newest first.
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
SHORT_NAMES = {  # as in kubectl, by the CRDs' shortNames
    "cj": "cronjob",
    "deploy": "deployment",
    "rs": "replicaset",
    "sts": "statefulset",
    "ds": "daemonset",
    "lws": "leaderworkerset",
}
# Kind -> the kinds by which it creates its pods, if it does not create them itself.
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
# Conditions of a Workload that prevent it from running (kueue: apis/kueue/v1beta2/workload_types.go).
BLOCKING_CONDITIONS = {"QuotaReserved": "False", "Admitted": "False", "PodsReady": "False", "Evicted": "True"}


def kind_of(word: str) -> str:
    """The key of `KINDS` for a kubectl name of a kind; empty if there is none.

    >>> kind_of("deploy"), kind_of("Jobs"), kind_of("job.batch"), kind_of("pod")
    ('deployment', 'job', 'job', '')
    """
    # kubectl accepts RESOURCE.GROUP and plurals.
    plain = word.lower().partition(".")[0]
    for name in (plain, plain.removesuffix("s")):
        if SHORT_NAMES.get(name, name) in KINDS:
            return SHORT_NAMES.get(name, name)
    return ""


def workload(cluster: Cluster, kind: str, name: str, namespace: str) -> Manifest:
    """An object that owns pods.

    Raises:
        UsageError: There is no object of that name.
        UnavailableError: Reading it is not allowed.
    """
    for api in KINDS[kind]:
        if manifest := cluster.get(api, name, namespace):
            return manifest
    there = [manifest["metadata"]["name"] for api in KINDS[kind] for manifest in cluster.list(api, namespace)]
    plain = KINDS[kind][0].rpartition("/")[2]
    error = unknown(f"{plain} of {namespace}", name, set(there))
    raise UsageError(error.message, hint=error.hint or "check --namespace and --context")


def descendants(
    cluster: Cluster, root: Manifest, pods: list[Manifest]
) -> tuple[list[Manifest], list[Manifest]]:
    """The objects that an object created, directly or by others, itself first; and their pods.

    Args:
        pods: All pods of the cluster.
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
    while known < len(members):  # repeat: in LeaderWorkerSet a leader pod owns the workers' StatefulSet
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
    """Whether the object is suspended; Kubeflow's jobs have the field in runPolicy."""
    spec = manifest.get("spec", {})
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def lacks_pods(manifest: Manifest, *, has_pods: bool) -> bool:
    """Whether an object has fewer pods than it specifies; for other projects' kinds: none at all."""
    spec, status = manifest.get("spec", {}), manifest.get("status", {})
    if manifest["kind"] == "Job":
        ended = any(condition["status"] == "True" for condition in status.get("conditions") or ())
        # Defaults of batch/v1
        at_once = spec.get("parallelism", 1)
        left = spec.get("completions", at_once) - status.get("succeeded", 0)
        return not ended and status.get("active", 0) < min(at_once, left)
    if manifest["kind"] in ("ReplicaSet", "StatefulSet"):
        return int(status.get("replicas", 0)) < int(spec.get("replicas", 1))
    if manifest["kind"] == "DaemonSet":
        return int(status.get("currentNumberScheduled", 0)) < int(status.get("desiredNumberScheduled", 0))
    return not has_pods


def kueue_conditions(cluster: Cluster, namespace: str, uids: Collection[str]) -> list[Manifest] | None:
    """Why Kueue does not admit an object: conditions and admission checks of its Workload.

    Args:
        uids: Of the object and its owners.

    Returns:
        Conditions with type, status, reason and message; None if Kueue has no Workload for the object.

    Raises:
        UnavailableError: Reading Workloads is not allowed.
    """
    # An older Kueue serves v1beta1 alone.
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
        why = f"Kueue has not processed it; check that the queue {queue} exists"
        yield {"type": "QuotaReserved", "status": "Unknown", "message": why}


def condition_text(condition: Manifest) -> str:
    """A condition as one line.

    >>> condition_text({"type": "Ready", "status": "False", "reason": "Pending"})
    'Ready is False: Pending'
    """
    details = ": ".join(filter(None, (condition.get("reason", ""), condition.get("message", ""))))
    return f"{condition['type']} is {condition['status']}" + (f": {details}" if details else "")


def pod_template_spec(manifest: Manifest) -> dict[str, Any]:
    """The pod spec of an object's template; empty if it has none or several."""
    spec: dict[str, Any] = (manifest.get("spec", {}).get("template") or {}).get("spec") or {}
    return spec
