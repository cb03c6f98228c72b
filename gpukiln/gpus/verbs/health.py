"""The verb health: the cheap checks of the host suite about GPUs, on the node, between verifications."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from gpukiln.errors import RefusedError, UsageError
from gpukiln.files import write_atomic
from gpukiln.findings import OUTCOMES, Finding, Outcome, worst_severity
from gpukiln.gpus import kernel_log, rules
from gpukiln.gpus.facts import facts
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.model import Device, Snapshot, plain
from gpukiln.gpus.store import folder
from gpukiln.gpus.text import short_uuid, table
from gpukiln.gpus.verb import Options, Verb, document
from gpukiln.options import Option
from gpukiln.parsing import parse_json
from gpukiln.probe import gather
from gpukiln.probe.base import (
    NotReachedError,
    NotReportedError,
    read_section,
    require_reached,
    run,
    run_unrecorded,
    watch,
)
from gpukiln.probe.gpus import log_facts, pci_facts
from gpukiln.probe.sections import gather as gather_sections

Print = Callable[[str], None]
SICK, HEALTHY, UNKNOWN = "sick", "well", "unknown"
OUTCOME_WORDS: dict[str, str] = {
    outcome: outcome.replace("_", " ") for outcome in OUTCOMES
}  # as the host suite prints them
BAD_HEALTH = ("sick", "lost", "hung")  # a GPU with this health makes its node sick
STATES = ("ok", "warning", *BAD_HEALTH, "unknown")
# Without the result of one of these the state of the node is unknown.
DECISIVE_CHECKS = tuple(rule.id for rule in (rules.NVML, rules.XID, rules.ECC, rules.MEMORY_REPAIR))
GATHER_S, HOOK_S = 240.0, 600.0  # time limits of gathering the facts, and of the hook
STATE_FILE = "gpus-health.json"  # next to the folder of the leases
OUTPUT_CHARS = 500  # of the end of a hook's output
# node-problem-detector: 0 is no problem, 1 is a problem, any other code is unknown; it cuts messages at
# max_output_length, by default 80 characters (its pkg/custompluginmonitor).
NPD_CODES = {HEALTHY: 0, SICK: 1, UNKNOWN: 2}
NPD_CHARS = 80


@dataclass(frozen=True)
class GpuCheckResult:
    """The result of a check on this node.

    Args:
        id: As in the reports of the host suite.
        outcome: not_run: no GPU reports what the check needs; not_reached: the facts are missing.
        reason: What was measured, or the reason of the outcome.
        findings: Why it failed; with an error among them the node should get no work.
    """

    id: str
    title: str
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class HookRun:
    """A run of the hook.

    Args:
        old: The state of which the hook was last informed.
        exit_code: Of the program; 124 where it did not end in time.
        output: The end of its output.
    """

    program: str
    old: str
    new: str
    exit_code: int
    output: str


@dataclass(frozen=True)
class GpuHealth:
    """The health of a node.

    Args:
        taken_at: RFC 3339, UTC.
        state: sick: it should get no work; well; unknown: a decisive check could not run.
        message: The reason, in one line.
        checks: Empty where the machine has no GPU.
        gpus: As in a snapshot.
        faults: Faults in the kernel's log of this boot, a finding for each device and fault. The object is
            the
            PCI address without its function, empty where the log names none; the evidence has kind (Xid, SXid
            of an NVSwitch, or the id of a fault without a number), number (0 for none), count and
            blames_hardware (the machine caused it, not the program).
        hook: Null where no hook ran.
    """

    node: str
    taken_at: str
    simulated: bool
    state: str
    message: str
    checks: tuple[GpuCheckResult, ...]
    gpus: tuple[Device, ...]
    faults: tuple[Finding, ...]
    hook: HookRun | None
    exit_code: int


class GatheredFacts(Mapping[str, Any]):
    """The gathered facts, read like `Facts` of the host suite: a failed section raises NotReachedError."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Any:
        return read_section(self._data, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def gather_facts() -> dict[str, Any]:
    """The facts for the rules, gathered by the functions of the host suite, within a time limit."""
    watch.start(GATHER_S)
    watch.hung.clear()  # programs that hung in an earlier run are tried again
    try:
        return gather_sections(
            {
                "expected": gather.expected,
                "boot": lambda: {"virtualization": run("systemd-detect-virt")["out"].strip()},
                "gpus": lambda: {**(on_bus := pci_facts()), **log_facts(on_bus)},
                "nvml": gather.nvml,
            }
        )
    finally:
        watch.start(None)


def run_rules(data: Mapping[str, Any], *, simulated: bool) -> tuple[GpuCheckResult, ...]:
    """Run the rules on the facts.

    Args:
        simulated: Whether the GPUs are simulated, which are on no bus.
    """
    read = GatheredFacts(data)
    more: dict[str, tuple[Any, ...]] = {
        rules.NVML.id: (simulated,),
        rules.XID.id: (_table(), True),
        rules.PCIE_LINK.id: ({},),
    }
    gpus = data["nvml"].get("gpus") or []
    results: list[GpuCheckResult] = []
    for rule in (*rules.SINGLE_GPU_RULES, *(rules.MULTI_GPU_RULES if len(gpus) > 1 else ())):
        result = _result(rule, read, more.get(rule.id, ()))
        if (
            result.outcome == "failed"
            and rule is not rules.XID
            and results
            and results[0].outcome != "passed"
        ):
            why = f"{results[0].id} {OUTCOME_WORDS[results[0].outcome]}"  # as `after` in the host suite
            result = replace(result, outcome="not_reached", reason=why, findings=())
        results.append(result)
    return tuple(results)


def _result(rule: rules.HealthRule, read: GatheredFacts, more: tuple[Any, ...]) -> GpuCheckResult:
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    try:
        outcome, reason = "passed", rule.evaluate(read, *more)
    except rules.FaultError as error:
        outcome, reason, findings = "failed", str(error), error.findings
    except AssertionError as error:  # NVML could not read a value, which shows no fault of the GPU
        outcome, reason = "failed", str(error)
        findings = (Finding(rule.id, "warning", reason, remedy=rule.fix),)
    except NotReportedError as error:
        outcome, reason = "not_run", str(error)
    except NotReachedError as error:
        outcome, reason = "not_reached", str(error)
    return GpuCheckResult(rule.id, rule.title, outcome, reason, findings)


def _table() -> dict[int, dict[str, Any]]:
    return {int(number): row for number, row in facts()["xids"].items()}


def state_of(snap: Snapshot, checks: Iterable[GpuCheckResult]) -> tuple[str, str]:
    """The node's state and its reason."""
    checks = list(checks)
    devices = [
        (device, f"{device.title} is {device.health}: {device.findings[0].message}")
        for device in snap.devices
        if device.findings
    ]
    sick = [f"{check.id}: {check.reason}" for check in checks if worst_severity(check.findings) == "error"]
    sick += [why for device, why in devices if device.health in BAD_HEALTH]
    unknown = [why for device, why in devices if device.health == "unknown"]
    if snap.state == "starting":
        unknown.append(snap.message)
    elif snap.code == 4:
        sick.append(snap.message)
    unknown += [
        f"{check.id}: {check.reason}"
        for check in checks
        if check.id in DECISIVE_CHECKS and check.outcome == "not_reached"
    ]
    for state, reasons in ((SICK, sick), (UNKNOWN, unknown)):
        if reasons:
            return state, reasons[0]
    if not snap.devices:
        return HEALTHY, snap.message
    warned = [check.id for check in checks if check.outcome == "failed"]
    return HEALTHY, f"well, but {', '.join(warned)}" if warned else f"{len(snap.devices)} devices are well"


def _health(options: Options) -> GpuHealth:
    if options.npd and options.json:
        raise UsageError(
            "both --npd and --json are given", hint="pass one of them: node-problem-detector reads one line"
        )
    snap = snapshot()
    checks: tuple[GpuCheckResult, ...] = ()
    faults: tuple[Finding, ...] = ()
    if snap.state not in ("no-device", "not-granted") and snap.source == "nvml":
        data = gather_facts()
        checks = run_rules(data, simulated=snap.simulated)
        try:
            lines, table_of_xids = require_reached(GatheredFacts(data)["gpus"]["xids"]), _table()
            faults = tuple(event.finding(table_of_xids) for event in kernel_log.events(lines, table_of_xids))
        except (AssertionError, NotReachedError):
            faults = ()  # the check gpu.xid has the reason
    state, message = state_of(snap, checks)
    bad = state == SICK or any(check.outcome == "failed" for check in checks)
    health = GpuHealth(
        node=socket.gethostname(),
        taken_at=snap.taken_at,
        simulated=snap.simulated,
        state=state,
        message=message,
        checks=checks,
        gpus=snap.devices,
        faults=faults,
        hook=None,
        exit_code=1 if bad else 5 if state == UNKNOWN else 0,
    )
    if options.textfile:
        write_atomic(Path(options.textfile), metrics(health), mode=0o644)
    if options.hook:
        health = run_hook_on_change(health, options.hook)
    return replace(health, exit_code=NPD_CODES[state]) if options.npd else health


# ---- the hook


def run_hook_on_change(health: GpuHealth, program: str) -> GpuHealth:
    """Run the hook where the node has become sick or well, and store the state.

    The state is stored after a successful hook only, so the next call repeats a hook that failed.
    """
    path = folder().with_name(STATE_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise RefusedError(
            f"{path} can't be written, so every call would run the hook again", hint="run the command as root"
        )
    old = read_state(path)
    if health.state in (UNKNOWN, old):
        return health
    done = None
    # The first check of a healthy node is no change.
    if not (old == UNKNOWN and health.state == HEALTHY):
        done = _run_hook(health, program, old)
    if done is None or done.exit_code == 0:
        state = {"state": health.state, "since": health.taken_at}
        write_atomic(path, json.dumps(state) + "\n", mode=0o644)
    failed = done is not None and done.exit_code != 0
    return replace(health, hook=done, exit_code=health.exit_code or (5 if failed else 0))


def read_state(path: Path) -> str:
    """The state of which the hook was last informed; unknown for none."""
    try:
        state = parse_json(path.read_text(encoding="utf-8"))["state"]
    except FileNotFoundError:
        return UNKNOWN
    except (ValueError, KeyError, TypeError):  # damaged, or of another program
        return UNKNOWN
    return state if state in (SICK, HEALTHY) else UNKNOWN


def _run_hook(health: GpuHealth, program: str, old: str) -> HookRun:
    """Run the hook without a shell: the document on its standard input, both states in its environment."""
    words = (f"GPUKILN_NODE={health.node}", f"GPUKILN_OLD_STATE={old}", f"GPUKILN_NEW_STATE={health.state}")
    data = json.dumps(document(HEALTH, [plain(health)], [])).encode()
    done = run_unrecorded("env", *words, program, timeout=HOOK_S, data=data, waits=True)
    output = (done["out"] + done["err"]).strip()[-OUTPUT_CHARS:]
    return HookRun(program, old, health.state, done["rc"], output)


# ---- for machines


def metrics(health: GpuHealth) -> str:
    """Metrics for node_exporter's textfile collector (Prometheus, text exposition format 0.0.4)."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, rows: Iterable[tuple[float, dict[str, Any]]]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        for value, labels in rows:
            inner = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            number = int(value) if value == int(value) else value
            lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")

    def named(gpu: Device) -> dict[str, Any]:
        number = str(gpu.index) if gpu.mig_index is None else f"{gpu.index}:{gpu.mig_index}"
        return {"gpu": number, "uuid": gpu.uuid or ""}

    add(
        "gpukiln_node_state",
        "gauge",
        "Whether the node is in this state; a sick node should get no work.",
        ((health.state == word, {"state": word}) for word in (HEALTHY, SICK, UNKNOWN)),
    )
    add(
        "gpukiln_check_outcome",
        "gauge",
        "Whether a check of the host suite has this outcome.",
        (
            (check.outcome == word, {"check": check.id, "outcome": word})
            for check in health.checks
            for word in OUTCOMES
        ),
    )
    add(
        "gpukiln_gpu_health",
        "gauge",
        "Whether a GPU or MIG device is in this state.",
        ((gpu.health == word, {**named(gpu), "health": word}) for gpu in health.gpus for word in STATES),
    )
    add(
        "gpukiln_gpu_allocatable",
        "gauge",
        "Whether the device can be leased now.",
        ((gpu.allocatable, named(gpu)) for gpu in health.gpus),
    )
    add(
        "gpukiln_gpu_leases",
        "gauge",
        "Number of leases on the device.",
        ((len(gpu.leases), named(gpu)) for gpu in health.gpus),
    )
    add(
        "gpukiln_gpu_lease_info",
        "gauge",
        "The leases on the device, with their users.",
        (
            (1, {**named(gpu), "lease": mark.id, "user": mark.user, "mode": mark.mode})
            for gpu in health.gpus
            for mark in gpu.leases
        ),
    )
    add(
        "gpukiln_xids_total",
        "counter",
        "Xids, SXids and faults without a number (0) in the kernel's log of this boot.",
        (
            (
                fault.evidence["count"],
                {
                    "device": fault.object,
                    "kind": fault.evidence["kind"],
                    "number": fault.evidence["number"],
                    "severity": fault.severity,
                    "blames": "machine" if fault.evidence["blames_hardware"] else "work",
                },
            )
            for fault in health.faults
        ),
    )
    add(
        "gpukiln_health_timestamp_seconds",
        "gauge",
        "Time of these metrics, in seconds since the epoch.",
        ((round(time.time(), 3), {}),),
    )
    return "\n".join(lines) + "\n"


def _escaped(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def npd_line(node: dict[str, Any]) -> str:
    """One line of ASCII, short enough for node-problem-detector."""
    text = (
        " ".join(f"{node['state']}: {node['message']}".split())
        if node["state"] != HEALTHY
        else node["message"]
    )
    text = text.encode("ascii", "replace").decode()
    return text if len(text) <= NPD_CHARS else text[: NPD_CHARS - 3] + "..."


def _show(node: dict[str, Any], options: Options, print: Print) -> None:
    if options.npd:
        print(npd_line(node))
        return
    print(f"node {node['node']}   {node['state']}: {node['message']}{' (SIMULATED)' * node['simulated']}")
    rows = [
        (OUTCOME_WORDS[check["outcome"]], check["id"], check["reason"] or check["title"])
        for check in node["checks"]
    ]
    for line in table(("OUTCOME", "CHECK", "REASON"), rows):
        print(line)
    steps = [(check["id"], finding["remedy"]) for check in node["checks"] for finding in check["findings"]]
    for id, remedy in dict.fromkeys(steps):
        if remedy:
            print(f"next, {id}: {remedy}")
    for gpu in node["gpus"]:
        for finding in gpu["findings"]:
            print(f"{short_uuid(gpu['uuid'])}: {finding['severity']}: {finding['message']}")
    for fault in node["faults"]:
        remedy = f"; {fault['remedy']}" if fault["remedy"] else ""
        print(f"{fault['evidence']['count']} x {fault['message']}{remedy}")
    if node["hook"]:
        hook = node["hook"]
        turned = f"{hook['old']} to {hook['new']}"
        print(f"hook {hook['program']}: {turned}, exit {hook['exit_code']} {hook['output']}")


HEALTH = Verb(
    "health",
    "Run the cheap checks of the host suite about GPUs. Exits with 1 for a failure, with 5 for unknown.",
    (
        Option("textfile", "write metrics for Prometheus' textfile collector to this file", value="FILE"),
        Option(
            "npd",
            "print one line for node-problem-detector; exits with 0 for well, 1 for sick, 2 for unknown",
            default=False,
        ),
        Option("hook", "run this program when the node has become sick or well", value="PROGRAM"),
    ),
    _health,
    _show,
    examples=("--textfile /var/lib/node_exporter/gpukiln.prom", "--hook /usr/local/sbin/cordon", "--npd"),
)
VERBS = (HEALTH,)
