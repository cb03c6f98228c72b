"""Text from a machine or a file as reports may show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpukiln.redact import redact, redact_value

# Control characters as their pictures: neither HTML nor XML may hold them. Marks that change the direction of
# the text around them could make a report say something else than it does.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    **dict.fromkeys((*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD),
}


def sanitize(text: str) -> str:
    """Make a text fit for a report.

    Args:
        text: Anything that a machine answered or a file contains.

    Returns:
        It without secrets (`gpukiln.redact`) and with every character that XML can't hold replaced.
    """
    return redact(_printable(text))


def sanitize_values(value: Any) -> Any:
    """Sanitize every text in plain data, and leave out what stands under a secret's name.

    Args:
        value: Dicts, lists, texts, numbers.

    Returns:
        The same with other texts; keys are left as they are.
    """
    return redact_value(_printable_values(value))


def _printable(text: str) -> str:
    whole = text.encode("utf-8", "replace").decode()  # half a surrogate pair can't be written as UTF-8
    return whole.replace("\r\n", "\n").translate(_PICTURES)


def _printable_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _printable_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable_values(inner) for inner in value]
    return _printable(value) if isinstance(value, str) else value
