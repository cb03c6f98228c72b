"""Shows what a run did: one row a host or a scenario, and the tasks that took longest."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpukiln.nodes.judge import Judgement
from gpukiln.nodes.results import HostResult, RunResult, State
from gpukiln.nodes.scenarios import Outcome, Scenario
from gpukiln.progress import human_seconds
from gpukiln.verify import report

STYLES: dict[State, str] = {
    "ok": "green",
    "changed": "yellow",
    "failed": "bold red",
    "unreachable": "bold red",
    "not_reached": "magenta",
}
SLOWEST = 5


def summary(result: RunResult) -> str:
    """One line: how many hosts are in which state."""
    states = [host.state for host in result.hosts.values()]
    counts = ", ".join(f"{states.count(s)} {s.replace('_', ' ')}" for s in STYLES if s in states)
    return f"{len(states)} host{'s' if len(states) != 1 else ''}: {counts}"


def render(result: RunResult, *, check: bool) -> RenderableType:
    """The whole summary.

    Args:
        result: What happened.
        check: Whether nothing was changed: then what differs is shown.
    """
    parts: list[RenderableType] = [_hosts(result, check=check)]
    if check:
        parts += [_differences(host) for host in result.hosts.values() if host.changes]
    parts += [_failure(host) for host in result.hosts.values() if host.failure]
    slowest = sorted(result.task_seconds.items(), key=lambda pair: -pair[1])[:SLOWEST]
    if slowest and not check:
        table = Table(box=None, pad_edge=False, title="slowest tasks", title_justify="left")
        table.add_column("s", justify="right", no_wrap=True)
        table.add_column("task", overflow="fold")
        for task, seconds in slowest:
            table.add_row(f"{seconds:.1f}", Text(task))
        parts.append(table)
    parts.append(Text(summary(result), style="bold"))
    return Group(*parts)


def _hosts(result: RunResult, *, check: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("host", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("tasks", justify="right")
    table.add_column("would change" if check else "changed", justify="right")
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("slowest task", overflow="fold")
    for host in result.hosts.values():
        table.add_row(
            host.name,
            Text(host.state.replace("_", " "), style=STYLES[host.state]),
            str(host.tasks),
            str(len(host.changes)),
            human_seconds(host.seconds),
            Text(f"{host.slowest[0]} ({human_seconds(host.slowest[1])})" if host.slowest[0] else "-"),
        )
    return table


def _differences(host: HostResult) -> Text:
    text = Text(f"\n{host.name}\n", style="bold")
    for change in host.changes:
        text.append(f"  {change.task}\n", style="yellow")
        for line in change.diff.splitlines():
            style = {"+": "green", "-": "red"}.get(line[:1], "dim")
            text.append(f"    {line}\n", style=style)
    return text


def _failure(host: HostResult) -> Text:
    text = Text(f"\n{host.name}: ", style="bold red")
    text.append(host.failure, style="not bold")
    return text


def render_judged(judged: Sequence[Judgement]) -> RenderableType:
    """How each host stands, what failed on it, with causes and fixes, and a summary.

    Args:
        judged: One a host.
    """
    parts: list[RenderableType] = []
    for one in judged:
        if one.situation:
            parts.append(Text.assemble((f"{one.host}: ", "bold"), one.situation))
        parts.append(report.ending(one.verdict) if one.verdict else Text(one.reason, style="bold red"))
    return Group(*parts)


def render_scenarios(scenarios: list[Scenario]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    table.add_column("machine", no_wrap=True)
    table.add_column("what it proves", overflow="fold")
    for one in scenarios:
        table.add_row(one.name, one.image or "embedded cloud", Text(one.title))
    return table


def render_outcomes(outcomes: list[Outcome], not_run: list[Scenario]) -> RenderableType:
    """What came of the scenarios.

    Args:
        outcomes: Of those that were run.
        not_run: The others.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("steps", overflow="fold")
    parts: list[RenderableType] = [table]
    for one in outcomes:
        style = "green" if one.state == "passed" else "bold red"
        steps = ", ".join(f"{step} {human_seconds(seconds)}" for step, seconds in one.steps.items())
        table.add_row(one.scenario, Text(one.state, style=style), human_seconds(one.seconds), Text(steps))
        if one.failure:
            parts.append(Text(f"\n{one.scenario}\n", style="bold red").append(one.failure, style="not bold"))
    for scenario in not_run:
        why = f"pulls the image {scenario.image}: --scenario {scenario.name}"
        table.add_row(scenario.name, Text("not run", style="yellow"), "", Text(why))
    return Group(*parts)
