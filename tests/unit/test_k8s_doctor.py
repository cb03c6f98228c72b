"""k8s.doctor: every fault it knows is found with evidence, cause and fix; a healthy cluster has none."""

import json

import pytest

from gpukiln.commands.program import Program
from gpukiln.errors import UnavailableError
from gpukiln.kubernetes import doctor, symptoms
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.doctor import cuda_of_image, diagnose
from gpukiln.kubernetes.rights import RIGHTS
from tasks import namespace
from tests.support.api_server import GPU, ApiServer, node

IMAGE = "registry.example/train:1"


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    server.add(node("gpu-1"))
    server.add(node("cpu-1", gpus=0))
    server.add(plugin())
    server.add(plugin_pod())
    yield server
    server.close()


def plugin(wanted=1, ready=1, **spec):
    template = {
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "containers": [{"name": "plugin", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"}],
        **spec,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system"},
        "spec": {"template": {"spec": template}},
        "status": {"desiredNumberScheduled": wanted, "numberReady": ready},
    }


def pod(name="train", gpus=1, place="gpu-1", state=None, **spec):
    container = {"name": "main", "image": IMAGE, **spec.pop("container", {})}
    if gpus:
        container["resources"] = {"limits": {GPU: str(gpus)}}
    phase = "Pending" if not place or (state and "waiting" in state) else "Running"
    ended = state and state.get("terminated")
    status = {"phase": "Failed" if ended else phase, "conditions": []}
    if state:
        status["containerStatuses"] = [{"name": "main", "state": state}]
    if not place:
        message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
        status["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [container], **({"nodeName": place} if place else {}), **spec},
        "status": status,
    }


def plugin_pod(**state):
    one = pod("nvidia-device-plugin-x", 0, container={"image": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"})
    one["metadata"]["namespace"] = "kube-system"
    one["status"]["containerStatuses"] = [{"name": "main", "state": state or {"running": {}}}]
    return one


def rules(*asked):
    return {one.rule: one for one in diagnose(Cluster(), *asked).found}


def log(server, name, text, namespace="default"):
    server.logs[server.objects["pods", namespace, name]["metadata"]["uid"]] = text.splitlines()


def test_nothing_is_wrong_with_a_healthy_cluster(server):
    server.add(pod())
    assert rules() == {}
    assert rules("train") == {}


def change(kind, name, namespace="", **values):
    def inject(server):
        found = server.objects[kind, namespace, name]
        for path, value in values.items():
            *parents, last = path.split("__")
            at = found
            for key in parents:
                at = at[key]
            at[last] = value

    return inject


def without_label(server):
    del server.objects["nodes", "", "gpu-1"]["metadata"]["labels"]["nvidia.com/gpu.present"]


def no_gpus(server):
    del server.objects["nodes", "", "gpu-1"]


def plugin_says(text):
    def inject(server):
        change("nodes", "gpu-1", status__allocatable={"cpu": "4"})(server)
        log(server, "nvidia-device-plugin-x", text, "kube-system")

    return inject


def nothing_from_the_plugin(server):
    server.objects["nodes", "", "gpu-1"]["status"] |= {"allocatable": {}, "capacity": {}}
    del server.objects["pods", "kube-system", "nvidia-device-plugin-x"]
    server.add(plugin(nodeSelector={"nvidia.com/gpu": "true"}))


def condition(kind, status, reason="R", message="m"):
    def inject(server):
        one = {"type": kind, "status": status, "reason": reason, "message": message}
        server.objects["nodes", "", "gpu-1"]["status"]["conditions"].append(one)

    return inject


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        (no_gpus, "no-gpu-node", "none of 1 nodes"),
        (
            lambda s: s.objects.pop(("daemonsets", "kube-system", "nvidia-device-plugin")),
            "no-device-plugin",
            "none of",
        ),
        (
            lambda s: s.add(plugin(0, 0, nodeSelector={"nvidia.com/gpu": "true"})),
            "device-plugin-nowhere",
            "selector nvidia.com/gpu=true: it has no such label",
        ),
        (
            lambda s: s.add(plugin(0, 0, tolerations=[])),
            "device-plugin-nowhere",
            "taint nvidia.com/gpu=true:NoSchedule is not tolerated",
        ),
        (lambda s: s.add(plugin(2, 1)), "device-plugin-not-ready", "1 of 2"),
        (without_label, "label-missing", "nvidia.com/gpu.present"),
        (change("nodes", "gpu-1", spec__taints=[]), "taint-missing", "no taint"),
        (nothing_from_the_plugin, "device-plugin-not-here", "it has no such label"),
        (plugin_says("E1 could not load NVML library: libnvidia-ml.so.1"), "device-plugin-no-driver", "NVML"),
        (
            plugin_says("dial unix /var/lib/kubelet/device-plugins/kubelet.sock: no such file"),
            "device-plugin-no-kubelet",
            "kubelet.sock",
        ),
        (plugin_says("XidCriticalError: Xid=79 on Device"), "device-plugin-xid", "Xid=79"),
        (plugin_says("starting"), "device-plugin-fails", "starting"),
        (
            lambda s: s.objects["nodes", "", "gpu-1"]["metadata"]["labels"].update(
                {"nvidia.com/gpu.count": "4"}
            ),
            "gpu-unhealthy",
            "offers 1 GPUs and has 4",
        ),
        (condition("Ready", "Unknown", "NodeStatusUnknown"), "node-condition", "Ready is Unknown"),
        (condition("AcceleratedHardwareReady", "False", "NvidiaXID79Error"), "node-condition", "XID79"),
        (condition("GPUProblem", "True", "Xid", "Xid 48"), "node-condition", "GPUProblem is True"),
        (condition("SysLogsXIDError", "True", "XID 79"), "node-condition", "SysLogsXIDError"),
        (condition("MemoryPressure", "True"), "node-condition", "MemoryPressure"),
    ],
)
def test_a_fault_of_the_cluster_is_found(server, fault, rule, words):
    fault(server)
    found = rules()
    assert rule in found
    assert words in found[rule].evidence
    assert found[rule].cause
    assert found[rule].fix


@pytest.mark.parametrize(
    "fault",
    [
        condition("Ready", "True"),
        condition("AcceleratedHardwareReady", "True"),
        condition("GPUProblem", "False"),
        condition("MemoryPressure", "False"),
        condition("EtcdIsVoter", "True"),
    ],
)
def test_a_good_condition_is_not(server, fault):
    fault(server)
    assert rules() == {}


def test_an_xid_is_explained(server):
    condition("AcceleratedHardwareReady", "False", "NvidiaXID79Error")(server)
    assert "FALLEN_OFF_THE_BUS" in rules()["node-condition"].cause


def ended(text="", code=1, reason="Error"):
    def inject(server):
        server.add(pod(state={"terminated": {"exitCode": code, "reason": reason}}))
        log(server, "train", text)

    return inject


def waiting(reason, message):
    return lambda server: server.add(pod(state={"waiting": {"reason": reason, "message": message}}))


def event(message):
    def inject(server):
        server.add(pod(state={"waiting": {"reason": "ContainerCreating"}}))
        server.add(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": "e"},
                "type": "Warning",
                "involvedObject": {"kind": "Pod", "name": "train"},
                "message": message,
            }
        )

    return inject


def on_an_old_driver(server):
    server.add(pod(container={"image": "pytorch/pytorch:2.9.0-cuda13.0-cudnn9-runtime"}))


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        (lambda s: s.add(pod(gpus=0)), "asks-for-no-gpu", "no container"),
        (
            lambda s: s.add(pod(container={"env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0,1"}]})),
            "visible-devices",
            "CUDA_VISIBLE_DEVICES=0,1",
        ),
        (
            lambda s: s.add(pod(place="", schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])),
            "scheduling-gated",
            "kueue",
        ),
        (
            lambda s: s.add(pod(gpus=2, place="")),
            "no-node-fits",
            "Nearest is gpu-1: Insufficient nvidia.com/gpu: 2 asked, 1 left",
        ),
        (
            lambda s: s.add(pod(place="", nodeSelector={"accelerator": "nvidia-tesla-v100"})),
            "no-node-fits",
            "selector accelerator=nvidia-tesla-v100: it has no such label",
        ),
        (lambda s: s.add(pod(place="")), "not-scheduled-yet", "gpu-1 has room for it now"),
        (ended("CUDA out of memory. Tried to allocate 2.00 GiB"), "gpu-out-of-memory", "Tried to allocate"),
        (
            ended("CUDA driver version is insufficient for CUDA runtime version"),
            "driver-too-old",
            "insufficient",
        ),
        (ended("Bus error (core dumped)"), "shm-too-small", "Bus error"),
        (ended("Failed to initialize NVML: Unknown Error"), "device-lost", "Unknown Error"),
        (ended("RuntimeError: No CUDA GPUs are available"), "gpu-not-in-container", "No CUDA GPUs"),
        (ended("", 137, "OOMKilled"), "out-of-memory", "OOMKilled, exit 137"),
        (ended("Traceback\nValueError: x"), "container-failed", "ValueError: x"),
        (waiting("ImagePullBackOff", "403 Forbidden"), "image-pull-denied", "403"),
        (waiting("ErrImagePull", "manifest unknown"), "image-not-there", "manifest"),
        (waiting("ErrImagePull", "no match for platform in manifest"), "image-architecture", "platform"),
        (waiting("ErrImagePull", "toomanyrequests: limit"), "image-rate-limit", "toomanyrequests"),
        (waiting("ImagePullBackOff", "i/o timeout"), "image-pull", "timeout"),
        (waiting("CreateContainerError", "unresolvable CDI devices nvidia.com/gpu=0"), "no-cdi", "CDI"),
        (waiting("RunContainerError", "unsatisfied condition: cuda>=12.4"), "driver-too-old", "cuda>=12.4"),
        (event('no runtime for "nvidia" is configured'), "no-runtime", "nvidia"),
        (on_an_old_driver, "driver-too-old", "is CUDA 13.0; Node gpu-1 has driver 535.309.01"),
    ],
)
def test_a_fault_of_a_pod_is_found(server, fault, rule, words):
    fault(server)
    found = rules("train")
    assert rule in found, found
    assert words in found[rule].evidence
    assert found[rule].fix


