"""Rules on nodes that come and go: Karpenter's pools and classes, and Jobs that scale nodes."""

from __future__ import annotations

from collections.abc import Iterator

from gpukiln.kubernetes import machines
from gpukiln.kubernetes.check.rules import Context, Fault, rule
from gpukiln.kubernetes.check.workload import Command, Thing, Workload, at, is_gpu, mapping, sequence
from gpukiln.kubernetes.pools import pools_in

KARPENTER = "aws/karpenter-provider-aws:website/content/en/docs/concepts"
CRDS = "aws/karpenter-provider-aws:pkg/apis/crds"
POOLS = (
    "nodepool",
    "nodepools",
    "nodepools.karpenter.sh",
    "nodepool.karpenter.sh",
    "provisioner",
    "provisioners",
)
SCALERS = (
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
    Command,
    title="Nodes are not scaled by `kubectl scale nodepool`",
    reason="a NodePool has replicas only where Karpenter's StaticCapacity is on (alpha, off by "
    "default) and the "
    "pool is a static one; for any other it fails, or means nothing",
    source=f"{KARPENTER}/nodepools.md, settings.md",
    fix="pools scale to zero by themselves; `invoke k8s.nodes` renders working hours: schedules of "
    "the group, or "
    "a disruption budget and placeholder pods",
)
def scale_nodepool(command: Command, context: Context) -> Iterator[Fault]:
    words = [word for word in command.words if not word.startswith("-")]
    if words[:2] != ["kubectl", "scale"] or len(words) < 3:
        return
    kind, _, name = words[2].partition("/")
    if kind.lower() not in POOLS:
        return
    name = name or (words[3] if len(words) > 3 else "")
    static = {one.name for one in context.things if at(one.object, ("spec", "replicas")) is not None}
    if name not in static:
        yield Fault(" ".join(command.words))


@rule(
    "cron-scales-nodes",
    "warning",
    Command,
    title="No CronJob scales nodes",
    reason="it needs cloud permissions in a pod, fails in silence, and fights the autoscaler, which "
    "sets the number again",
    source="docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-scheduled-scaling.html",
    fix="a scheduled action of the autoscaling group: `invoke k8s.nodes` renders it",
)
def cron_scales_nodes(command: Command, _: Context) -> Iterator[Fault]:
    words = tuple(word for word in command.words if not word.startswith("-"))
    if command.thing is None or command.thing.kind != "CronJob":
        return
    if any(words[: len(one)] == one for one in SCALERS) or (
        words[:2] == ("kubectl", "scale") and any(word.partition("/")[0].lower() in POOLS for word in words)
    ):
        yield Fault(" ".join(command.words))


@rule(
    "kubectl-account",
    "warning",
    Command,
    title="A pod that runs kubectl has a service account",
    reason="the account `default` may do nothing: the server answers `forbidden`",
    source="kubernetes.io/docs/tasks/configure-pod-container/configure-service-account",
    fix="serviceAccountName with a Role for these verbs",
)
def kubectl_account(command: Command, _: Context) -> Iterator[Fault]:
    if command.thing is None or command.words[:1] != ("kubectl",):
        return
    for length in range(len(command.path), 0, -1):
        if command.path[length - 1] in ("containers", "initContainers"):
            pod = mapping(at(command.thing.object, command.path[: length - 1]))
            if not pod.get("serviceAccountName") and not pod.get("serviceAccount"):
                yield Fault("kubectl without serviceAccountName")
            return


@rule(
    "cron-overlaps",
    "warning",
    Workload,
    title="A CronJob with GPUs or kubectl does not overlap itself",
    reason="by default a new Job starts beside one that hangs: GPUs are taken twice",
    source="kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/#concurrency-policy",
    fix="concurrencyPolicy: Forbid",
    fragments=False,
)
def cron_overlaps(workload: Workload, _: Context) -> Iterator[Fault]:
    runs_kubectl = any("kubectl" in one.image for one in workload.containers)
    policy = at(workload.object, ("spec", "concurrencyPolicy"))
    if workload.kind == "CronJob" and (workload.gpus or runs_kubectl) and policy not in ("Forbid", "Replace"):
        yield Fault(f"concurrencyPolicy {policy or 'left out, which means Allow'}", ("spec",))


def _pool(thing: Thing) -> bool:
    return thing.kind == "NodePool" and thing.api.startswith("karpenter.sh/")


@rule(
    "nodepool-budget",
    "error",
    Thing,
    title="A disruption budget lets empty nodes go",
    reason="a budget without reasons counts for all, Empty too: with 0 nodes the pool never scales to zero",
    source=f"{KARPENTER}/disruption.md",
    fix='{nodes: "0", reasons: [Drifted, Underutilized]} and {nodes: "100%", reasons: [Empty]}',
)
def nodepool_budget(thing: Thing, _: Context) -> Iterator[Fault]:
    where = ("spec", "disruption", "budgets")
    for index, one in enumerate(sequence(at(thing.object, where)) if _pool(thing) else ()):
        budget = mapping(one)
        reasons = sequence(budget.get("reasons"))
        blocks = str(budget.get("nodes")) in ("0", "0%") and (not reasons or "Empty" in reasons)
        if blocks and not budget.get("schedule"):
            yield Fault(
                f"nodes: {budget.get('nodes')} for {', '.join(map(str, reasons)) or 'all'}", (*where, index)
            )


