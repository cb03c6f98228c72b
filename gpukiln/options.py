"""Options of a command: declared once, as fields of a frozen dataclass or as a list, and parsed by argparse.

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

MIN_COLUMNS = 30  # a help text with less space is printed below its option
Complete = Callable[[Sequence["Option"], Mapping[str, Any]], "dict[str, Any]"]
LIKENESS_GAP = 0.1  # a suggestion is at most this much less similar than the best one


@dataclass(frozen=True)
class Option:
    """An option.

    Args:
        name: As an attribute; users type --name.
        default: A text, a number, False for a flag, or () for an option that may be repeated.
        letter: Of a short form, for example n.
        first: Whether its value may also follow the command without the option's name.
        several: Whether all such words are its values, joined by commas.
        required: Whether the command requires it.
        rest: Whether it is the command behind `--`.
        value: Placeholder of its value in the help.
        also: Another spelling, without dashes.
        setting: The setting of a project that is its default (gpukiln/cli/settings.py).
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
        """The option on a command line."""
        return flag(self.name)

    @property
    def flags(self) -> list[str]:
        """Every form of the option on a command line."""
        return [f"-{self.letter}"] * bool(self.letter) + [self.flag] + [f"--{self.also}"] * bool(self.also)

    @property
    def placeholder(self) -> str:
        """Placeholder of its value in the help; empty for a flag."""
        if self.default is False:
            return ""
        return self.value or ("NUMBER" if type(self.default) is int else self.flag[2:].upper())

    @property
    def described(self) -> str:
        """Its help, with its default unless that is empty or in the help already."""
        known = not self.default or "default" in self.help
        return self.help if known else f"{self.help} (default: {self.default})"

    @property
    def shown(self) -> str:
        """Its forms with the placeholder, for the help."""
        return f"{', '.join(self.flags)} {self.placeholder}".rstrip()


def flag(name: str) -> str:
    """The option of an attribute; an attribute that would be a keyword of Python ends in an underscore.

    >>> flag("dry_run"), flag("for_")
    ('--dry-run', '--for')
    """
    return f"--{name.strip('_').replace('_', '-')}"


def option(help: str, default: Any = "", **more: Any) -> Any:
    """A field of a dataclass that is an option; the arguments are those of `Option`."""
    return field(default=default, metadata={"help": help, **more})


def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass: its own first, then those of each base class."""
    declared = {field.name: field for field in fields(kind)}
    # fields() has the base classes first; the help has the command's own options first.
    names = [name for group in kind.__mro__ for name in vars(group).get("__annotations__", ())]
    return tuple(
        Option(name, default=declared[name].default, **declared[name].metadata)
        for name in dict.fromkeys(names)
        if name in declared
    )


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns of names and texts, wrapped for the terminal; one line each on another output."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    indent = 5 + max(len(name) for name, _ in rows)
    fits = width - indent >= MIN_COLUMNS
    if not fits:
        indent = 6
    lines: list[str] = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(width - indent - 1, MIN_COLUMNS))
        first = f"  {name:{indent - 2}}{wrapped.pop(0) if wrapped else ''}" if fits else f"  {name}"
        lines += [first.rstrip(), *(f"{'':{indent}}{line}" for line in wrapped)]
    return "\n".join(lines) + "\n"


def usage(command: str, options: Sequence[Option]) -> str:
    """The usage line of a command.

    >>> usage("gpukiln-gpu args", [Option("lease", "its id", first=True)])
    'gpukiln-gpu args [LEASE] [--OPTION...]'
    """
    words = [_word(option) for option in options if option.first]
    if any(not option.rest for option in options):
        words.append("[--OPTION...]")
    words += [f"[-- {option.placeholder}...]" for option in options if option.rest]
    return " ".join([command, *words])


def _word(option: Option) -> str:
    word = option.flag[2:].upper() + "..." * option.several
    return word if option.required else f"[{word}]"


def add_to(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to a parser; its result has the typed ones only."""
    for option in options:
        more: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        if option.default is False:
            more["action"] = "store_true"
        else:
            # SUPPRESS leaves out what was not typed, so that settings and defaults can be distinguished from
            # typed values.
            more["action"] = "append" if isinstance(option.default, tuple) else _SingleValue
        parser.add_argument(*option.flags, **more)


