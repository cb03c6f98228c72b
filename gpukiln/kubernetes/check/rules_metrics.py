"""Rules on PromQL: labels that the exporter sets, and a gauge that keeps its last value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import Query, Violation

SELECTOR = re.compile(r"\b(DCGM_\w+)\s*\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
# Labels that scrape jobs of an old chart added, and that were copied widely (helm/charts pull request 9321).
NOT_GIVEN = {"kubernetes_node", "kubernetes_name", "kubernetes_namespace", "kubernetes_pod_name"}


@rule(
    "metric-label",
    "warning",
    Query,
    title="Queries of GPU metrics use labels that the exporter sets",
    reason="the label does not exist: the query returns nothing, and an alert on it never fires",
    source="NVIDIA/dcgm-exporter:internal/pkg/rendermetrics",
    fix="hostname (Hostname up to 4.8.2), or relabel __meta_kubernetes_pod_node_name in the scrape job",
)
def metric_label(query: Query, _: Context) -> Iterator[Violation]:
    for metric, labels in SELECTOR.findall(query.text):
        for label in LABEL.findall(labels):
            if label in NOT_GIVEN:
                yield Violation(f"{metric}{{{label}=...}}")


@rule(
    "metric-hostname",
    "warning",
    Query,
    title="Queries use both names of the exporter's host label",
    reason="dcgm-exporter renamed Hostname to hostname after 4.8.2: the query returns nothing after an "
    "upgrade",
    source="NVIDIA/dcgm-exporter at d5e5f51",
    fix="both, joined with `or`, or a label of your own by relabelling",
)
def metric_hostname(query: Query, _: Context) -> Iterator[Violation]:
    if (
        "DCGM_" in query.text
        and re.search(r"\bHostname\b", query.text)
        and not re.search(r"\bhostname\b", query.text)
    ):
        yield Violation("Hostname alone")


@rule(
    "metric-last-xid",
    "warning",
    Query,
    title="An alert on Xids uses changes()",
    reason="the gauge keeps the last Xid: the alert never ends, and a repeated Xid goes unnoticed",
    source="NVIDIA/dcgm-exporter:etc/default-counters.csv",
    fix="changes(DCGM_FI_DEV_XID_ERRORS[10m]) > 0",
)
def metric_last_xid(query: Query, _: Context) -> Iterator[Violation]:
    # Without a function over a range the comparison is with the last Xid, which never goes away.
    compared = re.search(r"DCGM_FI_DEV_XID_ERRORS\s*(?:\{[^}]*\})?\s*(?:>|!=|==|>=)\s*\d", query.text)
    if compared and not re.search(r"\b(?:changes|delta|increase|resets)\s*\(", query.text):
        yield Violation(compared[0])
