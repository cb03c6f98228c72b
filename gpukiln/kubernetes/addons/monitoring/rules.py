"""Recording rules and alerts of Prometheus.

Every alert is shown to fire and not to fire, every record its values, by promtool on series that were made up
(tests/unit/test_k8s_monitoring.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

from gpukiln.catalog.drivers import branches
from gpukiln.catalog.prices import machine_price
from gpukiln.catalog.xid import xids
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons.health_agent import CONDITION
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.machines import sold
from gpukiln.kubernetes.manifest import Manifest, dump
from gpukiln.typed import unknown

Severity = Literal["critical", "warning", "info"]

TYPE_LABEL = "label_node_kubernetes_io_instance_type"  # as kube-state-metrics writes the node's label
PAGE = "docs/k8s-monitoring.md"
SOON_S = 60 * 86400
# Of one GPU, or one MIG device: what an alert is about.
GPU = "node, gpu, UUID, modelName, GPU_I_ID"


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expression: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> Manifest:
        return {"record": self.name, "expr": self.expression} | (
            {"labels": dict(self.labels)} if self.labels else {}
        )


@dataclass(frozen=True)
class Alert:
    """An alert.

    Args:
        hold: How long it has to be so.
        summary, description: Templates of Prometheus.
    """

    name: str
    severity: Severity
    expression: str
    hold: str
    summary: str
    description: str

    def plain(self) -> Manifest:
        return {
            "alert": self.name,
            "expr": self.expression,
            **({"for": self.hold} if self.hold else {}),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{PAGE}: {self.name}",
            },
        }


def groups(settings: Settings, ends: Mapping[int, date] | None = None) -> list[Manifest]:
    """Prometheus' rule groups.

    Args:
        ends: Driver branch -> end of its life; None: as the catalogue has it.
    """
    known = ends if ends is not None else {one.branch: one.eol for one in branches().values() if one.eol}
    return [
        _group("gpukiln-facts", _facts(settings, known)),
        _group("gpukiln-usage", USAGE),
        _group("gpukiln-gpus", alerts(settings)),
    ]


def _group(name: str, rules: Iterable[Record | Alert]) -> Manifest:
    """Every minute: hours and money are counted in minutes."""
    return {"name": name, "interval": "1m", "rules": [one.plain() for one in rules]}


def as_object(settings: Settings) -> str:
    """For the Prometheus operator."""
    return dump(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": "gpukiln",
                "namespace": settings.monitoring_namespace,
                "labels": dict(settings.monitoring_labels),
            },
            "spec": {"groups": groups(settings)},
        }
    )


def as_file(settings: Settings) -> str:
    """For a Prometheus without the operator: `rule_files`."""
    head = ("The rules of rules.yaml, for a Prometheus without operator.",)
    return dump({"groups": groups(settings)}, head=head)


def _facts(settings: Settings, ends: Mapping[int, date]) -> Iterator[Record]:
    """What the catalogue knows, as series: prices of a GPU, ends of driver branches."""
    for name, usd in gpu_prices(settings).items():
        yield Record("gpukiln:gpu_usd_per_hour", f"vector({usd})", {TYPE_LABEL: name})
    for branch, day in sorted(ends.items()):
        moment = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
        yield Record("gpukiln:driver_branch_end:seconds", f"vector({moment})", {"branch": str(branch)})


def gpu_prices(settings: Settings) -> dict[str, Decimal]:
    """USD an hour of a GPU by instance type: what somebody pays, else on demand by the catalogue.

    Raises:
        UsageError: A price is none, or its type is unknown.
    """
    found = {}
    for name in settings.usd_per_hour:
        if name not in sold():
            raise unknown("instance type in usd_per_hour", name, sold())
    for name, machine in sold().items():
        listed = machine_price(name, settings.region)
        usd = settings.usd_per_hour.get(name, listed.usd if listed else None)
        if usd is not None:
            if usd <= 0:
                raise UsageError(f"usd_per_hour of {name} is {usd}", hint="wanted: USD an hour, above 0")
            found[name] = (Decimal(usd) / machine.gpus).quantize(Decimal("0.000001"))
    return found


# GPUs are what pods asked for and run with: where GPUs are shared, shares of them.
USAGE = (
    Record(
        "namespace_node:gpus_allocated:sum",
        'sum by (namespace, node) (kube_pod_container_resource_requests{resource=~"nvidia_com_(gpu|mig_.+)"} '
        "* on (namespace, pod) group_left () "
        'max by (namespace, pod) (kube_pod_status_phase{phase="Running"} == 1))',
    ),
    Record("namespace:gpus_allocated:sum", "sum by (namespace) (namespace_node:gpus_allocated:sum)"),
    Record(
        "node:gpu_usd_per_hour:max",
        f"max by (node) (kube_node_labels * on ({TYPE_LABEL}) group_left () gpukiln:gpu_usd_per_hour)",
    ),
    Record(
        "namespace:gpu_usd_per_hour:sum",
        "sum by (namespace) (namespace_node:gpus_allocated:sum * on (node) group_left () "
        "node:gpu_usd_per_hour:max)",
    ),
    # Of the last hour; 59m30s, because at a minute's distance an hour has sixty samples and not sixty-one.
    Record("namespace:gpu_hours:sum1h", "sum_over_time(namespace:gpus_allocated:sum[59m30s]) / 60"),
    Record("namespace:gpu_usd:sum1h", "sum_over_time(namespace:gpu_usd_per_hour:sum[59m30s]) / 60"),
    Record("cluster:gpus:sum", 'sum(kube_node_status_capacity{resource="nvidia_com_gpu"})'),
    Record("cluster:gpus_allocated:sum", "sum(namespace:gpus_allocated:sum)"),
    Record(
        "cluster:gpu_usd_per_hour:sum",
        'sum(kube_node_status_capacity{resource="nvidia_com_gpu"} * on (node) group_left () '
        "node:gpu_usd_per_hour:max)",
    ),
)

WHERE = "{{ $labels.node }}, GPU {{ $labels.gpu }} ({{ $labels.modelName }}, {{ $labels.UUID }})"
RESET = "Drain the node, then `gpukiln-gpu reset` or a reboot."


def alerts(settings: Settings) -> tuple[Alert, ...]:
    """Alerts, the worst first."""
    fatal = "|".join(str(number) for number, one in xids().items() if one.blames_hardware)
    idle, least = settings.idle_minutes, settings.idle_percent
    return (
        Alert(
            "GpuXidFatal",
            "critical",
            _xids(f'xid=~"{fatal}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {WHERE}",
            "The GPU, its board or its driver is to blame, not what ran on it. `gpukiln-gpu health` on the "
            "node says what NVIDIA's catalogue wants done: a reset, a reboot, or another GPU.",
        ),
        Alert(
            "GpuEccUncorrectable",
            "critical",
            f"max by ({GPU}) (increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[1h])) > 0",
            "",
            f"Uncorrectable memory error on {WHERE}",
            f"What ran there has ended, or computed with wrong data. {RESET} If it comes again, have the GPU "
            "replaced.",
        ),
        Alert(
            "GpuRowRemapFailed",
            "critical",
            f"max by ({GPU}) (DCGM_FI_DEV_ROW_REMAP_FAILURE) > 0",
            "",
            f"Memory can't be repaired on {WHERE}",
            "The GPU has no spare rows for a bad one. Take the node out, and have the GPU replaced.",
        ),
        Alert(
            "GpuLost",
            "critical",
            "count by (node) (DCGM_FI_DEV_GPU_TEMP)\n"
            "  < max_over_time((count by (node) (DCGM_FI_DEV_GPU_TEMP))[1h:1m])",
            "5m",
            "{{ $labels.node }} has fewer GPUs than an hour ago",
            "A GPU has fallen off the bus, or its driver no longer answers for it: `gpukiln-gpu list` on the "
            "node shows the row and the reason. A reboot brings most back; a second time, have the machine "
            "replaced.",
        ),
        Alert(
            "GpuNotAllocatable",
            "critical",
            'kube_node_status_capacity{resource="nvidia_com_gpu"}\n'
            '  > on (node) kube_node_status_allocatable{resource="nvidia_com_gpu"}',
            "5m",
            "The device plugin calls GPUs of {{ $labels.node }} unhealthy",
            "It stays so until the plugin starts again, and it starts again only after the cause is mended: "
            "`invoke k8s.doctor` names it.",
        ),
        Alert(
            "GpuNodeSick",
            "critical",
            f'kube_node_status_condition{{condition="{CONDITION}", status="true"}} == 1',
            "1m",
            "GPUs of {{ $labels.node }} are sick, and it takes no more pods",
            "`gpukiln-gpu health` on the node, or `kubectl describe node`, says what is wrong.",
        ),
        Alert(
            "GpuHot",
            "warning",
            f"max by ({GPU}) (DCGM_FI_DEV_GPU_TEMP)\n  >= max by ({GPU}) (DCGM_FI_DEV_SLOWDOWN_TEMP) - 3",
            "5m",
            f"{{{{ $value }}}} C on {WHERE}",
            "It slows down to save itself. Look at fans, air and neighbours; on a cloud, have the machine "
            "replaced.",
        ),
        Alert(
            "GpuRemapPending",
            "warning",
            f"max by ({GPU}) (DCGM_FI_DEV_ROW_REMAP_PENDING) > 0\n"
            f"  or max by ({GPU}) (DCGM_FI_DEV_RETIRED_PENDING) > 0",
            "10m",
            f"A repair of memory waits for a reset of {WHERE}",
            f"Until then the bad row is used. {RESET}",
        ),
        Alert(
            "GpuXid",
            "warning",
            _xids(f'xid!~"|0|{fatal}|{_of_applications()}"'),
            "",
            f"Xid {{{{ $labels.xid }}}} on {WHERE}",
            "Neither the hardware's fault for sure nor a program's: look it up in NVIDIA's Xid catalogue.",
        ),
        Alert(
            "GpuNotWatched",
            "warning",
            'max by (node) (kube_node_status_capacity{resource="nvidia_com_gpu"}) > 0\n'
            "  unless on (node) count by (node) (DCGM_FI_DEV_GPU_TEMP)",
            "15m",
            "{{ $labels.node }} has GPUs, and nothing is known of them",
            "No exporter answers there: `kubectl get pods -o wide` of dcgm-exporter, and its log.",
        ),
        Alert(
            "GpuIdle",
            "warning",
            f'(max_over_time(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{pod!=""}}[{_looks(idle)}m]) * 100\n'
            f'  or max_over_time(DCGM_FI_DEV_GPU_UTIL{{pod!=""}}[{_looks(idle)}m])) < {least}',
            f"{idle - _looks(idle)}m",
            f"{{{{ $labels.namespace }}}}/{{{{ $labels.pod }}}} has had a GPU for nothing for {idle} minutes",
            f"Less than {least} % on {WHERE}. It costs as much as one that works: end the pod, "
            "or give it a share of a GPU.",
        ),
        Alert(
            "GpuDriverEnded",
            "warning",
            f"{_driver_branch()}\n  and on (branch) (gpukiln:driver_branch_end:seconds < time())",
            "1h",
            "Driver {{ $labels.DCGM_FI_DRIVER_VERSION }} on {{ $labels.node }} is past its end of life",
            "NVIDIA mends nothing in its branch any more. Build the image with a later one, and prove it "
            "(docs/upgrade.md).",
        ),
        Alert(
            "GpuDriverEndsSoon",
            "info",
            f"{_driver_branch()}\n  and on (branch) (gpukiln:driver_branch_end:seconds - time() > 0)\n"
            f"  and on (branch) (gpukiln:driver_branch_end:seconds - time() < {SOON_S})",
            "1h",
            "Driver {{ $labels.DCGM_FI_DRIVER_VERSION }} on {{ $labels.node }} ends within "
            f"{SOON_S // 86400} days",
            "Build the image with a later branch, and prove it, before that (docs/upgrade.md).",
        ),
    )


def _xids(which: str) -> str:
    """GPUs with Xids of the last minutes; one that comes and goes between two scrapes is not missed."""
    return f"max by ({GPU}, xid) (max_over_time(\n  DCGM_EXP_XID_ERRORS_COUNT{{{which}}}\n  [5m])) > 0"


def _of_applications() -> str:
    """What a program did wrong, or what follows from another Xid: no alert is worth it."""
    return "|".join(str(number) for number, one in xids().items() if one.kind in ("app", "secondary"))


def _looks(idle_min: int) -> int:
    """Minutes that one look goes back, so that a short burst is not missed between two."""
    return max(1, min(10, idle_min // 6))


def _driver_branch() -> str:
    version = "DCGM_FI_DRIVER_VERSION"
    return (
        f"label_replace(count by (node, {version}) (DCGM_FI_DEV_GPU_TEMP),\n"
        f'  "branch", "$1", "{version}", "([0-9]+)[.].*")'
    )


def expressions(settings: Settings) -> dict[str, str]:
    """Every rule's expression by its name; of facts one."""
    rules: list[dict[str, Any]] = [rule for group in groups(settings) for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules}
