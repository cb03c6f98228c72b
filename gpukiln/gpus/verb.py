"""A verb, declared once: `gpukiln gpu VERB` in a checkout and `gpukiln-gpu VERB` on a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpukiln.options import Option

# Options have the names of the verb's own declaration, which no type checker knows.
Options = SimpleNamespace
"""The typed options: an attribute for each, dashes as underscores; `command` has the words behind `--`."""


# Every verb has it.
JSON = Option("json", "print one JSON document to standard output", default=False)


@dataclass(frozen=True)
class Verb:
    """A verb.

    Args:
        name: As users type it.
        help: One sentence.
        answer: Runs the verb on this machine. Returns a frozen dataclass with `node` and `exit_code`, which
            becomes one element of `nodes` in the JSON document.
        show: Prints one element for people; given that element as plain data, the options, and `print`.
        takes_command: Name of the command behind `--` in the help; empty where the verb takes none.
        takes_over: Runs the verb on the terminal and returns the exit code; in place of `answer`, except with
            --json.
        changes: Whether it changes the machine.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    answer: Callable[[Options], Any]
    show: Callable[[dict[str, Any], Options, Callable[[str], None]], None]
    takes_command: str = ""
    takes_over: Callable[[Options], int] | None = None
    changes: bool = False
    examples: tuple[str, ...] = field(default=())

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options, --json, and the command behind `--`."""
        rest = Option("command", "the command to run", default=(), rest=True, value=self.takes_command)
        return (*self.options, JSON, rest) if self.takes_command else (*self.options, JSON)

    @property
    def schema(self) -> str:
        """Name and version of its JSON document."""
        # The version changes with every incompatible change of the document.
        return f"gpu.{self.name}/1"


@dataclass(frozen=True)
class Failure:
    """A machine without an answer.

    Args:
        node: As the user named it.
        message: What was found and what was wanted.
        details: Further lines.
        hint: The next step.
    """

    node: str
    message: str
    hint: str
    details: tuple[str, ...]
    exit_code: int


def document(verb: Verb, nodes: list[Any], failed: list[Any]) -> dict[str, Any]:
    """The document of `--json`; every machine is in one of the two lists."""
    return {"schema": verb.schema, "nodes": nodes, "failed": failed}
