"""Watches GPUs: one child process holds NVML and samples tick after tick, whatever hangs or is lost.

Ticks are planned on the clock that is never set. One that begins late says by how much; one whose time was
up before its turn came is missed and counted, never made up for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from gpukiln.gpus import gpu_facts
from gpukiln.gpus.collect import LOST_CODES, lost_reason, now, reason, values_of
from gpukiln.probe.child import Hang, Send, SlowCall, in_child
from gpukiln.probe.nvml import CRASHED, HUNG, SLOW, Nvml, current_values
from gpukiln.probe.nvml_values import is_error, usage

START_S = 120.0  # for NVML to start, see gpukiln.probe.nvml
STUCK_S, GPU_S = 10.0, 30.0  # for one GPU, without progress and with; then the others are sampled on
LATE_S = 0.05  # from so much on a tick is told to be late
RESTARTS = 3  # of a child that ends for no GPU's sake


@dataclass(frozen=True)
class Sample:
    """A GPU at one tick: the fields of a `Device` that move, by its names.

    Not a `Device`: a line of a watch would have sixty more fields, all of them null.

    Args:
        index: The driver's number.
        clock_events: Why clocks are lower than they could be, as NVML names it.
        energy_joules: Since the driver was loaded.
        error: Why nothing could be read: GPU_IS_LOST, HUNG, SLOW or NVML's other word; null as a rule.
        unavailable: Field to the reason why it is null.
    """

    uuid: str
    index: int
    utilization_percent: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    temperature_margin_c: int | None = None
    power_watts: float | None = None
    clock_sm_mhz: int | None = None
    clock_memory_mhz: int | None = None
    clock_events: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    energy_joules: float | None = None
    error: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick:
    """All GPUs at one time.

    Args:
        number: From 0, as planned: a number that is not there was missed.
        at_s: Since the watch began, on the clock that is never set.
        late_s: By how much it began after its time.
        taken_at: RFC 3339, UTC.
    """

    number: int
    at_s: float
    late_s: float
    taken_at: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class WatchEvent:
    """What happened to a GPU, or to who asks it, meanwhile.

    Args:
        at_s: Since the watch began.
        device: UUID; null where it is about none.
        name: lost, hung, slow, back, or failed: who asked NVML ended.
    """

    at_s: float
    device: str | None
    name: str
    text: str


@dataclass
class WatchRecord:
    """What a watch has seen so far.

    Args:
        interval_s: Between ticks, as planned.
        planned: Ticks whose time has come.
        began: On the clock that is never set.
    """

    interval_s: float
    began: float
    ticks: list[Tick] = field(default_factory=list)
    events: list[WatchEvent] = field(default_factory=list)
    planned: int = 0

    @property
    def missed(self) -> int:
        """Ticks whose time came, and that nothing was sampled at."""
        return self.planned - len(self.ticks)

    @property
    def late(self) -> int:
        """Ticks that began late."""
        return sum(1 for tick in self.ticks if tick.late_s > LATE_S)

    @property
    def lasted_s(self) -> float:
        """For how long it was watched; a tick stands for the time until the next one."""
        return duration_of(self.ticks, self.interval_s)


def duration_of(ticks: Sequence[Tick], interval_s: float) -> float:
    """Seconds from the time of the first tick on, the last one's interval included."""
    return round((ticks[-1].number - ticks[0].number + 1) * interval_s, 3) if ticks else 0.0


