"""k8s.job and gpu_job: golden files, what is refused and why, and Jobs followed to every kind of end.

The golden files are written anew with GPUKILN_GOLDEN=write in the environment.
"""

import json
import os
import threading
import time
from pathlib import Path

import kubernetes_validate
import pytest

from gpukiln.commands import k8s_job
from gpukiln.commands.program import Program
from gpukiln.errors import (
    BusyError,
    GpukilnError,
    IncompatibleError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.kubernetes import gpu_job
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.follow import Patience, follow, submit
from gpukiln.kubernetes.jobs import state
from gpukiln.kubernetes.manifest import dump, load
from tasks import namespace
from tests.support.api_server import ApiServer, Fault, Outcome, node

GOLDEN = Path(__file__).parents[1] / "support/golden"
MINORS = ("1.34", "1.35", "1.36", "1.37")
IMAGE = "registry.example/team/train:1.2"
DIGEST = "registry.example/team/train@sha256:" + "ab" * 32
QUICK = Patience(poll_s=0.02, stuck_s=0.1, lost_s=0.5)

JOBS = {
    "simple": {
        "image": IMAGE,
        "command": ["python", "train.py"],
        "gpu_model": "T4",
        "cpu": "3500m",
        "memory": "14Gi",
        "shm": "2Gi",
        "timeout": "2h",
    },
    "any": {"image": DIGEST, "shm": "0", "arguments": True, "command": ["--steps", "10"], "env": {"A": "b"}},
    "preferred": {
        "image": IMAGE,
        "gpu_model": "L4,T4",
        "prefer": {"L4": 80, "T4": 20},
        "select_by": "instance-type",
        "queue": "gpu",
        "label": {"team": "vision"},
    },
    "spot": {
        "image": IMAGE,
        "name": "finetune",
        "namespace": "vision",
        "gpus": 4,
        "gpu_model": "A10G",
        "select_by": "karpenter",
        "spot": True,
        "provider": "karpenter",
        "retries": 2,
        "give_up": [42],
        "cache": ["models:/models", "/mnt/k8s-disks/0/cache:/cache"],
        "scratch": ["200Gi:/scratch", "50G:/more"],
        "env_secret": "hf",
        "service_account": "trainer",
        "pull_secret": "registry",
        "runtime_class": "nvidia",
        "priority_class": "batch",
        "tolerate": ["spot=true", "dedicated"],
        "node_label": {"pool": "gpu"},
    },
    "nodes": {
        "image": IMAGE,
        "command": ["torchrun", "train.py"],
        "gpus": 8,
        "nodes": 4,
        "gpu_model": "A100",
        "select_by": "auto-mode",
        "provider": "auto-mode",
        "resource": {"vpc.amazonaws.com/efa": "4"},
        "cpu": "90",
        "memory": "1000Gi",
        "shm": "64Gi",
    },
    "mig": {"image": IMAGE, "gpu_model": "A100-80GB", "mig": "1g.10gb", "gpus": 2, "memory": "8Gi"},
    "product": {"image": IMAGE, "product": ["NVIDIA-A40", "NVIDIA-A40-SHARED"]},
    "aks": {"image": IMAGE, "gpu_model": "T4", "shared": True, "spot": True, "provider": "aks"},
    "arm": {"image": IMAGE, "gpu_model": "T4G", "cpu": "3", "memory": "6Gi"},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_rendered(name):
    golden = GOLDEN / f"k8s-job-{name}.yaml"
    text = dump(*gpu_job(**JOBS[name]).manifests())
    if os.environ.get("GPUKILN_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()
    assert load(text) == gpu_job(**JOBS[name]).manifests()


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", JOBS)
def test_every_object_fits_its_schema(name, minor):
    for one in gpu_job(**JOBS[name]).manifests():
        kubernetes_validate.validate(one, minor, strict=True)


def pod_of(**options):
    *_, job = gpu_job(**{"image": IMAGE, **options}).manifests()
    return job["spec"]["template"]["spec"]


def terms(pod):
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    [found] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}])
    return found.get("matchExpressions", [])


