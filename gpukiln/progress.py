"""The consoles for results and progress, and the progress of steps with their durations.

On a terminal the running step is one line that is redrawn. Elsewhere it prints one line when it starts, one
for each detail, and one when it ends. Progress goes to standard error.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import progress as rich_progress
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from gpukiln.units import Duration, Memory

PIPE_COLUMNS = 10_000  # without a terminal: wider than any row
HEARTBEAT_S = 60  # seconds of silence after which a plain log says that the work goes on
METER_S = 0.2  # seconds between two updates of a meter


class PlainConsole(Console):
    """A console that never truncates: without a terminal each row is one line of any length.

    Args:
        stderr: Standard error instead of standard output.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        # highlight: Rich would colour numbers and paths in results.
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal:
            self.width = PIPE_COLUMNS

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`; without a terminal the spaces that pad a table's rows are left out."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        # Rich pads each row of a table to its width, which a log or a pipe would keep as trailing spaces.
        with self.capture() as written:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip(' ')}\n" for line in written.get().splitlines()))
        self.file.flush()

    def print_text(self, text: str) -> None:
        """Print a text as it is, without markup and line breaks."""
        self.print(text, markup=False, soft_wrap=True)

    def show(self, *parts: RenderableType) -> None:
        """Write texts as they are, and what else Rich renders; a line of text is not wrapped."""
        for part in parts:
            if isinstance(part, str):
                self.print_text(part)
            else:
                self.print(part, soft_wrap=isinstance(part, Text))

    def on_broken_pipe(self) -> None:
        """Raise instead of Rich's exit with code 1: commands end with 0 when the reader closes the pipe."""
        raise BrokenPipeError


class Progress:
    """Reports steps and remembers how long each took.

    Args:
        expected: Seconds that each step took last time.
        console: Where to print; standard error by default.
    """

    def __init__(
        self, expected: Mapping[str, float] | None = None, *, console: Console | None = None
    ) -> None:
        self.console = console or PlainConsole(stderr=True)
        self.durations: dict[str, float] = {}
        self._expected = dict(expected or {})
        self._bar: rich_progress.Progress | None = None
        self._detail, self._failed = "", False
        self._started = self._spoke = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Report a step; an exception is reported as its failure and raised.

        Yields:
            Nothing.
        """
        self._detail, self._started, self._spoke = "", time.monotonic(), time.monotonic()
        before = f" (last time {Duration(self._expected[name]).shown})" if name in self._expected else ""
        mark, ended, self._failed = "[red]failed[/]", threading.Event(), False
        if self.console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.SpinnerColumn(),
                rich_progress.TextColumn("{task.fields[title]}"),
                rich_progress.TimeElapsedColumn(),
                # the detail is truncated to the line, not the step's name
                rich_progress.TextColumn(
                    "[dim]{task.description}", table_column=Column(ratio=1, no_wrap=True)
                ),
                console=self.console,
                transient=True,
                expand=True,
            )
            self._bar.add_task("", title=f"{escape(name)}{before}")
            self._bar.start()
        else:
            self.console.print(f"[dim]..[/] {escape(name)}{before}")
            # Some CI systems end a job that prints nothing; on a terminal the spinner moves.
            threading.Thread(target=self._heartbeat, args=(ended,), daemon=True).start()
        try:
            yield
            mark = mark if self._failed else "[green]ok[/]"
        finally:
            took = time.monotonic() - self._started
            self.durations[name] = round(took, 1)
            ended.set()
            if self._bar:
                self._bar.stop()
                self._bar = None
            self.console.print(f"{mark} {escape(name)}  {Duration(took).shown}")

    def fail(self) -> None:
        """Report the running step as failed, though its block ends without an exception."""
        self._failed = True

    def say(self, detail: str) -> None:
        """Show what the running step is doing now.

        Args:
            detail: A few words about the activity.
        """
        self._detail = detail
        if self._bar:
            # Each step has a bar of its own with one task, whose id is 0.
            self._bar.update(rich_progress.TaskID(0), description=escape(detail))
        else:
            self._print_detail(detail)

    def show_activity(self, detail: str) -> None:
        """As `say`, for short activities: a plain log prints one only if it lasts until a heartbeat.

        Args:
            detail: A few words about the activity.
        """
        if self._bar:
            self.say(detail)
        self._detail = detail

    def show(self, line: Text) -> None:
        """Print one line above the running step; truncated at a terminal's edge, complete in a log."""
        self._spoke = time.monotonic()
        if self.console.is_terminal:
            self.console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self.console.print(line, soft_wrap=True)

    def _print_detail(self, text: str) -> None:
        self._spoke = time.monotonic()
        elapsed = Duration(self._spoke - self._started).shown
        self.console.print(f"[dim]     {elapsed:>12}  {escape(text)}[/]")

    def _heartbeat(self, ended: threading.Event) -> None:
        while not ended.wait(1):
            if time.monotonic() - self._spoke > HEARTBEAT_S:
                self._print_detail(f"still: {self._detail}")


class Meter:
    """Shows in the running step how many bytes were moved, the rate, and the remaining time.

    Args:
        total: Bytes to move.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._moved = progress, max(total, 1), 0
        self._started, self._shown = time.monotonic(), 0.0
        # Copying and hashing threads report to one meter.
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count further bytes; any thread may call it."""
        with self._lock:
            self._reach(self._moved + count)

    def reach(self, moved: int) -> None:
        """Set the number of bytes moved so far."""
        with self._lock:
            self._reach(moved)

    def _reach(self, moved: int) -> None:
        self._moved = moved
        now = time.monotonic()
        if now - self._shown >= METER_S:
            self._shown = now
            self._progress.show_activity(self.text(now - self._started))

    def text(self, seconds: float) -> str:
        """The meter's text after some seconds.

        >>> meter = Meter(Progress(), 2 << 30)
        >>> meter.reach(512 << 20)
        >>> meter.text(4)
        '512 MiB of 2 GiB, 128 MiB/s, 12s left'
        """
        rate = self._moved / seconds if seconds > 0 else 0.0
        left = f", {Duration((self._total - self._moved) / rate).shown} left" if rate else ""
        return f"{Memory(self._moved).shown} of {Memory(self._total).shown}, {Memory(rate).shown}/s{left}"
