"""Where pods may land: node pools of Karpenter and eksctl, live nodes, or all GPU instance types.

A pool has candidate instance types and the labels and taints of their nodes. The zone, the capacity type and
the host name of a node are not known in advance: the node is assumed to have the value that the pod selects,
if the pool allows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from gpukiln.catalog.instance_types import instance_types
from gpukiln.kubernetes import machines, node_classes
from gpukiln.kubernetes.machines import GPU
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.scheduling import Spec, amount, quantity_text, required_terms
from gpukiln.units import is_whole

ZONE = "topology.kubernetes.io/zone"
CAPACITY = "karpenter.sh/capacity-type"
CAPACITIES = ("on-demand", "reserved", "spot")
# Labels that every node gets on its own, independent of its pool.
PER_NODE_LABELS = (
    "kubernetes.io/hostname",
    "topology.kubernetes.io/",
    "failure-domain.beta.kubernetes.io/",
    "topology.ebs.",
)
# Kubelets, clouds and feature discovery set labels with these prefixes. One that gpukiln does not know for an
# instance type may still exist, so it is not reported as missing.
AGENT_LABELS = ("nvidia.com/", "karpenter.k8s.aws/", "eks.amazonaws.com/", "feature.node.kubernetes.io/")
# Suffix that feature discovery appends to the product of shared GPUs; with the strategy `single` it follows
# -MIG-PROFILE (NVIDIA/k8s-device-plugin:internal/lm/resource.go).
SHARED_SUFFIX = "-SHARED"
# Raised by reading a document of another form.
SHAPE_ERRORS = (AttributeError, KeyError, TypeError, ValueError)
TAINT = {"key": GPU, "value": "true", "effect": "NoSchedule"}


@dataclass(frozen=True)
class Pool:
    """A node pool.

    Args:
        types: GPU instance types that the pool may start.
        labels: Labels of all its nodes, in addition to those of their type.
        choices: Label -> values, of which each node has one.
        limits: Resources of all its nodes together.
        anything: Whether the nodes may have any other label.
        nodes: Live nodes instead of types.
        driver: NVIDIA driver of its image, if known.
        node_class: Spec of its EC2NodeClass, if known.
    """

    name: str
    types: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    taints: tuple[Mapping[str, str], ...] = field(default=(), hash=False)
    limits: Mapping[str, Decimal] = field(default_factory=dict, hash=False)
    anything: bool = False
    nodes: tuple[Manifest, ...] = field(default=(), hash=False)
    driver: str = ""
    node_class: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def candidates(self, spec: Spec) -> Iterable[tuple[str, Manifest]]:
        """Each type or live node, with the node object that the pod would get."""
        if self.nodes:
            for node in self.nodes:
                yield node["metadata"]["name"], node
            return
        requested = _requested_labels(spec)
        products = requested.get(machines.PRODUCT, ())
        if self.anything and products and all(map(_is_outside_ec2, products)):
            return  # a machine outside EC2, about which nothing is known
        for name in self.types:
            node = self._with_shared_gpus(_node(self, name), products)
            known = node["metadata"]["labels"]
            more = {
                key: answer
                for key, values in requested.items()
                if (key in self.choices or key not in known) and (answer := self._label_value(key, values))
            }
            yield name, _with_labels(node, more) if more else node

    def beyond_limits(self, name: str) -> list[str]:
        """The limits of the pool that one node of a type exceeds: Karpenter starts no such node."""
        cpu, memory = machines.capacity(name)
        has = {"cpu": cpu, "memory": memory, GPU: machines.allocatable(name)[GPU]}
        return [
            f"it has {quantity_text(key, has[key])} of {key}, and the pool's limit is "
            f"{quantity_text(key, limit)}"
            for key, limit in self.limits.items()
            if has[key] > limit
        ]

    def _with_shared_gpus(self, node: Manifest, products: Sequence[str]) -> Manifest:
        """The node with its GPUs shared or divided, if the pod selects a node of that kind."""
        whole = node["metadata"]["labels"].get(machines.PRODUCT)
        if not whole or machines.PRODUCT in self.labels or whole in products:
            return node
        for product in products:
            bare, _, profile = product.removesuffix(SHARED_SUFFIX).partition("-MIG-")
            parts = node["status"]["allocatable"].get(f"nvidia.com/mig-{profile}")
            if bare == whole and (parts if profile else product.endswith(SHARED_SUFFIX)):
                # The number of replicas is in the plugin's configuration, which is unknown here.
                many = str(machines.UNLIMITED) if product.endswith(SHARED_SUFFIX) else parts
                resources = {**node["status"]["allocatable"], GPU: many}
                return {
                    **_with_labels(node, {machines.PRODUCT: product}),
                    "status": {"allocatable": resources, "capacity": resources},
                }
        return node

    def _label_value(self, key: str, requested: Sequence[str]) -> str:
        """The value that a node of the pool has for a label that the pod selects; empty if it has none."""
        if key in self.choices:
            return next((value for value in requested if value in self.choices[key]), self.choices[key][0])
        if self.anything or key.startswith((*PER_NODE_LABELS, *AGENT_LABELS)):
            return requested[0] if requested else "any"
        return ""


def default_pool(types: Sequence[str] = (), driver: str = "") -> Pool:
    """A pool of all GPU types, x86 first, or of the named types, with the usual taint of GPU nodes."""
    return Pool(
        "any" if not types else "named types",
        tuple(types) or tuple(sorted(machines.launchable_types(), key=_size)),
        taints=(TAINT,),
        anything=True,
        driver=driver,
    )


def pools_in(objects: Iterable[Mapping[str, Any]], driver: str = "") -> tuple[Pool, ...]:
    """The GPU pools in manifests: NodePools of Karpenter, node groups of eksctl.

    A pool that does not match its schema is skipped; the rule `schema` reports it.
    """
    every, pools = list(objects), list[Pool]()
    classes = {}
    for manifest in every:
        if manifest.get("kind") == "EC2NodeClass":
            with contextlib.suppress(*SHAPE_ERRORS):
                classes[str(manifest["metadata"]["name"])] = dict(manifest["spec"])
    for manifest in every:
        if manifest.get("kind") == "NodePool" and str(manifest.get("apiVersion", "")).startswith(
            "karpenter.sh/"
        ):
            with contextlib.suppress(*SHAPE_ERRORS):
                pools.append(_of_karpenter(manifest, classes, driver))
        elif manifest.get("kind") == "ClusterConfig":
            for key in ("managedNodeGroups", "nodeGroups"):
                groups = manifest.get(key)
                for group in groups if isinstance(groups, list) else ():
                    with contextlib.suppress(*SHAPE_ERRORS):
                        pools.append(_of_eksctl(group, key, driver))
    return tuple(pool for pool in pools if pool.types)


def _taints(listed: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, str], ...]:
    return tuple(
        {"key": str(taint["key"]), "value": str(taint.get("value") or ""), "effect": str(taint["effect"])}
        for taint in listed
    )


def other_types(node_pool: Mapping[str, Any]) -> list[str]:
    """Types of the catalogue without a whole NVIDIA GPU that a NodePool may start as well."""
    listed = node_pool.get("spec", {}).get("template", {}).get("spec", {}).get("requirements") or ()
    requirements = [rule for rule in listed if isinstance(rule, Mapping)]
    return [
        name
        for name, machine in instance_types().items()
        if machine.status != "retired"
        and name not in machines.launchable_types()
        and all(_allows(rule, machines.labels(name)) for rule in requirements)
    ]


def pool_of_nodes(nodes: Sequence[Manifest]) -> Pool:
    """A pool of the live nodes that offer GPUs."""
    # Only nodes whose device plugin runs offer GPUs; others are the doctor's topic.
    offering = [node for node in nodes if amount(node["status"].get("allocatable", {}).get(GPU, "0"))]
    drivers = {
        node["metadata"].get("labels", {}).get("nvidia.com/cuda.driver-version.full", "") for node in offering
    }
    # The oldest driver, since a pod may land on any of the nodes.
    return Pool("nodes of the cluster", nodes=tuple(offering), driver=min(drivers, default=""))


def _of_karpenter(manifest: Mapping[str, Any], classes: Mapping[str, Mapping[str, Any]], driver: str) -> Pool:
    """A pool of a NodePool (karpenter.sh/v1)."""
    template = manifest.get("spec", {}).get("template", {})
    spec = template.get("spec", {})
    requirements = [rule for rule in spec.get("requirements") or () if isinstance(rule, Mapping)]
    labels = {key: str(value) for key, value in (template.get("metadata", {}).get("labels") or {}).items()}
    name = str(manifest.get("metadata", {}).get("name", ""))
    types = [
        kind
        for kind in sorted(machines.launchable_types(), key=_size)
        if all(_allows(rule, machines.labels(kind)) for rule in requirements)
    ]
    choices: dict[str, tuple[str, ...]] = {CAPACITY: CAPACITIES}
    for rule in requirements:
        key, values = str(rule.get("key")), tuple(map(str, rule.get("values") or ()))
        typed = bool(machines.launchable_types()) and key in machines.labels(
            next(iter(machines.launchable_types()))
        )
        if rule.get("operator") == "In" and values and not typed:
            choices[key] = values
        elif rule.get("operator") == "NotIn" and key == CAPACITY:
            choices[key] = (
                tuple(capacity_type for capacity_type in CAPACITIES if capacity_type not in values)
                or CAPACITIES
            )
    limits = {
        key: amount(str(value)) for key, value in (manifest.get("spec", {}).get("limits") or {}).items()
    }
    return Pool(
        name,
        tuple(types),
        {**labels, "karpenter.sh/nodepool": name},
        choices,
        _taints(spec.get("taints") or ()),
        {key: value for key, value in limits.items() if key in ("cpu", "memory", GPU)},
        driver=driver,
        node_class=classes.get(str(spec.get("nodeClassRef", {}).get("name")), {}),
    )


def _of_eksctl(group: Mapping[str, Any], key: str, driver: str) -> Pool:
    """A pool of a node group (eksctl.io/v1alpha5); taints are a list, or a mapping KEY: VALUE:EFFECT."""
    types = [group["instanceType"]] if group.get("instanceType") else []
    types += (
        (group.get("instancesDistribution") or {}).get("instanceTypes") or group.get("instanceTypes") or []
    )
    taints = group.get("taints") or ()
    if isinstance(taints, Mapping):
        pairs = [(name, str(value).rpartition(":")) for name, value in taints.items()]
        taints = [{"key": name, "value": value, "effect": effect} for name, (value, _, effect) in pairs]
    labels = {name: str(value) for name, value in (group.get("labels") or {}).items()}
    name = str(group.get("name", ""))
    managed = key == "managedNodeGroups"
    spot = bool(group.get("spot") or group.get("instancesDistribution"))
    return Pool(
        name,
        tuple(kind for kind in types if kind in machines.launchable_types()),
        {
            "alpha.eksctl.io/nodegroup-name": name,
            **({"eks.amazonaws.com/nodegroup": name} if managed else {}),
            **({"eks.amazonaws.com/capacityType": "SPOT" if spot else "ON_DEMAND"} if managed else {}),
            **({"node-lifecycle": "spot"} if spot and not managed else {}),
            **labels,
        },
        choices={ZONE: tuple(map(str, zones))} if (zones := group.get("availabilityZones")) else {},
        taints=_taints(taints),
        driver=driver,
    )


def _allows(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a requirement of a NodePool allows a type; a requirement on other labels allows all types."""
    key, operator = str(rule.get("key")), rule.get("operator")
    values = [str(value) for value in rule.get("values") or ()]
    if key not in labels:
        # Karpenter sets this label only on types with local disks: without it, In matches none.
        return not (operator == "In" and key.startswith("karpenter.k8s.aws/instance-local-nvme"))
    has = labels[key]
    if operator in ("Gt", "Lt", "Gte", "Lte") and values and is_whole(has) and is_whole(values[0]):
        limit = int(values[0])
        return {
            "Gt": int(has) > limit,
            "Lt": int(has) < limit,
            "Gte": int(has) >= limit,
            "Lte": int(has) <= limit,
        }[str(operator)]
    return {"In": has in values, "NotIn": has not in values, "DoesNotExist": False}.get(str(operator), True)


