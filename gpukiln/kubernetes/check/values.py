"""Values of other people's charts: which chart they are for, and which keys it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# actions/actions-runner-controller:charts/gha-runner-scale-set/values.yaml at 0.14.2, and its templates.
RUNNERS = {
    "githubConfigUrl",
    "githubConfigSecret",
    "scaleSetLabels",
    "runnerGroup",
    "runnerScaleSetName",
    "minRunners",
    "maxRunners",
    "proxy",
    "githubServerTLS",
    "keyVault",
    "containerMode",
    "template",
    "listenerTemplate",
    "listenerMetrics",
    "controllerServiceAccount",
    "namespaceOverride",
    "nameOverride",
    "fullnameOverride",
    "labels",
    "annotations",
    "resourceMeta",
    "global",
}
# NVIDIA/k8s-device-plugin:deployments/helm/nvidia-device-plugin/values.yaml at v0.20.0, and its templates.
PLUGIN = {
    "config",
    "compatWithCPUManager",
    "migStrategy",
    "failOnInitError",
    "deviceListStrategy",
    "deviceIDStrategy",
    "nvidiaDriverRoot",
    "gdrcopyEnabled",
    "gdsEnabled",
    "mofedEnabled",
    "deviceDiscoveryStrategy",
    "nameOverride",
    "fullnameOverride",
    "namespaceOverride",
    "selectorLabelsOverride",
    "componentSelectorLabels",
    "allowDefaultNamespace",
    "imagePullSecrets",
    "image",
    "updateStrategy",
    "podAnnotations",
    "podLabels",
    "podSecurityContext",
    "securityContext",
    "resources",
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "devicePlugin",
    "gfd",
    "nfd",
    "mps",
    "cdi",
    "global",
    "serviceAccount",
    "sharedDevicesAllocationPolicy",
    "imexChannelIDs",
    "imex",
    "driverRoot",
    "passDeviceSpecs",
    "devRoot",
    "legacyDaemonsetAPI",
    "extraEnv",
    "extraVolumes",
    "extraVolumeMounts",
    "kubeletSocket",
}
# Keys that only one chart has; those that its values never had, and that people write, too.
TELLS = {
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
KEYS = {"gha-runner-scale-set": RUNNERS, "nvidia-device-plugin": PLUGIN}


def chart_of(values: Mapping[str, Any]) -> str:
    """The chart that values are for; empty where none is recognised."""
    # The GPU Operator's values have some of these keys one level down, below devicePlugin and migManager.
    if {"operator", "migManager", "toolkit"} & values.keys() and "driver" in values:
        return ""
    repository = (
        str((values.get("image") or {}).get("repository", ""))
        if isinstance(values.get("image"), Mapping)
        else ""
    )
    for chart, name in (("dcgm-exporter", "dcgm-exporter"), ("nvidia-device-plugin", "k8s-device-plugin")):
        if repository.endswith(name):
            return chart
    return next((chart for chart, keys in TELLS.items() if keys & values.keys()), "")
