"""Alerts on what the exporter and kube-state-metrics say of GPUs.

docs/k8s-monitoring.md has a section for each, which its `runbook` names: what it means and what to do.
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
SEVERITIES: dict[str, Severity] = {
    "error": "critical",
    "warning": "warning",
    "info": "info",
}  # of faults, as alerts
RUNBOOK_PAGE = "docs/k8s-monitoring.md"
SOON_DAYS = 60
_GPU = "node, gpu, UUID, modelName"
_GPU_AND_POD = f"{_GPU}, GPU_I_ID, exported_namespace, exported_pod"
_GPUS_NOW = "count by (node, UUID) (DCGM_FI_DEV_GPU_TEMP)"
_GPUS_LAST_HOUR = "count by (node, UUID) (max_over_time(DCGM_FI_DEV_GPU_TEMP[1h]))"
_POD_TEXT = "{{ $labels.exported_namespace }}/{{ $labels.exported_pod }}"
_GPU_TEXT = "GPU {{ $labels.gpu }} ({{ $labels.modelName }}) of {{ $labels.node }}"


@dataclass(frozen=True)
class Alert:
    """One alert.

    Args:
        name: Also the heading of its section in the documentation.
        wait: How long it must be true, as Prometheus writes it; empty: once.
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

    known = "|".join(str(number) for number in sorted(xids()))
    return (
        Alert(
            "GpuXid",
            SEVERITIES["error"],
            seen(f'xid=~"{numbers("error")}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {_GPU_TEXT}",
            "The GPU should get no new work before the number's action is done. Drain the node; "
            "`gpukiln-gpu health` on it says what the number asks for.",
        ),
        Alert(
            "GpuXidWarning",
            SEVERITIES["warning"],
            seen(f'xid=~"{numbers("warning")}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {_GPU_TEXT}",
            "The GPU works on, and its board or driver is to blame for what was lost. `gpukiln-gpu health` "
            "on the node says what the number means.",
        ),
        Alert(
            "GpuXidUnknown",
            "warning",
            seen(f'xid!~"0|{known}",xid!=""'),
            "",
            f"Xid {{{{ $labels.xid }}}}, which our catalogue has not, on {_GPU_TEXT}",
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
            f"Memory of {_GPU_TEXT} can't be repaired",
        ),
        _fault(
            "GpuRemapPending",
            "remap-pending",
            f"max by ({_GPU}) (DCGM_FI_DEV_ROW_REMAP_PENDING > 0 or DCGM_FI_DEV_RETIRED_PENDING > 0)",
            "",
            f"Memory of {_GPU_TEXT} waits for a reset to be repaired",
        ),
    )


def _thermal() -> tuple[Alert, ...]:
    return (
        _fault(
            "GpuHot",
            "temperature-margin",
            f"max by ({_GPU}) (DCGM_FI_DEV_GPU_TEMP) >= on (modelName) group_left () {SLOWDOWN}",
            "5m",
            f"{_GPU_TEXT} has {{{{ $value }}}} degrees, at which it slows down",
        ),
        _fault(
            "GpuThermalThrottling",
            "thermal-slowdown",
            f"max by ({_GPU}) (rate(DCGM_FI_DEV_THERMAL_VIOLATION[5m])) > 0",
            "10m",
            f"Heat holds the clocks of {_GPU_TEXT} down",
        ),
    )


def _missing_gpus() -> tuple[Alert, ...]:
    def of_node(metric: str) -> str:
        return f'sum by (node) (kube_node_status_{metric}{{resource="nvidia_com_gpu"}})'

    return (
        Alert(
            "GpuNotAllocatable",
            "critical",
            f"{of_node('capacity')} - {of_node('allocatable')} > 0",
            "5m",
            "{{ $value }} GPUs of {{ $labels.node }} are not allocatable",
            "The device plugin holds them for unhealthy and does not take that back: drain the node, look at "
            "its Xid errors, then restart the plugin or replace the machine.",
        ),
        Alert(
            "GpuNodeSick",
            "critical",
            f'kube_node_status_condition{{condition="{CONDITION}",status="true"}} == 1',
            "1m",
            "GPUs of {{ $labels.node }} are sick, and it takes no more pods",
            "The node's own agent says so: `kubectl describe node` has the reason in the condition.",
        ),
        Alert(
            "GpuVanished",
            "critical",
            f"count by (node) ({_GPUS_LAST_HOUR}) - on (node) count by (node) ({_GPUS_NOW}) > 0",
            "5m",
            "{{ $value }} GPUs of {{ $labels.node }} are gone that were there within the last hour",
            "They fell off the bus. Compare `nvidia-smi -L` with the kernel's log on the node.",
        ),
        Alert(
            "GpuNotMonitored",
            "warning",
            f"{of_node('capacity')} > 0 unless on (node) count by (node) ({_GPUS_NOW})",
            "10m",
            "{{ $labels.node }} has GPUs, and nothing is known of them",
            "No exporter answers there, so no other alert would fire: see its pod of dcgm-exporter.",
        ),
        Alert(
            "GpuNodesUnknown",
            "warning",
            "absent(kube_node_info)",
            "10m",
            "No metrics of kube-state-metrics",
            "Alerts on lost GPUs compare with them and can't fire. Install it, or see why it is not scraped.",
        ),
    )


def _idle(settings: Settings) -> tuple[Alert, ...]:
    # MIG devices have no utilisation, GPUs without profiling no engine activity.
    busy = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{exported_pod!=""} * 100 or DCGM_FI_DEV_GPU_UTIL{exported_pod!=""}'
    return (
        Alert(
            "GpuIdle",
            "warning",
            f"max by ({_GPU_AND_POD}) ({busy}) < {settings.idle_percent}",
            f"{settings.idle_minutes}m",
            f"{_POD_TEXT} leaves {_GPU_TEXT} idle",
            f"Used below {settings.idle_percent} % for {settings.idle_minutes} minutes. Ask whose it is.",
        ),
    )


def _driver_support() -> tuple[Alert, ...]:
    branch = f'label_replace(DCGM_FI_DEV_GPU_TEMP, "branch", "$1", "{DRIVER}", "([0-9]+)[.].*")'
    end = f"group by (node, branch) ({branch}) * on (branch) group_left () {DRIVER_END}"
    return (
        Alert(
            "GpuDriverEndOfLife",
            "warning",
            f"{end} < time()",
            "",
            "The driver branch {{ $labels.branch }} of {{ $labels.node }} is past its end of life",
            "It gets no security fixes. Roll the pool over to an image with a supported branch.",
        ),
        Alert(
            "GpuDriverEndsSoon",
            "info",
            f"{end} - time() > 0 < {SOON_DAYS * 86400}",
            "",
            "The driver branch {{ $labels.branch }} of {{ $labels.node }} ends within "
            f"{SOON_DAYS} days",
            "Build an image with a later branch and prove it before that.",
        ),
    )
