"""Runs test pods on a live cluster and gathers their facts, for `k8s.test`.

Three pods run at once: two with a GPU each, and one without a GPU that requests all of them by its
environment. A fourth pod computes on its GPU with the suite's own program. Then one pod asks for two GPUs and
one for all GPUs of a node. Their output and the state of the nodes are the facts that tests/host checks under
the profile `pod`. Every pod has a deadline and a label by which it is removed, so none is left if this
process dies.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.errors import BusyError, GpukilnError, UnavailableError, UsageError
from gpukiln.files import write_atomic
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.doctor import is_plugin
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT, PRODUCT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.scheduling import CORDON
from gpukiln.kubernetes.symptoms import STUCK_REASONS
from gpukiln.parsing import parse_json
from gpukiln.probe.base import ERROR, NOT_REACHED
from gpukiln.probe.gather import POD_SECTIONS
from gpukiln.probe.packing import facts_in, gather_command
from gpukiln.units import is_whole

TEST_LABEL = "gpukiln.io/test"
COUNT_LABEL, SHARING_LABEL = "nvidia.com/gpu.count", "nvidia.com/gpu.sharing-strategy"
EXPORTER_IMAGE = "dcgm-exporter"  # in the image's name, of NVIDIA's chart and of the operator
POLL_S = 1.0
COMPUTE_TIMEOUT_S = 300.0  # for the program that computes on the GPU
SMI_EXIT_LINE = "gpukiln: nvidia-smi exits "
DEVICES_LINE = "gpukiln: NVIDIA_VISIBLE_DEVICES="
HOLD_COMMAND = f"""\
nvidia-smi -L
echo "{SMI_EXIT_LINE}$?"
echo "{DEVICES_LINE}${{NVIDIA_VISIBLE_DEVICES-}}"
exec sleep """
# Conditions of a node that are bad when they are not True (kubelet; EKS node monitoring agent).
GOOD_WHEN_TRUE = ("Ready", "AcceleratedHardwareReady")


@dataclass(frozen=True)
class GpuTestOptions:
    """Options of the test.

    Args:
        image: Has bash and python3; the container runtime adds nvidia-smi and its libraries.
        selector: Label selector of the nodes, and node selector of the pods.
        resource: Resource of the device plugin, for example nvidia.com/mig-1g.5gb.
        wait_s: Seconds to wait for nodes, free GPUs and images together.
        cordoned: Whether the pods may run on cordoned nodes.
    """

    image: str
    namespace: str = ""
    selector: str = f"{GPU_PRESENT}=true"
    resource: str = GPU
    runtime_class: str = ""
    pull_secret: str = ""
    wait_s: float = 900.0
    cordoned: bool = False


@dataclass
class VerificationPod:
    """Result of a test pod.

    Args:
        asked: GPUs in its limits.
        ran: Whether its command wrote all its lines.
        why: Why it did not run, in the words of the scheduler or the kubelet.
        gpus: UUIDs that nvidia-smi listed.
        products: Names of the GPUs that nvidia-smi listed.
        named: Values of NVIDIA_VISIBLE_DEVICES in the container.
    """

    name: str
    asked: int
    node: str = ""
    ran: bool = False
    why: str = ""
    said: str = ""
    smi_exit: int | None = None
    gpus: list[str] = field(default_factory=list)
    products: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def gather_cluster_facts(
    cluster: Cluster, options: GpuTestOptions, folder: Path, *, say: Callable[[str], None]
) -> Path:
    """Run the test pods and write their facts into a file of the folder.

    Raises:
        GpukilnError: The cluster can't be tested, see `run_test_pods`.
    """
    return write_facts(folder, run_test_pods(cluster, options, say=say))


def write_facts(folder: Path, facts: dict[str, Any]) -> Path:
    """Write facts where the suite reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "gathered.json"
    write_atomic(file, json.dumps(facts))
    return file


