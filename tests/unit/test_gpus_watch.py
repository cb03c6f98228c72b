"""GPUs are watched: one process samples, nothing is hidden, and a GPU that is lost or hangs ends nothing."""

import dataclasses
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.clouds.embedded.gpus import settings
from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.gpus import cli, sampling
from gpukiln.gpus.collect import collect
from gpukiln.gpus.model import Device
from gpukiln.gpus.sampling import Sample, Tick, WatchRecord
from gpukiln.gpus.verbs import watch
from tests.support import documents

Machine = Callable[[str], State]


@pytest.fixture
def machine(simulated: Machine) -> Machine:
    return simulated


def change(state: State, *texts: str) -> None:
    def change_rows(rows: dict[str, str]) -> None:
        for text in texts:
            settings.apply_setting(rows, text)

    state.change(change_rows)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["watch", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["nodes"][0]


def test_one_process_samples_every_gpu_on_its_clock(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = machine("g5.12xlarge")
    change(state, "1.utilization=80", "1.power=200")
    children: list[Any] = []
    real = sampling.in_child

    def counted(*given: Any, **more: Any) -> str:
        children.append(given)
        return real(*given, **more)

    monkeypatch.setattr(sampling, "in_child", counted)
    code, said = told(capsys, "--interval", "0.1", "--duration", "1")
    assert code == 0
    assert len(children) == 1
    assert (said["ticks"], said["missed"], said["lasted_s"]) == (10, 0, 1.0)
    busy = said["devices"][1]
    assert busy["utilization_percent"] == {"min": 80, "mean": 80.0, "p95": 80, "max": 80, "samples": 10}
    assert busy["energy_source"] == "counter"
    assert busy["energy_joules"] == pytest.approx(200 * 0.9, rel=0.2)
    assert said["devices"][0]["slowed_s"] == {"idle": pytest.approx(1.0, abs=0.15)}


def test_a_sample_is_a_part_of_a_device_read_by_the_same_collector(machine: Machine) -> None:
    """A watch rounded power to mW, and a list of the same GPU to 0.1 W: NVML has mW (nvml.h)."""
    types = {one.name: one.type for one in dataclasses.fields(Device)}
    assert {one.name: one.type for one in dataclasses.fields(Sample)}.items() - types.items() == {
        ("uuid", "str")
    }
    change(machine("g4dn.xlarge"), "0.power=27.345", "0.utilization=42")
    [device] = collect().devices
    record = WatchRecord(0.1, time.monotonic())
    sampling.watch({str(device.uuid): 0}, record, 0.1)
    [sample] = record.ticks[0].samples
    moving = {name: getattr(device, name) for name in sampling.FIELDS if name != "energy_joules"}
    assert moving == {name: getattr(sample, name) for name in moving}
    assert device.power_watts == 27.345
    assert (sample.utilization_percent, sample.energy_joules is None) == (42, device.energy_joules is None)


def test_lines_and_then_the_document(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("g4dn.xlarge")
    assert cli.main(["watch", "--interval=0.5", "--duration=1.5s"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["schema"] for line in lines] == ["gpu.watch.tick/1"] * (len(lines) - 1) + ["gpu.watch/1"]
    for line in lines:
        documents.check(line)
    numbers = [line["tick"]["number"] for line in lines[:-1]]
    assert numbers == sorted(set(numbers) & {0, 1, 2})  # who is late on a busy machine misses some
    out = tmp_path / "lines"
    assert cli.main(["watch", "--interval=0.1", "--duration=0.2", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "gpu.watch/1"
    assert out.read_text().splitlines()
    assert cli.main(["watch", "--interval=0.1", "--duration=0.2", "--out", str(out)]) == 0
    assert re.search(r"\d samples?, \d late, \d missed, SIMULATED", capsys.readouterr().out)


def test_a_terminal_has_a_table_that_is_drawn_again(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("g4dn.xlarge")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["watch", "--interval=1", "--duration=2"]) == 0
    said = capsys.readouterr().out
    assert said.count("\x1b[3A\r\x1b[J") == 1, "the second table stands over the first"
    live = said.partition("node ")[0].replace("\x1b[3A\r\x1b[J", "").replace("\x1b[J", "")
    assert max(map(len, live.splitlines())) < 60, "a line that wraps would be counted wrong"


def test_a_gpu_that_is_lost_and_comes_back_is_an_event(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    state = machine("g5.12xlarge")
    timers = [
        threading.Timer(0.35, change, (state, "2.lost=true")),
        threading.Timer(0.75, change, (state, "2.lost=false")),
    ]
    for one in timers:
        one.start()
    code, said = told(capsys, "--interval", "0.1", "--duration", "1.2")
    assert [event["name"] for event in said["events"]] == ["lost", "back"]
    assert said["events"][0]["device"] == said["devices"][2]["uuid"]
    assert said["ticks"] == 12
    assert 0 < said["devices"][2]["samples"] < 12
    assert said["devices"][0]["samples"] == 12
    assert code == 0, "at last it answered"


def test_a_gpu_that_hangs_is_given_up_and_the_others_are_sampled_on(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "STUCK_S", 0.2)
    monkeypatch.setattr("gpukiln.probe.nvml.STUCK_S", 0.3)
    monkeypatch.setattr("gpukiln.probe.child.LOOK_S", 0.1)
    state = machine("g5.12xlarge")
    timer = threading.Timer(0.25, change, (state, "1.hung=true"))
    timer.start()
    code, said = told(capsys, "--interval", "0.1", "--duration", "1.5")
    assert code == 5
    hung = said["devices"][1]
    assert [(event["name"], event["device"]) for event in said["events"]] == [("hung", hung["uuid"])]
    assert hung["error"] == "HUNG"
    assert said["devices"][0]["samples"] == said["ticks"]
    assert said["missed"] > 0, "what the hang cost is told"
    assert said["ticks"] + said["missed"] == 15


def test_a_gpu_that_was_lost_before_is_a_row(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    change(machine("g5.12xlarge"), "3.lost=true")
    code, said = told(capsys, "--interval", "0.1", "--duration", "0.2")
    assert code == 5
    assert len(said["devices"]) == 4
    assert "LOST" in said["devices"][3]["error"]
    assert set(said["devices"][3]["unavailable"]) >= {"energy_joules", "power_watts", "slowed_s"}


def test_an_interrupt_ends_it_with_its_summary(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("g4dn.xlarge")
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    code, said = told(capsys, "--interval", "0.1", "--duration", "0")
    assert code == 0
    assert said["interrupted"]
    assert 1 <= said["ticks"] <= 21


def test_ticks_whose_time_was_up_are_missed_and_the_next_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []

    class Slow:
        pynvml = type("pynvml", (), {"nvmlInit": staticmethod(lambda: None)})

    class Clock:
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

        def sleep(self, seconds: float) -> None:
            self.seconds += seconds

    clock, pauses = Clock(), iter((0.0, 0.27, 0.0, 0.0, 0.0))
    monkeypatch.setattr(sampling, "Nvml", Slow)
    monkeypatch.setattr(sampling, "time", clock)
    monkeypatch.setattr(sampling, "_row", lambda *_: clock.sleep(next(pauses)))
    sampling._sample_all(lambda **said: heard.append(said), ["GPU-1"], 0.0, 0.1, 0, 6)
    ticks = [one for one in heard if "tick" in one]
    assert [one["tick"] for one in ticks] == [0, 1, 3, 4, 5]
    record = WatchRecord(0.1, 0.0, planned=6)
    record.ticks = [Tick(one["tick"], 0, one["late"], "", ()) for one in ticks]
    assert (record.missed, record.late) == (1, 1)


def test_what_is_typed_wrongly(machine: Machine) -> None:
    machine("g4dn.xlarge")
    for words in (["--interval", "0.001"], ["--duration", "soon"], ["--gpu", "7"], ["--interval", "nan"]):
        assert cli.main(["watch", *words]) == 2, words


def record_of(*samples: Sample) -> WatchRecord:
    ticks = [Tick(n, float(n), 0, "", (one,)) for n, one in enumerate(samples)]
    return WatchRecord(1.0, 0.0, ticks=ticks, planned=len(ticks))


def summed(*samples: Sample) -> watch.Summary:
    return watch.summary(Device("GPU-1", "gpu", 0), samples, record_of(*samples))


def test_energy_is_the_counters_or_summed_up_or_unknown_with_its_reason() -> None:
    known = [Sample("GPU-1", 0, power_watts=100.0, energy_joules=e) for e in (50.0, 160.0, 270.0)]
    assert (summed(*known).energy_joules, summed(*known).energy_source) == (220.0, "counter")
    powered = [Sample("GPU-1", 0, power_watts=watts) for watts in (100.0, 200.0, 200.0)]
    assert (summed(*powered).energy_joules, summed(*powered).energy_source) == (350.0, "power")
    again = [Sample("GPU-1", 0, power_watts=10.0, energy_joules=e) for e in (500.0, 3.0)]
    assert summed(*again).energy_source == "power", "a counter that began anew says nothing"
    none = summed(Sample("GPU-1", 0), Sample("GPU-1", 0))
    assert none.energy_joules is None
    assert none.unavailable["energy_joules"]


def test_statistics() -> None:
    assert watch.stats([]) is None
    assert watch.stats(list(range(1, 101))) == watch.Stats(1, 50.5, 95, 100, 100)
    slowed = [Sample("GPU-1", 0, clock_events=e) for e in (("idle",), ("software power cap",), ())]
    assert summed(*slowed).slowed_s == {"idle": 1.0, "software power cap": 1.0}
    assert summed(Sample("GPU-1", 0, unavailable={"clock_events": "NOT_SUPPORTED"})).slowed_s is None


def test_insights_are_one_look_and_exit_1_where_something_is_sick(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    state = machine("g5.12xlarge")
    look = ["insights", "--interval", "0.1", "--duration", "0.3"]
    assert cli.main([*look, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["nodes"][0]
    assert said["insights"] == []
    assert "leased-idle" in said["not_run"], "0.3 s say nothing of that"
    change(state, "2.ecc_uncorrected=2", "1.persistence=false")
    assert cli.main(look) == 1
    text = capsys.readouterr().out
    assert "error    ecc-uncorrected: GPU-" in text
    assert "info     persistence-off: GPU-" in text
    assert "not run, they need a longer watch: leased-idle" in text
