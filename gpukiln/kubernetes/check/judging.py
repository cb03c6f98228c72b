"""Rules put to all that was read: findings, what was not checked, and their counts."""

from __future__ import annotations

from collections.abc import Iterable

from gpukiln.kubernetes.check.fit import Placed, has_form, placed
from gpukiln.kubernetes.check.reading import Reading, guarded
from gpukiln.kubernetes.check.registry import rules
from gpukiln.kubernetes.check.rules import Context, Fault, Rule, Severity
from gpukiln.kubernetes.check.rules_form import unserved
from gpukiln.kubernetes.check.rules_running import PREFERRED
from gpukiln.kubernetes.check.schema import custom_faults, known
from gpukiln.kubernetes.check.workload import (
    Broken,
    Command,
    Prose,
    Query,
    Subject,
    Thing,
    Workload,
    dotted,
    mapping,
)
from gpukiln.typed import strict, unknown

SCHEMA = "k8s.check/1"
# Rules on labels that no node bears: a pod that breaks one is not said to run where the label is.
NOWHERE = ("karpenter-old-label", "label-by-hand", "spot-label", "spot-value", "type-retired")
SKIP = "gpukiln.io/skip."  # annotation of an object or its pod: SKIP + rule = reason


@strict
class Finding:
    """One place where a rule is broken.

    Args:
        rule: Its id.
        line: From 1.
        object: Kind and name, or what else it stands in; empty of a script or a document.
        path: In the object, for example spec.template.spec; empty where there is none.
        found: What was found, and what was wanted.
        reason: What happens.
        fix: What to write instead.
        source: Where that is stated.
    """

    rule: str
    severity: Severity
    file: str
    line: int
    object: str
    path: str
    found: str
    reason: str
    fix: str
    source: str


@strict
class Unchecked:
    """What was read and could not be judged; no fault, and no proof that there is none."""

    file: str
    line: int
    reason: str


@strict
class Skipped:
    """Findings that were not wanted.

    Args:
        rule: Its id.
        reason: Why, as it was given; empty where it was not.
        findings: How many there are.
    """

    rule: str
    reason: str
    findings: int


@strict
class Counts:
    """How much was read, and what came of it."""

    files: int
    objects: int
    pods: int
    errors: int
    warnings: int
    unchecked: int


@strict
class Report:
    """What `k8s.check` says.

    Args:
        kubernetes: Versions whose schemas it was judged by.
        placed: GPU pods, and where they can run.
    """

    schema: str
    kubernetes: tuple[str, ...]
    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...]
    skipped: tuple[Skipped, ...]
    placed: tuple[Placed, ...]
    counts: Counts


def choose(only: Iterable[str], skip: Iterable[str]) -> tuple[list[Rule], dict[str, str]]:
    """The rules to judge by, and the reason of each that is skipped.

    Args:
        only: Ids; all where there are none.
        skip: Ids, each with `=` and a reason behind it or without.

    Raises:
        UsageError: There is no such rule.
    """
    named = {one.id: one for one in rules()}
    skipped = {name: reason for name, _, reason in (one.partition("=") for one in skip)}
    wanted = list(only)
    for name in (*wanted, *skipped):
        if name not in named:
            raise unknown("rule", name, named)
    return [one for one in rules() if not wanted or one.id in wanted], skipped


