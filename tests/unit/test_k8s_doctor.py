"""k8s.doctor: every fault it knows is found with evidence, cause and fix; a healthy cluster has none."""

import json

import pytest

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.kubernetes import doctor, symptoms, workloads
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.doctor import diagnose
from gpukiln.kubernetes.images import cuda_of_image
from gpukiln.kubernetes.rbac import COMMAND_RULES
from tests.support.api_server import CUSTOM, GPU, ApiServer, Fault, node
from tests.support.exit_codes import invoke

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
    return {one.id: one for one in diagnose(Cluster(), *asked).findings}


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


def registered(has, offers):
    """What the kubelet counts: None before a plugin has registered, 0 after it has without a device."""
    amounts = [{"cpu": "4"} | ({} if one is None else {GPU: str(one)}) for one in (has, offers)]
    return change("nodes", "gpu-1", status__capacity=amounts[0], status__allocatable=amounts[1])


def plugin_says(text, has=None, offers=None):
    def inject(server):
        registered(has, offers)(server)
        log(server, "nvidia-device-plugin-x", text, "kube-system")

    return inject


def no_plugin(server):
    registered(None, None)(server)
    del server.objects["daemonsets", "kube-system", "nvidia-device-plugin"]
    del server.objects["pods", "kube-system", "nvidia-device-plugin-x"]


CONFIG_MANAGER = "E1 main.go:132] specified config tme-slicing does not exist"  # cmd/config-manager/main.go
# NVIDIA/k8s-device-plugin internal/rm, as one line of a log
MIG = "E1 error starting plugins: invalid MIG configuration: device 0 has an invalid MIG configuration"


def init_container_of_the_plugin_fails(server):
    """The chart's pod where a ConfigMap is used: an init container and a sidecar choose the configuration."""
    registered(None, None)(server)
    found = server.objects["pods", "kube-system", "nvidia-device-plugin-x"]
    image = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"
    found["spec"]["initContainers"] = [{"name": "init", "image": image, "command": ["config-manager"]}]
    sidecar = {"name": "sidecar", "image": image, "command": ["config-manager"]}
    found["spec"]["containers"] = [sidecar, *found["spec"]["containers"]]
    back_off = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container=init"}
    found["status"]["initContainerStatuses"] = [
        {"name": "init", "state": {"waiting": back_off}, "lastState": {"terminated": {"exitCode": 1}}}
    ]
    turn = {"waiting": {"reason": "PodInitializing"}}
    found["status"]["containerStatuses"] = [{"name": name, "state": turn} for name in ("sidecar", "main")]
    server.logs[f"{found['metadata']['uid']}/init"] = [CONFIG_MANAGER]
    labels = server.objects["nodes", "", "gpu-1"]["metadata"]["labels"]
    labels["nvidia.com/device-plugin.config"] = "tme-slicing"


def nothing_from_the_plugin(server):
    server.objects["nodes", "", "gpu-1"]["status"] |= {"allocatable": {}, "capacity": {}}
    del server.objects["pods", "kube-system", "nvidia-device-plugin-x"]
    server.add(plugin(nodeSelector={"nvidia.com/gpu": "true"}))


def test_a_plugin_that_is_no_pod_is_one(server):
    """Bottlerocket and EKS Auto Mode run it as a service of the node."""
    del server.objects["daemonsets", "kube-system", "nvidia-device-plugin"]
    del server.objects["pods", "kube-system", "nvidia-device-plugin-x"]
    assert rules() == {}


def test_gpus_by_claims_need_no_plugin(server):
    """The image is that of kubernetes-sigs/dra-driver-nvidia-gpu, before NVIDIA/k8s-dra-driver-gpu."""
    no_plugin(server)
    server.add(plugin(containers=[{"name": "gpus", "image": "nvcr.io/nvidia/k8s-dra-driver-gpu:v25.8.0"}]))
    claimed = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
    server.add(pod(gpus=0, **claimed))
    assert rules() == rules("train") == {}
    refused("0/2 nodes are available: 2 cannot allocate all claims.", gpus=0, **claimed)(server)
    assert list(rules()) == ["resource-claim"]


