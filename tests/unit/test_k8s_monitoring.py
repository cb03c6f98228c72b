"""Monitoring of GPU clusters: rules by promtool on made-up series; what dashboard and exporter agree on."""

import json
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from gpukiln.catalog.xid import xids
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons import monitoring, rendered
from gpukiln.kubernetes.addons.monitoring import cloudwatch, dashboard, exporter, metrics, rules
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import dump
from tests.support import promtool

HERE = Settings(monitoring=True)
ENDS = {
    535: date(1970, 1, 2),
    580: date(1970, 3, 1),
    595: date(1999, 1, 1),
}  # promtool's clock begins in 1970
GPU = 'node="a", gpu="0", UUID="GPU-1", modelName="Tesla T4"'
POD = f'{GPU}, namespace="vision", pod="train", container="main"'
RESOURCE = 'resource="nvidia_com_gpu", unit="integer"'


def series(name, values, labels=GPU):
    return {"series": f"{name}{{{labels}}}", "values": values}


def seen(**more):
    """A GPU that the exporter sees for a day and longer."""
    labels = "".join(f', {key}="{value}"' for key, value in more.items())
    return series("DCGM_FI_DEV_GPU_TEMP", "50x2000", GPU + labels)


# Alert: when it is looked at, series on which it fires, and series that come near and on which it does not.
ALERTS = {
    "GpuXidFatal": (
        "10m",
        [series("DCGM_EXP_XID_ERRORS_COUNT", "0x8 1x5", f'{GPU}, xid="79"')],
        [
            series("DCGM_EXP_XID_ERRORS_COUNT", "1x20", f'{GPU}, xid="13"'),
            series("DCGM_EXP_XID_ERRORS_COUNT", "0x20", f'{GPU}, xid="79"'),
            series("DCGM_FI_DEV_XID_ERRORS", "79x20"),
        ],
    ),
    "GpuXid": (
        "10m",
        [series("DCGM_EXP_XID_ERRORS_COUNT", "1x20", f'{GPU}, xid="999"')],
        [
            series("DCGM_EXP_XID_ERRORS_COUNT", "1x20", f'{GPU}, xid="79"'),
            series("DCGM_EXP_XID_ERRORS_COUNT", "1x20", f'{GPU}, xid="43"'),
            series("DCGM_EXP_XID_ERRORS_COUNT", "0x20"),
        ],
    ),
    "GpuEccUncorrectable": (
        "90m",
        [series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "0x60 2x60")],
        [series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "2x120")],
    ),
    "GpuRowRemapFailed": (
        "5m",
        [series("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1x10")],
        [series("DCGM_FI_DEV_ROW_REMAP_FAILURE", "0x10")],
    ),
    "GpuRemapPending": (
        "15m",
        [series("DCGM_FI_DEV_ROW_REMAP_PENDING", "1x20")],
        [
            series("DCGM_FI_DEV_ROW_REMAP_PENDING", "0x10 1x2 0x10"),
            series("DCGM_FI_DEV_RETIRED_PENDING", "0x20"),
        ],
    ),
    "GpuLost": (
        "50m",
        [seen(), series("DCGM_FI_DEV_GPU_TEMP", "50x30 _x30", GPU.replace('gpu="0"', 'gpu="1"'))],
        [seen(), series("DCGM_FI_DEV_GPU_TEMP", "50x60", GPU.replace('gpu="0"', 'gpu="1"'))],
    ),
    "GpuNotAllocatable": (
        "10m",
        [
            series("kube_node_status_capacity", "8x20", f'node="a", {RESOURCE}'),
            series("kube_node_status_allocatable", "7x20", f'node="a", {RESOURCE}'),
        ],
        [
            series("kube_node_status_capacity", "8x20", f'node="a", {RESOURCE}'),
            series("kube_node_status_allocatable", "8x20", f'node="a", {RESOURCE}'),
        ],
    ),
    "GpuNodeSick": (
        "5m",
        [series("kube_node_status_condition", "1x10", 'node="a", condition="GPUProblem", status="true"')],
        [
            series("kube_node_status_condition", "1x10", 'node="a", condition="GPUProblem", status="false"'),
            series("kube_node_status_condition", "0x10", 'node="a", condition="GPUProblem", status="true"'),
        ],
    ),
    "GpuHot": (
        "10m",
        [series("DCGM_FI_DEV_GPU_TEMP", "91x20"), series("DCGM_FI_DEV_SLOWDOWN_TEMP", "93x20")],
        [series("DCGM_FI_DEV_GPU_TEMP", "89x20"), series("DCGM_FI_DEV_SLOWDOWN_TEMP", "93x20")],
    ),
    "GpuNotWatched": (
        "20m",
        [series("kube_node_status_capacity", "1x30", f'node="a", {RESOURCE}')],
        [
            series("kube_node_status_capacity", "1x30", f'node="a", {RESOURCE}'),
            seen(),
            series("kube_node_status_capacity", "0x30", f'node="b", {RESOURCE}'),
        ],
    ),
    "GpuIdle": (
        "70m",
        [
            series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.01x80", POD),
            series("DCGM_FI_DEV_GPU_UTIL", "40x80", POD),
        ],
        [
            series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0x30 0.5x3 0x47", POD),
            series("DCGM_FI_DEV_GPU_UTIL", "0x80"),
        ],
    ),
    "GpuDriverEnded": (
        "1600m",
        [seen(DCGM_FI_DRIVER_VERSION="535.309.01")],
        [seen(DCGM_FI_DRIVER_VERSION="580.95.05")],
    ),
    "GpuDriverEndsSoon": (
        "1600m",
        [seen(DCGM_FI_DRIVER_VERSION="580.95.05")],
        [seen(DCGM_FI_DRIVER_VERSION="595.45.01")],
    ),
}


