"""Converts plain data to typed values and back; each mistake in the data is reported in one line."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from gpukiln.errors import UsageError
from gpukiln.options import suggestions

if TYPE_CHECKING:  # slow to import, and `invoke --list` needs none of it
    from pydantic import AfterValidator, TypeAdapter

T = TypeVar("T")
SHOWN_CHARACTERS = 120  # of a wrong value in a message

_REPR = reprlib.Repr()  # bounds values that YAML aliases make huge
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 4 * SHOWN_CHARACTERS
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 20
_REPR.maxlevel = 4


@dataclass_transform(frozen_default=True)
def strict(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that refuses unknown keys when it is read from YAML or JSON."""
    # A misspelled key would otherwise be ignored silently.
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]  # pydantic looks for it there
    return dataclass(frozen=True)(cls)


def template(*names: str) -> AfterValidator:
    """A validator for texts with placeholders in braces.

    Args:
        names: The known placeholders.
    """
    from pydantic import AfterValidator  # noqa: PLC0415 - see above

    def check(text: str) -> str:
        try:
            text.format(**dict.fromkeys(names, "x"))
        except (ValueError, LookupError, AttributeError) as error:
            known = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"it may have {known} and no other braces") from error
        return text

    return AfterValidator(check)


def validated(read: Callable[[str], str]) -> AfterValidator:
    """A validator that calls a parser; the parser's UsageError is reported as a mistake in the document."""
    from pydantic import AfterValidator  # noqa: PLC0415 - see above

    def check(text: str) -> str:
        try:
            return read(text)
        except UsageError as error:
            raise ValueError(error.hint) from error

    return AfterValidator(check)


# Cached: an adapter is slow to create, and a file of vulnerabilities has tens of thousands of records.
@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - see above

    return TypeAdapter(kind)


def load(kind: type[T], value: object, *, where: str, hint: str = "") -> T:
    """Turn plain data into a typed value.

    Args:
        kind: The type of the result.
        value: Data from YAML or JSON.
        where: File and key, for the message.
        hint: The next step for the message.

    Returns:
        The typed value.

    Raises:
        UsageError: The data does not fit the type; each mistake is one line of the details.

    >>> load(tuple[int, ...], [1, 2], where="limits.yaml")
    (1, 2)
    >>> load(tuple[int, ...], ["a"], where="limits.yaml")
    Traceback (most recent call last):
    gpukiln.errors.UsageError: limits.yaml: 0: found 'a', wanted a whole number
    """
    from pydantic import ValidationError  # noqa: PLC0415 - see above

    try:
        valid: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]  # every type can be hashed
        return valid
    except ValidationError as error:
        # All mistakes at once, so that a file is corrected in one pass.
        mistakes = tuple(_describe_mistake(kind, item) for item in error.errors())
        if len(mistakes) == 1:
            raise UsageError(f"{where}: {mistakes[0]}", hint=hint) from error
        raise UsageError(f"{where}: {len(mistakes)} mistakes", details=mistakes, hint=hint) from error


def dump(value: Any) -> Any:
    """Turn a typed value into plain data, ready for JSON; `load` reads it."""
    adapter = _adapter(type(value))  # type: ignore[arg-type]  # every type can be hashed
    return adapter.dump_python(value, mode="json")


# Pydantic's error type up to its first underscore -> the expected value in a message.
EXPECTED_TYPES = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "date": "a day such as 2026-12-31",
    "datetime": "a time such as 2026-12-31T00:00:00Z",
    "tuple": "a list, [A, B]",
    "list": "a list, [A, B]",
    "set": "a list, [A, B]",
    "frozen": "a list, [A, B]",
    "dict": "keys with values, KEY: VALUE",
    "mapping": "keys with values, KEY: VALUE",
    "dataclass": "keys with values, KEY: VALUE",
}


def _describe_mistake(kind: Any, item: Any) -> str:
    """A mistake of Pydantic as one line: the key, the value found, the value wanted."""
    *above, last = item["loc"] or ("",)
    key, where = ".".join(map(str, item["loc"])), ".".join(map(str, above))
    what = item["type"]
    if what in ("missing", "missing_argument"):
        return f"{key} is missing"
    if what in ("unexpected_keyword_argument", "extra_forbidden"):
        keys = _keys_at(kind, above)
        error = unknown(f"key in {where}:" if above else "key", str(last), keys)
        return f"{error.message}; {error.hint}" if error.hint else error.message
    found_text = "it has no value" if item["input"] is None else f"found {short(item['input'])}"
    if what == "value_error":
        wanted_text = str(item["ctx"]["error"])
    elif what == "literal_error":
        wanted_text = f"wanted {item['ctx']['expected']}"
    else:
        known = EXPECTED_TYPES.get(what.partition("_")[0])
        wanted_text = (
            f"wanted {known}" if known else item["msg"].replace("Input should be", "wanted something")
        )
    if what == "string_type" and isinstance(item["input"], int | float):
        wanted_text += f': put it in quotes, "{item["input"]}"'
    if not key and what == "value_error":  # about the whole document, which is too long for a message
        return wanted_text
    return f"{key}: {found_text}, {wanted_text}" if key else f"{found_text}, {wanted_text}"


def _keys_at(kind: Any, way: Iterable[int | str]) -> list[str]:
    """The keys that a type allows at a path of keys and indices; none where the type is no dataclass."""
    for step in way:
        kind = _strip_optional(kind)
        inner = [argument for argument in get_args(kind) if argument is not ...]
        kind = get_type_hints(kind).get(str(step)) if is_dataclass(kind) else inner[-1] if inner else None
    kind = _strip_optional(kind)
    return [record_field.name for record_field in fields(kind)] if is_dataclass(kind) else []


def _strip_optional(kind: Any) -> Any:
    """The type of an optional value: X for X | None."""
    if isinstance(kind, UnionType):
        return next((member for member in get_args(kind) if member is not NoneType), None)
    return kind


def short(value: object, *, quote: bool = True) -> str:
    """A value for a message, truncated to `SHOWN_CHARACTERS`.

    >>> short({"driver": "580"})
    "{'driver': '580'}"
    >>> len(short("a" * 500))
    123
    """
    text = _REPR.repr(value) if quote else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for an unknown name.

    Args:
        kind: What the name is of, for example "base".
        name: What the user typed.
        choices: The valid names.

    Returns:
        An error with the nearest choice and, where there are few, all choices.

    >>> print(unknown("market", "sopt", ["spot", "on-demand"]))
    unknown market 'sopt'; valid: on-demand, spot
    >>> unknown("market", "sopt", ["spot", "on-demand"]).hint
    'did you mean spot?'
    """
    valid = sorted(choices)
    meant = suggestions(name, valid)
    hint = f"did you mean {' or '.join(meant)}?" if meant else ""
    # A list of all instance types would hide the message.
    listed = valid if len(valid) <= 40 else meant or valid[:20]
    label = "valid" if len(valid) <= 40 else f"some of the {len(valid)} valid"
    return UsageError(f"unknown {kind} {name!r}; {label}: {', '.join(listed) or 'none'}", hint=hint)
