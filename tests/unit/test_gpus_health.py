"""gpukiln-gpu health: the suite's rules on the node, and what it tells Prometheus, Kubernetes and a hook."""

import copy
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.clouds.embedded.gpus import settings
from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.errors import RefusedError
from gpukiln.findings import Finding
from gpukiln.gpus import cli, faults, kernel_log, rules, zipapp
from gpukiln.gpus.facts import facts
from gpukiln.gpus.leases import DETACHED, LeaseHolder, Leases
from gpukiln.gpus.model import Device, LeaseMark
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.verbs import health
from gpukiln.gpus.verbs.health import GpuCheckResult, GpuHealth
from tests.support import gpus
from tests.support.host_evaluate import CHECKS
from tests.support.host_evaluate import evaluate_check as judge_as_suite
from tests.support.host_gpu_faults import GPU_FAULTS, XID_79
from tests.support.host_machine import machine as facts_of

Machine = Callable[..., State]
RULES = (*rules.SINGLE_GPU_RULES, *rules.MULTI_GPU_RULES)
UUID = gpus.uuid(0)


@pytest.fixture
def machine(simulated: Machine) -> Machine:
    return simulated


def change(state: State, *texts: str) -> None:
    def change_rows(rows: dict[str, str]) -> None:
        for text in texts:
            settings.apply_setting(rows, text)

    state.change(change_rows)


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["health", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["nodes"][0]


def of(said: dict[str, Any], check: str) -> dict[str, Any]:
    return next(one for one in said["checks"] if one["id"] == check)


# ---- the rules are the suite's


def test_the_rules_are_checks_of_the_suite() -> None:
    for rule in RULES:
        check, _ = CHECKS[rule.id]
        assert (check.title, check.fix) == (rule.title, rule.fix)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_fault_fails_here_as_it_fails_the_suite_on_a_node(rule: rules.HealthRule) -> None:
    agreed = 0
    for inject, _ in GPU_FAULTS[rule.id]:
        data = facts_of(gpus=2)
        inject(data)
        wanted, words = judge_as_suite(rule.id, copy.deepcopy(data), profile="node", expect_gpus=2)
        data.pop("cuda")  # nothing is copied here
        found = next((one for one in health.run_rules(data, simulated=False) if one.id == rule.id), None)
        if wanted != "failed" or found is None or found.outcome == "not_reached":
            continue
        if rule is rules.NVLINK and found.outcome == "passed":
            continue  # errors that grow are seen by two looks with work between them
        assert (found.outcome, found.reason) == ("failed", words)
        assert all(one.remedy for one in found.findings)
        assert found.findings
        agreed += 1
    assert agreed


def test_what_the_suite_passes_is_well() -> None:
    checks = health.run_rules(facts_of(gpus=2), simulated=False)
    assert [one.id for one in checks] == [rule.id for rule in RULES]
    assert {one.outcome for one in checks} == {"passed"}
    assert [one.id for one in health.run_rules(facts_of(), simulated=False)] == [
        one.id for one in rules.SINGLE_GPU_RULES
    ]


def test_without_nvml_the_others_are_not_reached_and_not_called_failed() -> None:
    data = facts_of()
    data["nvml"].update(available=False, gpus=[], error={"_error": "Driver Not Loaded", "code": 9})
    data["gpus"].pop("smi")
    checks = {one.id: one for one in health.run_rules(data, simulated=False)}
    assert checks["gpu.nvml"].outcome == "failed"
    assert checks["gpu.ecc"].outcome == "not_reached"
    assert checks["gpu.xid"].outcome == "passed", "the kernel's log says so without NVML"


# ---- on a machine


def test_a_machine_that_is_well(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("p4d.24xlarge")
    code, said = typed(capsys)
    assert (code, said["state"]) == (0, "well")
    assert len(said["checks"]) == len(RULES)
    assert len(said["gpus"]) == 8


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("3.lost=true", "gpu.nvml"),
        ("3.ecc_uncorrected=2", "gpu.ecc"),
        ("3.remap_failed=true", "gpu.memory-repair"),
        ("3.nvlink_down=4", "multi-gpu.nvlink"),
    ],
)
def test_a_machine_that_is_sick(
    machine: Machine, capsys: pytest.CaptureFixture[str], setting: str, check: str
) -> None:
    machine("p4d.24xlarge", setting)
    code, said = typed(capsys)
    assert (code, said["state"]) == (1, "sick")
    assert of(said, check)["outcome"] == "failed"
    [found] = of(said, check)["findings"]
    assert found["severity"] == "error"
    assert found["remedy"]
    assert said["message"].startswith(check)


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("3.remap_pending=true", "gpu.memory-repair"),
        ("3.mig_pending=true", "gpu.mig"),
        ("3.temperature=95", "gpu.clocks"),
    ],
)
def test_what_waits_for_a_reset_keeps_nobody_from_work(
    machine: Machine, capsys: pytest.CaptureFixture[str], setting: str, check: str
) -> None:
    """NVIDIA, GPU Memory Error Management: work goes on and new work may start while a row waits."""
    machine("p4d.24xlarge", setting)
    code, said = typed(capsys)
    assert (code, said["state"]) == (1, "well")
    assert check in said["message"]
    assert [one["severity"] for one in of(said, check)["findings"]] == ["warning"]
    assert (said["gpus"][3]["health"], said["gpus"][3]["allocatable"]) == ("warning", True)
    assert Leases().acquire(DeviceRequest(count=8), LeaseHolder("ann", 0), kind=DETACHED, hours=1.0).uuids


