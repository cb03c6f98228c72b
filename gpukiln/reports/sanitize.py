"""Cleans text of machines and files for reports: no secrets, no control characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpukiln.redact import redact, redact_value

# Control characters become their pictures (Unicode, "Control Pictures"): HTML and XML do not allow them.
# Bidirectional control characters could reorder the text of a report, so that it reads differently.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    **dict.fromkeys((*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD),
}


def sanitize(text: str) -> str:
    r"""Clean a text for a report.

    Args:
        text: Output of a machine, or content of a file.

    Returns:
        The text without secrets (`gpukiln.redact`), and without characters that XML does not allow.

    >>> sanitize("first\x00 line")
    'first␀ line'
    >>> sanitize("as it is")
    'as it is'
    """
    return redact(_printable(text))


def sanitize_values(value: Any) -> Any:
    """Sanitize every text in plain data, and remove the values of keys that name a secret.

    Args:
        value: Dicts, lists, texts, numbers.

    Returns:
        The data with cleaned texts and unchanged keys.
    """
    return redact_value(_printable_values(value))


def _printable(text: str) -> str:
    whole = text.encode("utf-8", "replace").decode()  # a lone surrogate can't be encoded as UTF-8
    return whole.replace("\r\n", "\n").translate(_PICTURES)


def _printable_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _printable_values(inner) for key, inner in value.items()}
    # Keys are names of gpukiln's own fields and need no cleaning.
    if isinstance(value, list):
        return [_printable_values(inner) for inner in value]
    return _printable(value) if isinstance(value, str) else value