def test_every_symptom_is_shown():
    tables = (*symptoms.PLUGIN, *symptoms.CONTAINER, *symptoms.WAITING)
    here = (
        test_a_fault_of_a_pod_is_found.pytestmark[0].args[1]
        + test_a_fault_of_the_cluster_is_found.pytestmark[0].args[1]
    )
    assert {one.rule for one in tables} <= {rule for _, rule, _ in here}


def test_who_has_the_gpu_is_named(server):
    server.add(pod("other"))
    server.add(pod(place=""))
    assert "its GPUs are with Pod default/other" in rules("train")["no-node-fits"].evidence


def test_a_pod_that_waits_is_found_without_its_name(server):
    server.add(pod(gpus=2, place=""))
    assert "no-node-fits" in rules()


def test_a_cuda_that_the_driver_runs_is_no_fault(server):
    server.add(pod(container={"image": "pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime"}))
    assert rules("train") == {}


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("nvidia/cuda:12.4.1-devel-ubuntu22.04", "12.4"),
        ("pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime", "12.4"),
        ("registry.example/a/torch:2.9-cu128@sha256:00", "12.8"),
        ("registry.example:5000/train", ""),
        ("registry.example/train:12.4", ""),
    ],
)
def test_the_cuda_of_an_image_is_in_its_tag(image, version):
    assert cuda_of_image(image) == version


