"""Tables and values for people; amounts are in gpukiln/units.py."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any


def gib(mib: Any) -> str:
    """MiB as GiB in words.

    >>> gib(40960), gib(None)
    ('40.0', '-')
    """
    return "-" if mib is None else f"{mib / 1024:.1f}"


def value_text(value: Any, unit: str = "") -> str:
    """A value with its unit; - for null.

    >>> value_text(44, "C"), value_text(None)
    ('44C', '-')
    >>> value_text(True), value_text(49.0, "W")
    ('yes', '49W')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        value = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    return f"{value}{unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """The lines of a table.

    Args:
        head: Titles of the columns.
        right: Titles of the columns that are aligned to the right, separated by blanks.
    """
    if not rows:
        return []
    # A command line may have line ends, which would break the table.
    rows = [[cell.replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    to_right = set(right.split())
    return [
        "  ".join(
            cell.rjust(width) if title in to_right else cell.ljust(width)
            for cell, width, title in zip(row, widths, head)
        ).rstrip()
        for row in (head, *rows)
    ]


def short_uuid(uuid: str | None) -> str:
    """The first digits of a UUID, unique on a machine; every command accepts them.

    >>> short_uuid("GPU-7c49744b-522d-5193-a082-cff845997bfd")
    'GPU-7c49744b'
    >>> short_uuid(None)
    '-'
    """
    if uuid is None:
        return "-"
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest[:8]}"


def printable(text: str) -> str:
    r"""A text with its control characters as escapes, except line ends and tabs.

    >>> printable("job" + chr(27) + "[2J")
    'job\\x1b[2J'
    """
    # A user types the command line and the comment of a lease, and root's terminal prints them: escape
    # sequences could rewrite the screen.
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character)[0] != "C"
        else character.encode("unicode_escape").decode()
        for character in text
    )
