"""Rules on charts and add-ons of other projects: unknown values, versions that are too old."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.check import yaml_tree
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import (
    CommandLine,
    Resource,
    Violation,
    Workload,
    at,
    mapping,
    sequence,
)

RUNNERS = "gha-runner-scale-set"
CHART = "actions/actions-runner-controller:charts/gha-runner-scale-set"
# Wrong key -> the key that the chart has instead.
CHART_KEY_PLACES = {
    "runnerLabels": "scaleSetLabels",
    "runnerResources": "template.spec.containers[name: runner].resources",
    "resources": "template.spec.containers[name: runner].resources",
    "image": "template.spec.containers[name: runner].image",
    "env": "template.spec.containers[name: runner].env",
    "tolerations": "template.spec.tolerations",
    "nodeSelector": "template.spec.nodeSelector",
    "affinity": "template.spec.affinity",
    "volumes": "template.spec.volumes",
    "replicas": "minRunners and maxRunners",
    "runnerScaleDownDelaySecondsAfterScaleOut": "no key: a runner is removed after its job",
    "scaleDownDelaySecondsAfterScaleOut": "no key: it belongs to the legacy HorizontalRunnerAutoscaler",
}
OLDEST_PLUGIN = (0, 17)  # the first with CDI on UBI 9; 0.14 is from 2023, and its manifest had another path
# At most 9 digits: Python's int() refuses a text of more than 4,300.
PLUGIN_IMAGE = re.compile(r"k8s-device-plugin:v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?")
# Versions in URLs of raw.githubusercontent.com and github.com.
PLUGIN_URL = re.compile(r"NVIDIA/k8s-device-plugin/(?:v|refs/tags/v|raw/v)?(\d{1,9})\.(\d{1,9})")


@rule(
    "values-unknown-key",
    "error",
    Resource,
    title="Values are those that the chart has",
    reason="Helm ignores unknown values without a message: the runner gets the default image, no GPU and no "
    "toleration",
    source=f"{CHART}/values.yaml, 0.14.2; NVIDIA/k8s-device-plugin:deployments/helm, v0.20.0",
    fix="`helm show values` lists them",
)
def values_unknown_key(resource: Resource, _: Context) -> Iterator[Violation]:
    wrong = helm.unknown_keys(resource.chart, resource.object) if resource.chart in helm.CHARTS else ()
    for way, error in wrong:
        where, text = tuple(way.split(".")), f"{way} is no value of {resource.chart}"
        if resource.chart == RUNNERS and way in CHART_KEY_PLACES:
            yield Violation(text, where, fix=f"use instead: {CHART_KEY_PLACES[way]}")
        elif error.hint or resource.chart == RUNNERS:  # other charts may have keys that the table lacks
            yield Violation(text + (f"; {error.hint}" if error.hint else ""), where)


@rule(
    "runner-container",
    "error",
    Resource,
    title="The runner's container is called `runner`",
    reason="the chart adds command and job only to that container; any other is a sidecar",
    source=f"{CHART}/templates/_helpers.tpl",
    fix="name: runner",
)
def runner_container(resource: Resource, _: Context) -> Iterator[Violation]:
    containers = sequence(at(resource.object, ("template", "spec", "containers")))
    names = [str(mapping(container).get("name")) for container in containers]
    # Without containers here those of the chart's own values apply.
    if resource.chart == RUNNERS and names and "runner" not in names:
        yield Violation(f"containers {', '.join(names)}", ("template", "spec", "containers"))


@rule(
    "runner-counts",
    "error",
    Resource,
    title="minRunners is at most maxRunners",
    reason="the chart refuses to render",
    source=f"{CHART}/templates/autoscalingrunnerset.yaml",
    fix="minRunners: 0 for GPUs, and maxRunners for the upper limit",
)
def runner_counts(resource: Resource, _: Context) -> Iterator[Violation]:
    low, high = resource.object.get("minRunners"), resource.object.get("maxRunners")
    if resource.chart == RUNNERS and isinstance(low, int) and isinstance(high, int) and low > high:
        yield Violation(f"minRunners {low}, maxRunners {high}", ("minRunners",))


@rule(
    "runner-name",
    "error",
    Resource,
    title="The name of a scale set has at most 45 characters",
    reason="the chart refuses to render",
    source=f"{CHART}/templates/_helpers.tpl",
    fix="a shorter runnerScaleSetName",
)
def runner_name(resource: Resource, _: Context) -> Iterator[Violation]:
    name = resource.object.get("runnerScaleSetName")
    if resource.chart == RUNNERS and isinstance(name, str) and len(name) > 45:
        yield Violation(f"{len(name)} characters", ("runnerScaleSetName",))


@rule(
    "runner-idle",
    "warning",
    Workload,
    title="No GPU waits for jobs",
    reason="minRunners above 0 keeps a GPU node running day and night",
    source=f"{CHART}/values.yaml",
    fix="minRunners: 0; a job waits some minutes for its node",
)
def runner_idle(workload: Workload, _: Context) -> Iterator[Violation]:
    values = workload.object if workload.resource.chart == RUNNERS else mapping(workload.object.get("spec"))
    if workload.resource.chart != RUNNERS and workload.kind != "AutoscalingRunnerSet":
        return
    least = values.get("minRunners")
    if workload.wants_gpus and isinstance(least, int) and least > 0:
        # minRunners is at the top of the values, and in spec of an AutoscalingRunnerSet.
        above = () if workload.resource.chart == RUNNERS else ("spec",)
        yield Violation(f"minRunners {least} with GPUs", (*above, "minRunners"))


@rule(
    "runner-docker",
    "warning",
    Workload,
    title="Jobs with GPUs do not run in Docker within Docker",
    reason="containers that the sidecar `dind` starts have no GPU: it has neither the toolkit nor CDI",
    source=f"{CHART}/templates/_helpers.tpl",
    fix="remove containerMode and use an image with the tools of the jobs, or `kubernetes-novolume` with a "
    "hook template",
)
def runner_docker(workload: Workload, _: Context) -> Iterator[Violation]:
    mode = at(workload.object, ("containerMode", "type"))
    if workload.resource.chart == RUNNERS and workload.wants_gpus and mode == "dind":
        yield Violation("containerMode dind with GPUs", ("containerMode", "type"))


HOOKS, HOOK_TEMPLATE = "ACTIONS_RUNNER_CONTAINER_HOOKS", "ACTIONS_RUNNER_CONTAINER_HOOK_TEMPLATE"


@rule(
    "runner-hook-template",
    "warning",
    Workload,
    title="With containerMode kubernetes the pods of the jobs request the GPUs",
    reason="a job's containers run in separate pods, which request no GPU: the runner holds an idle GPU, and "
    "the job has none",
    source="actions/runner-container-hooks:docs/adrs/0134-hook-extensions.md",
    fix=f"{HOOK_TEMPLATE} with a file whose container $job has the limits, and none on the runner",
)
def runner_hook_template(workload: Workload, _: Context) -> Iterator[Violation]:
    if workload.resource.chart != RUNNERS and workload.kind != "AutoscalingRunnerSet":
        return
    mode = at(workload.object, ("containerMode", "type"))
    for container in workload.main_containers:
        names = [name for _index, name, _value in container.env]
        by_pods = mode in ("kubernetes", "kubernetes-novolume") or HOOKS in names
        if container.name == "runner" and container.gpu_keys and by_pods and HOOK_TEMPLATE not in names:
            what = f"containerMode {mode}" if mode else HOOKS
            path = workload.at(*container.where, "resources", "limits")
            yield Violation(f"{container.gpu_keys[0]} on the runner with {what}, and no hook template", path)


@rule(
    "runs-on",
    "warning",
    Resource,
    title="runs-on names the scale set",
    reason="a scale set of ARC matches its name, and since 0.14 its scaleSetLabels; any other list, such as "
    "one with `self-hosted`, matches no runner, and the job waits for a day",
    source="actions/actions-runner-controller:docs/gha-runner-scale-set-controller; its 0.14.0 release notes",
    fix="runs-on: NAME-OF-THE-SCALE-SET, or add these labels to scaleSetLabels",
)
def runs_on(resource: Resource, context: Context) -> Iterator[Violation]:
    if resource.role != "workflow":
        return
    sets = [
        {str(label) for label in sequence(values.object.get("scaleSetLabels"))}
        for values in context.resources
        if values.chart == RUNNERS
    ]
    for name, job in mapping(resource.object.get("jobs")).items():
        labels = [str(label) for label in sequence(mapping(job).get("runs-on"))]
        # Without self-hosted the labels may be those of GitHub's own runners.
        if "self-hosted" in labels and not any({*labels} <= labels_of_set for labels_of_set in sets):
            yield Violation(f"runs-on: [{', '.join(labels)}]", ("jobs", name, "runs-on"))


@rule(
    "plugin-version",
    "warning",
    Workload,
    title="The device plugin is 0.17 or newer",
    reason="older ones are without CDI and its isolation, mark a GPU unhealthy for Xid 109, and get no fixes",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md",
    fix="`invoke k8s.addons` renders the pinned one",
)
def plugin_version(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        match = PLUGIN_IMAGE.search(container.image)
        if match and (int(match[1]), int(match[2])) < OLDEST_PLUGIN:
            yield Violation(container.image, workload.at(*container.where, "image"))


@rule(
    "plugin-url",
    "error",
    CommandLine,
    title="The device plugin is installed from its current path, in a maintained version",
    reason="the manifest moved to deployments/static/ in 0.15; the one at the old path is from "
    "2024 or before",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md, 0.15.0",
    fix="`invoke k8s.addons`, or the chart nvdp/nvidia-device-plugin with --version",
)
def plugin_url(command: CommandLine, _: Context) -> Iterator[Violation]:
    for word in command.words:
        if (match := PLUGIN_URL.search(word)) and (int(match[1]), int(match[2])) < OLDEST_PLUGIN:
            yield Violation(f"{' '.join(command.words[:3])} ... v{match[1]}.{match[2]}, its old manifest")


@rule(
    "plugin-no-gpu-ok",
    "warning",
    Workload,
    title="The device plugin fails if it finds no GPU",
    reason="with FAIL_ON_INIT_ERROR=false it waits for ever on a GPU node whose driver did not load: "
    "the node looks healthy and offers no GPU",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md, 0.18.0",
    fix="remove the variable, and select GPU nodes",
)
def plugin_no_gpu_ok(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        for index, name, value in container.env:
            if name == "FAIL_ON_INIT_ERROR" and str(value).lower() == "false":
                yield Violation(f"{name}={value}", workload.at(*container.where, "env", index))


def _plugin_configs(resource: Resource) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Configurations of the device plugin, in values or in a ConfigMap."""
    where = ("config", "map") if resource.chart == "nvidia-device-plugin" else ("data",)
    if resource.chart != "nvidia-device-plugin" and resource.kind != "ConfigMap":
        return
    for key, text in mapping(at(resource.object, where)).items():
        # Other ConfigMaps hold any text, so only those that may be meant are parsed.
        if not isinstance(text, str) or "sharing" not in text:
            continue
        for document in yaml_tree.documents(text):
            if isinstance(document, yaml_tree.Document) and isinstance(document.value, dict):
                yield (*where, key), document.value


@rule(
    "plugin-sharing",
    "error",
    Resource,
    title="GPUs are shared in one way",
    reason="the device plugin rejects time slicing together with MPS, and MPS with MIG",
    source="NVIDIA/k8s-device-plugin:README.md, shared access to GPUs",
    fix="one of timeSlicing, mps or MIG for each node",
)
def plugin_sharing(resource: Resource, _: Context) -> Iterator[Violation]:
    for path, config in _plugin_configs(resource):
        sharing = mapping(config.get("sharing"))
        mig = mapping(config.get("flags")).get("migStrategy", "none")
        if sharing.get("timeSlicing") and sharing.get("mps"):
            yield Violation("timeSlicing and mps in one configuration", path)
        if sharing.get("mps") and mig not in ("none", None):
            yield Violation(f"mps with migStrategy {mig}", path)


@rule(
    "plugin-slices",
    "warning",
    Resource,
    title="A pod can't ask for two slices of a GPU",
    reason="two replicas are not twice the time and may be the same GPU, so such a request is a mistake",
    source="NVIDIA/k8s-device-plugin:README.md, with CUDA time-slicing",
    fix="failRequestsGreaterThanOne: true",
)
def plugin_slices(resource: Resource, _: Context) -> Iterator[Violation]:
    for path, config in _plugin_configs(resource):
        slicing = mapping(mapping(config.get("sharing")).get("timeSlicing"))
        if slicing and slicing.get("failRequestsGreaterThanOne") is not True:
            yield Violation("timeSlicing without failRequestsGreaterThanOne", path)


