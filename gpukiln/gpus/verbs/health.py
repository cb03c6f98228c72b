"""The verb health: the suite's cheap rules about GPUs, on the node, between verifications."""

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
from gpukiln.files import write_whole
from gpukiln.gpus import faults, kernel_log, rules
from gpukiln.gpus.facts import facts
from gpukiln.gpus.marks import snapshot
from gpukiln.gpus.model import Device, Finding, LeaseMark, Snapshot, plain
from gpukiln.gpus.store import folder
from gpukiln.gpus.text import short_uuid, table
from gpukiln.gpus.verb import Options, Verb, document
from gpukiln.options import Option
from gpukiln.parsing import parse_json
from gpukiln.probe import gather
from gpukiln.probe.base import NotReachedError, NotToldError, ask, known, run, section, watch
from gpukiln.probe.gpus import bus, log
from gpukiln.probe.sections import gather as gather_sections

Print = Callable[[str], None]
SICK, WELL, UNKNOWN = faults.SICK, "well", "unknown"
PASSED, FAILED, NOT_TOLD, NOT_REACHED = "passed", "failed", "not told", "not reached"
BAD = ("sick", "lost", "hung")  # health of a GPU that makes its node sick
WORDS = ("ok", "warning", *BAD, "unknown")
# Without these nobody knows whether a node is well.
DECIDE = tuple(rule.id for rule in (rules.NVML, rules.XID, rules.ECC, rules.MEMORY_REPAIR))
GATHER_S, HOOK_S = 240.0, 600.0
STATE_FILE = "gpus-health.json"  # beside the folder of the leases, which the group may write
OUTPUT_CHARS = 500  # of what a hook said, from its end
# node-problem-detector: 0 no problem, 1 a problem, any other nothing is known; it cuts the message at
# max_output_length, 80 unless it is told otherwise (its pkg/custompluginmonitor).
NPD_CODES = {WELL: 0, SICK: 1, UNKNOWN: 2}
NPD_CHARS = 80


@dataclass(frozen=True)
class Judged:
    """A check of the suite on this node.

    Args:
        id: As in the suite's reports.
        result: passed, failed, not told: by no GPU, or not reached: nothing is known.
        told: What was measured, or why it is so.
        fix: What to do; empty where it did not fail.
        sick: Whether the node should get no work, by what failed.
    """

    id: str
    title: str
    result: str
    told: str
    fix: str
    sick: bool


@dataclass(frozen=True)
class Fault:
    """What the kernel's log of this boot says of one device and fault.

    Args:
        device: PCI address without its function; empty where the log names none.
        kind: Xid, SXid of an NVSwitch, or the id of a fault without a number, for example init-failed.
        number: 0 for a fault without one.
        count: How often it was logged.
        severity: sick: the device should get no work; warning; or note.
        blames_hardware: Whether the machine is to blame, and not what ran on it.
    """

    device: str
    kind: str
    number: int
    count: int
    severity: str
    blames_hardware: bool
    text: str


@dataclass(frozen=True)
class Part:
    """A GPU or MIG device, its health and who has it; the fields are those of a snapshot."""

    uuid: str | None
    kind: str
    index: int
    mig_index: int | None
    health: str
    findings: tuple[Finding, ...]
    leases: tuple[LeaseMark, ...]
    allocatable: bool
    not_allocatable_because: tuple[str, ...]


@dataclass(frozen=True)
class Hooked:
    """What came of the hook.

    Args:
        old: The state that it knew.
        exit_code: Of the program; 124: it did not end in time.
        told: The end of what it said.
    """

    program: str
    old: str
    new: str
    exit_code: int
    told: str


@dataclass(frozen=True)
class Health:
    """How a node is.

    Args:
        taken_at: RFC 3339, UTC.
        state: sick: it should get no work; well; unknown: something that would tell could not be reached.
        message: Why, in one line.
        checks: Empty where the machine has no GPU.
        hook: Null where none was run.
    """

    node: str
    taken_at: str
    simulated: bool
    state: str
    message: str
    checks: tuple[Judged, ...]
    gpus: tuple[Part, ...]
    faults: tuple[Fault, ...]
    hook: Hooked | None
    exit_code: int