def test_what_the_plugin_says_now_counts_before_what_it_said(server):
    """After a restart for want of a driver it fails for its configuration."""
    registered(None, None)(server)
    said = {False: CONFIG_MANAGER, True: "could not load NVML library"}
    seen = doctor.ClusterState(
        [], server.all("pods"), [], lambda *asked: said[asked[2]], list, lambda _: None
    )
    [bad] = [one for one in server.all("nodes") if one["metadata"]["name"] == "gpu-1"]
    assert [one.id for one in doctor.node_findings(seen, bad)] == ["device-plugin-config"]


def test_feature_discovery_of_the_same_image_is_no_plugin():
    sidecar = {
        "name": "sidecar",
        "image": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
        "command": ["config-manager"],
    }
    discovery = {**sidecar, "name": "gfd", "command": ["gpu-feature-discovery"]}
    assert not doctor.is_plugin({"containers": [discovery, sidecar]})
    assert doctor.is_plugin(
        {"containers": [sidecar, {**sidecar, "name": "p", "command": ["nvidia-device-plugin"]}]}
    )


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
            no_plugin,
            "no-device-plugin",
            "none of 0 DaemonSets runs NVIDIA's device plugin, and",
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
        (plugin_says("starting"), "device-plugin-fails", "container main, says: starting"),
        (plugin_says(CONFIG_MANAGER), "device-plugin-config", "tme-slicing does not exist"),
        (
            init_container_of_the_plugin_fails,
            "device-plugin-config",
            f"container init, says: {CONFIG_MANAGER}; the node's label nvidia.com/device-plugin.config is "
            "tme-slicing",
        ),
        (plugin_says(MIG), "device-plugin-mig", "device 0 has an invalid MIG configuration"),
        (
            plugin_says("I1 main.go:381] No devices found. Waiting indefinitely.", 0, 0),
            "device-plugin-no-devices",
            "No devices found. Waiting indefinitely.",
        ),
        (plugin_says("starting", 4, 0), "gpu-unhealthy", "it offers no nvidia.com/gpu and has 4"),
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
    assert words in found[rule].message
    assert found[rule].evidence["cause"]
    assert found[rule].remedy


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
    assert "FALLEN_OFF_THE_BUS" in rules()["node-condition"].evidence["cause"]


def ended(text="", code=1, reason="Error"):
    def inject(server):
        server.add(pod(state={"terminated": {"exitCode": code, "reason": reason}}))
        log(server, "train", text)

    return inject


def waiting(reason, message):
    return lambda server: server.add(pod(state={"waiting": {"reason": reason, "message": message}}))


def add_event(server, about, reason, message, kind="Pod", level="Warning", at="2026-11-23T10:00:00Z"):
    server.add(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"e-{len(server.objects)}"},
            "type": level,
            "reason": reason,
            "involvedObject": {"kind": kind, "name": about, "namespace": "default"},
            "message": message,
            "lastTimestamp": at,
        }
    )


def event(message, reason="FailedCreatePodSandBox"):
    def inject(server):
        server.add(pod(state={"waiting": {"reason": "ContainerCreating"}}))
        add_event(server, "train", reason, message)

    return inject


def failed(reason, message):
    """A pod that the kubelet did not take: no container of it began."""

    def inject(server):
        server.add(pod())
        status = {"phase": "Failed", "reason": reason, "message": message}
        server.objects["pods", "default", "train"]["status"] = status

    return inject


def init_container_failed(server):
    state = {"terminated": {"exitCode": 1, "reason": "Error"}}
    one = pod(
        state={"waiting": {"reason": "PodInitializing"}}, initContainers=[{"name": "fetch", "image": IMAGE}]
    )
    one["status"] |= {"phase": "Failed", "initContainerStatuses": [{"name": "fetch", "state": state}]}
    made = server.add(one)
    server.logs[f"{made['metadata']['uid']}/fetch"] = ["Traceback", "OSError: no such bucket"]


