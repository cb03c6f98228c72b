"""k8s.test on a double of a cluster: a healthy one passes, every fault is found, nothing is left."""

import contextlib
import json
import subprocess
import threading

import pytest

from gpukiln.errors import UnavailableError
from gpukiln.kubernetes import cluster_verification
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.rbac import COMMAND_RULES, roles
from tests.support.api_server import GPU, ApiServer, Fault, Outcome, node
from tests.support.exit_codes import invoke
from tests.support.host_evaluate import evaluate_check
from tests.support.verification_pods import Container

IMAGE = "registry.example/runner-gpu@sha256:" + "0" * 64


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ApiServer()
    server.runs_daemon_sets = True
    server.behave = container = Container(server)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cluster_verification, "POLL_S", 0.01)
    yield server
    container.end.set()
    server.close()


@pytest.fixture
def typed(capsys):
    def run(*words):
        code = 0
        try:
            invoke([*words])
        except SystemExit as error:
            code = error.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def judged(tmp_path):
    """Outcome and reason of a check, of what a test found."""

    def run(check, wait_s=60.0):
        facts = cluster_verification.gather_cluster_facts(
            Cluster(),
            cluster_verification.GpuTestOptions(IMAGE, wait_s=wait_s),
            tmp_path / "facts",
            say=print,
        )
        return evaluate_check(check, json.loads(facts.read_text()), profile="pod", expect_gpus=None)

    return run


def test_a_cluster_that_hands_out_its_gpus(server, typed, tmp_path):
    server.add(node("n-1"))
    server.add(node("n-2"))
    code, out, err = typed("k8s.test", "--image", IMAGE, "--json")
    assert out, err
    checks = {one["id"]: (one["outcome"], one["reason"]) for one in json.loads(out)["verdict"]["checks"]}
    assert {outcome for outcome, _ in checks.values()} <= {"passed", "not_run"}, checks
    assert code == 0
    assert checks["cluster.allocatable"] == ("passed", "2 nvidia.com/gpu on 2 nodes, 2 free")
    assert {checks[f"cluster.{one}"][0] for one in ("two-pods", "isolated", "view-is-grant")} == {"passed"}
    assert checks["compute.kernel"][0] == "passed"
    assert server.all("pods") == []
    [report] = (tmp_path / "home").rglob("report.html")
    assert "Two pods at once" in report.read_text()


def test_one_gpu_alone_says_nothing_of_two_pods(server, judged):
    server.add(node("n-1"))
    assert judged("cluster.two-pods") == ("not_run", "two free GPUs are needed, found 1")
    assert judged("cluster.view-is-grant") == ("passed", "1 requested and visible")


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (lambda s: s.add(node("n-3", **{"nvidia.com__gpu.count": "4"})), "allocatable", "n-3 offers 1 of 4"),
        (lambda s: s.behave.__setattr__("smi_exit", 9), "nvidia-smi", "nvidia-smi exits 9"),
        (
            lambda s: s.behave.__setattr__("sees", lambda _, gpus: [*gpus, "GPU-more"] if gpus else []),
            "view-is-grant",
            "a pod with 1 GPUs in its limits sees 2",
        ),
        (
            lambda s: s.behave.__setattr__("sees", lambda _, gpus: ["GPU-same"] if gpus else []),
            "view-is-grant",
            "seen GPU-same",
        ),
        (
            lambda s: s.behave.__setattr__("sees", lambda *_: s.gpus["n-1"]),
            "isolated",
            "and no GPU in its limits it sees GPU-",
        ),
        (
            lambda s: s.behave.__setattr__(
                "outcome", Outcome(waiting=("ImagePullBackOff", "pull access denied"))
            ),
            "pod-starts",
            "it never starts: ImagePullBackOff: pull access denied",
        ),
    ],
)
def test_every_fault_is_found_by_its_check(server, judged, fault, check, words):
    server.add(node("n-1"))
    server.add(node("n-2"))
    fault(server)
    outcome, reason = judged(f"cluster.{check}")
    assert (outcome, words in reason) == ("failed", True), reason
    assert server.all("pods") == []


def test_two_pods_with_the_same_gpu(server, judged):
    server.add(node("n-1", gpus=2))
    server.behave.sees = lambda _, gpus: ["GPU-same"] if gpus else []
    server.behave.named = lambda _: ""
    assert judged("cluster.two-pods") == ("failed", "both pods have GPU-same")


def agent(name, where, image, ready="True"):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"nodeName": where, "containers": [{"name": "a", "image": image}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
    }


