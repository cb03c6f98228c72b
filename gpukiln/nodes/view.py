"""Shows what a run did: one row a host or a scenario, and the tasks that took longest."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.nodes.results import HostResult, RunResult, State
from gpukiln.nodes.runs import OldRun
from gpukiln.nodes.scenarios import Scenario, ScenarioResult
from gpukiln.reports.tables import Rows
from gpukiln.units import Duration
from gpukiln.verify import report
from gpukiln.verify.verification import Verification

# The order is that of the summary line: the good states first.
STYLES: dict[State, str] = {
    "ok": "green",
    "changed": "yellow",
    "failed": "bold red",
    "unreachable": "bold red",
    "not_reached": "magenta",
}
# The log of the run has the times of all tasks.
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
    # In check mode most tasks do not do their work, so that their time says nothing.
    if slowest and not check:
        rows = Rows("s", "slowest tasks", first=2, folds=True, right=("s",))
        for task, seconds in slowest:
            rows.add(f"{seconds:.1f}", task)
        parts.append(rows)
    parts.append(Text(summary(result), style="bold"))
    return Group(*parts)


def _hosts(result: RunResult, *, check: bool) -> Rows:
    numbers = ("tasks", "would change" if check else "changed", "took")
    rows = Rows("host", "state", *numbers, "slowest task", first=2, folds=True, right=numbers)
    for host in result.hosts.values():
        rows.add(
            host.name,
            Text(host.state.replace("_", " "), style=STYLES[host.state]),
            str(host.tasks),
            str(len(host.changes)),
            Duration(host.seconds).shown,
            f"{host.slowest[0]} ({Duration(host.slowest[1]).shown})" if host.slowest[0] else "-",
        )
    return rows


def _differences(host: HostResult) -> Text:
    text = Text(f"\n{host.name}\n", style="bold")
    for change in host.changes:
        text.append(f"  {change.task}\n", style="yellow")
        # As a unified diff is coloured elsewhere; Ansible's own diff has no colours here.
        for line in change.diff.splitlines():
            style = {"+": "green", "-": "red"}.get(line[:1], "dim")
            text.append(f"    {line}\n", style=style)
    return text


def _failure(host: HostResult) -> Text:
    text = Text(f"\n{host.name}: ", style="bold red")
    text.append(host.failure, style="not bold")
    return text


def render_verified(verified: Sequence[Verification]) -> RenderableType:
    """How each host stands, what failed on it, with causes and fixes, and a summary.

    Args:
        verified: One a host.
    """
    parts: list[RenderableType] = []
    for verification in verified:
        if said := verification.diagnosis:
            parts.append(Text.assemble((f"{verification.target}: ", "bold"), said))
        parts.append(
            report.ending(verification.verdict)
            if verification.verdict
            else Text(verification.reason, style="bold red")
        )
    return Group(*parts)


def verification_rows(verifications: Iterable[Verification]) -> list[dict[str, Any]]:
    """Each host as a document has it."""
    return [
        {
            "host": result.target,
            **{name: getattr(result, name) for name in ("reason", "diagnosis", "verdict")},
        }
        for result in verifications
    ]


def render_runs(runs: Sequence[OldRun]) -> RenderableType:
    """What earlier runs left, and what is to become of it."""
    styles = {"remove": "yellow", "removed": "green", "failed": "bold red"}
    rows = Rows("", "kind", "ended", "MiB", "reason", "folder", first=3, right=("MiB",))
    for run in runs:
        action = Text(run.action, style=styles.get(run.action, ""))
        rows.add(
            action, run.kind, f"{run.ended:%Y-%m-%d %H:%M}", f"{run.mib:.1f}", run.reason, str(run.folder)
        )
    return rows


def render_scenarios(scenarios: list[Scenario]) -> RenderableType:
    rows = Rows("scenario", "machine", "what it verifies", first=2, folds=True)
    for scenario in scenarios:
        rows.add(scenario.name, scenario.image or "embedded cloud", scenario.title)
    return rows


def render_outcomes(outcomes: list[ScenarioResult], not_run: list[Scenario]) -> RenderableType:
    """What came of the scenarios.

    Args:
        outcomes: Of those that were run.
        not_run: The others.
    """
    rows = Rows("scenario", "state", "took", "steps", first=2, folds=True, right=("took",))
    parts: list[RenderableType] = [rows]
    for outcome in outcomes:
        style = "green" if outcome.state == "passed" else "bold red"
        steps = ", ".join(f"{step} {Duration(seconds).shown}" for step, seconds in outcome.steps.items())
        rows.add(outcome.scenario, Text(outcome.state, style=style), Duration(outcome.seconds).shown, steps)
        if outcome.failure:
            parts.append(
                Text(f"\n{outcome.scenario}\n", style="bold red").append(outcome.failure, style="not bold")
            )
    for scenario in not_run:
        # A scenario whose image must be pulled runs only when it is named.
        why = f"pulls the image {scenario.image}: --scenario {scenario.name}"
        rows.add(scenario.name, Text("not run", style="yellow"), "", why)
    return Group(*parts)
