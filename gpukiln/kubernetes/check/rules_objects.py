"""Rules that compare objects: limits of pools, quotas, claims, Ray groups, renamed labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from gpukiln.catalog.instance_types import instance_types
from gpukiln.kubernetes import machines
from gpukiln.kubernetes.check.fit import is_schedulable
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.rules_running import node_selections
from gpukiln.kubernetes.check.rules_volumes import update_surge
from gpukiln.kubernetes.check.workload import (
    RAY,
    Path,
    Resource,
    Violation,
    Workload,
    at,
    is_gpu,
    is_placeholder,
    mapping,
    sequence,
)
from gpukiln.kubernetes.machines import GPU
from gpukiln.kubernetes.pools import other_types, pools_in
from gpukiln.kubernetes.quantity import quantity

KARPENTER = "aws/karpenter-provider-aws:website/content/en/docs"
FAMILY = re.compile(r"(?:p|g|gr)(?:\d.*)?")  # instance families with GPUs, and their categories
REQUIREMENTS: Path = ("spec", "template", "spec", "requirements")


def _only_gpus(resource: Resource) -> bool:
    """Whether a NodePool starts only machines with GPUs."""
    for requirement in map(mapping, sequence(at(resource.object, REQUIREMENTS))):
        key, operator = str(requirement.get("key")), requirement.get("operator")
        values = [str(value) for value in sequence(requirement.get("values"))]
        if key.startswith("karpenter.k8s.aws/instance-gpu") and operator in ("In", "Exists", "Gt", "Gte"):
            return True
        if operator != "In" or not values:
            continue
        if key == machines.INSTANCE_TYPE and all(value in instance_types() for value in values):
            return True
        of_family = key in ("karpenter.k8s.aws/instance-family", "karpenter.k8s.aws/instance-category")
        if of_family and all(FAMILY.fullmatch(value) for value in values):
            return True
    return False


@rule(
    "nodepool-limit-below-machine",
    "error",
    Resource,
    title="The limits of a pool allow at least one machine",
    reason="Karpenter starts no node that would exceed the limits, so this pool never has a node",
    source="kubernetes-sigs/karpenter:pkg/controllers/provisioning/scheduling/scheduler.go; "
    f"{KARPENTER}/concepts/nodepools.md",
    fix="limits of at least the smallest machine, or only for GPUs: limits: {nvidia.com/gpu: 8}",
)
def nodepool_limit_below_machine(resource: Resource, _: Context) -> Iterator[Violation]:
    # A pool that may start other machines as well is not blocked by a GPU machine's size.
    if not resource.is_node_pool or not _only_gpus(resource):
        return
    for pool in pools_in([resource.object]):
        # A limit of 0 switches a pool off on purpose.
        limits = {key: value for key, value in pool.limits.items() if value > 0}
        types = (*pool.types, *other_types(resource.object))
        beyond = {name: pool.beyond_limits(name) for name in types}
        if len(limits) == len(pool.limits) and limits and all(beyond.values()):
            nearest = min(beyond, key=lambda name: len(beyond[name]))
            yield Violation(f"{nearest}: {'; '.join(beyond[nearest])}", ("spec", "limits"))


@rule(
    "nodepool-label-refused",
    "error",
    Resource,
    title="A pool neither sets nor requires labels of Karpenter",
    reason="the API server rejects the NodePool",
    source="aws/karpenter-provider-aws:pkg/apis/crds/karpenter.sh_nodepools.yaml",
    fix="a label of your own domain; Karpenter sets karpenter.sh/nodepool itself",
)
def nodepool_label_refused(resource: Resource, _: Context) -> Iterator[Violation]:
    if not resource.is_node_pool:
        return
    labels: Path = ("spec", "template", "metadata", "labels")
    keys: list[tuple[Path, str]] = [
        ((*labels, key), str(key)) for key in mapping(at(resource.object, labels))
    ]
    for index, requirement in enumerate(sequence(at(resource.object, REQUIREMENTS))):
        keys.append(((*REQUIREMENTS, index), str(mapping(requirement).get("key"))))
    for path, key in keys:
        domain = key.partition("/")[0] if "/" in key else ""
        # The capacity type is the one label of this domain that users choose.
        own = domain.endswith("karpenter.sh") and key != "karpenter.sh/capacity-type"
        if own or key == "kubernetes.io/hostname":
            yield Violation(f"label {key}", path)


@rule(
    "gpus-above-pool-limit",
    "warning",
    Workload,
    title="The limits of the pools allow the GPUs of a Deployment and of its updates",
    reason="an update starts new pods before old ones end: above the limit they stay Pending, and the update "
    "never completes",
    source="kubernetes.io/docs/concepts/workloads/controllers/deployment/#rolling-update-deployment",
    fix="a higher limit, fewer replicas, or strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}",
    fragments=False,
)
def gpus_above_pool_limit(workload: Workload, context: Context) -> Iterator[Violation]:
    if workload.kind != "Deployment" or not is_schedulable(workload):
        return
    each = sum((quantity(container.limits.get(GPU)) or Decimal(0)) for container in workload.main_containers)
    pools = {place.pool.name: place.pool for place in context.node_fits(workload) if not place.problems}
    # A pool without a limit can take all of them.
    if not each or not pools or not all(GPU in pool.limits for pool in pools.values()):
        return
    most = sum(pool.limits[GPU] for pool in pools.values())
    many, more, fewer = update_surge(workload)
    may = f"{', '.join(pools)} may have {most}"
    if many * each > most:
        yield Violation(f"{many} replicas ask for {many * each} GPUs, and {may}", ("spec", "replicas"))
    elif more and not fewer and (many + more) * each > most:
        yield Violation(f"an update asks for {(many + more) * each} GPUs, and {may}", ("spec", "strategy"))


@rule(
    "claim-of-container",
    "error",
    Workload,
    title="The device claims of a container are in resourceClaims of the pod",
    reason="the API server rejects a name that is not in resourceClaims",
    source="kubernetes/kubernetes:pkg/apis/core/validation/validation.go",
    fix="an entry of that name in the pod's resourceClaims",
    fragments=False,
)
def claim_of_container(workload: Workload, _: Context) -> Iterator[Violation]:
    names = {str(mapping(entry).get("name")) for entry in sequence(workload.pod.get("resourceClaims"))}
    for container in workload.containers:
        where = (*container.where, "resources", "claims")
        for index, claim in enumerate(sequence(at(container.spec, ("resources", "claims")))):
            name = mapping(claim).get("name")
            if isinstance(name, str) and name not in names and not is_placeholder(name):
                text = f"{container.name} claims {name}, and the pod has "
                yield Violation(
                    text + (", ".join(sorted(names)) or "no resourceClaims"), workload.at(*where, index)
                )


@rule(
    "pod-resources",
    "error",
    Workload,
    title="Pod-level resources are only CPU, memory and huge pages",
    reason="the API server rejects GPUs there: devices are allocated to containers",
    source="kubernetes.io/docs/concepts/configuration/manage-resources-containers; "
    "kubernetes/kubernetes:pkg/apis/core/validation/validation.go",
    fix="GPUs in limits of the container that uses them",
)
def pod_resources(workload: Workload, _: Context) -> Iterator[Violation]:
    for side in ("requests", "limits"):
        for key in mapping(at(workload.pod, ("resources", side))) if workload.whole else ():
            if is_gpu(key):
                yield Violation(f"{key} in the pod's own {side}", workload.at("resources", side, key))


@rule(
    "node-name",
    "warning",
    Workload,
    title="GPU pods are placed by a scheduler, not by nodeName",
    reason="the pod bypasses the scheduler: if the node's GPUs are in use, it fails with "
    "UnexpectedAdmissionError at each retry, and no node is started for it",
    source="kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#nodename",
    fix="nodeSelector: {kubernetes.io/hostname: NODE}",
    fragments=False,
)
def node_name(workload: Workload, _: Context) -> Iterator[Violation]:
    name = workload.pod.get("nodeName")
    if name and workload.wants_gpus and workload.kind != "Pod":  # a bare Pod may be meant for one node
        yield Violation(f"nodeName {name} in a {workload.kind} with GPUs", workload.at("nodeName"))


@rule(
    "quota-counts-nothing",
    "error",
    Resource,
    title="A quota of GPUs counts requests",
    reason="a quota counts extended resources only as requests.RESOURCE: this key limits nothing",
    source="kubernetes.io/docs/concepts/policy/resource-quotas/#resource-quota-for-extended-resources",
    fix='requests.nvidia.com/gpu: "4"',
)
def quota_counts_nothing(resource: Resource, _: Context) -> Iterator[Violation]:
    hard: Path = ("spec", "hard")
    for key in mapping(at(resource.object, hard)) if resource.kind == "ResourceQuota" else ():
        # limits.RESOURCE does not exist for extended resources: limit and request are equal.
        before, _dot, counted = str(key).partition(".")
        if is_gpu(str(key)) or (is_gpu(counted) and before != "requests"):
            yield Violation(f"{key}; wanted requests.{key if is_gpu(str(key)) else counted}", (*hard, key))


def _ray_groups(resource: Resource) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    above = RAY.get(resource.kind)
    if above is None:
        return
    yield (*above, "headGroupSpec"), mapping(at(resource.object, (*above, "headGroupSpec")))
    workers: Path = (*above, "workerGroupSpecs")
    for index, worker in enumerate(sequence(at(resource.object, workers))):
        yield (*workers, index), mapping(worker)


@rule(
    "ray-num-gpus",
    "warning",
    Resource,
    title="num-gpus of Ray is the number of GPUs of its pods",
    reason="num-gpus replaces the number that KubeRay reads from the limits: with more, tasks share a GPU; "
    "with "
    "fewer, GPUs that are paid for get no task",
    source="ray-project/kuberay:ray-operator/controllers/ray/common/pod.go",
    fix="remove num-gpus",
)
def ray_num_gpus(resource: Resource, _: Context) -> Iterator[Violation]:
    for where, group in _ray_groups(resource):
        declared = at(group, ("rayStartParams", "num-gpus"))
        # KubeRay runs Ray in the first container; the others are sidecars.
        limits = mapping(at(group, ("template", "spec", "containers", 0, "resources", "limits")))
        counted = quantity(declared)
        has = sum((quantity(value) or Decimal(0)) for key, value in limits.items() if is_gpu(key))
        # num-gpus 0 on the head keeps tasks off it on purpose.
        kept_from_ray = counted == 0 and where[-1] == "headGroupSpec"
        if counted is not None and counted != has and not kept_from_ray:
            text = f"num-gpus {declared}, and the limits have {has} GPU{'s' if has != 1 else ''}"
            yield Violation(text, (*where, "rayStartParams", "num-gpus"))


# website/content/en/v1.0/upgrading/v1-migration.md and v1beta1-migration.md
OLD_ANNOTATIONS = ("karpenter.sh/do-not-evict", "karpenter.sh/do-not-consolidate")
ANNOTATION = "karpenter.sh/do-not-disrupt"
OLD_LABEL = "karpenter.sh/provisioner-name"


@rule(
    "karpenter-old-annotation",
    "error",
    Workload,
    title="Annotations for Karpenter have their current name",
    reason="it was renamed, and v1 ignores the old name: Karpenter removes the node while the pod runs",
    source="aws/karpenter-provider-aws:website/content/en/v1.0/upgrading/v1-migration.md",
    fix=f'{ANNOTATION}: "true"',
)
def karpenter_old_annotation(workload: Workload, _: Context) -> Iterator[Violation]:
    annotations = mapping(workload.pod_metadata.get("annotations"))
    for key in OLD_ANNOTATIONS:
        if key in annotations and ANNOTATION not in annotations:
            path = (*workload.where[:-1], "metadata", "annotations", key)
            yield Violation(f"{key}; now {ANNOTATION}", path)


@rule(
    "karpenter-old-label",
    "error",
    Workload,
    title="Labels of Karpenter have their current name",
    reason="since v1beta1 no node has it: the pod stays Pending",
    source=f"{KARPENTER}/upgrading/upgrade-guide.md",
    fix="karpenter.sh/nodepool: NAME",
)
def karpenter_old_label(workload: Workload, _: Context) -> Iterator[Violation]:
    # A preference for an absent label excludes no node.
    for path, key, values in node_selections(workload, required=True):
        if key == OLD_LABEL:
            yield Violation(f"{key}: {', '.join(values)}; now karpenter.sh/nodepool", path)
