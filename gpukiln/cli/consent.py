"""Consent to what costs money or removes what a person made: asked on a terminal, `--yes` off it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

YES = "yes"


def require_consent(does: str, what: Sequence[str], *, yes: bool, answer: str = YES, keeps: str = "") -> None:
    """Ask before something is done, unless `--yes` was given.

    Args:
        does: What is going to be done, as the subject of a sentence: `removing vision`.
        what: What it is done to, a line each; shown before the question.
        yes: Whether `--yes` was given.
        answer: What has to be typed on a terminal.
        keeps: Another way, as a hint; empty: none.

    Raises:
        RefusedError: Nobody consented.
    """
    from gpukiln.errors import RefusedError

    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        hint = "--yes consents, --dry-run only shows it"
        raise RefusedError(
            f"{does} needs consent, and there is no terminal to ask on",
            details=tuple(what),
            hint=f"{hint}; {keeps}" if keeps else hint,
        )
    for line in what:
        print(line, file=sys.stderr)
    print(f"{does}: type {answer} to go on: ", end="", file=sys.stderr, flush=True)
    typed = sys.stdin.readline().strip()
    if typed != answer:
        found = f"{typed!r} was typed, wanted {answer!r}" if typed else "nothing was typed"
        raise RefusedError(f"{does} is not done: {found}", hint=keeps)