def test_list_lease_and_health_agree_with_the_table(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault of the table that can be set on a simulated GPU: one severity everywhere."""
    settable = {
        "recovery-action": "3.recovery_action=1",
        "remap-failed": "3.remap_failed=true",
        "ecc-uncorrected": "3.ecc_uncorrected=1",
        "remap-pending": "3.remap_pending=true",
        "ecc-pending": "3.ecc_pending=false",
        "mig-pending": "3.mig_pending=true",
    }
    for id, setting in settable.items():
        machine("p4d.24xlarge", setting)
        _, said = typed(capsys)
        fault = faults.FAULTS[id]
        [found] = [one for one in said["gpus"][3]["findings"] if one["id"] == id]
        assert (found["severity"], found["remedy"]) == (fault.severity, fault.remedy)
        assert said["gpus"][3]["allocatable"] == (fault.severity != "error")
        assert (said["state"] == "sick") == (fault.severity == "error")


def test_what_fails_a_check_and_makes_nobody_sick(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("g5.12xlarge", "1.persistence=false")
    code, said = typed(capsys)
    assert (code, said["state"], said["message"]) == (1, "well", "well, but gpu.persistence")


def test_what_the_driver_asks_for_makes_sick_though_no_check_fails(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("p4d.24xlarge", "0.recovery_action=1")
    code, said = typed(capsys)
    assert (code, said["state"]) == (1, "sick")
    assert "gpu reset" in said["message"]


@pytest.mark.usefixtures("impatient")
def test_a_gpu_that_hangs_makes_sick_and_does_not_hang_the_look(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("g5.12xlarge", "2.hung=true")
    code, said = typed(capsys)
    assert (code, said["state"]) == (1, "sick")
    assert "is hung" in said["message"]
    assert of(said, "gpu.ecc")["outcome"] == "not_reached"


def test_a_machine_without_gpus_has_nothing_to_be_sick_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpukiln.gpus.collect.bus_gpus", list)
    monkeypatch.setattr("gpukiln.gpus.collect.accessible_gpus", list)
    monkeypatch.setattr("gpukiln.gpus.collect.is_simulated", lambda: False)
    code, said = typed(capsys)
    assert (code, said["state"], said["checks"]) == (0, "well", [])
    assert "no NVIDIA GPU" in said["message"]


def test_a_log_that_can_t_be_read_leaves_it_unknown() -> None:
    data = facts_of()
    data["gpus"]["log_gap"] = "dmesg: read kernel buffer failed: Operation not permitted"
    checks = health.run_rules(data, simulated=False)
    state, why = health.state_of(gpus.snapshot(gpus.device()), checks)
    assert (state, why.partition(":")[0]) == ("unknown", "gpu.xid")


def test_faults_are_counted_and_explained() -> None:
    lines = [f"{XID_79} (3 times)", "NVRM: Xid (PCI:0000:00:1e): 31, pid=7, name=train, MMU Fault"]
    table = {int(number): row for number, row in facts()["xids"].items()}
    found = [one.finding(table) for one in kernel_log.events(lines, table)]
    counted = [
        (one.id, one.severity, one.evidence["count"], one.evidence["blames_hardware"]) for one in found
    ]
    assert counted == [("xid-79", "error", 3, True), ("xid-31", "info", 1, False)]
    assert "no longer answers" in found[0].message
    assert all(one.remedy for one in found)


def test_the_one_file_of_a_node_judges_watches_and_accounts(loaded_nvml: Path, tmp_path: Path) -> None:
    program = tmp_path / "gpukiln-gpu"
    zipapp.build(program)
    made = gpus.double(loaded_nvml, tmp_path, "g5.12xlarge")
    env = {name: value for name, value in made.environment.items() if name != "PYTHONPATH"}
    for words in (["health"], ["watch", "--interval=0.5", "--duration=3"], ["usage"]):
        command = ["/usr/bin/python3", str(program), *words, "--json"]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["schema"] == f"gpu.{words[0]}/1"


# ---- what others read


def made(state: str = "well", **more: Any) -> GpuHealth:
    mark = LeaseMark("L-1", 'o"neil\\', "exclusive", None, None)
    device = Device(UUID, "gpu", 0, health="ok", leases=(mark,), not_allocatable_because=("leased",))
    evidence = {"kind": "Xid", "number": 31, "count": 1234567, "blames_hardware": False}
    logged = Finding("xid-31", "info", "", "0000:00:1e", evidence)
    values: dict[str, Any] = {
        **{
            "node": "bm-07",
            "taken_at": "now",
            "simulated": False,
            "state": state,
            "message": "8 devices are well",
        },
        **{"checks": (GpuCheckResult("gpu.ecc", "", "passed", ""),), "gpus": (device,), "hook": None},
        **{"faults": (logged,), "exit_code": 0, **more},
    }
    return GpuHealth(**values)


SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (-?\d+(?:\.\d+)?)')


def read_metrics(text: str) -> dict[str, str]:
    """Samples by name and labels, as the text exposition format has them; each metric is told before."""
    found, told = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, _ = line.split(" ", 3)
            told.setdefault(name, []).append(what)
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert told[match[1]] == ["HELP", "TYPE"]
        assert f"{match[1]}{{{match[2] or ''}}}" not in found
        found[f"{match[1]}{{{match[2] or ''}}}"] = match[3]
    return found


def test_metrics_say_what_dcgm_exporter_does_not() -> None:
    said = read_metrics(health.metrics(made()))
    assert said['gpukiln_node_state{state="well"}'] == "1"
    assert said['gpukiln_node_state{state="sick"}'] == "0"
    assert said['gpukiln_check_outcome{check="gpu.ecc",outcome="passed"}'] == "1"
    assert said[f'gpukiln_gpu_health{{gpu="0",uuid="{UUID}",health="ok"}}'] == "1"
    assert said[f'gpukiln_gpu_allocatable{{gpu="0",uuid="{UUID}"}}'] == "0"
    assert said[f'gpukiln_gpu_leases{{gpu="0",uuid="{UUID}"}}'] == "1"
    assert any('user="o\\"neil\\\\"' in name for name in said)
    xid = 'gpukiln_xids_total{device="0000:00:1e",kind="Xid",number="31",severity="info",blames="work"}'
    assert said[xid] == "1234567"
    assert float(said["gpukiln_health_timestamp_seconds{}"]) > 1e9


def test_metrics_of_a_machine_with_leases_are_written_whole_for_everybody(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("g5.12xlarge")
    Leases().acquire(DeviceRequest(count=2), LeaseHolder("ann", 0), kind=DETACHED, hours=1.0)
    path = tmp_path / "gpukiln.prom"
    assert cli.main(["health", "--textfile", str(path)]) == 0
    said = read_metrics(path.read_text())
    assert sum(1 for name in said if name.startswith("gpukiln_gpu_lease_info")) == 2
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir() if "partial" in one.name] == []
    assert cli.main(["health", "--textfile", str(tmp_path / "missing" / "x.prom")]) == 4
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "code", "begins"),
    [((), 0, "4 devices are well"), (("1.ecc_uncorrected=2",), 1, "sick: gpu.ecc: GPU 1")],
)
def test_node_problem_detector_gets_one_line_and_its_code(
    machine: Machine, capsys: pytest.CaptureFixture[str], changes: tuple[str, ...], code: int, begins: str
) -> None:
    machine("g5.12xlarge", *changes)
    assert cli.main(["health", "--npd"]) == code
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(begins)
    assert len(line.encode()) <= 80
    assert cli.main(["health", "--npd", "--json"]) == 2


def test_the_line_is_short_whatever_is_told() -> None:
    for message in ("x" * 300, "ö" * 79, "a\nb\tc"):
        line = health.npd_line({"state": "sick", "message": message})
        assert len(line.encode()) <= 80
        assert "\n" not in line
    assert health.NPD_CODES["unknown"] == 2


# ---- the hook


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hook that writes down what it was told; it fails while there is a file `fail`."""
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "leases"))
    program = tmp_path / "hook"
    program.write_text(
        f"#!/bin/sh\ncat > {tmp_path}/stdin\n"
        f'echo "$GPUKILN_NODE $GPUKILN_OLD_STATE $GPUKILN_NEW_STATE" >> {tmp_path}/told\n'
        f"[ ! -e {tmp_path}/fail ] || {{ echo no cluster >&2; exit 7; }}\n"
    )
    program.chmod(0o755)
    return program