def refused(message, **spec):
    """A pod that the scheduler refuses, though gpu-1 has a GPU free."""

    def inject(server):
        server.add(pod(place="", **spec))
        server.objects["pods", "default", "train"]["status"]["conditions"][0]["message"] = message

    return inject


def refused_by_an_event_alone(server):
    server.add(pod(place=""))
    server.objects["pods", "default", "train"]["status"]["conditions"] = []
    add_event(server, "train", "FailedScheduling", "0/2 nodes are available: 1 cannot allocate all claims.")


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
            "The nearest node is gpu-1: Insufficient nvidia.com/gpu: 2 requested, 1 left",
        ),
        (
            lambda s: s.add(pod(place="", nodeSelector={"accelerator": "nvidia-tesla-v100"})),
            "no-node-fits",
            "selector accelerator=nvidia-tesla-v100: it has no such label",
        ),
        (
            lambda s: s.add(pod(place="")),
            "not-scheduled-yet",
            "gpu-1 has the requested resources",
        ),
        # messages of kube-scheduler, pkg/scheduler/framework/plugins
        (
            refused("0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules."),
            "pod-affinity",
            "gpu-1 has the requested resources",
        ),
        (
            refused("0/2 nodes are available: 2 node(s) didn't satisfy existing pods anti-affinity rules."),
            "pod-affinity",
            "existing pods",
        ),
        (
            refused("0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints."),
            "topology-spread",
            "spread",
        ),
        (
            refused("0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports."),
            "host-port",
            "free ports",
        ),
        (refused('persistentvolumeclaim "data" not found'), "claim-unbound", '"data" not found'),
        (
            refused("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
            "claim-unbound",
            "unbound immediate",
        ),
        (
            refused("0/2 nodes are available: 1 node(s) had volume node affinity conflict."),
            "volume-zone",
            "volume node affinity",
        ),
        (
            refused("0/2 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity."),
            "volume-zone",
            "PersistentVolume's",
        ),
        (
            refused("0/2 nodes are available: 1 node(s) exceed max volume count."),
            "volume-count",
            "max volume",
        ),
        (refused_by_an_event_alone, "resource-claim", "cannot allocate all claims"),
        (refused('resourceclaim "gpu" not found'), "resource-claim", '"gpu" not found'),
        (
            refused("0/2 nodes are available: 2 node(s) had untolerated taint(s)."),
            "scheduler-refuses",
            "untolerated taint",
        ),
        (
            refused(
                "0/2 nodes are available: 2 Insufficient memory.", resources={"requests": {"memory": "32Gi"}}
            ),
            "no-node-fits",
            "Insufficient memory: 32768Mi requested, 15000Mi left",
        ),
        # kubernetes/kubernetes#130145; pkg/kubelet/lifecycle/predicate.go; pkg/kubelet/eviction/helpers.go
        (
            failed(
                "UnexpectedAdmissionError",
                "Pod was rejected: Allocate failed due to requested number of devices unavailable for "
                "nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected",
            ),
            "kubelet-refused",
            "Requested: 1, Available: 0",
        ),
        (
            failed(
                "OutOfnvidia.com/gpu",
                "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1, used: 1, "
                "capacity: 1",
            ),
            "kubelet-out-of",
            "requested: 1, used: 1, capacity: 1",
        ),
        (
            failed("TopologyAffinityError", "Resources cannot be allocated with Topology locality"),
            "topology-affinity",
            "Topology locality",
        ),
        (
            failed("Evicted", "The node was low on resource: ephemeral-storage."),
            "evicted",
            "ephemeral-storage",
        ),
        (
            failed("NodeShutdown", "Pod was rejected as the node is shutting down."),
            "pod-not-running",
            "NodeShutdown",
        ),
        (init_container_failed, "container-failed", "init container fetch exits 1; its last line: OSError"),
        (
            event(
                'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) a',
                "FailedAttachVolume",
            ),
            "volume",
            "Multi-Attach",
        ),
        (
            event('MountVolume.SetUp failed for volume "v" : configmap "c" not found', "FailedMount"),
            "volume",
            'configmap "c" not found',
        ),
        (
            event(
                'plugin type="aws-cni" name="aws-cni" failed (add): add cmd: failed to assign an IP '
                "address to container"
            ),
            "sandbox",
            "failed to assign an IP address",
        ),
        (
            event("error getting ClusterInformation: connection is unauthorized: Unauthorized"),
            "sandbox",
            "Unauthorized",
        ),
        (
            waiting("CreateContainerConfigError", 'secret "token" not found'),
            "container-config",
            '"token" not found',
        ),
        (
            event("Readiness of an unknown kind", "Unheard"),
            "pod-not-running",
            "Unheard: Readiness of an unknown",
        ),
        (
            lambda s: s.add(pod(state={"waiting": {}})),
            "pod-not-running",
            "phase Pending; container main waiting",
        ),
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
    assert words in found[rule].message
    assert found[rule].remedy


def test_every_symptom_is_shown():
    tables = (
        *(*symptoms.PLUGIN, *symptoms.CONTAINER, *symptoms.WAITING),
        *(*symptoms.KUBELET, *symptoms.SCHEDULER, *symptoms.CREATION),
    )
    here = (
        test_a_fault_of_a_pod_is_found.pytestmark[0].args[1]
        + test_a_fault_of_the_cluster_is_found.pytestmark[0].args[1]
        + test_why_no_pod_is_created.pytestmark[0].args[1]
    )
    assert {one.rule for one in tables} <= {rule for _, rule, *_ in here}


def test_the_schedulers_lasting_reason_is_named_where_room_is_missing_too(server):
    """The message of a real kube-scheduler, of nodes that were full."""
    server.add(pod("other"))
    refused('0/2 nodes are available: persistentvolumeclaim "data" not found. not found')(server)
    assert list(rules("train")) == ["claim-unbound", "no-node-fits"]


def test_a_claim_that_is_not_there_leaves_the_scheduler_silent(server):
    claimed = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}
    server.add(pod(gpus=0, place="", **claimed))
    server.objects["pods", "default", "train"]["status"]["conditions"] = []
    assert "waits until each resource claim exists: gpu" in rules("train")["resource-claim"].message


