"""Manifests, values, scripts and documents about GPUs on Kubernetes, judged before they are applied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.errors import UsageError
from gpukiln.typed import dump

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpukiln.kubernetes.check.reading import Reading
    from gpukiln.kubernetes.pools import Pool


@command(
    help={
        "files": "files and folders; `-` is standard input; `--files` may be left out behind the command",
        "cluster": "judge what is in the current context, too",
        "server": "let the API server of the current context say what it would refuse (a dry run; "
        "nothing is kept)",
        "context": "context of the kubeconfig instead of its current one",
        "namespace": "of --cluster, instead of the context's; `all`: every one",
        "kubernetes": "versions to judge by, for example 1.34..1.36, instead of the cluster's own (with "
        "--cluster or --server) or 1.37",
        "types": "instance types that pods may land on, separated by commas; without it node pools among the "
        "files count, then the nodes of --cluster, then every type that is sold",
        "pools": "files with node pools that pods may land on, which are not judged themselves",
        "crd": "files and folders with CustomResourceDefinitions, by which custom objects are checked, their "
        "CEL rules included; those among the files count, too, and those of --cluster",
        "driver": "NVIDIA driver of the nodes, which has to run the images' CUDA",
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
    kubernetes: str = "",
    types: str = "",
    pools: str = "",
    crd: str = "",
    driver: str = "",
    rule: str = "",
    skip: str = "",
    strict: bool = False,
    rules: bool = False,
    sarif: str = "",
    junit: str = "",
    json: bool = False,
) -> int:
    """Judge manifests, Helm values, scripts and documents; nothing is changed. Exit 1: there are errors."""
    from gpukiln.kubernetes.check import output
    from gpukiln.kubernetes.check.crds import definitions
    from gpukiln.kubernetes.check.evaluate import apply_rules, choose
    from gpukiln.kubernetes.check.reading import read
    from gpukiln.kubernetes.check.rules import NEWEST, Context
    from gpukiln.kubernetes.check.schema import minors
    from gpukiln.reports.sarif import write_sarif

    if rules:
        return _rules(json=json)
    if not files and not cluster:
        raise UsageError("nothing to judge", hint="name files or folders, `-`, or give --cluster")
    if (context or namespace) and not (cluster or server):
        raise UsageError("--context and --namespace belong to --cluster and --server")
    versions, skipped = minors(kubernetes or f"1.{NEWEST}"), _skipped(skip)
    choose(words(rule), skipped)
    given = _definitions(words(crd))
    reading = read(words(files))
    if cluster or server:
        said, found = _ask(
            reading, context, namespace, cluster=cluster, server=server, version=not kubernetes
        )
        versions, given = minors(said) if said else versions, [*found, *given]
    told = Context(
        minors=versions,
        pools=_pools(words(pools), driver) or reading.pools,
        types=_types(words(types)),
        driver=driver,
        resources=tuple(reading.resources),
        definitions=definitions(given),
    )
    report = apply_rules(reading, told, words(rule), skipped)
    if sarif:
        write_sarif(Path(sarif), output.code_scanning(report))
    if junit:
        output.write_junit(report, tuple(reading.files), Path(junit))
    if json:
        print_document(report.schema, dump(report))
    else:
        for line in output.lines(report):
            results().tell(line)
    return 1 if report.counts.errors or (strict and report.counts.warnings) else 0


check.first, check.several = "files", True


def _skipped(text: str) -> list[str]:
    """What was typed as RULE and RULE=REASON; a comma that no rule's id follows belongs to the reason."""
    return [one.strip() for one in re.split(r",(?=\s*[a-z0-9-]+\s*(?:=|,|$))", text) if one.strip()]


def _types(names: list[str]) -> tuple[str, ...]:
    """Instance types that were typed."""
    from gpukiln.kubernetes.machines import sold
    from gpukiln.typed import unknown

    for name in names:
        if name not in sold():
            raise unknown("GPU instance type", name, sold())
    return tuple(names)


def _pools(names: list[str], driver: str) -> tuple[Pool, ...]:
    """Node pools of files that are not judged."""
    from gpukiln.catalog import cuda
    from gpukiln.kubernetes.check.reading import read
    from gpukiln.kubernetes.pools import pools_in

    if driver:
        cuda.support("12.1", driver, [])  # what the catalogue does not know is told now
    found = pools_in((one.object for one in read(names).resources), driver) if names else ()
    if names and not found:
        raise UsageError(
            f"no node pool with GPUs is in {', '.join(names)}",
            hint="wanted: Karpenter's NodePool or eksctl's ClusterConfig; `invoke k8s.nodes` renders them",
        )
    return found


def _definitions(names: list[str]) -> list[Mapping[str, Any]]:
    """CustomResourceDefinitions of files."""
    from gpukiln.kubernetes.check.crds import KIND
    from gpukiln.kubernetes.check.reading import read

    found = [one.object for one in read(names).resources if one.kind == KIND] if names else []
    if names and not found:
        raise UsageError(
            f"no {KIND} is in {', '.join(names)}",
            hint="wanted: a project's CRDs, for example config/crd/bases, or `kubectl get crd NAME -o yaml`",
        )
    return found


def _ask(
    reading: Reading, context: str, namespace: str, *, cluster: bool, server: bool, version: bool
) -> tuple[str, list[Mapping[str, Any]]]:
    """What only a cluster can say: what it has and what it would refuse.

    Returns:
        Its version, if that is asked for, and with `cluster` its CustomResourceDefinitions.
    """
    from gpukiln.errors import UnavailableError
    from gpukiln.kubernetes.check.crds import KIND, of_cluster
    from gpukiln.kubernetes.check.live import ask_server, live_pools, read_cluster, versions
    from gpukiln.kubernetes.check.workload import Unchecked
    from gpukiln.kubernetes.cluster import Cluster

    api = Cluster(context)
    found: list[Mapping[str, Any]] = []
    everywhere = namespace == "all"
    if server:
        say(f"asking {api.server} of context {api.context} for a dry run of {len(reading.resources)} objects")
        ask_server(reading, api)
    if cluster:
        read_cluster(reading, api, "" if everywhere else namespace, everywhere=everywhere)
        reading.pools = live_pools(reading, api)
        try:
            found = list(of_cluster(api))
        except UnavailableError as error:
            reading.unchecked.append(Unchecked(f"context {api.context}", 1, f"{KIND}: {error.message}"))
    return versions(reading, api) if version else "", found


def _rules(*, json: bool) -> int:
    from gpukiln.kubernetes.check.registry import listing, rules

    if json:
        listed = listing()
        print_document(listed.schema, dump(listed))
        return 0
    for one in rules():
        results().tell(f"{one.id} ({one.severity}): {one.title}")
        results().tell(f"  why: {one.reason}\n  fix: {one.fix}\n  source: {one.source}")
    return 0
