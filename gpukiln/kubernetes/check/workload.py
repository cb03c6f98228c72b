"""What is judged: objects as they stand in a file, the pods in them, and the commands and queries beside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Path = tuple[str | int, ...]
Role = Literal["object", "values", "fragment", "workflow", "rules", "dashboard", "unknown"]

# Kind -> where the pod template stands in its objects; a pod's own object is the template.
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
# Shares of GPUs by Project-HAMi/HAMi (docs/config.md): with these its plugin counts nvidia.com/gpu.
HAMI = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority")


@dataclass(frozen=True)
class Violation:
    """One place where a rule is violated; `evaluate.py` makes a `Finding` of it and of its rule.

    Args:
        text: What was found, and what was wanted.
        path: In the object; `workload.at(...)` makes it of a path in a pod's spec.
        line: Of subjects without an object (Prose); 0: the subject's, or the path's.
        fix: The next step, where the rule's own is too general.
    """

    text: str
    path: Path = ()
    line: int = 0
    fix: str = ""


@dataclass(frozen=True)
class Resource:
    """One document of a file: an object, values of a chart, part of either, a workflow, rules or a dashboard.

    Args:
        file: As it was named, `-` for standard input, `context NAME` for a cluster.
        object: Plain data.
        role: What it is; `values` and `fragment` have no kind.
        chart: Of values: gha-runner-scale-set, nvidia-device-plugin, dcgm-exporter, or empty.
        line_of: The line (from 1) of a path in the object, or of the nearest one above it that is there.
        repeated: Line and key of each key that a mapping has twice.
        written: The text of the scalar at a path as it stands in the file; empty where that is not known.
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
        """How it is called in a message."""
        if self.role == "object":
            return f"{self.kind} {self.name or '(no name)'}"
        return f"values of {self.chart}" if self.chart else self.role


@dataclass(frozen=True)
class Workload:
    """A pod that something in a file would start.

    Args:
        resource: What it stands in.
        where: Path of the pod's spec in the object, for example spec, template, spec.
        pod: The pod's spec.
        pod_metadata: Of the pod or its template.
        job: Spec of the Job that it belongs to; None where there is none.
        job_where: Path of that spec.
        whole: Nothing is left out that a pod needs; in a fragment only what is there is judged.
        moved: Of fragments and values: a path in `pod`, and where it really stands in the object.
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
        """The path in the object of a path in the pod's spec."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.moved:
                return self.moved[path[:length]] + path[length:]
        return self.where + path

    @cached_property
    def containers(self) -> tuple[PodContainer, ...]:
        """All of them; those that start the pod and end before the others come first."""
        return tuple(
            PodContainer((key, index), container)
            for key in ("initContainers", "containers")
            for index, container in enumerate(sequence(self.pod.get(key)))
            if isinstance(container, Mapping)
        )

    @property
    def main_containers(self) -> tuple[PodContainer, ...]:
        """Without those that start the pod."""
        return tuple(container for container in self.containers if container.where[0] == "containers")

    @property
    def wants_gpus(self) -> bool:
        """Whether a container asks for GPUs, of any name and in any form."""
        return any(container.gpu_keys for container in self.containers)


@dataclass(frozen=True)
class PodContainer:
    """One container of a pod.

    Args:
        where: Its path in the pod's spec: containers or initContainers, and which.
        spec: What it is.
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
        """As they are written; the API server takes a limit for a request that is left out."""
        return mapping(mapping(self.spec.get("resources")).get("requests"))

    @property
    def gpu_keys(self) -> tuple[str, ...]:
        asked = {**self.requests, **self.limits}
        return tuple(key for key, value in asked.items() if is_gpu(key) and value is not None)

    @property
    def env(self) -> Iterator[tuple[int, str, Any]]:
        """Index, name and value of each variable; None where the value is taken from elsewhere."""
        for index, variable in enumerate(sequence(self.spec.get("env"))):
            if isinstance(variable, Mapping):
                yield index, _text(variable.get("name")), variable.get("value")


@dataclass(frozen=True)
class CommandLine:
    """A command line of a script, of a block in a document, or of a container.

    Args:
        resource: Whose container runs it, or None.
        path: In the resource, of the container's command.
    """

    file: str
    line: int
    words: tuple[str, ...]
    resource: Resource | None = None
    path: Path = ()


@dataclass(frozen=True)
class Query:
    """An expression of PromQL: of rules, a dashboard, or a block in a document."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Prose:
    """A document's words, or a script as it stands.

    Args:
        lines: All of them, from line 1 on; those of blocks of code are empty.
        blocks: Line, language and text of each block of code.
    """

    file: str
    lines: tuple[str, ...]
    blocks: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Rejection:
    """What the parser can't read, or an API server refuses."""

    file: str
    line: int
    text: str
    resource: Resource | None = None


@dataclass(frozen=True)
class UncheckedItem:
    """What was read and could not be checked; no finding, and no proof that there is none."""

    file: str
    line: int
    reason: str


Subject = Resource | Workload | CommandLine | Query | Prose | Rejection


def is_gpu(resource: str) -> bool:
    """Whether a resource is a GPU or a part of one.

    nvidia.com/gpu, its .shared and nvidia.com/mig-1g.5gb are the device plugin's; amd.com/gpu and
    gpu.intel.com/i915 are those of other vendors. HAMi's amounts of memory and cores say how much of a GPU.
    """
    of_nvidia = resource.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and resource not in HAMI
    return of_nvidia or resource in (
        "amd.com/gpu",
        "gpu.intel.com/i915",
        "gpu.intel.com/xe",
    )


_PLACEHOLDER = re.compile(r"\$\{?\w|\$\(|<[\w .-]+>|\{\{")


def is_placeholder(value: Any) -> bool:
    """Whether a text is to be filled in: $NAME, ${NAME} and <name>, as scripts and documents have them."""
    return isinstance(value, str) and bool(_PLACEHOLDER.search(value))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is one, else an empty one: the schema tells what it should have been."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """The value where it is one, else an empty one."""
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def at(value: Any, path: Path) -> Any:
    """What stands at a path; None where nothing does."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def dotted(path: Path) -> str:
    """A path as people write it: spec.containers[0].image."""
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
    """The part of a pod that a document or values show; resources alone are those of a container."""
    whole = resource.object
    if {"limits", "requests"} & whole.keys() and whole.keys() <= {"limits", "requests", "claims"}:
        yield _partial_workload(resource, {}, {"resources": whole}, {("containers", 0, "resources"): ()})
        return
    container = {
        key: whole[key] for key in CONTAINER_KEYS & whole.keys() if key != "name" or "image" in whole
    }
    image = container.get("image")
    moved: dict[Path, Path] = {("containers", 0, key): (key,) for key in container}
    if isinstance(image, Mapping):  # as charts write it
        container["image"], moved["containers", 0, "image"] = image_of(image), ("image",)
    yield _partial_workload(resource, {key: whole[key] for key in POD_KEYS & whole.keys()}, container, moved)


def _of_values(resource: Resource) -> Iterator[Workload]:
    """The pod of a runner scale set; where the keys are not the chart's, what they were meant for."""
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
    """An image as charts have it in parts."""
    name = "/".join(_text(value[key]) for key in ("registry", "repository") if value.get(key))
    tag, digest = _text(value.get("tag")), _text(value.get("digest"))
    return name + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
