"""Quantities of Kubernetes' manifests, as the API server reads them (k8s.io/apimachinery/pkg/api/resource).

The client library's parser accepts more than the server (`1_0`, `5K`, NaN), so the form is checked first.
Options and settings of gpukiln have the form of gpukiln/units.py instead.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError

_FORM = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]?|[eE][+-]?[0-9]{1,3})")
LONGEST = 100  # characters; with three digits of exponent at most (_FORM) a value is quick to compute with


def quantity(value: Any) -> Decimal | None:
    """A quantity in its base unit (bytes, cores, counts); None if the value is no quantity.

    >>> quantity("500m"), quantity("2Ki"), quantity("5K")
    (Decimal('0.500'), Decimal('2048'), None)

    Args:
        value: "500m", "16Gi", 8, 0.5, "1e3".
    """
    # In Python bool is an int; in YAML `true` is no quantity.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _parse(str(value))


def parse_quantity(text: str, option: str, example: str) -> Decimal:
    """Read a quantity above 0 from an option.

    >>> parse_quantity("3500m", "--cpu", "4")
    Decimal('3.500')

    Raises:
        UsageError: It is no quantity, or not above 0.
    """
    number = quantity(text.strip())
    if number is None:
        raise UsageError(f"{option} {text!r} is no quantity of Kubernetes", hint=f"wanted: {example}")
    if number <= 0:
        raise UsageError(f"{option} {text!r} is not above 0", hint=f"wanted: {example}")
    return number


@lru_cache(maxsize=4096)
def _parse(text: str) -> Decimal | None:
    return _parser()(text) if len(text) <= LONGEST and _FORM.fullmatch(text) else None


@cache
def _parser() -> Callable[[str], Decimal]:
    """kubernetes.utils.quantity.parse_quantity, loaded from its file.

    Importing the package `kubernetes` loads every class of the API, which takes a second.
    """
    library = importlib.util.find_spec("kubernetes")
    assert library is not None  # noqa: S101 - a dependency
    assert library.origin is not None  # noqa: S101 - it is a file
    file = Path(library.origin).parent / "utils" / "quantity.py"
    spec = importlib.util.spec_from_file_location("kubernetes_quantity", file)
    assert spec is not None  # noqa: S101 - of a file that ends with .py there is one
    assert spec.loader is not None  # noqa: S101 - as before
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parse: Callable[[str], Decimal] = module.parse_quantity
    return parse
