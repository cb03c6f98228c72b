"""Says why GPUs of a cluster, or a pod that wants one, do not work: evidence, cause, fix. Changes nothing.

Each question is a function that yields what it found. Those of the cluster go from the node up: is there one
with GPUs, does it say so, does the device plugin run there, does it offer what it has, is it healthy. Those
of a workload ask whether it starts pods; those of a pod follow its life: does it ask for a GPU, is it
scheduled, does it start, why did it end. A pod that does not run and that nothing known explains is shown in
its own words.
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
from gpukiln.kubernetes.machines import GPU, PRESENT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.scheduling import asked, containers, mismatches, nearest, of_daemon_set
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
DRIVER = "nvidia.com/cuda.driver-version.full"
# Labels by which a node is known to have GPUs before feature discovery ran: NFD, Karpenter, EKS's kubelet.
ALSO_GPU = (
    "feature.node.kubernetes.io/pci-10de.present",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)
PLUGIN_CONFIG = "nvidia.com/device-plugin.config"  # names a configuration of the plugin's ConfigMap
LINES = 200  # of a log that is read
EVENTS = 3  # the last, of what is shown in its own words

# Conditions that are bad when False; all others that are named are bad when True (reference: EKS's node
# monitoring agent and kubelet say ...Ready, node-problem-detector, NVSentinel, AKS and GKE name the problem).
READY = re.compile(r".*Ready$")
BAD = re.compile(
    r"Gpu\w*(Watch|Failure)?$|GPU\w+|XID\w*|Xid\w*|SysLogs\w+|NVLink\w*|UnhealthyNvidiaDevicePlugin|"
    r"(Memory|Disk|PID)Pressure|KernelDeadlock|ReadonlyFilesystem|NetworkUnavailable"
)
XID = re.compile(r"(?i)xid\D{0,3}(\d+)")


@strict
class Diagnosis:
    """What was looked at, and what was wrong, the likeliest cause first.

    Args:
        context: Of the kubeconfig.
        looked_at: Objects, in words.
        findings: Each with what was seen as its message, in the cluster's words, and the cause in its
            evidence; empty: nothing was wrong.
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
    """What the API says, asked once."""

    nodes: list[Manifest]
    pods: list[Manifest]
    daemon_sets: list[Manifest]
    logs: Callable[[Manifest, str, bool], str] = field(repr=False)  # of a container; True: its last start's
    events: Callable[[Manifest], list[Manifest]] = field(repr=False)  # the oldest first
    kept_back: Callable[[Manifest], list[Manifest] | None] = field(repr=False)  # by Kueue

    @property
    def gpu_nodes(self) -> list[Manifest]:
        return [one for one in self.nodes if has_gpus(one)]

    @property
    def plugins(self) -> list[Manifest]:
        return [one for one in self.daemon_sets if is_plugin(one["spec"]["template"]["spec"])]

    @property
    def has_dra_driver(self) -> bool:
        """Whether GPUs are offered by claims (DRA), for which no device plugin is needed."""
        images = [
            container.get("image", "")
            for one in self.daemon_sets
            for container in containers(one["spec"]["template"]["spec"])
        ]
        return any("dra-driver" in image for image in images)


def diagnose(cluster: Cluster, pod: str = "", namespace: str = "") -> Diagnosis:
    """Look at a cluster, at a workload and its newest pod, or at one pod; and at the node that it is on.

    Args:
        pod: NAME or NAMESPACE/NAME of a pod, or KIND/NAME of what makes pods, see `workloads.KINDS`; empty:
            the cluster, every pod that waits for a GPU or that a node did not take, and what can't create
            any.

    Raises:
        UsageError: There is no such pod or workload.
        UnavailableError: The cluster can't be asked.
    """
    seen = ClusterState(
        cluster.list("Node"),
        cluster.list("Pod", everywhere=True),
        cluster.list("DaemonSet", everywhere=True),
        lambda one, container, previous: _log(cluster, one, container, previous=previous),
        lambda one: _events(cluster, one),
        lambda one: _kept_back(cluster, one),
    )
    if pod:
        looked, found = _of_named(seen, *_chosen(cluster, seen, pod, namespace or cluster.namespace))
    else:
        looked, found = _of_all(seen, _refused_workloads(cluster))
    unique = {(one.id, one.object, one.message): one for one in found}
    ordered = sorted(unique.values(), key=lambda one: SEVERITIES.index(one.severity))
    return Diagnosis(cluster.context, looked, tuple(ordered))


