"""Diagnoses GPUs of a cluster and pods that request them: evidence, cause and fix. Changes nothing.

Each function yields findings. Those for the cluster check whether there is a node with GPUs, whether its
labels say so, whether the device plugin runs there and offers all GPUs, and whether the node is healthy.
Those for a workload check whether it creates pods. Those for a pod follow its life: does it request a GPU, is
it scheduled, does it start, why did it end. If no known cause explains a pod that does not run, its status
and events are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukiln.catalog import cuda, xid
from gpukiln.errors import BusyError, GpukilnError, UnavailableError, UsageError
from gpukiln.findings import SEVERITIES, Finding, Severity
from gpukiln.kubernetes import workloads
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.images import cuda_of_image
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.scheduling import as_daemon_set_pod, containers, gpus_requested, mismatches, nearest
from gpukiln.kubernetes.symptoms import (
    CONTAINER,
    CREATION,
    KUBELET,
    PLUGIN,
    SCHEDULER,
    WAITING,
    Symptom,
    symptom_in,
)
from gpukiln.typed import strict
from gpukiln.units import is_whole

SCHEMA = "k8s.doctor/1"
# Set by feature discovery; the label cuda.driver.major of older releases is deprecated.
DRIVER = "nvidia.com/cuda.driver-version.full"
# Labels that mark a GPU node before feature discovery has run: of NFD, Karpenter and EKS's kubelet.
GPU_NODE_LABELS = (
    "feature.node.kubernetes.io/pci-10de.present",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)
PLUGIN_CONFIG = "nvidia.com/device-plugin.config"  # its value names a configuration in the plugin's ConfigMap
LOG_LINES = 200  # last lines of a log that are searched
SHOWN_EVENTS = 3  # last events of a pod or workload without a known cause

# Node conditions that are bad when False (EKS's node monitoring agent and kubelet: ...Ready), and those that
# are bad when True (node-problem-detector, NVSentinel, AKS and GKE name the problem).
BAD_WHEN_FALSE = re.compile(r".*Ready$")
BAD_WHEN_TRUE = re.compile(
    r"Gpu\w*(Watch|Failure)?$|GPU\w+|XID\w*|Xid\w*|SysLogs\w+|NVLink\w*|UnhealthyNvidiaDevicePlugin|"
    r"(Memory|Disk|PID)Pressure|KernelDeadlock|ReadonlyFilesystem|NetworkUnavailable"
)
# Xid=79 of the device plugin, NvidiaXID79Error of EKS's node monitoring agent
XID = re.compile(r"(?i)xid\D{0,3}(\d+)")


@strict
class Diagnosis:
    """The examined objects and the findings, errors first.

    Args:
        context: Context of the kubeconfig.
        looked_at: The examined objects, in words.
        findings: The message of each is the observation in the cluster's words, its evidence has the cause;
            empty: no problem was found.
    """

    context: str
    looked_at: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    schema: str = SCHEMA


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A diagnosis for people."""
    for finding in diagnosis.findings:
        yield f"{finding.severity}: {finding.object}: {finding.id}"
        yield f"  seen   {finding.message}"
        yield f"  cause  {finding.evidence['cause']}"
        yield f"  fix    {finding.remedy}\n"
    yield f"looked at {', '.join(diagnosis.looked_at)}"
    errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    counts = f"{errors} errors, {len(diagnosis.findings) - errors} warnings"
    yield counts if diagnosis.findings else "no problem was found"


@dataclass(frozen=True)
class ClusterState:
    """The state of the cluster, read once."""

    nodes: list[Manifest]
    pods: list[Manifest]
    daemon_sets: list[Manifest]
    # of a container; True: of its previous run
    logs: Callable[[Manifest, str, bool], str] = field(repr=False)
    events: Callable[[Manifest], list[Manifest]] = field(repr=False)  # the oldest first
    # why Kueue does not admit an object
    kueue_conditions: Callable[[Manifest], list[Manifest] | None] = field(repr=False)

    @property
    def gpu_nodes(self) -> list[Manifest]:
        return [node for node in self.nodes if has_gpus(node)]

    @property
    def plugins(self) -> list[Manifest]:
        return [
            daemon_set for daemon_set in self.daemon_sets if is_plugin(daemon_set["spec"]["template"]["spec"])
        ]

    @property
    def has_dra_driver(self) -> bool:
        """Whether a DRA driver offers GPUs by claims, which needs no device plugin."""
        images = [
            container.get("image", "")
            for daemon_set in self.daemon_sets
            for container in containers(daemon_set["spec"]["template"]["spec"])
        ]
        return any("dra-driver" in image for image in images)


def read_state(cluster: Cluster) -> ClusterState:
    """Read the state of a cluster.

    Raises:
        UnavailableError: The API server does not answer.
    """
    return ClusterState(
        cluster.list("Node"),
        cluster.list("Pod", everywhere=True),
        cluster.list("DaemonSet", everywhere=True),
        lambda pod, container, previous: _log(cluster, pod, container, previous=previous),
        lambda manifest: _events(cluster, manifest),
        lambda manifest: _kueue_conditions(cluster, manifest),
    )