def turn(hook: Path, *states: str) -> list[str]:
    """What the hook was told while the node was in these states."""
    for state in states:
        health.run_hook_on_change(made(state), str(hook))
    told = hook.with_name("told")
    return told.read_text().splitlines() if told.exists() else []


def test_the_hook_is_run_when_the_node_turns_and_only_then(hook: Path) -> None:
    assert turn(hook, "well", "well") == [], "the first look at a node that is well is no turn"
    assert turn(hook, "sick", "sick") == ["bm-07 well sick"]
    assert turn(hook, "unknown", "sick") == ["bm-07 well sick"], "not to know is no turn"
    assert turn(hook, "well") == ["bm-07 well sick", "bm-07 sick well"]
    document = json.loads(hook.with_name("stdin").read_text())
    assert (document["schema"], document["nodes"][0]["node"]) == ("gpu.health/1", "bm-07")


def test_a_node_that_is_sick_at_first_has_turned(hook: Path) -> None:
    assert turn(hook, "sick") == ["bm-07 unknown sick"]


def test_a_hook_that_fails_is_told_and_run_again(hook: Path) -> None:
    hook.with_name("fail").touch()
    said = health.run_hook_on_change(made("sick", exit_code=1), str(hook))
    assert said.hook is not None
    assert (said.hook.exit_code, said.hook.output, said.exit_code) == (7, "no cluster", 1)
    hook.with_name("fail").unlink()
    assert turn(hook, "sick") == ["bm-07 unknown sick"] * 2
    assert turn(hook, "sick") == ["bm-07 unknown sick"] * 2
    hook.with_name("fail").touch()
    assert health.run_hook_on_change(made("well"), str(hook)).exit_code == 5
    missing = health.run_hook_on_change(made("well"), "/no/such/program").hook
    assert missing is not None
    assert missing.exit_code == 127