def test_who_has_the_gpu_is_named(server):
    server.add(pod("other"))
    server.add(pod(place=""))
    assert "its GPUs are used by Pod default/other" in rules("train")["no-node-fits"].message


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


def owned(thing, by):
    thing["metadata"].setdefault("namespace", "default")
    thing["metadata"]["ownerReferences"] = [
        {"kind": by["kind"], "name": by["metadata"]["name"], "uid": by["metadata"]["uid"]}
    ]
    return thing


def workload(server, kind="Job", api="batch/v1", name="train", spec=None, **status):
    if api not in server.kinds:
        server.add_kind(api)
    template = {"template": {"spec": pod(name)["spec"]}}
    thing = {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name},
        "spec": {**template, **(spec or {})},
    }
    return server.add({**thing, "status": status})


def test_a_job_is_its_newest_pod(server):
    job = workload(server)
    for name, made in (("a", "2026-11-23T10:00:00Z"), ("b", "2026-11-23T11:00:00Z")):
        one = owned(pod(name, gpus=0 if name == "b" else 1), job)
        one["metadata"]["creationTimestamp"] = made
        server.add(one)
    for asked in ("job/train", "jobs/train", "job.batch/train"):
        assert [one.object for one in diagnose(Cluster(), asked).findings] == ["Pod default/b"]


def test_a_pod_that_waits_goes_before_the_newest(server):
    job = workload(server, "StatefulSet", "apps/v1")
    server.add(owned(pod("train-0", gpus=2, place=""), job))
    newer = owned(pod("train-1", gpus=0), job)
    newer["metadata"]["creationTimestamp"] = "2036-11-23T11:00:00Z"
    server.add(newer)
    assert "no-node-fits" in rules("sts/train")


