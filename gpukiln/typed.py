"""Plain data into typed values and back; what does not fit is reported in plain words, one line a mistake."""

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
FOUND_CHARACTERS = 120  # of a wrong value that a message shows

_REPR = reprlib.Repr()  # of what aliases make huge, too
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 4 * FOUND_CHARACTERS
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 20
_REPR.maxlevel = 4


@dataclass_transform(frozen_default=True)
def strict(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that refuses unknown keys when it is read from YAML or JSON."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]  # pydantic looks for it there
    return dataclass(frozen=True)(cls)


def template(*names: str) -> AfterValidator:
    """What a text must fit in which names in braces stand for something.

    Args:
        names: Those that are known.
    """
    from pydantic import AfterValidator  # noqa: PLC0415 - see above

    def check(text: str) -> str:
        try:
            text.format(**dict.fromkeys(names, "x"))
        except (ValueError, LookupError, AttributeError) as error:
            known = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"it may hold {known} and no other braces") from error
        return text

    return AfterValidator(check)


def validated(read: Callable[[str], str]) -> AfterValidator:
    """What a text of a field is read by; its UsageError is reported as one of the document's mistakes."""
    from pydantic import AfterValidator  # noqa: PLC0415 - see above

    def check(text: str) -> str:
        try:
            return read(text)
        except UsageError as error:
            raise ValueError(error.hint) from error

    return AfterValidator(check)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - see above

    return TypeAdapter(kind)  # slow to make: a file of vulnerabilities has tens of thousands of records


def load(kind: type[T], value: object, *, where: str, hint: str = "") -> T:
    """Turn plain data into a typed value.

    Args:
        kind: The type wanted.
        value: What YAML or JSON gave.
        where: File and key, for the message.
        hint: What to do where it does not fit.

    Returns:
        The typed value.

    Raises:
        UsageError: The data does not fit; every mistake is one line of the details.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - see above

    try:
        valid: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]  # every type can be hashed
        return valid
    except ValidationError as error:
        mistakes = tuple(_mistake(kind, item) for item in error.errors())
        if len(mistakes) == 1:
            raise UsageError(f"{where}: {mistakes[0]}", hint=hint) from error
        raise UsageError(f"{where}: {len(mistakes)} mistakes", details=mistakes, hint=hint) from error


def dump(value: Any) -> Any:
    """Turn a typed value into plain data, ready for JSON; `load` reads it."""
    adapter = _adapter(type(value))  # type: ignore[arg-type]  # every type can be hashed
    return adapter.dump_python(value, mode="json")


# Pydantic's type of an error, or how it begins -> what is wanted.
WANTED = {
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


def _mistake(kind: Any, item: Any) -> str:
    """One mistake in our words: the key, what was found, what is wanted."""
    *above, last = item["loc"] or ("",)
    key, where = ".".join(map(str, item["loc"])), ".".join(map(str, above))
    what = item["type"]
    if what in ("missing", "missing_argument"):
        return f"{key} is missing"
    if what in ("unexpected_keyword_argument", "extra_forbidden"):
        keys = _keys(kind, above)
        error = unknown(f"key in {where}:" if above else "key", str(last), keys)
        return f"{error.message}; {error.hint}" if error.hint else error.message
    found = "it has no value" if item["input"] is None else f"found {short(item['input'])}"
    if what == "value_error":
        wanted = str(item["ctx"]["error"])
    elif what == "literal_error":
        wanted = f"wanted {item['ctx']['expected']}"
    else:
        known = WANTED.get(what.partition("_")[0])
        wanted = f"wanted {known}" if known else item["msg"].replace("Input should be", "wanted something")
    if what == "string_type" and isinstance(item["input"], int | float):
        wanted += f': put it in quotes, "{item["input"]}"'
    if not key and what == "value_error":  # of the whole document, which is too long to be shown
        return wanted
    return f"{key}: {found}, {wanted}" if key else f"{found}, {wanted}"


def _keys(kind: Any, way: Iterable[int | str]) -> list[str]:
    """The keys that may stand where a way of keys and indices leads; none where that can't be told."""
    for step in way:
        kind = _record_in(kind)
        inner = [one for one in get_args(kind) if one is not ...]
        kind = get_type_hints(kind).get(str(step)) if is_dataclass(kind) else inner[-1] if inner else None
    kind = _record_in(kind)
    return [one.name for one in fields(kind)] if is_dataclass(kind) else []


def _record_in(kind: Any) -> Any:
    """A record that may be left out is one."""
    if isinstance(kind, UnionType):
        return next((one for one in get_args(kind) if one is not NoneType), None)
    return kind


def short(value: object, *, quote: bool = True) -> str:
    text = _REPR.repr(value) if quote else str(value)
    return text if len(text) <= FOUND_CHARACTERS else f"{text[:FOUND_CHARACTERS]}..."


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that is not there.

    Args:
        kind: What was named, for example "base".
        name: What was typed.
        choices: What would have been right.

    Returns:
        An error that names the nearest choice and, where they are few, all of them.
    """
    valid = sorted(choices)
    meant = suggestions(name, valid)
    hint = f"did you mean {' or '.join(meant)}?" if meant else ""
    listed = valid if len(valid) <= 40 else meant or valid[:20]
    label = "valid" if len(valid) <= 40 else f"some of the {len(valid)} valid"
    return UsageError(f"unknown {kind} {name!r}; {label}: {', '.join(listed) or 'none'}", hint=hint)
