"""Alerts on the metrics of dcgm-exporter and kube-state-metrics.

docs/k8s-monitoring.md has a section for each alert, which its `runbook` names: its meaning and the next step.
Node metrics: kubernetes/kube-state-metrics, docs/metrics/cluster/node-metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gpukiln.catalog.xid import xids
from gpukiln.gpus.faults import FAULTS
from gpukiln.kubernetes.addons.health_agent import CONDITION
from gpukiln.kubernetes.addons.monitoring.metrics import DRIVER
from gpukiln.kubernetes.addons.monitoring.records import DRIVER_END, SLOWDOWN
from gpukiln.kubernetes.addons.settings import Settings

Severity = Literal["critical", "warning", "info"]
# Severity of a fault -> of its alert
SEVERITIES: dict[str, Severity] = {"error": "critical", "warning": "warning", "info": "info"}
RUNBOOK_PAGE = "docs/k8s-monitoring.md"
SOON_DAYS = 60  # before the end of life: time to build, verify and roll out an image
_GPU = "node, gpu, UUID, modelName"
_GPU_AND_POD = f"{_GPU}, GPU_I_ID, exported_namespace, exported_pod"
_GPUS_NOW = "count by (node, UUID) (DCGM_FI_DEV_GPU_TEMP)"
# Temperature is a metric of every GPU, so its series are the GPUs that the exporter sees.
_GPUS_LAST_HOUR = "count by (node, UUID) (max_over_time(DCGM_FI_DEV_GPU_TEMP[1h]))"
_POD_TEXT = "{{ $labels.exported_namespace }}/{{ $labels.exported_pod }}"
_GPU_TEXT = "GPU {{ $labels.gpu }} ({{ $labels.modelName }}) of {{ $labels.node }}"


@dataclass(frozen=True)
class Alert:
    """One alert.

    Args:
        name: Also the heading of its section in docs/k8s-monitoring.md.
        wait: How long the expression must hold, as Prometheus writes it; empty: it fires at once.
        summary: What is wrong, and where.
        description: Why it matters, and the next step.
    """

    name: str
    severity: Severity
    expr: str
    wait: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.wait} if self.wait else {}),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK_PAGE}#{self.name.lower()}",
            },
        }


def group(settings: Settings) -> dict[str, Any]:
    return {"name": "gpukiln-alerts", "interval": "1m", "rules": [alert.rule() for alert in alerts(settings)]}


def alerts(settings: Settings) -> tuple[Alert, ...]:
    return (*_errors(), *_memory(), *_thermal(), *_missing_gpus(), *_idle(settings), *_driver_support())


def _errors() -> tuple[Alert, ...]:
    def seen(numbers: str) -> str:
        return f"max by ({_GPU}, xid) (max_over_time(DCGM_EXP_XID_ERRORS_COUNT{{{numbers}}}[10m])) > 0"

    def numbers(severity: str) -> str:
        return "|".join(str(number) for number, row in sorted(xids().items()) if row.severity == severity)

    # Xid 0 means that there was none.
    known = "|".join(str(number) for number in sorted(xids()))
    return (
        Alert(
            "GpuXid",
            SEVERITIES["error"],
            seen(f'xid=~"{numbers("error")}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {_GPU_TEXT}",
            "The GPU should get no new work before the error is handled. Drain the node; `gpukiln-gpu "
            "health` "
            "on it prints what to do for this number.",
        ),
        Alert(
            "GpuXidWarning",
            SEVERITIES["warning"],
            seen(f'xid=~"{numbers("warning")}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {_GPU_TEXT}",
            "The GPU still works; its board or driver caused the error. `gpukiln-gpu health` on the node "
            "prints "
            "what the number means.",
        ),
        Alert(
            "GpuXidUnknown",
            "warning",
            seen(f'xid!~"0|{known}",xid!=""'),
            "",
            f"Xid {{{{ $labels.xid }}}}, which gpukiln does not know, on {_GPU_TEXT}",
            "Look the number up in NVIDIA's catalogue of Xid errors before the node takes the next job.",
        ),
    )


def _fault(name: str, id: str, expr: str, wait: str, summary: str) -> Alert:
    """An alert on a fault of the table: severity, meaning and remedy are the table's."""
    fault = FAULTS[id]
    means = f"{fault.text[0].upper()}{fault.text[1:]}. Next: {fault.remedy}."
    return Alert(name, SEVERITIES[fault.severity], expr, wait, summary, means)


def _memory() -> tuple[Alert, ...]:
    return (
        _fault(
            "GpuUncorrectedMemoryError",
            "ecc-uncorrected",
            f"max by ({_GPU}) (DCGM_FI_DEV_ECC_DBE_VOL_TOTAL) > 0",
            "",
            f"Uncorrected memory errors on {_GPU_TEXT}",
        ),
        _fault(
            "GpuRowRemapFailed",
            "remap-failed",
            f"max by ({_GPU}) (DCGM_FI_DEV_ROW_REMAP_FAILURE) > 0",
            "",
            f"Memory of {_GPU_TEXT} can't be remapped",
        ),
        _fault(
            "GpuRemapPending",
            "remap-pending",
            f"max by ({_GPU}) (DCGM_FI_DEV_ROW_REMAP_PENDING > 0 or DCGM_FI_DEV_RETIRED_PENDING > 0)",
            "",
            f"Memory of {_GPU_TEXT} is remapped at the next GPU reset",
        ),
    )


