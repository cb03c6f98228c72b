"""Says why GPUs of a cluster, or a pod that wants one, do not work: evidence, cause, fix. Changes nothing.

Each question is a function that yields what it found. Those of the cluster go from the node up: is there one
with GPUs, does it say so, does the device plugin run there, does it offer what it has, is it healthy. Those
of a pod follow its life: does it ask for a GPU, is it scheduled, does it start, why did it end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpukiln.catalog import cuda, xid
from gpukiln.errors import BusyError, GpukilnError, UnavailableError, UsageError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.images import cuda_of_image
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.placing import GPU, asked, containers, nearest, why_not
from gpukiln.kubernetes.symptoms import CONTAINER, PLUGIN, WAITING, symptom_in
from gpukiln.parsing import is_whole
from gpukiln.typed import strict

SCHEMA = "k8s.doctor/1"
PRESENT = "nvidia.com/gpu.present"
DRIVER = "nvidia.com/cuda.driver-version.full"
# Labels by which a node is known to have GPUs before feature discovery ran: NFD, Karpenter, EKS's kubelet.
ALSO_GPU = (
    "feature.node.kubernetes.io/pci-10de.present",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)
LINES = 200  # of a log that is read

# Conditions that are bad when False; all others that are named are bad when True (reference: EKS's node
# monitoring agent and kubelet say ...Ready, node-problem-detector, NVSentinel, AKS and GKE name the problem).
READY = re.compile(r".*Ready$")
BAD = re.compile(
    r"Gpu\w*(Watch|Failure)?$|GPU\w+|XID\w*|Xid\w*|SysLogs\w+|NVLink\w*|UnhealthyNvidiaDevicePlugin|"
    r"(Memory|Disk|PID)Pressure|KernelDeadlock|ReadonlyFilesystem|NetworkUnavailable"
)
XID = re.compile(r"(?i)xid\D{0,3}(\d+)")


@strict
class Found:
    """One thing that is wrong.

    Args:
        rule: What people quote.
        level: error: it can't work so; warning: it works, and should not be so.
        about: The object: KIND NAMESPACE/NAME.
        evidence: What was seen, in the cluster's words.
        cause: What is behind it.
        fix: What to do.
    """

    rule: str
    level: Literal["error", "warning"]
    about: str
    evidence: str
    cause: str
    fix: str


@strict
class Diagnosis:
    """What was looked at, and what was wrong, the likeliest cause first.

    Args:
        context: Of the kubeconfig.
        looked_at: Objects, in words.
        found: Empty: nothing was wrong.
    """

    context: str
    looked_at: tuple[str, ...]
    found: tuple[Found, ...] = ()
    schema: str = SCHEMA


@dataclass(frozen=True)
class Seen:
    """What the API says, asked once."""

    nodes: list[Manifest]
    pods: list[Manifest]
    daemon_sets: list[Manifest]
    logs: Callable[[Manifest, bool], str] = field(repr=False)
    events: Callable[[Manifest], list[Manifest]] = field(repr=False)

    @property
    def gpu_nodes(self) -> list[Manifest]:
        return [one for one in self.nodes if has_gpus(one)]

    @property
    def plugins(self) -> list[Manifest]:
        return [one for one in self.daemon_sets if is_plugin(one["spec"]["template"]["spec"])]


def diagnose(cluster: Cluster, pod: str = "", namespace: str = "") -> Diagnosis:
    """Look at a cluster, or at one pod and the node that it is on.

    Args:
        pod: NAME, NAMESPACE/NAME or job/NAME, whose newest pod counts; empty: the cluster, and every pod that
            waits for a GPU.

    Raises:
        UsageError: There is no such pod.
        UnavailableError: The cluster can't be asked.
    """
    seen = Seen(
        cluster.list("Node"),
        cluster.list("Pod", everywhere=True),
        cluster.list("DaemonSet", everywhere=True),
        lambda one, previous: _log(cluster, one, previous=previous),
        lambda one: _events(cluster, one),
    )
    if pod:
        chosen = _chosen(seen, pod, namespace or cluster.namespace)
        node = next(
            (one for one in seen.nodes if one["metadata"]["name"] == chosen["spec"].get("nodeName")), None
        )
        found = [*of_pod(seen, chosen), *(of_node(seen, node) if node and has_gpus(node) else ())]
        if not chosen["spec"].get("nodeName") and any(one.rule == "no-node-fits" for one in found):
            found += of_cluster(seen)
        looked = (_name(chosen), *([_name(node)] if node else []))
    else:
        waiting = [one for one in seen.pods if one["status"].get("phase") == "Pending" and asked(one["spec"])]
        found = [
            *of_cluster(seen),
            *(one for node in seen.gpu_nodes for one in of_node(seen, node)),
            *(one for pod_ in waiting for one in of_pod(seen, pod_)),
        ]
        looked = (
            f"{len(seen.gpu_nodes)} nodes with GPUs of {len(seen.nodes)}",
            f"{len(seen.plugins)} device plugins",
            f"{len(waiting)} pods that wait for a GPU",
        )
    order = {"error": 0, "warning": 1}
    return Diagnosis(
        cluster.context, looked, tuple(sorted(dict.fromkeys(found), key=lambda x: order[x.level]))
    )


# --- the cluster ------------------------------------------------------------------------------------------


def of_cluster(seen: Seen) -> Iterator[Found]:
    """Whether there are nodes with GPUs, and a device plugin for them."""
    if not seen.gpu_nodes:
        yield Found(
            "no-gpu-node",
            "error",
            "cluster",
            f"none of {len(seen.nodes)} nodes has {PRESENT}=true, nor another label of a GPU",
            "the pool is scaled to zero, its machines have no GPU, or nobody labels them",
            "`invoke k8s.nodes` renders pools whose nodes have label and taint from the start",
        )
    if not seen.plugins:
        yield Found(
            "no-device-plugin",
            "error",
            "cluster",
            f"none of {len(seen.daemon_sets)} DaemonSets runs NVIDIA's device plugin",
            "nobody installed it: no node offers nvidia.com/gpu (Bottlerocket and Auto Mode have their own)",
            "`invoke k8s.addons --only plugin` renders it",
        )
    for one in seen.plugins:
        status = one.get("status", {})
        wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
        if not wanted and seen.gpu_nodes:
            spec = one["spec"]["template"]["spec"]
            why = [problem.text for node in seen.gpu_nodes for problem in why_not(spec, node, {})]
            yield Found(
                "device-plugin-nowhere",
                "error",
                _name(one),
                f"it wants 0 of {len(seen.gpu_nodes)} nodes with GPUs: {'; '.join(dict.fromkeys(why))}",
                "its selector or affinity asks for a label that the nodes lack, or a taint is not tolerated",
                f"label the nodes in their pool with {PRESENT}=true, and let it tolerate their taints",
            )
        elif ready < wanted:
            yield Found(
                "device-plugin-not-ready",
                "error",
                _name(one),
                f"{ready} of {wanted} pods are ready",
                "what its pods say is told below",
                "mend the nodes that are named below",
            )


# --- a node -----------------------------------------------------------------------------------------------


def of_node(seen: Seen, node: Manifest) -> Iterator[Found]:
    """Whether a node with GPUs offers them all, says what it is, and is healthy."""
    meta, status = node["metadata"], node["status"]
    labels, name = meta.get("labels", {}), _name(node)
    offered = _count(status.get("allocatable", {}))
    registered = _count(status.get("capacity", {}))
    counted = labels.get(f"{GPU}.count", "")
    plugin = next(
        (one for one in seen.pods if one["spec"].get("nodeName") == meta["name"] and is_plugin(one["spec"])),
        None,
    )
    if PRESENT not in labels:
        yield Found(
            "label-missing",
            "error" if not offered else "warning",
            name,
            f"it has {', '.join(one for one in ALSO_GPU if one in labels) or 'GPUs'}, and not {PRESENT}",
            "neither the pool nor feature discovery set it: DaemonSets and pods that select by it pass it by",
            f"set {PRESENT}=true in the pool, so that new nodes have it; feature discovery sets the others",
        )
    if not any(one["key"].startswith("nvidia.com/") for one in node["spec"].get("taints", ())):
        yield Found(
            "taint-missing",
            "warning",
            name,
            f"it has no taint {GPU}",
            "pods that need no GPU fill the node, and keep it from being scaled away",
            f"taint the pool with {GPU}=true:NoSchedule; pods that ask for a GPU tolerate it",
        )
    if not offered:
        yield from _nothing_offered(seen, node, plugin)
    elif offered < max(registered, int(counted) if is_whole(counted) and not _shared(labels) else 0):
        log = seen.logs(plugin, False) if plugin else ""
        line = _line(log, r"(?i)xid|unhealthy")
        yield Found(
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


def _nothing_offered(seen: Seen, node: Manifest, plugin: Manifest | None) -> Iterator[Found]:
    name = _name(node)
    if plugin is None:
        why = [
            problem.text
            for one in seen.plugins
            for problem in why_not(one["spec"]["template"]["spec"], node, {})
        ]
        if seen.plugins:
            yield Found(
                "device-plugin-not-here",
                "error",
                name,
                f"it offers no {GPU}, and no pod of the device plugin runs there"
                + (f": {'; '.join(dict.fromkeys(why))}" if why else ""),
                "the DaemonSet's selector or tolerations leave the node out",
                "give the node the label that the DaemonSet selects by, or the DaemonSet the toleration",
            )
        return
    log = "\n".join((seen.logs(plugin, True), seen.logs(plugin, False)))
    if known := symptom_in(log, PLUGIN):
        symptom, line = known
        said = f"it offers no {GPU}; {_name(plugin)} says: {_short(line)}"
        yield Found(symptom.rule, "error", name, said, symptom.cause, symptom.fix)
        return
    said = next((one for one in (_waiting(plugin), *log.splitlines()[-1:]) if one), "nothing")
    yield Found(
        "device-plugin-fails",
        "error",
        name,
        f"it offers no {GPU}; {_name(plugin)} says: {said}",
        "the device plugin found no GPU: no driver on the node, or it started before the driver",
        "`invoke node.doctor` looks at the node; delete the plugin's pod once the driver is loaded",
    )


def _condition(name: str, one: Mapping[str, str]) -> Iterator[Found]:
    kind, status = one["type"], one["status"]
    bad = status in ("False", "Unknown") if READY.fullmatch(kind) else status == "True" and BAD.match(kind)
    if bad:
        said = f"{one.get('reason', '')} {one.get('message', '')}".strip()
        yield Found(
            "node-condition",
            "error",
            name,
            f"{kind} is {status}: {said}",
            f"an agent on the node reports it{_xid(said)}",
            "drain the node; `invoke node.doctor` says what is broken, a reboot or another machine mends it",
        )


# --- a pod ------------------------------------------------------------------------------------------------

VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def of_pod(seen: Seen, pod: Manifest) -> Iterator[Found]:
    """Why a pod does not run on a GPU."""
    spec, name = pod["spec"], _name(pod)
    if not asked(spec):
        yield Found(
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
            yield Found(
                "visible-devices",
                "error",
                name,
                f"container {one['name']} sets {said}",
                "inside a container GPUs are numbered from 0 again: it hides them, or reaches for others",
                "leave it out: the device plugin says which GPUs are seen",
            )
    if not spec.get("nodeName") and pod["status"].get("phase") == "Pending":
        yield from _unscheduled(seen, pod)
    yield from _not_started(seen, pod)
    yield from _ended(seen, pod)
    yield from _driver(seen, pod)


def _unscheduled(seen: Seen, pod: Manifest) -> Iterator[Found]:
    name, spec = _name(pod), pod["spec"]
    said = next(
        (
            one.get("message", "")
            for one in pod["status"].get("conditions", ())
            if one["type"] == "PodScheduled"
        ),
        "",
    )
    gates = [one["name"] for one in spec.get("schedulingGates", ())]
    if gates:
        yield Found(
            "scheduling-gated",
            "warning",
            name,
            f"it waits for {', '.join(gates)}",
            "a queue (Kueue) has not admitted it, or who set the gate has not removed it",
            "`kubectl get workloads` shows Kueue's reason: quota, or a flavor that does not fit",
        )
        return
    best = nearest(spec, seen.nodes, seen.pods)
    if best is None:
        yield Found(
            "no-node-fits", "error", name, said or "the cluster has no node", "there is no node", "add a pool"
        )
        return
    node, problems = best
    shown = node["metadata"]["name"]
    if not problems:
        evidence = f"{said or 'no word of the scheduler'}; {shown} has room for it now"
        yield Found(
            "not-scheduled-yet",
            "warning",
            name,
            evidence,
            "room became free a moment ago, or its scheduler does not run",
            f"look again in a minute; its scheduler is {spec.get('schedulerName', 'default-scheduler')}",
        )
        return
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
    yield Found(
        "no-node-fits",
        "error",
        name,
        f"{said or 'unschedulable'} Nearest is {shown}: {'; '.join(one.text for one in problems)}{holders}",
        "no node fits all that the pod asks for",
        "ask for less, wait, or add a pool: `invoke k8s.check` says which instance types it fits",
    )


def _not_started(seen: Seen, pod: Manifest) -> Iterator[Found]:
    waiting = _waiting(pod)
    words = [waiting, *(one.get("message", "") for one in seen.events(pod) if one.get("type") == "Warning")]
    if not pod["spec"].get("nodeName") or pod["status"].get("phase") != "Pending":
        words = [waiting]
    for text in filter(None, words):
        if known := symptom_in(" ".join(text.split()), WAITING):
            symptom, line = known
            yield Found(symptom.rule, "error", _name(pod), _short(line), symptom.cause, symptom.fix)
            return


def _ended(seen: Seen, pod: Manifest) -> Iterator[Found]:
    name, status = _name(pod), pod["status"]
    if status.get("reason") == "Evicted":
        yield Found(
            "evicted",
            "error",
            name,
            _short(status.get("message", "Evicted")),
            "the node ran short of memory or disk, and the pod had more than it had asked for",
            "ask for what it needs; models and caches belong on a volume or the node's NVMe",
        )
    for one in status.get("containerStatuses", ()):
        for state, previous in ((one.get("state", {}), False), (one.get("lastState", {}), True)):
            ended = state.get("terminated")
            if not ended or ended.get("exitCode") == 0:
                continue
            if ended.get("reason") == "OOMKilled":
                yield Found(
                    "out-of-memory",
                    "error",
                    name,
                    f"container {one['name']} was OOMKilled, exit {ended.get('exitCode')}",
                    "it needed more main memory than its limit; /dev/shm of medium Memory counts too",
                    "raise limits.memory; fewer workers of the data loader; this is not the GPU's memory",
                )
                return
            log = seen.logs(pod, previous)
            if known := symptom_in(f"{ended.get('message', '')}\n{log}", CONTAINER):
                symptom, line = known
                said = f"container {one['name']} says: {_short(line)}"
                yield Found(symptom.rule, "error", name, said, symptom.cause, symptom.fix)
                return
            last = _short(next(iter(reversed(log.splitlines())), "nothing"))
            yield Found(
                "container-failed",
                "error",
                name,
                f"container {one['name']} exits {ended.get('exitCode')}; its last line: {last}",
                "nothing that is known of GPUs is in its log",
                f"`kubectl logs {'--previous ' if previous else ''}{pod['metadata']['name']}` has all of it",
            )
            return


def _driver(seen: Seen, pod: Manifest) -> Iterator[Found]:
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
        if support.way not in ("native", "minor-version"):
            yield Found(
                "driver-too-old",
                "error",
                _name(pod),
                f"{one['image']} is CUDA {wanted}; {_name(node or {})} has driver {driver}",
                support.message,
                f"an image with an older CUDA, or nodes with driver {cuda.floor(wanted)} or later",
            )


# --- what all of them use ---------------------------------------------------------------------------------


def has_gpus(node: Manifest) -> bool:
    labels = node["metadata"].get("labels", {})
    amd = "amd" in labels.get("karpenter.k8s.aws/instance-gpu-manufacturer", "")
    named = labels.get(PRESENT) == "true" or any(labels.get(one) for one in ALSO_GPU)
    return not amd and (named or bool(_count(node["status"].get("capacity", {}))))


def is_plugin(spec: Mapping[str, Any]) -> bool:
    """Whether a pod is NVIDIA's device plugin: chart, static manifest and operator take the same image."""
    return any("k8s-device-plugin" in one.get("image", "") for one in spec.get("containers", ())) and any(
        "gpu-feature-discovery" not in " ".join(one.get("command", ())) for one in spec.get("containers", ())
    )