def watch(
    gpus: Mapping[str, int],
    record: WatchRecord,
    duration_s: float,
    each: Callable[[Tick], None] | None = None,
) -> None:
    """Sample GPUs until the time is up.

    Args:
        gpus: UUID to index.
        record: Filled tick by tick, so what was seen is there whatever ends the watch.
        duration_s: 0: without an end.
        each: Given every tick as it comes.
    """
    hung: dict[str, str] = {}
    count = max(round(duration_s / record.interval_s), 1) if duration_s else 0
    gone: dict[str, str] = {}
    number, at, restarts = 0, "", 0
    began: float | None = None

    def hear(message: dict[str, Any]) -> None:
        nonlocal number, at, began
        at = message.get("uuid", at)
        if "start" in message:
            record.began = began = message["start"]
        if "tick" not in message:
            return
        number = message["tick"] + 1
        samples = {row["uuid"]: _sample(row, gpus[row["uuid"]]) for row in message["rows"]}
        for uuid, why in hung.items():
            samples[uuid] = Sample(uuid, gpus[uuid], error=why, unavailable=dict.fromkeys(FIELDS, why))
        tick = Tick(
            number=message["tick"],
            at_s=round(message["began"] - record.began, 4),
            late_s=round(message["late"], 4),
            taken_at=message["taken_at"],
            samples=tuple(samples[uuid] for uuid in gpus if uuid in samples),
        )
        record.ticks.append(tick)
        record.planned = max(record.planned, number)
        _note_changes(tick, gone, hung, record.events)
        if each is not None:
            each(tick)

    def work(tell: Send) -> None:
        asked = [uuid for uuid in gpus if uuid not in hung]
        _sample_all(tell, asked, began, record.interval_s, number, count)

    try:
        while not count or number < count:
            at = ""
            ended = in_child(work, hear, stuck_s=STUCK_S)
            if not ended:
                record.planned = max(record.planned, count)
                break
            passed = round(time.monotonic() - record.began, 3)
            if at and at not in hung:  # the others are sampled on without it
                hung[at] = (
                    SLOW if isinstance(ended, SlowCall) else HUNG if isinstance(ended, Hang) else CRASHED
                )
                record.events.append(WatchEvent(passed, at, hung[at].lower(), str(ended)))
            else:
                record.events.append(WatchEvent(passed, None, "failed", str(ended)))
                restarts += 1
            if restarts > RESTARTS or len(hung) == len(gpus):
                break
    finally:
        came = int((time.monotonic() - record.began) / record.interval_s)  # the one in hand is not counted
        record.planned = max(record.planned, min(came, count) if count else came)


def _note_changes(tick: Tick, gone: dict[str, str], hung: dict[str, str], events: list[WatchEvent]) -> None:
    """Append what has become of GPUs since the tick before."""
    for sample in tick.samples:
        if sample.uuid in hung:
            continue
        before = gone.get(sample.uuid)
        if sample.error and sample.error != before:
            name = "lost" if sample.error in LOST_CODES else "failed"
            events.append(WatchEvent(tick.at_s, sample.uuid, name, f"NVML answers {sample.error}"))
            gone[sample.uuid] = sample.error
        elif before and not sample.error:
            events.append(WatchEvent(tick.at_s, sample.uuid, "back", f"it answers again, after {before}"))
            del gone[sample.uuid]


# What is read of a GPU at each tick: the fields of a device that move.
FIELDS = tuple(field.name for field in fields(Sample) if field.name in gpu_facts.FIELDS)


def _sample(row: dict[str, Any], index: int) -> Sample:
    """What the child said of a GPU, with a reason for each null."""
    gpu = row["gpu"]
    values, unavailable = ({}, {}) if row["error"] else values_of(gpu, FIELDS)
    error = row["error"] or lost_reason(unavailable)
    if error:
        values, unavailable = {}, dict.fromkeys(FIELDS, error)
    return Sample(row["uuid"], index, **values, error=error, unavailable=unavailable)


def _sample_all(
    tell: Send, uuids: Sequence[str], began: float | None, interval_s: float, number: int, count: int
) -> None:
    """Sample until the last tick; runs in the child process.

    Args:
        began: When the watch did; None: now, for what the driver takes to start is no part of it.
        number: Of the first tick.
        count: Of all ticks, 0 for no end.
    """
    tell(at="NVML's start", limit=START_S)
    nvml = Nvml()
    nvml.pynvml.nvmlInit()
    handles: dict[str, Any] = {}
    if began is None:
        began = time.monotonic()
        tell(start=began)
    parent, sampled = os.getppid(), False
    while not count or number < count:
        number = max(number, int((time.monotonic() - began) / interval_s))
        if count and number >= count:
            if sampled:
                break
            number = count - 1  # one look there is, however late
        due = began + number * interval_s
        tell(at="the next tick", limit=max(due - time.monotonic(), 0) + GPU_S)
        time.sleep(max(due - time.monotonic(), 0))
        if os.getppid() != parent:
            return
        at, rows = time.monotonic(), []
        taken_at = now()
        for uuid in uuids:
            tell(at=f"GPU {uuid}", limit=GPU_S, uuid=uuid)
            rows.append(_row(nvml, uuid, handles))
        tell(tick=number, began=at, late=at - due, taken_at=taken_at, rows=rows, uuid="")
        number, sampled = number + 1, True


def _row(nvml: Nvml, uuid: str, handles: dict[str, Any]) -> dict[str, Any]:
    """What NVML says of one GPU now: {uuid, error, gpu: that part of the collector's facts which moves}."""
    handle = handles.get(uuid)
    if handle is None:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        if handle is None or is_error(handle):
            return {"uuid": uuid, "error": reason(handle) if handle else "NOT_SUPPORTED", "gpu": {}}
        handles[uuid] = handle
    return {"uuid": uuid, "error": None, "gpu": {**current_values(nvml, handle), "more": usage(nvml, handle)}}