class Facts(Mapping[str, Any]):
    """What was gathered, read as the suite reads it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Any:
        return section(self._data, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def gathered() -> dict[str, Any]:
    """The facts that the rules want, by the suite's own functions, whatever hangs."""
    watch.start(GATHER_S)
    watch.hung.clear()  # what hung at an earlier look is asked again
    try:
        return gather_sections(
            {
                "expected": gather.expected,
                "boot": lambda: {"virtualization": run("systemd-detect-virt")["out"].strip()},
                "gpus": lambda: {**(found := bus()), **log(found)},
                "nvml": gather.nvml,
            }
        )
    finally:
        watch.start(None)


def judged(data: Mapping[str, Any], *, simulated: bool) -> tuple[Judged, ...]:
    """What the rules say of the facts.

    Args:
        simulated: Whether the GPUs are a double, on no bus.
    """
    read = Facts(data)
    more: dict[str, tuple[Any, ...]] = {
        rules.NVML.id: (simulated,),
        rules.XID.id: (_table(), True),
        rules.PCIE_LINK.id: ({},),
    }
    gpus = data["nvml"].get("gpus") or []
    found: list[Judged] = []
    for rule in (*rules.OF_ONE, *(rules.OF_SEVERAL if len(gpus) > 1 else ())):
        one = _judged_by(rule, read, more.get(rule.id, ()))
        if one.result == FAILED and rule is not rules.XID and found and found[0].result != PASSED:
            why = f"{found[0].id}: {found[0].result}"  # as the suite's `after`
            one = replace(one, result=NOT_REACHED, told=why, fix="", sick=False)
        found.append(one)
    return tuple(found)


def _judged_by(rule: rules.Rule, read: Facts, more: tuple[Any, ...]) -> Judged:
    fix, sick = "", False
    try:
        result, told = PASSED, rule.judge(read, *more)
    except rules.FoundError as error:
        result, told, fix, sick = FAILED, str(error), error.remedy, error.severity == SICK
    except AssertionError as error:  # NVML gave an error in a value's place: no fault is established by that
        result, told, fix = FAILED, str(error), rule.fix
    except NotToldError as error:
        result, told = NOT_TOLD, str(error)
    except NotReachedError as error:
        result, told = NOT_REACHED, str(error)
    return Judged(rule.id, rule.title, result, told, fix, sick)


def _table() -> dict[int, dict[str, Any]]:
    return {int(number): row for number, row in facts()["xids"].items()}


def logged(lines: Iterable[str]) -> tuple[Fault, ...]:
    """What the kernel's log says, counted."""
    known_ones = _table()
    return tuple(
        Fault(
            device=one.device,
            kind=one.kind,
            number=one.number,
            count=one.count,
            severity=one.severity(known_ones),
            blames_hardware=one.blames_hardware(known_ones),
            text=one.explained(known_ones),
        )
        for one in kernel_log.events(lines, known_ones)
    )


def state_of(found: Snapshot, checks: Iterable[Judged]) -> tuple[str, str]:
    """The node's state, and why."""
    checks = list(checks)
    devices = [
        (one, f"{one.title} is {one.health}: {one.findings[0].text}") for one in found.devices if one.findings
    ]
    sick = [f"{one.id}: {one.told}" for one in checks if one.sick]
    sick += [why for one, why in devices if one.health in BAD]
    unknown = [why for one, why in devices if one.health == "unknown"]
    if found.state == "starting":
        unknown.append(found.message)
    elif found.exit_code == 4:
        sick.append(found.message)
    unknown += [f"{one.id}: {one.told}" for one in checks if one.id in DECIDE and one.result == NOT_REACHED]
    for state, reasons in ((SICK, sick), (UNKNOWN, unknown)):
        if reasons:
            return state, reasons[0]
    if not found.devices:
        return WELL, found.message
    warned = [one.id for one in checks if one.result == FAILED]
    return WELL, f"well, but {', '.join(warned)}" if warned else f"{len(found.devices)} devices are well"


