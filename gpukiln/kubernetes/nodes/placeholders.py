"""Placeholder pods that keep nodes running in working hours, and that every other pod preempts.

A CronJob, which has a time zone, creates them; the deadline of its Job is the end of the hours. Without them
the nodes are empty, and Karpenter removes them. A pod that needs their resources preempts one of them; the
Job then creates another, for which Karpenter starts the next node.
"""

from __future__ import annotations

from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.catalog.instance_types import instance_type
from gpukiln.kubernetes.machines import GPU, INSTANCE_TYPE
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.nodes.group import NodeGroup

NAMESPACE = "kube-system"
# Pods without a class have priority 0. cluster-autoscaler starts no nodes for pods below -10
# (--expendable-pods-priority-cutoff).
PRIORITY = -10
LATE_S = 3600  # the Job still starts if the controller was down for up to this long


def objects(group: NodeGroup) -> list[Manifest]:
    name = f"{group.name}-waiting"
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "gpukiln"}
    types = next(iter(group.by_gpu().values()))
    # All GPUs of the smallest type: with fewer, two placeholders would share a node.
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
        # A placeholder has nothing to finish; the pod that preempts it must not wait.
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
    preempted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    job = {
        "parallelism": group.keep,
        "backoffLimit": 6,
        # Each preemption would otherwise use up backoffLimit, and the Job would fail.
        "podFailurePolicy": {"rules": [preempted]},
        # The end of the hours: the Job and its pods end.
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
            # A placeholder preempts nothing itself.
            "preemptionPolicy": "Never",
            "description": "Placeholders on nodes that wait for work; every other pod preempts them.",
        },
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": {
                "schedule": group.hours.starts,
                "timeZone": group.hours.zone,
                # If yesterday's Job is still there, today's takes its place.
                "concurrencyPolicy": "Replace",
                "startingDeadlineSeconds": LATE_S,
                "successfulJobsHistoryLimit": 0,
                "failedJobsHistoryLimit": 1,
                "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
            },
        },
    ]