@pytest.mark.parametrize(
    ("options", "label", "value"),
    [
        ({"gpu_model": "T4"}, "nvidia.com/gpu.product", "Tesla-T4"),
        ({"gpu_model": "nvidia-l4"}, "nvidia.com/gpu.product", "NVIDIA-L4"),
        ({"gpu_model": "A100-40GB"}, "nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB"),
        ({"gpu_model": "L40S", "select_by": "karpenter"}, "karpenter.k8s.aws/instance-gpu-name", "l40s"),
        ({"gpu_model": "L4", "select_by": "auto-mode"}, "eks.amazonaws.com/instance-gpu-name", "l4"),
        ({"gpu_model": "A100-40GB", "select_by": "karpenter"}, "karpenter.k8s.aws/instance-gpu-memory", "40960"),
        ({"instance_type": "g4dn.xlarge"}, "node.kubernetes.io/instance-type", "g4dn.xlarge"),
        ({"product": "NVIDIA-A40"}, "nvidia.com/gpu.product", "NVIDIA-A40"),
        ({"gpu_model": "T4G"}, "kubernetes.io/arch", "arm64"),
        ({}, "kubernetes.io/arch", "amd64"),
        ({"spot": True, "provider": "managed"}, "eks.amazonaws.com/capacityType", "SPOT"),
        ({"spot": True, "provider": "asg"}, "node-lifecycle", "spot"),
        ({"spot": True, "provider": "gke"}, "cloud.google.com/gke-spot", "true"),
        (
            {"gpu_model": "H100", "mig": "1g.10gb+me"},
            "nvidia.com/mig-1g.10gb.me.product",
            "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me",
        ),
    ],
)
def test_nodes_are_chosen_by_labels_that_somebody_sets(options, label, value):
    assert pod_of(**options)["nodeSelector"][label] == value


def test_several_values_and_what_is_not_spot_are_an_affinity():
    found = terms(pod_of(gpu_model="T4,L4", provider="managed"))
    assert found == [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["Tesla-T4", "NVIDIA-L4"]},
        {"key": "eks.amazonaws.com/capacityType", "operator": "NotIn", "values": ["SPOT"]},
    ]
    assert terms(pod_of(gpu_model="T4", shared=True))[0]["values"] == ["Tesla-T4", "Tesla-T4-SHARED"]
    assert terms(pod_of()) == []  # any node with GPUs: the resource says so


