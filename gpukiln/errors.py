"""The kinds of failure and their exit codes.

Every error says what was found, what was wanted and the next step. `gpukiln.cli.command` alone turns an
error into a message and an exit code.
"""


class GpukilnError(Exception):
    """A failure that the user can understand and act on.

    Args:
        message: One line: what was found and what was wanted.
        hint: The next step, or an empty string.
        details: Further lines to show below the message, for example the rows of a list.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class CheckFailedError(GpukilnError):
    """A check failed."""

    exit_code = 1


class UsageError(GpukilnError):
    """The command line or a file of the user is wrong; the message lists the valid choices."""

    # The code of argparse's own errors.
    exit_code = 2


class IncompatibleError(GpukilnError):
    """The request can never work, for example a driver that does not support the GPU."""

    exit_code = 3


class UnavailableError(GpukilnError):
    """A tool is missing, or a source or a driver can't be reached."""

    exit_code = 4


class PartialError(GpukilnError):
    """Some of the work was done and some was not; the details say which."""

    exit_code = 5


class RefusedError(GpukilnError):
    """A safety rule forbids the action."""

    exit_code = 6


class BusyError(GpukilnError):
    """The action can succeed later: another process holds the lock, or there is no capacity."""

    # EX_TEMPFAIL of sysexits.h: "the user is invited to retry".
    exit_code = 75
