"""The embedded cloud for people: its server, machines and disks, and their simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from gpukiln.catalog.boards import boards
from gpukiln.clouds.embedded.client import server_status
from gpukiln.clouds.embedded.gpus.settings import SCENARIOS, SETTINGS
from gpukiln.clouds.embedded.inventory import problems, stored_disks
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.scarcity import Line
from gpukiln.clouds.embedded.volume_files import stored_volumes
from gpukiln.reports.tables import Rows


def status(layout: Layout) -> dict[str, Any]:
    """What runs and what is on disk; the server is None where none runs."""
    return {
        "home": str(layout.home),
        "server": server_status(layout),
        "disks": stored_disks(layout),
        "volumes": stored_volumes(layout),
        "problems": problems(layout),
    }


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing of a status."""
    server = status["server"]
    yield f"home    {status['home']}"
    yield f"server  {server['url'] if server else 'does not run (any command that needs it starts it)'}"
    if server and (cluster := server.get("cluster")):
        ended = [name for name, runs in cluster["programs"].items() if not runs]
        state = f"{', '.join(ended)} ended" if ended else "runs"
        yield f"cluster {cluster['context']} {cluster['url']} {state}"
    # Machines end with the server: without one there are none.
    for machine in server["machines"] if server else ():
        state = "running" if machine["running"] else "stopped"
        # A server of an older version may still run, and has no such field.
        gpus = " simulated GPUs" if machine.get("simulated") else ""
        yield f"machine {machine['instance_id']} {machine['kind']} {state} {machine['address']}{gpus}"
    for disk in status["disks"]:
        yield f"disk    {disk['snapshot']} {disk['mib']:6} MiB  {disk['image'] or 'no image'}"
        if disk["problem"]:
            yield f"        {disk['problem']}"
    for volume in status["volumes"]:
        # The description of a volume may be damaged; it is shown, as its file still takes space.
        size = "can't be read"
        if volume["size_gib"] is not None:
            size = f"{volume['size_gib']} GiB, {volume['zone']}"
        yield f"volume  {volume['volume']} {volume['mib']:6} MiB  {size}, {volume['attached_to'] or 'free'}"
    for problem in status["problems"]:
        yield f"wrong   {problem}"


def names() -> dict[str, dict[str, str]]:
    """What can be simulated: settings, scenarios and boards, each with what it is."""
    return {
        "settings": {name: setting.text for name, setting in SETTINGS.items()},
        "scenarios": {name: text for name, (text, _) in SCENARIOS.items()},
        "boards": {key: board.name for key, board in boards().items()},
    }


def names_table(names: Mapping[str, Mapping[str, str]]) -> Rows:
    """One row a name."""
    table = Rows("", "name", "what", first=2, folds=True)
    for kind, texts in names.items():
        for name, text in texts.items():
            table.add(kind.removesuffix("s"), name, text)
    return table


def gpus_parts(
    machines: Sequence[Mapping[str, Any]], scarce: Iterable[Line], interruption: Mapping[str, Any] | None
) -> Iterator[RenderableType]:
    """Machines with simulated GPUs, each with a table of them."""
    if interruption:
        yield f"{interruption['instance_id']}: {interruption['action']} at {interruption['ends']}"
    for machine in machines:
        yield f"{machine['instance_id']}  {machine['instance_type']}  {_machine_state(machine)}"
        # Texts fold, because names of boards and states are longer than a terminal's line.
        table = Rows("gpu", "name", "memory", "degrees", "watts", "state", first=3, folds=True)
        for gpu in machine["gpus"]:
            numbers = [gpu["memory_total_mib"], gpu["temperature_celsius"], gpu["power_watts"]]
            # A lost or hung GPU answers nothing, which is not 0.
            cells = ["-" if value is None else f"{value:g}" for value in numbers]
            table.add(str(gpu["index"]), gpu["name"] or "-", *cells, _gpu_state(gpu))
        if machine["gpus"]:
            yield table
    for line in scarce:
        yield f"scarce  {line}"


def _machine_state(machine: Mapping[str, Any]) -> str:
    if machine["error"] is not None:
        reason = f": {machine['reason']}" if machine["reason"] else ""
        return f"simulated GPUs; NVML does not start ({machine['error']:g}){reason}"
    if machine["gpus"]:
        count = len(machine["gpus"])
        return f"{count} simulated GPU{'s' if count > 1 else ''}, driver {machine['driver']}"
    return "simulated GPUs from its next start on" if machine["simulated"] else "no simulated GPUs"


def _gpu_state(gpu: Mapping[str, Any]) -> str:
    states = [
        *([f"NVML error {gpu['error']:g}"] if gpu["error"] is not None else []),
        *(["hangs"] if gpu["hung"] else []),
        *(["MIG"] if gpu["mig_enabled"] else []),
        *([f"processes {', '.join(map(str, gpu['processes']))}"] if gpu["processes"] else []),
    ]
    return "; ".join(states) or "ok"
