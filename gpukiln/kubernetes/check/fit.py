"""On which machines a GPU pod can run, and why not on the others.

Requests are compared with the allocatable resources of a node of each type (`gpukiln.kubernetes.machines`)
minus the requests of DaemonSets; selectors and tolerations with the labels and taints of its nodes
(`gpukiln.kubernetes.pools`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from gpukiln.kubernetes.check.workload import HAMI, Workload, at, mapping
from gpukiln.kubernetes.machines import GPU, PRODUCT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.pools import Pool
from gpukiln.kubernetes.scheduling import (
    FilterFailure,
    Spec,
    amount,
    distance,
    gpus_requested,
    mismatches,
    quantity_text,
    requests,
    required_terms,
    shortages,
)
from gpukiln.typed import strict


def _daemon(*cpu: str) -> Spec:
    containers = [{"resources": {"requests": {"cpu": cpus}}} for cpus in cpu]
    return {"containers": containers, "tolerations": [{"operator": "Exists"}]}


# DaemonSets of EKS on each node: aws-node and its network policy agent (aws/amazon-vpc-cni-k8s,
# charts/aws-vpc-cni/values.yaml), kube-proxy (the add-on). DaemonSets of the same name in files or in the
# cluster replace them.
EKS_DAEMON_SETS: Mapping[str, Spec] = {"aws-node": _daemon("25m", "25m"), "kube-proxy": _daemon("100m")}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SHOWN_MISFITS = 3  # nearest machines that are listed with the reason why the pod does not fit


class NodeFit(NamedTuple):
    """A type or a node of a pool, and why a pod does not fit it."""

    pool: Pool
    name: str
    problems: tuple[FilterFailure, ...]

    @property
    def absent_resources(self) -> int:
        """The number of resources of which nothing is left."""
        return sum(
            problem.kind == "resources" and problem.text.endswith(" 0 left") for problem in self.problems
        )


@strict
class Misfit:
    """A machine that a pod does not fit, and why."""

    on: str
    why: str


@strict
class Placement:
    """Where a GPU pod can run.

    Args:
        object: Kind and name.
        on: Instance types or nodes, the smallest first.
        not_on: Machines that it does not fit, the nearest first.
    """

    file: str
    line: int
    object: str
    on: tuple[str, ...]
    not_on: tuple[Misfit, ...]


class DaemonSetLoad:
    """Resources that DaemonSets leave to other pods, computed once for each kind of node."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._pods = [(spec, {**requests(spec), "pods": Decimal(1)}) for spec in specs]
        rules = [
            rule
            for spec, _ in self._pods
            for term in required_terms(spec)
            for rule in term.get("matchExpressions") or ()
        ]
        selected = {key for spec, _ in self._pods for key in spec.get("nodeSelector") or ()}
        # The cache key: resources and matching DaemonSets of a node depend on its pool, its name and these
        # labels; the product label says whether its GPUs are shared.
        self._labels = sorted({PRODUCT, *selected, *(rule["key"] for rule in rules)})
        self._known: dict[tuple[Any, ...], Mapping[str, Decimal]] = {}

    def left(self, pool: Pool, name: str, node: Manifest) -> Mapping[str, Decimal]:
        labels = node["metadata"].get("labels", {})
        key = (pool, name, *(labels.get(label) for label in self._labels))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._computed(node)
        return known

    def _computed(self, node: Manifest) -> dict[str, Decimal]:
        left = {
            key: Decimal(value) if value == "Infinity" else amount(value)
            for key, value in node["status"]["allocatable"].items()
        }
        for spec, taken in self._pods:
            if not mismatches(spec, node):
                for key, value in taken.items():
                    left[key] = left.get(key, Decimal(0)) - value
        return left