def test_a_job_is_its_newest_pod(server):
    for name, made in (("a", "2026-11-23T10:00:00Z"), ("b", "2026-11-23T11:00:00Z")):
        one = pod(name, gpus=0 if name == "b" else 1)
        one["metadata"] |= {"labels": {"job-name": "train"}, "creationTimestamp": made}
        server.add(one)
    assert [one.about for one in diagnose(Cluster(), "job/train").found] == ["Pod default/b"]


def test_commands(server, capsys, monkeypatch, tmp_path):
    def typed(*words):
        try:
            Program(namespace).run(["invoke", *words])
        except SystemExit as error:
            return error.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    code, out, _ = typed("k8s.doctor")
    assert (code, "nothing is wrong" in out) == (0, True)
    server.add(pod(gpus=2, place=""))
    code, out, _ = typed("k8s.doctor", "train", "--json")
    said = json.loads(out)
    assert (code, said["schema"], said["found"][0]["rule"]) == (1, doctor.SCHEMA, "no-node-fits")
    code, out, _ = typed("k8s.doctor", "train")
    assert "cause  no node fits all that the pod asks for" in out
    code, _, err = typed("k8s.doctor", "trai")
    assert (code, "did you mean default/train?" in err) == (2, True)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = typed("k8s.doctor")
    assert (code, "no kubeconfig" in err) == (4, True)


def test_the_rights_are_enough_and_the_least(server):
    event("x")(server)
    plugin_says("starting")(server)
    rights = [(right, one) for right in RIGHTS["doctor"] for one in right.resources]

    def run(left_out=None):
        server.rules = [
            {"apiGroups": [right.group], "resources": [one], "verbs": right.verbs}
            for right, one in rights
            if (right, one) != left_out
        ]
        return diagnose(Cluster(), "").found, diagnose(Cluster(), "train").found

    whole = run()
    for one in rights:
        if one[1] == "pods/log":  # what can't be read is told, and the rest is looked at
            assert run(one) != whole
        else:
            with pytest.raises(UnavailableError, match=f'resource "{one[1]}"'):
                run(one)
