"""On which machines a GPU pod can run, and why not on the others.

Requests are held against what a node of each type has for pods, less what DaemonSets take of it, see
`gpukiln.kubernetes.machines`; labels and taints against what its nodes bear, see `gpukiln.kubernetes.pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from gpukiln.kubernetes.check.workload import HAMI, Workload, at, mapping
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.pools import Pool
from gpukiln.kubernetes.scheduling import (
    GPU,
    FilterFailure,
    Spec,
    amount,
    asked,
    distance,
    requests,
    shown,
    why_not,
)
from gpukiln.typed import strict


def _daemon(*cpu: str) -> Spec:
    containers = [{"resources": {"requests": {"cpu": one}}} for one in cpu]
    return {"containers": containers, "tolerations": [{"operator": "Exists"}]}


# What EKS runs on each node: aws-node and its network policy agent (aws/amazon-vpc-cni-k8s,
# charts/aws-vpc-cni/values.yaml), kube-proxy (the add-on). What files or a cluster have takes their place.
OF_EKS: Mapping[str, Spec] = {"aws-node": _daemon("25m", "25m"), "kube-proxy": _daemon("100m")}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SAID = 3  # machines on which it can't run that are told, the nearest


class NodeFit(NamedTuple):
    """A type or a node of a pool, and why a pod does not fit it."""

    pool: Pool
    name: str
    problems: tuple[FilterFailure, ...]

    @property
    def lacks_altogether(self) -> int:
        """Of how many resources it has nothing."""
        return sum(one.kind == "room" and one.text.endswith(" 0 left") for one in self.problems)


@strict
class Elsewhere:
    """Where a pod can't run."""

    on: str
    why: str


@strict
class Placed:
    """Where a GPU pod can run.

    Args:
        object: Kind and name.
        on: Instance types, or nodes, the smallest first.
        not_on: Those where it can't, that which lacks least first.
    """

    file: str
    line: int
    object: str
    on: tuple[str, ...]
    not_on: tuple[Elsewhere, ...]


def places(spec: Spec, pools: Sequence[Pool], daemons: Sequence[Spec]) -> list[NodeFit]:
    """Every candidate, in the order of the pools."""
    wanted, found = requests(spec), []
    takes = [(daemon, requests(daemon)) for daemon in daemons]
    shares = any(key in HAMI for key in wanted)  # several containers and pods may have one GPU
    for pool in pools:
        over = [
            FilterFailure(
                "room", f"the pool's limit of {key} is {shown(key, limit)}, {shown(key, wanted[key])} asked"
            )
            for key, limit in pool.limits.items()
            if key in wanted and wanted[key] > limit
        ]
        for name, node in pool.candidates(spec):
            beyond = [] if pool.nodes else pool.beyond_limits(name)
            left = _left(node, takes)
            known = {
                key: value
                for key, value in wanted.items()
                # Other plugins' are not known before there is a node.
                if pool.nodes or key in left or (key.startswith("nvidia.com/") and key not in HAMI)
            }
            if shares and not pool.nodes:
                known.pop(GPU, None)
            found.append(
                NodeFit(
                    pool,
                    name,
                    (
                        *why_not(spec, node, left, known),
                        *over,
                        *(FilterFailure("room", one) for one in beyond),
                    ),
                )
            )
    return found


def placed(
    workloads: Iterable[Workload],
    places_of: Callable[[Workload], list[NodeFit]],
    nowhere: Mapping[int, tuple[str, str]],
) -> tuple[Placed, ...]:
    """Where the GPU pods of some files can run.

    Args:
        nowhere: `id` of a pod whose selector is wrong, to all places in words, and what is wrong.
    """
    found = []
    for one in workloads:
        if id(one) in nowhere and judged(one):
            where = Elsewhere(*nowhere[id(one)])
            found.append(
                Placed(one.resource.file, one.resource.line_of(one.where), one.resource.label, (), (where,))
            )
        elif judged(one):
            there = places_of(one)
            lacking = sorted(
                (place for place in there if place.problems), key=lambda place: distance(place.problems)
            )
            found.append(
                Placed(
                    one.resource.file,
                    one.resource.line_of(one.where),
                    one.resource.label,
                    tuple(dict.fromkeys(place.name for place in there if not place.problems)),
                    tuple(
                        Elsewhere(place.name, "; ".join(problem.text for problem in place.problems))
                        for place in lacking
                    ),
                )
            )
    return tuple(found)


def judged(workload: Workload) -> bool:
    """Whether it asks for a GPU in a form that can be held against a machine."""
    spec = workload.pod
    try:
        asks = mapping(spec) and not spec.get("nodeName") and asked(spec) and requests(spec)
        return bool(asks) and has_form(spec)
    except (AttributeError, TypeError, ValueError):  # no form of a pod: other rules say so
        return False


def has_form(spec: Spec) -> bool:
    """Whether what a node is chosen by has the form of a pod's spec; the schema's faults say what has not."""
    listed = [spec.get(key) or [] for key in ("containers", "initContainers", "tolerations")]
    terms: Any = at(spec, ("affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms")) or []
    if not all(map(_are_mappings, [*listed, terms])) or not isinstance(
        spec.get("nodeSelector") or {}, Mapping
    ):
        return False
    parts = [term.get(key) or [] for term in terms for key in ("matchExpressions", "matchFields")]
    return all(map(_are_mappings, parts)) and all(_is_rule(one) for part in parts for one in part)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def _is_rule(rule: Mapping[str, Any]) -> bool:
    values = rule.get("values") or []
    return (
        isinstance(rule.get("key"), str)
        and rule.get("operator") in ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
        and isinstance(values, list)
        and all(isinstance(one, str) for one in values)
    )


def _left(node: Manifest, daemons: Sequence[tuple[Spec, Mapping[str, Decimal]]]) -> dict[str, Decimal]:
    """What a node has for pods, less what those take that run on each node that they fit."""
    left = dict(_offered(tuple(node["status"]["allocatable"].items())))
    for spec, taken in daemons:
        if not why_not(spec, node, {}):
            for key, value in {**taken, "pods": Decimal(1)}.items():
                left[key] = left.get(key, Decimal(0)) - value
    return left


@lru_cache(maxsize=512)
def _offered(amounts: tuple[tuple[str, str], ...]) -> dict[str, Decimal]:
    return {key: Decimal(value) if value == "Infinity" else amount(value) for key, value in amounts}


def words(one: Placed) -> list[str]:
    """Lines for people."""
    if not one.on and not one.not_on:
        return [f"{one.object} is for machines that nothing is known of here; --pools or --cluster has them"]
    lines = [f"{one.object} runs on {_some(one.on)}" if one.on else f"{one.object} runs on none of them"]
    if one.not_on:
        lines += [f"  not on {where.on}: {where.why}" for where in one.not_on[:SAID]]
        if len(one.not_on) > SAID:
            more = len(one.not_on) - SAID
            lines.append(f"  nor on {more} other{'s' if more > 1 else ''} (--json has all)")
    return lines


def _some(names: Sequence[str]) -> str:
    more = len(names) - 6
    rest = f" and {more} other{'s' if more > 1 else ''}" if more > 0 else ""
    return ", ".join(names[:6]) + rest
