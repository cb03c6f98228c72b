"""k8s.job and gpu_job: golden files, what is refused and why, and Jobs followed to every kind of end.

The golden files are written anew with GPUKILN_GOLDEN=write in the environment.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import kubernetes_validate
import pytest

from gpukiln.errors import (
    BusyError,
    GpukilnError,
    IncompatibleError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.kubernetes import gpu_job
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import read
from gpukiln.kubernetes.check.rules import Context
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.follow import WaitLimits, follow, submit
from gpukiln.kubernetes.jobs import state
from gpukiln.kubernetes.jobs.admission import adapt_to_namespace
from gpukiln.kubernetes.manifest import dump, load
from gpukiln.kubernetes.rbac import COMMAND_RULES
from tests.support.api_server import ApiServer, Fault, Outcome, node
from tests.support.exit_codes import invoke
from tests.support.kill_points import files_in, kill_at_each_step, mask_varying

GOLDEN = Path(__file__).parents[1] / "support/golden"
MINORS = ("1.34", "1.35", "1.36", "1.37")
IMAGE = "registry.example/team/train:1.2"
DIGEST = "registry.example/team/train@sha256:" + "ab" * 32
QUICK = WaitLimits(start_s=10, poll_s=0.02, stuck_s=0.1, lost_s=0.5)

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
        "tolerate": ["reserved=gpu", "dedicated"],
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
    "mig": {"image": IMAGE, "gpu_model": "A100-80GB", "mig": "1g.10gb", "memory": "8Gi"},
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


def test_the_check_finds_no_fault_in_them():
    files = [str(GOLDEN / f"k8s-job-{name}.yaml") for name in JOBS]
    report = apply_rules(read(files), Context())
    assert (report.findings, report.counts.pods) == ((), len(JOBS))


def test_the_check_warns_of_a_job_with_several_mig_devices(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(dump(*gpu_job(image=IMAGE, mig="1g.10gb", gpus=2, memory="8Gi").manifests()))
    [finding] = apply_rules(read([str(file)]), Context()).findings
    assert (finding.id, finding.severity, finding.message) == (
        "mig-several",
        "warning",
        "nvidia.com/mig-1g.10gb: 2",
    )


def pod_of(**options):
    *_, job = gpu_job(**{"image": IMAGE, **options}).manifests()
    return job["spec"]["template"]["spec"]


def terms(pod):
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    [found] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", [{}]
    )
    return found.get("matchExpressions", [])


@pytest.mark.parametrize(
    ("options", "label", "value"),
    [
        ({"gpu_model": "T4"}, "nvidia.com/gpu.product", "Tesla-T4"),
        ({"gpu_model": "nvidia-l4"}, "nvidia.com/gpu.product", "NVIDIA-L4"),
        ({"gpu_model": "A100-40GB"}, "nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB"),
        ({"gpu_model": "L40S", "select_by": "karpenter"}, "karpenter.k8s.aws/instance-gpu-name", "l40s"),
        ({"gpu_model": "L4", "select_by": "auto-mode"}, "eks.amazonaws.com/instance-gpu-name", "l4"),
        (
            {"gpu_model": "A100-40GB", "select_by": "karpenter"},
            "karpenter.k8s.aws/instance-gpu-memory",
            "40960",
        ),
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


def test_a_space_in_an_amount_is_not_rendered():
    limits = pod_of(scratch="1Gi :/a", resource=["vpc.amazonaws.com/efa= 4"])["containers"][0]["resources"][
        "limits"
    ]
    assert (limits["ephemeral-storage"], limits["vpc.amazonaws.com/efa"]) == ("1Gi", "4")


@pytest.mark.parametrize(
    ("options", "error", "said", "hint"),
    [
        ({"image": ""}, UsageError, "--image is missing", "tag"),
        ({"image": "r.example/UPPER:1"}, UsageError, "no reference", "lower case"),
        ({"image": "train"}, RefusedError, "no tag", "--allow-latest"),
        ({"image": "train:latest"}, RefusedError, "tag latest", "--allow-latest"),
        ({"image": "localhost:5000/train"}, RefusedError, "no tag", "--allow-latest"),
        ({"gpu_model": "T5"}, UsageError, "unknown GPU 'T5'", ""),
        ({"gpu_model": "T4:2"}, UsageError, "'T4:2' is no GPU", "--gpus"),
        ({"gpu_model": "K80"}, IncompatibleError, "EC2 launches no machine with Tesla K80", "instead: g4dn"),
        ({"gpu_model": "A40"}, IncompatibleError, "no instance type of EC2 has A40", "--product"),
        ({"gpu_model": "V520"}, UsageError, "no NVIDIA GPU", "plugin"),
        (
            {"gpu_model": "L4", "gpus": 9},
            IncompatibleError,
            "no instance type has 9 L4: g6.48xlarge has the most, 8",
            "--nodes",
        ),
        ({"gpus": 17}, IncompatibleError, "has the most, 8", "--nodes"),
        ({"gpu_model": "T4G", "arch": "x86_64"}, IncompatibleError, "no instance type with T4G", "arm64"),
        ({"arch": "amd64"}, UsageError, "--arch 'amd64'", "x86_64"),
        ({"gpus": 0}, UsageError, "--gpus 0", ""),
        ({"nodes": 0}, UsageError, "--nodes 0", ""),
        ({"retries": -1}, UsageError, "--retries -1", ""),
        ({"give_up": [256]}, UsageError, "--give-up '256'", "1 to 255"),
        ({"cpu": "3.5x"}, UsageError, "--cpu '3.5x' is no quantity", "3500m"),
        ({"cpu": "0.0001"}, UsageError, "smallest part", "500m"),
        ({"cpu": "4Gi"}, UsageError, "unit of memory", "3500m"),
        ({"cpu": "-1"}, UsageError, "not above 0", "3500m"),
        ({"memory": "much"}, UsageError, "--memory 'much' is not an amount of memory", "24GiB"),
        ({"memory": "512m"}, UsageError, "not an amount of memory", "512Mi? m is a thousandth of a byte"),
        ({"memory": "14"}, UsageError, "too little to be meant as MiB", "14GiB"),
        ({"memory": "14KiB"}, UsageError, "14 KiB, wanted 4 MiB or more", "14GiB"),
        ({"memory": "2Gi", "shm": "2Gi"}, UsageError, "leaves nothing", "lower --shm"),
        ({"gpu_model": "T4", "memory": "400Gi"}, IncompatibleError, "g4dn.metal has", "--memory"),
        ({"instance_type": "g4dn.xlarge", "cpu": "4"}, IncompatibleError, "3.92 CPUs", "--cpu"),
        ({"instance_type": "g4dn.xlarge,g5.2xlarge", "cpu": "5"}, IncompatibleError, "g4dn.xlarge", "--cpu"),
        ({"gpu_model": "H200", "cpu": "193"}, IncompatibleError, "p5e.48xlarge has 191.45 CPUs", "--cpu"),
        ({"shm": "x"}, UsageError, "--shm 'x'", "24GiB"),
        ({"timeout": "soon"}, UsageError, "--timeout 'soon'", "2h"),
        ({"timeout": "0s"}, UsageError, "--timeout '0s' is too short", "1s or more"),
        ({"name": "My_Job"}, UsageError, "--name 'My_Job'", "my-job"),
        ({"name": "a" * 64}, UsageError, "at most 63", "a" * 63),
        ({"name": "1st", "nodes": 2}, UsageError, "begins with a letter", "job-1st"),
        ({"name": "a" * 62, "nodes": 12}, UsageError, "too long", "at most 60"),
        ({"namespace": "A"}, UsageError, "--namespace", "small"),
        ({"env": ["CUDA_VISIBLE_DEVICES=0"]}, RefusedError, "numbered from 0", "remove it"),
        ({"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, RefusedError, "every GPU of the node", "remove it"),
        ({"env": ["A"]}, UsageError, "no `=`", "NAME=value"),
        ({"env": ["1 A=b"]}, UsageError, "name of a variable", ""),
        ({"env": ["MASTER_ADDR=x"], "nodes": 2}, UsageError, "set for every pod", "remove it"),
        ({"env": ["PET_NNODES=2"], "nodes": 2}, UsageError, "set for every pod", "remove it"),
        ({"spot": True}, UsageError, "--spot needs --provider", "karpenter"),
        ({"provider": "karpentr"}, UsageError, "karpentr", "karpenter"),
        ({"select_by": "products"}, UsageError, "products", "product"),
        ({"prefer": ["L4"]}, UsageError, "no `=`", "L4=80"),
        ({"prefer": ["L4=0"]}, UsageError, "no weight", "1 to 100"),
        ({"prefer": ["L4=101"]}, UsageError, "no weight", "1 to 100"),
        ({"prefer": ["L4=5"], "gpu_model": "T4"}, UsageError, "--gpu-model excludes it", "add L4"),
        ({"prefer": ["P5=5"]}, UsageError, "unknown GPU", ""),
        (
            {"prefer": ["H200=5"], "gpus": 1, "instance_type": "g6.xlarge"},
            IncompatibleError,
            "--prefer h200",
            "l4",
        ),
        (
            {"mig": "1g.10gb", "gpu_model": "T4"},
            IncompatibleError,
            "T4 has no MIG profile",
            "does not support MIG",
        ),
        ({"mig": "1g.5gb", "gpu_model": "H100"}, IncompatibleError, "no MIG profile 1g.5gb", "1g.10gb"),
        ({"mig": "1g.11gb"}, UsageError, "unknown MIG profile", "1g.10gb"),
        ({"mig": "7g.80gb", "gpu_model": "H100", "gpus": 9}, IncompatibleError, "has the most, 8", "--nodes"),
        ({"instance_type": "g4dn.xlarg"}, UsageError, "unknown GPU instance type", "g4dn.xlarge"),
        ({"instance_type": "p3.2xlarge"}, IncompatibleError, "is retired", "instead"),
        ({"instance_type": "g6f.large"}, IncompatibleError, "no whole NVIDIA GPU", ""),
        ({"instance_type": "g4dn.xlarge", "gpus": 2}, IncompatibleError, "has 1 T4, wanted 2", "larger"),
        (
            {"instance_type": "g4dn.xlarge", "gpu_model": "L4"},
            IncompatibleError,
            "has T4, wanted L4",
            "change --instance-type",
        ),
        ({"instance_type": "g5g.2xlarge", "arch": "x86_64"}, UsageError, "exclude each other", ""),
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
        ({"scratch": "big:/x"}, UsageError, "not an amount of memory", "24GiB"),
        ({"env_secret": "A B"}, UsageError, "name of an object", ""),
        ({"tolerate": "a b"}, UsageError, "of a taint", ""),
        ({"node_label": ["a/b/c=d"]}, UsageError, "no label", ""),
        ({"label": ["a=b c"]}, UsageError, "no label", ""),
        ({"resource": ["cpu=1"]}, UsageError, "option of its own", "--cpu"),
        ({"resource": ["nvidia.com/gpu=1"]}, UsageError, "option of its own", "--gpus"),
        ({"resource": ["efa=1"]}, UsageError, "no resource that a pod can request", ""),
        ({"resource": ["vpc.amazonaws.com/efa=1.5"]}, UsageError, "whole number", ""),
        ({"resource": ["a b/c=1"]}, UsageError, "no resource that a pod can request", "DOMAIN/NAME"),
        (
            {"resource": ["requests.a.example/c=1"]},
            UsageError,
            "no resource that a pod can request",
            "DOMAIN/NAME",
        ),
        ({"resource": ["ephemeral-storages=1Gi"]}, UsageError, "no resource that a pod can request", ""),
        ({"resource": ["hugepages-big=1Gi"]}, UsageError, "no resource that a pod can request", ""),
        ({"resource": ["hugepages-2Mi=3Mi"]}, UsageError, "whole pages of 2Mi", ""),
        (
            {"resource": ["ephemeral-storage=9Gi"], "scratch": "1Gi:/a"},
            UsageError,
            "both request",
            "--scratch",
        ),
        ({"nodes": 100_001}, UsageError, "at most 100000 pods", ""),
        ({"nodes": 2, "retries": 2**30}, UsageError, "at most 2147483647 in all", ""),
        ({"ttl": "25000d"}, UsageError, "is too long", ""),
        ({"label": ["job-name=foo"]}, UsageError, "the server sets it", "--name"),
        ({"label": ["batch.kubernetes.io/controller-uid=1"]}, UsageError, "the server sets it", "--name"),
        ({"label": ["a..b/c=1"]}, UsageError, "no label", ""),
        ({"node_label": ["-a.b/c=1"]}, UsageError, "no label", ""),
        ({"cache": "/a/../b:/d"}, UsageError, "/a/../b has the step", "without it"),
        ({"cache": "a:/d/../dev/shm"}, UsageError, "has the step", ""),
        ({"scratch": "1Gi:/a:b"}, UsageError, "can't have `:`", ""),
        ({"queue": "q" * 64}, UsageError, "no value of a label", "63"),
        ({"env": ["..=a"]}, UsageError, "name of a variable", ""),
        ({"env": [".=a"]}, UsageError, "name of a variable", ""),
    ],
)
def test_what_can_not_be_is_refused(options, error, said, hint):
    with pytest.raises(GpukilnError) as refused:
        gpu_job(**{"image": IMAGE, **options})
    assert type(refused.value) is error
    assert said in refused.value.message
    assert hint in refused.value.hint


def test_machines_without_room_are_no_candidates():
    assert gpu_job(IMAGE, gpu_model="T4", cpu="3920m", memory="14480Mi").types[0] == "g4dn.xlarge"
    assert gpu_job(IMAGE, gpu_model="T4", cpu="3921m", memory="14480Mi").types[0] == "g4dn.2xlarge"
    assert gpu_job(IMAGE, gpu_model="T4", cpu="3920m", memory="14482Mi").types[0] == "g4dn.2xlarge"


@pytest.mark.parametrize(
    "options",
    [
        {"image": "train:latest", "allow_latest": True},
        {"image": "train", "allow_latest": True},
        {"image": "localhost:5000/a/b:1"},
        {"image": DIGEST},
        {"env": ["NVIDIA_DRIVER_CAPABILITIES=compute,utility", "EMPTY=", "A=b=c"]},
        {"memory": "15032385536B", "cpu": "0.5"},
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
        ({"mig": "1g.10gb", "gpus": 2}, "one process per device with CUDA_VISIBLE_DEVICES=UUID"),
        ({"product": "NVIDIA-A30-MIG-1g.6gb", "gpus": 2}, "a CUDA process uses one MIG device"),
        ({"mig": "1g.10gb"}, ""),
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
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


class Told:
    """What came of following a job."""

    def __init__(self):
        self.written, self.said, self.end, self.error = [], [], None, None

    def run(self, *, patience=QUICK, is_submitter=True, **options):
        cluster, job = Cluster(), gpu_job(**{"image": IMAGE, "gpu_model": "T4", **options})
        submit(cluster, job, self.said.append)
        return self.watch(cluster, job.name, patience=patience, is_submitter=is_submitter)

    def watch(self, cluster, name, *, patience=QUICK, is_submitter=True):
        try:
            self.end = follow(
                cluster,
                name,
                "",
                write=self.written.append,
                say=self.said.append,
                patience=patience,
                is_submitter=is_submitter,
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
    told = Told().run()
    assert told.written == ["one", "1 GPU"]
    assert (told.end.state, told.end.exit_code, len(told.end.attempts)) == ("succeeded", 0, 1)
    assert "submitted to default of double" in told.text
    assert told.end.attempts[0].node == "gpu-1"


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (Outcome(exit_code=3, log="Traceback\n"), 3, "exit code 3"),
        (
            Outcome(exit_code=137, reason="OOMKilled"),
            137,
            "its memory with /dev/shm reached the limit of 12Gi",
        ),
        (Outcome(exit_code=137), 137, "SIGKILL"),
        (Outcome(exit_code=127), 127, "not in the image"),
        (Outcome(exit_code=128, reason="StartError", message="exec: pythn: not found"), 128, "exec: pythn"),
    ],
)
def test_it_ends_as_its_container_does(server, outcome, code, said):
    server.add(node("gpu-1"))
    server.behave = lambda *_: outcome
    told = Told().run()
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
    told = Told().run()
    assert (told.end.state, told.end.exit_code, told.written) == ("succeeded", 0, ["a", "b"])
    first, second = told.end.attempts
    assert (first.phase, first.exit_code, second.phase) == ("interrupted", 143, "succeeded")
    assert "was interrupted on gpu-1: the kubelet ended it" in told.text


def test_failures_are_tried_again_as_often_as_asked(server):
    server.add(node("gpu-1"))
    server.behave = in_turn(Outcome(exit_code=1, log="a\n"), Outcome(exit_code=2, log="b\n"))
    told = Told().run(retries=1)
    assert (told.end.exit_code, told.end.reason) == (2, "BackoffLimitExceeded")
    assert sorted(told.written) == ["a", "b"]
    server.behave = in_turn(Outcome(exit_code=42))
    told = Told().run(retries=3, give_up=[42], name="given-up")
    assert (told.end.exit_code, told.end.reason, len(told.end.attempts)) == (42, "PodFailurePolicy", 1)


def test_why_it_waits_is_told_and_one_of_ours_that_never_ran_is_removed(server):
    server.add(node("cpu-1", gpus=0))
    told = Told().run(patience=WaitLimits(start_s=0.3, poll_s=0.02))
    assert type(told.error) is BusyError
    assert "didn't match Pod's node affinity/selector" in told.error.message
    assert told.text.count("waits for a node") == 1  # once, not at every look
    assert "the Job never ran and was deleted" in told.error.details[0]
    assert server.all("jobs") == server.all("pods") == []


def test_somebody_elses_job_that_waits_is_left(server):
    server.add(node("cpu-1", gpus=0))
    cluster = Cluster()
    submit(cluster, gpu_job(IMAGE), lambda _: None)
    told = Told().watch(cluster, "train", patience=WaitLimits(start_s=0.1, poll_s=0.02), is_submitter=False)
    assert type(told.error) is BusyError
    assert "--attach --name train" in " ".join(told.error.details)
    assert server.all("jobs")


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("ImagePullBackOff", "--pull-secret"),
        ("InvalidImageName", "NAME:TAG"),
        ("CreateContainerConfigError", "--env-secret"),
    ],
)
def test_what_can_not_start_ends_and_holds_no_gpu(server, reason, hint):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(waiting=(reason, "not found"))
    told = Told().run()
    assert type(told.error) is UnavailableError
    assert f"{reason}: not found" in told.error.message
    assert hint in told.error.hint
    assert server.all("jobs") == []


def test_a_registry_that_is_down_for_a_moment_is_waited_for(server):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(waiting=("ErrImagePull", "timeout"))

    told = Told()

    def mend():
        while "ErrImagePull" not in told.text:
            time.sleep(0.02)
        with server.changed:
            [pod] = server.all("pods")
            server.behave = lambda *_: Outcome(log="ok\n")
            server._run_pod(server.objects["pods", "default", pod["metadata"]["name"]], [])

    threading.Thread(target=mend, daemon=True).start()
    told.run(patience=WaitLimits(start_s=10, poll_s=0.02, stuck_s=5))
    assert (told.end.exit_code, told.written) == (0, ["ok"])
    assert "can't start on gpu-1: ErrImagePull: timeout" in told.text


def test_a_deadline_is_one(server):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(wait=threading.Event(), log="a\n")
    told = Told().run(timeout="1s")
    assert (told.end.state, told.end.exit_code) == ("deadline", 124)
    assert told.end.why == "its 1 s are over; raise --timeout"
    assert (told.written, told.end.notes) == (["a"], ())
    told = Told().run(timeout="1s", name="other", gpu_model="L4")
    assert "before any of its pods ran" in told.end.why


def test_a_job_that_somebody_deletes_is_missed(server):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(wait=threading.Event(), log="a\n")
    told = Told()
    somebody = threading.Thread(target=server_delete, args=(server, "train", told))
    somebody.start()
    told.run()
    somebody.join()
    assert isinstance(told.error, UnavailableError)
    assert "was deleted" in told.error.message


def server_delete(server, name, told=None):
    """At once, or when its log is followed."""
    until = time.monotonic() + 30
    while told and not told.written and time.monotonic() < until:
        time.sleep(0.02)
    with server.changed:
        server.remove("jobs", "default", name)


def test_events_tell_what_no_condition_does(server):
    server.add(node("cpu-1", gpus=0))
    cluster, job = Cluster(), gpu_job(IMAGE)
    submit(cluster, job, lambda _: None)
    [pod] = server.all("pods")
    for number, (kind, reason) in enumerate(
        [("Normal", "TriggeredScaleUp"), ("Warning", "FailedScheduling"), ("Normal", "Scheduled")]
    ):
        server.add(event(number, pod, kind, reason))
    told = Told().watch(cluster, "train", patience=WaitLimits(start_s=0.5, poll_s=0.02))
    assert told.text.count("TriggeredScaleUp: said") == 1
    assert "FailedScheduling" not in told.text
    assert "Scheduled: said" not in told.text


def test_a_job_without_pods_says_why(server):
    cluster = Cluster()
    [job] = gpu_job(IMAGE).manifests()
    made = server.add({**job, "status": {}})
    server.add(event(1, made, "Warning", "FailedCreate"))
    told = Told().watch(cluster, "train", patience=WaitLimits(start_s=0.5, poll_s=0.02))
    assert "train: FailedCreate: said" in told.text


def event(number, thing, kind, reason):
    meta = thing["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"e-{number}", "namespace": "default"},
        "involvedObject": {"kind": thing["kind"], "name": meta["name"], "uid": meta["uid"]},
        "type": kind,
        "reason": reason,
        "message": "said",
    }


def test_a_queue_must_be_there_and_what_it_waits_for_is_told(server):
    with pytest.raises(IncompatibleError, match="nor any other"):
        submit(Cluster(), gpu_job(IMAGE, queue="gpu"), lambda _: None)
    server.add_kind("kueue.x-k8s.io/v1beta2")
    server.add({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpu"}})
    with pytest.raises(IncompatibleError) as wrong:
        submit(Cluster(), gpu_job(IMAGE, queue="gpus"), lambda _: None)
    assert "did you mean gpu?" in wrong.value.hint
    assert server.all("jobs") == []
    [job] = gpu_job(IMAGE, queue="gpu").manifests()
    job["spec"]["suspend"] = True  # as Kueue's webhook does
    made = server.add({**job, "status": {}})
    server.add(
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {
                "name": "job-train",
                "ownerReferences": [{"kind": "Job", "name": "train", "uid": made["metadata"]["uid"]}],
            },
            "status": {
                "conditions": [
                    {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}
                ]
            },
        }
    )
    told = Told().watch(Cluster(), "train", patience=WaitLimits(start_s=0.2, poll_s=0.02))
    assert "waits in its queue: insufficient unused quota" in told.text
    assert "insufficient unused quota" in told.error.message


def test_a_name_is_taken_once(server):
    server.add(node("gpu-1"))
    Told().run()
    cluster, job = Cluster(), gpu_job(IMAGE)
    with pytest.raises(RefusedError) as refused:
        submit(cluster, job, lambda _: None)
    assert "which has ended" in refused.value.message
    assert "--replace" in refused.value.hint
    submit(cluster, job, lambda _: None, replace_ended=True)
    server_delete(server, "train")
    server.behave = lambda *_: Outcome(wait=threading.Event())
    submit(cluster, job, lambda _: None).end()
    with pytest.raises(RefusedError, match="which is running"):
        submit(cluster, job, lambda _: None, replace_ended=True)


def test_several_nodes_have_a_service_that_goes_with_the_job(server):
    for number in range(2):
        server.add(node(f"gpu-{number}"))

    def rank(pod, _):
        env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        return Outcome(log=f"rank {env['JOB_COMPLETION_INDEX']} of {env['NNODES']}\n")

    server.behave = rank
    told = Told().run(nodes=2)
    assert told.end.exit_code == 0
    assert sorted(told.written) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    [service] = server.all("services")
    assert service["spec"]["clusterIP"] == "None"
    server_delete(server, "train")
    assert server.all("services") == []


def test_of_several_nodes_the_first_that_failed_is_the_cause():
    def failed(pod, index, finished, code):
        return state.Attempt(pod, "n", index, "failed", exit_code=code, finished=finished)

    rows = [failed("a", 0, "10:02", 1), failed("b", 1, "10:01", 7), failed("c", 2, "10:03", 1)]
    assert state.decisive_failure(rows, several=True).pod == "b"
    assert state.decisive_failure(rows, several=False).pod == "c"
    assert state.decisive_failure([], several=True) is None


def test_a_service_of_somebody_else_stops_it_and_nothing_is_left(server):
    server.add(node("gpu-1"))
    server.add(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "train"},
            "spec": {"selector": {"a": "b"}},
        }
    )
    with pytest.raises(RefusedError, match="selects other pods"):
        submit(Cluster(), gpu_job(IMAGE, nodes=2), lambda _: None)
    assert server.all("jobs") == []


@pytest.mark.parametrize("fault", [("get", "jobs"), ("list", "pods"), ("get", "pods/log")])
@pytest.mark.parametrize("status", [0, 500, 503])
def test_every_call_may_fail_once_while_it_runs(server, fault, status):
    server.add(node("gpu-1"))
    go = threading.Event()
    server.behave = lambda *_: Outcome(log="a\nb\n", wait=go)
    threading.Timer(0.3, go.set).start()
    server.faults.append(Fault(*fault, status, skip=2 if fault[1] == "jobs" else 0))
    told = Told().run()
    assert (told.end.exit_code, told.written) == (0, ["a", "b"])
    assert not server.faults
    assert not told.end.notes


def test_a_cluster_that_stays_away_is_left_with_the_way_back(server):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(wait=threading.Event())
    server.faults += [Fault("get", "jobs", 0, skip=3) for _ in range(60)]
    told = Told().run(patience=WaitLimits(poll_s=0.02, lost_s=0.2))
    assert type(told.error) is UnavailableError
    assert "--attach --name train" in " ".join(told.error.details)
    assert "trying again" in told.text
    assert server.all("jobs")


def test_a_log_that_may_not_be_read_is_told_and_the_job_ends_as_it_does(server):
    server.add(node("gpu-1"))
    everything = [
        {"apiGroups": ["batch", ""], "resources": ["jobs", "pods"], "verbs": ["create", "get", "list"]}
    ]
    server.rules = everything
    server.behave = lambda *_: Outcome(exit_code=5, log="a\n")
    told = Told().run()
    assert told.end.exit_code == 5
    assert "the log of train-" in told.end.notes[0]


def test_what_is_forbidden_is_told_at_once(server):
    server.rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get"]}]
    told = Told().run()
    assert "pods is forbidden" in told.error.message
    assert "k8s.rbac" in told.error.hint
    assert "--attach" in " ".join(told.error.details)


def test_an_answer_that_is_lost_is_looked_for(server, monkeypatch):
    server.add(node("gpu-1"))
    create = Cluster.create

    def lost(self, manifest, **options):
        create(self, manifest, **options)
        raise UnavailableError("the connection was cut")

    monkeypatch.setattr(Cluster, "create", lost)
    assert Told().run().end.exit_code == 0
    monkeypatch.undo()


def test_a_job_that_could_not_be_created_is_not_there(server):
    server.faults.append(Fault("create", "jobs", 0))
    with pytest.raises(UnavailableError):
        submit(Cluster(), gpu_job(IMAGE), lambda _: None)
    assert server.all("jobs") == []
    server.faults.append(Fault("create", "services", 500))
    with pytest.raises(UnavailableError):
        submit(Cluster(), gpu_job(IMAGE, nodes=2), lambda _: None)
    assert server.all("jobs") == []


def test_a_service_that_goes_with_the_job_before_is_made_again(server):
    """The garbage collector removes what a Job owned some time after the Job (propagation Background)."""
    service, _ = gpu_job(IMAGE, nodes=2).manifests()
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "of-the-one-before"}
    server.add({**service, "metadata": {**service["metadata"], "ownerReferences": [owner]}})

    def collect():
        with server.changed:
            server.remove("services", "default", service["metadata"]["name"])

    threading.Timer(0.3, collect).start()
    submit(Cluster(), gpu_job(IMAGE, nodes=2), lambda _: None)
    [job], [there] = server.all("jobs"), server.all("services")
    assert [one["uid"] for one in there["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]


def test_the_rights_are_enough_and_the_least(server):
    rights = [(right, one) for right in COMMAND_RULES["job"] for one in right.resources]
    server.rules = [
        {"apiGroups": [right.group], "resources": [one], "verbs": [*right.verbs], "namespace": "default"}
        for right, one in rights
    ]
    server.add_kind("kueue.x-k8s.io/v1beta2")
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpu"}}
    server.add(queue)
    for number in range(2):
        server.add(node(f"gpu-{number}"))
    server.behave = lambda *_: Outcome(log="a\n")
    adapt_to_namespace(Cluster(), gpu_job(IMAGE), print)
    assert Told().run(nodes=2, queue="gpu").end.exit_code == 0
    assert "did you mean train?" in Told().watch(Cluster(), "trian").error.hint
    with pytest.raises(IncompatibleError):
        submit(Cluster(), gpu_job(IMAGE, name="lost", queue="other"), lambda _: None)
    soon = WaitLimits(start_s=0.3, poll_s=0.02)
    assert type(Told().run(name="never", gpu_model="L4", patience=soon).error) is BusyError
    [job] = gpu_job(IMAGE, name="queued").manifests()
    server.add({**job, "spec": {**job["spec"], "suspend": True}, "status": {}})
    assert type(Told().watch(Cluster(), "queued", patience=soon).error) is BusyError
    used = {(group, resource, verb) for verb, group, resource, _ in server.calls}
    assert used == {(right.group, one, verb) for right, one in rights for verb in right.verbs}


# --- Pod Security -----------------------------------------------------------------------------------------


def enforce(server, level):
    labels = {"pod-security.kubernetes.io/enforce": level}
    server.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": labels}})


def test_pods_of_the_restricted_level():
    job = gpu_job(IMAGE, security="restricted", run_as="1000:2000", cache="models:/m", scratch="1Gi:/s")
    spec = job.manifests()[-1]["spec"]["template"]["spec"]
    # kubernetes.io/docs/concepts/security/pod-security-standards, restricted
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 2000,
        "fsGroup": 2000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert [one["securityContext"] for one in spec["containers"]] == [
        {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    ]
    assert not gpu_job(IMAGE, security="restricted", run_as="1000").notes()[1:]
    assert any("--run-as UID" in one for one in gpu_job(IMAGE, security="restricted").notes())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"security": "restricted", "cache": "/models:/models"}, IncompatibleError, "no hostPath"),
        ({"security": "restricted", "run_as": "0"}, IncompatibleError, "is root"),
        ({"security": "baseline"}, UsageError, "baseline"),
        ({"run_as": "ann"}, UsageError, "UID or UID:GID"),
        ({"run_as": "1000:"}, UsageError, "UID or UID:GID"),
        ({"run_as": str(2**31)}, UsageError, "2147483647"),
    ],
)
def test_what_restricted_pods_can_not_have(options, error, message):
    with pytest.raises(error, match=message):
        gpu_job(IMAGE, **options)


def test_a_namespace_that_enforces_the_restricted_level_gets_such_pods(server):
    enforce(server, "restricted")
    server.add(node("gpu-1"))
    said = []
    job = adapt_to_namespace(Cluster(), gpu_job(IMAGE, gpu_model="T4"), said.append)
    assert job.security == "restricted"
    assert "default enforces Pod Security restricted" in said[0]
    submit(Cluster(), job, said.append)
    assert Told().watch(Cluster(), job.name).end.exit_code == 0


@pytest.mark.parametrize("level", ["privileged", "baseline", "restricted"])
def test_the_level_decides_on_folders_of_the_node(server, level):
    enforce(server, level)
    job = gpu_job(IMAGE, cache="/models:/models")
    if level == "privileged":
        assert adapt_to_namespace(Cluster(), job, print) is job
    else:
        with pytest.raises(IncompatibleError, match=f"default enforces Pod Security {level}"):
            adapt_to_namespace(Cluster(), job, print)


def test_without_the_right_the_level_is_not_known_and_the_job_goes_as_it_is(server):
    server.rules, said, job = [], [], gpu_job(IMAGE)
    assert adapt_to_namespace(Cluster(), job, said.append) is job
    assert said[0].startswith("the Pod Security level of default is unknown")


def test_pods_that_the_level_refuses_end_the_following(server):
    enforce(server, "restricted")
    told = Told().run(patience=WaitLimits(start_s=None, poll_s=0.02))
    assert type(told.error) is UnavailableError
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation' in told.error.message
    assert "--security restricted" in told.error.hint
    assert Cluster().get("Job", "train") is None  # nothing of it ran


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ('error looking up service account default/ann: serviceaccount "ann" not found', "--service-account"),
        ('pod rejected: RuntimeClass "nvidia" not found', "--runtime-class"),
        ("denied the request: no image of that registry", "kubectl describe job"),
    ],
)
def test_pods_that_are_refused_again_and_again_end_the_following(server, monkeypatch, why, hint):
    monkeypatch.setattr(server, "refuse_pod", lambda *_: why)
    told = Told().run(patience=WaitLimits(start_s=None, poll_s=0.02, stuck_s=0.05))
    assert f'the server keeps rejecting its pods: Error creating: pods "train-abcde" is forbidden: {why}' in (
        told.error.message
    )
    assert hint in told.error.hint


def test_a_quota_that_is_used_up_is_waited_for(server, monkeypatch):
    why = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8"
    monkeypatch.setattr(server, "refuse_pod", lambda *_: why)
    told = Told().run(patience=WaitLimits(start_s=0.4, poll_s=0.02, stuck_s=0.05))
    assert type(told.error) is BusyError
    assert "exceeded quota" in told.text


def test_an_image_of_root_names_the_option(server):
    message = "container has runAsNonRoot and image will run as root"  # pkg/kubelet/kuberuntime
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(waiting=("CreateContainerConfigError", message))
    told = Told().run(security="restricted")
    assert "--run-as UID" in told.error.hint


# --- the command ------------------------------------------------------------------------------------------

WORDS = ("--image", IMAGE, "--gpus", "1", "--gpu-model", "T4", "--cpu", "3500m", "--memory", "14Gi")


@pytest.fixture
def typed(capsys, monkeypatch):
    monkeypatch.setattr("gpukiln.kubernetes.follow.POLL_S", 0.02)

    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            invoke(["k8s.job", *words])
        shown = capsys.readouterr()
        assert (ended.value.code or 0) == code, shown
        return shown

    return run


def test_the_command_of_the_example_renders(typed):
    rest = ("--shm", "2Gi", "--timeout", "2h", "--", "python", "train.py")
    assert typed(*WORDS, *rest).out == (GOLDEN / "k8s-job-simple.yaml").read_text()
    said = json.loads(typed(*WORDS, "--json", *rest).out)
    assert (said["schema"], said["name"], said["end"]) == ("k8s.job/1", "train", None)
    assert said["instance_types"][0] == "g4dn.xlarge"


def test_a_file_is_written_and_a_second_run_says_what_changed(typed, tmp_path):
    folder = tmp_path / "out"
    assert "new" in typed(*WORDS, "--output", str(folder)).err
    assert "same" in typed(*WORDS, "--output", str(folder)).err
    assert "changed" in typed(*WORDS, "--output", str(folder), "--retries", "1").err
    assert [one.name for one in folder.iterdir()] == ["train.yaml"]
    assert "is a file" in typed(*WORDS, "--output", str(folder / "train.yaml"), code=2).err


def test_it_is_applied_and_written_as_the_namespace_admits_it(typed, server, tmp_path):
    enforce(server, "restricted")
    server.add(node("gpu-1"))
    assert "securityContext" not in typed(*WORDS).out  # without a cluster nothing is known of namespaces
    done = typed(*WORDS, "--apply", "--output", str(tmp_path))
    assert "default enforces Pod Security restricted" in done.err
    assert "allowPrivilegeEscalation: false" in (tmp_path / "train.yaml").read_text()


def test_it_is_applied_followed_and_exits_as_the_job_does(typed, server):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(exit_code=3, log="hello\n")
    done = typed(*WORDS, "--apply", "--", "python", "train.py", code=3)
    assert done.out == "hello\n"
    assert "job train: failed: BackoffLimitExceeded" in done.err
    assert "which has ended" in typed(*WORDS, "--apply", code=6).err
    done = typed(*WORDS, "--apply", "--replace", "--json", code=3)
    said = json.loads(done.out)
    assert (said["end"]["state"], said["end"]["exit_code"], said["context"]) == ("failed", 3, "double")
    assert said["end"]["attempts"][0]["exit_code"] == 3
    assert "hello" in done.err
    assert typed("--attach", "--name", "train", code=3).out == "hello\n"
    assert "did you mean train?" in typed("--attach", "--name", "trian", code=4).err


def test_the_server_is_asked_and_nothing_kept(typed, server):
    assert "would take it" in typed(*WORDS, "--nodes", "2", "--apply", "--dry-run").err
    assert server.all("jobs") == server.all("services") == []
    assert "not found" in typed(*WORDS, "--namespace", "nowhere", "--apply", "--dry-run", code=4).err


def test_it_is_left_and_the_way_back_told(typed, server):
    server.add(node("cpu-1", gpus=0))
    done = typed(*WORDS, "--apply", "--detach")
    assert "follow it: invoke k8s.job --attach --name train --namespace default --context double" in done.err
    assert server.all("jobs")


@pytest.mark.parametrize(("options", "runs_s"), [((), 0), ((), 0.3), (("--replace", "--detach"), 0)])
def test_killed_anywhere_and_typed_again_it_is_as_if_never_killed(typed, server, tmp_path, options, runs_s):
    """What is there when the command is typed again still runs, or has ended meanwhile."""
    command = (*WORDS, "--nodes", "2", "--apply", *options)
    home = tmp_path / "home"

    def empty():
        shutil.rmtree(home, ignore_errors=True)
        with server.changed:
            server.objects = {key: one for key, one in server.objects.items() if key[0] == "namespaces"}
            server.granted.clear()
        go = threading.Event()
        server.behave = lambda *_: Outcome(log="hello\n", wait=go)
        for number in range(2):
            server.add(node(f"gpu-{number}"))
        if "--replace" in options:
            [job] = gpu_job(IMAGE).manifests()
            failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": ""}
            server.add({**job, "status": {"conditions": [failed]}})
        threading.Timer(runs_s, go.set).start()

    def state(shown):
        until = time.monotonic() + 10
        while not all(one["status"].get("conditions") for one in server.all("jobs")):
            assert time.monotonic() < until
            time.sleep(0.02)
        pods = [one["status"] for one in server.all("pods")]
        text = mask_varying([server.all("jobs"), server.all("services"), pods])
        return sorted(shown.out.splitlines()), text, files_in(home)

    empty()
    undisturbed = state(typed(*command))
    assert len(json.loads(undisturbed[1])[0]) == 1
    empty()
    steps = []
    for step in kill_at_each_step(lambda: typed(*command), home):
        if step != "not killed":
            assert state(typed(*command)) == undisturbed, step
        steps.append(step)
        empty()
    assert len(steps) > 7


def test_a_job_that_an_earlier_run_submitted_is_continued_by_the_same_command_alone(typed, server):
    server.add(node("gpu-1"))
    go = threading.Event()
    server.behave = lambda *_: Outcome(log="hello\n", wait=go)
    submit(Cluster(), gpu_job(IMAGE, gpu_model="T4", cpu="3500m", memory="14Gi"), lambda _: None)
    assert "which is running" in typed(*WORDS, "--retries", "1", "--apply", code=6).err
    go.set()
    done = typed(*WORDS, "--apply")
    assert (done.out, "an earlier run submitted it" in done.err) == ("hello\n", True)
    assert "which has ended" in typed(*WORDS, "--apply", code=6).err


def test_a_job_is_submitted_where_nothing_can_be_written(typed, server, monkeypatch, tmp_path):
    server.add(node("gpu-1"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "file"))
    assert "could not find its Job again: " in typed(*WORDS, "--apply").err


@pytest.mark.parametrize("delete", [False, True])
def test_ctrl_c_leaves_it_or_removes_it(typed, server, monkeypatch, delete):
    server.add(node("gpu-1"))
    server.behave = lambda *_: Outcome(wait=threading.Event())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpukiln.kubernetes.follow._Follower._drain", interrupted)
    done = typed(*WORDS, "--apply", *(["--delete-on-interrupt"] if delete else []), code=130)
    assert bool(server.all("jobs")) is not delete
    assert ("job train: removed" if delete else "follow it: ") in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--apply", "--attach"), "--attach follows one"),
        (("--detach",), "--detach is for --apply"),
        (("--replace",), "--replace is for --apply"),
        (("--dry-run",), "--dry-run is for --apply"),
        (("--start-within", "1m"), "is for a Job that is followed"),
        (("--apply", "--detach", "--delete-on-interrupt"), "is for a Job that is followed"),
        (("--attach",), "--attach needs --name"),
        (("--give-up", "x"), "--give-up 'x'"),
        (("--gpus", "one"), "is not a whole number"),
        (("--gpu-modle", "T4"), "--gpu-model"),
    ],
)
def test_what_is_typed_wrong_is_told(typed, words, said):
    assert said in typed("--image", IMAGE, *words, code=2).err


def test_without_a_cluster_the_error_is_one(typed, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "no kubeconfig" in typed(*WORDS, "--apply", code=4).err
