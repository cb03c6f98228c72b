"""Whether a pod fits a node, in the words of kube-scheduler.

The checks have the order of kube-scheduler (pkg/scheduler/framework/plugins): cordoned, taints, affinity,
resources. Topology, volumes and affinity between pods are not evaluated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.quantity import quantity
from gpukiln.units import is_whole

CORDON = "node.kubernetes.io/unschedulable"  # the taint that `kubectl cordon` adds
# Resources that a pod may request as a whole; only containers may request GPUs
# (k8s.io/component-helpers/resource/helpers.go: IsSupportedPodLevelResource).
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
    """GPUs and MIG devices that a pod requests, under any resource name of NVIDIA's plugin."""
    return int(
        sum(
            amount(value)
            for container in spec.get("containers") or ()
            for key, value in _part(container, "resources", "limits").items()
            if key.startswith("nvidia.com/")
        )
    )


def requests(spec: Spec) -> dict[str, Decimal]:
    """Resources that a pod takes of a node: all containers or the largest init container, and its overhead.

    A sidecar (an init container with restartPolicy Always) counts like a container (KEP 753). Pod-level
    requests replace the sum of the containers (KEP 2837; component-helpers' PodRequests).

    >>> requests({"containers": [{"resources": {"limits": {"nvidia.com/gpu": 1}}}]})
    {'nvidia.com/gpu': Decimal('1')}
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
    # Init containers run one after the other: the largest one counts, and not their sum.
    _most(total, peak)
    # After the containers and before the overhead, as in component-helpers' PodRequests.
    total |= _pod_level_requests(spec, total)
    _add(total, {key: amount(value) for key, value in _part(spec, "overhead").items()})
    return total


def free_resources(node: Manifest, pods: Iterable[Manifest]) -> dict[str, Decimal]:
    """Allocatable resources of a node that no pod has requested."""
    left = {key: amount(value) for key, value in node["status"].get("allocatable", {}).items()}
    for pod in pods:
        here = pod["spec"].get("nodeName") == node["metadata"]["name"]
        # Ended pods keep their object, and have given their resources back.
        if here and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            for key, value in {**requests(pod["spec"]), "pods": ONE}.items():
                left[key] = left.get(key, ZERO) - value
    return left


def tolerates(spec: Spec, taint: Mapping[str, str]) -> bool:
    """Whether a pod tolerates a taint.

    On EKS and GKE the admission plugin ExtendedResourceToleration adds a toleration for each extended
    resource in the limits: its key is the resource's name and its effect NoSchedule.

    >>> pod = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 1}}}]}
    >>> tolerates(pod, {"key": "nvidia.com/gpu", "effect": "NoSchedule"})
    True
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
    """A pod spec with the tolerations that the DaemonSet controller adds, for cordoned and unhealthy nodes.

    (pkg/controller/daemon/util: AddOrUpdateDaemonPodTolerations)
    """
    keys = ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
    added = [{"key": f"node.kubernetes.io/{key}", "operator": "Exists"} for key in keys]
    return {**spec, "tolerations": [*(spec.get("tolerations") or ()), *added]}


def mismatches(spec: Spec, node: Manifest) -> list[FilterFailure]:
    """Why a pod can't run on a node regardless of free resources; empty if nothing prevents it."""
    labels, failures = node["metadata"].get("labels", {}), []
    cordoned = node["spec"].get("unschedulable")
    # The plugin NodeUnschedulable accepts a pod that tolerates this taint, even before the taint is added.
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
    """Resources of which a node has less than the pod requests."""
    failures = []
    for resource, want in requested.items():
        available = max(left.get(resource, ZERO), ZERO)
        if want > available:
            words = f"{quantity_text(resource, want)} requested, {quantity_text(resource, available)} left"
            failures.append(FilterFailure("resources", f"Insufficient {resource}: {words}"))
    if left.get("pods", ONE) < 1:
        failures.append(FilterFailure("resources", "Too many pods"))
    return failures


def required_terms(spec: Spec) -> list[Mapping[str, Any]]:
    """The required node selector terms, of which one must match."""
    required = _part(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    return list(required.get("nodeSelectorTerms") or ())


def nearest(
    spec: Spec, nodes: Iterable[Manifest], pods: Iterable[Manifest]
) -> tuple[Manifest, list[FilterFailure]] | None:
    """The node with the fewest obstacles for a pod, and these obstacles; None if there is no node.

    Obstacles that waiting does not remove count first: a selector, a taint, GPUs that the node does not have.
    Then come resources that other pods use now.
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
    """Sort key of a node's obstacles: first a wrong selector, then a taint, then the number of obstacles."""
    every = list(problems)
    kinds = {problem.kind for problem in every}
    return ("selector" in kinds) * 2 + ("taint" in kinds), len(every)


def quantity_text(resource: str, value: Decimal) -> str:
    """A quantity as people write it.

    >>> quantity_text("cpu", Decimal("3.5")), quantity_text("memory", Decimal(2**30))
    ('3500m', '1024Mi')
    """
    if resource == "cpu":
        whole = value == value.to_integral_value()  # Decimal's % raises an error for more than 28 digits
        return str(int(value)) if whole else f"{int(value * 1000)}m"
    if resource in ("memory", "ephemeral-storage"):
        return f"{int(value / 2**20)}Mi"
    return str(int(value))


def amount(value: Any) -> Decimal:
    """A quantity that the API server has validated; 0 for any other value."""
    return quantity(value) or ZERO


def _container_requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    # The API server sets a missing request to the limit.
    merged = {**_part(container, "resources", "limits"), **_part(container, "resources", "requests")}
    return {key: amount(value) for key, value in merged.items()}


def _pod_level_requests(spec: Spec, total: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """The pod-level requests.

    For a pod with only limits the API server sets the request to the sum of its containers, or to the limit
    if no container requests the resource (pkg/apis/core/v1/defaults.go).
    """
    asks, limits = _part(spec, "resources", "requests"), _part(spec, "resources", "limits")
    requests_of_pod = {key: amount(value) for key, value in limits.items() if key not in total} | {
        key: amount(value) for key, value in asks.items()
    }
    return {key: value for key, value in requests_of_pod.items() if POD_LEVEL.fullmatch(key)}


def _part(whole: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping at a path; empty if there is none."""
    for key in path:
        part = whole.get(key)
        # isinstance is much faster for dict than for the abstract class Mapping; this runs for every pod and
        # node
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
        return False  # an empty term matches no node (k8s.io/api/core/v1, NodeSelectorTerm)
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