@pytest.mark.parametrize(
    ("check", "image"),
    [
        ("device-plugin", "nvcr.io/nvidia/k8s-device-plugin:v0.17.4"),
        ("dcgm", "nvcr.io/nvidia/k8s/dcgm-exporter:4.4.1-4.6.0-ubuntu22.04"),
    ],
)
def test_the_agents_of_a_node(server, judged, check, image):
    server.add(node("n-1"))
    server.add(node("n-2"))
    assert judged(f"cluster.{check}")[0] == "not_run"  # a cluster without them
    server.add(agent("a-1", "n-1", image))
    assert judged(f"cluster.{check}") == ("failed", "n-2: no pod: none of its pods is on this node")
    server.add(agent("a-2", "n-2", image))
    assert judged(f"cluster.{check}") == ("passed", "kube-system/a-1, kube-system/a-2")
    server.add(agent("a-2", "n-2", image, "False"))
    assert judged(f"cluster.{check}") == ("failed", "n-2: kube-system/a-2: Running: it is not ready")


def test_pods_with_two_and_with_all_gpus(server, judged):
    server.add(node("n-1", gpus=4))
    assert judged("cluster.gpu-counts") == ("passed", "2 and 4 GPUs")
    server.behave.sees = lambda _, gpus: gpus[:2]
    assert judged("cluster.gpu-counts")[1].startswith("a pod with 4 GPUs in its limits sees 2")
    assert server.all("pods") == []


def test_the_label_of_another_gpu(server, judged):
    server.add(node("n-1", **{"nvidia.com__gpu.product": "NVIDIA-L4"}))
    assert judged("cluster.labels") == ("failed", "the label says NVIDIA-L4, nvidia-smi Tesla-T4")


def test_a_cordoned_node_takes_test_pods_when_asked(server, typed):
    cordoned = node("n-1")
    cordoned["spec"]["unschedulable"] = True
    server.add(cordoned)
    code, out, err = typed("k8s.test", "--image", IMAGE, "--wait-minutes", "0", "--json")
    assert (code, "1 node(s) were unschedulable" in out) == (1, True), err
    code, _, err = typed("k8s.test", "--image", IMAGE, "--cordoned")
    assert code == 0, err


def test_shared_gpus_are_no_fault(server, judged):
    server.add(node("n-1", gpus=2, **{"nvidia.com__gpu.sharing_strategy": "time-slicing"}))
    assert judged("cluster.two-pods") == ("not_run", "GPUs are shared on purpose: time-slicing")


def test_a_node_that_is_not_ready(server, judged):
    bad = node("n-1")
    bad["status"]["conditions"] += [
        {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NvidiaXID79Error", "message": "x"}
    ]
    server.add(bad)
    assert "NvidiaXID79Error" in judged("cluster.allocatable")[1]


def test_no_room_within_the_time_is_in_the_schedulers_words(server, judged):
    server.add(node("cpu-1", gpus=0))
    assert judged("cluster.allocatable", 0.1) == ("failed", "no node has nvidia.com/gpu.present=true")
    assert "didn't match Pod's node affinity/selector" in judged("cluster.pod-starts", 0.1)[1]
    assert judged("cluster.two-pods", 0.1)[0] == "not_reached"
    for check in ("compute.kernel", "hygiene.simulated"):  # nothing is known of what never started
        outcome, reason = judged(check, 0.1)
        assert (outcome, "didn't match Pod's node affinity" in reason) == ("not_reached", True), reason
    assert server.all("pods") == []


def test_a_pod_that_cannot_start_to_compute_is_not_reached(server, judged):
    server.add(node("n-1"))
    saying = server.behave

    def behave(pod, gpus):
        if "nvidia-smi" in pod["spec"]["containers"][0]["command"][-1]:
            return saying(pod, gpus)
        return Outcome(waiting=("CreateContainerError", "context deadline exceeded"))

    server.behave = behave
    assert judged("hygiene.simulated") == (
        "not_reached",
        "it never starts: CreateContainerError: context deadline exceeded",
    )


def test_isolation_needs_a_pod_that_sees_its_gpu(server, judged):
    """Where nvidia-smi is missing in both pods, that the one without a GPU lists none says nothing."""
    server.add(node("n-1"))
    server.behave.sees, server.behave.smi_exit = (lambda *_: []), 127
    outcome, reason = judged("cluster.isolated")
    assert (outcome, "exits 127" in reason) == ("not_reached", True), reason


def test_gpus_that_are_all_taken_are_for_later(server, typed):
    server.add(node("n-1"))
    server.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "train"},
            "spec": {"nodeName": "n-1", "containers": [{"name": "a", "resources": {"limits": {GPU: "1"}}}]},
            "status": {"phase": "Running"},
        }
    )
    code, _, err = typed("k8s.test", "--image", IMAGE)
    assert (code, "all 1 nvidia.com/gpu of the nodes" in err) == (75, True)


def test_a_node_that_came_while_pods_waited_counts(server, judged):
    threading.Timer(0.3, lambda: (server.add(node("late", gpus=2)), server.schedule())).start()
    assert judged("cluster.allocatable")[0] == "passed"