def node_fits(spec: Spec, pools: Sequence[Pool], load: DaemonSetLoad) -> list[NodeFit]:
    """Every candidate, in the order of the pools."""
    demand, fits = requests(spec), []
    shares = any(key in HAMI for key in demand)  # with HAMi several containers and pods share a GPU
    for pool in pools:
        over = [
            FilterFailure(
                "resources",
                f"the pool's limit of {key} is {quantity_text(key, limit)}, "
                f"{quantity_text(key, demand[key])} requested",
            )
            for key, limit in pool.limits.items()
            if key in demand and demand[key] > limit
        ]
        for name, node in pool.candidates(spec):
            left = load.left(pool, name, node)
            known = {
                key: value
                for key, value in demand.items()
                # Resources of other device plugins are unknown until a node exists.
                if pool.nodes or key in left or (key.startswith("nvidia.com/") and key not in HAMI)
            }
            if shares and not pool.nodes:
                # HAMi puts several pods on one GPU: how many GPUs of a machine are free is unknown.
                known.pop(GPU, None)
            problems = [*mismatches(spec, node), *shortages(known, left), *over]
            if pool.limits and not pool.nodes:
                problems += [FilterFailure("resources", limit) for limit in pool.beyond_limits(name)]
            fits.append(NodeFit(pool, name, tuple(problems)))
    return fits


def placement(
    workload: Workload, fits: Callable[[Workload], list[NodeFit]], nowhere: Misfit | None
) -> Placement | None:
    """Where a pod can run; None if it requests no GPU.

    Args:
        fits: Returns every candidate, see `node_fits`.
        nowhere: All machines in words and the reason, if no node satisfies its selector.
    """
    if not is_schedulable(workload):
        return None
    on: tuple[str, ...] = ()
    not_on: tuple[Misfit, ...] = (nowhere,) if nowhere else ()
    if not nowhere:
        candidates = fits(workload)
        lacking = sorted((fit for fit in candidates if fit.problems), key=lambda fit: distance(fit.problems))
        on = tuple(dict.fromkeys(fit.name for fit in candidates if not fit.problems))
        not_on = tuple(
            Misfit(fit.name, "; ".join([problem.text for problem in fit.problems])) for fit in lacking
        )
    resource = workload.resource
    return Placement(resource.file, resource.line_of(workload.where), resource.label, on, not_on)


def is_schedulable(workload: Workload) -> bool:
    """Whether it requests a GPU and is well-formed enough to be compared with a machine."""
    spec = workload.pod
    try:
        asks = mapping(spec) and not spec.get("nodeName") and gpus_requested(spec) and requests(spec)
        return bool(asks) and has_pod_shape(spec)
    except (AttributeError, TypeError, ValueError):  # malformed: the rule `schema` reports it
        return False


def has_pod_shape(spec: Spec) -> bool:
    """Whether the node selection of a pod spec is well-formed; the rule `schema` reports the others."""
    listed = [spec.get(key) or [] for key in ("containers", "initContainers", "tolerations")]
    terms: Any = at(spec, ("affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms")) or []
    if not all(map(_are_mappings, [*listed, terms])) or not isinstance(
        spec.get("nodeSelector") or {}, Mapping
    ):
        return False
    parts = [term.get(key) or [] for term in terms for key in ("matchExpressions", "matchFields")]
    return all(map(_are_mappings, parts)) and all(_is_rule(item) for part in parts for item in part)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _is_rule(rule: Mapping[str, Any]) -> bool:
    values = rule.get("values") or []
    return (
        isinstance(rule.get("key"), str)
        and rule.get("operator") in ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
        and isinstance(values, list)
        and all(isinstance(value, str) for value in values)
    )


def placement_lines(placed: Placement) -> list[str]:
    """Lines of output."""
    if not placed.on and not placed.not_on:
        return [
            f"{placed.object} needs machines that gpukiln does not know; name them by --pools or --cluster"
        ]
    lines = [
        f"{placed.object} runs on {_first_names(placed.on)}"
        if placed.on
        else f"{placed.object} runs on none of them"
    ]
    if placed.not_on:
        lines += [f"  not on {where.on}: {where.why}" for where in placed.not_on[:SHOWN_MISFITS]]
        if len(placed.not_on) > SHOWN_MISFITS:
            more = len(placed.not_on) - SHOWN_MISFITS
            lines.append(f"  nor on {more} other{'s' if more > 1 else ''} (--json has all)")
    return lines


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - 6
    rest = f" and {more} other{'s' if more > 1 else ''}" if more > 0 else ""
    return ", ".join(names[:6]) + rest
