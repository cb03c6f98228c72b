"""Shows on a live cluster that pods get the GPUs they ask for: what `k8s.test` does.

Three pods run at once: two with a GPU each, one with none that asks for all by its environment. A fourth
computes on its GPU with the suite's own program. What they said, and what the API says of the nodes, are the
facts that tests/host judges under the profile `pod`. Every pod ends by itself after a deadline and bears a
label by which it is removed, whatever happens to this process.
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
from gpukiln.kubernetes.machines import GPU, PRESENT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.symptoms import STUCK
from gpukiln.parsing import parse_json
from gpukiln.probe.base import ERROR, NOT_REACHED
from gpukiln.probe.gather import POD_SECTIONS
from gpukiln.probe.packing import facts_in, gather_command
from gpukiln.units import is_whole

TEST_LABEL = "gpukiln.io/test"
COUNT_LABEL, SHARING_LABEL = "nvidia.com/gpu.count", "nvidia.com/gpu.sharing-strategy"
POLL_S = 1.0
JUDGE_S = 300.0  # that the program which computes may take
SMI = "gpukiln: nvidia-smi exits "
NAMED = "gpukiln: NVIDIA_VISIBLE_DEVICES="
HOLD = f"""\
nvidia-smi -L
echo "{SMI}$?"
echo "{NAMED}${{NVIDIA_VISIBLE_DEVICES-}}"
exec sleep """
# Conditions of a node that are bad when False (kubelet; EKS node monitoring agent) and when True (kubelet).
GOOD_WHEN_TRUE = ("Ready", "AcceleratedHardwareReady")


@dataclass(frozen=True)
class GpuTestOptions:
    """What is to be tested, and with what.

    Args:
        image: With nvidia-smi's libraries injected by the runtime, bash and python3.
        selector: Label selector of the nodes; also the pods' node selector.
        resource: That the plugin advertises, for example nvidia.com/mig-1g.5gb.
        wait_s: For nodes, room and images, all together.
    """

    image: str
    namespace: str = ""
    selector: str = f"{PRESENT}=true"
    resource: str = GPU
    runtime_class: str = ""
    pull_secret: str = ""
    wait_s: float = 900.0


@dataclass
class Pod:
    """What came of a pod.

    Args:
        asked: GPUs in its limits.
        ran: Whether its command did what it had to.
        why: It did not; in the scheduler's or the kubelet's words.
        gpus: UUIDs that nvidia-smi listed.
        named: What NVIDIA_VISIBLE_DEVICES said, by commas.
    """

    name: str
    asked: int
    node: str = ""
    ran: bool = False
    why: str = ""
    said: str = ""
    smi_exit: int | None = None
    gpus: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def prove(cluster: Cluster, options: GpuTestOptions, folder: Path, *, say: Callable[[str], None]) -> Path:
    """Gather the facts of a cluster into a file of the folder.

    Raises:
        UnavailableError: The cluster can't be asked, or the namespace is not there.
        BusyError: Every GPU is somebody's.
        UsageError: The selector is none.
    """
    _check_selector(options)
    mark = secrets.token_hex(4)
    namespace = options.namespace or cluster.namespace
    _remove(cluster, namespace, "what earlier tests left", say, ended=True)
    nodes = _nodes(cluster, options)
    total = sum(node["allocatable"] for node in nodes)
    free = total - _taken(cluster, options, {node["name"] for node in nodes})
    if total and free < 1:
        raise BusyError(
            f"all {total} {options.resource} of the nodes with {options.selector} are taken by pods",
            hint="`kubectl get pods -A -o wide` shows them; --node-selector names other nodes",
        )
    two = not nodes or free > 1
    names = {"granted": 1, "without": 0, **({"other": 1} if two else {})}
    pods = {name: Pod(f"gpukiln-test-{mark}-{name}", asked) for name, asked in names.items()}
    try:
        for pod in pods.values():
            cluster.create(_holding(options, pod, mark, namespace))
        _wait(cluster, options, namespace, list(pods.values()), say)
        nodes = nodes or _nodes(cluster, options)  # a pool that was scaled to zero has some now
        if not _remove(cluster, namespace, mark, say):
            computed = _nothing("the pods before it could not be removed, and have the GPUs", NOT_REACHED)
        elif pods["granted"].ran:
            computed = _compute(cluster, options, mark, namespace, say)
        else:
            computed = _nothing(pods["granted"].why, NOT_REACHED)
    finally:
        _remove(cluster, namespace, mark, say)
    sharing = sorted({node["sharing"] for node in nodes if node["sharing"] not in ("", "none")})
    outside = {
        "context": cluster.context,
        "selector": options.selector,
        "resource": options.resource,
        "nodes": nodes,
        "free": free,
        "sharing": ", ".join(sharing),
        "pods": {
            name: asdict(pods[name]) if name in pods else None for name in ("granted", "other", "without")
        },
    }
    file = folder / "gathered.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps({"schema": 1, **computed, "cluster": outside}))
    return file


def pods_of(options: GpuTestOptions, namespace: str) -> list[Manifest]:
    """The pods that a test starts, but the one that computes: its program is long.

    Raises:
        UsageError: The selector is none.
    """
    _check_selector(options)
    pods = {"granted": 1, "other": 1, "without": 0}
    return [_holding(options, Pod(f"gpukiln-test-{name}", n), "0", namespace) for name, n in pods.items()]


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
    """A pod of the tests; it may run where Pod Security's level is `restricted`."""
    labels = [part.partition("=") for part in options.selector.split(",")]
    env = [] if gpus else [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {TEST_LABEL: mark}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(deadline_s),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
            **({"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}),
            "nodeSelector": {key: value for key, _, value in labels},
            "tolerations": [{"key": GPU, "operator": "Exists"}],
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


def _holding(options: GpuTestOptions, pod: Pod, mark: str, namespace: str) -> Manifest:
    """A pod that says what it sees and stays, so that the others can't be given the same."""
    command = f"{HOLD}{options.wait_s:.0f}"
    return pod_manifest(
        options, pod.name, mark, namespace, command, gpus=pod.asked, deadline_s=options.wait_s + JUDGE_S
    )


def _compute(
    cluster: Cluster, options: GpuTestOptions, mark: str, namespace: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """The facts that the suite's program gathers in a pod with a GPU; else the reason, in each section."""
    say("a pod computes on its GPU")
    pod = Pod(f"gpukiln-test-{mark}-compute", 1)
    between = secrets.token_hex(16)
    # What it says of itself goes where the kubelet reads it from: a log has both streams in one.
    command = f"( {gather_command('pod', between, JUDGE_S)} ) 2>/dev/termination-log"
    cluster.create(
        pod_manifest(options, pod.name, mark, namespace, command, gpus=1, deadline_s=options.wait_s + JUDGE_S)
    )
    state: dict[str, Any] = {}
    for found in _watched(cluster, namespace, [pod], options.wait_s + JUDGE_S, say):
        state = _container(found)
        if "terminated" in state:
            break
    ended = state.get("terminated", {})
    why = (
        pod.why
        or f"the program ended with {ended.get('exitCode')}: {ended.get('message', '').strip()[-500:]}"
    )
    if ended.get("exitCode") == 0:
        try:
            facts: dict[str, Any] = parse_json(
                facts_in("\n".join(cluster.logs(pod.name, namespace)), between)
            )
            return facts
        except ValueError as error:
            why = f"the pod gave no facts: {error}"
    return _nothing(why, ERROR if {"running", "terminated"} & set(state) else NOT_REACHED)


def _nothing(why: str, kind: str) -> dict[str, Any]:
    """Facts of a pod that gave none.

    Args:
        kind: ERROR: it ran, and failed; NOT_REACHED: it never started, so that nothing is known.
    """
    return {"hung": {"tools": [], "kernel": []}, **{name: {kind: why} for name in POD_SECTIONS}}


def _wait(
    cluster: Cluster, options: GpuTestOptions, namespace: str, pods: list[Pod], say: Callable[[str], None]
) -> None:
    """Until each pod has said what it sees, or can't, or the time is up."""
    by_name = {pod.name: pod for pod in pods}
    for found in _watched(cluster, namespace, pods, options.wait_s, say):
        pod = by_name[found["metadata"]["name"]]
        if pod.ran or not {"running", "terminated"} & set(_container(found)):
            continue
        pod.node = found["spec"].get("nodeName", "")
        with contextlib.suppress(BusyError):  # it has not begun to log
            _read(pod, list(cluster.logs(pod.name, namespace)))
        if not pod.ran and "terminated" in _container(found):
            pod.why = f"its container ended: {pod.said or _container(found)['terminated'].get('reason')}"


def _read(pod: Pod, lines: list[str]) -> None:
    """What a pod said: nvidia-smi's lines, how it ended, and what was named to it."""
    for line in lines:
        if line.startswith(SMI):
            pod.smi_exit = int(line.removeprefix(SMI))
        elif line.startswith(NAMED):
            pod.named, pod.ran, pod.why = line.removeprefix(NAMED).split(","), True, ""
    told = [line for line in lines if not line.startswith("gpukiln: ")]
    pod.said = " ".join(told)[-500:]
    uuids = [line.rpartition("UUID: ")[2].rstrip(")") for line in told if "(UUID: " in line]
    mig = [one for one in uuids if one.startswith("MIG-")]
    pod.gpus = mig or uuids


def _watched(
    cluster: Cluster, namespace: str, pods: list[Pod], seconds: float, say: Callable[[str], None]
) -> Iterator[Manifest]:
    """The pods as the API shows them, again and again until each has run, is stuck, or the time is up."""
    until, told = time.monotonic() + seconds, ""
    while any(not pod.ran and not pod.why.startswith("it never starts") for pod in pods):
        for pod in pods:
            found = cluster.get("Pod", pod.name, namespace)
            if found is None:
                raise UnavailableError(f"somebody removed the pod {pod.name} of this test")
            pod.why = pod.why if pod.ran else _why_not(found)
            yield found
        waiting = next((pod.why for pod in pods if pod.why), "")
        if waiting and waiting != told:
            say(told := waiting)
        if time.monotonic() > until:
            for pod in pods:
                pod.why = pod.why or ("" if pod.ran else f"nothing came of it within {seconds:.0f} s")
            return
        time.sleep(POLL_S)


def _why_not(pod: Manifest) -> str:
    """Why a pod has not started."""
    for one in pod["status"].get("conditions", ()):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return f"it is not scheduled: {one.get('message', one.get('reason', ''))}"
    waiting = _container(pod).get("waiting", {})
    if waiting.get("reason") in STUCK:
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
            f"--node-selector {options.selector!r} is none", hint="wanted LABEL=VALUE, several with commas"
        )


def _nodes(cluster: Cluster, options: GpuTestOptions) -> list[dict[str, Any]]:
    return [_node(one, options) for one in cluster.list("Node", labels=options.selector)]


def _node(node: Manifest, options: GpuTestOptions) -> dict[str, Any]:
    labels, status = node["metadata"].get("labels", {}), node["status"]
    problems = [
        f"{one['type']} is {one['status']}: {one.get('reason', '')} {one.get('message', '')}".strip()
        for one in status.get("conditions", ())
        if one["type"] in GOOD_WHEN_TRUE and one["status"] != "True"
    ]
    counted = labels.get(COUNT_LABEL, "") if options.resource == GPU else ""
    sharing = labels.get(SHARING_LABEL, "")
    return {
        "name": node["metadata"]["name"],
        "instance_type": labels.get("node.kubernetes.io/instance-type", ""),
        "capacity": int(status.get("capacity", {}).get(options.resource, 0)),
        "allocatable": int(status.get("allocatable", {}).get(options.resource, 0)),
        "labelled": int(counted) if is_whole(counted) and sharing in ("", "none") else None,
        "sharing": sharing,
        "problems": problems,
    }


def _taken(cluster: Cluster, options: GpuTestOptions, nodes: set[str]) -> int:
    """GPUs of these nodes that pods have."""
    pods = cluster.list("Pod", everywhere=True, fields="status.phase!=Succeeded,status.phase!=Failed")
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(options.resource, 0))
        for pod in pods
        if pod["spec"].get("nodeName") in nodes
        for container in pod["spec"]["containers"]
    )


def _remove(
    cluster: Cluster, namespace: str, mark: str, say: Callable[[str], None], *, ended: bool = False
) -> bool:
    """Remove pods of a test; that it fails is told, and they end by themselves.

    Args:
        mark: Of the test; with `ended`: what they are called.
    """
    labels = TEST_LABEL if ended else f"{TEST_LABEL}={mark}"
    try:
        for pod in cluster.list("Pod", namespace, labels=labels):
            if not ended or pod["status"].get("phase") in ("Succeeded", "Failed"):
                cluster.delete("Pod", pod["metadata"]["name"], namespace)
    except GpukilnError as error:
        say(f"{labels}: its pods could not be removed, and end by themselves: {error.message}")
        return False
    return True
