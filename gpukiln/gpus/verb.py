"""What a verb is: said once, typed as `invoke gpu.VERB` in a checkout and as `gpukiln-gpu VERB` on a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpukiln.options import Option

Options = SimpleNamespace
"""What was typed: an attribute an option, dashes as underscores; `command` has what follows `--`."""


JSON = Option("json", "print one JSON document to standard output", default=False)


@dataclass(frozen=True)
class Verb:
    """One thing that can be asked or done.

    Args:
        name: As it is typed.
        help: One line.
        answer: Does it on this machine. Returns a frozen dataclass with `node` and `exit_code`, which becomes
            one element of `nodes` in the JSON document.
        show: Writes one element for people; given that element as plain data, what was typed, and `print`.
        takes_command: What follows `--`: empty for nothing, else its name in the help.
        takes_over: Does it with this terminal as its own, and returns the exit code; instead of `answer`,
            but with --json.
        changes: Whether it changes something.
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
        """Its own options, --json, and the command that follows `--`."""
        rest = Option("command", "what is run", default=(), rest=True, value=self.takes_command)
        return (*self.options, JSON, rest) if self.takes_command else (*self.options, JSON)

    @property
    def schema(self) -> str:
        """The name and version of its document."""
        return f"gpu.{self.name}/1"


@dataclass(frozen=True)
class Failure:
    """A machine of which there is no answer.

    Args:
        node: How it was named.
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
    """What `--json` prints; every machine is in one of the two lists."""
    return {"schema": verb.schema, "nodes": nodes, "failed": failed}
