"""Numbers, times and tables as people read and type them; the standard library alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.parsing import is_whole

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
UNITS_MIB = {"": 1.0, "mib": 1.0, "gib": 1024.0, "tib": 1024.0**2, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}


def seconds(text: str, option: str) -> float:
    """A duration such as 90s, 10m, 2h, 1h30m or 7d.

    Raises:
        UsageError: It is none.
    """
    parts = re.findall(r"(\d{1,12}(?:\.\d{1,12})?)([smhdw])", text.strip().lower())
    if not parts or "".join(a + b for a, b in parts) != text.strip().lower():
        raise UsageError(f"{option} {text!r} is no duration", hint="wanted such as 90s, 10m, 2h, 1h30m or 7d")
    return sum(float(number) * UNITS_S[unit] for number, unit in parts)


def mebibytes(text: str, option: str) -> int:
    """An amount of memory such as 24GiB, 24GB or 8192 (MiB), rounded up.

    Raises:
        UsageError: It is none.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?b)?", text.strip().lower())
    if found is None or (found[2] or "") not in UNITS_MIB or float(found[1]) == 0:
        raise UsageError(
            f"{option} {text!r} is no amount of memory", hint="wanted such as 24GiB, 24GB or 8192MiB"
        )
    return -int(-float(found[1]) * UNITS_MIB[found[2] or ""] // 1)


def whole(text: Any, option: str, least: int = 0) -> int:
    """A whole number.

    Raises:
        UsageError: It is none, or less than wanted.
    """
    if not is_whole(str(text)) or int(text) < least:
        raise UsageError(
            f"{option} {str(text)!r} is no whole number of {least} or more",
            hint=f"such as {option} {least + 1}",
        )
    return int(text)


def span(value: float) -> str:
    """A duration for people, in two units at most."""
    rest = max(value, 0.0)
    parts: list[str] = []
    for name in ("d", "h", "m", "s"):
        many, rest = divmod(rest, UNITS_S[name])
        if many and len(parts) < 2:
            parts.append(f"{many:.0f}{name}")
        elif parts:
            break
    return "".join(parts) or "0s"


def gib(mib: Any) -> str:
    """MiB in GiB, for people."""
    return "-" if mib is None else f"{mib / 1024:.1f}"


def shown(value: Any, unit: str = "") -> str:
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
        one if one in "\n\t" or unicodedata.category(one)[0] != "C" else one.encode("unicode_escape").decode()
        for one in text
    )
