"""Reads single values of a job's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.kubernetes.check.formats import SUBDOMAIN, is_label
from gpukiln.units import is_whole

MOST_ID = 2**31 - 1  # kubernetes/kubernetes:pkg/apis/core/validation, IsValidUserID


def texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Values of an option that is given several times, or has several values with commas.

    >>> texts("T4, L4"), texts(["a,b", "c"])
    (('T4', 'L4'), ('a', 'b', 'c'))
    """
    each = [value] if isinstance(value, str) else value
    return tuple(part.strip() for text in each for part in text.split(",") if part.strip())


def pairs(value: Mapping[str, Any] | Sequence[str], option: str, example: str) -> list[tuple[str, Any]]:
    """Keys and values of an option KEY=VALUE; a library user may give a mapping.

    >>> pairs(["team=vision"], "--label", "team=vision")
    [('team', 'vision')]

    Raises:
        UsageError: One has no key.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    split = []
    for text in [value] if isinstance(value, str) else value:
        name, equals, rest = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r} has no `=`", hint=f"wanted: {example}")
        split.append((name.strip(), rest))
    return split


def object_name(text: str, option: str) -> str:
    """The name of an object, or nothing.

    >>> object_name("models", "--cache")
    'models'

    Raises:
        UsageError: The API server accepts no object of that name.
    """
    if text and not SUBDOMAIN.fullmatch(text):
        raise UsageError(
            f"{option} {text!r} can't be the name of an object",
            hint="lower case letters, digits, `-` and `.`",
        )
    return text


def exit_codes(given: str | Sequence[int]) -> tuple[int, ...]:
    """Read --give-up, in ascending order.

    >>> exit_codes("3,2")
    (2, 3)

    Raises:
        UsageError: One is not from 1 to 255.
    """
    codes = texts(given) if isinstance(given, str) else [str(code) for code in given]
    # The API server rejects 0, which is no failure, for the operator In.
    for code in codes:
        if not is_whole(code) or not 1 <= int(code) <= 255:
            raise UsageError(f"--give-up {code!r} is no exit code of a failure", hint="wanted 1 to 255")
    return tuple(sorted({int(code) for code in codes}))


def user_and_group(text: str) -> tuple[int, int] | None:
    """User and group; without a group, its number is that of the user.

    >>> user_and_group("1000"), user_and_group("1000:100")
    ((1000, 1000), (1000, 100))

    Raises:
        UsageError: The text has another form.
    """
    if not text:
        return None
    user, colon, group = text.partition(":")
    parts = (user, group if colon else user)
    if not all(is_whole(part) and int(part) <= MOST_ID for part in parts):
        raise UsageError(f"--run-as {text!r}, wanted UID or UID:GID, 0 to {MOST_ID}", hint="--run-as 1000")
    return int(parts[0]), int(parts[1])


def toleration(text: str) -> tuple[str, str]:
    """Read --tolerate.

    >>> toleration("spot=true"), toleration("spot")
    (('spot', 'true'), ('spot', ''))

    Raises:
        UsageError: It is no key of a taint, with or without its value.
    """
    key, _, value = text.partition("=")
    if not is_label(key, value):
        raise UsageError(f"--tolerate {text!r}, wanted KEY or KEY=VALUE of a taint", hint="spot=true")
    return key, value
