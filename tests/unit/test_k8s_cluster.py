"""The client: what a cluster answers, and what is told when it doesn't."""

import json
import threading
import warnings

import pytest
import yaml
from urllib3.exceptions import SecurityWarning

from gpukiln.errors import BusyError, IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.kubernetes.cluster import Cluster
from tests.support.api_server import TOKEN, ApiServer, Fault, Outcome, node


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


def pod(name="p", **spec):
    container = {"name": "main", "image": "registry.example/x:1", **spec.pop("container", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


def test_objects_are_made_found_listed_and_removed(server):
    cluster = Cluster()
    assert (cluster.context, cluster.namespace, cluster.version()) == ("double", "default", (1, 34))
    assert cluster.get("Pod", "p") is None
    assert cluster.create(pod(), dry_run=True)["metadata"]["namespace"] == "default"
    assert cluster.list("Pod") == []
    server.add(node("cpu-1", gpus=0))
    made = cluster.create(pod())
    cluster.create(pod("q"))
    assert cluster.get("Pod", "p")["metadata"]["uid"] == made["metadata"]["uid"]
    assert [one["metadata"]["name"] for one in cluster.list("Pod", labels="app=q")] == ["q"]
    assert [one["metadata"]["name"] for one in cluster.list("Pod", fields="metadata.name=p")] == ["p"]
    [one] = cluster.list("Node")
    assert (one["apiVersion"], one["kind"]) == ("v1", "Node")
    assert cluster.list("karpenter.sh/v1/NodePool") == []  # it has no such kind
    assert cluster.delete("Pod", "p")
    assert not cluster.delete("Pod", "p")


def test_all_pages_are_read(server, monkeypatch):
    monkeypatch.setattr("gpukiln.kubernetes.cluster.PAGE", 2)
    for index in range(5):
        server.add(node(f"n-{index}"))
    assert len(Cluster().list("Node")) == 5


@pytest.mark.usefixtures("server")
def test_what_the_server_refuses_is_told():
    cluster = Cluster()
    wrong = pod(container={"resources": {"requests": {"nvidia.com/gpu": "1"}}})
    with pytest.raises(IncompatibleError, match="Limit must be set for non overcommitable resources"):
        cluster.create(wrong)
    with pytest.raises(IncompatibleError, match='restartPolicy: Unsupported value: "Sometimes"'):
        cluster.create(pod(restartPolicy="Sometimes"))
    with pytest.raises(IncompatibleError, match="cannot be handled as a Pod"):
        cluster.create(pod(container={"resource": {}}))
    cluster.create(pod())
    with pytest.raises(RefusedError, match='pods "p" already exists'):
        cluster.create(pod())
    with pytest.raises(UnavailableError, match='namespaces "nowhere" not found'):
        cluster.create({**pod(), "metadata": {"name": "p", "namespace": "nowhere"}})


def test_a_log_is_followed_to_its_end(server):
    end = threading.Event()
    server.behave = lambda *_: Outcome(log="one\ntwo", wait=end)
    server.add(node("n", gpus=0))
    cluster = Cluster()
    cluster.create(pod())
    while cluster.get("Pod", "p")["status"]["phase"] != "Running":
        pass
    lines = cluster.logs("p", follow=True)
    assert [next(lines), next(lines)] == ["one", "two"]
    end.set()
    assert list(lines) == []
    with pytest.raises(UnavailableError, match='pods "q" not found'):
        list(cluster.logs("q"))


def test_a_log_before_the_container_is_for_later(server):
    server.behave = lambda *_: Outcome(waiting=("ImagePullBackOff", "no such image"))
    server.add(node("n", gpus=0))
    Cluster().create(pod())
    with pytest.raises(BusyError, match="is waiting to start"):
        list(Cluster().logs("p"))


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, UnavailableError, "as the test asked"),
        (429, BusyError, "as the test asked"),
        (503, BusyError, "as the test asked"),
        (500, UnavailableError, "as the test asked"),
        (0, UnavailableError, "can't list Pod: http://127.0.0.1"),
    ],
)
def test_an_answer_that_goes_wrong(server, status, kind, words):
    server.faults.append(Fault("list", "pods", status))
    with pytest.raises(kind, match=words):
        Cluster().list("Pod")
    assert Cluster().list("Pod") == []


def test_rights_that_are_missing_name_the_command_that_prints_them(server):
    server.rules = []
    with pytest.raises(UnavailableError, match='cannot list resource "pods"') as told:
        Cluster().list("Pod", everywhere=True)
    assert "invoke k8s.rbac" in told.value.hint


def test_a_token_that_is_no_good(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, token=TOKEN[:-1])))
    with pytest.raises(UnavailableError, match="does not accept the credentials of context double") as told:
        Cluster().list("Pod")
    assert "sign in again" in told.value.hint


def test_an_unverified_server_is_warned_of_once(server, tmp_path):
    server.use_tls(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", SecurityWarning)  # as urllib3 does when it is imported
        cluster = Cluster(kubeconfig=str(server.kubeconfig(tmp_path)))
        for kind in ("Pod", "Node", "Pod"):
            cluster.list(kind)
    assert [one.category.__name__ for one in warned] == ["InsecureRequestWarning"]


def test_a_server_that_is_not_there(server):
    server.close()
    with pytest.raises(UnavailableError, match=r"of context double: .*refused"):
        Cluster().version()


def write(tmp_path, **changes):
    whole = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": changes.pop("user", {})}],
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
        **changes,
    }
    (tmp_path / "config").write_text(yaml.safe_dump(whole))
    return str(tmp_path / "config")


def test_kubeconfigs_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UnavailableError, match=r"no kubeconfig: .*\.kube/config does not exist"):
        Cluster()
    with pytest.raises(UnavailableError, match="no kubeconfig: /nowhere"):
        Cluster(kubeconfig="/nowhere")
    with pytest.raises(UsageError, match="has no context ab") as told:
        Cluster("ab", write(tmp_path))
    assert told.value.hint == "did you mean a?"
    with pytest.raises(UsageError, match="names no current context"):
        Cluster(kubeconfig=write(tmp_path, **{"current-context": ""}))
    with pytest.raises(UnavailableError, match="Invalid kube-config"):
        Cluster(kubeconfig=write(tmp_path, clusters=[]))
    (tmp_path / "config").write_text("{")
    with pytest.raises(UnavailableError, match="is no kubeconfig"):
        Cluster(kubeconfig=str(tmp_path / "config"))
    (tmp_path / "config").write_text("just words")
    with pytest.raises(UnavailableError, match="is no kubeconfig"):
        Cluster(kubeconfig=str(tmp_path / "config"))


def sign_in(command):
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(command),
            "interactiveMode": "Never",
        }
    }


def test_a_program_that_signs_in(server, tmp_path):
    with pytest.raises(UnavailableError, match="signs in with no-such-program, which is not on PATH"):
        Cluster(kubeconfig=write(tmp_path, user=sign_in("no-such-program")))
    program = tmp_path / "sign-in"
    program.write_text("#!/bin/sh\necho 'the session has expired' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(UnavailableError, match=r"can't sign in with context a: .*expired"):
        Cluster(kubeconfig=write(tmp_path, user=sign_in(program)))
    said = {**sign_in("")["exec"], "kind": "ExecCredential", "status": {"token": TOKEN}}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    clusters = [{"name": "c", "cluster": {"server": server.url}}]
    assert Cluster(kubeconfig=write(tmp_path, user=sign_in(program), clusters=clusters)).list("Pod") == []


def test_inside_a_pod_its_service_account_signs_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UnavailableError, match="this pod has no service account"):
        Cluster()
