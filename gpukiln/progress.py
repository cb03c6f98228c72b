"""What a person sees: results; and of long work the step, how long it takes, how long it took last time.

On a terminal the running step is one line that changes; elsewhere every step is a plain line when it starts
and when it ends, and so is what it does meanwhile. Progress goes to standard error.
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

PIPE_COLUMNS = 10_000  # where no terminal is: more than a row has
HEARTBEAT_S = 60  # seconds of silence after which a plain log says that the work goes on
METER_S = 0.2  # seconds between two looks of a meter


class PlainConsole(Console):
    """A console that cuts nothing: where there is no terminal, a row is a line, however long.

    Args:
        stderr: Standard error instead of standard output.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal:
            self.width = PIPE_COLUMNS

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`; without the spaces that fill a table's rows where nobody sees them."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as written:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip(' ')}\n" for line in written.get().splitlines()))
        self.file.flush()

    def tell(self, text: str) -> None:
        """Write a text as it is."""
        self.print(text, markup=False, soft_wrap=True)

    def show(self, *parts: RenderableType) -> None:
        """Write texts as they are, and what else Rich renders; a line of text is not wrapped."""
        for part in parts:
            if isinstance(part, str):
                self.tell(part)
            else:
                self.print(part, soft_wrap=isinstance(part, Text))

    def on_broken_pipe(self) -> None:
        """Leave it to the command, which ends well: Rich would end with code 1."""
        raise BrokenPipeError


class Progress:
    """Reports steps and remembers how long each took.

    Args:
        expected: Seconds that each step took last time.
        console: Where to write; standard error by default.
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
        """Report a step; a failure is reported as such and passed on.

        Args:
            name: What is being done.

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
                # of what does not fit a line, what is being done is cut, and not the step's name
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
        """The running step did not reach its aim, though it comes to its end."""
        self._failed = True

    def say(self, detail: str) -> None:
        """Show what the running step is doing now.

        Args:
            detail: A few words.
        """
        self._detail = detail
        if self._bar:
            self._bar.update(rich_progress.TaskID(0), description=escape(detail))
        else:
            self._print_detail(detail)

    def doing(self, detail: str) -> None:
        """As `say`, for what is over at once: a plain log tells it only when it lasts.

        Args:
            detail: A few words.
        """
        if self._bar:
            self.say(detail)
        self._detail = detail

    def show(self, line: Text) -> None:
        """Leave one line above the running step; cut at a terminal's edge, whole in a log.

        Args:
            line: What is to stay.
        """
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
    """How much of an amount was moved, how fast, and how long it still takes: the running step shows it.

    Args:
        total: Bytes that are to be moved.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._moved = progress, max(total, 1), 0
        self._started, self._shown = time.monotonic(), 0.0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many bytes more; any thread may tell it."""
        with self._lock:
            self._reach(self._moved + count)

    def reach(self, moved: int) -> None:
        """So many bytes in all."""
        with self._lock:
            self._reach(moved)

    def _reach(self, moved: int) -> None:
        self._moved = moved
        now = time.monotonic()
        if now - self._shown >= METER_S:
            self._shown = now
            self._progress.doing(self.text(now - self._started))

    def text(self, seconds: float) -> str:
        """For example `512 MiB of 2 GiB, 128 MiB/s, 12s left`."""
        rate = self._moved / seconds if seconds > 0 else 0.0
        left = f", {Duration((self._total - self._moved) / rate).shown} left" if rate else ""
        return f"{Memory(self._moved).shown} of {Memory(self._total).shown}, {Memory(rate).shown}/s{left}"
