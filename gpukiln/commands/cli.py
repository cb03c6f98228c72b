"""What every command shares: errors become a message and an exit code, JSON goes to standard output alone.

Nothing heavy is imported here or at the top of a command's module: `invoke --list` must be quick.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from invoke.parser.argument import Argument
from invoke.tasks import Task, task

from gpukiln.commands import streams
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.files import FULL
from gpukiln.programs import ROOM_HINT
from gpukiln.units import whole

if TYPE_CHECKING:
    from gpukiln.progress import PlainConsole

P = ParamSpec("P")
INTERRUPTED = 130
_OS_HINTS = {
    **dict.fromkeys(FULL, ROOM_HINT),
    errno.EACCES: "run as root, or let $GPUKILN_HOME name a folder of your own",
    errno.EROFS: "let $GPUKILN_HOME name a folder that can be written to",
}
SIGNERS = "a private key as PEM file, awskms:KEY of AWS KMS, or sigstore: as the identity of this CI job"
CHECKOUT = Path(__file__).resolve().parents[2]


class Command(Task[Any]):
    """A task whose numbers are read here: Invoke ends with a traceback where one is none.

    `letters` has the option of each letter that may be typed; `first` the option that may stand without its
    name right behind the command, and with `several` it takes all the words that follow.
    """

    letters: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed
    first: str = ""
    several: bool = False

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        """See `Task.get_arguments`."""
        texts = dict(self.help)
        arguments: list[Argument] = super().get_arguments(ignore_unknown_help)
        self.help = texts  # which Invoke uses up, and a second command line needs again
        for argument in arguments:
            if argument.kind is int:
                argument.kind = str
            argument.names += tuple(letter for letter, name in self.letters.items() if name == argument.name)
        return arguments


def command(**options: Any) -> Callable[[Callable[P, int | None]], Any]:
    """Declare an Invoke task.

    Args:
        options: Those of `invoke.task`, for example `help`.

    Returns:
        A decorator for a function that returns its exit code, or None for 0.
    """

    def decorate(function: Callable[P, int | None]) -> Any:
        parameters = inspect.signature(function).parameters.values()
        numbers = [one.name for one in parameters if type(one.default) is int]

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            signal.signal(signal.SIGTERM, _interrupt)
            with streams.errors_anywhere():
                if code := end(work, *args, **kwargs):
                    sys.exit(code)

        def work(*args: P.args, **kwargs: P.kwargs) -> int | None:
            for name in numbers:
                if isinstance(typed := kwargs.get(name), str):
                    kwargs[name] = _number(name, typed)
            return function(*args, **kwargs)

        return task(klass=Command, auto_shortflags=False, **options)(run)

    return decorate


def end(work: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Do the work; its errors become a message, and the exit code that is returned."""
    try:
        with streams.output_named():
            return work(*args, **kwargs) or 0
    except GpukilnError as error:
        print_error(error)
        if isinstance(error, streams.OutputError):
            streams.forget_output()
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        for note in getattr(interrupt, "__notes__", ()):
            print(note, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: who reads has enough
        streams.forget_output()
        return 0
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print_error(UnavailableError(what, hint=_os_hint(error)))
        return UnavailableError.exit_code


def _number(option: str, typed: str) -> int:
    return whole(typed, f"--{option.replace('_', '-')}")


def _os_hint(error: OSError) -> str:
    file = Path(str(error.filename or "."))
    if error.errno == errno.ENOENT and file.is_relative_to(CHECKOUT):
        return f"`git checkout -- {file.relative_to(CHECKOUT)}` brings a file of the repository back"
    return _OS_HINTS.get(error.errno or 0, "")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def print_error(error: GpukilnError) -> None:
    """Write an error for people."""
    print(f"error: {error.message}", file=sys.stderr)
    for line in error.details:
        print(f"  {line}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"also: {note}", file=sys.stderr)
    if error.hint:
        print(f"next: {error.hint}", file=sys.stderr)


def say(text: str) -> None:
    """Write a notice for people, on standard error; results go to `results`.

    Args:
        text: The line.
    """
    print(text, file=sys.stderr)


def results(*, json: bool = False) -> PlainConsole:
    """Where people read results: on standard output, unless `--json` promises one document there.

    Args:
        json: Whether it does.
    """
    from gpukiln.progress import PlainConsole

    return PlainConsole(stderr=json)


def words(text: str) -> list[str]:
    """Read what was typed as a list.

    Args:
        text: Words separated by commas.
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def print_json(document: Any) -> None:
    """Write one JSON document to standard output.

    Args:
        document: Plain data; what says no `schema` is of a form of others, as an IAM policy is.
    """
    print(json.dumps(document, indent=2))


def print_document(schema: str, document: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
    """Write a document of gpukiln to standard output.

    Args:
        schema: Its name in `gpukiln.commands.schemas`; a record's own version gives way to it.
        document: Plain data whose fields it has.
        fields: Its other fields, plain data.
    """
    print_json({"schema": schema} | dict(document or {}) | fields | {"schema": schema})