def _chosen(seen: Seen, text: str, namespace: str) -> Manifest:
    kind, _, name = text.rpartition("/")
    if kind in ("job", "jobs", "job.batch"):
        own = [
            one
            for one in seen.pods
            if one["metadata"]["namespace"] == namespace
            and name
            in (
                one["metadata"].get("labels", {}).get(key)
                for key in ("job-name", "batch.kubernetes.io/job-name")
            )
        ]
    else:
        namespace = kind if kind not in ("", "pod", "pods") else namespace
        own = [
            one
            for one in seen.pods
            if (one["metadata"]["namespace"], one["metadata"]["name"]) == (namespace, name)
        ]
    if own:
        return max(own, key=lambda one: one["metadata"].get("creationTimestamp", ""))
    near = [_name(one) for one in seen.pods if name in one["metadata"]["name"]]
    raise UsageError(
        f"no pod {text} in namespace {namespace}",
        hint=f"did you mean {near[0].removeprefix('Pod ')}?"
        if near
        else "wanted NAME, NAMESPACE/NAME or job/NAME",
    )


def _log(cluster: Cluster, pod: Manifest, *, previous: bool) -> str:
    meta = pod["metadata"]
    try:
        lines = list(cluster.logs(meta["name"], meta["namespace"], previous=previous, tail=LINES))
    except BusyError:  # it has not started
        return ""
    except UnavailableError as error:
        return "" if previous else f"(its log can't be read: {error.message})"
    return "\n".join(lines)


def _events(cluster: Cluster, pod: Manifest) -> list[Manifest]:
    meta = pod["metadata"]
    fields = f"involvedObject.kind=Pod,involvedObject.name={meta['name']}"
    try:
        return cluster.list("Event", meta["namespace"], fields=fields)
    except GpukilnError as error:
        raise UnavailableError(error.message, hint=error.hint) from error


def _waiting(pod: Manifest) -> str:
    for one in (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ())):
        waiting = one.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


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
