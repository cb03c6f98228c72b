"""What is typed after `invoke`: read by Invoke, with help, a list of commands and errors like all of ours."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import invoke.program
from invoke.collection import Collection
from invoke.exceptions import Exit, ParseError
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext
from invoke.parser.parser import ParseResult
from invoke.util import helpline

from gpukiln.commands.cli import end
from gpukiln.commands.streams import errors_anywhere
from gpukiln.errors import UsageError

HELP = ("-h", "--help")
LETTERS = ("help", "list", "version")
# Invoke has others, for shell commands that no command of ours runs through it: `ami.build --dry` would be
# taken, and would build.
CORE = (*LETTERS, "complete", "print-completion-script", "list-format", "collection", "search-root")
HIDDEN = ("complete", "list-format", "collection", "search-root")
REST, COMMAND = "--", "command"  # what follows the first becomes the second
NARROW = 30  # columns: a text that would have fewer stands below its name


class Program(invoke.program.Program):
    """The program `invoke`."""

    def __init__(self, namespace: Collection) -> None:
        from gpukiln import __version__

        super().__init__(
            version=__version__,
            namespace=namespace,
            name="gpukiln",
            binary="invoke",
            binary_names=["invoke", "inv"],
        )

    def run(self, argv: list[str] | None = None, exit: bool = True) -> None:
        """See `Program.run`; what is typed wrong is an error of ours, code 2."""
        with errors_anywhere():
            code = end(self._work, argv)
        if exit:
            sys.exit(code)

    def _work(self, argv: list[str] | None) -> None:
        self.create_config()
        typed = list(sys.argv if argv is None else argv)
        at = typed.index(REST) if REST in typed and "--complete" not in typed else len(typed)
        self.rest = typed[at + 1 :] if at < len(typed) else None  # Invoke would make one text of it
        try:
            self.parse_core(typed[:at])
            self.parse_collection()
            self.parse_tasks()
            self.parse_cleanup()
        except ParseError as error:
            raise self._explained(error) from error
        except Exit as ended:
            if ended.message:
                noun = self.args.list.value
                raise UsageError(
                    f"no command begins with {noun!r}", hint="`invoke --list` lists them"
                ) from ended
            return
        self.update_config()
        self.execute()

    def core_args(self) -> list[Argument]:
        """See `Program.core_args`; only what means something here."""
        every = {one.name: one for one in (*super().core_args(), *self.task_args())}
        kept = [every[name] for name in CORE]
        for one in kept:
            if one.name not in LETTERS:
                one.names = one.names[:1]
        return kept

    @property
    def args(self) -> Any:
        """See `Program.args`; what can't be typed is as Invoke has it by default."""
        every = ParserContext(args=super().core_args()).args
        for name, argument in self.core[0].args.items():
            every[name] = argument
        return every

    def parse_tasks(self) -> None:
        """See `Program.parse_tasks`; Invoke would take `-h` or a wrong option for an argument's value."""
        words = self.core.unparsed
        if asked := [number for number, word in enumerate(words) if word in HELP]:
            self.parser = self._make_parser()
            known = [word for word in words[: asked[0]] if word in self.parser.contexts]
            self.args.help.value = (known or words)[-1 if known else 0]
            self.tasks = ParseResult()
            return
        self.core.unparsed = self._named(words)
        super().parse_tasks()
        for context in self.tasks:
            for argument in context.positional_args:
                if str(argument.value).startswith("-"):
                    raise self._unknown_option(context, argument.value)
        if self.rest is not None:
            self._pass_on(self.rest)

    def _named(self, words: list[str]) -> list[str]:
        """What was typed, with the name of an option that may stand without it behind its command."""
        known = set(self.collection.task_names)
        found: list[str] = []
        rest = list(words)
        while rest:
            found.append(rest.pop(0))
            task = self.collection[found[-1]] if found[-1] in known else None
            if task is None or not task.first:
                continue
            bare = list(
                itertools.takewhile(lambda word: word not in known and (word == "-" or word[:1] != "-"), rest)
            )
            if taken := bare if task.several else bare[:1]:
                found.append(f"--{task.first.replace('_', '-')}={','.join(taken)}")
                del rest[: len(taken)]
        return found

    def _pass_on(self, rest: list[str]) -> None:
        """Give what follows `--` to the command that runs it, whose option is a list of words."""
        context = self.tasks[-1] if self.tasks else None
        if context is None or COMMAND not in context.args:
            name = context.name if context is not None else "invoke"
            raise UsageError(f"{name} takes no command, and {REST} {' '.join(rest)} is given")
        for word in rest:
            context.args[COMMAND].set_value(word)

    def no_tasks_given(self) -> None:
        """See `Program.no_tasks_given`."""
        self.print_help()
        raise Exit

    def print_help(self) -> None:
        """See `Program.print_help`."""
        print("Usage: invoke COMMAND [ARGUMENT...] [--OPTION...]\n")
        self.list_tasks()
        shown = [one for one in self.core_args() if one.name not in HIDDEN]
        print("Options:\n")
        self.print_columns(ParserContext(args=shown).help_tuples())
        print("`invoke COMMAND -h` says what a command takes.")

    def list_flat(self) -> None:
        """See `Program.list_flat`; names as they are typed, also those of one noun."""
        begin = f"{self.list_root}." if self.list_root else ""
        names = sorted(name for name in self.collection.task_names if name.startswith(begin))
        self.print_columns([(name, helpline(self.collection[name])) for name in names])

    def print_task_help(self, name: str) -> None:
        """See `Program.print_task_help`."""
        context = self.parser.contexts[name]
        wanted = "".join(f" {_placeholder(one)}" for one in context.positional_args)
        options = " [--OPTION...]" if context.flags else ""
        rest = f" [{REST} COMMAND...]" if COMMAND in context.args else ""
        task = self.collection[name]
        wanted += f" [{task.first.upper()}{'...' * task.several}]" if task.first else ""
        print(f"Usage: invoke {name}{wanted}{options}{rest}\n")
        print(f"{(self.collection[name].__doc__ or '').strip()}\n")
        shown = ParserContext(args=[one for one in context.args.values() if one.name != COMMAND])
        if context.flags:
            self.print_columns([(self._typed(name, option), text) for option, text in shown.help_tuples()])

    def _typed(self, name: str, option: str) -> str:
        """An option of a command as it is typed, with what its value is: `Command` reads numbers as texts."""
        defaults = {
            f"--{one.name.strip('_').replace('_', '-')}": one.default
            for one in inspect.signature(self.collection[name].body).parameters.values()
        }
        flag, equals, value = option.partition("=")
        return f"{flag}=NUMBER" if type(defaults.get(flag)) is int else f"{flag}{equals}{value}"

    def print_columns(self, tuples: Sequence[tuple[str, str | None]]) -> None:
        """See `Program.print_columns`; a line each where no terminal is, and never narrower than legible."""
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        indent = 2 + max(len(name) for name, _ in tuples) + 3
        beside = columns - indent >= NARROW
        if not beside:
            indent = 6
        for name, text in tuples:
            lines = textwrap.wrap(text or "", max(columns - indent - 1, NARROW))
            if beside:
                print(f"  {name:{indent - 2}}{lines.pop(0) if lines else ''}".rstrip())
            else:
                print(f"  {name}")
            for line in lines:
                print(f"{'':{indent}}{line}")
        print()

    def _explained(self, error: ParseError) -> UsageError:
        """Invoke's error in our words; its texts are all that it has."""
        context, text = error.context, str(error)
        if found := re.fullmatch(r"No idea what '(.*)' is!", text, re.DOTALL):
            word = found[1]
            if word.startswith("-"):
                return self._unknown_option(context, word)
            if context is None or not context.name:
                return self._unknown_command(word)
            return UsageError(
                f"{context.name} takes no argument {word!r}",
                hint=f"`invoke {context.name} -h` shows what it takes; an option is given once, "
                "a list of values is separated by commas",
            )
        if found := re.match(r"Flag <Argument: ([\w-]+)", text):
            return UsageError(f"--{found[1].replace('_', '-')} lacks its value", hint=self._see_help(context))
        if context is not None and "required positional" in text:
            lacking = {_placeholder(one): one.help for one in context.missing_positional_args}
            return UsageError(
                f"{context.name} lacks {' '.join(lacking)}",
                details=tuple(f"{name}: {text}" for name, text in lacking.items()),
                hint=self._see_help(context),
            )
        return UsageError(text, hint=self._see_help(context))

    def _see_help(self, context: ParserContext | None) -> str:
        name = f"{context.name} " if context is not None and context.name else ""
        return f"`invoke {name}-h` shows what it takes"

    def _unknown_option(self, context: ParserContext | None, word: str) -> UsageError:
        from gpukiln.typed import unknown

        if context is None or not context.name:
            context = self.initial_context
        names = {"--help", *(name for name in context.flag_names() if name.strip("-") not in HIDDEN)}
        error = unknown(f"option of {context.name}" if context.name else "option", word, names)
        return UsageError(error.message, hint=error.hint or self._see_help(context))

    def _unknown_command(self, word: str) -> UsageError:
        from gpukiln.typed import unknown

        names = list(self.collection.task_names)
        if of_noun := [name for name in names if name.startswith(f"{word.rstrip('.')}.")]:
            error = unknown("command", word, of_noun)
            return UsageError(error.message, hint=f"`invoke --list {word}` says what each does")
        near = unknown("command", word, names).hint
        return UsageError(f"unknown command {word!r}", hint=near or "`invoke --list` lists them")


def _placeholder(argument: Argument) -> str:
    return str(argument.name).strip("_").upper()
