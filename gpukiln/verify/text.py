"""Text of a judged machine as reports may show it, and files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gpukiln.redact import redact, redact_value

# Control characters as their pictures: neither HTML nor XML may hold them. Marks that change the direction of
# the text around them could make a report say something else than it does.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    **dict.fromkeys((*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD),
}


def presentable(text: str) -> str:
    """Make a text fit to be shown.

    Args:
        text: Anything that a machine said.

    Returns:
        It without secrets (`gpukiln.redact`) and with every character that XML can't hold replaced.
    """
    return redact(_printable(text))


def presentable_values(value: Any) -> Any:
    """Make every text in plain data presentable, and leave out what stands under a secret's name.

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


def open_private(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file for writing that nobody else may read, whatever the umask and whatever it was before."""

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        os.fchmod(number, 0o600)
        return number

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=opener)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step; nobody else may read it.

    Args:
        path: The file; its folder exists.
        text: All of it.

    Raises:
        OSError: It can't be written; what was there before is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open_private(part, "w") as file:
            file.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
