"""Values for charts of others: which keys a chart has, and the command that installs it.

Helm takes a key that a chart does not have and says nothing, so what is written here is held against the
chart's own keys first. `k8s.check` holds values of others against the same tables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.errors import UsageError
from gpukiln.kubernetes.manifest import dump
from gpukiln.typed import unknown

Keys = Mapping[str, Any]  # by key those below it; None: whatever the user likes, or Kubernetes takes


def _keys(*free: str, **below: Keys | None) -> Keys:
    return {**dict.fromkeys(free), **below}


_SERVICE_ACCOUNT = _keys("create", "annotations", "name")
_IMAGE = _keys("repository", "pullPolicy", "tag")

# By chart its keys: values.yaml of the release that components.yaml has, with those that are commented out.
CHARTS: Mapping[str, Keys] = {
    # NVIDIA/k8s-device-plugin: deployments/helm/nvidia-device-plugin (values.yaml, templates/*.yml), v0.20.0
    "nvidia-device-plugin": _keys(
        *("compatWithCPUManager", "migStrategy", "failOnInitError", "deviceListStrategy", "deviceIDStrategy"),
        *("nvidiaDriverRoot", "nvidiaDevRoot", "gdrcopyEnabled", "gdsEnabled", "mofedEnabled"),
        *("deviceDiscoveryStrategy", "nameOverride", "fullnameOverride", "namespaceOverride"),
        *("selectorLabelsOverride", "allowDefaultNamespace", "imagePullSecrets", "updateStrategy"),
        *("podAnnotations", "podSecurityContext", "securityContext", "resources", "nodeSelector", "affinity"),
        *("tolerations", "priorityClassName", "runtimeClassName", "componentSelectorLabels"),
        config=_keys("name", "map", "default", "fallbackStrategies"),
        image=_IMAGE,
        devicePlugin=_keys("enabled", "enableHostNetwork", "containers"),
        gfd=_keys(
            *("enabled", "nameOverride", "namespaceOverride", "noTimestamp", "sleepInterval"),
            *("securityContext", "enableHostNetwork"),
        ),
        nfd=None,  # node-feature-discovery's own chart
        mps=_keys("root", "enableHostPID", "enableHostNetwork"),
        cdi=_keys("nvidiaHookPath", "featureFlags"),
    ),
    # kubernetes-sigs/kueue: charts/kueue (README.md, values.yaml)
    "kueue": _keys(
        *("nameOverride", "fullnameOverride", "enablePrometheus", "enableCertManager", "enableVisibilityAPF"),
        *("enableKueueViz", "kubernetesClusterDomain", "kueueViz"),
        controllerManager=_keys(
            *("featureGates", "replicas", "imagePullSecrets", "readinessProbe", "livenessProbe"),
            *("nodeSelector", "tolerations", "topologySpreadConstraints"),
            manager=_keys(
                *("priorityClassName", "image", "podAnnotations", "resources", "podSecurityContext"),
                "containerSecurityContext",
            ),
            podDisruptionBudget=_keys("enabled", "minAvailable"),
        ),
        managerConfig=_keys("controllerManagerConfigYaml"),
        metricsService=_keys("ports", "type", "labels", "annotations"),
        webhookService=_keys("ipDualStack", "ports", "type"),
        mutatingWebhook=_keys("reinvocationPolicy"),
        metrics=_keys("prometheusNamespace", serviceMonitor=_keys("tlsConfig")),
    ),
    # actions/actions-runner-controller: charts/gha-runner-scale-set-controller
    "gha-runner-scale-set-controller": _keys(
        *("labels", "replicaCount", "imagePullSecrets", "nameOverride", "fullnameOverride", "env"),
        *("podAnnotations", "podLabels", "podSecurityContext", "securityContext", "resources"),
        *("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"),
        *("volumes", "volumeMounts", "namespaceOverride"),
        image=_IMAGE,
        serviceAccount=_SERVICE_ACCOUNT,
        metrics=_keys("controllerManagerAddr", "listenerAddr", "listenerEndpoint"),
        flags=_keys(
            *("logLevel", "logFormat", "watchSingleNamespace", "runnerMaxConcurrentReconciles"),
            *("updateStrategy", "excludeLabelPropagationPrefixes", "k8sClientRateLimiterQPS"),
            "k8sClientRateLimiterBurst",
        ),
    ),
    # actions/actions-runner-controller: charts/gha-runner-scale-set
    "gha-runner-scale-set": _keys(
        *("githubConfigUrl", "githubConfigSecret", "scaleSetLabels", "runnerGroup", "runnerScaleSetName"),
        *("minRunners", "maxRunners", "proxy", "githubServerTLS", "keyVault", "containerMode"),
        *("listenerTemplate", "listenerMetrics", "namespaceOverride", "labels", "annotations"),
        *("resourceMeta", "fullnameOverride"),
        controllerServiceAccount=_keys("namespace", "name"),
        template=_keys("metadata", "spec"),
    ),
}


def unknown_keys(chart: str, values: Mapping[str, Any]) -> Iterator[tuple[str, UsageError]]:
    """What the chart would ignore: the way to each key, and an error that names the nearest.

    Raises:
        UsageError: Nothing is known of the chart.
    """
    if chart not in CHARTS:
        raise unknown("chart", chart, CHARTS)
    yield from _unknown(f"chart {chart}", values, CHARTS[chart], "")


def _unknown(
    where: str, values: Mapping[str, Any], keys: Keys, above: str
) -> Iterator[tuple[str, UsageError]]:
    for key, value in values.items():
        way = f"{above}{key}"
        if key not in keys:
            yield way, unknown(f"key in {where}:", way, [f"{above}{one}" for one in keys])
        elif keys[key] is not None and isinstance(value, Mapping):
            yield from _unknown(where, value, keys[key], f"{way}.")


def values(add_on: str, content: Mapping[str, Any], *notes: str) -> str:
    """A file of values, with the release that it is for in its head.

    Args:
        add_on: Of components.yaml.
        notes: What to know, one line each.

    Raises:
        UsageError: The chart has no such key.
    """
    found = load_add_ons()[add_on]
    for _, error in unknown_keys(found.chart or "", content):
        raise error
    return dump(content, head=(f"Values of the chart {found.chart}, release {found.version}.", *notes))


def upgrade(add_on: str, release: str, namespace: str, file: str) -> str:
    """The command that installs a chart or brings it up to date, and waits for it.

    Args:
        file: Of its values.
    """
    found = load_add_ons()[add_on]
    chart, repository = str(found.chart), str(found.repository)
    oci = repository.startswith("oci:")
    source = [f"{repository}/{chart}"] if oci else [chart, "--repo", repository]
    lines = (
        ["helm", "upgrade", "--install", release, *source],
        ["--version", found.version, "--namespace", namespace, "--create-namespace"],
        ["--values", file, "--wait", "--timeout", "10m"],
    )
    return " \\\n  ".join(shlex.join(line) for line in lines)


def apply(file: str) -> str:
    """The command that applies manifests; ours are the fields that they name, and no others."""
    return shlex.join(["kubectl", "apply", "--server-side", "--field-manager=gpukiln", "--filename", file])
