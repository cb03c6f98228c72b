"""Commands that a test calls or types, and their exit codes."""

import sys
from typing import Any, NoReturn

from gpukiln.cli.command import Command, exit_code_of
from gpukiln.cli.main import INVOKE, main
from gpukiln.options import options_of


def code_of(command: type[Command], *words: str, **options: Any) -> int:
    """The exit code of a command with these options; `words` stand without an option's name."""
    first = [one.name for one in options_of(command) if one.first]
    return exit_code_of(command(**dict(zip(first, words, strict=False)), **options).run)


def invoke(words: list[str]) -> NoReturn:
    """Type a command in a checkout; ends as the program does."""
    sys.exit(main(words, INVOKE))
