"""Pods of a cluster without a fault, and the faults that the checks of a pod must find."""

from typing import Any

from tests.support.host_runner_faults import Data, Fault

UUIDS = ("GPU-1", "GPU-2")


def pod_of(*gpus: str) -> Data:
    return {
        "name": "gpukiln-test",
        "asked": len(gpus),
        "node": "n-1",
        "ran": True,
        "why": "",
        "said": "" if gpus else "No devices were found",
        "smi_exit": 0 if gpus else 6,
        "gpus": [*gpus],
        "products": ["Tesla T4"] if gpus else [],
        "named": [*gpus] or ["void"],
    }


def pod() -> Data:
    """What gpukiln/kubernetes/cluster_verification.py finds on a cluster with two GPUs."""
    return {
        "cluster": {
            "context": "c",
            "kubernetes": "1.34",
            "selector": "nvidia.com/gpu.present=true",
            "resource": "nvidia.com/gpu",
            "free": 2,
            "sharing": "",
            "reason": "",
            "nodes": [
                {
                    "name": "n-1",
                    "capacity": 2,
                    "allocatable": 2,
                    "labelled": 2,
                    "product": "Tesla-T4",
                    "problems": [],
                    "plugin": {"name": "kube-system/plugin", "problem": ""},
                    "exporter": {"name": "monitoring/dcgm-exporter", "problem": ""},
                }
            ],
            "pods": {"granted": pod_of(UUIDS[0]), "other": pod_of(UUIDS[1]), "without": pod_of()},
            "counted": [pod_of(*UUIDS)],
            "eviction": {"pod": "kube-system/plugin", "offered": 2, "seconds": 9.0, "problem": ""},
            "restart": {"offered": 2, "seconds": 80.0, "problem": ""},
        }
    }


def node(**values: Any) -> Fault:
    return lambda data: data["cluster"]["nodes"][0].update(values)


def of(name: str, **values: Any) -> Fault:
    return lambda data: data["cluster"]["pods"][name].update(values)


POD_FAULTS: dict[str, list[tuple[Fault, str]]] = {
    "cluster.allocatable": [
        (node(allocatable=1), "n-1 offers 1 of 2"),
        (node(allocatable=0, capacity=0, labelled=None), "n-1 offers 0 of 0"),
        (node(problems=["Ready is False: KubeletNotReady"]), "Ready is False"),
        (lambda d: d["cluster"].update(nodes=[]), "no node has nvidia.com/gpu.present=true"),
    ],
    "cluster.device-plugin": [
        (node(plugin={"name": "", "problem": "none of its pods is on this node"}), "none of its pods"),
    ],
    "cluster.dcgm": [
        (node(exporter={"name": "monitoring/dcgm-exporter", "problem": "CrashLoopBackOff: x"}), "CrashLoop"),
    ],
    "cluster.labels": [
        (node(product="NVIDIA-L4"), "the label says NVIDIA-L4, nvidia-smi Tesla-T4"),
        (of("granted", products=[]), "nvidia-smi nothing"),
    ],
    "cluster.gpu-counts": [
        (lambda d: d["cluster"]["counted"][0].update(gpus=["GPU-1"]), "2 GPUs in its limits sees 1: GPU-1"),
        (
            lambda d: d["cluster"]["counted"][0].update(ran=False, why="Insufficient nvidia.com/gpu"),
            "a pod with 2 GPUs in its limits: Insufficient",
        ),
    ],
    "cluster.plugin-returns": [
        (lambda d: d["cluster"]["eviction"].update(problem="no pod came back"), "no pod came back"),
    ],
    "cluster.rejoins": [
        (lambda d: d["cluster"]["restart"].update(problem="it is not Ready"), "it is not Ready"),
    ],
    "cluster.pod-starts": [(of("granted", ran=False, why="Insufficient nvidia.com/gpu"), "Insufficient")],
    "cluster.nvidia-smi": [
        (of("granted", smi_exit=127, said="nvidia-smi: not found"), "exits 127: nvidia-smi: not found"),
        (of("granted", gpus=[]), "lists no GPU"),
    ],
    "cluster.view-is-grant": [
        (of("granted", gpus=[*UUIDS]), "a pod with 1 GPUs in its limits sees 2"),
        (of("other", gpus=["GPU-3"]), "granted GPU-2, seen GPU-3"),
    ],
    "cluster.two-pods": [(of("other", gpus=["GPU-1"]), "both pods have GPU-1")],
    "cluster.isolated": [(of("without", gpus=["GPU-1"], smi_exit=0), "it sees GPU-1")],
}
