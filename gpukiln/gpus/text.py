"""Tables and values as people read them; the standard library alone. Amounts: gpukiln/units.py."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any


def gib(mib: Any) -> str:
    """MiB in GiB, for people."""
    return "-" if mib is None else f"{mib / 1024:.1f}"


def value_text(value: Any, unit: str = "") -> str:
    """A value with its unit; - for null."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        value = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    return f"{value}{unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """Lines of a table.

    Args:
        head: Titles.
        right: Titles of columns that are aligned to the right, between blanks.
    """
    if not rows:
        return []
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
    """The beginning of a UUID, long enough for one machine; every command takes it."""
    if uuid is None:
        return "-"
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest[:8]}"


def printable(text: str) -> str:
    """Text that a terminal shows and does nothing else with: control characters are written as escapes.

    A command line or a comment is whatever somebody typed, and may be shown to root. Lines and tabs stay.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character)[0] != "C"
        else character.encode("unicode_escape").decode()
        for character in text
    )
