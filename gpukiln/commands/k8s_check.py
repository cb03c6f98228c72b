"""Manifests, values, scripts and documents about GPUs on Kubernetes, judged before they are applied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_json, results, say, words
from gpukiln.errors import UsageError
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.kubernetes.check.reading import Reading


@command(
    help={
        "files": "files and folders; `-` is standard input; `--files` may be left out behind the command",
        "cluster": "judge what is in the current context, too",
        "server": "let the API server of the current context say what it would refuse (a dry run; "
        "nothing is kept)",
        "context": "context of the kubeconfig instead of its current one",
        "namespace": "of --cluster, instead of the context's; `all`: every one",
        "kubernetes": "versions to judge by, for example 1.34..1.36",
        "types": "instance types that pods may land on, separated by commas",
        "rule": "only these rules, separated by commas",
        "skip": "not these rules: RULE or RULE=REASON, separated by commas",
        "strict": "exit 1 on warnings, too",
        "rules": "list the rules: id, severity, what must hold, why, source and fix",
        "sarif": "also write a file for code scanning (SARIF 2.1.0)",
        "junit": "also write a file for CI (JUnit)",
        "json": "print one JSON document to standard output",
    },
)
def check(
    _: Any,
    files: str = "",
    cluster: bool = False,
    server: bool = False,
    context: str = "",
    namespace: str = "",
    kubernetes: str = "1.37",
    types: str = "",
    rule: str = "",
    skip: str = "",
    strict: bool = False,
    rules: bool = False,
    sarif: str = "",
    junit: str = "",
    json: bool = False,
) -> int:
    """Judge manifests, Helm values, scripts and documents; nothing is changed. Exit 1: there are errors."""
    from gpukiln.kubernetes.check import telling
    from gpukiln.kubernetes.check.judging import choose, judge
    from gpukiln.kubernetes.check.reading import read
    from gpukiln.kubernetes.check.rules import Context
    from gpukiln.kubernetes.check.schema import minors

    if rules:
        return _rules(json=json)
    if not files and not cluster:
        raise UsageError("nothing to judge", hint="name files or folders, `-`, or give --cluster")
    if (context or namespace) and not (cluster or server):
        raise UsageError("--context and --namespace belong to --cluster and --server")
    versions, skipped = minors(kubernetes), _skipped(skip)
    choose(words(rule), skipped)
    reading = read(words(files))
    if cluster or server:
        _ask(reading, context, namespace, cluster=cluster, server=server)
    told = Context(minors=versions, types=tuple(words(types)), things=tuple(reading.things))
    report = judge(reading, told, words(rule), skipped)
    if sarif:
        telling.write_sarif(report, Path(sarif))
    if junit:
        telling.write_junit(report, tuple(reading.files), Path(junit))
    if json:
        print_json(dump(report))
    else:
        for line in telling.lines(report):
            results().tell(line)
    return 1 if report.counts.errors or (strict and report.counts.warnings) else 0


check.first, check.several = "files", True


def _skipped(text: str) -> list[str]:
    """What was typed as RULE and RULE=REASON; a comma that no rule's id follows belongs to the reason."""
    return [one.strip() for one in re.split(r",(?=\s*[a-z0-9-]+\s*(?:=|,|$))", text) if one.strip()]


def _ask(reading: Reading, context: str, namespace: str, *, cluster: bool, server: bool) -> None:
    """What only a cluster can say: what it has, and what it would refuse."""
    from gpukiln.kubernetes.check.live import ask_server, read_cluster
    from gpukiln.kubernetes.cluster import Cluster

    api = Cluster(context)
    everywhere = namespace == "all"
    if server:
        say(f"asking {api.server} of context {api.context} for a dry run of {len(reading.things)} objects")
        ask_server(reading, api)
    if cluster:
        read_cluster(reading, api, "" if everywhere else namespace, everywhere=everywhere)


def _rules(*, json: bool) -> int:
    from gpukiln.kubernetes.check.registry import listing, rules

    if json:
        print_json(dump(listing()))
        return 0
    for one in rules():
        results().tell(f"{one.id} ({one.severity}): {one.title}")
        results().tell(f"  why: {one.reason}\n  fix: {one.fix}\n  source: {one.source}")
    return 0