def _of_named(
    seen: ClusterState, family: list[Manifest], pod: Manifest | None
) -> tuple[tuple[str, ...], list[Finding]]:
    found = list(of_workload(seen, family, has_pods=pod is not None))
    looked = [*family]
    if pod:
        place = pod["spec"].get("nodeName")
        nodes = [one for one in seen.nodes if one["metadata"]["name"] == place]
        looked += [pod, *nodes]
        found += of_pod(seen, pod)
        for node in filter(has_gpus, nodes):
            found += of_node(seen, node)
        if not place and any(one.id == "no-node-fits" for one in found):
            found += of_cluster(seen)
    return tuple(map(_name, looked)), found


def _of_all(seen: ClusterState, refused: list[Manifest]) -> tuple[tuple[str, ...], list[Finding]]:
    waiting = [one for one in seen.pods if _wants_gpu(one["spec"]) and _waits_or_was_refused(one)]
    found = [
        *of_cluster(seen),
        *(one for node in seen.gpu_nodes for one in of_node(seen, node)),
        *(one for thing in refused for one in of_workload(seen, [thing], has_pods=False)),
        *(one for pod in waiting for one in of_pod(seen, pod)),
    ]
    looked = (
        f"{len(seen.gpu_nodes)} nodes with GPUs of {len(seen.nodes)}",
        f"{len(seen.plugins)} device plugins",
        f"{len(waiting)} pods that wait for a GPU or that a node did not take",
        *map(_name, refused),
    )
    return looked, found


def _waits_or_was_refused(pod: Manifest) -> bool:
    """Whether a pod waits, or failed by the kubelet and not by what ran in it."""
    status = pod["status"]
    return status.get("phase") == "Pending" or (status.get("phase") == "Failed" and "reason" in status)


def _refused_workloads(cluster: Cluster) -> list[Manifest]:
    """What wants pods with GPUs and had none created within the last hour: so long events are kept."""
    found: dict[str, Manifest] = {}
    for event in cluster.list("Event", everywhere=True, fields="reason=FailedCreate"):
        about = event.get("involvedObject", {})
        if kind := workloads.kind_of(about.get("kind", "")):
            for api in workloads.KINDS[kind]:
                thing = cluster.get(api, about.get("name", ""), about.get("namespace", ""))
                if (
                    thing
                    and _wants_gpu(workloads.template(thing))
                    and workloads.lacks_pods(thing, has_pods=False)
                ):
                    found[thing["metadata"]["uid"]] = thing
    return list(found.values())


# --- the cluster ------------------------------------------------------------------------------------------


def of_cluster(seen: ClusterState) -> Iterator[Finding]:
    """Whether there are nodes with GPUs, and a device plugin for them."""
    if not seen.gpu_nodes:
        yield _finding(
            "no-gpu-node",
            "error",
            "cluster",
            f"none of {len(seen.nodes)} nodes has {PRESENT}=true, nor another label of a GPU",
            "the pool is scaled to zero, its machines have no GPU, or nobody labels them",
            "`invoke k8s.nodes` renders pools whose nodes have label and taint from the start",
        )
    without = [_name(node) for node in seen.gpu_nodes if not _count(node["status"].get("allocatable", {}))]
    if not (seen.plugins or seen.has_dra_driver) and (without or not seen.gpu_nodes):
        yield _finding(
            "no-device-plugin",
            "error" if without else "warning",
            "cluster",
            f"none of {len(seen.daemon_sets)} DaemonSets runs NVIDIA's device plugin"
            + (f", and no {GPU} is offered by {', '.join(without)}" if without else ""),
            "nobody installed it, and the nodes bring none, as those of Bottlerocket and EKS Auto Mode do",
            "`invoke k8s.addons --only plugin` renders it",
        )
    for one in seen.plugins:
        status = one.get("status", {})
        wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
        if not wanted and seen.gpu_nodes:
            spec = of_daemon_set(one["spec"]["template"]["spec"])
            why = [problem.text for node in seen.gpu_nodes for problem in mismatches(spec, node)]
            yield _finding(
                "device-plugin-nowhere",
                "error",
                _name(one),
                f"it wants 0 of {len(seen.gpu_nodes)} nodes with GPUs: {'; '.join(dict.fromkeys(why))}",
                "its selector or affinity asks for a label that the nodes lack, or a taint is not tolerated",
                f"label the nodes in their pool with {PRESENT}=true, and let it tolerate their taints",
            )
        elif ready < wanted:
            yield _finding(
                "device-plugin-not-ready",
                "error",
                _name(one),
                f"{ready} of {wanted} pods are ready",
                "what its pods say is below",
                "repair the nodes that are named below",
            )


