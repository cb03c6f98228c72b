"""dcgm-exporter's chart, and what kube-state-metrics has to tell beside it."""

from __future__ import annotations

from typing import Any

from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.addons.monitoring.metrics import counters
from gpukiln.kubernetes.addons.settings import PRESENT, Settings
from gpukiln.kubernetes.machines import INSTANCE_TYPE, PRODUCT
from gpukiln.kubernetes.manifest import dump

VALUES, RELEASE = "monitoring/dcgm-exporter-values.yaml", "dcgm-exporter"
# What the operator puts on every series for the pod that was asked, the exporter's: for a GPU that no pod has
# it would stand where the GPU's pod stands.
OF_THE_EXPORTER = "namespace|pod|container|service|endpoint"


def values(settings: Settings) -> str:
    content: dict[str, Any] = {
        "nodeSelector": {PRESENT: "true"},
        "tolerations": [{"operator": "Exists"}],  # a sick or cordoned node is watched, too
        "securityContext": {"runAsNonRoot": False, "runAsUser": 0, "capabilities": {"add": ["SYS_ADMIN"]}},
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "serviceMonitor": {
            "enabled": True,
            "interval": "15s",
            "honorLabels": True,  # pod, namespace and container are those that have the GPU
            "additionalLabels": dict(settings.monitoring_labels),
            "relabelings": [
                {"action": "labeldrop", "regex": OF_THE_EXPORTER},
                {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
            ],
        },
        "customMetrics": counters(),
    }
    return helm.values(
        "dcgm_exporter",
        content,
        "SYS_ADMIN is what DCGM wants for its profiling metrics (DCGM_FI_PROF_*).",
        "customMetrics is the whole list: the exporter adds nothing to it.",
    )


def state_values() -> str:
    """Values of kube-prometheus-stack: labels of nodes that its kube-state-metrics leaves out by itself."""
    allowed = f"nodes=[{INSTANCE_TYPE},{PRODUCT}]"
    return dump(
        {"kube-state-metrics": {"metricLabelsAllowlist": [allowed]}},
        head=(
            "Beside the values that you give the chart kube-prometheus-stack: without these labels nothing",
            "knows what a node costs.",
        ),
    )
