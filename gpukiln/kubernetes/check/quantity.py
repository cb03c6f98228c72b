"""Quantities as the API server reads them (k8s.io/apimachinery/pkg/api/resource)."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

_FORM = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?P<unit>[KMGTPE]i|[numkMGTPE]?|[eE](?P<exponent>[+-]?\d{1,3}))"
)
_BINARY = {unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_SMALL = {"m": Decimal("1e-3"), "u": Decimal("1e-6"), "n": Decimal("1e-9"), "": Decimal(1)}
_UNITS = _BINARY | _DECIMAL | _SMALL


def quantity(value: Any) -> Decimal | None:
    """A quantity in its base unit (bytes, cores, pieces); None where it is none.

    Args:
        value: "500m", "16Gi", 8, 0.5, "1e3".
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _read(str(value))


@lru_cache(maxsize=4096)
def _read(text: str) -> Decimal | None:
    if not (match := _FORM.fullmatch(text)):
        return None
    number = Decimal(match["number"])
    if match["exponent"] is not None:
        return number.scaleb(int(match["exponent"]))
    return number * _UNITS[match["unit"]]