CALLS = [("create", "pods"), ("get", "pods"), ("get", "pods/log"), ("list", "nodes")]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_every_call_may_fail_and_nothing_is_left(server, judged, call, skip):
    server.add(node("n-1", gpus=2))
    server.faults.append(fault := Fault(*call, 500, skip))
    asked = call[1] != "nodes" or not skip  # nodes are listed once
    with pytest.raises(UnavailableError) if asked else contextlib.nullcontext():
        judged("cluster.pod-starts")
    assert (fault in server.faults) != asked
    assert server.all("pods") == []


def test_what_cannot_be_removed_is_told_and_ends_by_itself(server, judged, capsys):
    server.add(node("n-1"))
    server.faults += [Fault("delete", "pods", 500) for _ in range(9)]
    judged("cluster.pod-starts", 5.0)
    assert "could not be deleted and end at their deadline" in capsys.readouterr().out
    assert {pod["spec"]["activeDeadlineSeconds"] for pod in server.all("pods")} == {305}


def test_what_a_killed_test_left_goes_with_the_next(server, judged):
    server.add(node("n-1"))
    old = cluster_verification.pod_manifests(cluster_verification.GpuTestOptions(IMAGE), "default")[0]
    server.add({**old, "status": {"phase": "Failed"}})
    assert judged("cluster.pod-starts")[0] == "passed"
    assert server.all("pods") == []


def test_the_rights_are_enough_and_the_least(server, judged):
    server.add(node("n-1", gpus=2))
    rights = [
        (right, verb, one)
        for right in COMMAND_RULES["test"]
        for verb in right.verbs
        for one in right.resources
    ]

    def run(left_out=None):
        server.rules = [
            {
                "apiGroups": [right.group],
                "resources": [one],
                "verbs": [verb],
                "namespace": "" if right.everywhere else "default",
            }
            for right, verb, one in rights
            if (right, verb, one) != left_out
        ]
        return judged("cluster.two-pods", 2.0)

    assert run()[0] == "passed"
    for one in rights:
        if one[1] != "delete":
            with pytest.raises(UnavailableError, match=f'cannot {one[1]} resource "{one[2]}"'):
                run(one)
    run(next(one for one in rights if one[1] == "delete"))
    assert server.all("pods")


def test_the_program_in_the_pod_is_the_suites_own(server, judged):
    """Run here, where no GPU is: it gives facts, and the verdict says what is missing."""
    server.add(node("n-1"))
    saying = server.behave

    def really(pod, gpus):
        command = pod["spec"]["containers"][0]["command"]
        if "nvidia-smi" in command[-1]:
            return saying(pod, gpus)
        here = command[-1].replace("/dev/termination-log", "/dev/null")
        done = subprocess.run([*command[:-1], here], capture_output=True, text=True, check=False)
        return Outcome(done.returncode, done.stdout)

    server.behave = really
    assert judged("compute.kernel") == (
        "failed",
        "0 GPUs on the PCI bus, at least 1 expected on this machine",
    )


def test_a_program_that_breaks_is_told(server, judged):
    server.add(node("n-1"))
    saying = server.behave

    def broken(pod, gpus):
        if "nvidia-smi" in pod["spec"]["containers"][0]["command"][-1]:
            return saying(pod, gpus)
        return Outcome(127, message="python3: not found")

    server.behave = broken
    assert "exited with 127: python3: not found" in judged("compute.kernel")[1]


def test_each_account_has_bindings_of_its_own():
    """`kubectl apply` of the second account's would take the rights from the first."""
    subjects = (
        ("default", "User:ann"),
        ("default", "Group:ann"),
        ("default", "User:arn:aws:iam::111122223333:role/ann"),
        ("default", "User:arn:aws:iam::111122223333:role-ann"),
        ("ci", "ServiceAccount:ann"),
        ("default", "ServiceAccount:ann"),
    )
    found = [one for where, who in subjects for one in roles(["doctor", "test"], where, who)]
    keys = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"])
        for one in found
        if one["kind"].endswith("Binding")
    ]
    assert len(set(keys)) == len(keys) == 12
    assert ("ClusterRoleBinding", None, "gpukiln-doctor-test:ServiceAccount:ci:ann") in keys
    assert not [name for _, _, name in keys if "/" in name or "%" in name]
    assert {one["metadata"]["name"] for one in found if one["kind"] == "ClusterRole"} == {
        "gpukiln-doctor-test"
    }


def test_wrong_words(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    code, _, err = typed("k8s.test")
    assert (code, "no runner image was pushed" in err) == (2, True)
    code, _, err = typed("k8s.test", "--image", IMAGE, "--dry-run", "--node-selector", "gpu")
    assert (code, "wanted LABEL=VALUE" in err) == (2, True)
    code, _, err = typed("k8s.rbac", "--for", "tset")
    assert (code, "did you mean test?" in err) == (2, True)
    code, _, err = typed("k8s.rbac", "--to", "ann")
    assert (code, "wanted KIND:NAME" in err) == (2, True)
