"""Standard output and standard error, which may be closed, full, or read by nobody any more."""

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
    """What was to be written to standard output is lost."""


class _Output:
    """Standard output, whose errors name it: those of the system name no file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with _named():
            return int(self._file.write(text))

    def flush(self) -> None:
        with _named():
            self._file.flush()


class _Errors(_Output):
    """Standard error: what can't be told does not stop the work."""

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
    """Standard output for people: commands are named as they are typed."""

    def write(self, text: str) -> int:
        return super().write(as_typed(text))


_programs = ["invoke"]


@contextlib.contextmanager
def program(name: str) -> Iterator[None]:
    """The program by which commands are typed, which hints name."""
    _programs.append(name)
    try:
        yield
    finally:
        _programs.pop()


def as_typed(text: str) -> str:
    """A text in which commands are named as in a checkout, with their names as they are typed here."""
    if _programs[-1] == "invoke":
        return text
    return re.sub(r"\binvoke (?:([a-z0-9]+)\.(?=[a-z])|(?=--list))", _named_here, text)


def _named_here(found: re.Match[str]) -> str:
    return f"{_programs[-1]} {found[1]} " if found[1] else f"{_programs[-1]} "


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
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
    # Python has None for what is closed, and print() would take standard output for it.
    sys.stderr = _Errors(before or Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
    try:
        yield
    finally:
        sys.stderr = before


@contextlib.contextmanager
def output_named() -> Iterator[None]:
    """Standard output whose errors say what they are.

    Yields:
        Nothing.

    Raises:
        OutputError: Standard output is closed, or could not be written.
        BrokenPipeError: Who read it has ended.
    """
    if (before := sys.stdout) is None:
        raise OutputError("standard output is closed", hint="`>/dev/null` throws away what is not wanted")
    sys.stdout = _Output(before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before


def forget_output() -> None:
    """What is still buffered for an output that is full or read by nobody must not fail again."""
    if sys.stdout is not None:
        _forget(sys.stdout)


def _forget(file: Any) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())
