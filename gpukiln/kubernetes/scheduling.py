"""Whether a pod fits a live node, in the words of the scheduler.

The order is kube-scheduler's (pkg/scheduler/framework/plugins): cordoned, taints, affinity, room. What
topology, volumes and affinity between pods ask for is the scheduler's alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.quantity import quantity
from gpukiln.units import is_whole

CORDON = "node.kubernetes.io/unschedulable"  # the taint that a cordon brings
# What a pod may ask for as a whole; GPUs only its containers (k8s.io/component-helpers/resource/helpers.go:
# IsSupportedPodLevelResource).
POD_LEVEL = re.compile(r"cpu|memory|hugepages-.+")
Spec = Mapping[str, Any]
ZERO, ONE = Decimal(0), Decimal(1)


class FilterFailure(NamedTuple):
    """Why a pod does not fit a node."""

    kind: Literal["cordoned", "taint", "selector", "resources"]
    text: str


def containers(spec: Spec) -> list[Mapping[str, Any]]:
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def gpus_requested(spec: Spec) -> int:
    """GPUs that a pod asks for, of whatever name NVIDIA's plugin gives them."""
    return int(
        sum(
            amount(value)
            for container in spec.get("containers") or ()
            for key, value in _part(container, "resources", "limits").items()
            if key.startswith("nvidia.com/")
        )
    )


def requests(spec: Spec) -> dict[str, Decimal]:
    """What a pod takes of a node: its containers together, or one of those that prepare it, and its overhead.

    A container that prepares and stays (restartPolicy Always) counts with the others (KEP 753). What the pod
    itself asks for replaces the sum of its containers (KEP 2837; component-helpers' PodRequests).
    """
    total: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(total, _container_requests(container))
            _most(peak, total)
        else:
            _most(
                peak,
                {key: value + total.get(key, ZERO) for key, value in _container_requests(container).items()},
            )
    for container in spec.get("containers") or ():
        _add(total, _container_requests(container))
    _most(total, peak)
    total |= _pod_level_requests(spec, total)
    _add(total, {key: amount(value) for key, value in _part(spec, "overhead").items()})
    return total


def free_resources(node: Manifest, pods: Iterable[Manifest]) -> dict[str, Decimal]:
    """What a node has left."""
    left = {key: amount(value) for key, value in node["status"].get("allocatable", {}).items()}
    for pod in pods:
        here = pod["spec"].get("nodeName") == node["metadata"]["name"]
        if here and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            for key, value in {**requests(pod["spec"]), "pods": ONE}.items():
                left[key] = left.get(key, ZERO) - value
    return left


def tolerates(spec: Spec, taint: Mapping[str, str]) -> bool:
    """Whether a pod tolerates a taint; EKS and GKE add a toleration for resources that it asks for.

    (Admission plugin ExtendedResourceToleration: the taint's key is the resource's name, and the effect that
    it tolerates is NoSchedule.)
    """
    for toleration in spec.get("tolerations") or ():
        if (
            toleration.get("key") in (None, "", taint["key"])
            and toleration.get("effect") in (None, "", taint["effect"])
            and (
                toleration.get("operator") == "Exists"
                or toleration.get("value", "") == taint.get("value", "")
            )
        ):
            return True
    return taint["effect"] == "NoSchedule" and any(
        taint["key"] in _part(container, "resources", "limits") for container in containers(spec)
    )


def as_daemon_set_pod(spec: Spec) -> Spec:
    """A pod's spec as the DaemonSet controller completes it: it goes to cordoned nodes and to those in need.

    (pkg/controller/daemon/util: AddOrUpdateDaemonPodTolerations)
    """
    keys = ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
    added = [{"key": f"node.kubernetes.io/{key}", "operator": "Exists"} for key in keys]
    return {**spec, "tolerations": [*(spec.get("tolerations") or ()), *added]}


def mismatches(spec: Spec, node: Manifest) -> list[FilterFailure]:
    """What keeps a pod off a node however much room it has; empty: nothing."""
    labels, failures = node["metadata"].get("labels", {}), []
    cordoned = node["spec"].get("unschedulable")
    # the plugin NodeUnschedulable lets a pod pass that tolerates the taint, whether or not it is there yet
    if cordoned and not tolerates(spec, {"key": CORDON, "effect": "NoSchedule"}):
        failures.append(FilterFailure("cordoned", "it is cordoned"))
    for taint in node["spec"].get("taints", ()):
        if cordoned and taint["key"] == CORDON:
            continue
        if taint["effect"] != "PreferNoSchedule" and not tolerates(spec, taint):
            value = f"={taint['value']}" if taint.get("value") else ""
            text = f"taint {taint['key']}{value}:{taint['effect']} is not tolerated"
            failures.append(FilterFailure("taint", text))
    for key, value in _part(spec, "nodeSelector").items():
        if labels.get(key) != value:
            has = f"it has {labels[key]}" if key in labels else "it has no such label"
            failures.append(FilterFailure("selector", f"selector {key}={value}: {has}"))
    terms = required_terms(spec)
    if terms and not any(_term(labels, node, term) for term in terms):
        either = " or ".join(_term_words(term) for term in terms)
        failures.append(FilterFailure("selector", f"affinity {either} does not match"))
    return failures


