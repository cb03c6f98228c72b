"""Applies the rules to everything that was read; returns findings, unchecked items and counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from gpukiln.findings import SEVERITIES, Finding
from gpukiln.kubernetes.check.fit import Misfit, Placement, has_pod_shape, placement
from gpukiln.kubernetes.check.reading import Reading, add_gap, unchecked_on_error
from gpukiln.kubernetes.check.registry import rules
from gpukiln.kubernetes.check.rules import Context, ManifestRule
from gpukiln.kubernetes.check.rules_form import unserved
from gpukiln.kubernetes.check.rules_running import PREFERRED
from gpukiln.kubernetes.check.schema import custom_violations, has_schema
from gpukiln.kubernetes.check.workload import (
    CommandLine,
    Prose,
    Query,
    Rejection,
    Resource,
    Subject,
    UncheckedItem,
    Violation,
    Workload,
    dotted,
    mapping,
)
from gpukiln.typed import strict, unknown

SCHEMA = "k8s.check/1"
# Rules on selectors that no node satisfies: the report lists no machine for a pod that violates one.
UNSATISFIABLE_RULES = ("karpenter-old-label", "label-by-hand", "spot-label", "spot-value", "type-retired")
SKIP_ANNOTATION = "gpukiln.io/skip."  # annotation of an object or its pod: SKIP + rule = reason


@strict
class SkippedRule:
    """A rule that the user skips.

    Args:
        rule: Id of the rule.
        reason: The reason that the user gave; empty: none.
        findings: Number of skipped findings.
    """

    rule: str
    reason: str
    findings: int


@strict
class CheckCounts:
    """Numbers of read items and of findings."""

    files: int
    objects: int
    pods: int
    errors: int
    warnings: int
    unchecked: int


@strict
class CheckReport:
    """The document of `k8s.check --json`.

    Args:
        kubernetes: Versions whose schemas were used.
        findings: The evidence of each has file, line (from 1), path in the object, and the reason of the
            rule.
        placed: GPU pods and the machines that they fit.
    """

    schema: str
    kubernetes: tuple[str, ...]
    findings: tuple[Finding, ...]
    unchecked: tuple[UncheckedItem, ...]
    skipped: tuple[SkippedRule, ...]
    placed: tuple[Placement, ...]
    counts: CheckCounts


def select_rules(only: Iterable[str], skip: Iterable[str]) -> tuple[list[ManifestRule], dict[str, str]]:
    """The rules to apply, and the skipped ids with their reasons.

    Args:
        only: Ids; empty: all rules.
        skip: ID or ID=REASON.

    Raises:
        UsageError: There is no such rule.
    """
    named = {known_rule.id: known_rule for known_rule in rules()}
    skipped = {name: reason for name, _, reason in (option.partition("=") for option in skip)}
    ids = list(only)
    for name in (*ids, *skipped):
        if name not in named:
            raise unknown("rule", name, named)
    return [known_rule for known_rule in rules() if not ids or known_rule.id in ids], skipped


def apply_rules(
    reading: Reading, context: Context, only: Iterable[str] = (), skip: Iterable[str] = ()
) -> CheckReport:
    """Apply rules to what was read.

    Args:
        only: See `choose`.
        skip: See `choose`.
    """
    chosen, skipped = select_rules(only, skip)
    findings: list[Finding] = []
    gaps = list(reading.unchecked)
    # By id() of the pod: why no machine is listed for it
    nowhere: dict[int, str] = {}
    left: dict[tuple[str, str], int] = dict.fromkeys(skipped.items(), 0)
    of_subject = {
        kind: [chosen_rule for chosen_rule in chosen if chosen_rule.subject is kind]
        for kind in get_args(Subject)
    }
    for subject in _subjects(reading):
        for rule in of_subject[type(subject)]:
            if isinstance(subject, Workload) and not (rule.fragments or subject.whole):
                continue
            try:
                for violation in rule.check(subject, context):
                    # --skip takes precedence over an annotation.
                    reason = skipped.get(rule.id, _skip_reason(subject, rule))
                    if reason is None:
                        # A preference does not exclude a node, a requirement does.
                        if rule.id in UNSATISFIABLE_RULES and PREFERRED not in violation.path:
                            nowhere.setdefault(id(subject), violation.text)
                        findings.append(_finding(rule, subject, violation))
                    else:
                        left[rule.id, reason] = left.get((rule.id, reason), 0) + 1
            except Exception as error:  # not `unchecked_on_error`: it needs the line for every subject
                add_gap(gaps, subject.file, _line(subject), f"rule {rule.id}", error)
    fits: list[Placement] = []
    for workload in reading.workloads:
        with unchecked_on_error(gaps, workload.file, workload.line, "the search for machines"):
            why = nowhere.get(id(workload))
            where = placement(workload, context.node_fits, Misfit(context.where, why) if why else None)
            fits += [where] if where else []
            if workload.whole and workload.wants_gpus and not has_pod_shape(workload.pod):
                what = f"{workload.label}: its node selection is malformed, so no machine is searched"
                gaps.append(UncheckedItem(workload.file, workload.line, what))
    # Findings have the order of the files on the command line.
    order = {name: number for number, name in enumerate(reading.files)}
    # A rule may report the same place for several pods of an object.
    unique = {
        (
            order[finding.evidence["file"]],
            finding.evidence["line"],
            SEVERITIES.index(finding.severity),
            finding.id,
            finding.message,
            finding.evidence["path"],
            finding.object,
            finding.remedy,
        ): finding
        for finding in findings
    }
    findings = [unique[key] for key in sorted(unique)]
    unchecked = [*gaps, *_unknown_kinds(reading.resources, context)]
    return CheckReport(
        SCHEMA,
        tuple(f"1.{minor}" for minor in context.minors),
        tuple(findings),
        tuple(unchecked),
        tuple(SkippedRule(name, reason, many) for (name, reason), many in sorted(left.items())),
        tuple(fits),
        CheckCounts(
            files=len(reading.files),
            objects=sum(resource.role == "object" for resource in reading.resources),
            pods=len(reading.workloads),
            errors=sum(finding.severity == "error" for finding in findings),
            warnings=sum(finding.severity == "warning" for finding in findings),
            unchecked=len(unchecked),
        ),
    )


def _subjects(reading: Reading) -> Iterable[Subject]:
    yield from reading.rejections
    yield from reading.resources
    yield from reading.workloads
    yield from reading.commands
    yield from reading.queries
    yield from reading.prose


def _skip_reason(subject: Subject, rule: ManifestRule) -> str | None:
    """The reason in the skip annotation of an object; None if it has none for the rule."""
    resource = _resource(subject)
    # On the object or on its pod template, which is all that some charts let users annotate.
    metadata = [resource.metadata] if resource else []
    if isinstance(subject, Workload):
        metadata.append(subject.pod_metadata)
    for part in metadata:
        reason = mapping(part.get("annotations")).get(SKIP_ANNOTATION + rule.id)
        if reason is not None:
            return str(reason)
    return None


def _resource(subject: Subject) -> Resource | None:
    if isinstance(subject, Resource):
        return subject
    return subject.resource if isinstance(subject, Workload | CommandLine | Rejection) else None


def _line(subject: Subject) -> int:
    return 1 if isinstance(subject, Prose) else subject.line


def _finding(rule: ManifestRule, subject: Subject, violation: Violation) -> Finding:
    resource = _resource(subject)
    path = violation.path or (subject.path if isinstance(subject, CommandLine) else ())
    if violation.line:
        line = violation.line
    elif isinstance(subject, CommandLine | Query | Rejection):
        line = subject.line
    else:
        line = resource.line_of(path) if resource else 1
    return Finding(
        rule.id,
        rule.severity,
        violation.text,
        object=resource.label if resource else "",
        evidence={"file": subject.file, "line": line, "path": dotted(path), "reason": rule.reason},
        remedy=violation.fix or rule.fix,
        source=rule.source,
    )


def _unknown_kinds(resources: Iterable[Resource], context: Context) -> list[UncheckedItem]:
    """Kinds without a known schema; the pods in them are checked nevertheless."""
    return [
        UncheckedItem(
            resource.file, resource.line, f"{resource.api} {resource.kind}: gpukiln has no schema of it"
        )
        for resource in resources
        if resource.role == "object"
        and resource.api
        and resource.kind
        and not unserved(resource)
        and not has_schema(resource, context.minor)
        and (resource.api, resource.kind) not in context.custom_kinds
    ] + [
        UncheckedItem(resource.file, resource.line, f"{resource.label}: {text}")
        for resource in resources
        if (custom := context.custom_form(resource, custom_violations)) is not None
        for text in custom[1]
    ]