def test_gpus_are_limits_alone_and_every_amount_is_a_text():
    pod = pod_of(gpus=4, resource=["hugepages-2Mi=5120Mi"])
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"
    assert "nvidia.com/gpu" not in resources["requests"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "48Gi"
    assert all(isinstance(one, str) for kind in resources.values() for one in kind.values())


def test_a_scratch_is_asked_of_the_node_once_for_all():
    assert pod_of(scratch="1Gi:/a,1Gi:/b")["containers"][0]["resources"]["requests"][
        "ephemeral-storage"
    ] == str(2 * 2**30)


@pytest.mark.parametrize(
    ("options", "error", "said", "hint"),
    [
        ({"image": ""}, UsageError, "--image is missing", "tag"),
        ({"image": "UPPER/x:1"}, UsageError, "no reference", "lower case"),
        ({"image": "train"}, RefusedError, "no tag", "--allow-latest"),
        ({"image": "train:latest"}, RefusedError, "tag latest", "--allow-latest"),
        ({"image": "localhost:5000/train"}, RefusedError, "no tag", "--allow-latest"),
        ({"gpu_model": "T5"}, UsageError, "unknown GPU 'T5'", "T4"),
        ({"gpu_model": "T4:2"}, UsageError, "'T4:2' is no GPU", "--gpus"),
        ({"gpu_model": "K80"}, IncompatibleError, "nobody sells Tesla K80", "instead: g4dn"),
        ({"gpu_model": "A40"}, IncompatibleError, "no instance type of EC2 has A40", "--product"),
        ({"gpu_model": "V520"}, UsageError, "no GPU of NVIDIA", "plugin"),
        ({"gpu_model": "L4", "gpus": 9}, IncompatibleError, "no instance type has 9 L4: the most is 8", "--nodes"),
        ({"gpus": 17}, IncompatibleError, "the most is 8", "--nodes"),
        ({"gpu_model": "T4G", "arch": "x86_64"}, IncompatibleError, "no instance type with T4G", "arm64"),
        ({"arch": "amd64"}, UsageError, "--arch 'amd64'", "x86_64"),
        ({"gpus": 0}, UsageError, "--gpus 0", ""),
        ({"nodes": 0}, UsageError, "--nodes 0", ""),
        ({"retries": -1}, UsageError, "--retries -1", ""),
        ({"give_up": [256]}, UsageError, "--give-up 256", "1 to 255"),
        ({"cpu": "3.5x"}, UsageError, "--cpu '3.5x' is no quantity", "3500m"),
        ({"cpu": "0.0001"}, UsageError, "least part", "500m"),
        ({"cpu": "4Gi"}, UsageError, "unit of memory", "3500m"),
        ({"cpu": "-1"}, UsageError, "not more than nothing", "3500m"),
        ({"memory": "14GB"}, UsageError, "'14GB' is no quantity", "14G?"),
        ({"memory": "14GiB"}, UsageError, "'14GiB' is no quantity", "14Gi?"),
        ({"memory": "14 gi"}, UsageError, "is no quantity", "14Gi?"),
        ({"memory": "512m"}, UsageError, "thousandth of a byte", "512Mi?"),
        ({"memory": "14"}, UsageError, "14 bytes", "14Gi?"),
        ({"memory": "2Gi", "shm": "2Gi"}, UsageError, "leaves nothing", "less --shm"),
        ({"shm": "x"}, UsageError, "--shm 'x'", "2Gi"),
        ({"timeout": "soon"}, UsageError, "--timeout 'soon'", "2h"),
        ({"timeout": "0s"}, UsageError, "--timeout 0s", "2h"),
        ({"name": "My_Job"}, UsageError, "--name 'My_Job'", "my-job"),
        ({"name": "a" * 64}, UsageError, "at most 63", "a" * 63),
        ({"name": "1st", "nodes": 2}, UsageError, "begins with a letter", "job-1st"),
        ({"name": "a" * 62, "nodes": 12}, UsageError, "too long", "at most 60"),
        ({"namespace": "A"}, UsageError, "--namespace", "small"),
        ({"env": ["CUDA_VISIBLE_DEVICES=0"]}, RefusedError, "numbered from 0", "leave it out"),
        ({"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, RefusedError, "every GPU of the node", "leave it out"),
        ({"env": ["A"]}, UsageError, "no `=`", "NAME=value"),
        ({"env": ["1 A=b"]}, UsageError, "name of a variable", ""),
        ({"env": ["MASTER_ADDR=x"], "nodes": 2}, UsageError, "set for every pod", "leave it out"),
        ({"env": ["PET_NNODES=2"], "nodes": 2}, UsageError, "set for every pod", "leave it out"),
        ({"spot": True}, UsageError, "--spot needs --provider", "karpenter"),
        ({"provider": "karpentr"}, UsageError, "karpentr", "karpenter"),
        ({"select_by": "products"}, UsageError, "products", "product"),
        ({"prefer": ["L4"]}, UsageError, "no `=`", "L4=80"),
        ({"prefer": ["L4=0"]}, UsageError, "no weight", "1 to 100"),
        ({"prefer": ["L4=101"]}, UsageError, "no weight", "1 to 100"),
        ({"prefer": ["L4=5"], "gpu_model": "T4"}, UsageError, "--gpu-model excludes it", "add L4"),
        ({"prefer": ["P5=5"]}, UsageError, "unknown GPU", ""),
        ({"prefer": ["H200=5"], "gpus": 1, "instance_type": "g6.xlarge"}, IncompatibleError, "--prefer h200", "l4"),
        ({"mig": "1g.10gb", "gpu_model": "T4"}, IncompatibleError, "can't be divided", ""),
        ({"mig": "1g.5gb", "gpu_model": "H100"}, IncompatibleError, "no MIG profile 1g.5gb", "1g.10gb"),
        ({"mig": "1g.11gb"}, UsageError, "unknown MIG profile", "1g.10gb"),
        ({"mig": "7g.80gb", "gpu_model": "H100", "gpus": 9}, IncompatibleError, "the most is 8", "--nodes"),
        ({"instance_type": "g4dn.xlarg"}, UsageError, "unknown GPU instance type", "g4dn.xlarge"),
        ({"instance_type": "p3.2xlarge"}, IncompatibleError, "is retired", "instead"),
        ({"instance_type": "g6f.large"}, IncompatibleError, "no whole GPU", ""),
        ({"instance_type": "g4dn.xlarge", "gpus": 2}, IncompatibleError, "has 1 T4, wanted 2", "larger"),
        ({"instance_type": "g4dn.xlarge", "gpu_model": "L4"}, IncompatibleError, "has T4, wanted L4", "another"),
        ({"instance_type": "g5g.xlarge", "arch": "x86_64"}, UsageError, "exclude each other", ""),
        ({"instance_type": "g4dn.xlarge", "select_by": "karpenter"}, UsageError, "exclude each other", ""),
        ({"product": "X", "gpu_model": "T4"}, UsageError, "exclude each other", ""),
        ({"product": "X", "mig": "1g.10gb"}, UsageError, "exclude each other", ""),
        ({"product": "X", "prefer": ["T4=3"]}, UsageError, "exclude each other", ""),
        ({"product": "Tesla T4"}, UsageError, "no value of a label", "Tesla-T4"),
        ({"cache": "models"}, UsageError, "wanted CLAIM:/PATH", "models:/models"),
        ({"cache": "models:here"}, UsageError, "wanted CLAIM:/PATH", "models:/models"),
        ({"cache": "Models_1:/x"}, UsageError, "name of an object", ""),
        ({"cache": ["a:/x", "b:/x/"]}, UsageError, "/x can't be mounted twice", ""),
        ({"cache": "a:/"}, UsageError, "/ can't be mounted over", ""),
        ({"scratch": "1Gi:/dev/shm"}, UsageError, "twice", ""),
        ({"scratch": "/x"}, UsageError, "wanted SIZE:/PATH", "200Gi"),
        ({"scratch": "1GB:/x"}, UsageError, "no quantity", "1G?"),
        ({"env_secret": "A B"}, UsageError, "name of an object", ""),
        ({"tolerate": "a b"}, UsageError, "of a taint", ""),
        ({"node_label": ["a/b/c=d"]}, UsageError, "no label", ""),
        ({"label": ["a=b c"]}, UsageError, "no label", ""),
        ({"resource": ["cpu=1"]}, UsageError, "option of its own", "--cpu"),
        ({"resource": ["nvidia.com/gpu=1"]}, UsageError, "option of its own", "--gpus"),
        ({"resource": ["efa=1"]}, UsageError, "none that a pod can ask for", ""),
        ({"resource": ["vpc.amazonaws.com/efa=1.5"]}, UsageError, "whole number", ""),
    ],
)
def test_what_can_not_be_is_refused(options, error, said, hint):
    with pytest.raises(GpukilnError) as refused:
        gpu_job(**{"image": IMAGE, **options})
    assert type(refused.value) is error
    assert said in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"image": "train:latest", "allow_latest": True},
        {"image": "train", "allow_latest": True},
        {"image": "localhost:5000/a/b:1"},
        {"image": DIGEST},
        {"env": ["NVIDIA_DRIVER_CAPABILITIES=compute,utility", "EMPTY=", "A=b=c"]},
        {"memory": "15032385536", "cpu": "0.5"},
        {"name": "1st"},
        {"prefer": {"L4": 100}},
        {"gpu_model": ["T4", "T4"]},
    ],
)
def test_what_is_unusual_and_right_is_taken(options):
    for one in gpu_job(**{"image": IMAGE, **options}).manifests():
        kubernetes_validate.validate(one, MINORS[0], strict=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu_model": "A100-40GB"}, "p4d.24xlarge: 7 more of its GPUs"),
        ({"gpu_model": "T4G"}, "arm64"),
        ({"env": {"HF_TOKEN": "hf_0123456789abcdef"}}, "--env HF_TOKEN"),
        ({"spot": True, "provider": "karpenter"}, "checkpoint"),
        ({"spot": True, "provider": "karpenter", "nodes": 2}, "--retries says how often"),
        ({"nodes": 2, "cache": "models:/m"}, "ReadWriteMany"),
        ({"gpu_model": "T4", "env": {"EPOCHS": "3"}}, ""),
    ],
)
def test_what_one_may_not_have_in_mind_is_told(options, said):
    notes = "\n".join(gpu_job(**{"image": IMAGE, **options}).notes())
    assert said in notes
    assert bool(said) == bool(notes)


