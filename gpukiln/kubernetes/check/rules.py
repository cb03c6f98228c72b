"""What a rule is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from gpukiln.kubernetes.check.crds import Definition, of_things
from gpukiln.kubernetes.check.fit import OF_EKS, Place, has_form, places
from gpukiln.kubernetes.check.workload import Path, Prose, Thing, Workload, at
from gpukiln.kubernetes.pools import Pool, default_pool, pools_in

Severity = Literal["error", "warning"]
S = TypeVar("S", Thing, Workload, Prose, Any)
NEWEST = 37  # minor of Kubernetes that kubernetes-validate 1.37 knows


@dataclass(frozen=True)
class Context:
    """What a rule may know beside what it judges.

    Args:
        minors: Of Kubernetes 1.x, those asked for, in order.
        pools: Node pools that pods may land on; empty: those among the things, else every type that is sold.
        types: Instance types that pods may land on, where there are no pools.
        driver: NVIDIA driver of the nodes, where nothing else says it.
        things: All that was read in the same run.
        definitions: CustomResourceDefinitions beside them, by apiVersion and kind.
    """

    minors: tuple[int, ...] = (NEWEST,)
    pools: tuple[Pool, ...] = ()
    types: tuple[str, ...] = ()
    driver: str = ""
    things: tuple[Thing, ...] = ()
    definitions: Mapping[tuple[str, str], Definition] = field(default_factory=dict)
    _custom: dict[int, tuple[list[Fault], list[str]]] = field(default_factory=dict, compare=False, repr=False)
    _places: dict[int, list[Place]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _kinds(self) -> Mapping[str, tuple[Thing, ...]]:
        found: dict[str, list[Thing]] = {}
        for one in self.things:
            found.setdefault(one.kind, []).append(one)
        return {kind: tuple(things) for kind, things in found.items()}

    def of_kind(self, kind: str, *, beside: Thing | None = None) -> tuple[Thing, ...]:
        """Objects that were read in the same run.

        Args:
            beside: An object in whose namespace they must be; one that states none may be in any.
        """
        found = self._kinds.get(kind, ())
        if beside is None or not beside.namespace:
            return found
        return tuple(one for one in found if one.namespace in ("", beside.namespace))

    @property
    def minor(self) -> int:
        """The newest of them: what is gone there is gone."""
        return self.minors[-1]

    @cached_property
    def candidates(self) -> tuple[Pool, ...]:
        """Where GPU pods may land."""
        if self.types:
            return (default_pool(self.types, self.driver),)
        objects = [one.object for one in self.things if one.role == "object"]
        return self.pools or pools_in(objects, self.driver) or (default_pool(driver=self.driver),)

    @property
    def where(self) -> str:
        """The candidates in words."""
        if self.types:
            return ", ".join(self.types)
        if self.candidates[0].anything:
            return f"all {len(self.candidates[0].types)} types with a GPU that EC2 sells"
        names = ", ".join(one.name for one in self.candidates)
        return f"{'pools' if len(self.candidates) > 1 else 'pool'} {names}"

    @cached_property
    def daemons(self) -> tuple[Mapping[str, Any], ...]:
        """Pods that run on each node that they fit."""
        found = {
            one.name: one.object["spec"]["template"]["spec"]
            for one in self.things
            if one.kind == "DaemonSet"
            and at(one.object, ("spec", "template", "spec", "containers"))
            and has_form(one.object["spec"]["template"]["spec"])
        }
        return tuple({**OF_EKS, **found}.values())

    @cached_property
    def custom_kinds(self) -> Mapping[tuple[str, str], Definition]:
        """Custom kinds by apiVersion and kind: those that were given, then those among the things."""
        return {**of_things(self.things), **self.definitions}

    def custom_form(
        self, thing: Thing, check: Callable[[Thing, Definition], tuple[list[Fault], list[str]]]
    ) -> tuple[list[Fault], list[str]] | None:
        """What a check says of a custom object by its definition, asked once; None where there is none."""
        definition = self.custom_kinds.get((thing.api, thing.kind)) if thing.role == "object" else None
        if definition is None:
            return None
        if id(thing) not in self._custom:
            self._custom[id(thing)] = check(thing, definition)
        return self._custom[id(thing)]

    def places(self, workload: Workload) -> list[Place]:
        """Every place that a GPU pod may land on, and why it can't."""
        if id(workload) not in self._places:
            self._places[id(workload)] = places(workload.pod, self.candidates, self.daemons)
        return self._places[id(workload)]


@dataclass(frozen=True)
class Fault:
    """One place where a rule is broken.

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
class Rule:
    """Something that must hold.

    Args:
        id: Words with hyphens; never changed, people skip it by name.
        severity: error: it can't work, or does harm; warning: it works, and costs or fails later.
        title: What must hold.
        reason: What happens where it doesn't.
        source: Where that is stated.
        fix: What to write instead.
        subject: What it judges: Workload, Thing, Command, Query or Prose.
        judge: Gives the faults of a subject.
        fragments: Of Workload: whether it judges what is only a part of a pod.
    """

    id: str
    severity: Severity
    title: str
    reason: str
    source: str
    fix: str
    subject: type[Any]
    judge: Callable[[Any, Context], Iterable[Fault]]
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
) -> Callable[[Callable[[S, Context], Iterable[Fault]]], Rule]:
    """Make a rule of a function that judges; see `Rule`. `registry.py` finds it by its type."""

    def made(judge: Callable[[S, Context], Iterable[Fault]]) -> Rule:
        return Rule(id, severity, title, reason, source, fix, subject, judge, fragments)

    return made
