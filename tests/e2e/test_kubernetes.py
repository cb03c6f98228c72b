"""What is rendered for Kubernetes, against a real API server and, where there is one, a real scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from gpukiln.errors import GpukilnError, IncompatibleError, RefusedError
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.kubernetes import canary
from gpukiln.kubernetes.addons import health_agent
from gpukiln.kubernetes.canary import LABEL, CanaryOptions
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.cluster_verification import GpuTestOptions
from gpukiln.kubernetes.machines import allocatable, labels
from tests.support.control_plane import address, control_plane, credentials, has, why_none
from tests.support.harness import ROOT

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none() or "there is one")


def objects(path: Path) -> list[dict[str, Any]]:
    """The manifests of a file; values of a chart are none."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one and "apiVersion" in one]


RENDERED = (ROOT / "examples/kubernetes-addons/rendered").rglob("*.yaml")
GOLDEN = ROOT / "tests/support/golden"
ADD_ONS = sorted(path for path in RENDERED if objects(path))
POOLS = sorted((ROOT / "examples/karpenter").rglob("*.yaml"))
JOBS = sorted(GOLDEN.glob("k8s-job-*.yaml"))
# Those that the API server has without anybody's CustomResourceDefinition.
BUILT_IN = (
    "rbac.authorization.k8s.io",
    "admissionregistration.k8s.io",
    "node.k8s.io",
    "scheduling.k8s.io",
    "storage.k8s.io",
    "networking.k8s.io",
)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with control_plane(tmp_path_factory.mktemp("cluster")) as written:
        yield written


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path) -> Cluster:
    there = Cluster(kubeconfig=str(kubeconfig))
    every = [one for path in (*ADD_ONS, *POOLS, *JOBS) for one in objects(path)]
    for definition in definitions(every):
        there.create(definition)
    for name in sorted({one["metadata"].get("namespace", "default") for one in every}):
        ensure(there, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    until(lambda: all_known(Cluster(kubeconfig=str(kubeconfig)), every))
    return Cluster(kubeconfig=str(kubeconfig))


def definitions(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each custom kind, with any fields: their own schemas come with their charts."""
    found = {}
    for one in every:
        group, _, version = one["apiVersion"].rpartition("/")
        if "." in group and group not in BUILT_IN:
            plural = one["kind"].lower() + ("es" if one["kind"].endswith("s") else "s")
            found[f"{plural}.{group}"] = (group, version, one["kind"], plural, "namespace" in one["metadata"])
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            # groups of the project are protected: they need to say that nobody approved them
            "metadata": {
                "name": name,
                "annotations": {"api-approved.kubernetes.io": "unapproved, of a test"},
            },
            "spec": {
                "group": group,
                "names": {"kind": kind, "plural": plural},
                "scope": "Namespaced" if namespaced else "Cluster",
                "versions": [
                    {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": free}}
                ],
            },
        }
        for name, (group, version, kind, plural, namespaced) in sorted(found.items())
    ]


def all_known(there: Cluster, every: list[dict[str, Any]]) -> bool:
    try:
        for one in every:
            there.get(f"{one['apiVersion']}/{one['kind']}", "any", one["metadata"].get("namespace", ""))
    except GpukilnError:
        return False
    return True


def ensure(there: Cluster, one: dict[str, Any]) -> None:
    try:
        there.create(one)
    except RefusedError:
        about = one["metadata"]
        assert there.get(f"{one['apiVersion']}/{one['kind']}", about["name"], about.get("namespace", ""))


def until(true: Any) -> Any:
    end = time.monotonic() + WAIT_S
    while not (answer := true()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.5)
    return answer


@pytest.mark.parametrize("path", [*ADD_ONS, *POOLS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_server_takes_what_is_rendered(cluster: Cluster, path: Path) -> None:
    for one in objects(path):
        ensure(cluster, one)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_server_takes_jobs(cluster: Cluster, path: Path) -> None:
    for one in objects(path):
        cluster.create(one, dry_run=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"restartPolicy": "Always"}, "restartPolicy"),
        (
            {
                "containers": [
                    {"name": "a", "image": "a:1", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
                ]
            },
            "Limit must be set for non overcommitable resources",
        ),
    ],
    ids=["restart", "gpu in requests alone"],
)
def test_the_server_refuses_what_the_check_finds(cluster: Cluster, change: Any, told: str) -> None:
    job = next(one for one in objects(GOLDEN / "k8s-job-simple.yaml") if one["kind"] == "Job")
    job["spec"]["template"]["spec"].update(change)
    with pytest.raises(IncompatibleError, match=told):
        cluster.create(job, dry_run=True)


@pytest.mark.skipif(not has("kube-scheduler"), reason="KUBEBUILDER_ASSETS has no kube-scheduler")
def test_pods_land_on_nodes_with_gpus(cluster: Cluster) -> None:
    for name in ("g4dn.xlarge", "p4d.24xlarge"):
        cluster.create(node(name))
    job = next(one for one in objects(GOLDEN / "k8s-job-simple.yaml") if one["kind"] == "Job")
    small = job["spec"]["template"]["spec"]
    large = deepcopy(small)
    large["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "9"
    cluster.create(pod("small", small))
    cluster.create(pod("large", large))

    def bound() -> Any:
        return (cluster.get("Pod", "small") or {}).get("spec", {}).get("nodeName")

    assert until(bound) == "g4dn.xlarge"

    def refused() -> Any:
        conditions = (cluster.get("Pod", "large") or {}).get("status", {}).get("conditions", ())
        return [one["message"] for one in conditions if one.get("reason") == "Unschedulable"]

    assert "Insufficient nvidia.com/gpu" in until(refused)[0]


@pytest.mark.skipif(not has("kube-scheduler"), reason="KUBEBUILDER_ASSETS has no kube-scheduler")
def test_no_other_pod_lands_on_a_canary(cluster: Cluster) -> None:
    """The server takes the one change, the scheduler keeps a pod of the users away before and after it."""
    name, mark = "canary", "0123abcd"
    joined = node("g4dn.xlarge")
    joined["metadata"] |= {"name": name, "labels": {**joined["metadata"]["labels"], LABEL: mark}}
    joined["spec"]["taints"].append({"key": LABEL, "value": mark, "effect": "NoSchedule"})
    registered = cluster.create(joined)
    machine = LaunchedMachine("i-0123456789abcdef0", "g4dn.xlarge", "us-west-2a", spot=False)
    lines: list[str] = []
    options = CanaryOptions(GpuTestOptions("a:1"))
    # what is tested asks no cloud
    steps = canary._Canary(cluster, None, machine, mark, options, lines.append)
    job = next(one for one in objects(GOLDEN / "k8s-job-simple.yaml") if one["kind"] == "Job")
    users = job["spec"]["template"]["spec"] | {"nodeSelector": {LABEL: mark}}
    tested = deepcopy(users)
    tested["tolerations"] += [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]

    def why(of: str) -> Any:
        conditions = (cluster.get("Pod", of) or {}).get("status", {}).get("conditions", ())
        return [one["message"] for one in conditions if one.get("reason") == "Unschedulable"]

    cluster.create(pod("before", users))
    assert "untolerated taint" in until(lambda: why("before"))[0]
    assert steps._isolate(registered)
    changed = cluster.get("Node", name)
    assert changed
    assert changed["spec"]["unschedulable"]
    assert LABEL not in [taint["key"] for taint in changed["spec"]["taints"]]
    assert not steps._isolate(registered), "it has changed since: 409"
    cluster.create(pod("after", users))
    assert "unschedulable" in until(lambda: why("after"))[0]
    cluster.create(pod("test-pod", tested))
    assert until(lambda: (cluster.get("Pod", "test-pod") or {}).get("spec", {}).get("nodeName")) == name
    canary._remove_node(cluster, mark, lines.append)
    assert cluster.get("Node", name) is None
    assert lines == [f"{machine.instance_id} is the Node {name}, cordoned"]
    evicted = cluster.get("Pod", "test-pod")
    assert evicted is None or "deletionTimestamp" in evicted["metadata"]


HEALTH = ROOT / "examples/kubernetes-addons/rendered/health/gpu-health.yaml"
POLICY = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
PROBLEM = {"type": health_agent.CONDITION, "status": "True", "reason": "GPUsAreSick"}
SICK = {"key": health_agent.TAINT, "value": "true", "effect": "NoSchedule"}
OURS = "g4dn.2xlarge"


@pytest.fixture(scope="module")
def agent(
    cluster: Cluster, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[health_agent.Api]:
    """The agent of a node's health as its pod asks the API: with a token that names the pod's node."""
    manifests = objects(HEALTH)
    for one in manifests:
        ensure(cluster, one)
    for name in (OURS, "g4dn.4xlarge"):
        cluster.create(node(name))
    [namespace] = {one["metadata"]["namespace"] for one in manifests if one["kind"] == "DaemonSet"}
    spec = {
        "containers": [{"name": "report", "image": "a:1"}],
        "nodeName": OURS,
        "serviceAccountName": "gpu-health",
    }
    running = cluster.create({**pod("report", spec), "metadata": {"name": "report", "namespace": namespace}})
    folder = credentials(
        kubeconfig, tmp_path_factory.mktemp("account"), account="gpu-health", namespace=namespace, pod=running
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODE_NAME", OURS)
        yield health_agent.Api(address(kubeconfig), folder)


def test_the_agent_of_node_health_reports_and_taints(agent: health_agent.Api) -> None:
    reporter = health_agent.NodeReporter(agent)
    for number, state in enumerate((health_agent.SICK, *[health_agent.WELL] * health_agent.HEALTHY_CHECKS)):
        reporter.report({"state": state, "message": state, "at": number}, time.time())
        written = agent.get()
        keys = [one["key"] for one in written["spec"]["taints"]]
        assert (health_agent.TAINT in keys) == (number < health_agent.HEALTHY_CHECKS)
    [condition] = [one for one in written["status"]["conditions"] if one["type"] == health_agent.CONDITION]
    assert condition["status"] == "False"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("", {"metadata": {"finalizers": ["example.com/never"]}}),
        (
            "",
            {
                "metadata": {
                    "ownerReferences": [
                        {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "1-2"}
                    ]
                }
            },
        ),
        ("", {"metadata": {"labels": {"a": "b"}}}),
        ("", {"metadata": {"annotations": {"a": "b"}}}),
        ("", {"spec": {"providerID": "aws:///us-west-2a/i-0123456789abcdef0"}}),
        ("", {"spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24"]}}),
        ("", {"spec": {"unschedulable": True}}),
        ("", {"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}}),
        ("", {"spec": {"taints": [{**SICK, "effect": "NoExecute"}]}}),
        ("/status", {"metadata": {"finalizers": ["example.com/never"]}}),
        ("/status", {"status": {"images": [{"names": ["a:1"], "sizeBytes": 1}]}}),
        ("/status", {"status": {"capacity": {"nvidia.com/gpu": "9"}}}),
        ("/status", {"status": {"addresses": [{"type": "InternalIP", "address": "203.0.113.1"}]}}),
        ("/status", {"status": {"volumesInUse": ["a"]}}),
        ("/status", {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
    ],
    ids=str,
)
def test_the_agent_of_node_health_changes_nothing_else(
    agent: health_agent.Api, part: str, change: dict[str, Any]
) -> None:
    with pytest.raises(HTTPError) as refused:
        agent.patch(part, change, "merge")
    assert "ValidatingAdmissionPolicy 'gpu-health'" in json.load(refused.value)["message"]


def test_nor_another_node(agent: health_agent.Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "node", agent.node.replace(OURS, "g4dn.4xlarge"))
    with pytest.raises(HTTPError) as refused:
        agent.patch("/status", {"status": {"conditions": [PROBLEM]}}, "strategic-merge")
    assert "no node but its own" in json.load(refused.value)["message"]


@pytest.mark.usefixtures("agent")
@pytest.mark.skipif(
    not has("kube-controller-manager"), reason="KUBEBUILDER_ASSETS has no kube-controller-manager"
)
def test_the_policy_of_node_health_has_no_error_of_types(cluster: Cluster) -> None:
    def checked() -> Any:
        status = (cluster.get(POLICY, "gpu-health") or {}).get("status", {})
        return status if "observedGeneration" in status else None

    assert "expressionWarnings" not in until(checked).get("typeChecking", {})


def pod(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def node(name: str) -> dict[str, Any]:
    """As its kubelet and feature discovery would register one of an instance type."""
    room = {key: str(value) for key, value in allocatable(name).items() if value.is_finite() and value}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": room,
            "capacity": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }
