"""The subjects of rules: objects with their lines, the pods in them, commands, queries and documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Path = tuple[str | int, ...]
Role = Literal["object", "values", "fragment", "workflow", "rules", "dashboard", "unknown"]

# Kind -> path of the pod template in its objects; a Pod is its own template.
TEMPLATES: dict[str, Path] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "AutoscalingRunnerSet": ("spec", "template"),
}
RAY: dict[str, Path] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
# Kind of the Kubeflow training operator -> the key of its replicas.
REPLICAS = {
    "PyTorchJob": "pytorchReplicaSpecs",
    "MPIJob": "mpiReplicaSpecs",
    "TFJob": "tfReplicaSpecs",
    "XGBoostJob": "xgbReplicaSpecs",
    "PaddleJob": "paddleReplicaSpecs",
    "JAXJob": "jaxReplicaSpecs",
}
JOBS: dict[str, Path] = {"Job": ("spec",), "CronJob": ("spec", "jobTemplate", "spec")}
# Resources of Project-HAMi/HAMi (docs/config.md) for shares of a GPU; they modify a request of
# nvidia.com/gpu.
HAMI = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority")


@dataclass(frozen=True)
class Violation:
    """A violation of a rule; `evaluate.py` makes a `Finding` of it.

    Args:
        text: What was found, and what was wanted.
        path: In the object; `workload.at(...)` converts a path in a pod spec.
        line: For subjects without an object (Prose); 0: the line of the path or of the subject.
        fix: The next step, if that of the rule is too general.
    """

    text: str
    path: Path = ()
    line: int = 0
    fix: str = ""


@dataclass(frozen=True)
class Resource:
    """A document of a file: an object, values of a chart, a part of either, a workflow, rules, a dashboard.

    Args:
        file: The name as given, `-` for standard input, `context NAME` for a cluster.
        object: Plain data.
        role: What it is; `values` and `fragment` have no kind.
        chart: For values: gha-runner-scale-set, nvidia-device-plugin, dcgm-exporter, or empty.
        line_of: Returns the line (from 1) of a path, or of its nearest existing parent.
        repeated: Line and key of each key that a mapping has twice.
        written: Returns the text of the scalar at a path in the file; empty if unknown.
    """

    file: str
    object: Mapping[str, Any]
    role: Role = "object"
    chart: str = ""
    line_of: Callable[[Path], int] = field(default=lambda _: 1, compare=False, repr=False)
    repeated: tuple[tuple[int, str], ...] = ()
    written: Callable[[Path], str] = field(default=lambda _: "", compare=False, repr=False)

    @property
    def line(self) -> int:
        return self.line_of(())

    @property
    def kind(self) -> str:
        return _text(self.object.get("kind")) if self.role == "object" else ""

    @property
    def api(self) -> str:
        return _text(self.object.get("apiVersion")) if self.role == "object" else ""

    @property
    def is_node_pool(self) -> bool:
        return self.kind == "NodePool" and self.api.startswith("karpenter.sh/")

    @property
    def metadata(self) -> Mapping[str, Any]:
        return mapping(self.object.get("metadata"))

    @property
    def name(self) -> str:
        return _text(self.metadata.get("name") or self.metadata.get("generateName"))

    @property
    def namespace(self) -> str:
        return _text(self.metadata.get("namespace"))

    @property
    def label(self) -> str:
        """Its name in messages."""
        if self.role == "object":
            return f"{self.kind} {self.name or '(no name)'}"
        return f"values of {self.chart}" if self.chart else self.role


@dataclass(frozen=True)
class Workload:
    """A pod that an object in a file would start.

    Args:
        resource: The document that has it.
        where: Path of the pod spec in the object, for example spec, template, spec.
        pod: The pod spec.
        pod_metadata: Metadata of the pod or its template.
        job: Spec of its Job; None if it has none.
        job_where: Path of that spec.
        whole: Whether the pod spec is complete; in a fragment only the given keys are checked.
        moved: For fragments and values: path in `pod` -> its path in the object.
    """

    resource: Resource
    where: Path
    pod: Mapping[str, Any]
    pod_metadata: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] | None = None
    job_where: Path = ()
    whole: bool = True
    moved: Mapping[Path, Path] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.resource.file

    @property
    def line(self) -> int:
        return self.resource.line

    @property
    def object(self) -> Mapping[str, Any]:
        return self.resource.object

    @property
    def kind(self) -> str:
        return self.resource.kind

    @property
    def name(self) -> str:
        return self.resource.name

    @property
    def label(self) -> str:
        return self.resource.label

    def at(self, *path: str | int) -> Path:
        """Convert a path in the pod spec to a path in the object."""
        # The longest known prefix of the path decides.
        for length in range(len(path), -1, -1):
            if path[:length] in self.moved:
                return self.moved[path[:length]] + path[length:]
        return self.where + path

    @cached_property
    def containers(self) -> tuple[PodContainer, ...]:
        """All containers, init containers first."""
        return tuple(
            PodContainer((key, index), container)
            for key in ("initContainers", "containers")
            for index, container in enumerate(sequence(self.pod.get(key)))
            if isinstance(container, Mapping)
        )

    @property
    def main_containers(self) -> tuple[PodContainer, ...]:
        """The containers without the init containers."""
        return tuple(container for container in self.containers if container.where[0] == "containers")

    @property
    def wants_gpus(self) -> bool:
        """Whether a container requests GPUs, under any resource name."""
        return any(container.gpu_keys for container in self.containers)


@dataclass(frozen=True)
class PodContainer:
    """One container of a pod.

    Args:
        where: Its path in the pod spec: containers or initContainers, and its index.
    """

    where: Path
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        return _text(self.spec.get("name"))

    @property
    def image(self) -> str:
        return _text(self.spec.get("image"))

    @property
    def limits(self) -> Mapping[str, Any]:
        return mapping(mapping(self.spec.get("resources")).get("limits"))

    @property
    def requests(self) -> Mapping[str, Any]:
        """The requests as written; the API server sets a missing one to the limit."""
        return mapping(mapping(self.spec.get("resources")).get("requests"))

    @property
    def gpu_keys(self) -> tuple[str, ...]:
        asked = {**self.requests, **self.limits}
        return tuple(key for key, value in asked.items() if is_gpu(key) and value is not None)

    @property
    def env(self) -> Iterator[tuple[int, str, Any]]:
        """Index, name and value of each variable; the value is None with valueFrom."""
        for index, variable in enumerate(sequence(self.spec.get("env"))):
            if isinstance(variable, Mapping):
                yield index, _text(variable.get("name")), variable.get("value")


@dataclass(frozen=True)
class CommandLine:
    """A command line of a script, a code block or a container.

    Args:
        resource: The document of the container; None for scripts and code blocks.
        path: Path of the container's command in the document.
    """

    file: str
    line: int
    words: tuple[str, ...]
    resource: Resource | None = None
    path: Path = ()


@dataclass(frozen=True)
class Query:
    """A PromQL expression of rules, a dashboard or a code block."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Prose:
    """The text of a document or a script.

    Args:
        lines: All lines; lines of code blocks are empty.
        blocks: Line, language and text of each code block.
    """

    file: str
    lines: tuple[str, ...]
    blocks: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Rejection:
    """A document that the parser can't read, or an object that an API server rejects."""

    file: str
    line: int
    text: str
    resource: Resource | None = None


@dataclass(frozen=True)
class UncheckedItem:
    """An item that could not be checked: it has no findings, and may have mistakes."""

    file: str
    line: int
    reason: str


Subject = Resource | Workload | CommandLine | Query | Prose | Rejection


def is_gpu(resource: str) -> bool:
    """Whether a resource is a GPU or a part of one.

    nvidia.com/gpu, nvidia.com/gpu.shared and nvidia.com/mig-1g.5gb belong to NVIDIA's device plugin;
    amd.com/gpu and gpu.intel.com/i915 to other vendors'. HAMi's memory and cores are amounts of a GPU.

    >>> is_gpu("nvidia.com/mig-1g.5gb"), is_gpu("nvidia.com/gpumem"), is_gpu("cpu")
    (True, False, False)
    """
    of_nvidia = resource.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and resource not in HAMI
    return of_nvidia or resource in (
        "amd.com/gpu",
        "gpu.intel.com/i915",
        "gpu.intel.com/xe",
    )


_PLACEHOLDER = re.compile(r"\$\{?\w|\$\(|<[\w .-]+>|\{\{")


def is_placeholder(value: Any) -> bool:
    """Whether a text has a placeholder, such as $NAME, ${NAME} or <name>, that the user replaces.

    >>> is_placeholder("${IMAGE}"), is_placeholder("<your-name>"), is_placeholder("a:1")
    (True, True, False)
    """
    return isinstance(value, str) and bool(_PLACEHOLDER.search(value))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty one; the rule `schema` reports wrong types."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """The value if it is a list, otherwise an empty one."""
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def dotted(path: Path) -> str:
    """A path as text.

    >>> dotted(("spec", "containers", 0, "image"))
    'spec.containers[0].image'
    """
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def workloads(resource: Resource) -> Iterator[Workload]:
    """The pods that a resource starts."""
    if resource.role == "values":
        yield from _of_values(resource)
    elif resource.role == "fragment":
        yield from _of_fragment(resource)
    elif resource.role == "object":
        for where in _templates(resource):
            template = mapping(at(resource.object, where))
            if isinstance(template.get("spec"), Mapping):
                yield _of_template(resource, where, template)


def _of_template(resource: Resource, where: Path, template: Mapping[str, Any]) -> Workload:
    job_where = JOBS.get(resource.kind, where[:-1] if resource.kind == "JobSet" else ())
    return Workload(
        resource,
        (*where, "spec"),
        template["spec"],
        mapping(template.get("metadata")),
        mapping(at(resource.object, job_where)) if job_where else None,
        job_where,
    )


def _templates(resource: Resource) -> Iterator[Path]:
    kind = resource.kind
    if kind in TEMPLATES:
        yield TEMPLATES[kind]
    elif kind in RAY:
        above = RAY[kind]
        yield (*above, "headGroupSpec", "template")
        for index, _ in enumerate(sequence(at(resource.object, (*above, "workerGroupSpecs")))):
            yield (*above, "workerGroupSpecs", index, "template")
        # The pod that submits the job runs next to the cluster's pods.
        if kind == "RayJob":
            yield ("spec", "submitterPodTemplate")
    elif kind in REPLICAS:
        for role in mapping(at(resource.object, ("spec", REPLICAS[kind]))):
            yield ("spec", REPLICAS[kind], role, "template")
    elif kind == "JobSet":
        for index, _ in enumerate(sequence(at(resource.object, ("spec", "replicatedJobs")))):
            yield ("spec", "replicatedJobs", index, "template", "spec", "template")


CONTAINER_KEYS = {
    "name",
    "image",
    "command",
    "args",
    "env",
    "envFrom",
    "ports",
    "resources",
    "volumeMounts",
    "securityContext",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "workingDir",
}
POD_KEYS = {
    "containers",
    "initContainers",
    "nodeSelector",
    "affinity",
    "tolerations",
    "volumes",
    "restartPolicy",
    "runtimeClassName",
    "priorityClassName",
    "serviceAccountName",
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
    "schedulerName",
    "resourceClaims",
}


def _of_fragment(resource: Resource) -> Iterator[Workload]:
    """The part of a pod in a code block or in values; resources alone belong to a container."""
    whole = resource.object
    # The content of a key `resources`, shown without the key.
    if {"limits", "requests"} & whole.keys() and whole.keys() <= {"limits", "requests", "claims"}:
        yield _partial_workload(resource, {}, {"resources": whole}, {("containers", 0, "resources"): ()})
        return
    container = {
        key: whole[key] for key in CONTAINER_KEYS & whole.keys() if key != "name" or "image" in whole
    }
    image = container.get("image")
    moved: dict[Path, Path] = {("containers", 0, key): (key,) for key in container}
    if isinstance(image, Mapping):  # repository and tag, as in charts
        container["image"], moved["containers", 0, "image"] = image_of(image), ("image",)
    yield _partial_workload(resource, {key: whole[key] for key in POD_KEYS & whole.keys()}, container, moved)


def _of_values(resource: Resource) -> Iterator[Workload]:
    """The pod of a runner scale set; wrong keys of the chart are read as what they were meant for."""
    if resource.chart != "gha-runner-scale-set":
        yield from _of_fragment(resource)
        return
    values = resource.object
    spec = at(values, ("template", "spec"))
    if isinstance(spec, Mapping):
        yield Workload(
            resource, ("template", "spec"), spec, mapping(at(values, ("template", "metadata"))), whole=False
        )
    container: dict[str, Any] = {}
    moved: dict[Path, Path] = {}
    for meant, written in (("resources", ("runnerResources", "resources")), ("image", ("image",))):
        for key in written:
            if isinstance(values.get(key), Mapping):
                container[meant] = image_of(values[key]) if meant == "image" else values[key]
                moved["containers", 0, meant] = (key,)
    pod = {key: values[key] for key in ("tolerations", "nodeSelector", "affinity") if key in values}
    if pod or container:
        yield _partial_workload(resource, pod, container and {"name": "runner", **container}, moved)


def _partial_workload(
    resource: Resource, pod: Mapping[str, Any], container: Mapping[str, Any], moved: Mapping[Path, Path]
) -> Workload:
    pod = {**pod, "containers": [container]} if container and "containers" not in pod else pod
    return Workload(resource, (), pod, whole=False, moved=moved)


def image_of(value: Mapping[str, Any]) -> str:
    """The name of an image that a chart's values have in parts.

    >>> image_of({"repository": "nvidia/cuda", "tag": "12.9.1-base-ubuntu24.04"})
    'nvidia/cuda:12.9.1-base-ubuntu24.04'
    """
    name = "/".join(_text(value[key]) for key in ("registry", "repository") if value.get(key))
    tag, digest = _text(value.get("tag")), _text(value.get("digest"))
    return name + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
