"""Options of a command: declared once, as fields of a frozen dataclass or as a list, and read by argparse.

Nodes run this too (`gpukiln-gpu`): Python 3.9, the standard library.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.units import whole

NARROW = 30  # columns: a text that would have fewer stands below its name
Complete = Callable[[Sequence["Option"], Mapping[str, Any]], "dict[str, Any]"]
MUCH_LESS = 0.1  # of likeness than the nearest name's: no suggestion beside it


@dataclass(frozen=True)
class Option:
    """An option.

    Args:
        name: As an attribute; typed as --name.
        default: A text, a number, False for a flag, or () for what may be given several times.
        letter: Of a short form, for example n.
        first: Whether it may also stand without its name behind the command.
        several: Whether all words behind the command are its values then, joined by commas.
        required: Whether the command needs it.
        rest: Whether it is the command that follows `--`, and nothing else.
        value: What stands for its value in the help.
        also: Another spelling, without dashes.
        setting: Of a project, which is its value where it is not typed (gpukiln/cli/settings.py).
    """

    name: str
    help: str
    default: Any = ""
    letter: str = ""
    first: bool = False
    several: bool = False
    required: bool = False
    rest: bool = False
    value: str = ""
    also: str = ""
    setting: str = ""

    @property
    def flag(self) -> str:
        """How it is typed."""
        return flag(self.name)

    @property
    def flags(self) -> list[str]:
        """Every way to type it."""
        return [f"-{self.letter}"] * bool(self.letter) + [self.flag] + [f"--{self.also}"] * bool(self.also)

    @property
    def placeholder(self) -> str:
        """What stands for its value in the help; empty for a flag."""
        if self.default is False:
            return ""
        return self.value or ("NUMBER" if type(self.default) is int else self.flag[2:].upper())

    @property
    def described(self) -> str:
        """Its help, with its default where that is none of the obvious ones."""
        known = not self.default or "default" in self.help
        return self.help if known else f"{self.help} (default: {self.default})"

    @property
    def shown(self) -> str:
        """How it is typed, with its value."""
        return f"{', '.join(self.flags)} {self.placeholder}".rstrip()


def flag(name: str) -> str:
    """How an option is typed; a name that Python has for itself ends in a dash."""
    return f"--{name.strip('_').replace('_', '-')}"


def option(help: str, default: Any = "", **more: Any) -> Any:
    """A field of a dataclass that is an option; the arguments are those of `Option`."""
    return field(default=default, metadata={"help": help, **more})


def options_of(kind: type) -> tuple[Option, ...]:
    """The options that a dataclass declares: its own first, then those of each group that it has."""
    declared = {one.name: one for one in fields(kind)}
    names = [name for group in kind.__mro__ for name in vars(group).get("__annotations__", ())]
    return tuple(
        Option(name, default=declared[name].default, **declared[name].metadata)
        for name in dict.fromkeys(names)
        if name in declared
    )


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they mean; a line each where no terminal is, and never narrower than legible."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    indent = 5 + max(len(name) for name, _ in rows)
    beside = width - indent >= NARROW
    if not beside:
        indent = 6
    lines: list[str] = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(width - indent - 1, NARROW))
        first = f"  {name:{indent - 2}}{wrapped.pop(0) if wrapped else ''}" if beside else f"  {name}"
        lines += [first.rstrip(), *(f"{'':{indent}}{line}" for line in wrapped)]
    return "\n".join(lines) + "\n"


def usage(command: str, options: Sequence[Option]) -> str:
    """One line that says how a command is typed."""
    words = [_word(one) for one in options if one.first]
    if any(not one.rest for one in options):
        words.append("[--OPTION...]")
    words += [f"[-- {one.placeholder}...]" for one in options if one.rest]
    return " ".join([command, *words])


def _word(one: Option) -> str:
    word = one.flag[2:].upper() + "..." * one.several
    return word if one.required else f"[{word}]"


def add_to(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Teach a parser options; it leaves out of its answer what was not typed."""
    for one in options:
        more: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS}
        if one.default is False:
            more["action"] = "store_true"
        else:
            more["action"] = "append" if isinstance(one.default, tuple) else _Once
        parser.add_argument(*one.flags, **more)


