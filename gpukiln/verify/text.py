"""Text of a judged machine as reports may show it, and files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpukiln.verify.gather_base import redact

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
        It without secrets (`gather_base.redact`) and with every character that XML can't hold replaced.
    """
    whole = text.encode("utf-8", "replace").decode()  # half a surrogate pair can't be written as UTF-8
    return redact(whole.replace("\r\n", "\n").translate(_PICTURES))


def presentable_values(value: Any) -> Any:
    """Make every text in plain data presentable: in a JSON document secrets would have other quotes.

    Args:
        value: Dicts, lists, texts, numbers.

    Returns:
        The same with other texts; keys are left as they are.
    """
    if isinstance(value, Mapping):
        return {key: presentable_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [presentable_values(inner) for inner in value]
    return presentable(value) if isinstance(value, str) else value


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step.

    Args:
        path: The file; its folder exists.
        text: All of it.

    Raises:
        OSError: It can't be written; what was there before is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
