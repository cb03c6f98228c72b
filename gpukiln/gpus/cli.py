"""`gpukiln-gpu`: the verbs on the machine itself."""

from __future__ import annotations

import json
import os
import signal
import sys

from gpukiln import __version__
from gpukiln.errors import GpukilnError, UnavailableError, UsageError
from gpukiln.files import FULL, reader_has_ended
from gpukiln.gpus.model import plain
from gpukiln.gpus.text import printable
from gpukiln.gpus.verb import Failure, Options, Verb, document
from gpukiln.gpus.verbs import verbs
from gpukiln.options import columns, read, suggestions, usage

PROGRAM = "gpukiln-gpu"
INTERRUPTED = 130


def help_text(name: str) -> str:
    """The text of `-h`, of the program or of one verb.

    Args:
        name: The verb; empty for the program.
    """
    if not name:
        listed = columns([(verb.name, verb.help) for verb in verbs().values()])
        return f"Usage: {PROGRAM} VERB [--OPTION...]\n\n{listed}\n`{PROGRAM} VERB -h` shows what one takes."
    verb = verbs(name)[name]
    shown = [(option.shown, option.described) for option in verb.all_options if not option.rest]
    return f"Usage: {usage(f'{PROGRAM} {name}', verb.all_options)}\n\n{verb.help}\n\n{columns(shown)}"


def read_options(argv: list[str]) -> tuple[Verb, Options] | None:
    """The verb and its options; None after help or the version was printed.

    Raises:
        UsageError: The words are not a valid command line.
    """
    # What follows `--` belongs to the command of `run`: its -h is not for gpukiln-gpu.
    words = argv[: argv.index("--")] if "--" in argv else argv
    name = next((word for word in words if not word.startswith("-")), "")
    if name and name not in verbs(name):
        meant = suggestions(name, verbs())
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"`{PROGRAM} -h` lists them"
        raise UsageError(f"there is no verb {name!r}", hint=hint)
    if "--version" in words and not name:
        print(f"{PROGRAM} {__version__}")
        return None
    if {"-h", "--help"} & {*words} or not words:
        print(help_text(name))
        return None
    if not name:
        raise UsageError(f"{words[0]} is given without a verb", hint=f"`{PROGRAM} -h` lists them")
    verb = verbs(name)[name]
    at = argv.index(name)
    values = {option.name: option.default for option in verb.all_options}
    typed = read(f"{PROGRAM} {name}", verb.all_options, argv[:at] + argv[at + 1 :])
    return verb, Options(**{"command": (), **values, **typed})


def run(verb: Verb, options: Options) -> int:
    """Run a verb and print its result; returns the exit code."""
    if verb.takes_over is not None and not options.json:
        return verb.takes_over(options)
    answer = verb.answer(options)
    data = plain(answer)
    if options.json:
        print(json.dumps(document(verb, [data], []), indent=2))
    else:
        verb.show(data, options, lambda text: print(printable(text)))
    return int(answer.exit_code)


def failure(error: GpukilnError, node: str = "") -> Failure:
    """An error as the JSON document's list `failed` has it."""
    name = node or os.uname().nodename
    return Failure(name, error.message, error.hint, error.details, error.exit_code)


def print_error(error: GpukilnError) -> None:
    """Print an error to standard error: found and wanted, details, next step."""
    print(f"error: {printable(error.message)}", file=sys.stderr)
    for line in error.details:
        print(f"  {printable(line)}", file=sys.stderr)
    if error.hint:
        print(f"next: {printable(error.hint)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:  # noqa: PLR0911 - each kind of end has its code
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # Python's default for SIGTERM ends the process without `finally`: leases and temporary files would stay.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    verb, options = None, Options(json=False)
    try:
        if argv[:1] == ["serve"]:  # hidden from the help: systemd starts it (gpukiln/gpus/service.py)
            # Only the service needs it, and each module costs time in a zipapp.
            from gpukiln.gpus import service  # noqa: PLC0415 - see above

            return service.main(argv[1:])
        if (asked := read_options(argv)) is None:
            return 0
        verb, options = asked
        code = run(verb, options)
        sys.stdout.flush()
        return code
    except GpukilnError as error:
        return _report_failure(verb, options, error)
    except TerminatedError as error:
        print(f"terminated by {signal.Signals(error.number).name}", file=sys.stderr)
        # As a shell reports a command that a signal ended.
        return 128 + error.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # `gpukiln-gpu list | head` has read enough: no failure. Another broken pipe is one.
        if isinstance(error, BrokenPipeError) and reader_has_ended(sys.stdout):
            # Without this the flush at exit fails once more (Python, signal, "Note on SIGPIPE").
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        hint = "free space on that file system, then try again" if error.errno in FULL else ""
        return _report_failure(verb, options, UnavailableError(what, hint=hint))


def _report_failure(verb: Verb | None, options: Options, error: GpukilnError) -> int:
    if verb is not None and options.json:
        print(json.dumps(document(verb, [], [plain(failure(error))]), indent=2))
    print_error(error)
    return error.exit_code


class TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP; a KeyboardInterrupt, so that `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _on_signal(number: int, _: object) -> None:
    raise TerminatedError(number)
