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
        "named": [*gpus] or ["void"],
    }


def pod() -> Data:
    """What gpukiln/kubernetes/cluster_verification.py finds on a cluster with two GPUs."""
    return {
        "cluster": {
            "context": "c",
            "selector": "nvidia.com/gpu.present=true",
            "resource": "nvidia.com/gpu",
            "free": 2,
            "sharing": "",
            "nodes": [{"name": "n-1", "capacity": 2, "allocatable": 2, "labelled": 2, "problems": []}],
            "pods": {"granted": pod_of(UUIDS[0]), "other": pod_of(UUIDS[1]), "without": pod_of()},
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
