"""What every command shares: errors become a message and an exit code, JSON goes to standard output alone.

Nothing heavy is imported here or at the top of a command's module: `invoke --list` must be quick.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from invoke.tasks import task

from gpukiln.errors import GpukilnError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
PIPE_COLUMNS = 200  # width of tables where there is no terminal: a log must not lose half of an id
INTERRUPTED = 130


def command(**options: Any) -> Callable[[Callable[P, int | None]], Any]:
    """Declare an Invoke task.

    Args:
        options: Those of `invoke.task`, for example `help`.

    Returns:
        A decorator for a function that returns its exit code, or None for 0.
    """

    def decorate(function: Callable[P, int | None]) -> Any:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            signal.signal(signal.SIGTERM, _interrupt)
            try:
                code = function(*args, **kwargs)
            except GpukilnError as error:
                print_error(error)
                code = error.exit_code
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                code = INTERRUPTED
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = 0
            if code:
                sys.exit(code)

        return task(**options)(run)

    return decorate


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def print_error(error: GpukilnError) -> None:
    """Write an error for people.

    Args:
        error: The error.
    """
    print(f"error: {error.message}", file=sys.stderr)
    for line in error.details:
        print(f"  {line}", file=sys.stderr)
    if error.hint:
        print(f"next: {error.hint}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Write one JSON document to standard output.

    Args:
        document: Plain data.
    """
    print(json.dumps(document, indent=2))


def make_console(*, stderr: bool = False) -> Console:
    """Where tables are shown.

    Args:
        stderr: Standard error instead of standard output.
    """
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console
