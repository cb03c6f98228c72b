"""Standard output and standard error that may be closed, full, or a pipe whose reader has ended."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpukiln.errors import UnavailableError


class OutputError(UnavailableError):
    """Standard output can't be written, so that a result is lost."""


class _Output:
    """Standard output whose errors name it: an OSError of a stream has no file name."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        # Rich asks the stream for isatty, encoding and fileno.
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with _named():
            return int(self._file.write(text))

    def flush(self) -> None:
        with _named():
            self._file.flush()


class _Errors(_Output):
    """Standard error whose failures do not stop the command: its work is worth more than a notice."""

    def write(self, text: str) -> int:
        try:
            self._file.write(as_typed(text))
        except OSError:
            _forget(self._file)
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            _forget(self._file)


class Results(_Output):
    """Standard output for people: hints name commands as they are typed."""

    def write(self, text: str) -> int:
        return super().write(as_typed(text))


_programs = [
    "invoke"
]  # hints in the source name commands as in a checkout; the last is the program that runs


@contextlib.contextmanager
def program(name: str) -> Iterator[None]:
    """The program that hints name."""
    _programs.append(name)
    try:
        yield
    finally:
        _programs.pop()


def as_typed(text: str) -> str:
    """A text whose hints name commands as they are typed.

    >>> with program("gpukiln"):
    ...     as_typed("`invoke ami.build --region us-west-2` builds it")
    '`gpukiln ami build --region us-west-2` builds it'
    >>> as_typed("invoke --list")
    'invoke --list'
    """
    if _programs[-1] == "invoke":
        return text
    # `invoke noun.verb`, and `invoke --list`; the word alone may be text about Invoke.
    return re.sub(r"\binvoke (?:([a-z0-9]+)\.(?=[a-z])|(?=--list))", _named_here, text)


def _named_here(match: re.Match[str]) -> str:
    return f"{_programs[-1]} {match[1]} " if match[1] else f"{_programs[-1]} "


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    # An OSError, too, but no failure: exit_code_of ends quietly.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"standard output can't be written: {error.strerror}", hint="send it to another file or disk"
        ) from error


@contextlib.contextmanager
def errors_anywhere() -> Iterator[None]:
    """Standard error that never fails."""
    before = sys.stderr
    # sys.stderr is None where file descriptor 2 is closed at the start (Python's documentation of sys), and
    # print(file=None) writes to standard output.
    sys.stderr = _Errors(before or Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
    try:
        yield
    finally:
        sys.stderr = before


@contextlib.contextmanager
def output_named() -> Iterator[None]:
    """Standard output that raises errors of gpukiln.

    Yields:
        Nothing.

    Raises:
        OutputError: Standard output is closed, or can't be written.
        BrokenPipeError: The reader of the pipe has ended.
    """
    if (before := sys.stdout) is None:
        raise OutputError(
            "standard output is closed", hint="`>/dev/null` discards a result that is not needed"
        )
    sys.stdout = _Output(before)
    try:
        yield
        # Here, while the error can still be reported: at exit Python would print a traceback and exit with
        # 120 (its documentation of sys.exit).
        sys.stdout.flush()
    finally:
        sys.stdout = before


def forget_output() -> None:
    """Discard what is still buffered: Python flushes it at exit, and would fail again with a traceback."""
    if sys.stdout is not None:
        _forget(sys.stdout)


def _forget(file: Any) -> None:
    # The recipe of Python's documentation for SIGPIPE (library/signal, "Note on SIGPIPE").
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())
