"""Consent to what costs money or removes work of a person: a question on a terminal, else `--yes`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

YES = "yes"


def require_consent(does: str, what: Sequence[str], *, yes: bool, answer: str = YES, keeps: str = "") -> None:
    """Ask before an action, unless `--yes` was given.

    Args:
        does: The action as the subject of a sentence: `removing vision`.
        what: What the action concerns, a line each; shown before the question.
        yes: Whether `--yes` was given.
        answer: The word that consents on a terminal.
        keeps: An alternative, as a hint; empty: none.

    Raises:
        RefusedError: There is no consent.
    """
    from gpukiln.errors import RefusedError

    if yes:
        return
    # sys.stdin is None where file descriptor 0 is closed at the start (Python's documentation of sys).
    if not sys.stdin or not sys.stdin.isatty():
        # A script that has never named --yes must not be taken to have consented.
        hint = "--yes consents, --dry-run only shows it"
        raise RefusedError(
            f"{does} needs consent, and there is no terminal to ask on",
            details=tuple(what),
            hint=f"{hint}; {keeps}" if keeps else hint,
        )
    for line in what:
        print(line, file=sys.stderr)
    # Not input(), which writes its prompt to standard output (Python's documentation), where results go.
    # Without a newline at its end the prompt stays in the buffer unless it is flushed.
    print(f"{does}: type {answer} to go on: ", end="", file=sys.stderr, flush=True)
    typed = sys.stdin.readline().strip()
    if typed != answer:
        reason = f"{typed!r} was typed, wanted {answer!r}" if typed else "nothing was typed"
        raise RefusedError(f"{does} is not done: {reason}", hint=keeps)
