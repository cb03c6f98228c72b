"""Scalars of YAML as kubectl, Helm and the API server read them: by sigs.k8s.io/yaml.

It uses go.yaml.in/yaml/v2 (resolve.go), whose rules are neither those of YAML 1.1 nor of 1.2: `1e-4`, `08`
and `0o17` are numbers, `y` is true, `1:30` and dates are texts. The values become JSON, which has no separate
type for whole floats (`1.0` is 1) and no infinity.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from decimal import Decimal
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
MERGE, TEXT, PLAIN = f"{_TAG}merge", f"{_TAG}str", "?"  # PLAIN: a scalar without a tag and without quotes
_WORDS: dict[str, Any] = {
    **{form: True for word in ("y", "yes", "true", "on") for form in (word, word.capitalize(), word.upper())},
    **{
        form: False
        for word in ("n", "no", "false", "off")
        for form in (word, word.capitalize(), word.upper())
    },
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
# strconv.ParseInt with base 0, after underscores are removed; after `0b` resolve.go accepts a second sign.
_WHOLE = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<binary>[01]+)"
    r"|0[oO]?(?P<octal>[0-7]+)|(?P<decimal>0|[1-9][0-9]*))|0b(?P<signed>[-+][01]+)"
)
_BASES = {"hex": 16, "binary": 2, "octal": 8, "decimal": 10, "signed": 2}
_MOST_DIGITS = 20  # of a 64-bit number; Python's int() refuses more than 4,300 digits
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_DOTTED = re.compile(r"\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+(?:_[0-9]+)*)?")
# yaml.org/spec/1.2.2, 10.3.2 (core schema), which readers in other languages follow.
_CORE = re.compile(
    r"~?|null|Null|NULL|true|True|TRUE|false|False|FALSE|0o[0-7]+|0x[0-9a-fA-F]+"
    r"|[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
# yaml.org/type/int and float: in YAML 1.1 `1:30` is 90 and `._5` is 0.5; `+_` makes some readers fail.
_SPACED = re.compile(r"(?=[-+0-9_.])[-+]?[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9_]+)?")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_EXACT = 21  # digits: Go's encoding/json writes floats from 1e21 on with an exponent


class Loader(yaml.CSafeLoader):
    """Composes nodes whose plain scalars have the tag PLAIN; `value` decides their type."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            if not implicit[0]:
                return TEXT
            return MERGE if value == "<<" else PLAIN
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


def value(node: yaml.ScalarNode) -> Any:
    """The JSON value of a scalar that `Loader` composed.

    Raises:
        ValueError: The text does not match the tag, or JSON has no such number.
    """
    parsed = _tagged(node.tag, node.value)
    if isinstance(parsed, float):
        if not math.isfinite(parsed):
            raise ValueError(f"{node.value} is a number that JSON does not have; put a text in quotes")
        if parsed.is_integer() and abs(parsed) < 10**_EXACT:
            return int(Decimal(repr(parsed)))  # as encoding/json writes it
    return parsed


def key(node: yaml.ScalarNode) -> str:
    """The JSON key of a scalar, for example `true` for `on`.

    Raises:
        ValueError: The scalar is null, or does not match its tag.
    """
    parsed = _tagged(node.tag, node.value)
    if isinstance(parsed, bool):
        return "true" if parsed else "false"
    if parsed is None or (isinstance(parsed, int) and parsed >= 1 << 63):
        raise ValueError(f"{node.value or 'nothing'} is no key in JSON; put a text in quotes")
    return _short(parsed) if isinstance(parsed, float) else str(parsed)


def is_text(text: str) -> bool:
    """Whether every YAML reader reads a plain scalar as a text: Go's, and those of YAML 1.1 and 1.2.

    >>> is_text("nvidia"), is_text("1:30"), is_text("on")
    (True, False, False)
    """
    if _CORE.fullmatch(text) or _SEXAGESIMAL.fullmatch(text) or _SPACED.fullmatch(text):
        return False
    return isinstance(plain(text), str)


def plain(text: str) -> Any:
    """The value of a scalar without tag and quotes; whole floats stay floats.

    >>> plain("08"), plain("1e-4"), plain("y"), plain("1:30")
    (8.0, 0.0001, True, '1:30')
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] == ".":
        return _number(text) if _DOTTED.fullmatch(text) else text
    if text[0] not in "+-0123456789":
        return text
    digits = text.replace("_", "")
    if (whole := _whole(digits)) is not None:
        return whole
    number = _number(digits) if _FLOAT.fullmatch(digits) else digits
    return text if isinstance(number, str) else number


def _tagged(tag: str, text: str) -> Any:
    if tag == PLAIN:
        return plain(text)
    kind = tag.removeprefix(_TAG)
    if kind == "binary":
        try:
            return base64.b64decode(text.encode(), validate=True).decode(errors="replace")
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ValueError(f"no base64: {error}") from None
    if kind not in ("int", "float", "bool", "null"):
        return text  # a text, a time, or an unknown tag
    parsed = plain(text)
    if kind == "float" and isinstance(parsed, int) and not isinstance(parsed, bool):
        return float(parsed)
    is_kind: bool = parsed is None if kind == "null" else type(parsed).__name__ == kind
    if not is_kind:
        raise ValueError(f"{text} is not of the type of its tag, !!{kind}")
    return parsed


def _whole(text: str) -> int | None:
    match = _WHOLE.fullmatch(text)
    if match is None:
        return None
    name = str(match.lastgroup)
    if name == "decimal" and len(match[name]) > _MOST_DIGITS:
        return None
    number = int((match["sign"] or "") + match[name], _BASES[name])
    beyond = 1 << 63 if "+" in text else 1 << 64  # ParseUint, which resolve.go tries next, accepts no sign
    return number if -(1 << 63) <= number < beyond else None


def _number(text: str) -> float | str:
    """A float; a number that is too large stays a text, because strconv.ParseFloat fails for it."""
    number = float(text)
    return number if math.isfinite(number) else text


def _short(number: float) -> str:
    """A number as strconv.FormatFloat(number, 'g', -1, 32) writes it."""
    number = _single(number)
    if not math.isfinite(number):
        return ".nan" if math.isnan(number) else ".inf" if number > 0 else "-.inf"
    digits = next(
        digit_count for digit_count in range(9) if _single(float(f"{number:.{digit_count}e}")) == number
    )
    mantissa, _, exponent = f"{number:.{digits}e}".partition("e")
    if -4 <= int(exponent) < 6:
        return f"{number:.{max(digits - int(exponent), 0)}f}"
    return f"{mantissa}e{exponent}"


def _single(number: float) -> float:
    """The nearest float of 32 bits."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)
