"""What a person sees while long work runs: the step, how long it has taken, how long it took last time.

On a terminal the running step is one line that changes; elsewhere every step is a plain line when it starts
and when it ends. Everything goes to standard error.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status


def human_seconds(seconds: float) -> str:
    """A duration for people.

    Args:
        seconds: The duration in seconds.

    Returns:
        For example `4.2 s` or `3 min 07 s`.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class Progress:
    """Reports steps and remembers how long each took.

    Args:
        expected: Seconds that each step took last time.
        console: Where to write; standard error by default.
    """

    def __init__(self, expected: Mapping[str, float] | None = None, *, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.durations: dict[str, float] = {}
        self._expected = dict(expected or {})
        self._status: Status | None = None
        self._step = ""
        self._started = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Report a step; a failure is reported as such and passed on.

        Args:
            name: What is being done.

        Yields:
            Nothing.
        """
        self._step, self._started = name, time.monotonic()
        before = f" (last time {human_seconds(self._expected[name])})" if name in self._expected else ""
        if self.console.is_terminal:
            self._status = self.console.status(f"{escape(name)}{before}")
            self._status.start()
        else:
            self.console.print(f"[dim]..[/] {escape(name)}{before}")
        mark = "[red]failed[/]"
        try:
            yield
            mark = "[green]ok[/]"
        finally:
            took = time.monotonic() - self._started
            self.durations[name] = round(took, 1)
            if self._status:
                self._status.stop()
                self._status = None
            self.console.print(f"{mark} {escape(name)}  {human_seconds(took)}")

    def say(self, detail: str) -> None:
        """Show what the running step is doing now.

        Args:
            detail: A few words.
        """
        elapsed = human_seconds(time.monotonic() - self._started)
        if self._status:
            before = f" of about {human_seconds(self._expected[self._step])}" if self._step in self._expected else ""
            self._status.update(f"{escape(self._step)}  {elapsed}{before}  [dim]{escape(detail)}[/]")
        else:
            self.console.print(f"[dim]     {elapsed:>12}  {escape(detail)}[/]")