class _SingleValue(argparse.Action):
    """An option with one value: argparse would replace the first by the second without an error."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if hasattr(namespace, self.dest):
            raise UsageError(
                f"{option_string} is given twice", hint="pass several values in a list with commas"
            )
        setattr(namespace, self.dest, values)


def read(
    command: str, options: Sequence[Option], words: Sequence[str], complete: Complete | None = None
) -> dict[str, Any]:
    """Parse the words behind a command.

    Args:
        command: With its program, for example "gpukiln ami build".
        complete: Adds values that were not typed, before required options are checked.

    Returns:
        Values by the option's name, of the typed options only.

    Raises:
        UsageError: The words are not valid for these options.
    """
    _, _, name = command.partition(" ")
    see = f"`{command} -h` lists the options"
    at = words.index("--") if "--" in words else len(words)
    rest = [option for option in options if option.rest]
    if at < len(words) and not rest:
        raise UsageError(f"{name} takes no command, but -- {' '.join(words[at + 1 :])} is given")
    # allow_abbrev: --for would be --force for one verb and --for for another; exit_on_error: errors have the
    # form of UsageError.
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_to(parser, options)
    try:
        namespace, others = parser.parse_known_args(list(words[:at]))
    except argparse.ArgumentError as error:
        # argparse joins the forms of an option with a slash.
        flags = str(error.argument_name).split("/")
        typed_as = next((flag for flag in flags if flag in words[:at]), flags[0])
        valued = all(option.default is not False for option in options if typed_as in option.flags)
        raise UsageError(f"{typed_as} {'lacks its' if valued else 'takes no'} value", hint=see) from error
    typed = vars(namespace)
    for word in others:
        # A lone - stands for standard input, and is a value.
        if word.startswith("-") and word != "-":
            raise _unknown(name, word.partition("=")[0], options, see)
    _take_positionals(typed, others, options)
    if others:
        raise UsageError(
            f"{name} takes no argument {others[0]!r}",
            hint=f"{see}; a command follows --" if rest else see,
        )
    if complete:
        typed = complete(options, typed)
    # After `complete`: a setting of the project can supply a required option.
    lacking = [option for option in options if option.required and option.name not in typed]
    if lacking:
        raise UsageError(
            f"{name} lacks {' '.join(option.flag[2:].upper() for option in lacking)}",
            details=tuple(f"{option.flag[2:].upper()}: {option.help}" for option in lacking),
            hint=see,
        )
    for option in options:
        if isinstance(typed.get(option.name), str) and type(option.default) is int:
            typed[option.name] = whole(typed[option.name], option.flag)
        elif option.name in typed and isinstance(option.default, tuple):
            typed[option.name] = tuple(typed[option.name])
    if at < len(words):
        typed[rest[0].name] = (*typed.get(rest[0].name, ()), *words[at + 1 :])
    return typed


def _take_positionals(typed: dict[str, Any], words: list[str], options: Iterable[Option]) -> None:
    """Assign words without an option's name to the options that accept them, and remove these words."""
    for option in options:
        if option.first and words and option.name not in typed:
            taken = words[:] if option.several else words[:1]
            typed[option.name] = ",".join(taken)
            del words[: len(taken)]


def _unknown(name: str, word: str, options: Iterable[Option], see: str) -> UsageError:
    known = sorted(["--help", *(option.flag for option in options if not option.rest)])
    meant = suggestions(word, known)
    return UsageError(
        f"unknown option of {name} {word!r}; valid: {', '.join(known)}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else see,
    )


def suggestions(name: str, choices: Iterable[str]) -> list[str]:
    """The choices that are most similar to a mistyped name.

    >>> suggestions("--coutn", ["--count", "--cuda", "--json"])
    ['--count']
    >>> suggestions("8", ["1", "2"])
    []
    """
    # A number is a wrong value, not a typing error.
    if not re.search("[A-Za-z]", name):
        return []
    matches = get_close_matches(name, list(choices), n=4, cutoff=0.6)
    likeness = [SequenceMatcher(None, match, name).ratio() for match in matches]
    return [match for match, like in zip(matches, likeness) if like > likeness[0] - LIKENESS_GAP]
