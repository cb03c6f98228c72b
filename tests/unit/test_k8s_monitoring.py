"""Monitoring: rules are run by promtool over series that fire each alert and series that don't."""

import json
import os
import re
import subprocess
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
import yaml

from gpukiln.catalog import drivers
from gpukiln.catalog.components import load_add_ons
from gpukiln.catalog.load import ROOT
from gpukiln.catalog.prices import machine_price
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons import helm, monitoring
from gpukiln.kubernetes.addons.monitoring import alerts, cloudwatch, dashboard, exporter, metrics, records
from gpukiln.kubernetes.addons.settings import Settings, SharingSettings
from gpukiln.kubernetes.manifest import load
from tests.support import promtool
from tests.support.exit_codes import invoke

SETTINGS = Settings()
T4 = 'node="n1",gpu="0",UUID="GPU-a",modelName="Tesla T4",instance_type="g4dn.xlarge"'
OTHER = 'node="n1",gpu="1",UUID="GPU-b",modelName="Tesla T4",instance_type="g4dn.xlarge"'
POD = 'exported_namespace="vision",exported_pod="train"'
TEMP = f"DCGM_FI_DEV_GPU_TEMP{{{T4}}}"
CAPACITY = 'kube_node_status_capacity{node="n1",resource="nvidia_com_gpu",unit="integer"}'
ALLOCATABLE = CAPACITY.replace("capacity", "allocatable")
XID = f"DCGM_EXP_XID_ERRORS_COUNT{{{T4},xid=%s}}"
BUSY = f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{T4},{POD}}}"
UTIL = f"DCGM_FI_DEV_GPU_UTIL{{{T4},{POD}}}"