PLUGIN_CONFIG = "nvidia.com/device-plugin.config"


def _config_names(resource: Resource, context: Context) -> set[str]:
    """Names of the device plugin's configurations in values or in their ConfigMap; empty if unknown."""
    if resource.chart != "nvidia-device-plugin":
        return set()
    config = mapping(resource.object.get("config"))
    if named := mapping(config.get("map")):
        return {*named}
    # Each key of that ConfigMap is one configuration (NVIDIA/k8s-device-plugin:README.md).
    for config_map in context.of_kind("ConfigMap"):
        if config.get("name") and config_map.name == config["name"]:
            return {*mapping(config_map.object.get("data"))}
    return set()


@rule(
    "plugin-config",
    "error",
    Resource,
    title="A configuration of the device plugin that is named exists",
    reason="the plugin's pod waits for a file that never appears, and the nodes offer no GPU",
    source="NVIDIA/k8s-device-plugin:README.md, with multiple configurations; deployments/helm/values.yaml",
    fix="a name in config.map, or a key of the ConfigMap",
)
def plugin_config(resource: Resource, context: Context) -> Iterator[Violation]:
    names, default = _config_names(resource, context), at(resource.object, ("config", "default"))
    if names and isinstance(default, str) and default and default not in names:
        yield Violation(
            f"config.default {default}; there are {', '.join(sorted(names))}", ("config", "default")
        )
    where = ("spec", "template", "metadata", "labels", PLUGIN_CONFIG)
    # The plugin on a node uses the configuration that this label of the node names.
    label = str(at(resource.object, where) or "") if resource.kind == "NodePool" else ""
    known = (
        {name for resource in context.resources for name in _config_names(resource, context)}
        if label
        else set()
    )
    if known and label not in known:
        yield Violation(f"label {PLUGIN_CONFIG}: {label}; there are {', '.join(sorted(known))}", where)


