"""The keywords of `validation.py` that JSON Schema lacks, and how its table is merged into the schemas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators  # type: ignore[import-untyped]

from gpukiln.kubernetes.check.formats import FORMATS, LABEL_KEY
from gpukiln.kubernetes.check.relations import Check
from gpukiln.kubernetes.check.validation import FIELDS, Row
from gpukiln.kubernetes.check.workload import is_placeholder
from gpukiln.typed import short

Schema = dict[str, Any]
Errors = Iterator[ValidationError]
WHOLE_OBJECT_KEYWORDS = ("given", "some", "filled")  # keywords that don't apply to a part of an object
_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def _words(_: Any, words: tuple[str, ...], value: Any, schema: Schema) -> Errors:
    if not isinstance(value, str) or value in words:
        return
    # LimitRange types may be extended with a domain.
    if schema.get("qualified") and "/" in value and LABEL_KEY.fullmatch(value):
        return
    choices = [word for word in words if word]
    yield ValidationError(f"found {short(value)}, wanted {' or '.join(choices)}")


def _between(_: Any, limits: tuple[int, int | None], value: Any, __: Schema) -> Errors:
    least, most = limits
    if isinstance(value, int) and not isinstance(value, bool) and (value < least or (most and value > most)):
        allowed = f"{least} to {most}" if most else f"{least} or more"
        yield ValidationError(f"found {value}, wanted {allowed}")


def _form(_: Any, name: str, value: Any, schema: Schema) -> Errors:
    # null and, in some fields, an empty text are as if the field were missing.
    if value is None or (value == "" and schema.get("emptiable")) or value in schema.get("also", ()):
        return
    if isinstance(value, bool | list | Mapping) or FORMATS[name].holds(value):
        return
    yield ValidationError(f"found {short(value)}, wanted {FORMATS[name].wanted}")


def _values(_: Any, name: str, value: Any, __: Schema) -> Errors:
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if item is None or isinstance(item, bool | list | Mapping) or is_placeholder(item):
            continue
        if not FORMATS[name].holds(item):
            yield ValidationError(f"found {short(item)}, wanted {FORMATS[name].wanted}", path=(key,))


def _keys(_: Any, name: str, value: Any, __: Schema) -> Errors:
    for key in value if isinstance(value, Mapping) else ():
        if not FORMATS[name].holds(key) and not is_placeholder(key):
            yield ValidationError(f"found the key {short(key)}, wanted {FORMATS[name].wanted}", path=(key,))


def _once(_: Any, fields: tuple[str, ...], value: Any, __: Schema) -> Errors:
    if not isinstance(value, list) or len(value) < 2:
        return
    counted = Counter(
        json.dumps([item.get(field) for field in fields] if fields else item, default=str, sort_keys=True)
        for item in value
        if not fields or (isinstance(item, Mapping) and item.get(fields[0]))
    )
    for text, many in counted.items():
        if many > 1:
            yield ValidationError(f"{text.strip('[]')} occurs {many} times; wanted once")


def _filled(_: Any, __: bool, value: Any, ___: Schema) -> Errors:
    if value in ("", [], {}):
        yield ValidationError("found nothing, wanted a value")


def _given(_: Any, fields: tuple[str, ...], value: Any, schema: Schema) -> Errors:
    if not isinstance(value, Mapping):
        return
    for field in fields:
        if value.get(field) is None:
            if field not in schema.get("required", ()):
                yield ValidationError(f"{field} is missing")
        elif value[field] in ("", [], {}):
            yield ValidationError(f"{field} is empty", path=(field,))


def _most(_: Any, fields: tuple[str, ...], value: Any, __: Schema) -> Errors:
    if not isinstance(value, Mapping):
        return
    given = [field for field in fields if value.get(field) not in (None, "", 0)]
    if len(given) > 1:
        yield ValidationError(
            f"{' and '.join(given)} exclude each other; wanted one of them", path=(given[1],)
        )


def _some(_: Any, fields: tuple[str, ...], value: Any, __: Schema) -> Errors:
    if isinstance(value, Mapping) and all(value.get(field) in (None, [], "") for field in fields):
        yield ValidationError(f"wanted one of {', '.join(fields)}")


def _checks(_: Any, checks: tuple[Check, ...], value: Any, __: Schema) -> Errors:
    if isinstance(value, Mapping):
        for check in checks:
            for path, text in check(value):
                yield ValidationError(text, path=path)


def _format(_: Any, name: str, value: Any, __: Schema) -> Errors:
    if name in _RANGES and isinstance(value, int) and not _RANGES[name][0] <= value <= _RANGES[name][1]:
        yield ValidationError(f"found {value}, wanted a number of {name.removeprefix('int')} bits")
    elif name == "date-time" and not FORMATS["time"].holds(value):
        yield ValidationError(f"found {short(value)}, wanted {FORMATS['time'].wanted}")
    elif name == "byte" and not FORMATS["base64"].holds(value):
        yield ValidationError(f"found {short(value)}, wanted {FORMATS['base64'].wanted}")


KEYWORDS = {
    "words": _words,
    "between": _between,
    "form": _form,
    "values": _values,
    "keys": _keys,
    "once": _once,
    "filled": _filled,
    "given": _given,
    "most": _most,
    "some": _some,
    "check": _checks,
    "format": _format,
}
ServerValidator: Any = validators.extend(Draft202012Validator, KEYWORDS)


def with_server_rules(name: str, definition: Schema) -> Schema:
    """A definition merged with its row of the table.

    Args:
        name: For example io.k8s.api.core.v1.Pod; rows outside io.k8s.api have only the last part.
        definition: Its references are resolved; the resolved definitions are not modified.
    """
    row = FIELDS.get(name.removeprefix("io.k8s.api.")) or FIELDS.get(name.rpartition(".")[2])
    if row is None:
        return definition
    extended = {**definition, "properties": {**definition.get("properties", {})}}
    fields = extended["properties"]
    given = tuple(field[:-1] for field in row if field.endswith("!") and field[:-1] in fields)
    if given:
        extended["given"] = given
    # Without the sign, the same names are keywords of the validator.
    for key in ("@most", "@some", "@check"):
        if key in row:
            extended[key[1:]] = row[key]
    if "@optional" in row:
        extended["required"] = [
            field for field in extended.get("required", ()) if field not in row["@optional"]
        ]
    for field in row.get("@any", ()):
        fields[field] = {"type": ["object", "null"]}
    for key, field_row in row.items():
        field = key.rstrip("![]")
        # A version of Kubernetes may not have the field.
        if key.startswith("@") or field not in fields or not field_row:
            continue
        if key.endswith("[]"):
            fields[field] = {
                **fields[field],
                "items": _merged_schema(fields[field].get("items", {}), field_row),
            }
        else:
            fields[field] = _merged_schema(fields[field], field_row)
    return extended


def _merged_schema(schema: Schema, row: Row) -> Schema:
    more = {("values" if key == "form{}" else key): value for key, value in row.items()}
    # A resolved reference may still be empty here, if its definition refers to itself: allOf keeps the
    # reference.
    return {**schema, **more} if schema.get("type") or "oneOf" in schema else {"allOf": [schema], **more}