def diagnose(cluster: Cluster, pod: str = "", namespace: str = "") -> Diagnosis:
    """Diagnose a cluster, a workload with its newest pod, or one pod; and the node of the pod.

    Args:
        pod: NAME or NAMESPACE/NAME of a pod, or KIND/NAME of a workload (`workloads.KINDS`); empty: the
            cluster, every pod that waits for a GPU or was rejected by a node, and workloads that can't create
            pods.

    Raises:
        UsageError: There is no such pod or workload.
        UnavailableError: The API server does not answer.
    """
    seen = read_state(cluster)
    if pod:
        looked, findings = _diagnose_named(
            seen, *_find_target(cluster, seen, pod, namespace or cluster.namespace)
        )
    else:
        looked, findings = _diagnose_cluster(seen, _refused_workloads(cluster))
    unique = {(finding.id, finding.object, finding.message): finding for finding in findings}
    # Stable: findings of the same severity keep the order of the checks.
    ordered = sorted(unique.values(), key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(cluster.context, looked, tuple(ordered))


def _diagnose_named(
    seen: ClusterState, family: list[Manifest], pod: Manifest | None
) -> tuple[tuple[str, ...], list[Finding]]:
    findings = list(workload_findings(seen, family, has_pods=pod is not None))
    looked = [*family]
    if pod:
        place = pod["spec"].get("nodeName")
        nodes = [node for node in seen.nodes if node["metadata"]["name"] == place]
        looked += [pod, *nodes]
        findings += pod_findings(seen, pod)
        for node in filter(has_gpus, nodes):
            findings += node_findings(seen, node)
        # Without a node of its own, the cause may be that the cluster has no GPU node or no device plugin.
        if not place and any(finding.id == "no-node-fits" for finding in findings):
            findings += cluster_findings(seen)
    return tuple(map(_name, looked)), findings


def _diagnose_cluster(seen: ClusterState, refused: list[Manifest]) -> tuple[tuple[str, ...], list[Finding]]:
    waiting = [pod for pod in seen.pods if _wants_gpu(pod["spec"]) and _waits_or_was_refused(pod)]
    findings = [
        *cluster_findings(seen),
        *(finding for node in seen.gpu_nodes for finding in node_findings(seen, node)),
        *(finding for workload in refused for finding in workload_findings(seen, [workload], has_pods=False)),
        *(finding for pod in waiting for finding in pod_findings(seen, pod)),
    ]
    looked = (
        f"{len(seen.gpu_nodes)} nodes with GPUs of {len(seen.nodes)}",
        f"{len(seen.plugins)} device plugins",
        f"{len(waiting)} pods that wait for a GPU or were rejected by a node",
        *map(_name, refused),
    )
    return looked, findings


def _waits_or_was_refused(pod: Manifest) -> bool:
    """Whether a pod is pending, or the kubelet and not its program made it fail."""
    status = pod["status"]
    # The kubelet sets status.reason, such as UnexpectedAdmissionError; a failed program leaves it empty.
    return status.get("phase") == "Pending" or (status.get("phase") == "Failed" and "reason" in status)


def _refused_workloads(cluster: Cluster) -> list[Manifest]:
    """Workloads whose GPU pods the API server rejected within the last hour; it keeps events for an hour."""
    refused: dict[str, Manifest] = {}
    # A rejected pod does not exist: only this event of its controller names the reason.
    for event in cluster.list("Event", everywhere=True, fields="reason=FailedCreate"):
        about = event.get("involvedObject", {})
        if kind := workloads.kind_of(about.get("kind", "")):
            for api in workloads.KINDS[kind]:
                manifest = cluster.get(api, about.get("name", ""), about.get("namespace", ""))
                if (
                    manifest
                    and _wants_gpu(workloads.pod_template_spec(manifest))
                    and workloads.lacks_pods(manifest, has_pods=False)
                ):
                    refused[manifest["metadata"]["uid"]] = manifest
    return list(refused.values())


# --- the cluster ------------------------------------------------------------------------------------------


def cluster_findings(seen: ClusterState) -> Iterator[Finding]:
    """Whether there are nodes with GPUs and a device plugin for them."""
    if not seen.gpu_nodes:
        yield _finding(
            "no-gpu-node",
            "error",
            "cluster",
            f"none of {len(seen.nodes)} nodes has {GPU_PRESENT}=true or another GPU label",
            "the pool is scaled to zero, its machines have no GPU, or nothing labels them",
            "`invoke k8s.nodes` renders pools whose nodes have the label and the taint from the start",
        )
    without = [_name(node) for node in seen.gpu_nodes if not _count(node["status"].get("allocatable", {}))]
    if not (seen.plugins or seen.has_dra_driver) and (without or not seen.gpu_nodes):
        yield _finding(
            "no-device-plugin",
            "error" if without else "warning",
            "cluster",
            f"none of {len(seen.daemon_sets)} DaemonSets runs NVIDIA's device plugin"
            + (f", and {', '.join(without)} offer no {GPU}" if without else ""),
            "it is not installed; only nodes of Bottlerocket and EKS Auto Mode have one of their own",
            "`invoke k8s.addons --only plugin` renders it",
        )
    for plugin in seen.plugins:
        status = plugin.get("status", {})
        desired, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
        if not desired and seen.gpu_nodes:
            # With the controller's tolerations, so that a cordoned node is not named as the reason.
            spec = as_daemon_set_pod(plugin["spec"]["template"]["spec"])
            why = [problem.text for node in seen.gpu_nodes for problem in mismatches(spec, node)]
            yield _finding(
                "device-plugin-nowhere",
                "error",
                _name(plugin),
                f"it is scheduled to 0 of {len(seen.gpu_nodes)} nodes with GPUs: "
                f"{'; '.join(dict.fromkeys(why))}",
                "its selector or affinity requires a label that the nodes lack, or it does not tolerate a "
                "taint",
                f"set the label {GPU_PRESENT}=true in the node pool, and add tolerations for its taints",
            )
        elif ready < desired:
            yield _finding(
                "device-plugin-not-ready",
                "error",
                _name(plugin),
                f"{ready} of {desired} pods are ready",
                "the findings below on its pods have the cause",
                "repair the nodes in the findings below",
            )


# --- one node -----------------------------------------------------------------------------------------------


def node_findings(seen: ClusterState, node: Manifest) -> Iterator[Finding]:
    """Whether a GPU node offers all its GPUs, has label and taint, and is healthy."""
    meta, status = node["metadata"], node["status"]
    labels, name = meta.get("labels", {}), _name(node)
    offered = _count(status.get("allocatable", {}))
    # Capacity: what the plugin registered; allocatable: without its unhealthy GPUs.
    registered = _count(status.get("capacity", {}))
    counted = labels.get(f"{GPU}.count", "")
    plugins = [
        pod for pod in seen.pods if pod["spec"].get("nodeName") == meta["name"] and is_plugin(pod["spec"])
    ]
    # After an update the old pod may still be listed as failed.
    plugin = max(plugins, key=lambda pod: (_is_active(pod), _creation_time(pod)), default=None)
    if GPU_PRESENT not in labels:
        yield _finding(
            "label-missing",
            "error" if not offered else "warning",
            name,
            f"it has {', '.join(label for label in GPU_NODE_LABELS if label in labels) or 'GPUs'}, and not "
            f"{GPU_PRESENT}",
            "neither the pool nor feature discovery set it: DaemonSets and pods that select by it skip the "
            "node",
            f"set {GPU_PRESENT}=true in the pool, so that new nodes have it; feature discovery sets the "
            "other labels",
        )
    if not any(taint["key"].startswith("nvidia.com/") for taint in node["spec"].get("taints", ())):
        yield _finding(
            "taint-missing",
            "warning",
            name,
            f"it has no taint {GPU}",
            "pods without a GPU use up the node and prevent that it is scaled down",
            f"set the taint {GPU}=true:NoSchedule in the pool; pods that request a GPU tolerate it",
        )
    if not offered:
        yield from _nothing_offered(seen, node, plugin, registered)
    elif offered < max(registered, int(counted) if is_whole(counted) and not _is_shared(labels) else 0):
        log = _plugin_logs(seen, plugin)[1][0] if plugin else ""
        line = _last_match(log, r"(?i)xid|unhealthy")
        yield _finding(
            "gpu-unhealthy",
            "error",
            name,
            f"it offers {offered} GPUs and has {max(registered, int(counted or 0))}"
            + (f"; its device plugin: {line}" if line else ""),
            f"the device plugin marked one unhealthy{_xid_suffix(line)}",
            "`invoke node.doctor` examines the GPU; the plugin offers it again after a restart of its pod",
        )
    for condition in status.get("conditions", ()):
        yield from _node_condition_finding(name, condition)


def _nothing_offered(
    seen: ClusterState, node: Manifest, plugin: Manifest | None, registered: int
) -> Iterator[Finding]:
    name, labels = _name(node), node["metadata"].get("labels", {})
    if plugin is None:
        why = [
            problem.text
            for daemon_set in seen.plugins
            for problem in mismatches(as_daemon_set_pod(daemon_set["spec"]["template"]["spec"]), node)
        ]
        if seen.plugins:
            yield _finding(
                "device-plugin-not-here",
                "error",
                name,
                f"it offers no {GPU}, and no pod of the device plugin runs on it"
                + (f": {'; '.join(dict.fromkeys(why))}" if why else ""),
                "the DaemonSet's selector or tolerations exclude the node",
                "add the label of the DaemonSet's selector to the node, or the toleration to the DaemonSet",
            )
        return
    container, logs = _plugin_logs(seen, plugin)
    has = f"offers no {GPU}" + (f" and has {registered}" if registered else "")
    for log in logs:
        if known := symptom_in(log, PLUGIN):
            symptom, line = known
            asks = (
                f"; the node's label {PLUGIN_CONFIG} is {labels[PLUGIN_CONFIG]}"
                if PLUGIN_CONFIG in labels
                else ""
            )
            said = f"it {has}; {_name(plugin)}, container {container}, says: {_short(line)}"
            yield _symptom_finding(
                known, name, said + (asks if symptom.rule == "device-plugin-config" else "")
            )
            return
    last = next((line for log in logs for line in log.splitlines()[-1:] if line), "")
    waiting = _waiting(plugin)
    said = f"it {has}; {_name(plugin)}, container {container}, says: {waiting or _short(last) or 'nothing'}"
    meta = plugin["metadata"]
    read = f"`kubectl -n {meta['namespace']} logs {meta['name']} -c {container}` shows the whole log"
    if registered:
        yield _finding(
            "gpu-unhealthy",
            "error",
            name,
            said,
            "the device plugin marked every GPU unhealthy, or it ended and the kubelet keeps the old "
            "capacity",
            f"{read}; `invoke node.doctor` examines the GPUs; the plugin offers them again after its restart",
        )
    # A resource with capacity 0: the plugin is registered, and has listed no device.
    elif not waiting and any(key.startswith("nvidia.com/") for key in node["status"].get("capacity", {})):
        yield _finding(
            "device-plugin-no-devices",
            "error",
            name,
            said,
            "the plugin registered with the kubelet and has no device to offer: its configuration excludes "
            "all "
            "GPUs, MIG is on without instances, or the driver lost the GPUs",
            f"{read}; `invoke node.doctor` shows whether the driver has the GPUs",
        )
    else:
        yield _finding(
            "device-plugin-fails",
            "error",
            name,
            said,
            "the device plugin has not registered with the kubelet, for an unknown reason"
            if waiting or last
            else "the device plugin logs nothing: it may have started before the driver",
            f"{read}; `invoke node.doctor` examines the driver",
        )


def _plugin_logs(seen: ClusterState, plugin: Manifest) -> tuple[str, list[str]]:
    """The failing container, or the plugin's; its log, of this and of the previous run."""
    # An init container that fails, such as the one that reads the configuration, keeps the plugin from
    # starting.
    failing = [status["name"] for status in _statuses(plugin) if _failure(status) or _waiting_reason(status)]
    main = [
        container["name"] for container in plugin["spec"]["containers"] if _is_plugin_container(container)
    ]
    name = next(iter((*failing, *main)))
    return name, [seen.logs(plugin, name, False), seen.logs(plugin, name, True)]


def _node_condition_finding(name: str, condition: Mapping[str, str]) -> Iterator[Finding]:
    kind, status = condition["type"], condition["status"]
    bad = (
        # Unknown: the node controller has had no report of the kubelet
        status in ("False", "Unknown")
        if BAD_WHEN_FALSE.fullmatch(kind)
        else status == "True" and BAD_WHEN_TRUE.match(kind)
    )
    if bad:
        said = f"{condition.get('reason', '')} {condition.get('message', '')}".strip()
        yield _finding(
            "node-condition",
            "error",
            name,
            f"{kind} is {status}: {said}",
            f"an agent on the node reports it{_xid_suffix(said)}",
            "drain the node; `invoke node.doctor` finds the fault, a reboot or another machine fixes it",
        )


# --- a pod ------------------------------------------------------------------------------------------------

VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def pod_findings(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    """Why a pod does not run on a GPU."""
    spec, name = pod["spec"], _name(pod)
    if not _wants_gpu(spec):
        yield _finding(
            "asks-for-no-gpu",
            "error",
            name,
            "no container has nvidia.com/gpu in its limits",
            "it can be scheduled to any node, and the device plugin allocates nothing to it",
            f'limits: {{{GPU}: "1"}}',
        )
    for container in containers(spec):
        # The plugin sets the variables in the container, not in the pod's spec: one in the spec is the
        # user's.
        set_by_hand = [env for env in container.get("env", ()) if env["name"] in VARIABLES]
        if set_by_hand and gpus_requested(spec):
            said = ", ".join(f"{env['name']}={env.get('value', '...')}" for env in set_by_hand)
            yield _finding(
                "visible-devices",
                "error",
                name,
                f"container {container['name']} sets {said}",
                "in a container GPUs are numbered from 0: the variable hides them, or names GPUs of others",
                "remove it: the device plugin decides which GPUs the container gets",
            )
    why: list[Finding] = []
    if not spec.get("nodeName") and pod["status"].get("phase") == "Pending":
        why += _scheduling_problems(seen, pod)
    why += [*_start_problems(seen, pod), *_kubelet_refusal(pod), *_container_failures(seen, pod)]
    yield from why
    yield from _driver_mismatch(seen, pod)
    if not why and not _is_running_well(pod):
        yield _unexplained(seen, pod)


def _scheduling_problems(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    name, spec = _name(pod), pod["spec"]
    # A pod with a gate is not given to the scheduler at all (KEP-3521), so nothing else can be said of it.
    gates = [gate["name"] for gate in spec.get("schedulingGates", ())]
    if gates:
        yield _finding(
            "scheduling-gated",
            "warning",
            name,
            f"it waits for {', '.join(gates)}{_reason_suffix(seen.kueue_conditions(pod))}",
            "Kueue has not admitted it, or another controller has not removed its gate",
            "`kubectl get workloads` shows Kueue's reason, such as quota or an unsuitable flavor",
        )
        return
    said = _scheduler_says(seen, pod)
    # The scheduler only counts reasons (0/9 nodes are available: ...); the nearest node shows what to change.
    best = nearest(spec, seen.nodes, seen.pods)
    if best is None:
        yield _finding(
            "no-node-fits",
            "error",
            name,
            said or "the cluster has no node",
            "there is no node",
            "add a node pool",
        )
        return
    node, problems = best
    shown = node["metadata"]["name"]
    if not problems:
        yield _unexplained_wait(name, spec, said, shown)
        return
    if known := symptom_in(said, SCHEDULER):  # a larger node would not be enough
        yield _symptom_finding(known, name)
    taken = [
        _name(other)
        for other in seen.pods
        if other["spec"].get("nodeName") == shown and gpus_requested(other["spec"]) and _is_active(other)
    ]
    holders = (
        f"; its GPUs are used by {', '.join(taken)}"
        if taken and any(GPU in problem.text for problem in problems)
        else ""
    )
    yield _finding(
        "no-node-fits",
        "error",
        name,
        f"{said or 'unschedulable'} The nearest node is {shown}: "
        f"{'; '.join(problem.text for problem in problems)}{holders}",
        "no node has all that the pod requests",
        "request less, wait, or add a node pool: `invoke k8s.check` shows the instance types that fit",
    )


def _scheduler_says(seen: ClusterState, pod: Manifest) -> str:
    """Why the scheduler has not placed a pod: from its condition, or else its last event."""
    conditions = [
        condition.get("message", "")
        for condition in pod["status"].get("conditions", ())
        if condition["type"] == "PodScheduled" and condition["status"] != "True"
    ]
    events = [
        event.get("message", "") for event in seen.events(pod) if event.get("reason") == "FailedScheduling"
    ]
    return next(filter(None, (*conditions, *reversed(events))), "")


def _unexplained_wait(name: str, spec: Mapping[str, Any], said: str, node: str) -> Finding:
    """A pod that fits a node by all that is evaluated here; the scheduler's own message takes precedence."""
    claims = [claim["name"] for claim in spec.get("resourceClaims") or ()]
    # DRA claims: the scheduler only considers a pod when all of its claims exist.
    if claims and not said:  # dynamicresources.go: PreEnqueue, which leaves neither condition nor event
        said = (
            f"no message of the scheduler, which waits until each resource claim exists: {', '.join(claims)}"
        )
    evidence = f"{said or 'no message of the scheduler'}; {node} has the requested resources"
    if known := symptom_in(said, SCHEDULER):
        return _symptom_finding(known, name, evidence)
    # These two are what is computed here as well; by now the resources are free again.
    if said and not re.search(r"Insufficient |Too many pods", said):
        return _finding(
            "scheduler-refuses",
            "error",
            name,
            evidence,
            "the scheduler rejects it for the reason in its message, which gpukiln does not evaluate",
            "`kubectl describe pod` shows its events; see also the scheduler's log",
        )
    return _finding(
        "not-scheduled-yet",
        "warning",
        name,
        evidence,
        "resources became free a moment ago, or its scheduler does not run",
        f"try again in a minute; its scheduler is {spec.get('schedulerName', 'default-scheduler')}",
    )


def _start_problems(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    texts = [_waiting(pod)]
    if pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
        texts += [
            # Volumes and the pod's network fail before any container has a status: only events show it.
            _event_words(event)
            for event in reversed(seen.events(pod))
            if event.get("type") == "Warning"
        ]
    for text in filter(None, texts):
        if known := symptom_in(" ".join(text.split()), WAITING):
            yield _symptom_finding(known, _name(pod))
            return


def _kubelet_refusal(pod: Manifest) -> Iterator[Finding]:
    """Why the kubelet rejected or ended a pod."""
    status = pod["status"]
    said = f"{status.get('reason', '')}: {status.get('message', '')}"
    if status.get("phase") == "Failed" and (known := symptom_in(" ".join(said.split()), KUBELET)):
        yield _symptom_finding(known, _name(pod))


def _container_failures(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    name = _name(pod)
    # To name init containers as such.
    before = {init_container["name"] for init_container in pod["spec"].get("initContainers") or ()}
    for container_status in _statuses(pod):
        failure = _failure(container_status)
        if failure is None:
            continue
        ended, previous = failure
        kind = "init container" if container_status["name"] in before else "container"
        what = f"{kind} {container_status['name']}"
        # The kernel kills the process without a word in its log.
        if ended.get("reason") == "OOMKilled":
            yield _finding(
                "out-of-memory",
                "error",
                name,
                f"{what} was OOMKilled, exit {ended.get('exitCode')}",
                "it used more main memory than its limit; files in /dev/shm of medium Memory count",
                "raise limits.memory, or use fewer data loader workers; this is not the GPU's memory",
            )
            return
        # A restarted container has a new log; the error is in the one of its previous run.
        log = seen.logs(pod, container_status["name"], previous)
        if known := symptom_in(f"{ended.get('message', '')}\n{log}", CONTAINER):
            yield _symptom_finding(known, name, f"{what} logs: {_short(known[1])}")
            return
        last = _short(next(iter(reversed(log.splitlines())), "nothing"))
        options = (
            f"{'--previous ' if previous else ''}{pod['metadata']['name']} -c {container_status['name']}"
        )
        yield _finding(
            "container-failed",
            "error",
            name,
            f"{what} exits {ended.get('exitCode')}; its last line: {last}",
            "its log has no known GPU error",
            f"`kubectl logs {options}` shows the whole log",
        )
        return


def _unexplained(seen: ClusterState, pod: Manifest) -> Finding:
    """A pod that does not run, without a known cause."""
    status, phase = pod["status"], pod["status"].get("phase", "Unknown")
    events = seen.events(pod)
    warnings = [event for event in events if event.get("type") == "Warning"]
    states = [
        f"container {container_status['name']} {kind} {state.get('reason', '')}".rstrip()
        for container_status in _statuses(pod)
        for kind, state in container_status.get("state", {}).items()
    ]
    said = [
        f"phase {phase}",
        ": ".join(filter(None, (status.get("reason", ""), status.get("message", "")))),
        *(
            workloads.condition_text(condition)
            for condition in status.get("conditions") or ()
            if condition["status"] != "True"
        ),
        _waiting(pod) or ", ".join(states),
        *(_event_words(event) for event in (warnings or events)[-SHOWN_EVENTS:]),
    ]
    # A pod that was just created has neither warnings nor a waiting container.
    bad = phase != "Pending" or bool(warnings) or bool(_waiting(pod))
    return _finding(
        "pod-not-running",
        "error" if bad else "warning",
        _name(pod),
        "; ".join(_short(text) for text in dict.fromkeys(said) if text),
        "no known cause explains it" if bad else "it is probably about to start",
        "`kubectl describe pod` shows status and events" if bad else "try again in a minute",
    )


def _driver_mismatch(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    """Compare the driver in the node's label with the CUDA version in the image's tag."""
    node = next(
        (
            candidate
            for candidate in seen.nodes
            if candidate["metadata"]["name"] == pod["spec"].get("nodeName")
        ),
        None,
    )
    # Without feature discovery the driver is unknown, and nothing is compared.
    driver = node["metadata"].get("labels", {}).get(DRIVER) if node else None
    for container in containers(pod["spec"]):
        cuda_version = cuda_of_image(container.get("image", ""))
        if not (driver and cuda_version and gpus_requested(pod["spec"])):
            continue
        try:
            support = cuda.support(cuda_version, driver, [])
        except UsageError:  # the catalogue does not know the version
            continue
        if not support.runs:
            yield _finding(
                "driver-too-old",
                "error",
                _name(pod),
                f"{container['image']} is CUDA {cuda_version}; {_name(node or {})} has driver {driver}",
                support.message,
                f"an image with an older CUDA, or nodes with driver {cuda.needs(cuda_version).first} or "
                "later",
            )


# --- what pods come from ----------------------------------------------------------------------------------

# Conditions of workloads that mean a failure (batch/v1, apps/v1, JobSet, Kubeflow, KubeRay).
FAILURE_CONDITIONS = {
    "Failed": "True",
    "ReplicaFailure": "True",
    "Progressing": "False",
    "HeadPodReady": "False",
}


def workload_findings(seen: ClusterState, family: list[Manifest], *, has_pods: bool) -> Iterator[Finding]:
    """Why a workload creates no pods, or failed.

    Args:
        family: The object, and the objects by which it creates its pods.
        has_pods: Whether it has pods, whose findings are more precise.
    """
    # A suspended JobSet suspends the Jobs that it owns: the first of the family is the reason.
    held = next(filter(workloads.is_suspended, family), None)
    findings = [_suspended_finding(held, seen.kueue_conditions(held))] if held else []
    for member in family:
        more = _condition_findings(member, seen.events(member), has_pods=has_pods)
        # A Deployment repeats the condition of its ReplicaSet.
        same = {(finding.id, finding.message) for finding in findings}
        findings += [finding for finding in more if (finding.id, finding.message) not in same]
    if not (findings or has_pods) and family and not _is_done(family[0]):
        said = [
            *(
                workloads.condition_text(condition)
                for condition in family[0].get("status", {}).get("conditions") or ()
            ),
            *(_event_words(event) for member in family for event in seen.events(member)[-SHOWN_EVENTS:]),
        ]
        findings.append(
            _finding(
                "no-pods",
                "warning",
                _name(family[0]),
                f"it has no pod; {'; '.join(map(_short, said)) or 'it has neither conditions nor events'}",
                "it specifies none (replicas, parallelism, schedule), or its controller does not run",
                "look at `kubectl describe`, and at the pods of its controller",
            )
        )
    yield from findings


def _condition_findings(manifest: Manifest, events: list[Manifest], *, has_pods: bool) -> Iterator[Finding]:
    name, status = _name(manifest), manifest.get("status", {})
    wrong = [
        condition
        for condition in status.get("conditions") or ()
        if FAILURE_CONDITIONS.get(condition["type"]) == condition["status"]
    ]
    failures = [condition for condition in wrong if condition["type"] == "ReplicaFailure"]
    refusals = [event for event in events if event.get("reason", "").startswith("FailedCreate")]
    events = refusals if workloads.lacks_pods(manifest, has_pods=has_pods) else []
    if texts := [source.get("message", "") for source in (*failures, *reversed(events))]:
        yield _creation_finding(name, texts[0])
    for condition in wrong:
        if condition not in failures and not (has_pods and condition["status"] == "False"):
            yield _failed_finding(name, workloads.condition_text(condition))
    if status.get("jobDeploymentStatus") in ("Failed", "ValidationFailed"):  # RayJob has no conditions
        said = (status["jobDeploymentStatus"], status.get("reason"), status.get("message"))
        yield _failed_finding(name, f"jobDeploymentStatus is {': '.join(filter(None, said))}")


def _suspended_finding(manifest: Manifest, by_kueue: list[Manifest] | None) -> Finding:
    name, queue = _name(manifest), manifest["metadata"].get("labels", {}).get(workloads.QUEUE, "")
    if by_kueue is None:
        return _finding(
            "suspended",
            "warning",
            name,
            "it is suspended, and Kueue has no Workload for it"
            + (f", though it names queue {queue}" if queue else ""),
            "a user suspended it" if not queue else "Kueue does not run, or does not manage this kind",
            "set suspend to false, or configure Kueue to manage the kind",
        )
    return _finding(
        "queue-waits",
        "warning",
        name,
        f"it is suspended{_reason_suffix(by_kueue)}",
        "Kueue has not admitted it: its queue has no quota left, or an admission check is not ready",
        "wait, request less, or use another queue; `kubectl get clusterqueues` shows the usage",
    )


def _creation_finding(name: str, text: str) -> Finding:
    said = " ".join(text.split())
    if known := symptom_in(said, CREATION):
        return _symptom_finding(known, name)
    return _finding(
        "pods-refused",
        "error",
        name,
        _short(said),
        "the API server rejects its pods",
        "change what the message names",
    )


def _failed_finding(name: str, said: str) -> Finding:
    return _finding(
        "workload-failed",
        "error",
        name,
        _short(said),
        "its controller gave up, or waits in vain",
        "look at its pods if they still exist; `kubectl describe` shows its events",
    )


def _is_done(manifest: Manifest) -> bool:
    """Whether it succeeded; its pods may be deleted."""
    done = ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet")
    status = manifest.get("status", {})
    return status.get("jobDeploymentStatus") == "Complete" or any(
        condition["type"] in done and condition["status"] == "True"
        for condition in status.get("conditions") or ()
    )


# --- what all of them use ---------------------------------------------------------------------------------


def _finding(id: str, severity: Severity, about: str, seen: str, cause: str, fix: str) -> Finding:
    return Finding(id, severity, seen, object=about, evidence={"cause": cause}, remedy=fix)


def has_gpus(node: Manifest) -> bool:
    labels = node["metadata"].get("labels", {})
    # The device plugin and all checks here are NVIDIA's.
    amd = "amd" in labels.get("karpenter.k8s.aws/instance-gpu-manufacturer", "")
    named = labels.get(GPU_PRESENT) == "true" or any(labels.get(label) for label in GPU_NODE_LABELS)
    return not amd and (named or bool(_count(node["status"].get("capacity", {}))))


def _wants_gpu(spec: Mapping[str, Any]) -> bool:
    """Whether a pod requests GPUs, or devices by claims, which may be GPUs."""
    return bool(gpus_requested(spec) or spec.get("resourceClaims"))


def is_plugin(spec: Mapping[str, Any]) -> bool:
    """Whether a pod is NVIDIA's device plugin: chart, static manifest and operator use the same image."""
    return any(_is_plugin_container(container) for container in spec.get("containers", ()))


def _is_plugin_container(container: Mapping[str, Any]) -> bool:
    """Whether a container is the plugin itself: feature discovery and others use the same image."""
    line = " ".join((*(container.get("command") or ()), *(container.get("args") or ())))
    # Programs in the same image that are not the plugin itself.
    other = re.search("gpu-feature-discovery|config-manager|mps-control-daemon", line)
    return "k8s-device-plugin" in container.get("image", "") and not other


def _find_target(
    cluster: Cluster, seen: ClusterState, text: str, namespace: str
) -> tuple[list[Manifest], Manifest | None]:
    """The named workload with its objects, and the pod to examine: a pending one, else the newest."""
    word, _, name = text.rpartition("/")
    family: list[Manifest] = []
    if kind := workloads.kind_of(word):
        root = workloads.workload(cluster, kind, name, namespace)
        family, own = workloads.descendants(cluster, root, seen.pods)
        newest = max(
            own, key=lambda pod: (pod["status"].get("phase") == "Pending", _creation_time(pod)), default=None
        )
        return family, newest
    # NAMESPACE/NAME, and pod/NAME as kubectl prints it
    namespace = word if word not in ("", "pod", "pods") else namespace
    for pod in seen.pods:
        if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
            return [], pod
    # Names of pods end in random letters: users often type only the beginning.
    near = [_name(pod) for pod in seen.pods if name in pod["metadata"]["name"]]
    raise UsageError(
        f"no pod {text} in namespace {namespace}",
        hint=f"did you mean {near[0].removeprefix('Pod ')}?"
        if near
        else f"wanted NAME or NAMESPACE/NAME of a pod, or KIND/NAME: {', '.join(workloads.KINDS)}",
    )


def _log(cluster: Cluster, pod: Manifest, container: str, *, previous: bool) -> str:
    meta = pod["metadata"]
    try:
        lines = list(
            cluster.logs(
                meta["name"], meta["namespace"], container=container, previous=previous, tail=LOG_LINES
            )
        )
    # The API server answers 400 until the container has started.
    except BusyError:
        return ""
    except UnavailableError as error:
        return "" if previous else f"(its log can't be read: {error.message})"
    return "\n".join(lines)


def _events(cluster: Cluster, manifest: Manifest) -> list[Manifest]:
    """Events of an object, the oldest first."""
    meta = manifest["metadata"]
    # By name and not by UID: events of a node have its name as the UID.
    fields = f"involvedObject.kind={manifest['kind']},involvedObject.name={meta['name']}"
    try:
        return sorted(cluster.list("Event", meta["namespace"], fields=fields), key=_event_time)
    except GpukilnError as error:
        raise UnavailableError(error.message, hint=error.hint) from error


def _event_time(event: Manifest) -> str:
    """The last time of an event; events of events.k8s.io/v1 have no lastTimestamp."""
    # A series is newer than its first event: repeated events are counted instead of stored again.
    times = ((event.get("series") or {}).get("lastObservedTime"), event.get("lastTimestamp"))
    later = (event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return str(next(filter(None, (*times, *later)), ""))


def _event_words(event: Manifest) -> str:
    return f"{event.get('reason', '')}: {event.get('message', '')}"


def _kueue_conditions(cluster: Cluster, manifest: Manifest) -> list[Manifest] | None:
    meta = manifest["metadata"]
    # Kueue's Workload belongs to the Job, of which the pod is a part.
    uids = {meta["uid"], *(owner["uid"] for owner in workloads.owners(manifest))}
    try:
        return workloads.kueue_conditions(cluster, meta["namespace"], uids)
    except GpukilnError as error:
        return [{"type": "Kueue's Workload", "status": "unknown", "message": error.message}]


def _reason_suffix(conditions: list[Manifest] | None) -> str:
    return (
        f": {'; '.join(_short(workloads.condition_text(condition)) for condition in conditions)}"
        if conditions
        else ""
    )


def _statuses(pod: Manifest) -> list[Manifest]:
    """Statuses of the containers, in the order in which they start."""
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _failure(container_status: Manifest) -> tuple[Manifest, bool] | None:
    """How a container failed, and whether that was in its previous run."""
    now, before = (container_status.get(key, {}).get("terminated") for key in ("state", "lastState"))
    # It has ended and is not restarted, so that this run is the last one.
    if now:
        return (now, False) if now.get("exitCode") else None
    return (before, True) if before and before.get("exitCode") else None


def _waiting_reason(container_status: Manifest) -> str:
    """Why a container waits; empty if it is just being created."""
    waiting = container_status.get("state", {}).get("waiting", {})
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return ""
    return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")


def _waiting(pod: Manifest) -> str:
    return next(filter(None, map(_waiting_reason, _statuses(pod))), "")


def _is_running_well(pod: Manifest) -> bool:
    phase = pod["status"].get("phase")
    return phase == "Succeeded" or (phase == "Running" and not _waiting(pod))


def _creation_time(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("creationTimestamp", ""))


def _symptom_finding(known: tuple[Symptom, str], about: str, seen: str = "") -> Finding:
    symptom, line = known
    return _finding(symptom.rule, "error", about, seen or _short(line), symptom.cause, symptom.fix)


def _last_match(log: str, pattern: str) -> str:
    """The last line of a log that matches."""
    return _short(next((line for line in reversed(log.splitlines()) if re.search(pattern, line)), ""))


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def _xid_suffix(text: str) -> str:
    match = XID.search(text)
    return f": {xid.explain(int(match[1]))}" if match else ""


def _count(amounts: Mapping[str, Any]) -> int:
    return sum(
        int(value) for key, value in amounts.items() if key.startswith("nvidia.com/") and is_whole(str(value))
    )


def _is_shared(labels: Mapping[str, str]) -> bool:
    return (
        # Shared or divided GPUs are offered in other numbers than gpu.count.
        labels.get(f"{GPU}.sharing-strategy", "none") != "none"
        or labels.get("nvidia.com/mig.strategy", "none") != "none"
    )


def _is_active(pod: Manifest) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running")


def _name(manifest: Manifest) -> str:
    meta = manifest["metadata"]
    space = f"{meta['namespace']}/" if meta.get("namespace") else ""
    return f"{manifest['kind']} {space}{meta['name']}"