POD_RESOURCES = "/var/lib/kubelet"


@rule(
    "exporter-pod-resources",
    "warning",
    Workload,
    title="dcgm-exporter can ask the kubelet which pod has which GPU",
    reason="without the kubelet's socket the metrics have no pod label, and queries by pod return nothing",
    source="NVIDIA/dcgm-exporter:deployment/templates/daemonset.yaml",
    fix=f"a hostPath volume {POD_RESOURCES}/pod-resources, mounted read-only at the same path",
    fragments=False,
)
def exporter_pod_resources(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.main_containers:
        words = [str(word) for key in ("command", "args") for word in sequence(container.spec.get(key))]
        by_variable = any(
            name == "DCGM_EXPORTER_KUBERNETES" and str(value).lower() in ("true", "1")
            for _index, name, value in container.env
        )
        by_option = any(word in ("-k", "--kubernetes", "--kubernetes=true") for word in words)
        mounts = [
            str(mapping(volume_mount).get("mountPath"))
            for volume_mount in sequence(container.spec.get("volumeMounts"))
        ]
        mounted = any(path.startswith(POD_RESOURCES) or "pod-resources" in path for path in mounts)
        if "dcgm-exporter" in container.image and (by_variable or by_option) and not mounted:
            yield Violation(
                "Kubernetes is on, and pod-resources is not mounted", workload.at(*container.where)
            )


@rule(
    "exporter-nodes",
    "warning",
    Resource,
    title="dcgm-exporter runs on all GPU nodes and on no others",
    reason="by default the chart neither tolerates the taint of GPU nodes nor selects them: it does not run "
    "on them "
    "and fails on the others",
    source="NVIDIA/dcgm-exporter:deployment/values.yaml, 4.8.2",
    fix="tolerations: [{key: nvidia.com/gpu, operator: Exists}] and "
    'nodeSelector: {nvidia.com/gpu.present: "true"}',
)
def exporter_nodes(resource: Resource, _: Context) -> Iterator[Violation]:
    if resource.chart != "dcgm-exporter":
        return
    lacking = [] if resource.object.get("tolerations") else ["no tolerations"]
    if not resource.object.get("nodeSelector") and not resource.object.get("affinity"):
        lacking.append("no nodeSelector")
    if lacking:
        yield Violation(", ".join(lacking))
