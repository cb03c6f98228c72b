"""Quantities as the API server reads them (k8s.io/apimachinery/pkg/api/resource)."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from gpukiln.errors import UsageError

_FORM = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?P<unit>[KMGTPE]i|[numkMGTPE]?|[eE](?P<exponent>[+-]?\d{1,3}))"
)
LONGEST = 100  # characters; an exponent has three digits at most
_BINARY = {unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_SMALL = {"m": Decimal("1e-3"), "u": Decimal("1e-6"), "n": Decimal("1e-9"), "": Decimal(1)}
_UNITS = _BINARY | _DECIMAL | _SMALL
_MEANT = {  # what people write -> what the API server reads
    "b": "",
    "kb": "k",
    "mb": "M",
    "gb": "G",
    "tb": "T",
    "kib": "Ki",
    "mib": "Mi",
    "gib": "Gi",
    "tib": "Ti",
    "ki": "Ki",
    "mi": "Mi",
    "gi": "Gi",
    "ti": "Ti",
    "g": "G",
    "t": "T",
    "K": "k",
}


def quantity(value: Any) -> Decimal | None:
    """A quantity in its base unit (bytes, cores, pieces); None where it is none.

    Args:
        value: "500m", "16Gi", 8, 0.5, "1e3".
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _read(str(value))


def amount(text: str, option: str, example: str) -> Decimal:
    """A quantity that was typed, more than nothing.

    Raises:
        UsageError: It is none; says what was probably meant.
    """
    found = quantity(text.strip())
    if found is None:
        number, unit = re.match(r"([\d.]*)\s*(.*)", text.strip()).groups()  # type: ignore[union-attr]
        meant = _MEANT.get(unit) or _MEANT.get(unit.lower())
        hint = f"did you mean {number}{meant}?" if number and meant is not None else f"wanted: {example}"
        raise UsageError(f"{option} {text!r} is no quantity of Kubernetes", hint=hint)
    if found <= 0:
        raise UsageError(f"{option} {text!r} is not more than nothing", hint=f"wanted: {example}")
    return found


@lru_cache(maxsize=4096)
def _read(text: str) -> Decimal | None:
    if len(text) > LONGEST or not (match := _FORM.fullmatch(text)):
        return None
    number = Decimal(match["number"])
    if match["exponent"] is not None:
        return number.scaleb(int(match["exponent"]))
    return number * _UNITS[match["unit"]]
