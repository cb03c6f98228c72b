"""Manifests, values, scripts and documents about GPUs on Kubernetes, judged before they are applied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import JsonOptions, print_document, results, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpukiln.kubernetes.check.reading import Reading
    from gpukiln.kubernetes.pools import Pool


@dataclass(frozen=True)
class K8sCheck(JsonOptions):
    """Judge manifests, Helm values, scripts and documents; nothing is changed. Exit 1: there are errors."""

    files: str = option(
        "files and folders; `-` is standard input; `--files` may be left out behind the command",
        first=True,
        several=True,
    )
    cluster: bool = option("judge what is in the current context, too", False)
    server: bool = option(
        "let the API server of the current context say what it would refuse (a dry run; nothing is kept)",
        False,
    )
    context: str = option("context of the kubeconfig instead of its current one")
    namespace: str = option("of --cluster, instead of the context's; `all`: every one")
    kubernetes: str = option(
        "versions to judge by, for example 1.34..1.36, instead of the cluster's own (with --cluster or "
        "--server) or 1.37"
    )
    types: str = option(
        "instance types that pods may land on, separated by commas; without it node pools among the files "
        "count, then the nodes of --cluster, then every type that is sold"
    )
    pools: str = option("files with node pools that pods may land on, which are not judged themselves")
    crd: str = option(
        "files and folders with CustomResourceDefinitions, by which custom objects are checked, their CEL "
        "rules included; those among the files count, too, and those of --cluster"
    )
    driver: str = option("NVIDIA driver of the nodes, which has to run the images' CUDA")
    rule: str = option("only these rules, separated by commas")
    skip: str = option("not these rules: RULE or RULE=REASON, separated by commas")
    strict: bool = option("exit 1 on warnings, too", False)
    rules: bool = option("list the rules: id, severity, what must hold, why, source and fix", False)
    sarif: str = option("also write a file for code scanning (SARIF 2.1.0)")
    junit: str = option("also write a file for CI (JUnit)")

    def run(self) -> int:
        from gpukiln.kubernetes.check import output
        from gpukiln.kubernetes.check.crds import definitions
        from gpukiln.kubernetes.check.evaluate import apply_rules, select_rules
        from gpukiln.kubernetes.check.reading import read
        from gpukiln.kubernetes.check.rules import NEWEST, Context
        from gpukiln.kubernetes.check.schema import minors
        from gpukiln.reports.sarif import write_sarif

        if self.rules:
            return _rules(json=self.json)
        if not self.files and not self.cluster:
            raise UsageError("nothing to judge", hint="name files or folders, `-`, or give --cluster")
        if (self.context or self.namespace) and not (self.cluster or self.server):
            raise UsageError("--context and --namespace belong to --cluster and --server")
        versions, skipped = minors(self.kubernetes or f"1.{NEWEST}"), _skipped(self.skip)
        select_rules(words(self.rule), skipped)
        given = _definitions(words(self.crd))
        reading = read(words(self.files))
        if self.cluster or self.server:
            said, found = self._ask(reading)
            versions, given = minors(said) if said else versions, [*found, *given]
        told = Context(
            minors=versions,
            pools=_pools(words(self.pools), self.driver) or reading.pools,
            types=_types(words(self.types)),
            driver=self.driver,
            resources=tuple(reading.resources),
            definitions=definitions(given),
        )
        report = apply_rules(reading, told, words(self.rule), skipped)
        if self.sarif:
            write_sarif(Path(self.sarif), output.code_scanning(report))
        if self.junit:
            output.write_junit(report, tuple(reading.files), Path(self.junit))
        if self.json:
            print_document(report.schema, dump(report))
        else:
            for line in output.lines(report):
                results().print_text(line)
        return 1 if report.counts.errors or (self.strict and report.counts.warnings) else 0

    def _ask(self, reading: Reading) -> tuple[str, list[Mapping[str, Any]]]:
        """What only a cluster can say: what it has and what it would refuse.

        Returns:
            Its version, where --kubernetes says none, and with --cluster its CustomResourceDefinitions.
        """
        from gpukiln.errors import UnavailableError
        from gpukiln.kubernetes.check.crds import KIND, cluster_definitions
        from gpukiln.kubernetes.check.live import dry_run_objects, live_pools, read_cluster, schema_version
        from gpukiln.kubernetes.check.workload import UncheckedItem
        from gpukiln.kubernetes.cluster import Cluster

        api = Cluster(self.context)
        found: list[Mapping[str, Any]] = []
        everywhere = self.namespace == "all"
        if self.server:
            count = len(reading.resources)
            say(f"asking {api.server} of context {api.context} for a dry run of {count} objects")
            dry_run_objects(reading, api)
        if self.cluster:
            read_cluster(reading, api, "" if everywhere else self.namespace, everywhere=everywhere)
            reading.pools = live_pools(reading, api)
            try:
                found = list(cluster_definitions(api))
            except UnavailableError as error:
                reading.unchecked.append(
                    UncheckedItem(f"context {api.context}", 1, f"{KIND}: {error.message}")
                )
        return "" if self.kubernetes else schema_version(reading, api), found


def _skipped(text: str) -> list[str]:
    """What was typed as RULE and RULE=REASON; a comma that no rule's id follows belongs to the reason."""
    return [one.strip() for one in re.split(r",(?=\s*[a-z0-9-]+\s*(?:=|,|$))", text) if one.strip()]


def _types(names: list[str]) -> tuple[str, ...]:
    """Instance types that were typed."""
    from gpukiln.kubernetes.machines import launchable_types
    from gpukiln.typed import unknown

    for name in names:
        if name not in launchable_types():
            raise unknown("GPU instance type", name, launchable_types())
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


def _rules(*, json: bool) -> int:
    from gpukiln.kubernetes.check.registry import listing, rules

    if json:
        listed = listing()
        print_document(listed.schema, dump(listed))
        return 0
    for one in rules():
        results().print_text(f"{one.id} ({one.severity}): {one.title}")
        results().print_text(f"  why: {one.reason}\n  fix: {one.fix}\n  source: {one.source}")
    return 0
