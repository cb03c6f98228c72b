"""Rules on pods that the API server accepts and that fail, hang or cost money later."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.rules_server import JOB_KINDS, expressions
from gpukiln.kubernetes.check.workload import (
    RAY,
    Path,
    PodContainer,
    Violation,
    Workload,
    at,
    is_gpu,
    mapping,
    sequence,
)
from gpukiln.kubernetes.quantity import quantity

# Images and launchers of programs whose processes exchange data in /dev/shm.
TRAINING_IMAGES = re.compile(r"pytorch|tensorflow|nemo|deepspeed|megatron|horovod|mxnet|paddle")
LAUNCHERS = re.compile(r"\b(?:torchrun|deepspeed|accelerate|horovodrun|mpirun|torch\.distributed)\b")
SHM = "/dev/shm"  # noqa: S108 - of a container
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
DEFAULT_GRACE = 30  # seconds between SIGTERM and SIGKILL; EC2 warns two minutes before a spot interruption


def _shm_volume(container: PodContainer) -> str | None:
    """The volume that is mounted at /dev/shm."""
    for mount in sequence(container.spec.get("volumeMounts")):
        if str(mapping(mount).get("mountPath", "")).rstrip("/") == SHM:
            return str(mapping(mount).get("name"))
    return None


def _volume(workload: Workload, name: str) -> tuple[int, Mapping[str, Any]]:
    volumes = sequence(workload.pod.get("volumes"))
    return next(
        (
            (index, mapping(volume))
            for index, volume in enumerate(volumes)
            if mapping(volume).get("name") == name
        ),
        (-1, {}),
    )


@rule(
    "shm-default",
    "warning",
    Workload,
    title="Training, or several GPUs, have more than 64 MiB of /dev/shm",
    reason="data loaders and NCCL exchange data there: `bus error`, or `unable to write to file "
    "</torch_...>`",
    source="pytorch.org/docs/stable/multiprocessing.html; docs.nvidia.com/deeplearning/nccl, troubleshooting",
    fix="a volume {emptyDir: {medium: Memory, sizeLimit: 2Gi}} mounted at /dev/shm",
    fragments=False,
)
def shm_default(workload: Workload, _: Context) -> Iterator[Violation]:
    # With hostIPC the container has the node's /dev/shm.
    if workload.pod.get("hostIPC") is True or workload.kind in RAY:  # KubeRay mounts one itself
        return
    for container in workload.main_containers:
        many = sum((quantity(container.limits.get(key)) or 0) for key in container.gpu_keys)
        words = " ".join(
            str(word) for key in ("command", "args") for word in sequence(container.spec.get(key))
        )
        trains = TRAINING_IMAGES.search(container.image) or LAUNCHERS.search(words)
        if container.gpu_keys and (many > 1 or trains) and _shm_volume(container) is None:
            why = f"{many} GPUs" if many > 1 else f"{container.image or words} trains or serves"
            yield Violation(f"{why}, and /dev/shm has 64 MiB", workload.at(*container.where))


@rule(
    "shm-size-limit",
    "warning",
    Workload,
    title="A volume in memory has a sizeLimit",
    reason="without one it may use half of the node's memory, which the scheduler does not count",
    source="kubernetes.io/docs/concepts/storage/volumes/#emptydir",
    fix="sizeLimit: 2Gi, and add the same to the container's memory limit",
)
def shm_size_limit(workload: Workload, _: Context) -> Iterator[Violation]:
    for index, volume in enumerate(sequence(workload.pod.get("volumes"))):
        empty = mapping(mapping(volume).get("emptyDir"))
        if empty.get("medium") == "Memory" and empty.get("sizeLimit") is None:
            yield Violation("emptyDir in memory without sizeLimit", workload.at("volumes", index))


@rule(
    "shm-above-memory",
    "error",
    Workload,
    title="The memory limit is larger than the /dev/shm within it",
    reason="its files count against the container's memory limit: the kernel kills it before /dev/shm is "
    "full",
    source="kubernetes.io/docs/concepts/storage/volumes/#emptydir",
    fix="raise the memory limit by the sizeLimit",
)
def shm_above_memory(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        name = _shm_volume(container)
        index, volume = _volume(workload, name) if name else (-1, {})
        empty = mapping(volume.get("emptyDir"))
        size, memory = quantity(empty.get("sizeLimit")), quantity(container.limits.get("memory"))
        if empty.get("medium") == "Memory" and size is not None and memory is not None and size >= memory:
            sizes = f"{empty['sizeLimit']}, memory limit of {container.name} {container.limits['memory']}"
            yield Violation(f"{SHM} {sizes}", workload.at("volumes", index))


@rule(
    "job-deadline",
    "warning",
    Workload,
    title="A Job with GPUs has a deadline",
    reason="a Job that hangs holds its GPUs, which are paid for, until somebody notices",
    source="kubernetes.io/docs/concepts/workloads/controllers/job/#job-termination-and-cleanup",
    fix="activeDeadlineSeconds in the Job's spec: its longest duration, retries included",
    fragments=False,
)
def job_deadline(workload: Workload, _: Context) -> Iterator[Violation]:
    if workload.kind not in JOB_KINDS or not workload.wants_gpus or workload.job is None:
        return
    # Either ends what hangs; that of the pod begins anew with each retry.
    if not workload.job.get("activeDeadlineSeconds") and not workload.pod.get("activeDeadlineSeconds"):
        yield Violation("no activeDeadlineSeconds", workload.job_where)


@rule(
    "memory-limit",
    "warning",
    Workload,
    title="A container with GPUs has a memory limit",
    reason="a leak uses up the node's memory, and the kernel may kill any process, also the device plugin",
    source="kubernetes.io/docs/concepts/configuration/manage-resources-containers",
    fix="limits: {memory: 14Gi}; k8s.check says what the types have for pods",
    fragments=False,
)
def memory_limit(workload: Workload, _: Context) -> Iterator[Violation]:
    # Pod-level limits apply to all containers (KEP-2837).
    of_pod = mapping(at(workload.pod, ("resources", "limits")))
    for container in workload.containers:
        if container.gpu_keys and "memory" not in {**of_pod, **container.limits}:
            yield Violation(f"{container.name} has no memory limit", workload.at(*container.where))


@rule(
    "cpu-request",
    "warning",
    Workload,
    title="A container with GPUs requests CPUs",
    reason="the scheduler reserves none, so the data loader gets only what is left and the GPU waits",
    source="kubernetes.io/docs/concepts/configuration/manage-resources-containers",
    fix="requests: {cpu: 3500m}",
    fragments=False,
)
def cpu_request(workload: Workload, _: Context) -> Iterator[Violation]:
    of_pod = mapping(workload.pod.get("resources"))
    # A limit counts as well: the API server sets a missing request to it.
    asked = {*mapping(of_pod.get("requests")), *mapping(of_pod.get("limits"))}
    for container in workload.containers:
        if container.gpu_keys and "cpu" not in {*asked, *container.requests, *container.limits}:
            yield Violation(f"{container.name} requests no CPU", workload.at(*container.where))


@rule(
    "memory-milli",
    "error",
    Workload,
    title="Memory has no unit m",
    reason="`m` means a thousandth: 512m is half a byte, and the container never starts",
    source="kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity",
    fix="512Mi",
)
def memory_milli(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        for side, amounts in (("requests", container.requests), ("limits", container.limits)):
            memory = amounts.get("memory")
            if isinstance(memory, str) and re.fullmatch(r"\d+m", memory):
                yield Violation(
                    f"memory: {memory}", workload.at(*container.where, "resources", side, "memory")
                )


# Label of spot nodes -> its values; set by eksctl, AWS's user guide for EKS, karpenter.sh/docs, AKS, GKE.
SPOT = {
    "eks.amazonaws.com/capacityType": ("SPOT", "ON_DEMAND", "CAPACITY_BLOCK"),
    "karpenter.sh/capacity-type": ("spot", "on-demand", "reserved"),
    "node-lifecycle": ("spot", "on-demand"),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
    "cloud.google.com/gke-spot": ("true",),
}
# Conventions that no provider sets; `_set_by_pool` excludes users who set one in their pools.
UNSET_SPOT_LABELS = (
    "node.kubernetes.io/lifecycle",
    "lifecycle",
    "spot",
    "spot-instance",
    "node-type",
    "capacity-type",
)


def node_selections(workload: Workload, *, required: bool = False) -> Iterator[tuple[Path, str, list[str]]]:
    """Path, label and values of each node selection of a pod.

    Args:
        required: Skip preferences.
    """
    for key, value in mapping(workload.pod.get("nodeSelector")).items():
        yield workload.at("nodeSelector", key), key, [str(value)]
    for path, expression in expressions(workload):
        if expression.get("operator", "In") == "In" and not (required and PREFERRED in path):
            yield (
                path,
                str(expression.get("key")),
                [str(value) for value in sequence(expression.get("values"))],
            )


def _set_by_pool(key: str, context: Context) -> bool:
    """Whether a candidate pool sets a label, or a live node has it."""
    return any(
        key in pool.labels
        or key in pool.choices
        or any(key in node["metadata"].get("labels", {}) for node in pool.nodes)
        for pool in context.candidates
    )


@rule(
    "spot-label",
    "warning",
    Workload,
    title="Spot nodes are selected by a label that the provider sets",
    reason="no provider sets this label: the pod stays Pending until a user labels nodes by hand",
    source="docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html; "
    "karpenter.sh/docs/concepts/scheduling",
    fix="eks.amazonaws.com/capacityType: SPOT (managed groups) or karpenter.sh/capacity-type: spot "
    "(Karpenter)",
)
def spot_label(workload: Workload, context: Context) -> Iterator[Violation]:
    for path, key, values in node_selections(workload):
        spot = any("spot" in value.lower() or value == "true" for value in values)
        if key in UNSET_SPOT_LABELS and spot and not _set_by_pool(key, context):
            yield Violation(f"{key}: {', '.join(values)}", path)


@rule(
    "spot-value",
    "error",
    Workload,
    title="The value for spot has the provider's spelling",
    reason="label values are compared exactly: no node has this one",
    source="docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html; "
    "karpenter.sh/docs/concepts/scheduling",
    fix="upper case for EKS (SPOT), lower case for Karpenter (spot)",
)
def spot_value(workload: Workload, _: Context) -> Iterator[Violation]:
    for path, key, values in node_selections(workload):
        for value in values:
            if key in SPOT and value not in SPOT[key]:
                yield Violation(f"{key}: {value}; wanted {' or '.join(SPOT[key])}", path)


# AKS taints its spot nodes itself, with the key kubernetes.azure.com/scalesetpriority.
SPOT_TAINTS = ("spot", "spot-instance", "lifecycle", "node.kubernetes.io/lifecycle")


def _is_taint_set(key: str, context: Context) -> bool:
    """Whether a candidate pool or a live node has a taint with a key."""
    taints = [
        taint
        for pool in context.candidates
        for taint in (
            *pool.taints,
            *(node_taint for node in pool.nodes for node_taint in node["spec"].get("taints", ())),
        )
    ]
    return any(mapping(taint).get("key") == key for taint in taints)


@rule(
    "spot-toleration",
    "warning",
    Workload,
    title="A toleration for spot nodes matches a taint that exists",
    reason="neither EKS nor Karpenter taints spot nodes by itself: the toleration has no effect, and a pod "
    "for spot nodes needs a selector",
    source="docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html; "
    "karpenter.sh/docs/concepts/nodepools",
    fix="remove it, or add the taint to the pool",
)
def spot_toleration(workload: Workload, context: Context) -> Iterator[Violation]:
    if any(key in SPOT for _path, key, _values in node_selections(workload)):
        return  # a selector puts it on spot nodes; the toleration may be for its own pool
    for index, toleration in enumerate(sequence(workload.pod.get("tolerations"))):
        key = mapping(toleration).get("key")
        if key in SPOT_TAINTS and not _is_taint_set(str(key), context):
            yield Violation(f"toleration of {key}", workload.at("tolerations", index))


@rule(
    "spot-checkpoint",
    "warning",
    Workload,
    title="A Job on spot nodes is prepared for interruptions",
    reason="an interruption counts as a failure of the Job, and 30 seconds are too short for a checkpoint",
    source="kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy",
    fix="podFailurePolicy with {action: Ignore, onPodConditions: [{type: DisruptionTarget}]} and "
    "terminationGracePeriodSeconds: 100",
    fragments=False,
)
def spot_checkpoint(workload: Workload, _: Context) -> Iterator[Violation]:
    # The intention counts: a label that no node has is the topic of spot-label.
    on_spot = any(
        key in (*SPOT, *UNSET_SPOT_LABELS) and any("spot" in value.lower() for value in values)
        for _path, key, values in node_selections(workload)
    )
    if not on_spot or workload.job is None or not workload.wants_gpus:
        return
    rules = sequence(mapping(workload.job.get("podFailurePolicy")).get("rules"))
    ignored = any(
        mapping(entry).get("action") == "Ignore" and sequence(mapping(entry).get("onPodConditions"))
        for entry in rules
    )
    grace = workload.pod.get("terminationGracePeriodSeconds", DEFAULT_GRACE)
    lacking = [] if ignored else ["no podFailurePolicy that ignores DisruptionTarget"]
    if isinstance(grace, int) and grace <= DEFAULT_GRACE:
        lacking.append(f"{grace} seconds of grace")
    if lacking:
        yield Violation(", ".join(lacking), workload.job_where)


# nvidia.com/gpu is the name of a resource, and often mistaken for a label.
MANUAL_LABELS = (
    "accelerator",
    "gpu",
    "gpu-type",
    "gpu_type",
    "gputype",
    "nvidia.com/gpu",
    "hardware-type",
    "gpu-model",
)


@rule(
    "label-by-hand",
    "warning",
    Workload,
    title="GPUs are selected by labels that feature discovery or the provider set",
    reason="nodes that the autoscaler starts lack a label that was set by hand: the pod stays Pending",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix='nvidia.com/gpu.product: Tesla-T4, nvidia.com/gpu.present: "true", or the type\'s own label: '
    "node.kubernetes.io/instance-type, karpenter.k8s.aws/instance-gpu-name",
)
def label_by_hand(workload: Workload, context: Context) -> Iterator[Violation]:
    for path, key, values in node_selections(workload):
        # Labels of providers and of feature discovery have a domain.
        by_hand = key in MANUAL_LABELS or ("/" not in key and re.search(r"(?i)gpu|accelerator", key))
        if by_hand and not _set_by_pool(key, context):
            yield Violation(f"{key}: {', '.join(values)}", path)


@rule(
    "daemonset-nodes",
    "warning",
    Workload,
    title="A DaemonSet for GPU nodes selects them",
    reason="it keeps failing on nodes without a GPU, as the device plugin does since 0.18",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md, 0.18.0; NVIDIA/dcgm-exporter",
    fix='nodeSelector: {nvidia.com/gpu.present: "true"}',
    fragments=False,
)
def daemonset_nodes(workload: Workload, _: Context) -> Iterator[Violation]:
    if not _gpu_daemon(workload) or workload.pod.get("nodeSelector"):
        return
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    if not at(workload.pod, ("affinity", "nodeAffinity", required)):
        yield Violation("neither nodeSelector nor a required node affinity", workload.at())


@rule(
    "daemonset-toleration",
    "warning",
    Workload,
    title="A DaemonSet for GPU nodes tolerates their taint",
    reason="GPU nodes have the taint nvidia.com/gpu, and a pod that requests no GPU gets no toleration "
    "automatically: the DaemonSet runs nowhere",
    source=""
    "kubernetes.io/docs/reference/access-authn-authz/admission-controllers/#extendedresourcetoleration",
    fix="tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    fragments=False,
)
def daemonset_toleration(workload: Workload, _: Context) -> Iterator[Violation]:
    tolerations = [mapping(toleration) for toleration in sequence(workload.pod.get("tolerations"))]
    # Without a key a toleration is for every taint.
    tolerated = any(not toleration.get("key") or is_gpu(str(toleration["key"])) for toleration in tolerations)
    if _gpu_daemon(workload) and not tolerated:
        yield Violation("no toleration of nvidia.com/gpu", workload.at())


def _gpu_daemon(workload: Workload) -> bool:
    # Images of GPU agents, by name.
    agents = re.compile(r"k8s-device-plugin|dcgm-exporter|gpu-feature-discovery|nvidia")
    return workload.kind == "DaemonSet" and any(
        agents.search(container.image) for container in workload.containers
    )
