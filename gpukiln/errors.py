"""The kinds of failure, their exit codes, and nothing else.

Every error says what was found, what was wanted and the next step. `gpukiln.cli.command` is the one
place that turns an error into a message and an exit code.
"""


class GpukilnError(Exception):
    """A failure that its user can understand and act on.

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
    """Something was built or looked at, and a check of it failed."""

    exit_code = 1


class UsageError(GpukilnError):
    """What was typed is not understood; the message lists the valid choices."""

    exit_code = 2


class IncompatibleError(GpukilnError):
    """What was asked for can never work, for example a driver that does not know the GPU."""

    exit_code = 3


class UnavailableError(GpukilnError):
    """A tool is missing, or a source or a driver can't be reached."""

    exit_code = 4


class PartialError(GpukilnError):
    """Some of the work was done and some was not; the details say which."""

    exit_code = 5


class RefusedError(GpukilnError):
    """A safety rule forbids it."""

    exit_code = 6


class BusyError(GpukilnError):
    """Not now: somebody holds the lock, or there is no capacity."""

    exit_code = 75
