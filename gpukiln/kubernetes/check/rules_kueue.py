"""Rules on Kueue's queues and the jobs that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from gpukiln.kubernetes.check.fit import has_pod_shape
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import (
    Path,
    Resource,
    Violation,
    Workload,
    at,
    is_placeholder,
    mapping,
    sequence,
)
from gpukiln.kubernetes.quantity import quantity
from gpukiln.kubernetes.scheduling import tolerates

KUEUE = "kubernetes-sigs/kueue"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LEAST_PARALLELISM = "kueue.x-k8s.io/job-min-parallelism"  # annotation: Kueue may admit fewer pods than all
GROUPS: Path = ("spec", "resourceGroups")


class QueueDemand(NamedTuple):
    """The request of a workload to a queue in the files.

    Args:
        queue: The ClusterQueue.
        resource: Name of a GPU resource.
        amount: Sum of all pods of a pod set, which one flavor must provide.
        group: The resource group of the ClusterQueue with the resource; empty: none.
    """

    queue: Resource
    resource: str
    amount: Decimal
    group: Mapping[str, Any]


def _by_name(resources: tuple[Resource, ...], name: Any) -> Resource | None:
    return next((resource for resource in resources if resource.name == name), None)


def _queue_of(resource: Resource) -> str:
    name = mapping(resource.metadata.get("labels")).get(QUEUE_LABEL)
    return name if isinstance(name, str) and not is_placeholder(name) else ""


def _demands(workload: Workload, context: Context) -> Iterator[QueueDemand]:
    name = _queue_of(workload.resource)
    local = (
        _by_name(context.of_kind("LocalQueue", same_namespace_as=workload.resource), name) if name else None
    )
    queue = (
        _by_name(context.of_kind("ClusterQueue"), at(local.object, ("spec", "clusterQueue")))
        if local
        else None
    )
    if queue is None:
        return
    amounts: dict[str, Decimal] = {}
    for container in workload.main_containers:
        for key in container.gpu_keys:
            amounts[key] = amounts.get(key, Decimal(0)) + (quantity(container.limits.get(key)) or 0)
    for resource, amount in amounts.items():
        groups = [mapping(entry) for entry in sequence(at(queue.object, GROUPS))]
        group = next((entry for entry in groups if resource in sequence(entry.get("coveredResources"))), {})
        yield QueueDemand(queue, resource, amount * _pods(workload), group)


def _pods(workload: Workload) -> int:
    """Pods that Kueue admits together, if known; at least one."""
    job = workload.job if workload.kind == "Job" else None
    annotations = mapping(workload.resource.metadata.get("annotations"))
    # The pods of other kinds are not counted here; with the annotation Kueue may admit fewer pods of a Job.
    if job is None or LEAST_PARALLELISM in annotations:
        return 1
    numbers = [job.get(key, 1 if key == "parallelism" else None) for key in ("parallelism", "completions")]
    known = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
    return max(1, min(known, default=1))


@rule(
    "kueue-absent",
    "warning",
    Resource,
    title="A queue or flavor that is named exists",
    reason="the files have other objects of the kind, but not this one: unless the cluster has it, Kueue "
    "never "
    "admits the job",
    source="kueue.sigs.k8s.io/docs/concepts/cluster_queue, local_queue, resource_flavor",
    fix="the name of an existing one, or add its manifest",
)
def kueue_absent(resource: Resource, context: Context) -> Iterator[Violation]:
    queue = _queue_of(resource)
    locals_ = context.of_kind("LocalQueue", same_namespace_as=resource)
    if queue and locals_ and not _by_name(locals_, queue):
        yield _absent("LocalQueue", queue, locals_, ("metadata", "labels", QUEUE_LABEL))
    clusters = context.of_kind("ClusterQueue")
    target = at(resource.object, ("spec", "clusterQueue"))
    if (
        resource.kind == "LocalQueue"
        and isinstance(target, str)
        and clusters
        and not _by_name(clusters, target)
    ):
        yield _absent("ClusterQueue", target, clusters, ("spec", "clusterQueue"))
    flavors = context.of_kind("ResourceFlavor")
    if resource.kind == "ClusterQueue" and flavors:
        for where, flavor in _flavors(resource):
            if flavor.get("name") and not _by_name(flavors, flavor["name"]):
                yield _absent("ResourceFlavor", str(flavor["name"]), flavors, (*where, "name"))


def _absent(kind: str, name: str, others: tuple[Resource, ...], where: Path) -> Violation:
    return Violation(
        f"no {kind} {name} in these files, which have {', '.join(sorted(o.name for o in others))}", where
    )


def _flavors(queue: Resource) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for number, group in enumerate(sequence(at(queue.object, GROUPS))):
        for index, flavor in enumerate(sequence(mapping(group).get("flavors"))):
            yield (*GROUPS, number, "flavors", index), mapping(flavor)


@rule(
    "kueue-resources",
    "error",
    Resource,
    title="A flavor has quotas for the covered resources, in their order",
    reason="the API server rejects a ClusterQueue whose flavors list other resources",
    source=f"{KUEUE}:pkg/webhooks/clusterqueue_webhook.go; apis/kueue/v1beta2/clusterqueue_types.go",
    fix="resources of each flavor: the names of coveredResources, each once, in the same order",
)
def kueue_resources(resource: Resource, _: Context) -> Iterator[Violation]:
    for number, group in enumerate(
        sequence(at(resource.object, GROUPS)) if resource.kind == "ClusterQueue" else ()
    ):
        covered = [str(name) for name in sequence(mapping(group).get("coveredResources"))]
        for index, flavor in enumerate(sequence(mapping(group).get("flavors"))):
            listed = [str(mapping(entry).get("name")) for entry in sequence(mapping(flavor).get("resources"))]
            if covered and listed != covered:
                text = f"flavor {mapping(flavor).get('name')} has {', '.join(listed) or 'none'}; covered are "
                yield Violation(text + ", ".join(covered), (*GROUPS, number, "flavors", index))


@rule(
    "kueue-uncovered",
    "error",
    Workload,
    title="A queue covers the GPUs of its jobs",
    reason="Kueue never admits it: resource unavailable in ClusterQueue",
    source=f"{KUEUE}:pkg/scheduler/flavorassigner/flavorassigner.go",
    fix="the resource in coveredResources of the ClusterQueue, with a quota in each of its flavors; where "
    "Kueue's configuration does not count it (excludeResourcePrefixes), --skip kueue-uncovered=REASON",
    fragments=False,
)
def kueue_uncovered(workload: Workload, context: Context) -> Iterator[Violation]:
    for demand in _demands(workload, context):
        if not demand.group and at(demand.queue.object, GROUPS):
            text = f"ClusterQueue {demand.queue.name} does not cover {demand.resource}"
            yield Violation(text, ("metadata", "labels", QUEUE_LABEL))


@rule(
    "kueue-quota",
    "error",
    Workload,
    title="A queue has enough quota for each of its jobs",
    reason="Kueue never admits it: a pod set gets its GPUs from one flavor, and none has so many",
    source="kueue.sigs.k8s.io/docs/concepts/cluster_queue",
    fix="a larger nominalQuota, fewer pods at once, or a cohort to borrow from",
    fragments=False,
)
def kueue_quota(workload: Workload, context: Context) -> Iterator[Violation]:
    for demand in _demands(workload, context):
        spec = mapping(demand.queue.object.get("spec"))
        quotas = [
            quantity(mapping(resource).get("nominalQuota"))
            for flavor in sequence(demand.group.get("flavors"))
            for resource in sequence(mapping(flavor).get("resources"))
            if mapping(resource).get("name") == demand.resource
        ]
        known = [quota for quota in quotas if quota is not None]
        # A cohort may lend what the queue itself lacks; how much is not known here.
        borrows = spec.get("cohort") or spec.get("cohortName")
        if known and len(known) == len(quotas) and not borrows and max(known) < demand.amount:
            text = f"{demand.amount} of {demand.resource} requested, a flavor of ClusterQueue "
            text += f"{demand.queue.name} has at most {max(known)}"
            yield Violation(text, ("metadata", "labels", QUEUE_LABEL))


@rule(
    "kueue-flavor",
    "error",
    Workload,
    title="A job fits a flavor of its queue",
    reason="Kueue never admits a job that selects other nodes than those of its flavors, or does not tolerate"
    " their taints: Kueue reads the pod template, to which EKS has not added a toleration yet",
    source=f"{KUEUE}:apis/kueue/v1beta2/resourceflavor_types.go",
    fix="tolerations in the template or in the ResourceFlavor, and a selector that a flavor satisfies",
    fragments=False,
)
def kueue_flavor(workload: Workload, context: Context) -> Iterator[Violation]:
    if not has_pod_shape(workload.pod):
        return
    for demand in _demands(workload, context):
        names = [mapping(flavor).get("name") for flavor in sequence(demand.group.get("flavors"))]
        flavors = [_by_name(context.of_kind("ResourceFlavor"), name) for name in names]
        known_flavors = [flavor for flavor in flavors if flavor is not None]
        if not known_flavors or len(known_flavors) < len(flavors):
            continue  # flavors outside the files are unknown
        keys = {key for flavor in known_flavors for key in mapping(at(flavor.object, ("spec", "nodeLabels")))}
        problems = [_misfit(workload, flavor, keys) for flavor in known_flavors]
        if all(problems):
            text = "; ".join(
                f"flavor {flavor.name}: {why}" for flavor, why in zip(known_flavors, problems, strict=True)
            )
            yield Violation(f"ClusterQueue {demand.queue.name}: {text}", ("metadata", "labels", QUEUE_LABEL))


def _misfit(workload: Workload, flavor: Resource, keys: set[str]) -> str:
    """Why a pod can't use a flavor; empty if it can. Keys that no flavor of the group has are ignored."""
    spec = mapping(flavor.object.get("spec"))
    labels = mapping(spec.get("nodeLabels"))
    for key, value in mapping(workload.pod.get("nodeSelector")).items():
        if key in keys and labels.get(key) != value:
            return f"its nodes have {key}: {labels.get(key, 'none')}, {value} is selected"
    tolerations = [*sequence(workload.pod.get("tolerations")), *sequence(spec.get("tolerations"))]
    for taint in map(mapping, sequence(spec.get("nodeTaints"))):
        known = taint.get("key") and taint.get("effect") in ("NoSchedule", "NoExecute")
        only = {"tolerations": [toleration for toleration in tolerations if isinstance(toleration, Mapping)]}
        if known and not tolerates(only, {**taint, "value": str(taint.get("value") or "")}):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"taint {taint['key']}{value}:{taint['effect']} is not tolerated"
    return ""
