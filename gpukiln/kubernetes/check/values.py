"""Recognises the chart that values are for; `addons/helm.py` has the keys of each chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Chart -> keys that only this chart has, wrong keys that users write included.
CHART_KEYS = {
    "gha-runner-scale-set": {
        "githubConfigUrl",
        "githubConfigSecret",
        "scaleSetLabels",
        "runnerGroup",
        "runnerScaleSetName",
        "minRunners",
        "maxRunners",
        "listenerTemplate",
        "listenerMetrics",
        "runnerLabels",
        "runnerResources",
        "runnerScaleDownDelaySecondsAfterScaleOut",
    },
    "nvidia-device-plugin": {
        "compatWithCPUManager",
        "migStrategy",
        "failOnInitError",
        "deviceListStrategy",
        "deviceIDStrategy",
        "nvidiaDriverRoot",
        "deviceDiscoveryStrategy",
        "devicePlugin",
        "allowDefaultNamespace",
    },
    "dcgm-exporter": {"customMetrics", "extraHostVolumes", "extraConfigMapVolumes", "kubeletPath"},
}


def chart_of(values: Mapping[str, Any]) -> str:
    """The chart of values; empty if none is recognised.

    >>> chart_of({"minRunners": 0}), chart_of({"replicaCount": 1})
    ('gha-runner-scale-set', '')
    """
    # The GPU Operator's values have some of these keys one level down, below devicePlugin and migManager.
    if {"operator", "migManager", "toolkit"} & values.keys() and "driver" in values:
        return ""
    # The name of the image, if no key is specific.
    repository = (
        str((values.get("image") or {}).get("repository", ""))
        if isinstance(values.get("image"), Mapping)
        else ""
    )
    for chart, name in (("dcgm-exporter", "dcgm-exporter"), ("nvidia-device-plugin", "k8s-device-plugin")):
        if repository.endswith(name):
            return chart
    return next((chart for chart, keys in CHART_KEYS.items() if keys & values.keys()), "")
