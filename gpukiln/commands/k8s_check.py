"""Checks manifests, values, scripts and documents about GPUs on Kubernetes before they are applied."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpukiln.cli.command import JsonOptions, say, words
from gpukiln.options import option


@dataclass(frozen=True)
class K8sCheck(JsonOptions):
    """Check manifests, Helm values, scripts and documents; nothing is changed. Exit 1: there are errors."""

    files: str = option(
        "files and folders; `-` is standard input; `--files` may be left out behind the command",
        first=True,
        several=True,
    )
    cluster: bool = option("also check what is in the current context", False)
    server: bool = option(
        "ask the API server of the current context what it would refuse (a dry run; nothing is kept)",
        False,
    )
    context: str = option("context of the kubeconfig instead of its current one")
    namespace: str = option("of --cluster, instead of the context's; `all`: every one")
    kubernetes: str = option(
        "versions to check against, for example 1.34..1.36, instead of the cluster's own (with --cluster or "
        "--server) or 1.37"
    )
    types: str = option(
        "instance types that pods may land on, separated by commas; without it node pools among the files "
        "count, then the nodes of --cluster, then every type that is sold"
    )
    pools: str = option("files with node pools that pods may land on, which are not checked themselves")
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
        from gpukiln.kubernetes.check import output, registry
        from gpukiln.kubernetes.check.run import CheckOptions, check

        # Lists without reading a file or a cluster.
        if self.rules:
            self.report(registry.listing(), output.rule_lines())
            return 0
        options = self.pick(*(field.name for field in fields(CheckOptions)))
        lists = {name: words(options[name]) for name in ("files", "types", "pools", "crd", "rule")}
        report = check(CheckOptions(**{**options, **lists}), say)
        self.report(report, output.lines(report))
        # 0 with warnings: a check in CI fails for what can't work, unless --strict is given.
        return 1 if report.counts.errors or (self.strict and report.counts.warnings) else 0