PODS = 'Error creating: pods "train-x" is forbidden: '


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        # plugin/pkg/admission/resourcequota: both forms
        (
            PODS
            + "exceeded quota: gpu, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, "
            "limited: requests.nvidia.com/gpu=4",
            "quota-exceeded",
        ),
        (PODS + "failed quota: gpu: must specify limits.memory for: main", "quota-exceeded"),
        # pod-security-admission
        (
            PODS + 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false',
            "pod-security",
        ),
        # apiserver/pkg/admission/plugin/webhook
        (
            'Error creating: admission webhook "validation.gatekeeper.sh" denied the request: [limits]',
            "webhook-denied",
        ),
        (
            'Error creating: Internal error occurred: failed calling webhook "mpod.kb.io": failed to call '
            'webhook: Post "https://webhook.kueue-system.svc:443/mutate": no endpoints available for service '
            '"webhook"',
            "webhook-fails",
        ),
        (PODS + "maximum memory usage per Container is 8Gi, but limit is 64Gi", "limit-range"),
        (
            PODS + 'error looking up service account default/ml: serviceaccount "ml" not found',
            "missing-reference",
        ),
        (PODS + "no PriorityClass with name high was found", "missing-reference"),
        (PODS + "something new", "pods-refused"),
    ],
)
def test_why_no_pod_is_created(server, message, rule):
    workload(server)
    add_event(server, "train", "FailedCreate", message, "Job")
    for asked in (("job/train",), ()):  # found without its name, too
        found = rules(*asked)
        assert list(found) == [rule]
        assert found[rule].object == "Job default/train"
        assert " ".join(message.split())[:100] in found[rule].message


def test_a_quota_that_keeps_a_deployment_from_its_pods(server):
    """Its ReplicaSet has the event and both have the condition ReplicaFailure (pkg/controller/replicaset)."""
    message = 'pods "train-5d-x" is forbidden: exceeded quota: gpu, requested: requests.nvidia.com/gpu=1'
    condition_ = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    deployment = workload(server, "Deployment", "apps/v1", conditions=[condition_])
    template = {"template": {"spec": pod()["spec"]}, "replicas": 1}
    meta = {"name": "train-5d"}
    replicas = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta, "spec": template}
    server.add(owned({**replicas, "status": {"replicas": 0, "conditions": [condition_]}}, deployment))
    add_event(server, "train-5d", "FailedCreate", f"Error creating: {message}", "ReplicaSet")
    [found] = diagnose(Cluster(), "deploy/train").findings
    assert (found.id, found.message) == ("quota-exceeded", message)
    assert rules()["quota-exceeded"].object == "ReplicaSet default/train-5d"
    server.objects["replicasets", "default", "train-5d"]["status"]["replicas"] = 1  # the quota was raised
    assert rules() == {}


def test_a_quota_that_leaves_room_for_some_of_a_jobs_pods(server):
    job = workload(server, spec={"parallelism": 4, "completions": 4}, active=1)
    server.add(owned(pod("train-0"), job))
    add_event(server, "train", "FailedCreate", f"{PODS}exceeded quota: gpu", "Job")
    assert list(rules("job/train")) == ["quota-exceeded"]
    server.objects["jobs", "default", "train"]["status"]["active"] = 4  # it was raised meanwhile
    assert rules("job/train") == {}


def kueue(server, of, **status):
    server.add_kind("kueue.x-k8s.io/v1beta2")
    meta = {"name": "w"}
    thing = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": meta}
    server.add(owned({**thing, "spec": {"queueName": "gpu"}, "status": status}, of))


QUOTA = {
    "type": "QuotaReserved",
    "status": "False",
    "reason": "Pending",
    "message": "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in "
    "flavor a10, 1 more needed",
}


