"""Simulated GPUs and scripted scarcity of the embedded cloud."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import JsonOptions, print_document, results, say, words
from gpukiln.options import option
from gpukiln.parsing import parse_json

if TYPE_CHECKING:
    from gpukiln.clouds.embedded.layout import Layout
    from gpukiln.clouds.embedded.scarcity import Line

ALL = "all"


@dataclass(frozen=True)
class CloudGpus(JsonOptions):
    """Simulate GPUs on the embedded cloud's machines: give, show, break; script scarcity and interruption."""

    machine: str = option("instance id, `last`, or `all` that have simulated GPUs", first=True, required=True)
    on: bool = option(
        "give it the GPUs of its instance type, simulated; a virtual machine when it starts again", False
    )
    off: bool = option("take them away", False)
    set: tuple[str, ...] = option(
        "GPU.NAME=VALUE, as often as wanted: 1.temperature=91, last.lost=true, *.hung=true", ()
    )
    scenario: str = option(
        "what goes wrong: a name (see --list), or a YAML file with `set: [1.temperature=91]`"
    )
    healthy: bool = option("begin anew, as after a start", False)
    reset: str = option("reset GPUs: indices, separated by commas")
    load: str = option("give a process of the machine a part of a GPU, until it ends: GPU:PID:MIB[:PERCENT]")
    recording: str = option("tell what was recorded on a real host (python -m gpukiln.probe.recording FILE)")
    board: str = option("be such boards of the catalogue: KEY[:COUNT], for example rtx-4090:2 (see --list)")
    scarce: tuple[str, ...] = option(
        "ZONE:TYPE[:spot|on-demand][:TIMES]: launches find no capacity there, for example *:p4d.*; "
        "quota:CODE:VCPUS; reservation:ZONE:TYPE:INSTANCES",
        (),
    )
    plenty: str = option("forget a --scarce, or `all`")
    interrupt: bool = option("interrupt the spot instance, as EC2 does when it wants it back", False)
    seconds: int = option("how long --interrupt gives it", 120)
    list: bool = option("list the settings and scenarios", False)

    def run(self) -> None:
        from gpukiln.clouds.embedded import scarcity
        from gpukiln.clouds.embedded.client import ask_server
        from gpukiln.clouds.embedded.layout import Layout
        from gpukiln.errors import UsageError
        from gpukiln.state import state_home

        if self.list:
            _print_names(json=self.json)
            return
        if self.recording and self.board:
            raise UsageError("--recording and --board", hint="one of them")
        if self.on and self.off:
            raise UsageError("--on and --off", hint="one of them")
        settings = [word for text in self.set or () for word in words(text)]
        changes: dict[str, Any] = {
            "switch": "on" if self.on else "off" if self.off else "",
            "healthy": self.healthy,
            "settings": settings,
            "reset": words(self.reset),
            "load": _load(self.load) if self.load else [],
            "board": self.board,
            **_scenario(self.scenario, settings),
            **({"recording": _recording(Path(self.recording))} if self.recording else {}),
        }
        asked = {name: value for name, value in changes.items() if value}
        if (asked or self.interrupt) and self.machine == ALL:
            raise UsageError(
                "one machine at a time", hint="`invoke cloud.status` lists them; `last` is the last one"
            )
        layout = Layout(state_home())
        for text in self.scarce or ():
            say(f"scarce from now on: {scarcity.add(layout, text)}")
        if self.plenty:
            gone = scarcity.clear(layout, None if self.plenty == "all" else self.plenty)
            say(f"forgotten: {', '.join(map(str, gone)) or 'nothing was scarce'}")
        interruption: dict[str, Any] | None = None
        if self.interrupt:
            interruption = ask_server(
                layout,
                "/gpukiln/interrupt",
                {"instance_id": _chosen(layout, self.machine), "seconds": self.seconds},
            )
        names = _running(layout) if self.machine == ALL else [_chosen(layout, self.machine)]
        answers = [ask_server(layout, "/gpukiln/gpus", {"instance_id": name, **asked}) for name in names]
        if self.machine == ALL:
            answers = [answer for answer in answers if answer["simulated"] or answer["gpus"]]
        lines = scarcity.script(layout).lines
        if self.json:
            print_document(
                "cloud.gpus/1",
                machines=answers,
                scarce=[str(line) for line in lines],
                interruption=interruption,
            )
            return
        _print(answers, lines, interruption)
        if not answers:
            say("no machine has simulated GPUs: give one the tag gpukiln:gpus=simulated, or MACHINE --on")


