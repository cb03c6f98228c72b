"""The Grafana dashboard of the exporter's metrics and of the recording rules."""

from __future__ import annotations

import json
from typing import Any

from gpukiln.kubernetes.addons.monitoring.metrics import METRICS, Metric
from gpukiln.kubernetes.addons.monitoring.records import GPUS, UNPRICED, USD
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import Manifest

UID = "gpukiln-gpus"
SCHEMA_VERSION = 39  # of Grafana 11; later releases migrate the dashboard to theirs
PANEL_WIDTH, PANEL_HEIGHT = 12, 8  # in units of Grafana's grid, which is 24 wide: two panels in a row
_SELECTED = 'node=~"$node",gpu=~"$gpu"'
# A variable of the dashboard: the uid of a data source differs in each Grafana.
_PROMETHEUS = {"type": "prometheus", "uid": "${prometheus}"}


def text(settings: Settings) -> str:
    return json.dumps(dashboard(settings), indent=2) + "\n"


def config_map(settings: Settings) -> Manifest:
    """The dashboard as a ConfigMap with the label by which kube-prometheus-stack's sidecar loads it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{UID}-dashboard",
            "namespace": settings.monitoring_namespace,
            "labels": {"grafana_dashboard": "1"},
        },
        "data": {f"{UID}.json": text(settings)},
    }


def dashboard(settings: Settings) -> dict[str, Any]:
    shown = (
        ("GPUs by namespace", GPUS, "short", "{{exported_namespace}}"),
        ("USD an hour by namespace, at on-demand prices", USD, "currencyUSD", "{{exported_namespace}}"),
        (
            "USD of the last day by namespace",
            "gpukiln:namespace_usd:1d",
            "currencyUSD",
            "{{exported_namespace}}",
        ),
        (
            "GPU-hours of the last day by namespace",
            "gpukiln:namespace_gpu_hours:1d",
            "h",
            "{{exported_namespace}}",
        ),
        ("GPUs in use without a known price", UNPRICED, "short", "{{instance_type}}"),
        (
            "Firing alerts",
            'ALERTS{alertname=~"Gpu.*",alertstate="firing"}',
            "short",
            "{{alertname}} {{node}}",
        ),
        *(
            (metric.title, _query(metric), metric.unit or "short", "{{node}} GPU {{gpu}} {{GPU_I_ID}}")
            for metric in METRICS
        ),
    )
    return {
        "uid": UID,
        "title": f"GPUs of {settings.cluster}",
        "tags": ["gpu", "gpukiln"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "prometheus", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                _variable("node", "Node", "label_values(DCGM_FI_DEV_GPU_TEMP, node)"),
                _variable("gpu", "GPU", 'label_values(DCGM_FI_DEV_GPU_TEMP{node=~"$node"}, gpu)'),
            ]
        },
        "panels": [_panel(number, *row) for number, row in enumerate(shown)],
    }


def _query(metric: Metric) -> str:
    series = f"{metric.name}{{{_SELECTED}}}"
    if metric.kind == "counter":
        # A counter since the driver was loaded says little; its increase does.
        return f"increase({series}[1h])"
    return series if metric.scale == 1 else f"{series} * {metric.scale:g}"


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _PROMETHEUS,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # 2: on time range change
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, title: str, expr: str, unit: str, legend: str) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": f"{title}, increase in an hour" if expr.startswith("increase(") else title,
        "datasource": _PROMETHEUS,
        "gridPos": {
            "x": number % 2 * PANEL_WIDTH,
            "y": number // 2 * PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "h": PANEL_HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": _PROMETHEUS, "expr": expr, "legendFormat": legend}],
    }