def _thermal() -> tuple[Alert, ...]:
    return (
        _fault(
            "GpuHot",
            "temperature-margin",
            f"max by ({_GPU}) (DCGM_FI_DEV_GPU_TEMP) >= on (modelName) group_left () {SLOWDOWN}",
            "5m",
            f"{_GPU_TEXT} is at {{{{ $value }}}} degrees, its slowdown temperature",
        ),
        _fault(
            "GpuThermalThrottling",
            "thermal-slowdown",
            # A counter of time: any increase means that the clocks were lowered.
            f"max by ({_GPU}) (rate(DCGM_FI_DEV_THERMAL_VIOLATION[5m])) > 0",
            "10m",
            f"{_GPU_TEXT} lowers its clocks because of heat",
        ),
    )


def _missing_gpus() -> tuple[Alert, ...]:
    def of_node(metric: str) -> str:
        return f'sum by (node) (kube_node_status_{metric}{{resource="nvidia_com_gpu"}})'

    return (
        Alert(
            "GpuNotAllocatable",
            "critical",
            # The device plugin keeps an unhealthy GPU in the capacity and takes it out of the allocatable
            # resources.
            f"{of_node('capacity')} - {of_node('allocatable')} > 0",
            "5m",
            "{{ $value }} GPUs of {{ $labels.node }} are not allocatable",
            "The device plugin marked them unhealthy, and only its restart clears that: drain the node, look "
            "at "
            "its Xid errors, then restart the plugin or replace the machine.",
        ),
        Alert(
            "GpuNodeSick",
            "critical",
            f'kube_node_status_condition{{condition="{CONDITION}",status="true"}} == 1',
            "1m",
            "GPUs of {{ $labels.node }} are sick, and the node accepts no new pods",
            "The agent on the node reports it: `kubectl describe node` shows the reason in the condition.",
        ),
        Alert(
            "GpuVanished",
            "critical",
            f"count by (node) ({_GPUS_LAST_HOUR}) - on (node) count by (node) ({_GPUS_NOW}) > 0",
            "5m",
            "{{ $value }} GPUs of {{ $labels.node }} disappeared within the last hour",
            "They fell off the bus. Compare `nvidia-smi -L` with the kernel's log on the node.",
        ),
        Alert(
            "GpuNotMonitored",
            "warning",
            f"{of_node('capacity')} > 0 unless on (node) count by (node) ({_GPUS_NOW})",
            "10m",
            "{{ $labels.node }} has GPUs without metrics",
            "No exporter answers there, so no other alert can fire: look at its dcgm-exporter pod.",
        ),
        Alert(
            "GpuNodesUnknown",
            "warning",
            "absent(kube_node_info)",
            "10m",
            "No metrics of kube-state-metrics",
            "Alerts on missing GPUs need these metrics and can't fire. Install it, or see why it is not "
            "scraped.",
        ),
    )


def _idle(settings: Settings) -> tuple[Alert, ...]:
    # MIG devices have no DCGM_FI_DEV_GPU_UTIL, and GPUs without profiling no engine activity: take either.
    busy = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{exported_pod!=""} * 100 or DCGM_FI_DEV_GPU_UTIL{exported_pod!=""}'
    return (
        Alert(
            "GpuIdle",
            "warning",
            f"max by ({_GPU_AND_POD}) ({busy}) < {settings.idle_percent}",
            f"{settings.idle_minutes}m",
            f"{_POD_TEXT} does not use {_GPU_TEXT}",
            f"Used below {settings.idle_percent} % for {settings.idle_minutes} minutes. Ask the owner of the "
            "pod.",
        ),
    )


def _driver_support() -> tuple[Alert, ...]:
    # The branch is the first part of the driver version; records.py has the end of life by branch.
    branch = f'label_replace(DCGM_FI_DEV_GPU_TEMP, "branch", "$1", "{DRIVER}", "([0-9]+)[.].*")'
    end = f"group by (node, branch) ({branch}) * on (branch) group_left () {DRIVER_END}"
    return (
        Alert(
            "GpuDriverEndOfLife",
            "warning",
            f"{end} < time()",
            "",
            "The driver branch {{ $labels.branch }} of {{ $labels.node }} is past its end of life",
            "It gets no security fixes. Replace the nodes by an image with a supported branch.",
        ),
        Alert(
            "GpuDriverEndsSoon",
            "info",
            f"{end} - time() > 0 < {SOON_DAYS * 86400}",
            "",
            "The driver branch {{ $labels.branch }} of {{ $labels.node }} ends within "
            f"{SOON_DAYS} days",
            "Build and verify an image with a later branch before that.",
        ),
    )
