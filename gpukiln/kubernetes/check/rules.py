"""What a rule is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from gpukiln.kubernetes.check.workload import Path, Prose, Thing, Workload

Severity = Literal["error", "warning"]
S = TypeVar("S", Thing, Workload, Prose, Any)
NEWEST = 37  # minor of Kubernetes that kubernetes-validate 1.37 knows


@dataclass(frozen=True)
class Context:
    """What a rule may know beside what it judges.

    Args:
        minors: Of Kubernetes 1.x, those asked for, in order.
        pools: Node pools that pods may land on; empty: unknown.
        types: Instance types that pods may land on; empty: unknown.
        things: All that was read in the same run.
    """

    minors: tuple[int, ...] = (NEWEST,)
    pools: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    things: tuple[Thing, ...] = ()

    @property
    def minor(self) -> int:
        """The newest of them: what is gone there is gone."""
        return self.minors[-1]

    @cached_property
    def node_pools(self) -> tuple[Thing, ...]:
        """Karpenter's pools among the things."""
        return tuple(one for one in self.things if one.kind == "NodePool")


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