@pytest.mark.parametrize(
    ("kind", "api", "spec"),
    [
        ("Job", "batch/v1", {"suspend": True}),
        ("JobSet", "jobset.x-k8s.io/v1alpha2", {"suspend": True}),
        ("RayJob", "ray.io/v1", {"suspend": True}),
        ("PyTorchJob", "kubeflow.org/v1", {"runPolicy": {"suspend": True}}),
        ("MPIJob", "kubeflow.org/v2beta1", {"runPolicy": {"suspend": True}}),
        ("MPIJob", "kubeflow.org/v1", {"runPolicy": {"suspend": True}}),
    ],
)
def test_what_kueue_holds_back_is_said_in_its_words(server, kind, api, spec):
    kueue(server, workload(server, kind, api, spec=spec), conditions=[QUOTA])
    found = rules(f"{kind}/train")
    assert list(found) == ["queue-waits"]
    assert f"QuotaReserved is False: Pending: {QUOTA['message']}" in found["queue-waits"].message


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"conditions": [{"type": "Evicted", "status": "True", "reason": "Preempted"}]},
            "Evicted is True: Preempted",
        ),
        (
            {
                "conditions": [{"type": "QuotaReserved", "status": "True"}],
                "admissionChecks": [{"name": "capacity", "state": "Pending", "message": "no node yet"}],
            },
            "admission check capacity is Pending: no node yet",
        ),
        ({}, "check that the queue gpu exists"),
    ],
)
def test_other_reasons_of_kueue(server, status, words):
    kueue(server, workload(server, spec={"suspend": True}), **status)
    assert words in rules("job/train")["queue-waits"].message


def test_a_gated_pod_has_kueues_words(server):
    made = server.add(pod(place="", schedulingGates=[{"name": "kueue.x-k8s.io/admission"}]))
    kueue(server, made, conditions=[QUOTA])
    assert QUOTA["message"] in rules("train")["scheduling-gated"].message


def test_suspended_without_kueue(server):
    workload(server, spec={"suspend": True})
    assert "has no Workload" in rules("job/train")["suspended"].message


def test_who_may_not_read_workloads_is_told_so_and_the_rest_is_looked_at(server):
    kueue(server, workload(server, spec={"suspend": True}), conditions=[QUOTA])
    server.faults.append(Fault("list", "workloads", 403))
    assert "can't list kueue" in rules("job/train")["queue-waits"].message


def test_pods_are_found_through_what_makes_them(server):
    """LeaderWorkerSet: the workers' StatefulSet is the leader pod's; RayJob: by its RayCluster."""
    lws = workload(server, "LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1", "serve")
    leaders = server.add(owned(workload(server, "StatefulSet", "apps/v1", "serve"), lws))
    leader = server.add(owned(pod("serve-0"), leaders))
    workers = server.add(owned(workload(server, "StatefulSet", "apps/v1", "serve-0"), leader))
    server.add(owned(pod("serve-0-1", gpus=2, place=""), workers))
    assert rules("lws/serve")["no-node-fits"].object == "Pod default/serve-0-1"
    job = workload(server, "RayJob", "ray.io/v1")
    server.add(
        owned(pod("head", gpus=0), server.add(owned(workload(server, "RayCluster", "ray.io/v1", "r"), job)))
    )
    assert rules("rayjob/train")["asks-for-no-gpu"].object == "Pod default/head"


