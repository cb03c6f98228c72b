"""Shows a verdict on a terminal: a table grouped by layer, the fixes, a summary."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.findings import Outcome
from gpukiln.progress import Progress
from gpukiln.reports.tables import Rows
from gpukiln.verify.checks import LAYERS
from gpukiln.verify.suite import GATHERING
from gpukiln.verify.verdict import CheckResult, Verdict, counts_text

MARKS: dict[Outcome, tuple[str, str]] = {
    "passed": ("passed", "green"),
    "failed": ("FAILED", "bold red"),
    "not_run": ("not run", "yellow"),
    "not_reached": ("not reached", "magenta"),
}

SIMULATED = "SIMULATED GPUS, NOT VALID FOR A RELEASE"
LIVE_CHARS = 110  # of a result that is shown while others run; the end has the whole text of a failure


def banner(verdict: Verdict) -> Text:
    """The heading of a verdict on simulated GPUs; empty for another one."""
    if not verdict.simulated:
        return Text()
    said = f" {SIMULATED}: {verdict.target} has simulated GPUs. No release accepts this verdict. "
    return Text.assemble("\n", (said, "bold white on dark_magenta"), "\n")


def state(verdict: Verdict) -> str:
    """One word: `passed`, `failed`, or `incomplete` where nothing failed, but checks were not reached."""
    if verdict.passed:
        return "passed"
    return "incomplete" if verdict.counts["not_reached"] and not verdict.failures else "failed"


def summary(verdict: Verdict) -> str:
    """One line: the verdict with the count of each outcome."""
    word = state(verdict)
    return (
        f"{verdict.target} ({verdict.profile}): {word if verdict.passed else word.upper()} - "
        f"{counts_text(verdict.checks)} in {verdict.duration_s:.0f} s"
        f"{' - ' + SIMULATED if verdict.simulated else ''}"
    )


def table(verdict: Verdict) -> Rows:
    """All checks, grouped by layer, each layer headed by its counts."""
    shown = Rows("check", "result", "s", "reason", first=2, folds=True, right=("s",))
    for layer, title, counts, checks in verdict.layers():
        some = ", ".join(f"{n} {o.replace('_', ' ')}" for o, n in counts.items() if n)
        shown.add(Text(layer, style="bold"), "", "", Text(f"{title} ({some})", style="dim"))
        for check in checks:
            seconds = f"{check.duration_s:.1f}"
            shown.add(f"  {check.id}", Text(*MARKS[check.outcome]), seconds, _result_text(check))
    return shown


def fixes(verdict: Verdict) -> Text:
    """The failures with their fixes, the most urgent first; empty where nothing failed."""
    shown = Text()
    for reason, (first, *others) in verdict.failures_by_reason().items():
        shown.append(f"\n{first.id}: ", style="bold red")
        shown.append(f"{first.title}\n")
        shown.append(f"  found: {reason.removeprefix('found ')}\n")
        for cause in first.causes:
            shown.append(f"  cause? {cause}\n")
        shown.append(f"  fix:   {first.remedy}\n")
        if others:
            shown.append(f"  also:  {', '.join(check.id for check in others)}\n")
    return shown


class LiveReport:
    """Shows each result at once, below the title of its layer: `run_suite` calls the methods.

    Args:
        progress: Whose step is running.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._layer = ""

    def start(self, what: str) -> None:
        """Show the current activity.

        Args:
            what: As `run_suite` gives it to `on_start`.
        """
        # Gathering takes most of the time, so that it gets a line of its own.
        if what == GATHERING:
            self.progress.say(what)
        else:
            self.progress.show_activity(what)

    def check(self, result: CheckResult) -> None:
        """Show a result.

        Args:
            result: As `run_suite` gives it to `on_check`.
        """
        if result.layer != self._layer:
            self._layer = result.layer
            title = LAYERS.get(result.layer, "")
            self.progress.show(Text.assemble("  ", (result.layer, "bold"), ("  " + title, "dim")))
        word, style = MARKS[result.outcome]
        says = _result_text(result)
        # A longer line would wrap and hide the table.
        if len(says) > LIVE_CHARS:
            says = says[: LIVE_CHARS - 3] + "..."
        self.progress.show(
            Text.assemble(
                (f"    {word:11}", style),
                f" {result.duration_s:6.1f} s  {result.id:32} ",
                (says, "" if result.outcome == "failed" else "dim"),
            )
        )


def _result_text(check: CheckResult) -> str:
    if check.outcome != "passed":
        return check.reason
    return f"{check.title}: {check.reason}" if check.reason else check.title


def ending(verdict: Verdict) -> RenderableType:
    """Fixes and summary, for the end of a run whose checks `LiveReport` showed."""
    style = "bold red" if not verdict.passed else "bold magenta" if verdict.simulated else "bold green"
    return Group(fixes(verdict), banner(verdict), Text(summary(verdict), style=style))


def render(verdict: Verdict) -> RenderableType:
    """The whole terminal report: table, fixes, summary."""
    return Group(banner(verdict), table(verdict), ending(verdict))