def _part(device: Device) -> Part:
    return Part(**{name: getattr(device, name) for name in Part.__dataclass_fields__})


def _health(options: Options) -> Health:
    if options.npd and options.json:
        raise UsageError("--npd and --json", hint="one of them: node-problem-detector reads one line")
    found = snapshot()
    checks: tuple[Judged, ...] = ()
    said: tuple[Fault, ...] = ()
    if found.state not in ("no-device", "not-granted") and found.source == "nvml":
        data = gathered()
        checks = judged(data, simulated=found.simulated)
        try:
            said = logged(known(Facts(data)["gpus"]["xids"]))
        except (AssertionError, NotReachedError):
            said = ()  # gpu.xid says why
    state, message = state_of(found, checks)
    bad = state == SICK or any(one.result == FAILED for one in checks)
    health = Health(
        node=socket.gethostname(),
        taken_at=found.taken_at,
        simulated=found.simulated,
        state=state,
        message=message,
        checks=checks,
        gpus=tuple(_part(one) for one in found.devices),
        faults=said,
        hook=None,
        exit_code=1 if bad else 5 if state == UNKNOWN else 0,
    )
    if options.textfile:
        write_whole(Path(options.textfile), metrics(health), mode=0o644)
    if options.hook:
        health = hooked(health, options.hook)
    return replace(health, exit_code=NPD_CODES[state]) if options.npd else health


# ---- the hook


