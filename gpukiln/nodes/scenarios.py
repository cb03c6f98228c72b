"""Runs Molecule's scenarios: each starts a machine, converges it twice, verifies it and removes it."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln import programs
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.errors import UnavailableError
from gpukiln.files import open_private
from gpukiln.findings import FinalOutcome
from gpukiln.progress import Progress
from gpukiln.redact import LogRedactor
from gpukiln.typed import unknown

FOLDER = ROOT / "molecule"
# Molecule's log lines without borders and colours (see `_molecule`).
STEP = re.compile(r"INFO +\[\S+ > (\w+)\] Executing$")
TASK = re.compile(r"TASK \[(.*)\] \*+$")
FAILURE_LINES = 12
REPORT_INTERVAL_S = 15.0  # one task in so long: reporting each would repeat Molecule's whole log
END_WAIT_S = 30.0  # for Molecule to end after a signal


@dataclass(frozen=True)
class Scenario:
    """One scenario.

    Args:
        folder: Holds its molecule.yml; its name is the scenario's.
        title: What it verifies: the comment at the head of its molecule.yml.
        image: The container image of its machine, which Docker pulls; empty for the embedded cloud's.
    """

    folder: Path
    title: str
    image: str

    @property
    def name(self) -> str:
        """What `--scenario` takes."""
        return self.folder.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "title": self.title, "image": self.image}


@dataclass
class ScenarioResult:
    """What came of a scenario.

    Args:
        scenario: Its name.
        state: Whether every step of it succeeded.
        seconds: From its first step to the end of the last.
        steps: Seconds of each step, in their order.
        failure: The end of what the failing step wrote.
        log: The file that has all of it.
    """

    scenario: str
    state: FinalOutcome = "failed"
    seconds: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    log: str = ""


def load_scenarios(folder: Path = FOLDER) -> dict[str, Scenario]:
    """Every scenario, those that need nothing pulled first."""
    scenarios = [_scenario(file) for file in sorted(folder.glob("*/molecule.yml"))]
    if not scenarios:
        raise UnavailableError(
            f"there is no scenario in {folder}", hint="node.test is for a checkout of gpukiln"
        )
    return {
        scenario.name: scenario for scenario in sorted(scenarios, key=lambda scenario: bool(scenario.image))
    }


def _scenario(file: Path) -> Scenario:
    text = file.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in text if line.startswith("#")]
    [platform] = read_yaml(file)["platforms"]
    return Scenario(file.parent, " ".join(comment), platform.get("image", ""))


def choose_scenarios(names: list[str], folder: Path = FOLDER) -> tuple[list[Scenario], list[Scenario]]:
    """Which scenarios to run.

    Args:
        names: Those asked for; empty for all that need no image pulled.

    Returns:
        Those to run, and those that are not run unless they are asked for.

    Raises:
        UsageError: There is no such scenario.
    """
    known = load_scenarios(folder)
    for name in names:
        if name not in known:
            raise unknown("scenario", name, known)
    if names:
        return [known[name] for name in dict.fromkeys(names)], []
    return [scenario for scenario in known.values() if not scenario.image], [
        scenario for scenario in known.values() if scenario.image
    ]


def run_scenario(scenario: Scenario, log: Path, say: Callable[[str], None]) -> ScenarioResult:
    """Run one to its end; whatever way it ends, its machine is removed.

    Args:
        log: File that gets everything that Molecule writes.

    Returns:
        What came of it.

    Raises:
        UnavailableError: Molecule is missing.
    """
    outcome, started, redacted = ScenarioResult(scenario.name, log=str(log)), time.monotonic(), LogRedactor()
    try:
        with open_private(log, "w") as file:
            follow = _StepTimes(outcome, lambda line: file.write(redacted(line)), say)
            status = _molecule("test", scenario, follow)
            follow.end()
    except BaseException:  # Ctrl-C; at its own end Molecule removes the machine itself
        say("removing its machine")
        with open_private(log, "a") as file:
            # `molecule test` destroys the machine only if it reaches its last step.
            _molecule("destroy", scenario, lambda line: print(redacted(line), end="", file=file))
        raise
    outcome.seconds = round(time.monotonic() - started, 1)
    if status == 0:
        outcome.state = "passed"
    else:
        outcome.failure = _failure(log.read_text(encoding="utf-8").splitlines())
    return outcome


def run_scenarios(scenarios: Sequence[Scenario], folder: Path, progress: Progress) -> list[ScenarioResult]:
    """Run scenarios one after the other; each has a log of its name in the folder."""
    results = []
    for scenario in scenarios:
        with progress.step(scenario.name):
            results.append(run_scenario(scenario, folder / f"{scenario.name}.log", progress.say))
            if results[-1].state == "failed":
                progress.fail()
    return results


def _molecule(command: str, scenario: Scenario, each: Callable[[str], None]) -> int:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        # Plain lines, which STEP and TASK match.
        "MOLECULE_COMMAND_BORDERS": "false",
        "NO_COLOR": "1",
    }
    return programs.stream(
        ["molecule", command, "--scenario-name", scenario.name],
        each,
        folder=scenario.folder.parents[1],
        environment=environment,
        # Ansible needs a moment to end its workers, which have sessions of their own and would outlive it.
        ends=((signal.SIGTERM, END_WAIT_S), (signal.SIGKILL, END_WAIT_S)),
    )


class _StepTimes:
    """Reads Molecule's lines: notes how long each step took, and says what it does."""

    def __init__(
        self, outcome: ScenarioResult, write: Callable[[str], Any], say: Callable[[str], None]
    ) -> None:
        self._outcome, self._write, self._say = outcome, write, say
        self._step = ""
        self._began = self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        self._write(line)
        now = time.monotonic()
        if line_match := STEP.search(line):
            self.end()
            self._step, self._began, self._said = line_match[1], now, now
            self._say(line_match[1])
        elif (line_match := TASK.search(line)) and now - self._said > REPORT_INTERVAL_S:
            self._said = now
            self._say(f"{self._step}: {line_match[1]}")

    def end(self) -> None:
        """A step has ended."""
        if self._step:
            took = self._outcome.steps.get(self._step, 0.0) + time.monotonic() - self._began
            self._outcome.steps[self._step] = round(took, 1)


def _failure(lines: list[str]) -> str:
    """The fatal task and what it said, or the end of the log."""
    # Ansible prints the failing task's result on a line of its own; the end of the log is Molecule's
    # clean-up.
    fatal = [number for number, line in enumerate(lines) if line.startswith(("fatal: ", "failed: "))]
    at = fatal[-1] if fatal else len(lines) - FAILURE_LINES
    return "\n".join(lines[max(at, 0) :][:FAILURE_LINES])
