"""Whether a pod fits a live node, in the words of the scheduler.

The order is kube-scheduler's (pkg/scheduler/framework/plugins): cordoned, taints, affinity, room. What
topology, volumes and affinity between pods ask for is the scheduler's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.quantity import quantity
from gpukiln.parsing import is_whole

GPU = "nvidia.com/gpu"
Spec = Mapping[str, Any]


class Problem(NamedTuple):
    """Why a pod does not fit a node."""

    kind: Literal["cordoned", "taint", "selector", "room"]
    text: str


def containers(spec: Spec) -> list[Mapping[str, Any]]:
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def asked(spec: Spec) -> int:
    """GPUs that a pod asks for, of whatever name NVIDIA's plugin gives them."""
    return int(
        sum(
            amount(value)
            for one in spec.get("containers") or ()
            for key, value in _part(one, "resources", "limits").items()
            if key.startswith("nvidia.com/")
        )
    )


def requests(spec: Spec) -> dict[str, Decimal]:
    """What a pod takes of a node: its containers together, or one of those that prepare it, and its overhead.

    A container that prepares and stays (restartPolicy Always) counts with the others (KEP 753). What the pod
    itself asks for takes the place of what its containers do; of a limit alone that is so where they ask for
    nothing (KEP 2837, pkg/apis/core/v1/defaults.go).
    """
    total: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for one in spec.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            _add(total, _of(one))
            _most(peak, total)
        else:
            _most(peak, {key: value + total.get(key, Decimal(0)) for key, value in _of(one).items()})
    for one in spec.get("containers") or ():
        _add(total, _of(one))
    _most(total, peak)
    own, most = (_part(spec, "resources", side) for side in ("requests", "limits"))
    total |= {key: amount(value) for key, value in {**most, **own}.items() if key in own or key not in total}
    _add(total, {key: amount(value) for key, value in _part(spec, "overhead").items()})
    return total


def free_of(node: Manifest, pods: Iterable[Manifest]) -> dict[str, Decimal]:
    """What a node has left."""
    left = {key: amount(value) for key, value in node["status"].get("allocatable", {}).items()}
    for pod in pods:
        here = pod["spec"].get("nodeName") == node["metadata"]["name"]
        if here and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            for key, value in {**requests(pod["spec"]), "pods": Decimal(1)}.items():
                left[key] = left.get(key, Decimal(0)) - value
    return left


def tolerates(spec: Spec, taint: Mapping[str, str]) -> bool:
    """Whether a pod tolerates a taint; EKS and GKE add a toleration for resources that it asks for.

    (Admission plugin ExtendedResourceToleration: the taint's key is the resource's name.)
    """
    if any(taint["key"] in _part(one, "resources", "limits") for one in containers(spec)):
        return True
    return any(
        one.get("key") in (None, "", taint["key"])
        and one.get("effect") in (None, "", taint["effect"])
        and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
        for one in spec.get("tolerations") or ()
    )


def why_not(
    spec: Spec, node: Manifest, left: Mapping[str, Decimal], wanted: Mapping[str, Decimal] | None = None
) -> list[Problem]:
    """Why a pod does not fit a node; empty: it does.

    Args:
        left: What the node has left; empty: room is not asked about.
        wanted: What the pod takes, where it is known already.
    """
    labels, found = node["metadata"].get("labels", {}), []
    if node["spec"].get("unschedulable"):
        found.append(Problem("cordoned", "it is cordoned"))
    for taint in node["spec"].get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not tolerates(spec, taint):
            value = f"={taint['value']}" if taint.get("value") else ""
            told = f"taint {taint['key']}{value}:{taint['effect']} is not tolerated"
            found.append(Problem("taint", told))
    for key, value in _part(spec, "nodeSelector").items():
        if labels.get(key) != value:
            has = f"it has {labels[key]}" if key in labels else "it has no such label"
            found.append(Problem("selector", f"selector {key}={value}: {has}"))
    terms = required_terms(spec)
    if terms and not any(_term(labels, node, term) for term in terms):
        either = " or ".join(_term_words(term) for term in terms)
        found.append(Problem("selector", f"affinity {either} does not match"))
    if left:
        for resource, want in (requests(spec) if wanted is None else wanted).items():
            room = max(left.get(resource, Decimal(0)), Decimal(0))
            if want > room:
                words = f"{shown(resource, want)} asked, {shown(resource, room)} left"
                found.append(Problem("room", f"Insufficient {resource}: {words}"))
        if left.get("pods", Decimal(1)) < 1:
            found.append(Problem("room", "Too many pods"))
    return found


def required_terms(spec: Spec) -> list[Mapping[str, Any]]:
    """Node selector terms of which one has to match."""
    required = _part(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    return list(required.get("nodeSelectorTerms") or ())


def nearest(
    spec: Spec, nodes: Iterable[Manifest], pods: Iterable[Manifest]
) -> tuple[Manifest, list[str]] | None:
    """The node that lacks least of what a pod asks for, and what it lacks; None: there is no node."""
    every = list(pods)
    judged = [(node, [one.text for one in why_not(spec, node, free_of(node, every))]) for node in nodes]

    def lack(one: tuple[Manifest, list[str]]) -> tuple[int, bool]:
        node, problems = one
        has = any(key in node["status"].get("capacity", {}) for key in requests(spec) if "/" in key)
        return len(problems) + (0 if has or not asked(spec) else 2), not has

    return min(judged, key=lack, default=None)


def shown(resource: str, value: Decimal) -> str:
    """A quantity as people write it."""
    if resource == "cpu":
        return f"{int(value * 1000)}m" if value % 1 else str(int(value))
    if resource in ("memory", "ephemeral-storage"):
        return f"{int(value / 2**20)}Mi"
    return str(int(value))


def amount(value: Any) -> Decimal:
    """A quantity that the API server has taken already."""
    return quantity(value) or Decimal(0)


def _of(container: Mapping[str, Any]) -> dict[str, Decimal]:
    # a request that is left out is its limit
    merged = {**_part(container, "resources", "limits"), **_part(container, "resources", "requests")}
    return {key: amount(value) for key, value in merged.items()}


def _part(whole: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping in a mapping; what is empty or none of it counts as empty."""
    for key in path:
        found = whole.get(key)
        whole = found if isinstance(found, Mapping) else {}
    return whole


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, Decimal(0)) + value


def _most(total: dict[str, Decimal], other: Mapping[str, Decimal]) -> None:
    for key, value in other.items():
        total[key] = max(total.get(key, Decimal(0)), value)


def _term(labels: Mapping[str, str], node: Manifest, term: Mapping[str, Any]) -> bool:
    rules, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not rules and not fields:
        return False  # an empty term selects nothing
    name = {"metadata.name": node["metadata"]["name"]}
    return all(_rule(labels, one) for one in rules) and all(_rule(name, one) for one in fields)


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
        f"{one['key']} {one['operator']} {','.join(one.get('values') or ())}".strip() for one in rules
    )
