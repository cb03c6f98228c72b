"""Rules on scaling nodes: Karpenter's NodePools and EC2NodeClasses, and Jobs that scale nodes."""

from __future__ import annotations

from collections.abc import Iterator

from gpukiln.kubernetes import machines
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import (
    CommandLine,
    Resource,
    Violation,
    Workload,
    at,
    is_gpu,
    mapping,
    sequence,
)
from gpukiln.kubernetes.pools import pools_in

KARPENTER = "aws/karpenter-provider-aws:website/content/en/docs/concepts"
CRDS = "aws/karpenter-provider-aws:pkg/apis/crds"
# Provisioner was the name of the kind before v1beta1.
POOL_KINDS = (
    "nodepool",
    "nodepools",
    "nodepools.karpenter.sh",
    "nodepool.karpenter.sh",
    "provisioner",
    "provisioners",
)
# Only these first words are compared, so that options and their order do not matter.
SCALE_COMMANDS = (
    ("eksctl", "scale", "nodegroup"),
    ("aws", "eks", "update-nodegroup-config"),
    ("aws", "autoscaling", "set-desired-capacity"),
    ("aws", "autoscaling", "update-auto-scaling-group"),
    ("gcloud", "container", "clusters"),
    ("az", "aks", "nodepool"),
)


@rule(
    "scale-nodepool",
    "error",
    CommandLine,
    title="Nodes are not scaled by `kubectl scale nodepool`",
    reason="only a static NodePool has replicas, and that needs Karpenter's feature gate StaticCapacity "
    "(alpha, "
    "off by default); for other pools the command fails or has no effect",
    source=f"{KARPENTER}/nodepools.md, settings.md",
    fix="pools scale to zero by themselves; `invoke k8s.nodes` renders working hours: schedules of the "
    "group, "
    "or a disruption budget and placeholder pods",
)
def scale_nodepool(command: CommandLine, context: Context) -> Iterator[Violation]:
    words = [word for word in command.words if not word.startswith("-")]
    if words[:2] != ["kubectl", "scale"] or len(words) < 3:
        return
    kind, _, name = words[2].partition("/")
    if kind.lower() not in POOL_KINDS:
        return
    name = name or (words[3] if len(words) > 3 else "")
    # A pool with replicas is static, and accepts `kubectl scale`.
    static = {
        resource.name
        for resource in context.resources
        if at(resource.object, ("spec", "replicas")) is not None
    }
    if name not in static:
        yield Violation(" ".join(command.words))


@rule(
    "cron-scales-nodes",
    "warning",
    CommandLine,
    title="No CronJob scales nodes",
    reason="it needs cloud permissions in a pod, fails unnoticed, and the autoscaler changes the number "
    "again",
    source="docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-scheduled-scaling.html",
    fix="a scheduled action of the autoscaling group: `invoke k8s.nodes` renders it",
)
def cron_scales_nodes(command: CommandLine, _: Context) -> Iterator[Violation]:
    words = tuple(word for word in command.words if not word.startswith("-"))
    if command.resource is None or command.resource.kind != "CronJob":
        return
    if any(words[: len(scale_command)] == scale_command for scale_command in SCALE_COMMANDS) or (
        words[:2] == ("kubectl", "scale")
        and any(word.partition("/")[0].lower() in POOL_KINDS for word in words)
    ):
        yield Violation(" ".join(command.words))


@rule(
    "kubectl-account",
    "warning",
    CommandLine,
    title="A pod that runs kubectl has a service account",
    reason="the service account `default` has no permissions: the server answers `forbidden`",
    source="kubernetes.io/docs/tasks/configure-pod-container/configure-service-account",
    fix="serviceAccountName with a Role for these verbs",
)
def kubectl_account(command: CommandLine, _: Context) -> Iterator[Violation]:
    if command.resource is None or command.words[:1] != ("kubectl",):
        return
    # The innermost list of containers above the command is the one that runs it.
    for length in range(len(command.path), 0, -1):
        if command.path[length - 1] in ("containers", "initContainers"):
            pod = mapping(at(command.resource.object, command.path[: length - 1]))
            if not pod.get("serviceAccountName") and not pod.get("serviceAccount"):
                yield Violation("kubectl without serviceAccountName")
            return


@rule(
    "cron-overlaps",
    "warning",
    Workload,
    title="A CronJob with GPUs or kubectl does not overlap itself",
    reason="by default a new Job starts while the previous one hangs, and both hold GPUs",
    source="kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/#concurrency-policy",
    fix="concurrencyPolicy: Forbid",
    fragments=False,
)
def cron_overlaps(workload: Workload, _: Context) -> Iterator[Violation]:
    runs_kubectl = any("kubectl" in container.image for container in workload.containers)
    policy = at(workload.object, ("spec", "concurrencyPolicy"))
    if (
        workload.kind == "CronJob"
        and (workload.wants_gpus or runs_kubectl)
        and policy not in ("Forbid", "Replace")
    ):
        yield Violation(f"concurrencyPolicy {policy or 'left out, which means Allow'}", ("spec",))


@rule(
    "nodepool-budget",
    "error",
    Resource,
    title="A disruption budget allows to remove empty nodes",
    reason="a budget without reasons applies to Empty as well: with 0 nodes the pool never scales to zero",
    source=f"{KARPENTER}/disruption.md",
    fix='{nodes: "0", reasons: [Drifted, Underutilized]} and {nodes: "100%", reasons: [Empty]}',
)
def nodepool_budget(resource: Resource, _: Context) -> Iterator[Violation]:
    where = ("spec", "disruption", "budgets")
    for index, entry in enumerate(sequence(at(resource.object, where)) if resource.is_node_pool else ()):
        budget = mapping(entry)
        reasons = sequence(budget.get("reasons"))
        blocks = str(budget.get("nodes")) in ("0", "0%") and (not reasons or "Empty" in reasons)
        # With a schedule the pool scales down outside of it.
        if blocks and not budget.get("schedule"):
            yield Violation(
                f"nodes: {budget.get('nodes')} for {', '.join(map(str, reasons)) or 'all'}", (*where, index)
            )


