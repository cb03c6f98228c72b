"""Simulated GPUs and scripted scarcity of the embedded cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.cli.command import JsonOptions, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option

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
        "GPU.NAME=VALUE, as often as needed: 1.temperature=91, last.lost=true, *.hung=true", ()
    )
    scenario: str = option(
        "what goes wrong: a name (see --list), or a YAML file with `set: [1.temperature=91]`"
    )
    healthy: bool = option("begin anew, as after a start", False)
    reset: str = option("reset GPUs: indices, separated by commas")
    load: str = option("give a process of the machine a part of a GPU, until it ends: GPU:PID:MIB[:PERCENT]")
    recording: str = option("replay a recording of a real host (python -m gpukiln.probe.recording FILE)")
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
        from gpukiln.clouds.embedded import scarcity, view
        from gpukiln.clouds.embedded.client import ask_server, find_machine, machine_ids
        from gpukiln.clouds.embedded.gpus.change import GpuChangeOptions
        from gpukiln.clouds.embedded.layout import Layout

        # The names are in the source, so that no server is started for them.
        if self.list:
            names = view.names()
            self.report(names, [view.names_table(names)], schema="cloud.gpus.list/1")
            return
        change = GpuChangeOptions(
            **self.pick("on", "off", "scenario", "healthy", "load", "recording", "board"),
            settings=[setting for text in self.set for setting in words(text)],
            reset=words(self.reset),
        ).request()
        if (change or self.interrupt) and self.machine == ALL:
            raise UsageError(
                "one machine at a time", hint="`invoke cloud.status` lists them; `last` is the last one"
            )
        layout = Layout()
        for text in self.scarce:
            say(f"scarce from now on: {scarcity.add(layout, text)}")
        if self.plenty:
            removed = scarcity.clear(layout, None if self.plenty == ALL else self.plenty)
            say(f"forgotten: {', '.join(map(str, removed)) or 'nothing was scarce'}")
        interruption: dict[str, Any] | None = None
        if self.interrupt:
            request = {"instance_id": find_machine(layout, self.machine), "seconds": self.seconds}
            interruption = ask_server(layout, "/gpukiln/interrupt", request)
        ids = machine_ids(layout) if self.machine == ALL else [find_machine(layout, self.machine)]
        # A request without a change only reads.
        machines = [ask_server(layout, "/gpukiln/gpus", {"instance_id": id, **change}) for id in ids]
        # As its help says: `all` that have simulated GPUs.
        if self.machine == ALL:
            machines = [machine for machine in machines if machine["simulated"] or machine["gpus"]]
        scarce = scarcity.script(layout).lines
        self.report(
            {"machines": machines, "scarce": [str(line) for line in scarce], "interruption": interruption},
            view.gpus_parts(machines, scarce, interruption),
            schema="cloud.gpus/1",
        )
        if not machines and not self.json:
            say("no machine has simulated GPUs: give one the tag gpukiln:gpus=simulated, or MACHINE --on")
