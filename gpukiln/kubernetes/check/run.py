"""A whole check: reads files and clusters, applies the rules, writes the reports that were asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.catalog import cuda
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.kubernetes.check import output
from gpukiln.kubernetes.check.crds import KIND, cluster_definitions, definitions
from gpukiln.kubernetes.check.evaluate import CheckReport, apply_rules, select_rules
from gpukiln.kubernetes.check.live import dry_run_objects, live_pools, read_cluster, schema_version
from gpukiln.kubernetes.check.reading import Reading, read
from gpukiln.kubernetes.check.rules import NEWEST, Context
from gpukiln.kubernetes.check.schema import minors
from gpukiln.kubernetes.check.workload import UncheckedItem
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.machines import launchable_types
from gpukiln.kubernetes.pools import Pool, pools_in
from gpukiln.reports.sarif import write_sarif
from gpukiln.typed import unknown

Manifests = list[Mapping[str, Any]]


@dataclass(frozen=True)
class CheckOptions:
    """What is checked, and by what; the options of `k8s.check`.

    Args:
        namespace: Of the cluster; `all`: every one.
        kubernetes: Versions, see `schema.minors`; empty: the cluster's, or the newest.
        skip: RULE or RULE=REASON, separated by commas.
        sarif: A file to write; empty: none.
        junit: A file to write; empty: none.
    """

    files: Sequence[str]
    cluster: bool
    server: bool
    context: str
    namespace: str
    kubernetes: str
    types: Sequence[str]
    pools: Sequence[str]
    crd: Sequence[str]
    driver: str
    rule: Sequence[str]
    skip: str
    sarif: str
    junit: str


def check(options: CheckOptions, say: Callable[[str], None]) -> CheckReport:
    """Check files, and what a cluster has or would refuse.

    Args:
        say: Gets a notice of what the API server is asked.

    Raises:
        UsageError: An option is wrong, or there is nothing to check.
        UnavailableError: A file or the cluster can't be read.
    """
    if not options.files and not options.cluster:
        raise UsageError("nothing to check", hint="name files or folders, `-`, or give --cluster")
    if (options.context or options.namespace) and not (options.cluster or options.server):
        raise UsageError("--context and --namespace belong to --cluster and --server")
    # Versions and rules first: a mistyped option must not cost the reading of a cluster.
    checked_versions = minors(options.kubernetes or f"1.{NEWEST}")
    skipped = split_skips(options.skip)
    select_rules(options.rule, skipped)
    crds = _definitions(options.crd)
    reading = read(options.files)
    if options.cluster or options.server:
        version, of_live = _read_live(options, reading, say)
        checked_versions, crds = minors(version) if version else checked_versions, [*of_live, *crds]
    context = Context(
        minors=checked_versions,
        pools=_pools(options.pools, options.driver) or reading.pools,
        types=_types(options.types),
        driver=options.driver,
        resources=tuple(reading.resources),
        definitions=definitions(crds),
    )
    report = apply_rules(reading, context, options.rule, skipped)
    if options.sarif:
        write_sarif(Path(options.sarif), output.code_scanning(report))
    if options.junit:
        output.write_junit(report, tuple(reading.files), Path(options.junit))
    return report


def _read_live(options: CheckOptions, reading: Reading, say: Callable[[str], None]) -> tuple[str, Manifests]:
    """Read what a cluster has, and ask what it would refuse.

    Returns:
        Its version, unless schema_version were named, and with --cluster its CustomResourceDefinitions.
    """
    api = Cluster(options.context)
    crds: Manifests = []
    everywhere = options.namespace == "all"
    if options.server:
        count = len(reading.resources)
        say(f"asking {api.server} of context {api.context} for a dry run of {count} objects")
        dry_run_objects(reading, api)
    if options.cluster:
        read_cluster(reading, api, "" if everywhere else options.namespace, everywhere=everywhere)
        reading.pools = live_pools(reading, api)
        try:
            crds = list(cluster_definitions(api))
        except UnavailableError as error:
            reading.unchecked.append(UncheckedItem(f"context {api.context}", 1, f"{KIND}: {error.message}"))
    return "" if options.kubernetes else schema_version(reading, api), crds


def split_skips(text: str) -> list[str]:
    """Each RULE and RULE=REASON; a comma that no rule's id follows belongs to the reason.

    >>> split_skips("no-limits, latest=pinned by digest, see ADR 7")
    ['no-limits', 'latest=pinned by digest, see ADR 7']
    >>> split_skips("")
    []
    """
    return [skip.strip() for skip in re.split(r",(?=\s*[a-z0-9-]+\s*(?:=|,|$))", text) if skip.strip()]


def _types(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in launchable_types():
            raise unknown("GPU instance type", name, launchable_types())
    return tuple(names)


def _pools(files: Sequence[str], driver: str) -> tuple[Pool, ...]:
    """Node pools of files that are not checked themselves."""
    if driver:
        cuda.support("12.1", driver, [])  # raises where the catalogue does not know the driver
    pools = pools_in((resource.object for resource in read(files).resources), driver) if files else ()
    # Without this, a file that was meant as a pool would be ignored in silence.
    if files and not pools:
        raise UsageError(
            f"no node pool with GPUs is in {', '.join(files)}",
            hint="wanted: Karpenter's NodePool or eksctl's ClusterConfig; `invoke k8s.nodes` renders them",
        )
    return pools


def _definitions(files: Sequence[str]) -> Manifests:
    resources = read(files).resources if files else []
    crds: Manifests = [resource.object for resource in resources if resource.kind == KIND]
    if files and not crds:
        raise UsageError(
            f"no {KIND} is in {', '.join(files)}",
            hint="wanted: a project's CRDs, for example config/crd/bases, or `kubectl get crd NAME -o yaml`",
        )
    return crds