def _requested_labels(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Labels that a pod selects by, and the values that it accepts."""
    labels: dict[str, tuple[str, ...]] = {
        str(key): (str(value),) for key, value in (spec.get("nodeSelector") or {}).items()
    }
    for term in required_terms(spec):
        for rule in term.get("matchExpressions") or ():
            values = tuple(map(str, rule.get("values") or ()))
            if rule.get("operator") in ("In", "Exists"):
                labels.setdefault(str(rule.get("key")), values)
    return labels


# A check of a folder asks for the same node of the same pool for each pod.
@lru_cache(maxsize=4096)
def _node(pool: Pool, name: str) -> Manifest:
    known = node_classes.allocatable(name, pool.node_class) if pool.node_class else machines.allocatable(name)
    resources = {key: str(value) for key, value in known.items()}
    labels = {
        **machines.labels(name),
        **{key: values[0] for key, values in pool.choices.items()},
        **pool.labels,
    }
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": list(pool.taints)},
        "status": {"allocatable": resources, "capacity": resources},
    }


@cache
def _is_outside_ec2(product: str) -> bool:
    return machines.is_outside_ec2(product.removesuffix(SHARED_SUFFIX).partition("-MIG-")[0])


def _with_labels(node: Manifest, labels: Mapping[str, str]) -> Manifest:
    meta = node["metadata"]
    return {**node, "metadata": {**meta, "labels": {**meta["labels"], **labels}}}


def _size(name: str) -> tuple[bool, int, int, int]:
    machine = machines.launchable_types()[name]
    return machine.arch == "arm64", machine.gpus, machine.vcpu, machine.memory_mib
