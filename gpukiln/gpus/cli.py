"""`gpukiln-gpu`: the verbs on the machine itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from gpukiln import __version__
from gpukiln.errors import GpukilnError, UnavailableError, UsageError
from gpukiln.files import FULL
from gpukiln.gpus.model import plain
from gpukiln.gpus.text import printable
from gpukiln.gpus.verb import Failure, Options, Verb, document
from gpukiln.gpus.verbs import verbs
from gpukiln.units import whole

PROGRAM = "gpukiln-gpu"
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as every command of ours does."""

    def error(self, message: str) -> Any:
        raise UsageError(message, hint=f"`{self.prog} -h` shows what it takes")


def parser(name: str = "") -> argparse.ArgumentParser:
    """The parser of all verbs, of which the man page and the completion are made; or of those that one needs.

    Args:
        name: The verb that was typed.
    """
    top = _Parser(prog=PROGRAM, description="Look at GPUs, lease them, run on them, account for them.")
    top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for verb in verbs(name).values():
        sub = commands.add_parser(verb.name, help=verb.help, description=verb.help, allow_abbrev=False)
        for option in verb.options:
            names = [f"-{option.letter}"] * bool(option.letter) + [option.flag]
            more: dict[str, Any] = {"help": option.help.replace("%", "%%"), "dest": option.name}
            if option.default is False:
                more.update(action="store_true")
            else:
                more.update(metavar=option.value or option.flag[2:].upper())
                many = isinstance(option.default, tuple)
                more.update(action="append" if many else "store", default=[] if many else option.default)
            sub.add_argument(*names, **more)
            if option.first:
                sub.add_argument(
                    f"{option.name}_",
                    nargs="?",
                    metavar=option.value or option.flag[2:].upper(),
                    help=option.help,
                )
        sub.add_argument("--json", action="store_true", help="print one JSON document to standard output")
        if verb.takes_command:
            sub.usage = f"{sub.format_usage()[7:].rstrip()} -- {verb.takes_command}"
    return top


def read_options(argv: list[str]) -> tuple[Verb, Options]:
    """What was typed.

    Raises:
        UsageError: It is not understood.
    """
    if "--" in argv:
        at = argv.index("--")
        argv, rest, given = argv[:at], argv[at + 1 :], True
    else:
        rest, given = [], False
    name = next((word for word in argv if not word.startswith("-")), "")
    if name and name not in verbs(name):
        listed = f"`{PROGRAM} -h` lists them"
        raise UsageError(f"there is no verb {name!r}", hint=_nearest(name, verbs()) or listed)
    found, unknown = parser(name).parse_known_args(argv)
    if unknown:
        raise _unknown(name, unknown[0])
    typed = vars(found)
    verb = verbs(name)[typed.pop("verb")]
    for option in verb.options:
        if option.first and (value := typed.pop(f"{option.name}_")) is not None:
            typed[option.name] = value
        if isinstance(option.default, tuple):
            typed[option.name] = tuple(typed[option.name])
        elif type(option.default) is int and isinstance(typed[option.name], str):
            typed[option.name] = whole(typed[option.name], option.flag)
    if given and not verb.takes_command:
        raise UsageError(f"{verb.name} takes no command, and -- {' '.join(rest)} is given")
    return verb, Options(command=tuple(rest), **typed)


def _unknown(verb: str, word: str) -> UsageError:
    help_of = f"`{PROGRAM} {verb} -h` shows what it takes"
    if not word.startswith("-"):
        hint = f"{help_of}; a command stands behind --" if verbs(verb)[verb].takes_command else help_of
        return UsageError(f"{verb} takes no {word!r}", hint=hint)
    option = word.partition("=")[0]
    flags = ["--json", *(one.flag for one in verbs(verb)[verb].options)]
    return UsageError(f"{verb} has no option {option}", hint=_nearest(option, flags) or help_of)


def _nearest(word: str, choices: Iterable[str]) -> str:
    """What may have been meant, as a question; empty where nothing is like it."""
    from difflib import get_close_matches  # noqa: PLC0415 - only where something is wrong

    near = get_close_matches(word, list(choices), n=2)
    return f"did you mean {' or '.join(near)}?" if near else ""


def run(verb: Verb, options: Options) -> int:
    """Do it and say it; the exit code."""
    if verb.takes_over is not None and not options.json:
        return verb.takes_over(options)
    answer = verb.answer(options)
    said = plain(answer)
    if options.json:
        print(json.dumps(document(verb, [said], []), indent=2))
    else:
        verb.show(said, options, lambda text: print(printable(text)))
    return int(answer.exit_code)


def failure(error: GpukilnError, node: str = "") -> Failure:
    """An error as the JSON document has it."""
    name = node or os.uname().nodename
    return Failure(name, error.message, error.hint, error.details, error.exit_code)


def print_error(error: GpukilnError) -> None:
    """Write an error for people."""
    print(f"error: {printable(error.message)}", file=sys.stderr)
    for line in error.details:
        print(f"  {printable(line)}", file=sys.stderr)
    if error.hint:
        print(f"next: {printable(error.hint)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:  # noqa: PLR0911 - each kind of end has its code
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    verb, options = None, Options(json=False)
    try:
        if argv[:1] == ["serve"]:  # no verb of people's: systemd starts it (gpukiln/gpus/service.py)
            from gpukiln.gpus import service  # noqa: PLC0415 - nobody else needs it

            return service.main(argv[1:])
        verb, options = read_options(argv)
        code = run(verb, options)
        sys.stdout.flush()
        return code
    except GpukilnError as error:
        return _failed(verb, options, error)
    except EndedError as error:
        print(f"ended by {signal.Signals(error.number).name}", file=sys.stderr)
        return 128 + error.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        hint = "make room there, and try again" if error.errno in FULL else ""
        return _failed(verb, options, UnavailableError(what, hint=hint))


def _failed(verb: Verb | None, options: Options, error: GpukilnError) -> int:
    if verb is not None and options.json:
        print(json.dumps(document(verb, [], [plain(failure(error))]), indent=2))
    print_error(error)
    return error.exit_code


class EndedError(KeyboardInterrupt):
    """Somebody ended this program; as KeyboardInterrupt, no handler of errors takes it for one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _ended(number: int, _: object) -> None:
    raise EndedError(number)
