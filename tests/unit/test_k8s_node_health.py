"""The agent that tells a cluster the health of a node's GPUs: against an API on loopback, by real calls."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpukiln.kubernetes.addons import health_agent, node_health
from gpukiln.kubernetes.addons.health_agent import SICK, UNKNOWN, WELL, Api, NodeReporter
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import load

TOKEN = "token-of-the-pod"  # noqa: S105 - of this test
OURS = {"key": "gpukiln.io/gpu-sick", "value": "true", "effect": "NoSchedule"}
THEIRS = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
READY = {"type": "Ready", "status": "True"}


class Node(ThreadingHTTPServer):
    """One node; it merges patches as the API server does, as far as the agent sends them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.node = {
            "metadata": {"name": "node-1", "resourceVersion": "1"},
            "spec": {"taints": [THEIRS]},
            "status": {"conditions": [READY]},
        }
        self.asked = []  # (verb, resource), as RBAC names them
        self.refuse = 0
        self.between = lambda: None  # what somebody else does before a patch arrives

    @property
    def taints(self):
        return self.node["spec"].get("taints", [])

    @property
    def condition(self):
        return next((one for one in self.node["status"]["conditions"] if one["type"] == "GPUProblem"), None)

    def changed(self):
        meta = self.node["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, code, document):
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self, verb):
        resource = "nodes/status" if self.path.endswith("/status") else "nodes"
        self.server.asked.append((verb, resource))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        assert self.path.startswith("/api/v1/nodes/node-1")
        if self.server.refuse:
            self.answer(self.server.refuse, {"kind": "Status"})
        return not self.server.refuse

    def do_GET(self):
        if self.allowed("get"):
            self.answer(200, self.server.node)

    def do_PATCH(self):
        if not self.allowed("patch"):
            return
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        node = self.server.node
        if self.path.endswith("/status"):
            assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"
            [new] = patch["status"]["conditions"]
            rest = [one for one in node["status"]["conditions"] if one["type"] != new["type"]]
            node["status"]["conditions"] = [*rest, new]
        else:
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            self.server.between()
            if patch["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
                self.answer(409, {"kind": "Status", "reason": "Conflict"})
                return
            node["spec"]["taints"] = patch["spec"]["taints"]
        self.server.changed()
        self.answer(200, node)


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("NODE_NAME", "node-1")
    server = Node()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def reporter(node, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return NodeReporter(Api(f"http://127.0.0.1:{node.server_port}", tmp_path))


def found(state, at, message="as it is"):
    return {"state": state, "message": message, "at": at}


def test_sick_gpus_are_a_condition_and_a_taint(node, reporter):
    reporter.report(found(SICK, 100, "sick: gpu.ecc: GPU 2"), 100)
    assert node.condition == {
        "type": "GPUProblem",
        "status": "True",
        "reason": "GPUsAreSick",
        "message": "sick: gpu.ecc: GPU 2",
        "lastHeartbeatTime": "1970-01-01T00:01:40Z",
        "lastTransitionTime": "1970-01-01T00:01:40Z",
    }
    assert node.taints == [THEIRS, OURS]
    assert READY in node.node["status"]["conditions"]


def test_the_taint_goes_after_three_looks_at_gpus_that_are_well(node, reporter):
    reporter.report(found(SICK, 100), 100)
    for at in (160, 160, 160, 220):  # one result is read several times
        reporter.report(found(WELL, at), at)
    assert OURS in node.taints
    assert node.condition["status"] == "False"
    reporter.report(found(SICK, 280), 280)  # begins anew
    for at in (340, 400):
        reporter.report(found(WELL, at), at)
        assert OURS in node.taints
    reporter.report(found(WELL, 460), 460)
    assert node.taints == [THEIRS]


def test_while_nobody_can_tell_the_taint_stays_as_it_is(node, reporter):
    reporter.report(found(UNKNOWN, 100), 100)
    assert node.taints == [THEIRS]
    assert node.condition["status"] == "Unknown"
    reporter.report(found(SICK, 160), 160)
    for at in (220, 280, 340, 400):
        reporter.report(found(UNKNOWN, at), at)
    assert OURS in node.taints


def test_what_has_not_changed_is_not_written(node, reporter):
    for at in (100, 160, 220):
        reporter.report(found(WELL, at), at)
    assert node.asked.count(("patch", "nodes/status")) == 1
    reporter.report(found(WELL, 460), 460)  # a heartbeat
    assert node.asked.count(("patch", "nodes/status")) == 2
    assert node.condition["lastTransitionTime"] == "1970-01-01T00:01:40Z"
    assert node.condition["lastHeartbeatTime"] == "1970-01-01T00:07:40Z"
    assert ("patch", "nodes") not in node.asked


def test_a_taint_that_somebody_else_puts_meanwhile_is_not_lost(node, reporter):
    drain = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}

    def meanwhile():
        if drain not in node.taints:
            node.node["spec"]["taints"].append(drain)
            node.changed()

    node.between = meanwhile
    with pytest.raises(OSError, match="409"):
        reporter.report(found(SICK, 100), 100)
    assert OURS not in node.taints
    reporter.report(found(SICK, 100), 115)
    assert node.taints == [THEIRS, drain, OURS]


def test_an_api_that_refuses_is_asked_again(node, reporter):
    node.refuse = 403
    with pytest.raises(OSError, match="403"):
        reporter.report(found(SICK, 100), 100)
    node.refuse = 0
    reporter.report(found(SICK, 100), 115)
    assert OURS in node.taints


# ---- the check


def program(tmp_path, body):
    path = tmp_path / "gpukiln-gpu"
    path.write_text(f"#!/bin/bash\n[[ $* == 'health --json' ]] || exit 9\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def document(**node):
    return json.dumps({"nodes": [{"state": "well", "message": "1 devices are well", "gpus": [{}], **node}]})


@pytest.mark.parametrize(
    ("body", "state", "said"),
    [
        (f"echo '{document()}'", WELL, "1 devices are well"),
        (f"echo '{document(state='sick', message='GPU 2 is lost')}'; exit 1", SICK, "GPU 2 is lost"),
        (f"echo '{document(state='unknown')}'; exit 5", UNKNOWN, "well"),
        (f"echo '{document(gpus=[], message='no NVIDIA GPU')}'", SICK, "has none: no NVIDIA GPU"),
        (f"echo '{document(gpus=[], state='sick', message='no driver')}'; exit 1", SICK, "no driver"),
        ("echo broken; echo why >&2; exit 3", UNKNOWN, "exited with 3 and printed why"),
        ("exit 0", UNKNOWN, "printed nothing"),
    ],
)
def test_a_look_is_what_the_nodes_own_program_says(tmp_path, body, state, said):
    seen = health_agent.check_health(program(tmp_path, body))
    assert seen["state"] == state
    assert said in seen["message"]
    assert abs(seen["at"] - time.time()) < 60


def test_a_look_at_a_node_without_the_program_or_at_a_gpu_that_hangs(tmp_path, monkeypatch):
    assert "can't be run" in health_agent.check_health([str(tmp_path / "nothing")])["message"]
    monkeypatch.setattr(health_agent, "CHECK_TIMEOUT_S", 0.2)
    seen = health_agent.check_health(program(tmp_path, "exec sleep 5"))
    assert (seen["state"], "did not answer" in seen["message"]) == (UNKNOWN, True)


def test_the_real_program_is_understood():
    seen = health_agent.check_health([sys.executable, "-m", "gpukiln.gpus"])
    assert "exited with" not in seen["message"]


def test_a_look_that_is_too_old_says_nothing_of_now(tmp_path):
    path = tmp_path / "health.json"
    assert health_agent.read(path, 100)["state"] == UNKNOWN
    health_agent.write(path, found(WELL, 100))
    assert health_agent.read(path, 700) == found(WELL, 100)
    old = health_agent.read(path, 821)
    assert (old["state"], old["message"]) == (UNKNOWN, "the last check was 12 minutes ago")
    path.write_text("{")
    assert health_agent.read(path, 100)["state"] == UNKNOWN


def test_both_containers_together(node, tmp_path):
    """The program as the ConfigMap has it, in two processes, as the pod runs it."""
    objects = load(node_health.files(Settings())[node_health.OBJECTS])
    [data] = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    [(name, text)] = data.items()
    (tmp_path / "token").write_text(TOKEN)
    address = f"'http://127.0.0.1:{node.server_port}'"
    text = text.replace("NodeReporter(Api())", f"NodeReporter(Api({address}, Path({str(tmp_path)!r})))")
    text = text.replace(
        "CHECK_INTERVAL_S, REPORT_INTERVAL_S = 60, 15", "CHECK_INTERVAL_S, REPORT_INTERVAL_S = 0.05, 0.05"
    )
    ours = program(tmp_path, f"echo '{document(state='sick')}'")[0]
    text = text.replace('"nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--", ', "")
    text = text.replace('"/usr/local/bin/gpukiln-gpu"', f"{ours!r},")
    (tmp_path / name).write_text(text)
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / name, verb, tmp_path / "health.json"],
            env={"PATH": os.environ["PATH"], "NODE_NAME": "node-1"},
            stdout=subprocess.DEVNULL,
        )
        for verb in ("check", "report")
    ]
    try:
        end = time.monotonic() + 15
        while OURS not in node.taints and time.monotonic() < end:
            time.sleep(0.05)
        assert OURS in node.taints
        assert node.condition["status"] == "True"
    finally:
        for one in running:
            one.kill()
            one.wait()


