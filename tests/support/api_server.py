"""A double of a Kubernetes cluster: API server, scheduler, Job controller and kubelet, on loopback.

It answers as kube-apiserver does: discovery, selectors, pages, resourceVersion, Status objects with the real
messages, strict schemas (kubernetes-validate) and what validation refuses beyond them. Pods are scheduled by
labels, taints and room, with the scheduler's words where none fits; what a container does, `behave` says.

Sources: kubernetes/kubernetes, pkg/apis/core/validation, pkg/apis/batch/validation (messages),
pkg/scheduler/framework/plugins (reasons), apimachinery/pkg/api/errors (Status), pkg/registry/core/pod and
pkg/kubelet (a log's 400: LogLocation, validateContainerLogStatus).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from tests.support.pve import certificate

TOKEN = "a-token-of-the-tests"  # noqa: S105 - of this double
GPU = "nvidia.com/gpu"
MINOR = "34"

# group/version: kind: plural, namespaced
KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "v1": {
        "ConfigMap": ("configmaps", True),
        "Event": ("events", True),
        "Namespace": ("namespaces", False),
        "Node": ("nodes", False),
        "PersistentVolumeClaim": ("persistentvolumeclaims", True),
        "Pod": ("pods", True),
        "ResourceQuota": ("resourcequotas", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
    },
    "apps/v1": {
        "DaemonSet": ("daemonsets", True),
        "Deployment": ("deployments", True),
        "ReplicaSet": ("replicasets", True),
        "StatefulSet": ("statefulsets", True),
    },
    "batch/v1": {"CronJob": ("cronjobs", True), "Job": ("jobs", True)},
    "node.k8s.io/v1": {"RuntimeClass": ("runtimeclasses", False)},
}
CUSTOM = {  # of clusters that have them: ApiServer.add_kind
    "apiextensions.k8s.io/v1": {"CustomResourceDefinition": ("customresourcedefinitions", False)},
    "karpenter.k8s.aws/v1": {"EC2NodeClass": ("ec2nodeclasses", False)},
    "karpenter.sh/v1": {"NodeClaim": ("nodeclaims", False), "NodePool": ("nodepools", False)},
    "kueue.x-k8s.io/v1beta2": {"LocalQueue": ("localqueues", True), "Workload": ("workloads", True)},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": ("jobsets", True)},
    "kubeflow.org/v1": {"PyTorchJob": ("pytorchjobs", True), "MPIJob": ("mpijobs", True)},
    "kubeflow.org/v2beta1": {"MPIJob": ("mpijobs", True)},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": ("leaderworkersets", True)},
    "ray.io/v1": {
        "RayCluster": ("rayclusters", True),
        "RayJob": ("rayjobs", True),
        "RayService": ("rayservices", True),
    },
}
VERBS = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}
# The DaemonSet controller adds these to its pods: AddOrUpdateDaemonPodTolerations of
# pkg/controller/daemon/util.
DAEMON_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists"}
    for key in (
        "not-ready",
        "unreachable",
        "unschedulable",
        "disk-pressure",
        "memory-pressure",
        "pid-pressure",
    )
]


@dataclass
class Outcome:
    """What a pod's container does.

    Args:
        waiting: Reason and message that it never starts with, such as ImagePullBackOff.
        reason: Of its end, such as OOMKilled.
        evicted: Whether the node takes the pod away (condition DisruptionTarget).
        wait: Set: it runs until then.
        message: What it wrote to /dev/termination-log.
    """

    exit_code: int = 0
    log: str = ""
    waiting: tuple[str, str] | None = None
    reason: str = ""
    evicted: bool = False
    wait: threading.Event | None = None
    message: str = ""


@dataclass
class Fault:
    """An answer that goes wrong once: `verb` and `resource` as RBAC names them.

    Args:
        status: 0: the connection is closed without an answer.
    """

    verb: str
    resource: str
    status: int
    skip: int = 0
    message: str = "as the test asked"


class StatusError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


def node(name: str, gpus: int = 1, **labels: str) -> dict[str, Any]:
    """A node as EKS and feature discovery leave one: 4 CPUs, 16 GiB, its GPUs tainted.

    Args:
        labels: More of them; `__` stands for `/`, and `_` for `-`.
    """
    room = {"cpu": "3920m", "memory": "15000Mi", "ephemeral-storage": "80Gi", "pods": "29"}
    room |= {GPU: str(gpus)} if gpus else {}
    more = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/os": "linux",
                "node.kubernetes.io/instance-type": "g4dn.xlarge" if gpus else "m5.xlarge",
                **(
                    {
                        "nvidia.com/gpu.present": "true",
                        "nvidia.com/gpu.product": "Tesla-T4",
                        "nvidia.com/gpu.count": str(gpus),
                        "nvidia.com/cuda.driver-version.full": "535.309.01",
                    }
                    if gpus
                    else {}
                ),
                **more,
            },
        },
        "spec": {"taints": [{"key": GPU, "value": "true", "effect": "NoSchedule"}] if gpus else []},
        "status": {
            "capacity": dict(room),
            "allocatable": dict(room),
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {"kubeletVersion": f"v1.{MINOR}.2", "containerRuntimeVersion": "containerd://2.1.5"},
        },
    }


@dataclass
class ApiServer:
    """A cluster that listens on loopback until it is closed.

    Args:
        behave: What a pod does, given the pod and the UUIDs of the GPUs that it was granted.
        rules: What the caller may do, as RBAC's rules with `namespaced`; None: everything.
        calls: (verb, group, resource, namespace) of each call, as RBAC sees it.
        minor: Of the version that it reports.
    """

    behave: Callable[[dict[str, Any], list[str]], Outcome] = lambda _pod, _gpus: Outcome()
    rules: list[dict[str, Any]] | None = None
    calls: list[tuple[str, str, str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    minor: str = MINOR

    def __post_init__(self) -> None:
        self.kinds = deepcopy(KINDS)
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}  # plural, namespace, name
        self.logs: dict[str, list[str]] = {}  # of a pod, by uid; of one of its containers, by uid/NAME
        self.granted: dict[str, list[str]] = {}  # GPUs, by the pod's uid
        self.gpus: dict[str, list[str]] = {}  # of a node, by its name
        self.agents_start = True  # whether the pods of DaemonSets become ready
        self.runs_daemon_sets = False  # whether there is a DaemonSet controller; else a test adds the pods
        self.changed = threading.Condition(threading.RLock())
        self.versions = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        for name in ("default", "kube-system"):
            self.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def use_tls(self, folder: Path) -> None:
        """Speak TLS, with a certificate of a CA that the kubeconfig does not name, and does not verify."""
        _, pair, _ = certificate(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = self.url.replace("http:", "https:")

    def kubeconfig(self, folder: Path, *, token: str = TOKEN, namespace: str = "") -> Path:
        """A kubeconfig with the context `double`."""
        file = folder / "kubeconfig"
        unverified = {"insecure-skip-tls-verify": True} if self.url.startswith("https:") else {}
        context = {"cluster": "double", "user": "ann"} | ({"namespace": namespace} if namespace else {})
        file.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "double",
                    "clusters": [{"name": "double", "cluster": {"server": self.url, **unverified}}],
                    "users": [{"name": "ann", "user": {"token": token}}],
                    "contexts": [{"name": "double", "context": context}],
                }
            )
        )
        return file

    def add_kind(self, api_version: str) -> None:
        """Let the cluster have the custom kinds of a group."""
        self.kinds[api_version] = CUSTOM[api_version]

    def add(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Put an object there as the cluster's own parts would, unasked and unchecked."""
        with self.changed:
            made = deepcopy(manifest)
            plural, namespaced = self.kinds[made["apiVersion"]][made["kind"]]
            meta = made["metadata"]
            if namespaced:
                meta.setdefault("namespace", "default")
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now())
            self._keep(plural, made)
            if plural == "nodes":
                count = int(made["status"]["allocatable"].get(GPU, 0))
                self.gpus[meta["name"]] = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
            if self.runs_daemon_sets and plural in ("nodes", "daemonsets"):
                self.run_daemon_sets()
            return made

    def all(self, plural: str) -> list[dict[str, Any]]:
        with self.changed:
            return [deepcopy(one) for (kind, _, _), one in sorted(self.objects.items()) if kind == plural]

    def _keep(self, plural: str, thing: dict[str, Any]) -> None:
        meta = thing["metadata"]
        meta["resourceVersion"] = str(next(self.versions))
        self.objects[plural, meta.get("namespace", ""), meta["name"]] = thing
        self.changed.notify_all()

    # --- what the API does --------------------------------------------------------------------------

    def create(self, api_version: str, kind: str, namespace: str, body: Any, *, dry: bool) -> dict[str, Any]:
        plural, namespaced = self.kinds[api_version][kind]
        made = deepcopy(body)
        meta = made.setdefault("metadata", {})
        if "name" not in meta and "generateName" in meta:
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        if namespaced:
            if meta.setdefault("namespace", namespace) != namespace:
                raise StatusError(
                    400,
                    "BadRequest",
                    "the namespace of the provided object does not match the namespace sent on the request",
                )
            if ("namespaces", "", namespace) not in self.objects:
                raise StatusError(404, "NotFound", f'namespaces "{namespace}" not found')
        validate(made, plural)
        if (plural, meta.get("namespace", ""), meta["name"]) in self.objects:
            raise StatusError(
                409, "AlreadyExists", f'{named(api_version, plural)} "{meta["name"]}" already exists'
            )
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=now(), resourceVersion="0")
        if dry:
            return made
        self._keep(plural, made)
        if plural == "jobs":
            made["status"] = {}
            self._run_job(made)
        elif plural == "pods":
            self._start_pod(made)
        return deepcopy(self.objects[plural, meta.get("namespace", ""), meta["name"]])

    def remove(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        gone = self.objects.pop((plural, namespace, name))
        uid = gone["metadata"]["uid"]
        self.granted.pop(uid, None)
        for (kind, space, other), one in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ())):
                self.remove(kind, space, other)
        self.changed.notify_all()
        if plural == "nodes":  # the pod garbage collector removes the pods of a node that is gone
            for (kind, space, other), one in list(self.objects.items()):
                if kind == "pods" and one["spec"].get("nodeName") == name:
                    self.remove(kind, space, other)
        self.run_daemon_sets()
        self.schedule()
        return gone

    def patch(self, plural: str, namespace: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Apply a JSON merge patch, unless it names another resourceVersion than the object's."""
        changed = merged(self.objects[plural, namespace, name], changes)
        if (
            changed["metadata"]["resourceVersion"]
            != self.objects[plural, namespace, name]["metadata"]["resourceVersion"]
        ):
            raise StatusError(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified; please '
                "apply your changes to the latest version and try again",
            )
        self._keep(plural, changed)
        if plural == "nodes":
            self.run_daemon_sets()
            self.schedule()
        return deepcopy(changed)

    def run_daemon_sets(self) -> None:
        """One round of the DaemonSet controller: a pod of each on every node that it fits."""
        with self.changed:
            for daemon_set in self.all("daemonsets"):
                template = daemon_set["spec"]["template"]
                spec = deepcopy(template["spec"])
                spec["tolerations"] = [*spec.get("tolerations", ()), *DAEMON_TOLERATIONS]
                for node in self.all("nodes"):
                    where = node["metadata"]["name"]
                    if not self._unfit({"spec": spec}, node) and not any(
                        pod["spec"].get("nodeName") == where and owned(pod, daemon_set)
                        for pod in self.all("pods")
                    ):
                        self._daemon_pod(daemon_set, spec, where)

    def _daemon_pod(self, daemon_set: dict[str, Any], spec: dict[str, Any], where: str) -> None:
        meta = daemon_set["metadata"]
        ready = {"type": "Ready", "status": "True" if self.agents_start else "False"}
        self.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{meta['name']}-{uuid.uuid4().hex[:5]}",
                    "namespace": meta["namespace"],
                    "ownerReferences": [{"kind": "DaemonSet", "name": meta["name"], "uid": meta["uid"]}],
                },
                "spec": {**deepcopy(spec), "nodeName": where},
                "status": {"phase": "Running", "conditions": [ready]},
            }
        )

    def schedule(self) -> None:
        """Look again at the pods that wait: there may be room now."""
        with self.changed:
            for one in self.all("pods"):
                if one["status"].get("phase") == "Pending" and "nodeName" not in one["spec"]:
                    self._start_pod(
                        self.objects["pods", one["metadata"]["namespace"], one["metadata"]["name"]]
                    )

    # --- scheduler, kubelet, Job controller -----------------------------------------------------------

    def _start_pod(self, pod: dict[str, Any]) -> None:
        place, why = self._place(pod)
        pod["status"] = {"phase": "Pending", "conditions": []}
        if not place:
            pod["status"]["conditions"].append(
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            )
            self._keep("pods", pod)
            return
        pod["spec"]["nodeName"] = place
        pod["status"]["conditions"].append({"type": "PodScheduled", "status": "True"})
        wanted = int(total(pod, GPU))
        taken = {one for uuids in self.granted.values() for one in uuids}
        mine = [one for one in self.gpus[place] if one not in taken][:wanted]
        self.granted[pod["metadata"]["uid"]] = mine
        self._keep("pods", pod)
        threading.Thread(target=self._run_pod, args=(pod, mine), daemon=True).start()

    def _place(self, pod: dict[str, Any]) -> tuple[str, str]:
        """The node that takes it, or the scheduler's words why none does."""
        reasons: dict[str, int] = {}
        nodes = self.all("nodes")
        for one in nodes:
            if why := self._unfit(pod, one):
                reasons[why] = reasons.get(why, 0) + 1
            else:
                return one["metadata"]["name"], ""
        said = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
        if not nodes:
            return "", "no nodes available to schedule pods"
        return "", f"0/{len(nodes)} nodes are available: {said}."

    def _unfit(self, pod: dict[str, Any], one: dict[str, Any]) -> str:
        spec, labels = pod["spec"], one["metadata"]["labels"]
        for taint in one["spec"].get("taints", ()):
            # EKS has the admission plugin ExtendedResourceToleration
            asked = taint["key"] == GPU and taint["effect"] == "NoSchedule" and total(pod, GPU)
            if not asked and taint["effect"] != "PreferNoSchedule" and not tolerated(taint, spec):
                value = f": {taint['value']}" if taint.get("value") else ""
                return f"node(s) had untolerated taint {{{taint['key']}{value}}}"
        affinity = spec.get("affinity", {}).get("nodeAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
        wanted = all(labels.get(key) == value for key, value in spec.get("nodeSelector", {}).items())
        if not wanted or (terms and not any(matches(labels, term) for term in terms)):
            return "node(s) didn't match Pod's node affinity/selector"
        cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
        if one["spec"].get("unschedulable") and not tolerated(cordon, spec):
            return "node(s) were unschedulable"
        others = [
            other
            for other in self.all("pods")
            if other["spec"].get("nodeName") == one["metadata"]["name"]
            and other["status"]["phase"] in ("Pending", "Running")
        ]
        for resource in ("cpu", "memory", GPU):
            room = amount(one["status"]["allocatable"].get(resource, "0"))
            if total(pod, resource) and total(pod, resource) > room - sum(total(x, resource) for x in others):
                return f"Insufficient {resource}"
        return ""

    def _run_pod(self, pod: dict[str, Any], gpus: list[str]) -> None:
        uid = pod["metadata"]["uid"]
        container = pod["spec"]["containers"][0]
        does = self.behave(deepcopy(pod), gpus)
        if does.waiting:
            state = {"waiting": {"reason": does.waiting[0], "message": does.waiting[1]}}
            self._status(pod, "Pending", container, state)
            return
        self._status(pod, "Running", container, {"running": {"startedAt": now()}})
        with self.changed:
            self.logs[uid] = does.log.splitlines()
        if does.wait:
            does.wait.wait(60)
        if does.evicted:
            pod["status"]["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
            )
        code = does.exit_code
        ended = {
            "exitCode": code,
            "reason": does.reason or ("Error" if code else "Completed"),
            "finishedAt": now(),
            **({"message": does.message} if does.message else {}),
        }
        phase = "Failed" if code or does.evicted else "Succeeded"
        self._status(pod, phase, container, {"terminated": ended})
        with self.changed:
            self.granted.pop(uid, None)
            owner = next(iter(pod["metadata"].get("ownerReferences", ())), None)
            job = owner and self.objects.get(("jobs", pod["metadata"]["namespace"], owner["name"]))
            if job:
                self._run_job(job)

    def _status(
        self, pod: dict[str, Any], phase: str, container: dict[str, Any], state: dict[str, Any]
    ) -> None:
        meta = pod["metadata"]
        with self.changed:
            if ("pods", meta["namespace"], meta["name"]) not in self.objects:
                return
            pod["status"]["phase"] = phase
            pod["status"]["containerStatuses"] = [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "state": state,
                    "ready": "running" in state,
                    "restartCount": 0,
                }
            ]
            self._keep("pods", pod)

    def _run_job(self, job: dict[str, Any]) -> None:
        """One round of the Job controller: counts its pods, starts what is wanted, ends it."""
        meta, spec, status = job["metadata"], job["spec"], job["status"]
        if any(one["status"] == "True" for one in status.get("conditions", ())) or spec.get("suspend"):
            return
        status.setdefault("startTime", now())
        own = [p for p in self.all("pods") if p["metadata"].get("labels", {}).get("job-name") == meta["name"]]
        phases = [one["status"]["phase"] for one in own]
        kept = [one for one in own if not ignored(one, spec)]
        failed = sum(one["status"]["phase"] == "Failed" for one in kept)
        succeeded = phases.count("Succeeded")
        wanted = spec.get("completions", 1)
        status.update(
            active=phases.count("Pending") + phases.count("Running"), failed=failed, succeeded=succeeded
        )
        stop = stopped_by_policy(kept, spec)
        if succeeded >= wanted:
            self._end_job(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        elif stop:
            self._end_job(job, "Failed", "PodFailurePolicy", stop)
        elif failed > spec.get("backoffLimit", 6):
            self._end_job(
                job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
            )
        else:
            if not own and (limit := spec.get("activeDeadlineSeconds")):
                threading.Timer(limit, self._deadline, (job,)).start()
            indexed = spec.get("completionMode") == "Indexed"
            for _ in range(min(spec.get("parallelism", 1), wanted - succeeded) - status["active"]):
                self._pod_of(job, own, indexed=indexed)
        self._keep("jobs", job)

    def _pod_of(self, job: dict[str, Any], own: list[dict[str, Any]], *, indexed: bool) -> None:
        meta, template = job["metadata"], deepcopy(job["spec"]["template"])
        if why := self.refuse_pod(meta["namespace"], template["spec"]):
            self.add(
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": uuid.uuid4().hex, "namespace": meta["namespace"]},
                    "involvedObject": {"kind": "Job", "name": meta["name"], "uid": meta["uid"]},
                    "type": "Warning",
                    "reason": "FailedCreate",
                    "message": f'Error creating: pods "{meta["name"]}-abcde" is forbidden: {why}',
                }
            )
            return
        labels = {"job-name": meta["name"], "batch.kubernetes.io/job-name": meta["name"]}
        name = f"{meta['name']}-{uuid.uuid4().hex[:5]}"
        if indexed:
            key = "batch.kubernetes.io/job-completion-index"
            there = {p["metadata"]["labels"][key] for p in own if p["status"]["phase"] != "Failed"}
            index = next(str(i) for i in itertools.count() if str(i) not in there)
            labels[key] = index
            name = f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}"
            for container in template["spec"]["containers"]:
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": index})
        pod = self.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    **template.get("metadata", {}),
                    "name": name,
                    "namespace": meta["namespace"],
                    "labels": {**template.get("metadata", {}).get("labels", {}), **labels},
                    "ownerReferences": [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            }
        )
        own.append(pod)
        self._start_pod(pod)

    def refuse_pod(self, namespace: str, spec: dict[str, Any]) -> str:
        """Why admission refuses a pod; empty: it does not. A test may set another."""
        labels = self.objects["namespaces", "", namespace]["metadata"].get("labels", {})
        if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            return ""
        return f'violates PodSecurity "restricted:latest": {found}' if (found := unrestricted(spec)) else ""

    def _end_job(self, job: dict[str, Any], kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"].setdefault("conditions", []).append(condition)
        job["status"]["active"] = 0
        if kind == "Complete":
            job["status"]["completionTime"] = now()

    def _deadline(self, job: dict[str, Any]) -> None:
        meta = job["metadata"]
        with self.changed:
            there = self.objects.get(("jobs", meta["namespace"], meta["name"]))
            if there is not job or any(
                one["status"] == "True" for one in job["status"].get("conditions", ())
            ):
                return
            for pod in self.all("pods"):
                if pod["metadata"].get("labels", {}).get("job-name") == meta["name"]:
                    self.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._end_job(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
            self._keep("jobs", job)


# --- what validation refuses beyond schemas ---------------------------------------------------------------


def validate(made: dict[str, Any], plural: str) -> None:
    kind, meta = made.get("kind", ""), made["metadata"]
    name = meta.get("name", "")

    def refuse(where: str, why: str) -> None:
        group = made["apiVersion"].rpartition("/")[0]
        full = f"{kind}.{group}" if group else kind
        raise StatusError(422, "Invalid", f'{full} "{name}" is invalid: {where}: {why}')

    if not name:
        refuse("metadata.name", "Required value: name or generateName is required")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or len(name) > 253:
        refuse(
            "metadata.name",
            f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric'
            " characters, '-' or '.', and must start and end with an alphanumeric character",
        )
    if made["apiVersion"] in KINDS:
        try:
            kubernetes_validate.validate(made, f"1.{MINOR}", strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            raise StatusError(
                400,
                "BadRequest",
                f'{kind} in version "{made["apiVersion"].rpartition("/")[2]}"'
                f" cannot be handled as a {kind}: {where}: {error.message}",
            ) from error
    spec, where = made.get("spec", {}), "spec"
    if plural == "jobs":
        spec, where = spec["template"]["spec"], "spec.template.spec"
        if spec.get("restartPolicy") not in ("OnFailure", "Never"):
            given = spec.get("restartPolicy")
            refuse(
                f"{where}.restartPolicy",
                'Required value: valid values: "OnFailure", "Never"'
                if not given
                else f'Unsupported value: "{given}": supported values: "OnFailure", "Never"',
            )
    if plural in ("jobs", "pods"):
        validate_pod(spec, where, refuse)


def validate_pod(spec: dict[str, Any], where: str, refuse: Callable[[str, str], None]) -> None:
    policy = spec.get("restartPolicy", "Always")
    if policy not in ("Always", "OnFailure", "Never"):
        supported = 'supported values: "Always", "OnFailure", "Never"'
        refuse(f"{where}.restartPolicy", f'Unsupported value: "{policy}": {supported}')
    volumes = {one["name"] for one in spec.get("volumes", ())}
    for index, one in enumerate(spec["containers"]):
        at = f"{where}.containers[{index}]"
        requests, limits = (one.get("resources", {}).get(key, {}) for key in ("requests", "limits"))
        for name, value in {**requests, **limits}.items():
            if "/" in name and amount(value) % 1:
                refuse(f"{at}.resources.limits[{name}]", f'Invalid value: "{value}": must be an integer')
        for name, value in requests.items():
            if "/" in name and name not in limits:
                refuse(
                    f"{at}.resources.limits",
                    "Required value: Limit must be set for non overcommitable resources",
                )
            if "/" in name and amount(limits[name]) != amount(value):
                refuse(
                    f"{at}.resources.requests",
                    f'Invalid value: "{value}": must be equal to {name} limit of {limits[name]}',
                )
            if name in limits and amount(value) > amount(limits[name]):
                refuse(
                    f"{at}.resources.requests",
                    f'Invalid value: "{value}": must be less than or equal to {name} limit of {limits[name]}',
                )
        for number, mount in enumerate(one.get("volumeMounts", ())):
            if mount["name"] not in volumes:
                refuse(f"{at}.volumeMounts[{number}].name", f'Not found: "{mount["name"]}"')


# --- quantities, labels, taints ---------------------------------------------------------------------------

UNITS = {"m": "0.001", "": "1", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"} | {
    f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTPE", 1)
}


def unrestricted(spec: dict[str, Any]) -> str:
    """What Pod Security restricted does not admit (k8s.io/pod-security-admission/policy)."""
    pod, found = spec.get("securityContext", {}), []
    for one in spec["containers"]:
        own = one.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation != false")
        if "ALL" not in own.get("capabilities", {}).get("drop", ()):
            found.append("unrestricted capabilities")
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            found.append("runAsNonRoot != true")
        if own.get("runAsUser", pod.get("runAsUser")) == 0:
            found.append("runAsUser=0")
        if {**pod, **own}.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccompProfile")
    if any("hostPath" in one for one in spec.get("volumes", ())):
        found.append("restricted volume types")
    return ", ".join(found)


def amount(text: str) -> Decimal:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text)).groups()
    return Decimal(number) * Decimal(UNITS[unit])


def total(pod: dict[str, Any], resource: str) -> Decimal:
    """What the containers of a pod ask of a resource."""
    asked = [one.get("resources", {}) for one in pod["spec"]["containers"]]
    return sum(
        (
            amount(one.get("requests", {}).get(resource, one.get("limits", {}).get(resource, "0")))
            for one in asked
        ),
        Decimal(0),
    )


def tolerated(taint: dict[str, str], spec: dict[str, Any]) -> bool:
    return any(
        one.get("key") in (None, taint["key"])
        and one.get("effect") in (None, taint["effect"])
        and (one.get("operator") == "Exists" or one.get("value") == taint.get("value"))
        for one in spec.get("tolerations", ())
    )


def matches(labels: dict[str, str], term: dict[str, Any]) -> bool:
    def one(rule: dict[str, Any]) -> bool:
        value, values = labels.get(rule["key"]), rule.get("values", [])
        return {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[rule["operator"]]

    return all(one(rule) for rule in term.get("matchExpressions", ()))


def ignored(pod: dict[str, Any], spec: dict[str, Any]) -> bool:
    """Whether the Job's podFailurePolicy does not count a failure."""
    types = {one["type"] for one in pod["status"].get("conditions", ()) if one["status"] == "True"}
    return any(
        rule["action"] == "Ignore" and types & {one["type"] for one in rule.get("onPodConditions", ())}
        for rule in spec.get("podFailurePolicy", {}).get("rules", ())
    )


def stopped_by_policy(pods: list[dict[str, Any]], spec: dict[str, Any]) -> str:
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        wanted = rule.get("onExitCodes", {}).get("values", ())
        for pod in pods:
            for one in pod["status"].get("containerStatuses", ()):
                code = one["state"].get("terminated", {}).get("exitCode")
                if rule["action"] == "FailJob" and code in wanted:
                    name = pod["metadata"]["name"]
                    return f"Container {one['name']} for pod {name} failed with exit code {code}"
    return ""


def selected(one: dict[str, Any], labels: str, fields: str) -> bool:
    own = one["metadata"].get("labels", {})
    for part in filter(None, labels.split(",")):
        key, operator, value = re.fullmatch(r"([^=!]+)(?:(==|=|!=)(.*))?", part).groups()
        if operator is None and key not in own:
            return False
        if operator in ("=", "==") and own.get(key) != value:
            return False
        if operator == "!=" and own.get(key) == value:
            return False
    for part in filter(None, fields.split(",")):
        key, negated, value = re.fullmatch(r"([^=!]+)(!?)=+(.*)", part).groups()
        found: Any = one
        for name in key.split("."):
            found = found.get(name, {}) if isinstance(found, dict) else {}
        if (found == value) is bool(negated):
            return False
    return True


def owned(pod: dict[str, Any], owner: dict[str, Any]) -> bool:
    uids = [one["uid"] for one in pod["metadata"].get("ownerReferences", ())]
    return owner["metadata"]["uid"] in uids


def merged(target: Any, changes: Any) -> Any:
    """RFC 7396, section 2."""
    if not isinstance(changes, dict):
        return deepcopy(changes)
    result = deepcopy(target) if isinstance(target, dict) else {}
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def named(api_version: str, plural: str) -> str:
    group = api_version.rpartition("/")[0]
    return f"{plural}.{group}" if group else plural


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, cluster: ApiServer, *args: Any) -> None:
        self.cluster = cluster
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815 - http.server's names

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise StatusError(401, "Unauthorized", "Unauthorized")
            parts = url.path.strip("/").split("/")
            if parts == ["version"]:
                minor = self.cluster.minor
                return self._send(200, {"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.2"})
            length = 2 if parts[0] == "api" else 3
            api_version = "/".join(parts[1:length])
            if api_version not in self.cluster.kinds:
                return self._page_not_found()
            if len(parts) == length:
                return self._discover(api_version)
            return self._resource(api_version, parts[length:], query, body)
        except StatusError as error:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            self._send(
                error.code, {**status, "message": error.message, "reason": error.reason, "code": error.code}
            )
        except ConnectionError:
            self.close_connection = True

    def _page_not_found(self) -> None:
        """What kube-apiserver answers below a group that it does not serve (Go's http.NotFound)."""
        self.send_response(404)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", "19")
        self.end_headers()
        self.wfile.write(b"404 page not found\n")

    def _discover(self, api_version: str) -> None:
        kinds = self.cluster.kinds[api_version]
        found = [{"name": p, "kind": k, "namespaced": n, "verbs": ["get"]} for k, (p, n) in kinds.items()]
        if api_version == "v1":
            found.append({"name": "pods/log", "kind": "Pod", "namespaced": True, "verbs": ["get"]})
        self._send(200, {"kind": "APIResourceList", "groupVersion": api_version, "resources": found})

    def _resource(self, api_version: str, parts: list[str], query: dict[str, str], body: Any) -> None:
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 1:  # one of them is in itself (apiserver, RequestInfo)
            namespace, parts = parts[1], parts[2:] or parts
        plural, name, sub = [*parts, "", ""][:3]
        by_plural = {p: (k, n) for k, (p, n) in self.cluster.kinds[api_version].items()}
        if plural not in by_plural:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        verb = VERBS.get(self.command, "get" if name else "list")
        resource = f"{plural}/{sub}" if sub else plural
        self._allow(verb, api_version, resource, namespace, name)
        cluster = self.cluster
        if plural == "namespaces":
            namespace = ""
        with cluster.changed:
            if verb == "create" and not name:
                kind = by_plural[plural][0]
                made = cluster.create(api_version, kind, namespace, body, dry=query.get("dryRun") == "All")
                return self._send(201, made)
            if verb == "list":
                return self._list(api_version, plural, namespace, query, by_plural[plural][0])
            if (plural, namespace, name) not in cluster.objects:
                raise StatusError(404, "NotFound", f'{named(api_version, plural)} "{name}" not found')
            if verb == "delete" or sub == "eviction":
                return self._send(201 if sub else 200, cluster.remove(plural, namespace, name))
            if verb == "patch":
                if self.headers.get("Content-Type") != "application/merge-patch+json":
                    raise StatusError(
                        415, "UnsupportedMediaType", "the body of the request was in an unknown format"
                    )
                return self._send(200, cluster.patch(plural, namespace, name, body))
            found = deepcopy(cluster.objects[plural, namespace, name])
        if sub == "log":
            return self._log(found, query)
        return self._send(200, found)

    def _allow(self, verb: str, api_version: str, resource: str, namespace: str, name: str) -> None:
        group = api_version.rpartition("/")[0]
        cluster = self.cluster
        with cluster.changed:
            cluster.calls.append((verb, group, resource, namespace))
            for fault in cluster.faults:
                if (fault.verb, fault.resource) == (verb, resource):
                    fault.skip -= 1
                    if fault.skip < 0:
                        cluster.faults.remove(fault)
                        if not fault.status:
                            raise ConnectionError
                        raise StatusError(fault.status, "InternalError", fault.message)
        if cluster.rules is not None and not any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("namespace") or rule["namespace"] == namespace)
            for rule in cluster.rules
        ):
            scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            what = f"{named(api_version, resource.partition('/')[0])}" + (f' "{name}"' if name else "")
            raise StatusError(
                403,
                "Forbidden",
                f'{what} is forbidden: User "ann" cannot {verb} resource '
                f'"{resource}" in API group "{group}" {scope}',
            )

    def _list(self, api_version: str, plural: str, namespace: str, query: dict[str, str], kind: str) -> None:
        found = [
            one
            for one in self.cluster.all(plural)
            if not namespace or one["metadata"].get("namespace") == namespace
            if selected(one, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        ]
        begin, size = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(found)
        rest = len(found) - begin - size
        meta = {"resourceVersion": str(next(self.cluster.versions))}
        meta |= {"continue": str(begin + size)} if rest > 0 else {}
        items = [{k: v for k, v in one.items() if k not in ("apiVersion", "kind")} for one in found]
        self._send(
            200,
            {
                "kind": f"{kind}List",
                "apiVersion": api_version,
                "metadata": meta,
                "items": items[begin : begin + size],
            },
        )

    def _log(self, pod: dict[str, Any], query: dict[str, str]) -> None:
        spec, name = pod["spec"], pod["metadata"]["name"]
        first, all_of_it = (
            [one["name"] for one in spec.get(key, ())] for key in ("initContainers", "containers")
        )
        container = query.get("container") or all_of_it[0]
        if not query.get("container") and len(all_of_it) > 1:
            said = (
                f"a container name must be specified for pod {name}, choose one of: [{' '.join(all_of_it)}]"
            )
            said += f" or one of the init containers: [{' '.join(first)}]" if first else ""
            raise StatusError(400, "BadRequest", said)
        if container not in (*first, *all_of_it):
            raise StatusError(400, "BadRequest", f"container {container} is not valid for pod {name}")
        every = (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
        status = next((one for one in every if one["name"] == container), {})
        state, before = status.get("state", {}), status.get("lastState", {})
        if query.get("previous") == "true" and "terminated" not in before:
            said = f'previous terminated container "{container}" in pod "{name}" not found'
            raise StatusError(400, "BadRequest", said)
        if not {"running", "terminated"} & set(state) and "terminated" not in before:
            why = state.get("waiting", {}).get("reason", "ContainerCreating")
            raise StatusError(
                400, "BadRequest", f'container "{container}" in pod "{name}" is waiting to start: {why}'
            )
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in self._lines(pod["metadata"], container, follow=query.get("follow") == "true"):
            data = line.encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _lines(self, meta: dict[str, Any], container: str, *, follow: bool) -> Iterator[str]:
        cluster, sent, until = self.cluster, 0, time.monotonic() + 60
        while True:
            with cluster.changed:
                whole = cluster.logs.get(meta["uid"], ())
                lines = list(cluster.logs.get(f"{meta['uid']}/{container}", whole))
                pod = cluster.objects.get(("pods", meta["namespace"], meta["name"]))
                ended = pod is None or pod["status"]["phase"] in ("Succeeded", "Failed")
                if len(lines) == sent and follow and not ended and time.monotonic() < until:
                    cluster.changed.wait(0.2)
                    continue
            yield from lines[sent:]
            sent = len(lines)
            if ended or not follow:
                return

    def _send(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data)
