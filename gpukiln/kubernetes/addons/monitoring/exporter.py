"""dcgm-exporter on every GPU node: values of its chart, and how Prometheus gets at what it exports."""

from __future__ import annotations

from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.kubernetes.addons.monitoring.metrics import counters
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.machines import GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest

RELEASE = "dcgm-exporter"
CHART_LABELS = {"app.kubernetes.io/name": "dcgm-exporter", "app.kubernetes.io/instance": RELEASE}
INTERVAL = "30s"
INSTANCE_TYPE = "__meta_kubernetes_node_label_node_kubernetes_io_instance_type"
NODE = "__meta_kubernetes_pod_node_name"


def values(settings: Settings) -> dict[str, Any]:
    repository, _, tag = str(load_add_ons()["dcgm_exporter"].image).rpartition(":")
    shared = {sharing.strategy for sharing in (settings.sharing, *settings.named_sharing.values())}
    return {
        "image": {"repository": repository, "tag": tag},
        # NVIDIA_VISIBLE_DEVICES is in the image; the toolkit listens to it where a pod has SYS_ADMIN, which
        # profiling needs as well.
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]},
        },
        "nodeSelector": {GPU_PRESENT: "true"},
        "tolerations": [{"operator": "Exists"}],
        # Else only one of the pods that share a GPU is named (--kubernetes-virtual-gpus).
        **(
            {"extraEnv": [{"name": "KUBERNETES_VIRTUAL_GPUS", "value": "true"}]}
            if shared & {"time-slicing", "mps"}
            else {}
        ),
        "serviceMonitor": {"enabled": False},  # ours says more, and is there only where its kind is known
        "customMetrics": counters(),
    }


def monitor(settings: Settings) -> Manifest:
    """What Prometheus' operator scrapes.

    The pod that a GPU was given to is in exported_pod and exported_namespace: pod and namespace are the
    exporter's own, and of a GPU that nobody has, the only ones.
    """
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {
            "name": RELEASE,
            "namespace": settings.monitoring_namespace,
            "labels": dict(settings.monitoring_labels),
        },
        "spec": {
            "attachMetadata": {"node": True},  # for the instance type, which has a price
            "namespaceSelector": {"matchNames": [settings.namespace]},
            "selector": {"matchLabels": CHART_LABELS},
            "endpoints": [
                {
                    "port": "metrics",
                    "interval": INTERVAL,
                    "honorLabels": False,
                    "relabelings": [
                        {"sourceLabels": [NODE], "targetLabel": "node"},
                        {"sourceLabels": [INSTANCE_TYPE], "targetLabel": "instance_type"},
                    ],
                }
            ],
        },
    }


def scrape(settings: Settings) -> dict[str, Any]:
    """The same for a Prometheus without the operator, as a job of its scrape_configs."""
    name = "__meta_kubernetes_pod_label_app_kubernetes_io_name"
    return {
        "job_name": RELEASE,
        "scrape_interval": INTERVAL,
        "kubernetes_sd_configs": [
            {
                "role": "pod",
                "namespaces": {"names": [settings.namespace]},
                "attach_metadata": {"node": True},
            }
        ],
        "relabel_configs": [
            {"source_labels": [name], "regex": RELEASE, "action": "keep"},
            {
                "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                "regex": "metrics",
                "action": "keep",
            },
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {"source_labels": [NODE], "target_label": "node"},
            {"source_labels": [INSTANCE_TYPE], "target_label": "instance_type"},
        ],
    }