def firing(name, moment, given, count):
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
    samples = [{"labels": "{}", "value": count}]
    return {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [{"expr": query, "eval_time": moment, "exp_samples": samples}],
    }


def text(**changes):
    return dump({"groups": rules.groups(replace(HERE, **changes), ENDS)})


def test_promtool_takes_the_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(rules.as_file(HERE))
    done = promtool.run("check", "rules", "--lint-fatal", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_promtool_finds_a_wrong_rule(tmp_path):
    (tmp_path / "rules.yaml").write_text(rules.as_file(HERE).replace("max by (", "max by (("))
    assert promtool.run("check", "rules", tmp_path / "rules.yaml").returncode


def test_every_alert_is_in_the_table_and_on_the_page():
    alerts = rules.alerts(HERE)
    assert set(ALERTS) == {one.name for one in alerts}
    page = (ROOT / rules.PAGE).read_text()
    assert re.findall(r"(?m)^\| `(Gpu\w+)` \| (\w+) \|", page) == [(one.name, one.severity) for one in alerts]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires(name, tmp_path):
    moment, fires, _ = ALERTS[name]
    assert promtool.judge(tmp_path, text(), [firing(name, moment, fires, 1)]) == ""


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_does_not_fire_on_what_comes_near(name, tmp_path):
    moment, fires, near = ALERTS[name]
    assert promtool.judge(tmp_path, text(), [firing(name, moment, near, 0)]) == ""
    assert "got" in promtool.judge(tmp_path, text(), [firing(name, moment, fires, 0)])


def test_an_alert_says_where_and_what_to_do(tmp_path):
    found = {
        "alertname": "GpuRowRemapFailed",
        "eval_time": "5m",
        "exp_alerts": [
            {
                "exp_labels": {
                    "severity": "critical",
                    "node": "a",
                    "gpu": "0",
                    "UUID": "GPU-1",
                    "modelName": "Tesla T4",
                },
                "exp_annotations": {
                    "summary": "Memory can't be repaired on a, GPU 0 (Tesla T4, GPU-1)",
                    "description": "The GPU has no spare rows for a bad one. Take the node out, and "
                    "have the GPU replaced.",
                    "runbook": "docs/k8s-monitoring.md: GpuRowRemapFailed",
                },
            }
        ],
    }
    given = [series("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1x10")]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": [found]}
    assert promtool.judge(tmp_path, text(), [case]) == ""


def test_the_idle_rule_is_as_somebody_chose(tmp_path):
    given = [series("DCGM_FI_DEV_GPU_UTIL", "15x80", POD)]
    assert promtool.judge(tmp_path, text(), [firing("GpuIdle", "70m", given, 0)]) == ""
    chosen = text(idle_percent=20, idle_minutes=30)
    assert promtool.judge(tmp_path, chosen, [firing("GpuIdle", "31m", given, 1)]) == ""


USED = [
    series("kube_node_labels", "1x200", 'node="a", label_node_kubernetes_io_instance_type="g4dn.12xlarge"'),
    series("kube_node_labels", "1x200", 'node="b", label_node_kubernetes_io_instance_type="p9.unknown"'),
    series("kube_node_status_capacity", "4x200", f'node="a", {RESOURCE}'),
    series("kube_node_status_capacity", "8x200", f'node="b", {RESOURCE}'),
    *(
        one
        for pod, node, namespace, gpus, phase in (
            ("one", "a", "vision", 2, "Running"),
            ("two", "a", "nlp", 1, "Running"),
            ("old", "a", "nlp", 4, "Succeeded"),
            ("far", "b", "nlp", 3, "Running"),
        )
        for one in (
            series(
                "kube_pod_container_resource_requests",
                f"{gpus}x200",
                f'namespace="{namespace}", pod="{pod}", container="c", node="{node}", {RESOURCE}',
            ),
            series(
                "kube_pod_status_phase", "1x200", f'namespace="{namespace}", pod="{pod}", phase="{phase}"'
            ),
        )
    ),
]
RECORDS = {
    "namespace_node:gpus_allocated:sum": {
        '{namespace="vision", node="a"}': 2,
        '{namespace="nlp", node="a"}': 1,
        '{namespace="nlp", node="b"}': 3,
    },
    "namespace:gpus_allocated:sum": {'{namespace="vision"}': 2, '{namespace="nlp"}': 4},
    "node:gpu_usd_per_hour:max": {'{node="a"}': 2.5},
    "namespace:gpu_usd_per_hour:sum": {'{namespace="vision"}': 5, '{namespace="nlp"}': 2.5},
    "namespace:gpu_hours:sum1h": {'{namespace="vision"}': 2, '{namespace="nlp"}': 4},
    "namespace:gpu_usd:sum1h": {'{namespace="vision"}': 5, '{namespace="nlp"}': 2.5},
    "cluster:gpus:sum": {"{}": 12},
    "cluster:gpus_allocated:sum": {"{}": 6},
    "cluster:gpu_usd_per_hour:sum": {"{}": 10},
}


def test_every_record_is_in_the_table():
    assert set(RECORDS) == {one.name for one in rules.USAGE}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_its_values(name, tmp_path):
    """Two GPUs of four of a machine at 10 USD are 5 USD an hour; of unknown machines nothing is made up."""

    def judged(values):
        samples = [
            {"labels": name + (labels if labels != "{}" else ""), "value": value}
            for labels, value in values.items()
        ]
        query = {"expr": name, "eval_time": "150m", "exp_samples": samples}
        case = {"interval": "1m", "input_series": USED, "promql_expr_test": [query]}
        priced = text(usd_per_hour={"g4dn.12xlarge": Decimal(10)})
        return promtool.judge(tmp_path, priced, [case])

    assert judged(RECORDS[name]) == ""
    assert "got" in judged({labels: value + 1 for labels, value in RECORDS[name].items()})


def test_an_hour_that_was_worked_in_part_counts_in_part(tmp_path):
    requests = series(
        "kube_pod_container_resource_requests",
        "2x14 _x60",
        f'namespace="v", pod="p", container="c", node="a", {RESOURCE}',
    )
    phase = series("kube_pod_status_phase", "1x14 _x60", 'namespace="v", pod="p", phase="Running"')
    samples = [{"labels": 'namespace:gpu_hours:sum1h{namespace="v"}', "value": 2 * 20 / 60}]
    query = {"expr": "namespace:gpu_hours:sum1h", "eval_time": "40m", "exp_samples": samples}
    case = {"interval": "1m", "input_series": [requests, phase], "promql_expr_test": [query]}
    # A quarter of an hour, and the five minutes that Prometheus takes to miss what ends without a word.
    assert promtool.judge(tmp_path, text(), [case]) == ""


def asked_for(expression):
    """Names of metrics in an expression."""
    plain = re.sub(r'"[^"]*"|\{|\}', " ", expression)
    return set(re.findall(r"\b(?:DCGM_FI_DEV|DCGM_FI_PROF|DCGM_EXP|kube)_\w+|\b\w+:\w+:\w+", plain))


def test_rules_and_dashboard_ask_for_nothing_that_nobody_gives():
    given = {*metrics.metrics(), *metrics.state(), *rules.expressions(HERE)}
    panels = [target["expr"] for one in dashboard.dashboard()["panels"] for target in one.get("targets", ())]
    assert len(panels) > 20
    for expression in (*rules.expressions(HERE).values(), *panels):
        assert asked_for(expression) <= given, expression
    assert asked_for("rate(DCGM_FI_DEV_NONE[5m])") - given == {"DCGM_FI_DEV_NONE"}


def test_the_exporter_is_asked_for_the_whole_list_in_its_form():
    rows = [row for row in metrics.counters().splitlines() if not row.startswith("#")]
    assert len(rows) == len(metrics.metrics()) > 20
    for row in rows:
        assert re.fullmatch(r"DCGM_\w+, (gauge|counter|label), [^,]+\.", row), row
    [values] = yaml.safe_load_all(exporter.values(HERE))
    assert values["customMetrics"] == metrics.counters()


def test_series_bear_the_pod_that_has_the_gpu_and_not_the_exporter():
    [values] = yaml.safe_load_all(exporter.values(HERE))
    monitor = values["serviceMonitor"]
    assert monitor["honorLabels"] is True
    [drop, node] = monitor["relabelings"]
    for label in ("namespace", "pod", "container"):
        assert re.fullmatch(drop["regex"], label)
    assert not re.fullmatch(drop["regex"], "instance")
    assert node["targetLabel"] == "node"


def test_the_dashboard_is_whole():
    document = dashboard.dashboard()
    panels = document["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken = set()
    for one in panels:
        place = one["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, one["title"]
        assert max(x for x, _ in cells) < dashboard.WIDTH
        taken |= cells
    [shown] = yaml.safe_load_all(dashboard.as_object(HERE))
    assert json.loads(shown["data"]["gpukiln.json"]) == document


def test_every_query_of_the_dashboard_can_be_read(tmp_path):
    groups = [
        {
            "name": "g",
            "rules": [
                {
                    "record": f"panel:{number}",
                    "expr": target["expr"].replace("$node", ".*").replace("$gpu", ".*"),
                }
                for number, target in enumerate(
                    target for one in dashboard.dashboard()["panels"] for target in one.get("targets", ())
                )
            ],
        }
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    done = promtool.run("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_cloudwatch_gets_gpu_metrics_under_the_clusters_name():
    document = json.loads(cloudwatch.agent(replace(HERE, cluster="research")))
    assert document["metrics"]["namespace"] == "gpukiln/research"
    measured = document["metrics"]["metrics_collected"]["nvidia_gpu"]["measurement"]
    assert {"utilization_gpu", "memory_used", "temperature_gpu", "power_draw"} <= set(measured)


def test_fatal_xids_are_the_catalogues():
    found = next(one.expression for one in rules.alerts(HERE) if one.name == "GpuXidFatal")
    numbers = set(re.search(r'xid=~"([\d|]+)"', found)[1].split("|"))
    assert numbers == {str(number) for number, one in xids().items() if one.blames_hardware}
    assert {"48", "79", "95"} <= numbers


def test_prices_are_those_of_one_gpu_and_what_somebody_pays():
    listed = rules.gpu_prices(HERE)
    assert listed["g4dn.xlarge"] == Decimal("0.526")
    assert listed["g4dn.12xlarge"] == Decimal("0.978")
    paid = rules.gpu_prices(replace(HERE, usd_per_hour={"p5.48xlarge": Decimal("39.5")}))
    assert paid["p5.48xlarge"] == Decimal("4.9375")


@pytest.mark.parametrize(
    ("prices", "told"),
    [({"p5.48xlage": Decimal(1)}, "p5.48xlarge"), ({"p5.48xlarge": Decimal(0)}, "above 0")],
)
def test_a_wrong_price_is_refused(prices, told):
    with pytest.raises(UsageError) as refused:
        rules.gpu_prices(replace(HERE, usd_per_hour=prices))
    assert told in f"{refused.value.message} {refused.value.hint}"


def test_monitoring_is_rendered_when_it_is_asked_for():
    assert "monitoring" in rendered.chosen((), HERE)
    assert "monitoring" not in rendered.chosen((), Settings())
    script = rendered.rendered(HERE, ("monitoring",))["install.sh"]
    assert "dcgm-exporter-values.yaml" in script
    assert monitoring.RULES in script