@pytest.mark.parametrize(
    ("kind", "api", "status", "rule", "words"),
    [
        (
            "Job",
            "batch/v1",
            {
                "conditions": [
                    {
                        "type": "Failed",
                        "status": "True",
                        "reason": "BackoffLimitExceeded",
                        "message": "the limit",
                    }
                ]
            },
            "workload-failed",
            "Failed is True: BackoffLimitExceeded: the limit",
        ),
        (
            "RayJob",
            "ray.io/v1",
            {"jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "driver exited with 1"},
            "workload-failed",
            "jobDeploymentStatus is Failed: AppFailed: driver exited with 1",
        ),
        ("Deployment", "apps/v1", {}, "no-pods", "it has neither conditions nor events"),
    ],
)
def test_what_ended_or_has_no_pod_is_not_well(server, kind, api, status, rule, words):
    workload(server, kind, api, **status)
    found = rules(f"{kind}/train")
    assert list(found) == [rule]
    assert words in found[rule].message


def test_a_job_that_ended_well_is_well(server):
    workload(server, conditions=[{"type": "Complete", "status": "True"}])
    assert rules("job/train") == {}


def test_a_workload_that_is_not_there(server):
    workload(server)
    with pytest.raises(UsageError, match="unknown Job of default 'trian'") as told:
        diagnose(Cluster(), "job/trian")
    assert "did you mean train?" in told.value.hint
    with pytest.raises(UsageError, match="unknown JobSet"):
        diagnose(Cluster(), "jobset/train")


def test_pods_that_a_node_did_not_take_are_found_without_their_name(server):
    failed("UnexpectedAdmissionError", "Allocate failed")(server)
    assert "kubelet-refused" in rules()


def test_no_pod_that_does_not_run_is_well(server):
    """Whatever its phase and words are, if only its own are shown."""
    for phase in ("Pending", "Failed", "Unknown"):
        server.add(pod())
        server.objects["pods", "default", "train"]["status"] = {"phase": phase}
        assert f"phase {phase}" in rules("train")["pod-not-running"].message
    crashed = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    server.add(pod(state=crashed))
    server.objects["pods", "default", "train"]["status"]["phase"] = "Running"
    assert "CrashLoopBackOff: back-off" in rules("train")["pod-not-running"].message


def test_the_last_events_are_shown(server):
    event("x", "Unheard")(server)
    for minute in range(5):
        add_event(server, "train", f"Odd{minute}", "y", at=f"2026-11-23T10:0{minute}:30Z")
    said = rules("train")["pod-not-running"].message
    assert [f"Odd{minute}" in said for minute in range(5)] == [False, False, True, True, True]


def test_commands(server, capsys, monkeypatch, tmp_path):
    def typed(*words):
        try:
            invoke([*words])
        except SystemExit as error:
            return error.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    code, out, _ = typed("k8s.doctor")
    assert (code, "no problem was found" in out) == (0, True)
    server.add(pod(gpus=2, place=""))
    code, out, _ = typed("k8s.doctor", "train", "--json")
    said = json.loads(out)
    assert (code, said["schema"], said["findings"][0]["id"]) == (1, doctor.SCHEMA, "no-node-fits")
    code, out, _ = typed("k8s.doctor", "train")
    assert "cause  no node has all that the pod requests" in out
    code, _, err = typed("k8s.doctor", "trai")
    assert (code, "did you mean default/train?" in err) == (2, True)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = typed("k8s.doctor")
    assert (code, "no kubeconfig" in err) == (4, True)


def test_the_rights_are_enough_and_the_least(server):
    event("x")(server)
    plugin_says("starting")(server)
    for api in CUSTOM:
        server.add_kind(api)
    failing = workload(server, name="other")
    add_event(server, "other", "FailedCreate", "exceeded quota", "Job")
    kueue(server, failing, conditions=[QUOTA])
    server.objects["jobs", "default", "other"]["spec"]["suspend"] = True
    rights = COMMAND_RULES["doctor"]

    def run(left_out=None):
        server.rules = [
            {"apiGroups": [right.group], "resources": [one], "verbs": right.verbs}
            for right in rights
            for one in right.resources
            if one != left_out
        ]
        cluster = Cluster()
        named = [diagnose(cluster, one).findings for one in ("train", "job/other")]
        return diagnose(cluster).findings, named

    whole = run()
    cluster = Cluster()
    for kind in workloads.KINDS:
        with pytest.raises(UsageError):
            workloads.workload(cluster, kind, "none", "default")
    allowed = {(verb, one.group, plural) for one in rights for verb in one.verbs for plural in one.resources}
    assert {call[:3] for call in server.calls} == allowed
    assert run("pods/log") != whole  # what can't be read is told, and the rest is looked at
    for one in ("nodes", "pods", "daemonsets", "events", "jobs"):
        with pytest.raises(UnavailableError, match=f'resource "{one}"'):
            run(one)