# --- a node -----------------------------------------------------------------------------------------------


def of_node(seen: ClusterState, node: Manifest) -> Iterator[Finding]:
    """Whether a node with GPUs offers them all, says what it is, and is healthy."""
    meta, status = node["metadata"], node["status"]
    labels, name = meta.get("labels", {}), _name(node)
    offered = _count(status.get("allocatable", {}))
    registered = _count(status.get("capacity", {}))
    counted = labels.get(f"{GPU}.count", "")
    plugins = [
        one for one in seen.pods if one["spec"].get("nodeName") == meta["name"] and is_plugin(one["spec"])
    ]
    plugin = max(plugins, key=lambda one: (_alive(one), _age(one)), default=None)
    if PRESENT not in labels:
        yield _finding(
            "label-missing",
            "error" if not offered else "warning",
            name,
            f"it has {', '.join(one for one in ALSO_GPU if one in labels) or 'GPUs'}, and not {PRESENT}",
            "neither the pool nor feature discovery set it: DaemonSets and pods that select by it pass it by",
            f"set {PRESENT}=true in the pool, so that new nodes have it; feature discovery sets the others",
        )
    if not any(one["key"].startswith("nvidia.com/") for one in node["spec"].get("taints", ())):
        yield _finding(
            "taint-missing",
            "warning",
            name,
            f"it has no taint {GPU}",
            "pods that need no GPU fill the node, and keep it from being scaled away",
            f"taint the pool with {GPU}=true:NoSchedule; pods that ask for a GPU tolerate it",
        )
    if not offered:
        yield from _nothing_offered(seen, node, plugin, registered)
    elif offered < max(registered, int(counted) if is_whole(counted) and not _shared(labels) else 0):
        log = _plugin_logs(seen, plugin)[1][0] if plugin else ""
        line = _line(log, r"(?i)xid|unhealthy")
        yield _finding(
            "gpu-unhealthy",
            "error",
            name,
            f"it offers {offered} GPUs and has {max(registered, int(counted or 0))}"
            + (f"; its device plugin: {line}" if line else ""),
            f"the device plugin marked one unhealthy{_xid(line)}",
            "`invoke node.doctor` looks at the GPU; the plugin offers it again after a restart of its pod",
        )
    for one in status.get("conditions", ()):
        yield from _condition(name, one)


