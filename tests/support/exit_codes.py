"""The exit code of a command that a test calls as a function."""

from collections.abc import Callable
from typing import Any


def code_of(command: Callable[..., object], *arguments: Any, **options: Any) -> Any:
    """Call a command; 0 where it returns."""
    try:
        command(*arguments, **options)
    except SystemExit as error:
        return error.code
    return 0