# --- on a cluster -----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


class Told:
    """What came of following a job."""

    def __init__(self):
        self.written, self.said, self.end, self.error = [], [], None, None

    def run(self, server, *, patience=QUICK, ours=True, **options):
        cluster, job = Cluster(), gpu_job(**{"image": IMAGE, "gpu_model": "T4", **options})
        submit(cluster, job, self.said.append)
        return self.watch(cluster, job.name, patience=patience, ours=ours)

    def watch(self, cluster, name, *, patience=QUICK, ours=True):
        try:
            self.end = follow(
                cluster, name, "", write=self.written.append, say=self.said.append, patience=patience, ours=ours
            )
        except GpukilnError as error:
            self.error = error
        return self

    @property
    def text(self):
        return "\n".join(self.said)


def test_a_job_is_followed_to_its_end(server):
    server.add(node("gpu-1"))
    server.behave = lambda _pod, gpus: Outcome(log=f"one\n{len(gpus)} GPU\n")
    told = Told().run(server)
    assert told.written == ["one", "1 GPU"]
    assert (told.end.state, told.end.exit_code, len(told.end.attempts)) == ("succeeded", 0, 1)
    assert "submitted to default of double" in told.text
    assert told.end.attempts[0].node == "gpu-1"


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (Outcome(exit_code=3, log="Traceback\n"), 3, "exit code 3"),
        (Outcome(exit_code=137, reason="OOMKilled"), 137, "reached the limit of 12Gi, /dev/shm included"),
        (Outcome(exit_code=137), 137, "SIGKILL"),
        (Outcome(exit_code=127), 127, "not in the image"),
        (Outcome(exit_code=128, reason="StartError", message="exec: pythn: not found"), 128, "exec: pythn"),
    ],
)
def test_it_ends_as_its_container_does(server, outcome, code, said):
    server.add(node("gpu-1"))
    server.behave = lambda *_: outcome
    told = Told().run(server)
    assert (told.end.state, told.end.exit_code) == ("failed", code)
    assert said in told.end.why
    assert told.written == outcome.log.splitlines()


def in_turn(*outcomes):
    """A cluster's pods do one after the other."""
    rest = list(outcomes)
    return lambda *_: rest.pop(0)


def test_what_the_cluster_interrupts_is_started_again_and_not_counted(server):
    server.add(node("gpu-1"))
    server.behave = in_turn(Outcome(exit_code=143, evicted=True, log="a\n"), Outcome(log="b\n"))
    told = Told().run(server, spot=True, provider="karpenter", gpu_model=(), node_label={})
    assert told.error is None
    assert told.end is None or told.end.exit_code == 0


def test_failures_are_tried_again_as_often_as_asked(server):
    server.add(node("gpu-1"))
    server.behave = in_turn(Outcome(exit_code=1, log="a\n"), Outcome(exit_code=2, log="b\n"))
    told = Told().run(server, retries=1)
    assert (told.end.exit_code, told.end.reason) == (2, "BackoffLimitExceeded")
    assert sorted(told.written) == ["a", "b"]
    server.behave = in_turn(Outcome(exit_code=42))
    told = Told().run(server, retries=3, give_up=[42], name="given-up")
    assert (told.end.exit_code, told.end.reason, len(told.end.attempts)) == (42, "PodFailurePolicy", 1)