def _nothing_offered(
    seen: ClusterState, node: Manifest, plugin: Manifest | None, registered: int
) -> Iterator[Finding]:
    name, labels = _name(node), node["metadata"].get("labels", {})
    if plugin is None:
        why = [
            problem.text
            for one in seen.plugins
            for problem in mismatches(of_daemon_set(one["spec"]["template"]["spec"]), node)
        ]
        if seen.plugins:
            yield _finding(
                "device-plugin-not-here",
                "error",
                name,
                f"it offers no {GPU}, and no pod of the device plugin runs there"
                + (f": {'; '.join(dict.fromkeys(why))}" if why else ""),
                "the DaemonSet's selector or tolerations leave the node out",
                "give the node the label that the DaemonSet selects by, or the DaemonSet the toleration",
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
            yield _of_symptom(known, name, said + (asks if symptom.rule == "device-plugin-config" else ""))
            return
    last = next((line for log in logs for line in log.splitlines()[-1:] if line), "")
    waiting = _waiting(plugin)
    said = f"it {has}; {_name(plugin)}, container {container}, says: {waiting or _short(last) or 'nothing'}"
    meta = plugin["metadata"]
    read = f"`kubectl -n {meta['namespace']} logs {meta['name']} -c {container}` has all of it"
    if registered:
        yield _finding(
            "gpu-unhealthy",
            "error",
            name,
            said,
            "the device plugin marked every GPU unhealthy, or it ended and the kubelet keeps its number",
            f"{read}; `invoke node.doctor` looks at the GPUs; the plugin offers them again after its restart",
        )
    elif not waiting and any(key.startswith("nvidia.com/") for key in node["status"].get("capacity", {})):
        yield _finding(
            "device-plugin-no-devices",
            "error",
            name,
            said,
            "the plugin registered at the kubelet and has no device to offer: its configuration leaves all "
            "GPUs out, MIG is on without instances, or the GPUs went away from the driver",
            f"{read}; `invoke node.doctor` says whether the driver has the GPUs",
        )
    else:
        yield _finding(
            "device-plugin-fails",
            "error",
            name,
            said,
            "the device plugin has not registered at the kubelet, for a reason that is not known here"
            if waiting or last
            else "the device plugin says nothing: it may have started before the driver",
            f"{read}; `invoke node.doctor` looks at the driver",
        )


def _plugin_logs(seen: ClusterState, plugin: Manifest) -> tuple[str, list[str]]:
    """The container that fails, else the plugin itself; its log, now and of its last start."""
    failing = [one["name"] for one in _statuses(plugin) if _failure(one) or _word_of(one)]
    main = [one["name"] for one in plugin["spec"]["containers"] if _serves(one)]
    name = next(iter((*failing, *main)))
    return name, [seen.logs(plugin, name, False), seen.logs(plugin, name, True)]


def _condition(name: str, one: Mapping[str, str]) -> Iterator[Finding]:
    kind, status = one["type"], one["status"]
    bad = status in ("False", "Unknown") if READY.fullmatch(kind) else status == "True" and BAD.match(kind)
    if bad:
        said = f"{one.get('reason', '')} {one.get('message', '')}".strip()
        yield _finding(
            "node-condition",
            "error",
            name,
            f"{kind} is {status}: {said}",
            f"an agent on the node reports it{_xid(said)}",
            "drain the node; `invoke node.doctor` says what is broken, a reboot or another machine mends it",
        )


# --- a pod ------------------------------------------------------------------------------------------------

VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def of_pod(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    """Why a pod does not run on a GPU."""
    spec, name = pod["spec"], _name(pod)
    if not _wants_gpu(spec):
        yield _finding(
            "asks-for-no-gpu",
            "error",
            name,
            "no container has nvidia.com/gpu in its limits",
            "it may be scheduled anywhere, and the device plugin gives it nothing",
            f'limits: {{{GPU}: "1"}}',
        )
    for one in containers(spec):
        set_by_hand = [env for env in one.get("env", ()) if env["name"] in VARIABLES]
        if set_by_hand and asked(spec):
            said = ", ".join(f"{env['name']}={env.get('value', '...')}" for env in set_by_hand)
            yield _finding(
                "visible-devices",
                "error",
                name,
                f"container {one['name']} sets {said}",
                "inside a container GPUs are numbered from 0 again: it hides them, or reaches for others",
                "leave it out: the device plugin says which GPUs are seen",
            )
    why: list[Finding] = []
    if not spec.get("nodeName") and pod["status"].get("phase") == "Pending":
        why += _unscheduled(seen, pod)
    why += [*_not_started(seen, pod), *_not_taken(pod), *_ended(seen, pod)]
    yield from why
    yield from _driver(seen, pod)
    if not why and not _is_well(pod):
        yield _in_its_own_words(seen, pod)


def _unscheduled(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    name, spec = _name(pod), pod["spec"]
    gates = [one["name"] for one in spec.get("schedulingGates", ())]
    if gates:
        yield _finding(
            "scheduling-gated",
            "warning",
            name,
            f"it waits for {', '.join(gates)}{_because(seen.kept_back(pod))}",
            "a queue (Kueue) has not admitted it, or who set the gate has not removed it",
            "`kubectl get workloads` shows Kueue's reason: quota, or a flavor that does not fit",
        )
        return
    said = _scheduler_says(seen, pod)
    best = nearest(spec, seen.nodes, seen.pods)
    if best is None:
        yield _finding(
            "no-node-fits", "error", name, said or "the cluster has no node", "there is no node", "add a pool"
        )
        return
    node, problems = best
    shown = node["metadata"]["name"]
    if not problems:
        yield _fits_and_waits(name, spec, said, shown)
        return
    if known := symptom_in(said, SCHEDULER):  # more room would not be enough
        yield _of_symptom(known, name)
    taken = [
        _name(one)
        for one in seen.pods
        if one["spec"].get("nodeName") == shown and asked(one["spec"]) and _alive(one)
    ]
    holders = (
        f"; its GPUs are with {', '.join(taken)}"
        if taken and any(GPU in one.text for one in problems)
        else ""
    )
    yield _finding(
        "no-node-fits",
        "error",
        name,
        f"{said or 'unschedulable'} Nearest is {shown}: {'; '.join(one.text for one in problems)}{holders}",
        "no node fits all that the pod asks for",
        "ask for less, wait, or add a pool: `invoke k8s.check` says which instance types it fits",
    )


def _scheduler_says(seen: ClusterState, pod: Manifest) -> str:
    """Why the scheduler has not placed a pod: its condition, else its last event."""
    conditions = [
        one.get("message", "")
        for one in pod["status"].get("conditions", ())
        if one["type"] == "PodScheduled" and one["status"] != "True"
    ]
    events = [one.get("message", "") for one in seen.events(pod) if one.get("reason") == "FailedScheduling"]
    return next(filter(None, (*conditions, *reversed(events))), "")


def _fits_and_waits(name: str, spec: Mapping[str, Any], said: str, node: str) -> Finding:
    """A pod for which a node has room by all that is counted here: what the scheduler says counts more."""
    claims = [one["name"] for one in spec.get("resourceClaims") or ()]
    if claims and not said:  # dynamicresources.go: PreEnqueue, which leaves neither condition nor event
        said = (
            f"no word of the scheduler, which waits for each resource claim to be there: {', '.join(claims)}"
        )
    evidence = f"{said or 'no word of the scheduler'}; {node} has room for it by what is counted here"
    if known := symptom_in(said, SCHEDULER):
        return _of_symptom(known, name, evidence)
    if said and not re.search(r"Insufficient |Too many pods", said):
        return _finding(
            "scheduler-refuses",
            "error",
            name,
            evidence,
            "the scheduler refuses for what it says, which is not counted here",
            "`kubectl describe pod` shows its events; its scheduler's log says more",
        )
    return _finding(
        "not-scheduled-yet",
        "warning",
        name,
        evidence,
        "room became free a moment ago, or its scheduler does not run",
        f"look again in a minute; its scheduler is {spec.get('schedulerName', 'default-scheduler')}",
    )


def _not_started(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    texts = [_waiting(pod)]
    if pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
        texts += [_event_words(one) for one in reversed(seen.events(pod)) if one.get("type") == "Warning"]
    for text in filter(None, texts):
        if known := symptom_in(" ".join(text.split()), WAITING):
            yield _of_symptom(known, _name(pod))
            return


def _not_taken(pod: Manifest) -> Iterator[Finding]:
    """What the kubelet says of a pod that it did not take, or that it ended."""
    status = pod["status"]
    said = f"{status.get('reason', '')}: {status.get('message', '')}"
    if status.get("phase") == "Failed" and (known := symptom_in(" ".join(said.split()), KUBELET)):
        yield _of_symptom(known, _name(pod))


def _ended(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    name = _name(pod)
    before = {one["name"] for one in pod["spec"].get("initContainers") or ()}
    for one in _statuses(pod):
        failure = _failure(one)
        if failure is None:
            continue
        ended, previous = failure
        what = f"{'init container' if one['name'] in before else 'container'} {one['name']}"
        if ended.get("reason") == "OOMKilled":
            yield _finding(
                "out-of-memory",
                "error",
                name,
                f"{what} was OOMKilled, exit {ended.get('exitCode')}",
                "it needed more main memory than its limit; /dev/shm of medium Memory counts too",
                "raise limits.memory; fewer workers of the data loader; this is not the GPU's memory",
            )
            return
        log = seen.logs(pod, one["name"], previous)
        if known := symptom_in(f"{ended.get('message', '')}\n{log}", CONTAINER):
            yield _of_symptom(known, name, f"{what} says: {_short(known[1])}")
            return
        last = _short(next(iter(reversed(log.splitlines())), "nothing"))
        options = f"{'--previous ' if previous else ''}{pod['metadata']['name']} -c {one['name']}"
        yield _finding(
            "container-failed",
            "error",
            name,
            f"{what} exits {ended.get('exitCode')}; its last line: {last}",
            "nothing that is known of GPUs is in its log",
            f"`kubectl logs {options}` has all of it",
        )
        return


def _in_its_own_words(seen: ClusterState, pod: Manifest) -> Finding:
    """A pod that does not run, where nothing that is known says why."""
    status, phase = pod["status"], pod["status"].get("phase", "Unknown")
    events = seen.events(pod)
    warnings = [one for one in events if one.get("type") == "Warning"]
    states = [
        f"container {one['name']} {kind} {state.get('reason', '')}".rstrip()
        for one in _statuses(pod)
        for kind, state in one.get("state", {}).items()
    ]
    said = [
        f"phase {phase}",
        ": ".join(filter(None, (status.get("reason", ""), status.get("message", "")))),
        *(workloads.words(one) for one in status.get("conditions") or () if one["status"] != "True"),
        _waiting(pod) or ", ".join(states),
        *(_event_words(one) for one in (warnings or events)[-EVENTS:]),
    ]
    bad = phase != "Pending" or bool(warnings) or bool(_waiting(pod))
    return _finding(
        "pod-not-running",
        "error" if bad else "warning",
        _name(pod),
        "; ".join(_short(one) for one in dict.fromkeys(said) if one),
        "nothing that is known here explains it" if bad else "it is about to start, as far as can be seen",
        "`kubectl describe pod` shows all of it" if bad else "look again in a minute",
    )


def _driver(seen: ClusterState, pod: Manifest) -> Iterator[Finding]:
    """The node's label against the CUDA version in the image's tag."""
    node = next((one for one in seen.nodes if one["metadata"]["name"] == pod["spec"].get("nodeName")), None)
    driver = node["metadata"].get("labels", {}).get(DRIVER) if node else None
    for one in containers(pod["spec"]):
        wanted = cuda_of_image(one.get("image", ""))
        if not (driver and wanted and asked(pod["spec"])):
            continue
        try:
            support = cuda.support(wanted, driver, [])
        except UsageError:  # a version that the catalogue does not know: nothing is said of it
            continue
        if not support.runs:
            yield _finding(
                "driver-too-old",
                "error",
                _name(pod),
                f"{one['image']} is CUDA {wanted}; {_name(node or {})} has driver {driver}",
                support.message,
                f"an image with an older CUDA, or nodes with driver {cuda.needs(wanted).first} or later",
            )


# --- what pods come from ----------------------------------------------------------------------------------

# Conditions that say that an object does not do its work (batch/v1, apps/v1, JobSet, Kubeflow, KubeRay).
WRONG_IF = {"Failed": "True", "ReplicaFailure": "True", "Progressing": "False", "HeadPodReady": "False"}


def of_workload(seen: ClusterState, family: list[Manifest], *, has_pods: bool) -> Iterator[Finding]:
    """Why an object starts no pods, or gave up.

    Args:
        family: It, and the objects by which it makes its pods.
        has_pods: Whether pods of it are there: they say more.
    """
    held = next(filter(workloads.is_suspended, family), None)
    found = [_suspended(held, seen.kept_back(held))] if held else []
    for one in family:
        more = _of_conditions(one, seen.events(one), has_pods=has_pods)
        same = {(one.id, one.message) for one in found}  # a Deployment has its ReplicaSet's condition
        found += [one for one in more if (one.id, one.message) not in same]
    if not (found or has_pods) and family and not _is_done(family[0]):
        said = [
            *(workloads.words(one) for one in family[0].get("status", {}).get("conditions") or ()),
            *(_event_words(event) for one in family for event in seen.events(one)[-EVENTS:]),
        ]
        found.append(
            _finding(
                "no-pods",
                "warning",
                _name(family[0]),
                f"it has no pod; {'; '.join(map(_short, said)) or 'neither conditions nor events say why'}",
                "it wants none (replicas, parallelism, schedule), or its controller does not run",
                "`kubectl describe` shows all of it; look at its controller's pods",
            )
        )
    yield from found


def _of_conditions(thing: Manifest, events: list[Manifest], *, has_pods: bool) -> Iterator[Finding]:
    name, status = _name(thing), thing.get("status", {})
    wrong = [one for one in status.get("conditions") or () if WRONG_IF.get(one["type"]) == one["status"]]
    failures = [one for one in wrong if one["type"] == "ReplicaFailure"]
    refusals = [one for one in events if one.get("reason", "").startswith("FailedCreate")]
    events = refusals if workloads.lacks_pods(thing, has_pods=has_pods) else []
    if texts := [one.get("message", "") for one in (*failures, *reversed(events))]:
        yield _refused(name, texts[0])
    for one in wrong:
        if one not in failures and not (has_pods and one["status"] == "False"):
            yield _gave_up(name, workloads.words(one))
    if status.get("jobDeploymentStatus") in ("Failed", "ValidationFailed"):  # RayJob has no conditions
        said = (status["jobDeploymentStatus"], status.get("reason"), status.get("message"))
        yield _gave_up(name, f"jobDeploymentStatus is {': '.join(filter(None, said))}")


def _suspended(thing: Manifest, by_kueue: list[Manifest] | None) -> Finding:
    name, queue = _name(thing), thing["metadata"].get("labels", {}).get(workloads.QUEUE, "")
    if by_kueue is None:
        return _finding(
            "suspended",
            "warning",
            name,
            "it is suspended, and Kueue has no Workload of it"
            + (f", though it names queue {queue}" if queue else ""),
            "somebody suspended it" if not queue else "Kueue does not run, or does not manage this kind",
            "set suspend to false, or have Kueue manage it",
        )
    return _finding(
        "queue-waits",
        "warning",
        name,
        f"it is suspended{_because(by_kueue)}",
        "Kueue has not admitted it: its queue has no quota left, or an admission check is not ready",
        "wait, ask for less, or another queue; `kubectl get clusterqueues` shows what is used",
    )


def _refused(name: str, text: str) -> Finding:
    said = " ".join(text.split())
    if known := symptom_in(said, CREATION):
        return _of_symptom(known, name)
    return _finding(
        "pods-refused",
        "error",
        name,
        _short(said),
        "the API server does not take the pods that it wants to create",
        "change what the message names",
    )


def _gave_up(name: str, said: str) -> Finding:
    return _finding(
        "workload-failed",
        "error",
        name,
        _short(said),
        "its controller gave up, or waits for something that does not come",
        "its pods say why where they are still there; `kubectl describe` shows its events",
    )


def _is_done(thing: Manifest) -> bool:
    """Whether it ended well; its pods may be gone."""
    done = ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet")
    status = thing.get("status", {})
    return status.get("jobDeploymentStatus") == "Complete" or any(
        one["type"] in done and one["status"] == "True" for one in status.get("conditions") or ()
    )


# --- what all of them use ---------------------------------------------------------------------------------


def _finding(id: str, severity: Severity, about: str, seen: str, cause: str, fix: str) -> Finding:
    return Finding(id, severity, seen, object=about, evidence={"cause": cause}, remedy=fix)


def has_gpus(node: Manifest) -> bool:
    labels = node["metadata"].get("labels", {})
    amd = "amd" in labels.get("karpenter.k8s.aws/instance-gpu-manufacturer", "")
    named = labels.get(PRESENT) == "true" or any(labels.get(one) for one in ALSO_GPU)
    return not amd and (named or bool(_count(node["status"].get("capacity", {}))))


def _wants_gpu(spec: Mapping[str, Any]) -> bool:
    """Whether a pod asks for GPUs, or for devices by claims, which may be GPUs."""
    return bool(asked(spec) or spec.get("resourceClaims"))


def is_plugin(spec: Mapping[str, Any]) -> bool:
    """Whether a pod is NVIDIA's device plugin: chart, static manifest and operator take the same image."""
    return any(_serves(one) for one in spec.get("containers", ()))


def _serves(container: Mapping[str, Any]) -> bool:
    """Whether a container is the plugin itself: feature discovery and others come in the same image."""
    line = " ".join((*(container.get("command") or ()), *(container.get("args") or ())))
    other = re.search("gpu-feature-discovery|config-manager|mps-control-daemon", line)
    return "k8s-device-plugin" in container.get("image", "") and not other


def _chosen(
    cluster: Cluster, seen: ClusterState, text: str, namespace: str
) -> tuple[list[Manifest], Manifest | None]:
    """What was named: objects that make pods, and the pod to look at, one that waits or the newest."""
    word, _, name = text.rpartition("/")
    family: list[Manifest] = []
    if kind := workloads.kind_of(word):
        root = workloads.workload(cluster, kind, name, namespace)
        family, own = workloads.family(cluster, root, seen.pods)
        newest = max(own, key=lambda one: (one["status"].get("phase") == "Pending", _age(one)), default=None)
        return family, newest
    namespace = word if word not in ("", "pod", "pods") else namespace
    for one in seen.pods:
        if (one["metadata"]["namespace"], one["metadata"]["name"]) == (namespace, name):
            return [], one
    near = [_name(one) for one in seen.pods if name in one["metadata"]["name"]]
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
            cluster.logs(meta["name"], meta["namespace"], container=container, previous=previous, tail=LINES)
        )
    except BusyError:  # it has not started
        return ""
    except UnavailableError as error:
        return "" if previous else f"(its log can't be read: {error.message})"
    return "\n".join(lines)


def _events(cluster: Cluster, thing: Manifest) -> list[Manifest]:
    """Events about an object, the oldest first."""
    meta = thing["metadata"]
    fields = f"involvedObject.kind={thing['kind']},involvedObject.name={meta['name']}"
    try:
        return sorted(cluster.list("Event", meta["namespace"], fields=fields), key=_when)
    except GpukilnError as error:
        raise UnavailableError(error.message, hint=error.hint) from error


def _when(event: Manifest) -> str:
    """Its last time; those of the newer API have no lastTimestamp."""
    times = ((event.get("series") or {}).get("lastObservedTime"), event.get("lastTimestamp"))
    later = (event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return str(next(filter(None, (*times, *later)), ""))


def _event_words(event: Manifest) -> str:
    return f"{event.get('reason', '')}: {event.get('message', '')}"


def _kept_back(cluster: Cluster, thing: Manifest) -> list[Manifest] | None:
    meta = thing["metadata"]
    uids = {meta["uid"], *(one["uid"] for one in workloads.owners(thing))}
    try:
        return workloads.kept_back(cluster, meta["namespace"], uids)
    except GpukilnError as error:
        return [{"type": "Kueue's Workload", "status": "unknown", "message": error.message}]


def _because(conditions: list[Manifest] | None) -> str:
    return f": {'; '.join(_short(workloads.words(one)) for one in conditions)}" if conditions else ""


def _statuses(pod: Manifest) -> list[Manifest]:
    """Of its containers, those first that run first."""
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _failure(one: Manifest) -> tuple[Manifest, bool] | None:
    """How a container failed, and whether that was before its last start."""
    now, before = (one.get(key, {}).get("terminated") for key in ("state", "lastState"))
    if now:
        return (now, False) if now.get("exitCode") else None
    return (before, True) if before and before.get("exitCode") else None


def _word_of(one: Manifest) -> str:
    """Why a container waits, where it is more than its turn."""
    waiting = one.get("state", {}).get("waiting", {})
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return ""
    return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")


def _waiting(pod: Manifest) -> str:
    return next(filter(None, map(_word_of, _statuses(pod))), "")


def _is_well(pod: Manifest) -> bool:
    phase = pod["status"].get("phase")
    return phase == "Succeeded" or (phase == "Running" and not _waiting(pod))


def _age(one: Manifest) -> str:
    return str(one["metadata"].get("creationTimestamp", ""))


def _of_symptom(known: tuple[Symptom, str], about: str, seen: str = "") -> Finding:
    symptom, line = known
    return _finding(symptom.rule, "error", about, seen or _short(line), symptom.cause, symptom.fix)


def _line(log: str, pattern: str) -> str:
    """The last line that matches."""
    return _short(next((line for line in reversed(log.splitlines()) if re.search(pattern, line)), ""))


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def _xid(text: str) -> str:
    found = XID.search(text)
    return f": {xid.explain(int(found[1]))}" if found else ""


def _count(amounts: Mapping[str, Any]) -> int:
    return sum(
        int(value) for key, value in amounts.items() if key.startswith("nvidia.com/") and is_whole(str(value))
    )


def _shared(labels: Mapping[str, str]) -> bool:
    return (
        labels.get(f"{GPU}.sharing-strategy", "none") != "none"
        or labels.get("nvidia.com/mig.strategy", "none") != "none"
    )


def _alive(pod: Manifest) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running")


def _name(one: Manifest) -> str:
    meta = one["metadata"]
    space = f"{meta['namespace']}/" if meta.get("namespace") else ""
    return f"{one['kind']} {space}{meta['name']}"
