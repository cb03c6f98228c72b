"""The rule type, and the context that a rule gets in addition to its subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from gpukiln.findings import Severity
from gpukiln.kubernetes.check.crds import Definition, definitions_of
from gpukiln.kubernetes.check.fit import EKS_DAEMON_SETS, DaemonSetLoad, NodeFit, has_pod_shape, node_fits
from gpukiln.kubernetes.check.workload import Prose, Resource, Violation, Workload, at
from gpukiln.kubernetes.pools import Pool, default_pool, pools_in

S = TypeVar("S", Resource, Workload, Prose, Any)
NEWEST = 37  # minor of Kubernetes that kubernetes-validate 1.37 knows


@dataclass(frozen=True)
class Context:
    """What a rule may use in addition to its subject.

    Args:
        minors: The requested minor versions of Kubernetes, ascending.
        pools: Node pools where pods may land; empty: those among the resources, or else all GPU types.
        types: Instance types where pods may land, if there are no pools.
        driver: NVIDIA driver of the nodes, if nothing else defines it.
        resources: Everything that was read in the same run.
        definitions: Further CustomResourceDefinitions, by apiVersion and kind.
    """

    minors: tuple[int, ...] = (NEWEST,)
    pools: tuple[Pool, ...] = ()
    types: tuple[str, ...] = ()
    driver: str = ""
    resources: tuple[Resource, ...] = ()
    definitions: Mapping[tuple[str, str], Definition] = field(default_factory=dict)
    # By id(): a resource holds mappings, and can't be hashed.
    _custom: dict[int, tuple[list[Violation], list[str]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _places: dict[int, list[NodeFit]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _kinds(self) -> Mapping[str, tuple[Resource, ...]]:
        by_kind: dict[str, list[Resource]] = {}
        for resource in self.resources:
            by_kind.setdefault(resource.kind, []).append(resource)
        return {kind: tuple(resources) for kind, resources in by_kind.items()}

    def of_kind(self, kind: str, *, same_namespace_as: Resource | None = None) -> tuple[Resource, ...]:
        """Objects that were read in the same run.

        Args:
            same_namespace_as: Only objects in the namespace of this one; an object without a namespace may be
                in any.
        """
        same_kind = self._kinds.get(kind, ())
        if same_namespace_as is None or not same_namespace_as.namespace:
            return same_kind
        return tuple(
            resource for resource in same_kind if resource.namespace in ("", same_namespace_as.namespace)
        )

    @property
    def minor(self) -> int:
        """The newest version: an API that it no longer serves counts as removed."""
        return self.minors[-1]

    @cached_property
    def candidates(self) -> tuple[Pool, ...]:
        """Where GPU pods may land."""
        if self.types:
            return (default_pool(self.types, self.driver),)
        objects = [resource.object for resource in self.resources if resource.role == "object"]
        return self.pools or pools_in(objects, self.driver) or (default_pool(driver=self.driver),)

    @property
    def where(self) -> str:
        """The candidates in words."""
        if self.types:
            return ", ".join(self.types)
        # The default pool is a list of types, whose name would say nothing.
        if self.candidates[0].anything:
            return f"all {len(self.candidates[0].types)} GPU types of EC2"
        names = ", ".join(pool.name for pool in self.candidates)
        return f"{'pools' if len(self.candidates) > 1 else 'pool'} {names}"

    @cached_property
    def _load(self) -> DaemonSetLoad:
        """The load of DaemonSets: those among the resources, and those of EKS that they don't replace."""
        own = {
            resource.name: resource.object["spec"]["template"]["spec"]
            for resource in self.resources
            if resource.kind == "DaemonSet"
            and at(resource.object, ("spec", "template", "spec", "containers"))
            and has_pod_shape(resource.object["spec"]["template"]["spec"])
        }
        return DaemonSetLoad({**EKS_DAEMON_SETS, **own}.values())

    @cached_property
    def custom_kinds(self) -> Mapping[tuple[str, str], Definition]:
        """Custom kinds by apiVersion and kind; `definitions` take precedence over those of the resources."""
        return {**definitions_of(self.resources), **self.definitions}

    def custom_form(
        self, resource: Resource, check: Callable[[Resource, Definition], tuple[list[Violation], list[str]]]
    ) -> tuple[list[Violation], list[str]] | None:
        """The result of a check of a custom object, computed once; None if its kind has no definition."""
        definition = (
            self.custom_kinds.get((resource.api, resource.kind)) if resource.role == "object" else None
        )
        if definition is None:
            return None
        if id(resource) not in self._custom:
            self._custom[id(resource)] = check(resource, definition)
        return self._custom[id(resource)]

    def node_fits(self, workload: Workload) -> list[NodeFit]:
        """Every candidate for a GPU pod, with the reasons why it does not fit."""
        if id(workload) not in self._places:
            self._places[id(workload)] = node_fits(workload.pod, self.candidates, self._load)
        return self._places[id(workload)]


@dataclass(frozen=True)
class ManifestRule:
    """A rule.

    Args:
        id: Words with hyphens; stays the same, because users skip rules by id.
        severity: error: it can't work, or does harm; warning: it works, and costs or fails later.
        title: The rule as a statement that must hold.
        reason: What happens if it does not hold.
        source: Source of the fact.
        fix: What to write instead.
        subject: The type that it examines: Workload, Resource, CommandLine, Query, Prose or Rejection.
        check: Yields the violations of a subject.
        fragments: For Workload: whether it applies to parts of a pod as well.
    """

    id: str
    severity: Severity
    title: str
    reason: str
    source: str
    fix: str
    subject: type[Any]
    check: Callable[[Any, Context], Iterable[Violation]]
    fragments: bool = True


def rule(
    id: str,
    severity: Severity,
    subject: type[S],
    *,
    title: str,
    reason: str,
    source: str,
    fix: str,
    fragments: bool = True,
) -> Callable[[Callable[[S, Context], Iterable[Violation]]], ManifestRule]:
    """Make a rule from a check function; see `ManifestRule`. `registry.py` finds it by its type."""

    def of(check: Callable[[S, Context], Iterable[Violation]]) -> ManifestRule:
        return ManifestRule(id, severity, title, reason, source, fix, subject, check, fragments)

    return of