def test_a_hook_that_does_not_end_is_ended(hook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HOOK_S", 0.3)
    hook.write_text("#!/bin/sh\nsleep 60\n")
    said = health.run_hook_on_change(made("sick"), str(hook)).hook
    assert said is not None
    assert said.exit_code == 124


def test_no_shell_reads_what_was_typed(hook: Path) -> None:
    said = health.run_hook_on_change(made("sick"), f"{hook}; touch {hook.with_name('typed')}").hook
    assert said is not None
    assert said.exit_code == 127
    assert not hook.with_name("typed").exists()


def test_a_state_that_is_broken_begins_anew(hook: Path, tmp_path: Path) -> None:
    for text in ("", "[]", '{"state": 7}'):
        (tmp_path / health.STATE_FILE).write_text(text)
        assert health.read_state(tmp_path / health.STATE_FILE) == "unknown"
    assert turn(hook, "sick") == ["bm-07 unknown sick"]


def test_without_a_place_to_remember_the_hook_is_not_run(hook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(RefusedError):
        turn(hook, "sick")
    assert not hook.with_name("told").exists()


# ---- the example


KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
  *"get node"*unschedulable*) cat {folder}/unschedulable 2>/dev/null; [ ! -e {folder}/fails ]; exit ;;
  *"get node"*annotations*) cat {folder}/ours 2>/dev/null ;;
  *annotate*=true*) printf true > {folder}/ours ;;
  *annotate*) rm {folder}/ours ;;
  *uncordon*) rm {folder}/unschedulable ;;
  *cordon*) printf true > {folder}/unschedulable ;;