# ---- what it may do


@pytest.fixture(scope="module")
def objects():
    return {one["kind"]: one for one in load(node_health.files(Settings())[node_health.OBJECTS])}


def test_its_role_is_what_it_asks_for_and_no_more(node, reporter, objects):
    for at, state in enumerate((SICK, WELL, WELL, WELL), start=1):
        reporter.report(found(state, at * 60), at * 60)
    assert node.taints == [THEIRS]
    allowed = {
        (verb, resource)
        for rule in objects["ClusterRole"]["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert set(node.asked) == allowed


def test_who_looks_has_no_credentials_and_who_tells_no_privilege(objects):
    spec = objects["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    check, report = spec["containers"]
    assert check["securityContext"] == {"privileged": True}
    assert "credentials" not in {one["name"] for one in check["volumeMounts"]}
    assert report["securityContext"]["allowPrivilegeEscalation"] is False
    assert report["securityContext"]["runAsNonRoot"] is True
    assert all(one["readOnly"] for one in report["volumeMounts"])
    place = {one["name"]: one["mountPath"] for one in report["volumeMounts"]}["credentials"]
    assert place == str(health_agent.CREDENTIALS)


def test_it_runs_on_gpu_nodes_whatever_their_taints(objects):
    spec = objects["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert spec["tolerations"] == [{"operator": "Exists"}]  # its own taint, too


def test_the_policy_is_for_the_agent_and_bound(objects):
    spec = objects["ValidatingAdmissionPolicy"]["spec"]
    [who] = spec["matchConditions"]
    account = objects["ServiceAccount"]["metadata"]
    assert f"system:serviceaccount:{account['namespace']}:{account['name']}" in who["expression"]
    assert spec["matchConstraints"]["resourceRules"][0]["resources"] == ["nodes", "nodes/status"]
    bound = objects["ValidatingAdmissionPolicyBinding"]["spec"]
    assert bound["policyName"] == objects["ValidatingAdmissionPolicy"]["metadata"]["name"]
    assert bound["validationActions"] == ["Deny"]


def changed(**parts):
    node = {
        "metadata": {"name": "node-1", "labels": {"a": "b"}, "resourceVersion": "1"},
        "spec": {"taints": [THEIRS]},
        "status": {"conditions": [READY], "capacity": {"nvidia.com/gpu": "1"}},
    }
    for part, fields in parts.items():
        node[part] = {**node[part], **fields}
    return node


SICK_CONDITION = {"type": "GPUProblem", "status": "True"}


@pytest.mark.parametrize(
    ("after", "allowed"),
    [
        ({"spec": {"taints": [THEIRS, OURS]}}, True),
        ({"status": {"conditions": [READY, SICK_CONDITION]}}, True),
        ({"metadata": {"resourceVersion": "2"}}, True),
        ({"spec": {"taints": [OURS]}}, False),
        ({"spec": {"taints": []}}, False),
        ({"spec": {"unschedulable": True}}, False),
        ({"status": {"conditions": [{**READY, "status": "False"}]}}, False),
        ({"status": {"conditions": [SICK_CONDITION]}}, False),
        ({"status": {"capacity": {"nvidia.com/gpu": "9"}}}, False),
        ({"status": {"allocatable": {"nvidia.com/gpu": "0"}}}, False),
        ({"status": {"addresses": [{"type": "InternalIP", "address": "203.0.113.1"}]}}, False),
        ({"metadata": {"labels": {}}}, False),
        ({"metadata": {"annotations": {"a": "b"}}}, False),
        ({"metadata": {"finalizers": ["example.com/never"]}}, False),
        ({"metadata": {"ownerReferences": [{"kind": "Node", "name": "gone", "uid": "1"}]}}, False),
        ({"metadata": {"managedFields": [{"manager": "gpu-health"}]}}, True),
        ({"spec": {"providerID": "aws:///us-west-2a/i-1"}}, False),
        ({"spec": {"podCIDR": "10.0.0.0/8"}}, False),
        ({"spec": {"taints": [THEIRS, {**OURS, "effect": "NoExecute"}]}}, False),
        ({"status": {"images": [{"names": ["a:1"]}]}}, False),
        ({"status": {"volumesInUse": ["a"]}}, False),
        ({"status": {"aFieldOfALaterRelease": "a"}}, False),
    ],
)
def test_the_policy_allows_what_the_agent_does_and_nothing_else(objects, after, allowed):
    cel = pytest.importorskip("cel", reason="CEL can't be evaluated: common-expression-language is missing")
    spec = objects["ValidatingAdmissionPolicy"]["spec"]
    node_claim = {"authentication.kubernetes.io/node-name": ["node-1"]}
    for extra, here in (
        (node_claim, True),
        ({**node_claim, next(iter(node_claim)): ["other"]}, False),
        ({}, False),
    ):
        known = {
            "request": {"userInfo": {"extra": extra}},
            "object": changed(**after),
            "oldObject": changed(),
        }
        known["variables"] = {
            one["name"]: cel.evaluate(one["expression"], known) for one in spec["variables"]
        }
        verdict = all(cel.evaluate(one["expression"], known) for one in spec["validations"])
        assert verdict == (allowed and here)


def test_another_program_is_another_pod(objects, monkeypatch, tmp_path):
    path = tmp_path / "health_agent.py"
    path.write_text("pass\n")
    monkeypatch.setattr(node_health.health_agent, "__file__", str(path))
    other = {one["kind"]: one for one in load(node_health.files(Settings())[node_health.OBJECTS])}
    before, after = (
        one["DaemonSet"]["spec"]["template"]["metadata"]["annotations"] for one in (objects, other)
    )
    assert before != after
