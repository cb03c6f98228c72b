"""Monitoring: dcgm-exporter on every GPU node, and rules, alerts and a dashboard for its metrics.

The central value is `Metric` (metrics.py): every rule and panel uses the metrics of that list and no others.

metrics     the metrics that the exporter collects
exporter    values of its chart, and how Prometheus scrapes it
records     recording rules: GPU-hours and cost by namespace
alerts      alerts, each with a section in docs/k8s-monitoring.md
dashboard   the Grafana dashboard
cloudwatch  the CloudWatch agent's section, for clusters without Prometheus
"""

from __future__ import annotations

from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.addons.monitoring import alerts, cloudwatch, dashboard, exporter, records
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import Manifest, dump

VALUES, OBJECTS, GRAFANA = "monitoring/values.yaml", "monitoring/objects.yaml", "monitoring/grafana.yaml"
RULES, SCRAPE, DASHBOARD, CLOUDWATCH = (
    "monitoring/plain/rules.yaml",
    "monitoring/plain/scrape.yaml",
    "monitoring/plain/dashboard.json",
    "monitoring/plain/cloudwatch-agent.json",
)
# PromQL with a long regular expression can't be wrapped.
LINE_LENGTH_RULE = ("yamllint disable rule:line-length",)
OPERATOR_CRDS = "servicemonitors.monitoring.coreos.com prometheusrules.monitoring.coreos.com"


def files(settings: Settings) -> dict[str, str]:
    rules = {"groups": [*records.groups(settings), alerts.group(settings)]}
    return {
        VALUES: helm.values("dcgm_exporter", exporter.values(settings)),
        OBJECTS: dump(
            exporter.monitor(settings),
            _rules(settings, rules),
            head=(
                *LINE_LENGTH_RULE,
                "For clusters with the Prometheus Operator; kube-state-metrics must be installed as well.",
            ),
        ),
        GRAFANA: dump(dashboard.config_map(settings)),
        RULES: dump(
            rules,
            head=(*LINE_LENGTH_RULE, "For Prometheus without the operator: add this file to its rule_files."),
        ),
        SCRAPE: dump(
            {"scrape_configs": [exporter.scrape(settings)]},
            head=("For Prometheus without the operator: add this job to its scrape_configs.",),
        ),
        DASHBOARD: dashboard.text(settings),
        CLOUDWATCH: cloudwatch.text(settings),
    }


def install(settings: Settings) -> tuple[str, ...]:
    return (
        helm.upgrade_command("dcgm_exporter", exporter.RELEASE, settings.namespace, VALUES),
        # Objects of an unknown kind would make kubectl fail, and the script end.
        f"if kubectl get crd {OPERATOR_CRDS} >/dev/null; then\n"
        f"  {helm.apply_command(OBJECTS)}\n"
        f"  {helm.apply_command(GRAFANA)}\n"
        "else\n"
        '  echo "no Prometheus Operator: load monitoring/plain into Prometheus and Grafana" >&2\n'
        "fi",
    )


def _rules(settings: Settings, rules: dict[str, list[Manifest]]) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "gpukiln",
            "namespace": settings.monitoring_namespace,
            "labels": dict(settings.monitoring_labels),
        },
        "spec": rules,
    }