def run_test_pods(cluster: Cluster, options: GpuTestOptions, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the test pods; returns their facts.

    Raises:
        UnavailableError: The cluster does not answer, or the namespace does not exist.
        BusyError: Pods use all GPUs.
        UsageError: The selector is not valid.
    """
    _check_selector(options)
    mark = secrets.token_hex(4)
    namespace = options.namespace or cluster.namespace
    # An earlier test that was killed may have left finished pods.
    _remove(cluster, namespace, "pods of earlier tests", say, ended=True)
    nodes = selected_nodes(cluster, options)
    total = sum(node["allocatable"] for node in nodes)
    free = sum(node["free"] for node in nodes)
    if total and free < 1:
        raise BusyError(
            f"all {total} {options.resource} of the nodes with {options.selector} are in use by pods",
            hint="`kubectl get pods -A -o wide` shows the pods; --node-selector selects other nodes",
        )
    # With one free GPU, a second pod would wait for ever.
    two = not nodes or free > 1
    names = {"granted": 1, "without": 0, **({"other": 1} if two else {})}
    pods = {name: VerificationPod(f"gpukiln-test-{mark}-{name}", asked) for name, asked in names.items()}
    counted: list[VerificationPod] = []
    try:
        for pod in pods.values():
            cluster.create(_holding_pod(options, pod, mark, namespace))
        _wait(cluster, options, namespace, list(pods.values()), say)
        removed = _remove(cluster, namespace, mark, say)
        # A pool that was scaled to zero has nodes now.
        nodes = nodes or selected_nodes(cluster, options)
        if not removed:
            computed = _failed_facts(
                "earlier test pods could not be removed and still have the GPUs", NOT_REACHED
            )
        elif pods["granted"].ran:
            computed = _compute(cluster, options, mark, namespace, say)
            counted = _count_gpus(cluster, options, mark, namespace, nodes, say)
        else:
            computed = _failed_facts(pods["granted"].why, NOT_REACHED)
    finally:
        _remove(cluster, namespace, mark, say)
    outside = {
        **_outside(cluster, options, nodes),
        "free": free,
        "pods": {
            name: asdict(pods[name]) if name in pods else None for name in ("granted", "other", "without")
        },
        "counted": [asdict(pod) for pod in counted],
    }
    return {"schema": 1, **computed, "cluster": outside}


def _outside(cluster: Cluster, options: GpuTestOptions, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the API server reports, in the form of the facts."""
    return {
        "context": cluster.context,
        "kubernetes": "{}.{}".format(*cluster.version()),
        "selector": options.selector,
        "resource": options.resource,
        "nodes": nodes,
        "sharing": ", ".join(_sharing(nodes)),
        "reason": "",
        # Only a machine that nothing else uses is restarted: gpukiln.kubernetes.canary fills both in.
        "eviction": None,
        "restart": None,
    }


def unusable_facts(cluster: Cluster, options: GpuTestOptions, reason: str) -> dict[str, Any]:
    """Facts of a node that can't run pods.

    Args:
        reason: Why, for the check cluster.allocatable; what no pod could show is not reached.
    """
    outside = {
        **_outside(cluster, options, selected_nodes(cluster, options)),
        "reason": reason,
        "free": 0,
        "pods": dict.fromkeys(("granted", "other", "without")),
        "counted": [],
    }
    return {"schema": 1, **_failed_facts(reason, NOT_REACHED), "cluster": outside}


def _sharing(nodes: list[dict[str, Any]]) -> list[str]:
    return sorted({node["sharing"] for node in nodes if node["sharing"] not in ("", "none")})


def _count_gpus(
    cluster: Cluster,
    options: GpuTestOptions,
    mark: str,
    namespace: str,
    nodes: list[dict[str, Any]],
    say: Callable[[str], None],
) -> list[VerificationPod]:
    """One pod with two GPUs and one with all free GPUs of a node, one after the other.

    None with one GPU a node, and where GPUs are shared: there the plugin may refuse more than one
    (NVIDIA/k8s-device-plugin, README, failRequestsGreaterThanOne).
    """
    most = max((node["free"] for node in nodes), default=0)
    pods = []
    for count in sorted({2, most}) if most > 1 and not _sharing(nodes) else ():
        say(f"a pod asks for {count} GPUs")
        pod = VerificationPod(f"gpukiln-test-{mark}-gpus-{count}", count)
        cluster.create(_holding_pod(options, pod, mark, namespace))
        _wait(cluster, options, namespace, [pod], say)
        cluster.delete("Pod", pod.name, namespace)
        pods.append(pod)
    return pods


def pod_manifests(options: GpuTestOptions, namespace: str) -> list[Manifest]:
    """The pods of a test, except the one that computes, whose program is long.

    Raises:
        UsageError: The selector is not valid.
    """
    _check_selector(options)
    pods = {"granted": 1, "other": 1, "without": 0}
    return [
        _holding_pod(options, VerificationPod(f"gpukiln-test-{name}", n), "0", namespace)
        for name, n in pods.items()
    ]


def pod_manifest(
    options: GpuTestOptions,
    name: str,
    mark: str,
    namespace: str,
    command: str,
    *,
    gpus: int,
    deadline_s: float,
) -> Manifest:
    """A test pod; it meets the Pod Security level `restricted`."""
    labels = [part.partition("=") for part in options.selector.split(",")]
    env = [] if gpus else [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {TEST_LABEL: mark}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(deadline_s),
            # `sleep` as PID 1 ignores SIGTERM, so a longer period only delays the removal.
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
            **({"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}),
            "nodeSelector": {key: value for key, _, value in labels},
            # The test pod without a GPU gets no toleration from EKS.
            "tolerations": [
                {"key": GPU, "operator": "Exists"},
                *([{"key": CORDON, "operator": "Exists"}] if options.cordoned else []),
            ],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": options.image,
                    "command": ["bash", "-c", command],
                    **({"env": env} if env else {}),
                    "resources": {
                        "requests": {"cpu": "500m", "memory": "1Gi"},
                        "limits": {"memory": "4Gi", **({options.resource: str(gpus)} if gpus else {})},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def _holding_pod(options: GpuTestOptions, pod: VerificationPod, mark: str, namespace: str) -> Manifest:
    """A pod that prints the GPUs it sees and keeps running, so that no other pod gets the same GPUs."""
    command = f"{HOLD_COMMAND}{options.wait_s:.0f}"
    return pod_manifest(
        options,
        pod.name,
        mark,
        namespace,
        command,
        gpus=pod.asked,
        deadline_s=options.wait_s + COMPUTE_TIMEOUT_S,
    )


def _compute(
    cluster: Cluster, options: GpuTestOptions, mark: str, namespace: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """The facts that the suite's program gathers in a pod with a GPU, or the reason why there are none."""
    say("a pod computes on its GPU")
    pod = VerificationPod(f"gpukiln-test-{mark}-compute", 1)
    between = secrets.token_hex(16)
    # A log has stdout and stderr in one stream. So stderr goes to the termination message, and the log has
    # only the facts (kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure).
    command = f"( {gather_command('pod', between, COMPUTE_TIMEOUT_S)} ) 2>/dev/termination-log"
    cluster.create(
        pod_manifest(
            options, pod.name, mark, namespace, command, gpus=1, deadline_s=options.wait_s + COMPUTE_TIMEOUT_S
        )
    )
    state: dict[str, Any] = {}
    for shown in _watch(cluster, namespace, [pod], options.wait_s + COMPUTE_TIMEOUT_S, say):
        state = _container(shown)
        if "terminated" in state:
            break
    ended = state.get("terminated", {})
    why = (
        pod.why
        or f"the program exited with {ended.get('exitCode')}: {ended.get('message', '').strip()[-500:]}"
    )
    if ended.get("exitCode") == 0:
        try:
            facts: dict[str, Any] = parse_json(
                facts_in("\n".join(cluster.logs(pod.name, namespace)), between)
            )
            return facts
        except ValueError as error:
            why = f"the pod gave no facts: {error}"
    return _failed_facts(why, ERROR if {"running", "terminated"} & set(state) else NOT_REACHED)


def _failed_facts(why: str, kind: str) -> dict[str, Any]:
    """Facts of a pod without output.

    Args:
        kind: ERROR if it ran and failed, NOT_REACHED if it never started.
    """
    return {"hung": {"tools": [], "kernel": []}, **{name: {kind: why} for name in POD_SECTIONS}}


def _wait(
    cluster: Cluster,
    options: GpuTestOptions,
    namespace: str,
    pods: list[VerificationPod],
    say: Callable[[str], None],
) -> None:
    """Wait until each pod has printed the GPUs it sees, or can't start, or the time is over."""
    by_name = {pod.name: pod for pod in pods}
    for shown in _watch(cluster, namespace, pods, options.wait_s, say):
        pod = by_name[shown["metadata"]["name"]]
        if pod.ran or not {"running", "terminated"} & set(_container(shown)):
            continue
        pod.node = shown["spec"].get("nodeName", "")
        with contextlib.suppress(BusyError):  # the container has not started to log
            _parse_log(pod, list(cluster.logs(pod.name, namespace)))
        if not pod.ran and "terminated" in _container(shown):
            pod.why = f"its container exited: {pod.said or _container(shown)['terminated'].get('reason')}"


def _parse_log(pod: VerificationPod, lines: list[str]) -> None:
    """Read a test pod's log: nvidia-smi's lines, its exit code, and NVIDIA_VISIBLE_DEVICES."""
    for line in lines:
        if line.startswith(SMI_EXIT_LINE):
            pod.smi_exit = int(line.removeprefix(SMI_EXIT_LINE))
        elif line.startswith(DEVICES_LINE):
            pod.named, pod.ran, pod.why = line.removeprefix(DEVICES_LINE).split(","), True, ""
    own_lines = [line for line in lines if not line.startswith("gpukiln: ")]
    pod.said = " ".join(own_lines)[-500:]
    uuids = [line.rpartition("UUID: ")[2].rstrip(")") for line in own_lines if "(UUID: " in line]
    mig = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    pod.gpus = mig or uuids
    # "GPU 0: Tesla T4 (UUID: GPU-...)"; lines of MIG instances are indented.
    names = [line.partition(": ")[2].partition(" (UUID")[0] for line in own_lines if line.startswith("GPU ")]
    pod.products = sorted(set(names))


def _watch(
    cluster: Cluster, namespace: str, pods: list[VerificationPod], seconds: float, say: Callable[[str], None]
) -> Iterator[Manifest]:
    """Yield the pods from the API repeatedly, until each has run or can't start, or the time is over."""
    until, reported = time.monotonic() + seconds, ""
    while any(not pod.ran and not pod.why.startswith("it never starts") for pod in pods):
        for pod in pods:
            shown = cluster.get("Pod", pod.name, namespace)
            if shown is None:
                raise UnavailableError(f"the pod {pod.name} of this test was deleted")
            pod.why = pod.why if pod.ran else _why_not_started(shown)
            yield shown
        waiting = next((pod.why for pod in pods if pod.why), "")
        if waiting and waiting != reported:
            say(reported := waiting)
        if time.monotonic() > until:
            for pod in pods:
                pod.why = pod.why or ("" if pod.ran else f"it did not run within {seconds:.0f} s")
            return
        time.sleep(POLL_S)


def _why_not_started(pod: Manifest) -> str:
    """Why a pod has not started; empty if it has, or no reason is known yet."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"it is not scheduled: {condition.get('message', condition.get('reason', ''))}"
    waiting = _container(pod).get("waiting", {})
    if waiting.get("reason") in STUCK_REASONS:
        return f"it never starts: {waiting['reason']}: {waiting.get('message', '')}"
    if pod["status"].get("phase") == "Failed" and not _container(pod):
        return f"it never starts: {pod['status'].get('reason', '')}: {pod['status'].get('message', '')}"
    return ""


def _container(pod: Manifest) -> dict[str, Any]:
    statuses = pod["status"].get("containerStatuses") or [{}]
    state: dict[str, Any] = statuses[0].get("state", {})
    return state


def _check_selector(options: GpuTestOptions) -> None:
    if any("=" not in part or "!" in part for part in options.selector.split(",")):
        raise UsageError(
            f"--node-selector {options.selector!r} is not valid",
            hint="wanted LABEL=VALUE, several separated by commas",
        )


def selected_nodes(cluster: Cluster, options: GpuTestOptions) -> list[dict[str, Any]]:
    """The nodes of the selector, in the form of the facts."""
    nodes = cluster.list("Node", labels=options.selector)
    pods = cluster.list("Pod", everywhere=True, fields="status.phase!=Succeeded,status.phase!=Failed")
    return [_node(node, options, pods) for node in nodes]


def _node(node: Manifest, options: GpuTestOptions, pods: list[Manifest]) -> dict[str, Any]:
    """A node.

    Args:
        pods: All pods of the cluster that have not ended.
    """
    labels, status, name = node["metadata"].get("labels", {}), node["status"], node["metadata"]["name"]
    problems = [
        f"{condition['type']} is {condition['status']}: {condition.get('reason', '')} "
        f"{condition.get('message', '')}".strip()
        for condition in status.get("conditions", ())
        if condition["type"] in GOOD_WHEN_TRUE and condition["status"] != "True"
    ]
    counted = labels.get(COUNT_LABEL, "") if options.resource == GPU else ""
    sharing = labels.get(SHARING_LABEL, "")
    allocatable = int(status.get("allocatable", {}).get(options.resource, 0))
    here = [pod for pod in pods if pod["spec"].get("nodeName") == name]
    return {
        "name": name,
        "instance_type": labels.get("node.kubernetes.io/instance-type", ""),
        "capacity": int(status.get("capacity", {}).get(options.resource, 0)),
        "allocatable": allocatable,
        "free": allocatable - _gpus_in_use(here, options),
        "labelled": int(counted) if is_whole(counted) and sharing in ("", "none") else None,
        "product": labels.get(PRODUCT, ""),
        "sharing": sharing,
        "problems": problems,
        "plugin": _agent(here, pods, is_plugin),
        "exporter": _agent(here, pods, _is_exporter),
    }


def _agent(
    here: list[Manifest], pods: list[Manifest], matches: Callable[[Manifest], bool]
) -> dict[str, str] | None:
    """The pod of a DaemonSet on a node, and why it is not ready.

    Args:
        here: Pods of the node.
        pods: All pods of the cluster.
        matches: Whether a pod's spec is of that DaemonSet.

    Returns:
        None where the cluster has no such pod; an empty name where only other nodes have one.
    """
    if not any(matches(pod["spec"]) for pod in pods):
        return None
    pod = next((pod for pod in here if matches(pod["spec"])), None)
    if pod is None:
        return {"name": "", "problem": "none of its pods is on this node"}
    name = f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"
    return {"name": name, "problem": "" if is_ready(pod) else _why_not_ready(pod)}


def _is_exporter(spec: Manifest) -> bool:
    return any(EXPORTER_IMAGE in container.get("image", "") for container in spec.get("containers", ()))


def is_ready(manifest: Manifest) -> bool:
    """Whether the condition Ready of a pod or a node is true."""
    conditions = manifest.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _why_not_ready(pod: Manifest) -> str:
    waiting = _container(pod).get("waiting", {})
    return f"{waiting.get('reason', pod['status'].get('phase'))}: {waiting.get('message', 'it is not ready')}"


def _gpus_in_use(pods: list[Manifest], options: GpuTestOptions) -> int:
    """GPUs that pods request."""
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(options.resource, 0))
        for pod in pods
        # The test pods just removed end within a second, and a pod that needs their GPUs waits for that.
        if "deletionTimestamp" not in pod["metadata"]
        for container in pod["spec"]["containers"]
    )


def _remove(
    cluster: Cluster, namespace: str, mark: str, say: Callable[[str], None], *, ended: bool = False
) -> bool:
    """Delete pods of a test; if that fails, it is reported, and the pods end at their deadline.

    Args:
        mark: Value of the test label; unused with `ended`.
        ended: Delete the finished pods of all tests.
    """
    labels = TEST_LABEL if ended else f"{TEST_LABEL}={mark}"
    try:
        for pod in cluster.list("Pod", namespace, labels=labels):
            if not ended or pod["status"].get("phase") in ("Succeeded", "Failed"):
                cluster.delete("Pod", pod["metadata"]["name"], namespace)
    except GpukilnError as error:
        say(f"{labels}: its pods could not be deleted and end at their deadline: {error.message}")
        return False
    return True