class _Once(argparse.Action):
    """An option that has one value: a second would take the first one's place in silence."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if hasattr(namespace, self.dest):
            raise UsageError(
                f"{option_string} is given twice", hint="a list of values is separated by commas"
            )
        setattr(namespace, self.dest, values)


def read(
    command: str, options: Sequence[Option], words: Sequence[str], complete: Complete | None = None
) -> dict[str, Any]:
    """What was typed behind a command.

    Args:
        command: With its program, for example "gpukiln ami build".
        complete: Adds what is not typed, before what is required is looked for.

    Returns:
        Values by the option's name; an option that was not typed is not in it.

    Raises:
        UsageError: It is not understood.
    """
    _, _, name = command.partition(" ")
    see = f"`{command} -h` shows what it takes"
    at = words.index("--") if "--" in words else len(words)
    rest = [one for one in options if one.rest]
    if at < len(words) and not rest:
        raise UsageError(f"{name} takes no command, and -- {' '.join(words[at + 1 :])} is given")
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_to(parser, options)
    try:
        namespace, others = parser.parse_known_args(list(words[:at]))
    except argparse.ArgumentError as error:
        flags = str(error.argument_name).split("/")
        typed_as = next((one for one in flags if one in words[:at]), flags[0])
        valued = all(one.default is not False for one in options if typed_as in one.flags)
        raise UsageError(f"{typed_as} {'lacks its' if valued else 'takes no'} value", hint=see) from error
    typed = vars(namespace)
    for word in others:
        if word.startswith("-") and word != "-":
            raise _unknown(name, word.partition("=")[0], options, see)
    _fill(typed, others, options)
    if others:
        raise UsageError(
            f"{name} takes no argument {others[0]!r}",
            hint=f"{see}; a command stands behind --" if rest else see,
        )
    if complete:
        typed = complete(options, typed)
    lacking = [one for one in options if one.required and one.name not in typed]
    if lacking:
        raise UsageError(
            f"{name} lacks {' '.join(one.flag[2:].upper() for one in lacking)}",
            details=tuple(f"{one.flag[2:].upper()}: {one.help}" for one in lacking),
            hint=see,
        )
    for one in options:
        if isinstance(typed.get(one.name), str) and type(one.default) is int:
            typed[one.name] = whole(typed[one.name], one.flag)
        elif one.name in typed and isinstance(one.default, tuple):
            typed[one.name] = tuple(typed[one.name])
    if at < len(words):
        typed[rest[0].name] = (*typed.get(rest[0].name, ()), *words[at + 1 :])
    return typed


def _fill(typed: dict[str, Any], words: list[str], options: Iterable[Option]) -> None:
    """Give the words without an option's name to the options that may stand so, and take them away."""
    for one in options:
        if one.first and words and one.name not in typed:
            taken = words[:] if one.several else words[:1]
            typed[one.name] = ",".join(taken)
            del words[: len(taken)]


def _unknown(name: str, word: str, options: Iterable[Option], see: str) -> UsageError:
    known = sorted(["--help", *(one.flag for one in options if not one.rest)])
    meant = near(word, known)
    return UsageError(
        f"unknown option of {name} {word!r}; valid: {', '.join(known)}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else see,
    )


def near(name: str, choices: Iterable[str]) -> list[str]:
    """What may have been meant; another number is meant as it is, and is no mistake in typing."""
    if not re.search("[A-Za-z]", name):
        return []
    found = get_close_matches(name, list(choices), n=4, cutoff=0.6)
    likeness = [SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, like in zip(found, likeness) if like > likeness[0] - MUCH_LESS]