@rule(
    "nodepool-schedule",
    "error",
    Thing,
    title="A budget's schedule has a duration",
    reason="the API server refuses one without the other",
    source=f"{CRDS}/karpenter.sh_nodepools.yaml",
    fix="schedule (UTC) and duration, or neither",
)
def nodepool_schedule(thing: Thing, _: Context) -> Iterator[Fault]:
    where = ("spec", "disruption", "budgets")
    for index, one in enumerate(sequence(at(thing.object, where)) if _pool(thing) else ()):
        has = [key for key in ("schedule", "duration") if mapping(one).get(key)]
        if len(has) == 1:
            yield Fault(f"{has[0]} alone", (*where, index))


@rule(
    "nodepool-limits",
    "warning",
    Thing,
    title="A pool of GPU nodes has a limit",
    reason="a mistake in a Deployment's replicas buys GPUs until the quota ends",
    source=f"{KARPENTER}/nodepools.md",
    fix='limits: {nvidia.com/gpu: "8"}',
)
def nodepool_limits(thing: Thing, _: Context) -> Iterator[Fault]:
    if not _pool(thing) or at(thing.object, ("spec", "replicas")) is not None:
        return
    spec = mapping(at(thing.object, ("spec", "template", "spec")))
    keys = [str(mapping(one).get("key")) for one in sequence(spec.get("requirements"))]
    taints = [str(mapping(one).get("key")) for one in sequence(spec.get("taints"))]
    gpus = any("instance-gpu" in key for key in keys) or any(is_gpu(key) for key in taints)
    if gpus and not mapping(at(thing.object, ("spec", "limits"))):
        yield Fault("no limits", ("spec",))


@rule(
    "nodepool-static",
    "error",
    Thing,
    title="A static pool has no limit but nodes, and no weight",
    reason="the API server refuses it",
    source=f"{CRDS}/karpenter.sh_nodepools.yaml",
    fix="limits: {nodes: ...} alone",
)
def nodepool_static(thing: Thing, _: Context) -> Iterator[Fault]:
    spec = mapping(thing.object.get("spec"))
    if not _pool(thing) or spec.get("replicas") is None:
        return
    for key in mapping(spec.get("limits")):
        if key != "nodes":
            yield Fault(f"limits of {key} with replicas", ("spec", "limits", key))
    if spec.get("weight") is not None:
        yield Fault("weight with replicas", ("spec", "weight"))


@rule(
    "nodepool-feature-label",
    "warning",
    Thing,
    title="A pool sets a label of feature discovery only to what discovery will say of all its types",
    reason="discovery overwrites it when the node is up (Tesla-T4, not T4): pods that select on the pool's "
    "value stay behind on the next start",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix="the value that discovery says, and a pool for each GPU; or karpenter.k8s.aws/instance-gpu-name",
)
def nodepool_feature_label(thing: Thing, _: Context) -> Iterator[Fault]:
    where = ("spec", "template", "metadata", "labels")
    set_here = mapping(at(thing.object, where)) if _pool(thing) else {}
    for key, value in set_here.items():
        if key.startswith(("nvidia.com/gpu.", "nvidia.com/cuda.")):
            types = [name for pool in pools_in([thing.object]) for name in pool.types]
            said = {machines.labels(name).get(key, "") for name in types}
            if said != {str(value)}:
                known = " or ".join(sorted(one for one in said if one)[:3])
                yield Fault(
                    f"label {key}: {value}" + f", discovery says {known}" * bool(known), (*where, key)
                )


@rule(
    "nodeclass-family",
    "error",
    Thing,
    title="An EC2NodeClass says its family, or an alias does",
    reason="the API server refuses images by id, name, tags or parameter without amiFamily",
    source=f"{CRDS}/karpenter.k8s.aws_ec2nodeclasses.yaml",
    fix="amiFamily: AL2023, or Custom with user data of your own (Ubuntu)",
)
def nodeclass_family(thing: Thing, _: Context) -> Iterator[Fault]:
    spec = mapping(thing.object.get("spec"))
    terms = sequence(spec.get("amiSelectorTerms"))
    alias = any(mapping(one).get("alias") for one in terms)
    if thing.kind == "EC2NodeClass" and terms and not alias and not spec.get("amiFamily"):
        yield Fault("amiSelectorTerms without amiFamily", ("spec", "amiSelectorTerms"))


@rule(
    "nodeclass-role",
    "error",
    Thing,
    title="An EC2NodeClass has a role or an instance profile",
    reason="the API server refuses both and neither",
    source=f"{CRDS}/karpenter.k8s.aws_ec2nodeclasses.yaml",
    fix="role: NAME; Karpenter makes the profile of it",
)
def nodeclass_role(thing: Thing, _: Context) -> Iterator[Fault]:
    spec = mapping(thing.object.get("spec"))
    has = [key for key in ("role", "instanceProfile") if spec.get(key)]
    if thing.kind == "EC2NodeClass" and spec and len(has) != 1:
        yield Fault(" and ".join(has) if has else "neither role nor instanceProfile", ("spec",))
