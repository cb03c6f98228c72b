"""A dashboard of Grafana, made of the metrics that the exporter is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import dump

CHOSEN = 'node=~"$node", gpu=~"$gpu"'
WIDTH, HEIGHT = 24, 8
UID = "gpukiln-gpus"

Unit = Literal[
    "percent", "percentunit", "celsius", "watt", "mbytes", "Bps", "rotmhz", "currencyUSD", "none", "h"
]


@dataclass(frozen=True)
class Panel:
    """One picture.

    Args:
        width: Of 24.
        queries: Expression and legend.
    """

    title: str
    unit: Unit
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 12
    description: str = ""


ONE = "{{node}} {{gpu}}"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Cluster",
        (
            Panel("GPUs", "none", (("cluster:gpus:sum", "GPUs"),), "stat", 4),
            Panel("Allocated", "none", (("cluster:gpus_allocated:sum", "allocated"),), "stat", 4),
            Panel("Costs an hour", "currencyUSD", (("cluster:gpu_usd_per_hour:sum", "USD"),), "stat", 4),
            Panel(
                "Alerts",
                "none",
                (('count(ALERTS{alertname=~"Gpu.*", alertstate="firing"}) or vector(0)', "firing"),),
                "stat",
                4,
            ),
            Panel(
                "Idle and paid for",
                "none",
                (('count(ALERTS{alertname="GpuIdle", alertstate="firing"}) or vector(0)', "GPUs"),),
                "stat",
                4,
                "GPUs that a pod has and does not use.",
            ),
            Panel(
                "Drivers",
                "none",
                (("count by (DCGM_FI_DRIVER_VERSION) (DCGM_FI_DEV_GPU_TEMP)", "{{DCGM_FI_DRIVER_VERSION}}"),),
                "stat",
                4,
            ),
        ),
    ),
    (
        "By namespace",
        (
            Panel("GPUs", "none", (("namespace:gpus_allocated:sum", "{{namespace}}"),), width=8),
            Panel("GPU hours of an hour", "h", (("namespace:gpu_hours:sum1h", "{{namespace}}"),), width=8),
            Panel("USD of an hour", "currencyUSD", (("namespace:gpu_usd:sum1h", "{{namespace}}"),), width=8),
        ),
    ),
    (
        "Use",
        (
            Panel("Engine active", "percentunit", ((f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{CHOSEN}}}", ONE),)),
            Panel("Utilisation", "percent", ((f"DCGM_FI_DEV_GPU_UTIL{{{CHOSEN}}}", ONE),)),
            Panel(
                "Tensor cores active", "percentunit", ((f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{CHOSEN}}}", ONE),)
            ),
            Panel("Memory active", "percentunit", ((f"DCGM_FI_PROF_DRAM_ACTIVE{{{CHOSEN}}}", ONE),)),
            Panel("Memory used", "mbytes", ((f"DCGM_FI_DEV_FB_USED{{{CHOSEN}}}", ONE),)),
            Panel(
                "PCIe",
                "Bps",
                (
                    (f"rate(DCGM_FI_PROF_PCIE_TX_BYTES{{{CHOSEN}}}[5m])", f"{ONE} sent"),
                    (f"rate(DCGM_FI_PROF_PCIE_RX_BYTES{{{CHOSEN}}}[5m])", f"{ONE} received"),
                ),
            ),
        ),
    ),
    (
        "Health",
        (
            Panel("Temperature", "celsius", ((f"DCGM_FI_DEV_GPU_TEMP{{{CHOSEN}}}", ONE),)),
            Panel("Power", "watt", ((f"DCGM_FI_DEV_POWER_USAGE{{{CHOSEN}}}", ONE),)),
            Panel("SM clock", "rotmhz", ((f"DCGM_FI_DEV_SM_CLOCK{{{CHOSEN}}}", ONE),)),
            Panel(
                "Xids",
                "none",
                ((f'DCGM_EXP_XID_ERRORS_COUNT{{{CHOSEN}, xid!=""}}', f"{ONE} Xid {{{{xid}}}}"),),
            ),
            Panel(
                "Memory errors and repairs",
                "none",
                (
                    (f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{CHOSEN}}}", f"{ONE} uncorrectable"),
                    (f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{CHOSEN}}}", f"{ONE} rows remapped"),
                    (f"DCGM_FI_DEV_ROW_REMAP_PENDING{{{CHOSEN}}}", f"{ONE} remap pending"),
                    (f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{CHOSEN}}}", f"{ONE} remap failed"),
                ),
            ),
            Panel(
                "PCIe retries", "none", ((f"increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{CHOSEN}}}[1h])", ONE),)
            ),
        ),
    ),
)


def as_object(settings: Settings) -> str:
    """A ConfigMap that Grafana's sidecar finds (chart kube-prometheus-stack)."""
    return dump(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "gpukiln-dashboard",
                "namespace": settings.monitoring_namespace,
                "labels": {"grafana_dashboard": "1"},
            },
            "data": {"gpukiln.json": json.dumps(dashboard(), indent=1)},
        }
    )


def dashboard() -> dict[str, Any]:
    """Grafana's model, version 39 (grafana.com/docs/grafana, JSON model)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, panels, 0, y, WIDTH, 1))
        x, y = 0, y + 1
        for one in row:
            height = HEIGHT // 2 if one.kind == "stat" else HEIGHT
            if x + one.width > WIDTH:
                x, y = 0, y + height
            panels.append(_placed(_panel(one), panels, x, y, one.width, height))
            x += one.width
        y += HEIGHT // 2 if row[-1].kind == "stat" else HEIGHT
    return {
        "uid": UID,
        "title": "GPUs",
        "tags": ["gpu", "gpukiln"],
        "schemaVersion": 39,
        "timezone": "",
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source(), _variable("node"), _variable("gpu")]},
        "panels": panels,
    }


def _placed(
    panel: dict[str, Any], before: list[dict[str, Any]], x: int, y: int, width: int, height: int
) -> dict[str, Any]:
    return {"id": len(before) + 1, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(one: Panel) -> dict[str, Any]:
    return {
        "type": one.kind,
        "title": one.title,
        **({"description": one.description} if one.description else {}),
        "datasource": {"type": "prometheus", "uid": "$source"},
        "fieldConfig": {"defaults": {"unit": one.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(one.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus"}


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": f"label_values(DCGM_FI_DEV_GPU_TEMP, {label})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
