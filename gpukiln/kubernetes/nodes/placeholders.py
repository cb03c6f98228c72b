"""Nodes that wait for work in working hours: pods that hold them, and make room for every other pod.

They come and go with a CronJob, which knows time zones: its Job's deadline is the end of the hours. When they
are gone the nodes are empty, and Karpenter takes them away. A pod that needs the room pushes one of them
aside; its Job makes another, for which Karpenter starts the next node that waits.
"""

from __future__ import annotations

from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.catalog.instance_types import instance_type
from gpukiln.kubernetes.machines import GPU, INSTANCE_TYPE
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.nodes.group import NodeGroup

NAMESPACE = "kube-system"
PRIORITY = -10  # below all that says nothing; cluster-autoscaler ignores what is below it
LATE_S = 3600  # a controller that was away so long starts them all the same


def objects(group: NodeGroup) -> list[Manifest]:
    name = f"{group.name}-waiting"
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "gpukiln"}
    types = next(iter(group.by_gpu().values()))
    gpus = min(instance_type(name).gpus for name in types)
    container = {
        "name": "wait",
        "image": load_add_ons()["pause"].image,
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi"},
            "limits": {"memory": "16Mi", GPU: str(gpus)},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "priorityClassName": name,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": INSTANCE_TYPE, "operator": "In", "values": list(types)}
                            ]
                        }
                    ]
                }
            }
        },
        "containers": [container],
    }
    pushed_aside = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    job = {
        "parallelism": group.keep,
        "backoffLimit": 6,
        "podFailurePolicy": {"rules": [pushed_aside]},
        "activeDeadlineSeconds": group.hours.duration_min * 60,
        "ttlSecondsAfterFinished": 60,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name, "labels": labels},
            "value": PRIORITY,
            "preemptionPolicy": "Never",
            "description": "Nodes that wait for work; every other pod goes first.",
        },
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": {
                "schedule": group.hours.starts,
                "timeZone": group.hours.zone,
                "concurrencyPolicy": "Replace",
                "startingDeadlineSeconds": LATE_S,
                "successfulJobsHistoryLimit": 0,
                "failedJobsHistoryLimit": 1,
                "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
            },
        },
    ]