esac
exit 0
"""


def cordon(folder: Path, state: str) -> tuple[int, list[str]]:
    """Run the example with a kubectl that remembers; its exit code, and what kubectl was asked to change."""
    (folder / "kubectl").write_text(KUBECTL.format(folder=folder))
    (folder / "kubectl").chmod(0o755)
    (folder / "calls").write_text("")
    words = {"GPUKILN_NODE": "bm-07", "GPUKILN_OLD_STATE": "x", "GPUKILN_NEW_STATE": state}
    env = {**words, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "examples/gpu-health/cordon"], env=env, capture_output=True, check=False)
    calls = [
        line.removeprefix("--request-timeout=20s ") for line in (folder / "calls").read_text().splitlines()
    ]
    return done.returncode, [line.split()[0] for line in calls if not line.startswith("get")]


def test_the_example_cordons_and_drains_and_gives_back_what_it_took(tmp_path: Path) -> None:
    assert cordon(tmp_path, "sick") == (0, ["annotate", "cordon", "drain"])
    assert cordon(tmp_path, "sick") == (0, ["drain"]), "again is no other"
    assert cordon(tmp_path, "well") == (0, ["uncordon", "annotate"])
    assert cordon(tmp_path, "well") == (0, [])


def test_the_example_leaves_another_s_cordon(tmp_path: Path) -> None:
    (tmp_path / "unschedulable").write_text("true")
    assert cordon(tmp_path, "sick") == (0, ["drain"])
    assert cordon(tmp_path, "well") == (0, [])


def test_the_example_takes_nothing_for_done_where_the_cluster_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    for state in ("sick", "well"):
        assert cordon(tmp_path, state) == (1, [])
    (tmp_path / "fails").unlink()
    assert cordon(tmp_path, "better") == (2, [])


def test_the_plug_in_s_configuration_asks_for_what_there_is() -> None:
    config = json.loads((ROOT / "examples/gpu-health/node-problem-detector.json").read_text())
    [rule] = config["rules"]
    verb, options = cli.read_options(rule["args"])
    assert (verb.name, options.npd) == ("health", True)
    assert rule["condition"] == config["conditions"][0]["type"]
    assert config["pluginConfig"]["max_output_length"] >= health.NPD_CHARS


def test_people_read_why_and_what_next() -> None:
    lines: list[str] = []
    found = Finding("ecc-uncorrected", "error", "2 errors", UUID, remedy="reset it")
    failed = GpuCheckResult("gpu.ecc", "", "failed", "2 errors", (found, found))
    unread = GpuCheckResult("gpu.mig", "", "not_reached", "nvidia-smi hangs")
    device = Device(UUID, "gpu", 0, health="sick", findings=(found,))
    told = health.HookRun("/hook", "well", "sick", 0, "cordoned")
    said = health.plain(made("sick", checks=(failed, unread), gpus=(device,), hook=told))
    _, options = cli.read_options(["health"])
    health._show(said, options, lines.append)
    text = "\n".join(lines)
    for words in (
        "sick",
        "failed       gpu.ecc  2 errors",
        "not reached  gpu.mig  nvidia-smi hangs",
        ": error: 2 errors",
        "next, gpu.ecc: reset it",
        "well to sick, exit 0 cordoned",
    ):
        assert words in text
    assert text.count("next, gpu.ecc") == 1
