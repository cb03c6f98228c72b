"""Functions that Kubernetes adds to CEL (kubernetes.io/docs/reference/using-api/cel), beyond the standard's.

A rule that calls a function that is missing here is reported as not checked. The receiver of a method is the
first argument.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from gpukiln.kubernetes.quantity import quantity


def _amount(text: Any) -> Decimal:
    number = quantity(text)
    if number is None:
        raise ValueError(f"{text!r} is no quantity")
    return number


def _is_quantity(text: Any) -> bool:
    return isinstance(text, str) and quantity(text) is not None


def _compare(first: Any, other: Any) -> int:
    return (_amount(first) > _amount(other)) - (_amount(first) < _amount(other))


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match[0] if match else ""


def _find_all(text: str, pattern: str, most: int = -1) -> list[str]:
    matches = [match[0] for match in re.finditer(pattern, text)]
    return matches if most < 0 else matches[:most]


def _split(text: str, separator: str, most: int = -1) -> list[str]:
    if most == 0:
        return []
    if not separator:
        return list(text)
    # CEL's limit counts parts, Python's counts separators.
    return text.split(separator) if most < 0 else text.split(separator, most - 1)


def _index(of: Any, what: Any) -> int:
    if isinstance(of, str):
        return of.find(what)
    return of.index(what) if what in of else -1


def _last_index(of: Any, what: Any) -> int:
    if isinstance(of, str):
        return of.rfind(what)
    return max((index for index, item in enumerate(of) if item == what), default=-1)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_range(text: str) -> bool:
    try:
        # Not ip_network, which refuses addresses within the range, such as 10.0.0.1/8.
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "/" in text


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme) or text.startswith("/")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "find": _find,
    "findAll": _find_all,
    "split": _split,
    "join": lambda texts, separator="": separator.join(texts),
    "replace": lambda text, old, new, most=-1: text.replace(old, new, most),
    "lowerAscii": lambda text: text.lower(),
    "upperAscii": lambda text: text.upper(),
    "trim": lambda text: text.strip(),
    "substring": lambda text, start, end=None: text[start:end],
    "charAt": lambda text, index: text[index : index + 1],
    "indexOf": _index,
    "lastIndexOf": _last_index,
    "isSorted": lambda values: all(values[at] <= values[at + 1] for at in range(len(values) - 1)),
    "sum": sum,
    "min": min,
    "max": max,
    "isIP": _is_address,
    "isCIDR": _is_range,
    "isURL": _is_url,
    "isQuantity": _is_quantity,
    # A quantity remains a text, which the comparisons parse; `_amount` raises the error for others.
    "quantity": lambda text: str(text) if _is_quantity(text) else _amount(text),
    "isGreaterThan": lambda first, other: _compare(first, other) > 0,
    "isLessThan": lambda first, other: _compare(first, other) < 0,
    "compareTo": _compare,
}
