"""dcgm-exporter on every GPU node: values of its chart, and how Prometheus scrapes it."""

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
        # The exporter gets all GPUs by NVIDIA_VISIBLE_DEVICES, which its image sets. On isolated nodes the
        # container toolkit honours that variable only for pods with SYS_ADMIN; profiling metrics
        # (DCGM_FI_PROF_*) need SYS_ADMIN as well.
        "securityContext": {
            # Root, as in the chart's own values: for other users an added capability is not effective.
            "runAsNonRoot": False,
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]},
        },
        "nodeSelector": {GPU_PRESENT: "true"},
        # Metrics matter most on nodes with problems, which may have any taint.
        "tolerations": [{"operator": "Exists"}],
        # Without it the metrics name only one of the pods that share a GPU (--kubernetes-virtual-gpus).
        **(
            {"extraEnv": [{"name": "KUBERNETES_VIRTUAL_GPUS", "value": "true"}]}
            if shared & {"time-slicing", "mps"}
            else {}
        ),
        "serviceMonitor": {
            "enabled": False
        },  # `monitor` below replaces it: relabels more, and is applied only if the CRD exists
        "customMetrics": counters(),
    }


def monitor(settings: Settings) -> Manifest:
    """The ServiceMonitor for the Prometheus Operator.

    The labels exported_pod and exported_namespace name the pod that has the GPU; pod and namespace are those
    of the exporter. A GPU without a pod has only the latter.
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
            "attachMetadata": {"node": True},  # for the node's instance type: records.py has its price
            "namespaceSelector": {"matchNames": [settings.namespace]},
            "selector": {"matchLabels": CHART_LABELS},
            "endpoints": [
                {
                    "port": "metrics",
                    "interval": INTERVAL,
                    # Prometheus renames the exporter's own labels pod and namespace to exported_pod and
                    # exported_namespace.
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
    """The same as a job of scrape_configs, for Prometheus without the operator."""
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
