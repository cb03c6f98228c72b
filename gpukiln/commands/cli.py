"""What every command shares: errors become a message and an exit code, JSON goes to standard output alone.

Nothing heavy is imported here or at the top of a command's module: `invoke --list` must be quick.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

from invoke.tasks import task

from gpukiln.errors import GpukilnError, UnavailableError

P = ParamSpec("P")
INTERRUPTED = 130
_OS_HINTS = {
    errno.ENOSPC: "`invoke cloud.clean --images` removes images; $GPUKILN_HOME can be another disk",
    errno.EACCES: "run as root, or let $GPUKILN_HOME name a folder of your own",
}


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
                sys.stdout.flush()
            except GpukilnError as error:
                print_error(error)
                code = error.exit_code
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                code = INTERRUPTED
            except BrokenPipeError:
                _silence_stdout()
                code = 0
            except OSError as error:
                what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                print_error(UnavailableError(what, hint=_OS_HINTS.get(error.errno or 0, "")))
                code = UnavailableError.exit_code
                _silence_stdout()
            if code:
                sys.exit(code)

        return task(**options)(run)

    return decorate


def _silence_stdout() -> None:
    """What is still buffered for an output that is closed or full must not fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    for note in getattr(error, "__notes__", ()):
        print(f"also: {note}", file=sys.stderr)
    if error.hint:
        print(f"next: {error.hint}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Write one JSON document to standard output.

    Args:
        document: Plain data.
    """
    print(json.dumps(document, indent=2))