# By alert: series with which it fires at the end of two hours, and with which it does not. Values as promtool
# reads them: first+stepxtimes, _ is none.
CASES = {
    "GpuXid": (
        [{XID % '"79"': "0x110 1x5 0x20"}],
        [
            {XID % '"13"': "1x140"},  # what ran on the GPU is to blame
            {XID % '"63"': "1x140"},  # NVIDIA: nothing to do
            {XID % '"94"': "1x140"},  # the GPU works on
            {XID % '"79"': "1x5 0x140"},  # long ago
            {f"DCGM_EXP_XID_ERRORS_COUNT{{{T4}}}": "0x140"},  # none at all
        ],
    ),
    "GpuXidWarning": (
        [{XID % '"94"': "1x140"}],
        [{XID % '"63"': "1x140"}, {XID % '"79"': "1x140"}],
    ),
    "GpuXidUnknown": (
        [{XID % '"9999"': "1x140"}],
        [{XID % '"79"': "1x140"}, {XID % '"0"': "1x140"}, {f"DCGM_EXP_XID_ERRORS_COUNT{{{T4}}}": "0x140"}],
    ),
    "GpuUncorrectedMemoryError": (
        [{f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{T4}}}": "0x60 1x80"}],
        [
            {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{T4}}}": "0x140"},
            {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{T4}}}": "1x60 0x80"},  # reset since
            {f"DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{T4}}}": "5x140"},  # corrected
        ],
    ),
    "GpuRowRemapFailed": (
        [{f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{T4}}}": "1x140"}],
        [{f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{T4}}}": "0x140"}],
    ),
    "GpuRemapPending": (
        [
            {f"DCGM_FI_DEV_ROW_REMAP_PENDING{{{T4}}}": "1x140"},
            {f"DCGM_FI_DEV_RETIRED_PENDING{{{T4}}}": "2x140"},
            {
                f"DCGM_FI_DEV_ROW_REMAP_PENDING{{{T4}}}": "0x140",
                f"DCGM_FI_DEV_RETIRED_PENDING{{{T4}}}": "2x140",
            },
        ],
        [
            {f"DCGM_FI_DEV_ROW_REMAP_PENDING{{{T4}}}": "0x140"},
            {f"DCGM_FI_DEV_RETIRED_PENDING{{{T4}}}": "0x140"},
        ],
    ),
    "GpuHot": (
        [{TEMP: "93x140"}],
        [
            {TEMP: "92x140"},
            {TEMP: "50x117 95x1 50x30"},  # for a moment
            {TEMP.replace("Tesla T4", "a GPU of no catalogue"): "99x140"},
        ],
    ),
    "GpuThermalThrottling": (
        [{f"DCGM_FI_DEV_THERMAL_VIOLATION{{{T4}}}": "0+1000x140"}],
        [
            {f"DCGM_FI_DEV_THERMAL_VIOLATION{{{T4}}}": "7x140"},  # once, before
            {f"DCGM_FI_DEV_THERMAL_VIOLATION{{{T4}}}": "0x116 9x30"},  # a moment ago, once
        ],
    ),
    "GpuNotAllocatable": (
        [{CAPACITY: "4x140", ALLOCATABLE: "4x60 3x80"}],
        [
            {CAPACITY: "4x140", ALLOCATABLE: "4x140"},
            {CAPACITY: "4x140", ALLOCATABLE: "3x60 4x80"},
            {
                CAPACITY.replace("nvidia_com_gpu", "cpu"): "8x140",
                ALLOCATABLE.replace("nvidia_com_gpu", "cpu"): "7x140",
            },
        ],
    ),
    "GpuNodeSick": (
        [{'kube_node_status_condition{node="n1",condition="GPUProblem",status="true"}': "1x140"}],
        [
            {'kube_node_status_condition{node="n1",condition="GPUProblem",status="true"}': "0x140"},
            {'kube_node_status_condition{node="n1",condition="GPUProblem",status="unknown"}': "1x140"},
            {'kube_node_status_condition{node="n1",condition="DiskPressure",status="true"}': "1x140"},
        ],
    ),
    "GpuVanished": (
        [{TEMP: "40x140", f"DCGM_FI_DEV_GPU_TEMP{{{OTHER}}}": "40x90 _x50"}],
        [
            {TEMP: "40x140", f"DCGM_FI_DEV_GPU_TEMP{{{OTHER}}}": "40x140"},
            {TEMP: "40x90 _x50"},  # the node is gone, as nodes go
        ],
    ),
    "GpuNotMonitored": (
        [{CAPACITY: "1x140"}],
        [{CAPACITY: "1x140", TEMP: "40x140"}, {CAPACITY: "0x140"}],
    ),
    "GpuNodesUnknown": (
        [{TEMP: "40x140"}],
        [{'kube_node_info{node="n1"}': "1x140"}],
    ),
    "GpuIdle": (
        [
            {BUSY: "0.01x140"},
            {UTIL: "2x140"},  # a GPU without profiling
            {BUSY.replace("T4", 'T4",GPU_I_ID="3'): "0x140"},  # a MIG device
            {BUSY: "0x140", UTIL: "100x140"},  # a kernel that waits is no work
        ],
        [
            {BUSY: "0.9x140"},
            {BUSY: "0x90 0.9x1 0x60"},  # works now and then
            {BUSY: "_x90 0x60"},  # came half an hour ago
            {BUSY.replace(f",{POD}", ""): "0x140"},  # nobody's
        ],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _shipped_prices(tmp_path_factory):
    """Not those that somebody has asked AWS for on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUKILN_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def files():
    return monitoring.files(SETTINGS)


@pytest.fixture(scope="module")
def rules(files, tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(files[monitoring.RULES])
    return path


def series(found):
    return [{"series": name, "values": values} for name, values in found.items()]


def only(document, names):
    """The rules of these names, and those that they read: promtool evaluates every rule at every minute."""
    every = [
        (rule.get("alert") or rule["record"], rule) for one in document["groups"] for rule in one["rules"]
    ]
    kept, read = set(), {*names}
    while read:
        kept |= read
        texts = " ".join(rule["expr"] for name, rule in every if name in read)
        read = {name for name, _ in every} & {*re.findall(r"[\w:]+", texts)} - kept
    groups = [
        {**one, "rules": [rule for rule in one["rules"] if kept & {rule.get("alert"), rule.get("record")}]}
        for one in document["groups"]
    ]
    return {"groups": [one for one in groups if one["rules"]]}


def judged(rules, cases, *names):
    """Runs cases of promtool with the rules of these names; returns what it says of those that fail."""
    document = only(yaml.load(rules.read_text(), yaml.CSafeLoader), names)
    needed = rules.parent / "needed.yaml"
    needed.write_text(yaml.dump(document, Dumper=yaml.CSafeDumper))
    there = {one["name"] for one in document["groups"]}
    document = {
        "rule_files": [str(needed)],
        "evaluation_interval": "1m",
        "group_eval_order": [name for name in promtool.GROUPS if name in there],
        "tests": [{"interval": "1m", **one} for one in cases],
    }
    path = rules.parent / "test.yaml"
    path.write_text(yaml.safe_dump(document))
    done = promtool.run("test", "rules", path)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def firing(alert, found, times, at="2h"):
    counted = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": times}] if times else []
    return {
        "input_series": series(found),
        "promql_expr_test": [{"expr": counted, "eval_time": at, "exp_samples": expected}],
    }


# ---- alerts


def test_every_alert_has_its_cases_and_its_section():
    names = [one.name for one in alerts.alerts(SETTINGS)]
    assert set(names) == {*CASES, "GpuDriverEndOfLife", "GpuDriverEndsSoon"}
    assert len(names) == len(set(names))
    headings = re.findall(r"^### (\w+)$", (ROOT / alerts.RUNBOOK_PAGE).read_text(), re.MULTILINE)
    assert headings == names


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires(rules, alert):
    assert not judged(rules, [firing(alert, found, 1) for found in CASES[alert][0]], alert)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_does_not_fire(rules, alert):
    assert not judged(rules, [firing(alert, found, 0) for found in CASES[alert][1]], alert)


def test_a_case_that_is_wrong_is_told(rules):
    assert "FAILED" in judged(rules, [firing("GpuHot", {TEMP: "20x140"}, 1)], "GpuHot")


def test_the_rules_of_a_name_are_those_that_it_reads(rules):
    document = yaml.safe_load(rules.read_text())
    groups = {one["name"]: one["rules"] for one in only(document, ["GpuHot"])["groups"]}
    assert {one["record"] for one in groups["gpukiln-facts"]} == {"gpukiln:gpu_slowdown_celsius"}
    assert [one["alert"] for one in groups["gpukiln-alerts"]] == ["GpuHot"]
    assert "gpukiln-use" not in groups


def test_a_driver_past_its_end_of_life(rules, tmp_path):
    # promtool's time starts in 1970: there the end comes after an hour.
    end = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp())
    assert drivers.branches()[535].eol == date(2026, 6, 1)
    assert f"vector({end})" in rules.read_text()
    path = tmp_path / "rules.yaml"
    path.write_text(rules.read_text().replace(f"vector({end})", "vector(3600)"))
    other = OTHER.replace("n1", "n2")
    found = {
        f'DCGM_FI_DEV_GPU_TEMP{{{T4},DCGM_FI_DRIVER_VERSION="535.309.01"}}': "40x140",
        f'DCGM_FI_DEV_GPU_TEMP{{{other},DCGM_FI_DRIVER_VERSION="580.178.04"}}': "40x140",
    }
    alert = "GpuDriverEndOfLife"
    assert not judged(path, [firing(alert, found, 0, "60m"), firing(alert, found, 1, "61m")], alert)
    soon = "GpuDriverEndsSoon"
    assert not judged(path, [firing(soon, found, 1, "59m"), firing(soon, found, 0, "61m")], soon)
    path.write_text(path.read_text().replace("vector(3600)", f"vector({61 * 86400})"))
    assert not judged(path, [firing(soon, found, 0, "59m")], soon)


def test_an_alert_says_where_and_what_to_do(rules):
    [one] = [one for one in alerts.alerts(SETTINGS) if one.name == "GpuIdle"]
    case = {
        "input_series": series({BUSY: "0x140"}),
        "alert_rule_test": [
            {
                "alertname": "GpuIdle",
                "eval_time": "2h",
                "exp_alerts": [
                    {
                        "exp_labels": {
                            "severity": "warning",
                            "node": "n1",
                            "gpu": "0",
                            "UUID": "GPU-a",
                            "modelName": "Tesla T4",
                            "exported_namespace": "vision",
                            "exported_pod": "train",
                        },
                        "exp_annotations": {
                            "summary": "vision/train does not use GPU 0 (Tesla T4) of n1",
                            "description": one.description,
                            "runbook": "docs/k8s-monitoring.md#gpuidle",
                        },
                    }
                ],
            }
        ],
    }
    assert not judged(rules, [case], one.name)


def test_what_is_idle_is_a_setting(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(monitoring.files(replace(SETTINGS, idle_percent=50, idle_minutes=10))[monitoring.RULES])
    assert not judged(path, [firing("GpuIdle", {BUSY: "0.4x20"}, 1, "15m")], "GpuIdle")
    assert not judged(path, [firing("GpuIdle", {BUSY: "0.6x20"}, 0, "15m")], "GpuIdle")


# ---- records


HELD = 'DCGM_FI_DEV_FB_USED{node="%s",UUID="%s",instance_type="%s",exported_namespace="%s",exported_pod="%s"}'


def test_gpus_hours_and_money_by_namespace(rules):
    found = {
        HELD % ("n1", "a", "g6.xlarge", "vision", "one"): "1x1500",
        HELD % ("n2", "b", "g6.xlarge", "vision", "two"): "1x1500",  # shared
        HELD % ("n2", "b", "g6.xlarge", "nlp", "three"): "1x1500",
        HELD % ("n3", "c", "own.machine", "nlp", "four"): "1x1500",  # without a price
        'DCGM_FI_DEV_FB_USED{node="n4",UUID="d",instance_type="g6.xlarge"}': "1x1500",  # nobody's
        HELD.replace('"%s",inst', '"%s",GPU_I_ID="1",inst')
        % ("n5", "e", "g6.xlarge", "mig", "five"): "1x1500",
        HELD.replace('"%s",inst', '"%s",GPU_I_ID="2",inst')
        % ("n5", "e", "g6.xlarge", "mig", "six"): "1x1500",
    }
    usd = float(machine_price("g6.xlarge", SETTINGS.region).usd)
    wanted = {
        records.GPUS: {"vision": 1.5, "nlp": 1.5, "mig": 1},
        records.USD: {"vision": 1.5 * usd, "nlp": 0.5 * usd, "mig": usd},
        "gpukiln:namespace_gpu_hours:1h": {"vision": 1.5, "nlp": 1.5, "mig": 1},
        "gpukiln:namespace_usd:1h": {"vision": 1.5 * usd, "nlp": 0.5 * usd, "mig": usd},
        "gpukiln:namespace_gpu_hours:1d": {"vision": 36, "nlp": 36, "mig": 24},
        "gpukiln:namespace_usd:1d": {"vision": 36 * usd, "nlp": 12 * usd, "mig": 24 * usd},
    }
    tests = [
        {
            # The difference, for promtool compares numbers to the last bit.
            "expr": f'abs({name}{{exported_namespace="{who}"}} - {value!r}) < bool 0.001',
            "eval_time": "25h",
            "exp_samples": [{"labels": f'{{exported_namespace="{who}"}}', "value": 1}],
        }
        for name, values in wanted.items()
        for who, value in values.items()
    ]
    tests.append(
        {
            "expr": records.UNPRICED,
            "eval_time": "25h",
            "exp_samples": [{"labels": f'{records.UNPRICED}{{instance_type="own.machine"}}', "value": 1}],
        }
    )
    names = (*wanted, records.UNPRICED)
    assert not judged(rules, [{"input_series": series(found), "promql_expr_test": tests}], *names)


def test_an_hour_that_ended_early_counts_as_far_as_it_went(rules):
    found = {HELD % ("n1", "a", "g6.xlarge", "vision", "one"): "1x14 _x100"}  # 15 minutes, and 5 of lookback
    case = {"expr": "round(gpukiln:namespace_gpu_hours:1h, 0.01)", "eval_time": "50m"}
    sample = {"labels": '{exported_namespace="vision"}', "value": 0.33}
    assert not judged(
        rules,
        [{"input_series": series(found), "promql_expr_test": [{**case, "exp_samples": [sample]}]}],
        "gpukiln:namespace_gpu_hours:1h",
    )


def test_money_is_that_of_one_gpu_in_the_region():
    rows = {one["labels"]["instance_type"]: one["expr"] for one in records.prices(SETTINGS)}
    whole = machine_price("p5.48xlarge", SETTINGS.region)
    assert rows["p5.48xlarge"] == f"vector({whole.usd / 8:.6f})"
    assert rows["g6.xlarge"] == f"vector({machine_price('g6.xlarge', SETTINGS.region).usd:.6f})"


def test_without_prices_all_but_money_is_told(capsys, tmp_path):
    for region, told in (("ap-south-2", True), ("us-west-2", False)):
        words = ["k8s.addons", "--only", "monitoring", "--region", region, "--output", str(tmp_path / region)]
        with pytest.raises(SystemExit) as ended:
            invoke([*words])
        assert not ended.value.code
        assert ("no prices of GPU machines in" in capsys.readouterr().err) == told
    assert not records.prices(replace(SETTINGS, region="ap-south-2"))


# ---- files


def test_promtool_takes_the_rules_and_the_scraping(files, rules, tmp_path):
    done = promtool.run("check", "rules", rules)
    assert done.returncode == 0, done.stdout + done.stderr
    # Debian's has no discovery of Kubernetes compiled in: the rest of the job is looked at.
    [job] = yaml.safe_load(files[monitoring.SCRAPE])["scrape_configs"]
    discovery = job.pop("kubernetes_sd_configs")
    assert discovery[0]["attach_metadata"] == {"node": True}
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = promtool.run("check", "config", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_refuses_what_is_wrong(rules, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(rules.read_text().replace("group_left ()", "group_lef ()", 1))
    assert promtool.run("check", "rules", path).returncode


def test_the_operator_gets_the_same_rules(files):
    monitor, prometheus_rule = load(files[monitoring.OBJECTS])
    assert prometheus_rule["spec"] == yaml.safe_load(files[monitoring.RULES])
    assert monitor["metadata"]["labels"] == {"release": "kube-prometheus-stack"}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [SETTINGS.namespace]}
    [endpoint] = monitor["spec"]["endpoints"]
    assert not endpoint["honorLabels"]  # or a GPU that nobody has would be the exporter's
    assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"node", "instance_type"}


def test_what_somebody_pays_goes_before_the_price_on_demand():
    def price(settings):
        return {rule["labels"]["instance_type"]: rule["expr"] for rule in records.prices(settings)}[
            "p5.48xlarge"
        ]

    listed = machine_price("p5.48xlarge", SETTINGS.region).usd
    assert price(SETTINGS) == f"vector({listed / 8:.6f})"
    assert price(replace(SETTINGS, usd_per_hour={"p5.48xlarge": Decimal("39.5")})) == "vector(4.937500)"
    for wrong, told in (({"p5.48xlarge": Decimal(0)}, "is 0"), ({"p5.48xlage": Decimal(1)}, "p5.48xlage")):
        with pytest.raises(UsageError, match=told):
            records.prices(replace(SETTINGS, usd_per_hour=wrong))


def test_no_rule_and_no_panel_is_on_a_metric_that_is_not_exported(files):
    exported = {one.name for one in metrics.METRICS}
    for path in (monitoring.RULES, monitoring.DASHBOARD):
        used = set(re.findall(r"DCGM_(?:FI|EXP)_\w+", files[path])) - {metrics.DRIVER}  # a label
        assert used, path
        assert used <= exported, path
    recorded = {one["record"] for group in records.groups(SETTINGS) for one in group["rules"]}
    assert set(re.findall(r"gpukiln:\w+(?::\w+)?", files[monitoring.DASHBOARD])) <= recorded


def test_the_exporter_gets_each_counter_once():
    rows = [line.split(", ") for line in metrics.counters().splitlines()]
    assert rows.pop() == [metrics.DRIVER, "label", "Driver version."]
    assert len(rows) == len(metrics.METRICS) == len({row[0] for row in rows})
    assert all(
        len(row) == 3 and row[1] in ("gauge", "counter") for row in rows
    )  # a comma more is a column more


@pytest.mark.parametrize(
    ("sharing", "named"), [("none", False), ("mig-mixed", False), ("time-slicing", True), ("mps", True)]
)
def test_each_of_the_pods_that_share_a_gpu_is_named(sharing, named):
    found = exporter.values(replace(SETTINGS, sharing=SharingSettings(sharing, 4 if named else 0)))
    assert ("extraEnv" in found) == named
    also = exporter.values(
        replace(SETTINGS, named_sharing={"notebooks": SharingSettings(sharing, 4 if named else 0)})
    )
    assert ("extraEnv" in also) == named


def test_the_exporter_is_the_pinned_one_on_gpu_nodes_alone():
    found = exporter.values(SETTINGS)
    image = found["image"]
    assert f"{image['repository']}:{image['tag']}" == load_add_ons()["dcgm_exporter"].image
    assert found["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert found["tolerations"] == [{"operator": "Exists"}]


def test_the_dashboard_has_a_panel_for_each_metric(files):
    found = json.loads(files[monitoring.DASHBOARD])
    queries = [one["targets"][0]["expr"] for one in found["panels"]]
    for one in metrics.METRICS:
        assert sum(one.name in query for query in queries) == 1, one.name
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in found["panels"]]
    assert len(set(places)) == len(places)
    assert len({one["id"] for one in found["panels"]}) == len(found["panels"])
    [config] = load(files[monitoring.GRAFANA])
    assert config["data"] == {f"{dashboard.UID}.json": files[monitoring.DASHBOARD]}


def test_promtool_reads_every_query_of_the_dashboard(files, tmp_path):
    queries = [one["targets"][0]["expr"] for one in json.loads(files[monitoring.DASHBOARD])["panels"]]
    made = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    done = promtool.run("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cloudwatch_agent_measures_what_it_knows():
    # aws/amazon-cloudwatch-agent: internal/metric's registered nvidia_smi fields
    known = {
        *("utilization_gpu", "temperature_gpu", "power_draw", "utilization_memory", "fan_speed"),
        *("memory_total", "memory_used", "memory_free", "clocks_current_sm", "clocks_current_memory"),
    }
    found = json.loads(cloudwatch.text(SETTINGS))["metrics"]["metrics_collected"]["nvidia_gpu"]
    assert {one["name"] for one in found["measurement"]} <= known


@pytest.mark.parametrize(("there", "applied"), [(True, 2), (False, 0)])
def test_the_script_leaves_out_what_a_cluster_without_the_operator_does_not_know(tmp_path, there, applied):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "get crd" ]; then exit {0 if there else 1}; fi\necho "$@"\n'
    )
    kubectl.chmod(0o755)
    chart, objects = monitoring.install(SETTINGS)
    assert chart.startswith("helm upgrade --install dcgm-exporter")
    script = f"set -euo pipefail\n{helm.APPLY}\n{objects}\n"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == applied
    assert ("monitoring/plain" in done.stderr) == (not there)


# Fields that are written here: prometheus-operator/prometheus-operator,
# example/prometheus-operator-crd/monitoring.coreos.com_{servicemonitors,prometheusrules}.yaml
RELABEL = {"sourceLabels": [str], "targetLabel": str}
MODELS = {
    "ServiceMonitor": {
        "attachMetadata": {"node": bool},
        "namespaceSelector": {"matchNames": [str]},
        "selector": {"matchLabels": {str: str}},
        "endpoints": [{"port": str, "interval": str, "honorLabels": bool, "relabelings": [RELABEL]}],
    },
    "PrometheusRule": {
        "groups": [
            {
                "name": str,
                "interval": str,
                "rules": [
                    {
                        **dict.fromkeys(("record", "alert", "expr", "for"), str),
                        "labels": {str: str},
                        "annotations": {str: str},
                    }
                ],
            }
        ]
    },
}


def fits(value, model):
    if isinstance(model, type):
        return type(value) is model
    if isinstance(model, list):
        return isinstance(value, list) and all(fits(one, model[0]) for one in value)
    if str in model:
        return all(type(key) is str and fits(one, model[str]) for key, one in value.items())
    return all(key in model and fits(one, model[key]) for key, one in value.items())


def test_the_operator_knows_each_field(files):
    for one in load(files[monitoring.OBJECTS]):
        assert fits(one["spec"], MODELS[one["kind"]]), one["kind"]
    assert not fits({"endpoints": [{"port": 9400}]}, MODELS["ServiceMonitor"])
    assert not fits({"group": []}, MODELS["PrometheusRule"])
