"""The verbs that sample GPUs over time: watch, insights."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.findings import Finding, worst_severity
from gpukiln.gpus import insights, sampling
from gpukiln.gpus.insights import WatchData
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.leases import check_usable
from gpukiln.gpus.model import Device, Snapshot, plain
from gpukiln.gpus.sampling import Sample, Tick, WatchEvent, WatchRecord
from gpukiln.gpus.text import gib, short_uuid, table, value_text
from gpukiln.gpus.verb import Options, Verb, document
from gpukiln.gpus.verbs.devices import GPU_OPTION, lease_holders, select_devices
from gpukiln.options import Option
from gpukiln.units import Duration

Print = Callable[[str], None]
TICK_SCHEMA = "gpu.watch.tick/1"  # schema of a line of --out
MIN_INTERVAL_S = 0.05  # between ticks
IDLE = "idle"  # a clock event that is no slowdown
CURSOR_UP, CLEAR_BELOW = "\x1b[{}A\r", "\x1b[J"  # ECMA-48: CUU, ED
INTERVAL_OPTION = Option("interval", "time between samples", default="1s", value="1s")


@dataclass(frozen=True)
class Stats:
    """Statistics of a value over a watch.

    Args:
        p95: The value that 95 % of the samples do not exceed (nearest rank).
        samples: Number of samples with a value.
    """

    min: float
    mean: float
    p95: float
    max: float
    samples: int


@dataclass(frozen=True)
class Summary:
    """A GPU over a watch.

    Args:
        samples: Number of samples without an error.
        energy_joules: Energy from the first sample to the last.
        energy_source: counter: the driver's counter; power: the integral of the power in the samples.
        slowed_s: Seconds of lowered clocks by NVML's reason.
        error: The error of the last sample; null for none.
        unavailable: By field, the reason why it is null.
    """

    uuid: str | None
    index: int
    name: str | None
    samples: int
    utilization_percent: Stats | None
    memory_used_mib: Stats | None
    temperature_c: Stats | None
    power_watts: Stats | None
    clock_sm_mhz: Stats | None
    clock_memory_mhz: Stats | None
    energy_joules: float | None
    energy_source: str | None
    slowed_s: dict[str, float] | None
    error: str | None
    unavailable: dict[str, str]


@dataclass(frozen=True)
class InsightsReport:
    """The findings of a watch.

    Args:
        lasted_s: From the first tick to the end of the last tick's interval.
        ticks: Number of sampled ticks.
        missed: Number of due ticks without a sample.
        events: Changes of GPUs during the watch.
        not_run: Ids of the rules that need a longer watch.
        leases: Whether leases could be read, as in a snapshot.
    """

    node: str
    simulated: bool
    lasted_s: float
    ticks: int
    missed: int
    insights: tuple[Finding, ...]
    events: tuple[WatchEvent, ...]
    not_run: tuple[str, ...]
    leases: str
    exit_code: int


@dataclass(frozen=True)
class WatchReport(InsightsReport):
    """The record of a watch, with its findings.

    Args:
        started_at: RFC 3339, UTC.
        interval_s: Planned time between ticks.
        late: Number of ticks that began more than 50 ms late.
        interrupted: Whether Ctrl-C ended it early.
    """

    started_at: str
    interval_s: float
    late: int
    interrupted: bool
    devices: tuple[Summary, ...]


def run_watch(
    options: Options, begun: Callable[[Snapshot, Sequence[Device]], Callable[[Tick], None]]
) -> WatchReport:
    """Watch according to the options.

    Args:
        begun: Called with the snapshot before the watch and its GPUs; returns the function for each tick.

    Raises:
        UsageError: An option has a wrong value.
        IncompatibleError: The machine has no GPU that can be watched.
        UnavailableError: The driver does not answer.
    """
    interval = Duration.parse(options.interval, "--interval")
    lasts = Duration.parse(options.duration, "--duration")
    # NVML averages utilization over 1/6 s to 1 s (nvml.h, nvmlUtilization_t): faster samples repeat values.
    if interval < MIN_INTERVAL_S:
        raise UsageError(
            f"--interval {options.interval} is too short", hint=f"wanted: {MIN_INTERVAL_S} s or more"
        )
    first = snapshot()
    check_usable(first)
    gpus = [device for device in select_devices(first, options.gpu) if device.kind == "gpu"]
    if not gpus:
        raise UsageError(f"--gpu {options.gpu} is a MIG device, which has no sensors", hint="pass its GPU")
    if any(gpu.vendor != "nvidia" for gpu in gpus):
        raise IncompatibleError(
            "watch does not support AMD's GPUs yet", hint="run `gpukiln-gpu list` for the current values"
        )
    each = begun(first, gpus)
    record, interrupted = WatchRecord(interval, time.monotonic()), False
    # GPUs that were lost before the watch have no samples, so nothing else would mention them.
    record.events.extend(
        WatchEvent(0.0, gpu.uuid, gpu.health, f"GPU {gpu.index}: {gpu.error}") for gpu in gpus if gpu.error
    )
    indices = {gpu.uuid: gpu.index for gpu in gpus if gpu.uuid and gpu.readable}
    try:
        if indices:
            sampling.watch(indices, record, lasts, each)
    except KeyboardInterrupt:
        interrupted = True
    last = snapshot()
    watched = WatchData(record.ticks, interval, first, last, insights.machine_context())
    summaries = tuple(summary(gpu, watched.samples(gpu), record) for gpu in gpus)
    return WatchReport(
        node=first.node,
        started_at=first.taken_at,
        simulated=first.simulated,
        interval_s=interval,
        lasted_s=record.lasted_s,
        ticks=len(record.ticks),
        late=record.late,
        missed=record.missed,
        interrupted=interrupted,
        devices=summaries,
        events=tuple(record.events),
        insights=insights.examine(watched),
        not_run=insights.not_run(watched),
        leases=last.leases,
        exit_code=5 if any(summary.error for summary in summaries) else 0,
    )


def stats(values: Sequence[float]) -> Stats | None:
    """Statistics of some values; None for no value.

    >>> stats([1.0, 2.0, 3.0])
    Stats(min=1.0, mean=2.0, p95=3.0, max=3.0, samples=3)
    >>> stats([])
    """
    if not values:
        return None
    ranked = sorted(values)
    # Nearest rank: always a value that was sampled, no interpolation.
    p95 = ranked[math.ceil(0.95 * len(ranked)) - 1]
    return Stats(ranked[0], round(sum(ranked) / len(ranked), 2), p95, ranked[-1], len(ranked))


STATS_FIELDS = (
    "utilization_percent",
    "memory_used_mib",
    "temperature_c",
    "power_watts",
    "clock_sm_mhz",
    "clock_memory_mhz",
)


def summary(gpu: Device, samples: Sequence[Sample], record: WatchRecord) -> Summary:
    """A GPU over a watch.

    Args:
        samples: Its samples without an error.
    """
    # By identity: two samples may be equal.
    times = {id(s): tick.at_s for tick in record.ticks for s in tick.samples}
    timed = [(times[id(s)], s) for s in samples]
    # The last sample decides: a GPU that came back has no error at the end.
    last = next((s for tick in reversed(record.ticks) for s in tick.samples if s.uuid == gpu.uuid), None)
    error = gpu.error or (last.error if last else "no tick was sampled")
    silent = error or "no sample has it"
    values = {
        name: stats([v for s in samples if (v := getattr(s, name)) is not None]) for name in STATS_FIELDS
    }
    energy, source, why = _energy(timed)
    slowed = _slowed(timed, record.interval_s)
    unavailable = {
        name: next((s.unavailable[name] for s in samples if name in s.unavailable), silent)
        for name, value in values.items()
        if value is None
    }
    if energy is None:
        unavailable["energy_joules"] = unavailable["energy_source"] = why or silent
    if slowed is None:
        unavailable["slowed_s"] = next((s.unavailable.get("clock_events", silent) for s in samples), silent)
    return Summary(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        samples=len(samples),
        **values,
        energy_joules=energy,
        energy_source=source,
        slowed_s=slowed,
        error=error,
        unavailable=unavailable,
    )


def _energy(timed: Sequence[tuple[float, Sample]]) -> tuple[float | None, str | None, str]:
    """Joules, their source, and the reason where they are not known."""
    counted = [s.energy_joules for _, s in timed if s.energy_joules is not None]
    # A driver that was loaded again starts its counter at 0. Boards before Volta have none.
    if len(counted) > 1 and counted[-1] >= counted[0]:
        return round(counted[-1] - counted[0], 3), "counter", ""
    drawn = [(at, s.power_watts) for at, s in timed if s.power_watts is not None]
    if len(drawn) > 1:
        # The trapezoidal rule between samples.
        steps = zip(drawn, drawn[1:])
        return round(sum((b - a) * (p + q) / 2 for (a, p), (b, q) in steps), 3), "power", ""
    return None, None, "it needs two samples" if timed else ""


def _slowed(timed: Sequence[tuple[float, Sample]], interval_s: float) -> dict[str, float] | None:
    """Seconds by reason; a sample counts until the next one, for two intervals at most."""
    samples = [(at, s.clock_events) for at, s in timed if s.clock_events is not None]
    if not samples:
        return None
    seconds: dict[str, float] = {}
    # After a missed tick the state in between is unknown: a sample counts for two intervals at most.
    ends = [at for at, _ in samples[1:]] + [samples[-1][0] + interval_s]
    for (at, events), end in zip(samples, ends):
        for name in events:
            seconds[name] = seconds.get(name, 0.0) + min(end - at, 2 * interval_s)
    return {name: round(value, 3) for name, value in seconds.items()}


# ---- watch


def _ignore_ticks(_: Snapshot, __: Sequence[Device]) -> Callable[[Tick], None]:
    return lambda _: None


def _watch(options: Options) -> WatchReport:
    """Watch for `--json`, which prints one document at the end."""
    with _file(options.out) as file:
        report = run_watch(options, _writer(file) if file else _ignore_ticks)
        if file:
            _write(file, document(WATCH, [plain(report)], []))
    return report


@contextlib.contextmanager
def _file(path: str) -> Iterator[Any]:
    if not path:
        yield None
        return
    with Path(path).open("w", encoding="utf-8") as file:
        yield file


def _write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    # A reader such as `tail -f`, or a crash, gets every line.
    file.flush()


def _writer(file: Any) -> Callable[[Snapshot, Sequence[Device]], Callable[[Tick], None]]:
    """A function for `run_watch` that writes every tick as a line of JSON."""

    def begun(first: Snapshot, _: Sequence[Device]) -> Callable[[Tick], None]:
        return lambda tick: _write(file, {"schema": TICK_SCHEMA, "node": first.node, "tick": plain(tick)})

    return begun


def _watch_live(options: Options) -> int:
    """Watch with a table on a terminal, or with lines of JSON on another output."""
    # TERM=dumb (an editor's shell, CI) shows escape sequences as text.
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    with _file(options.out) as file:
        lines = file or (None if terminal else sys.stdout)

        def begun(first: Snapshot, gpus: Sequence[Device]) -> Callable[[Tick], None]:
            todo = [_writer(lines)(first, gpus)] if lines else []
            todo += [Screen(first, gpus).draw] if terminal else []

            def each(tick: Tick) -> None:
                for handle in todo:
                    handle(tick)

            return each

        report = run_watch(options, begun)
        if lines:
            _write(lines, document(WATCH, [plain(report)], []))
        # Lines of JSON on standard output end with the document: a table would break its readers.
        if lines is not sys.stdout:
            _show(plain(report), options, print)
    return report.exit_code


class Screen:
    """A table on a terminal that each tick draws again."""

    def __init__(self, first: Snapshot, gpus: Sequence[Device]) -> None:
        self.node, self.gpus = first.node, {gpu.uuid: gpu for gpu in gpus}
        self.drawn = 0

    def draw(self, tick: Tick) -> None:
        """Draw a tick."""
        size = shutil.get_terminal_size()
        lines = [f"{self.node}   {tick.taken_at[11:19]}   {Duration(tick.at_s).shown}", *self.rows(tick)]
        if tick.late_s > sampling.LATE_S:
            lines[0] += f"   {tick.late_s:.1f} s late"
        # A wrapped line or a scrolled screen would break the count of lines to move up.
        lines = [line[: size.columns - 1] for line in lines[: size.lines - 1]]
        before = CURSOR_UP.format(self.drawn) if self.drawn else ""
        sys.stdout.write(before + CLEAR_BELOW + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self.drawn = len(lines)

    def rows(self, tick: Tick) -> list[str]:
        """The lines of the table."""
        rows = []
        for sample in tick.samples:
            gpu = self.gpus[sample.uuid]
            slowed = ", ".join(name for name in sample.clock_events or () if name != IDLE)
            rows.append(
                (
                    str(gpu.index),
                    short_uuid(gpu.uuid),
                    value_text(sample.utilization_percent, "%"),
                    f"{gib(sample.memory_used_mib)}/{gib(gpu.memory_total_mib)} GiB",
                    value_text(sample.temperature_c, "C"),
                    f"{value_text(sample.power_watts)}/{value_text(gpu.power_limit_watts, 'W')}",
                    value_text(sample.clock_sm_mhz),
                    sample.error or slowed or "-",
                    lease_holders(plain(gpu)) or "-",
                )
            )
        titles = ("#", "UUID", "UTIL", "MEM USED/TOTAL", "TEMP", "POWER", "SM MHz", "SLOWED BY", "LEASE")
        return table(titles, rows, "UTIL TEMP POWER")


def _show(node: dict[str, Any], _: Options, print: Print) -> None:
    simulated = ", SIMULATED" if node["simulated"] else ""
    ended = ", interrupted" if node["interrupted"] else ""
    print(
        f"node {node['node']}   watched {node['lasted_s']:g} s every {node['interval_s']:g} s: "
        f"{node['ticks']} samples, {node['late']} late, {node['missed']} missed{ended}{simulated}"
    )
    rows = []
    for device in node["devices"]:
        energy = "-"
        if device["energy_joules"] is not None:
            energy = f"{device['energy_joules']:.0f} J" + (
                "" if device["energy_source"] == "counter" else "*"
            )
        slowed = ", ".join(
            f"{name} {value:.1f}s" for name, value in (device["slowed_s"] or {}).items() if name != IDLE
        )
        rows.append(
            (
                str(device["index"]),
                short_uuid(device["uuid"]),
                _cell(device["utilization_percent"], "mean", "p95", "max"),
                _cell(device["memory_used_mib"], "mean", "max"),
                _cell(device["temperature_c"], "mean", "max"),
                _cell(device["power_watts"], "mean", "p95", "max"),
                _cell(device["clock_sm_mhz"], "min", "mean", "max"),
                energy,
                device["error"] or slowed or "-",
            )
        )
    titles = (
        *("#", "UUID", "UTIL % mean/p95/max", "MEM MiB mean/max", "TEMP C mean/max"),
        *("POWER W mean/p95/max", "SM MHz min/mean/max", "ENERGY", "SLOWED BY"),
    )
    for line in table(titles, rows):
        print(line)
    if any(device["energy_source"] == "power" for device in node["devices"]):
        print("* integral of the power in the samples: the GPU has no energy counter")
    _show_findings(node, print)


def _cell(value: dict[str, Any] | None, *names: str) -> str:
    return "-" if value is None else "/".join(f"{value[name]:.0f}" for name in names)


def _show_findings(node: dict[str, Any], print: Print) -> None:
    """Print events and findings."""
    for event in node["events"]:
        print(f"at {event['at_s']:.1f} s: {event['device'] or 'the watch'}: {event['name']}: {event['text']}")
    for finding in node["insights"]:
        numbers = (
            f"{name} {_word(value)}"
            for name, value in finding["evidence"].items()
            if name not in ("threshold", "window_s")
        )
        name = finding["object"] or "this machine"
        print(f"{finding['severity']:8} {finding['id']}: {name}: {finding['message']}")
        print(f"         {', '.join(numbers)}")
        print(f"         next: {finding['remedy']}")


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else value_text(value)


# ---- the verb insights


def _insights(options: Options) -> InsightsReport:
    report = run_watch(options, _ignore_ticks)
    fields = {name: getattr(report, name) for name in InsightsReport.__dataclass_fields__}
    return InsightsReport(
        **{**fields, "exit_code": 1 if worst_severity(report.insights) == "error" else report.exit_code}
    )


def _show_insights(node: dict[str, Any], _: Options, print: Print) -> None:
    simulated = ", SIMULATED" if node["simulated"] else ""
    print(f"node {node['node']}   watched {node['lasted_s']:g} s{simulated}")
    _show_findings(node, print)
    if not node["insights"]:
        print("no findings")
    if node["not_run"]:
        print(f"not run, they need a longer watch: {', '.join(node['not_run'])}")


WATCH = Verb(
    "watch",
    "Watch the GPUs: a live table or lines of JSON, then a summary and findings.",
    (
        GPU_OPTION,
        INTERVAL_OPTION,
        Option("duration", "length of the watch; 0: until Ctrl-C", default="60s", value="60s"),
        Option("out", "write the lines of JSON to this file", value="FILE"),
    ),
    _watch,
    _show,
    takes_over=_watch_live,
    examples=("--interval 1 --duration 60", "--gpu 0 --duration 0", "--out watch.jsonl"),
)
VERBS = (
    WATCH,
    Verb(
        "insights",
        "Find problems of the GPUs and their use in a short watch. Exits with 1 where a finding is an error.",
        (GPU_OPTION, INTERVAL_OPTION, Option("duration", "length of the watch", default="10s", value="10s")),
        _insights,
        _show_insights,
        examples=("--duration 30s",),
    ),
)