@rule(
    "nodepool-schedule",
    "error",
    Resource,
    title="A budget's schedule has a duration",
    reason="the API server rejects one without the other",
    source=f"{CRDS}/karpenter.sh_nodepools.yaml",
    fix="schedule (UTC) and duration, or neither",
)
def nodepool_schedule(resource: Resource, _: Context) -> Iterator[Violation]:
    where = ("spec", "disruption", "budgets")
    for index, entry in enumerate(sequence(at(resource.object, where)) if resource.is_node_pool else ()):
        has = [key for key in ("schedule", "duration") if mapping(entry).get(key)]
        if len(has) == 1:
            yield Violation(f"{has[0]} alone", (*where, index))


@rule(
    "nodepool-limits",
    "warning",
    Resource,
    title="A pool of GPU nodes has a limit",
    reason="a wrong number of replicas starts GPU machines up to the account's quota",
    source=f"{KARPENTER}/nodepools.md",
    fix='limits: {nvidia.com/gpu: "8"}',
)
def nodepool_limits(resource: Resource, _: Context) -> Iterator[Violation]:
    if not resource.is_node_pool or at(resource.object, ("spec", "replicas")) is not None:
        return
    spec = mapping(at(resource.object, ("spec", "template", "spec")))
    keys = [str(mapping(requirement).get("key")) for requirement in sequence(spec.get("requirements"))]
    taints = [str(mapping(taint).get("key")) for taint in sequence(spec.get("taints"))]
    # The rule is about GPU machines only; other pools may have no limit on purpose.
    gpus = any("instance-gpu" in key for key in keys) or any(is_gpu(key) for key in taints)
    if gpus and not mapping(at(resource.object, ("spec", "limits"))):
        yield Violation("no limits", ("spec",))


@rule(
    "nodepool-static",
    "error",
    Resource,
    title="A static pool has no limits except nodes, and no weight",
    reason="the API server rejects it",
    source=f"{CRDS}/karpenter.sh_nodepools.yaml",
    fix="only limits: {nodes: ...}",
)
def nodepool_static(resource: Resource, _: Context) -> Iterator[Violation]:
    spec = mapping(resource.object.get("spec"))
    if not resource.is_node_pool or spec.get("replicas") is None:
        return
    for key in mapping(spec.get("limits")):
        if key != "nodes":
            yield Violation(f"limits of {key} with replicas", ("spec", "limits", key))
    if spec.get("weight") is not None:
        yield Violation("weight with replicas", ("spec", "weight"))


@rule(
    "nodepool-feature-label",
    "warning",
    Resource,
    title="A pool sets a label of feature discovery only to the value that discovery sets on all its types",
    reason="discovery overwrites it when the node is up (Tesla-T4, not T4): pods that select the pool's "
    "value "
    "no longer match",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix="the value that discovery sets, and a pool for each GPU; or karpenter.k8s.aws/instance-gpu-name",
)
def nodepool_feature_label(resource: Resource, _: Context) -> Iterator[Violation]:
    where = ("spec", "template", "metadata", "labels")
    set_here = mapping(at(resource.object, where)) if resource.is_node_pool else {}
    for key, value in set_here.items():
        if key.startswith(("nvidia.com/gpu.", "nvidia.com/cuda.")):
            types = [name for pool in pools_in([resource.object]) for name in pool.types]
            said = {machines.labels(name).get(key, "") for name in types}
            # An unknown label is an empty text in the set, and counts as different.
            if said != {str(value)}:
                known = " or ".join(sorted(text for text in said if text)[:3])
                yield Violation(
                    f"label {key}: {value}" + f", discovery sets {known}" * bool(known), (*where, key)
                )


@rule(
    "nodeclass-family",
    "error",
    Resource,
    title="An EC2NodeClass has amiFamily or an alias",
    reason="the API server rejects images by id, name, tags or parameter without amiFamily",
    source=f"{CRDS}/karpenter.k8s.aws_ec2nodeclasses.yaml",
    fix="amiFamily: AL2023, or Custom with user data of your own (Ubuntu)",
)
def nodeclass_family(resource: Resource, _: Context) -> Iterator[Violation]:
    spec = mapping(resource.object.get("spec"))
    terms = sequence(spec.get("amiSelectorTerms"))
    alias = any(mapping(term).get("alias") for term in terms)
    if resource.kind == "EC2NodeClass" and terms and not alias and not spec.get("amiFamily"):
        yield Violation("amiSelectorTerms without amiFamily", ("spec", "amiSelectorTerms"))


@rule(
    "nodeclass-role",
    "error",
    Resource,
    title="An EC2NodeClass has a role or an instance profile",
    reason="the API server rejects both and neither",
    source=f"{CRDS}/karpenter.k8s.aws_ec2nodeclasses.yaml",
    fix="role: NAME; Karpenter creates the instance profile",
)
def nodeclass_role(resource: Resource, _: Context) -> Iterator[Violation]:
    spec = mapping(resource.object.get("spec"))
    has = [key for key in ("role", "instanceProfile") if spec.get(key)]
    if resource.kind == "EC2NodeClass" and spec and len(has) != 1:
        yield Violation(" and ".join(has) if has else "neither role nor instanceProfile", ("spec",))
