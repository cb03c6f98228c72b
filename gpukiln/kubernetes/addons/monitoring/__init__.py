"""What a cluster's GPUs do, what is wrong with them, and what they cost."""

from __future__ import annotations

from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.addons.monitoring import cloudwatch, dashboard, exporter, rules
from gpukiln.kubernetes.addons.settings import Settings

RULES, ALONE = "monitoring/rules.yaml", "monitoring/prometheus-rules.yaml"
DASHBOARD, STATE = "monitoring/dashboard.yaml", "monitoring/kube-prometheus-stack-values.yaml"
CLOUDWATCH = "monitoring/cloudwatch-agent.json"


def files(settings: Settings) -> dict[str, str]:
    return {
        exporter.VALUES: exporter.values(settings),
        RULES: rules.as_object(settings),
        ALONE: rules.as_file(settings),
        DASHBOARD: dashboard.as_object(settings),
        STATE: exporter.state_values(),
        CLOUDWATCH: cloudwatch.agent(settings),
    }


def install(settings: Settings) -> tuple[str, ...]:
    return (
        helm.upgrade("dcgm_exporter", exporter.RELEASE, settings.namespace, exporter.VALUES),
        helm.apply(RULES),
        helm.apply(DASHBOARD),
    )
