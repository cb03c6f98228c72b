"""Rules on named instance types: AWS launches them, and they are not much larger than the request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpukiln.catalog.instance_types import InstanceType, instance_types
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.rules_running import node_selections
from gpukiln.kubernetes.check.rules_scripts import NEGATIONS
from gpukiln.kubernetes.check.workload import (
    Path,
    Prose,
    Resource,
    Violation,
    Workload,
    at,
    mapping,
    sequence,
)
from gpukiln.kubernetes.quantity import quantity

TYPE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
# Names of GPU instance types in prose, such as p3.2xlarge.
NAME = re.compile(r"\b(?:p|g|gr)\d+[a-z]*\.(?:\d*x?large|\d+xlarge|metal(?:-\d+xl)?)\b")
CATALOGUE = "gpukiln/catalog/data/gpu_instances.yaml"


def _alternatives(machine: InstanceType) -> str:
    return f"instead: {', '.join(machine.alternatives)}" if machine.alternatives else ""


def _since(machine: InstanceType) -> str:
    return f"retired {machine.retired_since}".strip()


def selected_types(workload: Workload) -> Iterator[tuple[Path, str]]:
    """Path and name of each instance type that a pod selects."""
    for path, key, values in node_selections(workload):
        if key in TYPE_LABELS:
            yield from ((path, value) for value in values)


@rule(
    "type-retired",
    "error",
    Workload,
    title="Pods select instance types that AWS launches",
    reason="AWS does not launch the type any more: the pod stays Pending",
    source=f"EC2's DescribeInstanceTypes ({CATALOGUE})",
    fix="`invoke offer.list --gpu T4:1` lists the available types",
)
def type_retired(workload: Workload, _: Context) -> Iterator[Violation]:
    for path, name in selected_types(workload):
        machine = instance_types().get(name)
        if machine and machine.status == "retired":
            yield Violation(f"{name}: {_since(machine)}", path, fix=_alternatives(machine))


@rule(
    "pool-type-retired",
    "error",
    Resource,
    title="Node pools name instance types that AWS launches",
    reason="AWS does not launch the type any more: a pool without other types starts no node",
    source=f"EC2's DescribeInstanceTypes ({CATALOGUE})",
    fix="`invoke offer.list --gpu T4:1` lists the available types",
)
def pool_type_retired(resource: Resource, _: Context) -> Iterator[Violation]:
    where = ("spec", "template", "spec", "requirements")
    for index, requirement in enumerate(
        sequence(at(resource.object, where)) if resource.kind == "NodePool" else ()
    ):
        if mapping(requirement).get("key") not in TYPE_LABELS or mapping(requirement).get("operator") != "In":
            continue
        for name in map(str, sequence(mapping(requirement).get("values"))):
            machine = instance_types().get(name)
            if machine and machine.status == "retired":
                yield Violation(f"{name}: {_since(machine)}", (*where, index), fix=_alternatives(machine))


@rule(
    "type-too-large",
    "warning",
    Workload,
    title="A pod does not select machines with far more GPUs than it requests",
    reason="the whole machine is paid for, and its other GPUs may stay unused",
    source=f"EC2's DescribeInstanceTypes ({CATALOGUE})",
    fix="a type with fewer GPUs, or a selector on the GPU (nvidia.com/gpu.product): `invoke "
    "offer.list --gpu A100:1`",
    fragments=False,
)
def type_too_large(workload: Workload, _: Context) -> Iterator[Violation]:
    asked = sum(
        quantity(container.limits.get(key)) or 0
        for container in workload.main_containers
        for key in container.gpu_keys
        if key == "nvidia.com/gpu"
    )
    machines = {
        name: machine for _path, name in selected_types(workload) if (machine := instance_types().get(name))
    }
    if asked and machines and all(machine.gpus >= 4 * asked for machine in machines.values()):
        path = next(path for path, name in selected_types(workload) if name in machines)
        has = ", ".join(f"{name} has {machine.gpus}" for name, machine in machines.items())
        yield Violation(f"{asked} of nvidia.com/gpu, and {has}", path)


@rule(
    "type-retired-in-document",
    "warning",
    Prose,
    title="Documents name instance types that AWS launches",
    reason="AWS does not launch the type any more, and readers notice late",
    source=f"EC2's DescribeInstanceTypes ({CATALOGUE})",
    fix="`invoke offer.list --gpu T4:1` lists the available types",
)
def type_retired_in_document(prose: Prose, _: Context) -> Iterator[Violation]:
    for line, text in enumerate(prose.lines, 1):
        for name in dict.fromkeys(NAME.findall(text)):
            machine = instance_types().get(name)
            if machine and machine.status == "retired" and not NEGATIONS.search(text):
                yield Violation(f"{name}: {_since(machine)}", line=line, fix=_alternatives(machine))