def _load(text: str) -> list[str]:
    from gpukiln.errors import UsageError
    from gpukiln.units import is_whole

    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isascii() and is_whole(part) for part in parts[1:]):
        raise UsageError(
            f"--load {text}: wanted GPU:PID:MIB[:PERCENT]", hint="for example --load 0:1234:900:40"
        )
    return parts


def _scenario(name: str, settings: list[str]) -> dict[str, Any]:
    """A scenario by its name goes to the server; one in a file is its settings, which come first."""
    from gpukiln.clouds.embedded.gpus.settings import SCENARIOS, read_scenario

    if not name or name in SCENARIOS:
        return {"scenario": name}
    path = Path(name)
    if path.exists():
        return {"settings": read_scenario(path) + settings}
    from gpukiln.typed import unknown

    raise unknown("scenario", name, SCENARIOS)


def _recording(path: Path) -> dict[str, Any]:

    from gpukiln.errors import UsageError

    try:
        nvml = parse_json(path.read_text(encoding="utf-8"))["nvml"]
        if not isinstance(nvml["gpus"], list):
            raise TypeError("gpus is no list")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} is no recording of a GPU host: {type(error).__name__}: {error}",
            hint="on the host: python -m gpukiln.probe.recording recording.json",
        ) from error
    found: dict[str, Any] = nvml
    return found


def _running(layout: Layout) -> list[str]:
    from gpukiln.clouds.embedded.client import server_status

    machines = (server_status(layout) or {}).get("machines", ())
    return [machine["instance_id"] for machine in machines]


def _chosen(layout: Layout, machine: str) -> str:
    from gpukiln.typed import unknown

    known = _running(layout)
    if machine == "last" and known:
        return known[-1]
    if machine not in known:
        raise unknown("machine", machine, known)
    return machine


def _print_names(*, json: bool) -> None:
    from gpukiln.catalog.boards import boards
    from gpukiln.clouds.embedded.gpus.settings import SCENARIOS, SETTINGS
    from gpukiln.reports.tables import Rows

    if json:
        print_document(
            "cloud.gpus.list/1",
            settings={name: setting.text for name, setting in SETTINGS.items()},
            scenarios={name: text for name, (text, _) in SCENARIOS.items()},
            boards={key: board.name for key, board in boards().items()},
        )
        return
    table = Rows("", "name", "what", first=2, folds=True)
    for name, setting in SETTINGS.items():
        table.add("setting", name, setting.text)
    for name, (text, _) in SCENARIOS.items():
        table.add("scenario", name, text)
    for key, board in boards().items():
        table.add("board", key, board.name)
    results().print(table)


def _print(
    answers: list[dict[str, Any]],
    lines: tuple[Line, ...],
    interruption: dict[str, Any] | None,
) -> None:
    from gpukiln.reports.tables import Rows

    console = results()
    if interruption:
        console.print(f"{interruption['instance_id']}: {interruption['action']} at {interruption['ends']}")
    for answer in answers:
        console.print(f"{answer['instance_id']}  {answer['instance_type']}  {_state(answer)}")
        table = Rows("gpu", "name", "memory", "degrees", "watts", "state", first=3, folds=True)
        for gpu in answer["gpus"]:
            told = [gpu["memory_total_mib"], gpu["temperature_celsius"], gpu["power_watts"]]
            cells = ["-" if value is None else f"{value:g}" for value in told]
            table.add(str(gpu["index"]), gpu["name"] or "-", *cells, _gpu_state(gpu))
        if answer["gpus"]:
            console.print(table)
    for line in lines:
        console.print(f"scarce  {line}")


def _state(answer: dict[str, Any]) -> str:
    if answer["error"] is not None:
        reason = f": {answer['reason']}" if answer["reason"] else ""
        return f"simulated GPUs; NVML does not start ({answer['error']:g}){reason}"
    if answer["gpus"]:
        count = len(answer["gpus"])
        return f"{count} simulated GPU{'s' if count > 1 else ''}, driver {answer['driver']}"
    return "simulated GPUs from its next start on" if answer["simulated"] else "no simulated GPUs"


def _gpu_state(gpu: dict[str, Any]) -> str:
    said = [
        *([f"NVML error {gpu['error']:g}"] if gpu["error"] is not None else []),
        *(["hangs"] if gpu["hung"] else []),
        *(["MIG"] if gpu["mig_enabled"] else []),
        *([f"processes {', '.join(map(str, gpu['processes']))}"] if gpu["processes"] else []),
    ]
    return "; ".join(said) or "ok"