def hooked(health: Health, program: str) -> Health:
    """Run the hook where the node has turned sick or well, and remember its state.

    The first look at a node that is well is no turn. A hook that fails is run again at the next look: only
    what it was told of is remembered.
    """
    path = folder().with_name(STATE_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise RefusedError(
            f"{path} can't be written: the hook would be run again and again", hint="run it as root"
        )
    old = remembered(path)
    if health.state in (UNKNOWN, old):
        return health
    done = None
    if not (old == UNKNOWN and health.state == WELL):
        done = _run_hook(health, program, old)
    if done is None or done.exit_code == 0:
        state = {"state": health.state, "since": health.taken_at}
        write_whole(path, json.dumps(state) + "\n", mode=0o644)
    failed = done is not None and done.exit_code != 0
    return replace(health, hook=done, exit_code=health.exit_code or (5 if failed else 0))


def remembered(path: Path) -> str:
    """The state that a hook was last told of; unknown where there is none."""
    try:
        state = parse_json(path.read_text(encoding="utf-8"))["state"]
    except FileNotFoundError:
        return UNKNOWN
    except (ValueError, KeyError, TypeError):  # not ours: begin anew
        return UNKNOWN
    return state if state in (SICK, WELL) else UNKNOWN


def _run_hook(health: Health, program: str, old: str) -> Hooked:
    """Without a shell: the document on its standard input, both states in its environment."""
    words = (f"GPUKILN_NODE={health.node}", f"GPUKILN_OLD_STATE={old}", f"GPUKILN_NEW_STATE={health.state}")
    data = json.dumps(document(HEALTH, [plain(health)], [])).encode()
    said = ask("env", *words, program, timeout=HOOK_S, data=data, waits=True)
    told = (said["out"] + said["err"]).strip()[-OUTPUT_CHARS:]
    return Hooked(program, old, health.state, said["rc"], told)


# ---- for machines


def metrics(health: Health) -> str:
    """For node_exporter's textfile collector (Prometheus, text exposition format 0.0.4)."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, rows: Iterable[tuple[float, dict[str, Any]]]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        for value, labels in rows:
            inner = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            number = int(value) if value == int(value) else value
            lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")

    def named(one: Part) -> dict[str, Any]:
        number = str(one.index) if one.mig_index is None else f"{one.index}:{one.mig_index}"
        return {"gpu": number, "uuid": one.uuid or ""}

    add(
        "gpukiln_node_state",
        "gauge",
        "Whether the node is in this state: sick ones should get no work.",
        ((health.state == word, {"state": word}) for word in (WELL, SICK, UNKNOWN)),
    )
    add(
        "gpukiln_check_result",
        "gauge",
        "Whether a check of the suite had this result.",
        (
            (one.result == word, {"check": one.id, "result": word})
            for one in health.checks
            for word in (PASSED, FAILED, NOT_TOLD, NOT_REACHED)
        ),
    )
    add(
        "gpukiln_gpu_health",
        "gauge",
        "Whether a GPU or MIG device is in this state.",
        ((one.health == word, {**named(one), "health": word}) for one in health.gpus for word in WORDS),
    )
    add(
        "gpukiln_gpu_allocatable",
        "gauge",
        "Whether a lease could have the device now.",
        ((one.allocatable, named(one)) for one in health.gpus),
    )
    add(
        "gpukiln_gpu_leases",
        "gauge",
        "Leases of the device.",
        ((len(one.leases), named(one)) for one in health.gpus),
    )
    add(
        "gpukiln_gpu_lease_info",
        "gauge",
        "Who has the device.",
        (
            (1, {**named(one), "lease": mark.id, "user": mark.user, "mode": mark.mode})
            for one in health.gpus
            for mark in one.leases
        ),
    )
    add(
        "gpukiln_xids_total",
        "counter",
        "Xids, SXids and faults without a number (0) in the kernel's log of this boot.",
        (
            (
                one.count,
                {
                    "device": one.device,
                    "kind": one.kind,
                    "number": one.number,
                    "severity": one.severity,
                    "blames": "machine" if one.blames_hardware else "work",
                },
            )
            for one in health.faults
        ),
    )
    add(
        "gpukiln_health_timestamp_seconds",
        "gauge",
        "When this was written, since the epoch.",
        ((round(time.time(), 3), {}),),
    )
    return "\n".join(lines) + "\n"


def _escaped(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def npd_line(node: dict[str, Any]) -> str:
    """One line of ASCII, short enough that node-problem-detector does not cut it."""
    text = (
        " ".join(f"{node['state']}: {node['message']}".split()) if node["state"] != WELL else node["message"]
    )
    text = text.encode("ascii", "replace").decode()
    return text if len(text) <= NPD_CHARS else text[: NPD_CHARS - 3] + "..."


def _show(node: dict[str, Any], options: Options, print: Print) -> None:
    if options.npd:
        print(npd_line(node))
        return
    print(f"node {node['node']}   {node['state']}: {node['message']}{' (SIMULATED)' * node['simulated']}")
    rows = [(one["result"], one["id"], one["told"] or one["title"]) for one in node["checks"]]
    for line in table(("RESULT", "CHECK", "TOLD"), rows):
        print(line)
    for one in node["checks"]:
        if one["fix"]:
            print(f"next, {one['id']}: {one['fix']}")
    for one in node["gpus"]:
        for found in one["findings"]:
            print(f"{short_uuid(one['uuid'])}: {found['level']}: {found['text']}")
    for one in node["faults"]:
        print(f"{one['count']} x {one['text']}")
    if node["hook"]:
        hook = node["hook"]
        print(
            f"hook {hook['program']}: {hook['old']} to {hook['new']}, exit {hook['exit_code']} {hook['told']}"
        )


HEALTH = Verb(
    "health",
    "The suite's cheap checks of the GPUs, now. Exit 1 where one fails, 5 where nothing is known.",
    (
        Option("textfile", "write metrics for Prometheus' textfile collector to this file", value="FILE"),
        Option(
            "npd", "answer as a plug-in of node-problem-detector: 0 well, 1 sick, 2 unknown", default=False
        ),
        Option("hook", "run this program when the node has turned sick or well", value="PROGRAM"),
    ),
    _health,
    _show,
    examples=("--textfile /var/lib/node_exporter/gpukiln.prom", "--hook /usr/local/sbin/cordon", "--npd"),
)
VERBS = (HEALTH,)