def shortages(requested: Mapping[str, Decimal], left: Mapping[str, Decimal]) -> list[FilterFailure]:
    """What a node has too little of."""
    failures = []
    for resource, want in requested.items():
        room = max(left.get(resource, ZERO), ZERO)
        if want > room:
            words = f"{quantity_text(resource, want)} asked, {quantity_text(resource, room)} left"
            failures.append(FilterFailure("resources", f"Insufficient {resource}: {words}"))
    if left.get("pods", ONE) < 1:
        failures.append(FilterFailure("resources", "Too many pods"))
    return failures


def required_terms(spec: Spec) -> list[Mapping[str, Any]]:
    """Node selector terms of which one has to match."""
    required = _part(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    return list(required.get("nodeSelectorTerms") or ())


def nearest(
    spec: Spec, nodes: Iterable[Manifest], pods: Iterable[Manifest]
) -> tuple[Manifest, list[FilterFailure]] | None:
    """The node that comes nearest to taking a pod, and what keeps it from that; None: there is no node.

    What time doesn't change counts first: a selector, a taint, GPUs that the node does not have. Then comes
    what is missing now.
    """
    every, requested = list(pods), requests(spec)
    gpus = {key: value for key, value in requested.items() if key.startswith("nvidia.com/") and value}

    def lack(candidate: tuple[Manifest, list[FilterFailure], dict[str, Decimal]]) -> tuple[Any, ...]:
        node, problems, left = candidate
        all_of_it = {key: amount(value) for key, value in node["status"].get("allocatable", {}).items()}
        return (
            distance(problems)[0],
            _missing(gpus, all_of_it),
            len(problems),
            _missing(gpus, left),
        )

    tried = []
    for node in nodes:
        left = free_resources(node, every)
        tried.append((node, [*mismatches(spec, node), *shortages(requested, left)], left))
    best = min(tried, key=lack, default=None)
    return best and best[:2]


def _missing(requested: Mapping[str, Decimal], left: Mapping[str, Decimal]) -> Decimal:
    lacking = (value - max(left.get(key, ZERO), ZERO) for key, value in requested.items())
    return sum((amount for amount in lacking if amount > 0), ZERO)


def distance(problems: Iterable[FilterFailure]) -> tuple[int, int]:
    """How far a node is from taking a pod: what was not meant is farther than what lacks room."""
    every = list(problems)
    kinds = {problem.kind for problem in every}
    return ("selector" in kinds) * 2 + ("taint" in kinds), len(every)


def quantity_text(resource: str, value: Decimal) -> str:
    """A quantity as people write it."""
    if resource == "cpu":
        whole = value == value.to_integral_value()  # `%` raises on more than 28 digits
        return str(int(value)) if whole else f"{int(value * 1000)}m"
    if resource in ("memory", "ephemeral-storage"):
        return f"{int(value / 2**20)}Mi"
    return str(int(value))


def amount(value: Any) -> Decimal:
    """A quantity that the API server has taken already."""
    return quantity(value) or ZERO


def _container_requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    # a request that is left out is its limit
    merged = {**_part(container, "resources", "limits"), **_part(container, "resources", "requests")}
    return {key: amount(value) for key, value in merged.items()}


def _pod_level_requests(spec: Spec, total: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """What the pod asks for as a whole.

    The API server gives a pod that has only limits the sum of its containers as its request, and the limit
    where none of them asks (pkg/apis/core/v1/defaults.go).
    """
    asks, limits = _part(spec, "resources", "requests"), _part(spec, "resources", "limits")
    requests_of_pod = {key: amount(value) for key, value in limits.items() if key not in total} | {
        key: amount(value) for key, value in asks.items()
    }
    return {key: value for key, value in requests_of_pod.items() if POD_LEVEL.fullmatch(key)}


def _part(whole: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping in a mapping; what is empty or none of it counts as empty."""
    for key in path:
        part = whole.get(key)
        # none at all, or a dict, in nearly all cases: Python asks slower for an abstract class
        if part is None or not isinstance(part, (dict, Mapping)):
            return {}
        whole = part
    return whole


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, ZERO) + value


def _most(total: dict[str, Decimal], other: Mapping[str, Decimal]) -> None:
    for key, value in other.items():
        total[key] = max(total.get(key, ZERO), value)


def _term(labels: Mapping[str, str], node: Manifest, term: Mapping[str, Any]) -> bool:
    rules, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not rules and not fields:
        return False  # an empty term selects nothing
    name = {"metadata.name": node["metadata"]["name"]}
    return all(_rule(labels, rule) for rule in rules) and all(_rule(name, field) for field in fields)


def _rule(labels: Mapping[str, str], rule: Mapping[str, Any]) -> bool:
    value, values, operator = labels.get(rule["key"]), rule.get("values") or [], rule["operator"]
    if operator in ("Gt", "Lt"):
        sides = (value, str(values[0]) if values else "")
        if any(side is None or not is_whole(side.removeprefix("-")) for side in sides):
            return False
        has, limit = map(int, sides)  # type: ignore[arg-type]  # both are texts
        return has > limit if operator == "Gt" else has < limit
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[operator]


def _term_words(term: Mapping[str, Any]) -> str:
    rules = (*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ()))
    return " and ".join(
        f"{rule['key']} {rule['operator']} {','.join(rule.get('values') or ())}".strip() for rule in rules
    )