def judge(reading: Reading, context: Context, only: Iterable[str] = (), skip: Iterable[str] = ()) -> Report:
    """Put rules to what was read.

    Args:
        only: See `choose`.
        skip: See `choose`.
    """
    chosen, skipped = choose(only, skip)
    findings: list[Finding] = []
    gaps = list(reading.unchecked)
    nowhere: dict[int, str] = {}
    left: dict[tuple[str, str], int] = dict.fromkeys(skipped.items(), 0)
    for subject in _subjects(reading):
        for rule in chosen:
            if not isinstance(subject, rule.subject):
                continue
            if isinstance(subject, Workload) and not (rule.fragments or subject.whole):
                continue
            with guarded(gaps, subject.file, _line(subject), f"rule {rule.id}"):
                for fault in rule.judge(subject, context):
                    reason = skipped.get(rule.id, _annotated(subject, rule))
                    if reason is None:
                        if rule.id in NOWHERE and PREFERRED not in fault.path:
                            nowhere.setdefault(id(subject), fault.text)
                        findings.append(_finding(rule, subject, fault))
                    else:
                        left[rule.id, reason] = left.get((rule.id, reason), 0) + 1
    fits: list[Placed] = []
    elsewhere = {key: (context.where, why) for key, why in nowhere.items()}
    for workload in reading.workloads:
        with guarded(gaps, workload.file, workload.line, "the search for machines"):
            fits += placed([workload], context.places, elsewhere)
            if workload.whole and workload.gpus and not has_form(workload.pod):
                what = (
                    f"{workload.label}: no machine is looked for: what it selects nodes by has another form"
                )
                gaps.append((workload.file, workload.line, what))
    order = {name: number for number, name in enumerate(reading.files)}
    findings = sorted(
        dict.fromkeys(findings),
        key=lambda one: (order[one.file], one.line, one.severity, one.rule, one.found),
    )
    unchecked = [Unchecked(*one) for one in gaps] + _unknown_kinds(reading.things, context)
    return Report(
        SCHEMA,
        tuple(f"1.{minor}" for minor in context.minors),
        tuple(findings),
        tuple(unchecked),
        tuple(Skipped(name, reason, many) for (name, reason), many in sorted(left.items())),
        tuple(fits),
        Counts(
            files=len(reading.files),
            objects=sum(one.role == "object" for one in reading.things),
            pods=len(reading.workloads),
            errors=sum(one.severity == "error" for one in findings),
            warnings=sum(one.severity == "warning" for one in findings),
            unchecked=len(unchecked),
        ),
    )


def _subjects(reading: Reading) -> Iterable[Subject]:
    yield from reading.broken
    yield from reading.things
    yield from reading.workloads
    yield from reading.commands
    yield from reading.queries
    yield from reading.prose


def _annotated(subject: Subject, rule: Rule) -> str | None:
    """The reason why an object is not to be judged by a rule; None where it is."""
    thing = _thing(subject)
    metadata = [thing.metadata] if thing else []
    if isinstance(subject, Workload):
        metadata.append(subject.pod_metadata)
    for one in metadata:
        reason = mapping(one.get("annotations")).get(SKIP + rule.id)
        if reason is not None:
            return str(reason)
    return None


def _thing(subject: Subject) -> Thing | None:
    if isinstance(subject, Thing):
        return subject
    return subject.thing if isinstance(subject, Workload | Command | Broken) else None


def _line(subject: Subject) -> int:
    return 1 if isinstance(subject, Prose) else subject.line


def _finding(rule: Rule, subject: Subject, fault: Fault) -> Finding:
    thing = _thing(subject)
    path = fault.path or (subject.path if isinstance(subject, Command) else ())
    if fault.line:
        line = fault.line
    elif isinstance(subject, Command | Query | Broken):
        line = subject.line
    else:
        line = thing.line_of(path) if thing else 1
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        file=subject.file,
        line=line,
        object=thing.label if thing else "",
        path=dotted(path),
        found=fault.text,
        reason=rule.reason,
        fix=fault.fix or rule.fix,
        source=rule.source,
    )


def _unknown_kinds(things: Iterable[Thing], context: Context) -> list[Unchecked]:
    """Kinds whose form nobody told us; their pods are judged all the same."""
    return [
        Unchecked(one.file, one.line, f"{one.api} {one.kind}: its form is not known here")
        for one in things
        if one.role == "object"
        and one.api
        and one.kind
        and not unserved(one)
        and not known(one, context.minor)
        and (one.api, one.kind) not in context.custom_kinds
    ] + [
        Unchecked(one.file, one.line, f"{one.label}: {text}")
        for one in things
        if (custom := context.custom_form(one, custom_faults)) is not None
        for text in custom[1]
    ]
