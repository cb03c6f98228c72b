"""Custom objects checked by their CustomResourceDefinition: structural schema, defaults, CEL rules."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from gpukiln.kubernetes.check.cel_functions import FUNCTIONS
from gpukiln.kubernetes.check.keywords import Schema, ServerValidator
from gpukiln.kubernetes.check.workload import Path, Resource, Violation, at, is_placeholder, mapping, sequence
from gpukiln.typed import short

if TYPE_CHECKING:
    from gpukiln.kubernetes.cluster import Cluster

KIND = "CustomResourceDefinition"
_NUMBER, _TYPES_OF = (int, float), ("array", "boolean", "integer", "number", "object", "string")
# Keywords of OpenAPI that mean the same in JSON Schema, and the type of their values.
_SAME_KEYWORDS: dict[str, type | tuple[type, ...]] = {
    "type": str,
    "format": str,
    "enum": list,
    "required": list,
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), int
    ),
}
# kubernetes.io/docs/reference/using-api/cel, "Escaping": how a rule names a field that is no identifier.
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
_RESERVED = frozenset(
    (
        *("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if"),
        *("import", "let", "loop", "package", "namespace", "return", "var", "void", "while"),
    )
)


@dataclass(frozen=True)
class Definition:
    """One version of a custom kind.

    Args:
        schema: Its structural schema; empty where it has none.
        form: The same as JSON Schema.
        left_out: Parts of the schema that can't be checked here.
    """

    api: str
    kind: str
    schema: Schema
    form: Any = field(compare=False, repr=False)
    left_out: tuple[str, ...] = ()


def definitions(objects: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Definition]:
    """(apiVersion, kind) -> its definition, from the CustomResourceDefinitions among the objects."""
    known = {}
    for candidate in objects:
        if candidate.get("kind") != KIND or candidate.get("apiVersion") != "apiextensions.k8s.io/v1":
            continue
        spec = mapping(candidate.get("spec"))
        group, kind = str(spec.get("group", "")), str(mapping(spec.get("names")).get("kind", ""))
        for version in sequence(spec.get("versions")):
            if mapping(version).get("served") is True:
                api = f"{group}/{version.get('name')}"
                schema = dict(mapping(at(version, ("schema", "openAPIV3Schema"))))
                left_out: list[str] = []
                form = ServerValidator(_root_schema(schema, left_out))
                known[api, kind] = Definition(api, kind, schema, form, tuple(left_out))
    return known


def definitions_of(resources: Iterable[Resource]) -> dict[tuple[str, str], Definition]:
    return definitions(resource.object for resource in resources if resource.role == "object")


def cluster_definitions(cluster: Cluster) -> list[dict[str, Any]]:
    """The CustomResourceDefinitions of a cluster.

    Raises:
        UnavailableError: Listing them is not allowed.
    """
    return [dict(definition) for definition in cluster.list(f"apiextensions.k8s.io/v1/{KIND}")]


def _root_schema(schema: Schema, left_out: list[str]) -> Schema:
    form = _json_schema(schema, (), left_out)
    if "additionalProperties" in form:
        form["properties"] = {
            **form.get("properties", {}),
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "status": {},
        }
    return form


def _json_schema(schema: Mapping[str, Any], path: Path, left_out: list[str]) -> Schema:
    """A structural schema as JSON Schema; strict decoding refuses a field that it does not name."""
    form = _same_keywords(schema)
    for bound in ("Minimum", "Maximum"):  # in OpenAPI 3.0 a boolean; in JSON Schema the bound itself
        if schema.get(f"exclusive{bound}") is True and bound.lower() in form:
            form[f"exclusive{bound}"] = form.pop(bound.lower())
    if isinstance(pattern := schema.get("pattern"), str):
        if _is_pattern(pattern):
            form["pattern"] = pattern
        else:
            left_out.append(
                f"{'.'.join(map(str, path))}: the pattern {short(pattern)} is no regular expression of Python"
            )
    int_or_text = schema.get("x-kubernetes-int-or-string") is True
    # The keyword replaces type; Kubernetes accepts both (apiextensions, IntOrString).
    if int_or_text:
        form |= {"type": ["integer", "string"], "format": form.get("format", "int64")}
    if schema.get("nullable") is True:
        form |= {key: [*form[key], None] for key in ("enum",) if key in form}
        form |= {"type": [*_type_list(form), "null"]} if "type" in form else {}
    conditions = _condition_schema(schema)
    form |= {
        key: conditions[key]
        for key in ("allOf", "anyOf", "oneOf", "not")
        if key in conditions and not int_or_text  # its anyOf only repeats integer or string
    }
    if isinstance(schema.get("items"), Mapping):
        form["items"] = _json_schema(schema["items"], (*path, "[]"), left_out)
    form |= _field_schemas(schema, path, left_out)
    kind = schema.get("x-kubernetes-list-type")
    # Lists of these types have unique items, or unique keys.
    if kind == "set":
        form["once"] = ()
    elif kind == "map":
        form["once"] = tuple(map(str, sequence(schema.get("x-kubernetes-list-map-keys"))))
    return form


def _same_keywords(schema: Mapping[str, Any]) -> Schema:
    """The keywords that JSON Schema has as well; a keyword with a value of the wrong type is left out."""
    form = {key: schema[key] for key, kind in _SAME_KEYWORDS.items() if isinstance(schema.get(key), kind)}
    if form.get("type") not in _TYPES_OF:
        form.pop("type", None)
    return form


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _field_schemas(schema: Mapping[str, Any], path: Path, left_out: list[str]) -> Schema:
    form: Schema = {}
    properties, more = mapping(schema.get("properties")), schema.get("additionalProperties")
    if properties:
        form["properties"] = {
            name: _json_schema(mapping(field_schema), (*path, name), left_out)
            for name, field_schema in properties.items()
        }
    if isinstance(more, Mapping):
        form["additionalProperties"] = _json_schema(more, (*path, "*"), left_out)
    elif schema.get("x-kubernetes-embedded-resource") is True:
        form["required"] = [*sequence(schema.get("required")), "apiVersion", "kind"]
    elif (
        schema.get("type") == "object"
        and more is not True
        and schema.get("x-kubernetes-preserve-unknown-fields") is not True
    ):
        form["additionalProperties"] = False
    return form


def _condition_schema(schema: Mapping[str, Any]) -> Schema:
    """A schema below allOf, anyOf, oneOf or not, which allows fields that it does not name."""
    form = _same_keywords(schema)
    if isinstance(schema.get("pattern"), str) and _is_pattern(schema["pattern"]):
        form["pattern"] = schema["pattern"]
    if mapping(schema.get("properties")):
        fields = schema["properties"].items()
        form["properties"] = {name: _condition_schema(mapping(field_schema)) for name, field_schema in fields}
    for key in ("items", "not"):
        if isinstance(schema.get(key), Mapping):
            form[key] = _condition_schema(schema[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            form[key] = [_condition_schema(mapping(part)) for part in schema[key]]
    return form


def _type_list(form: Schema) -> list[str]:
    return form["type"] if isinstance(form.get("type"), list) else [form["type"]]


def without_nulls(value: Any) -> Any:
    """A custom object as the API server decodes it, without keys whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def defaulted(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value with the defaults of its schema, as the API server fills them in before it validates."""
    if isinstance(value, list):
        return [defaulted(item, mapping(schema.get("items"))) for item in value]
    if not isinstance(value, Mapping):
        return value
    properties, more = mapping(schema.get("properties")), mapping(schema.get("additionalProperties"))
    filled = {
        name: defaulted(item, below)
        for name, item in value.items()
        for below in [mapping(properties.get(name, more))]
        if item is not None or below.get("nullable") is True or not below  # the API server drops a null
    }
    for name, field_schema in properties.items():
        if name not in filled and isinstance(field_schema, Mapping) and "default" in field_schema:
            filled[name] = defaulted(field_schema["default"], field_schema)
    return filled


def cel_violations(
    schema: Mapping[str, Any], value: Any, path: Path, not_checked: list[str]
) -> Iterator[Violation]:
    """Violations of a schema's CEL rules; a rule that can't be evaluated is added to `not_checked`."""
    if value is None or is_placeholder(value):
        return
    for validation in sequence(schema.get("x-kubernetes-validations")):
        if isinstance(mapping(validation).get("rule"), str):
            yield from _rule_violations(mapping(validation), schema, value, path, not_checked)
    if isinstance(value, Mapping):
        properties, more = mapping(schema.get("properties")), mapping(schema.get("additionalProperties"))
        for name, below in value.items():
            yield from cel_violations(mapping(properties.get(name, more)), below, (*path, name), not_checked)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from cel_violations(mapping(schema.get("items")), below, (*path, index), not_checked)


def _rule_violations(
    validation: Mapping[str, Any], schema: Mapping[str, Any], value: Any, path: Path, not_checked: list[str]
) -> Iterator[Violation]:
    rule = str(validation["rule"])
    try:
        # Compiled once: CRDs have the same rules at many places.
        program = _program(rule)
        if "oldSelf" in program.variables():  # a transition rule, for updates only
            return
        known = _cel().Context(variables={"self": _cel_value(value, schema)}, functions=FUNCTIONS)
        holds = program.execute(known)
        if not isinstance(holds, bool):
            raise TypeError(f"it returns {short(holds)}, not true or false")
    except Exception as error:  # the library has no common error class
        where = f"{'.'.join(map(str, path))}: " if path else ""
        not_checked.append(f"{where}the CEL rule {short(rule)} can't be evaluated: {short(str(error))}")
        return
    if not holds:
        yield Violation(_message(validation, known, rule), (*path, *_field_path(validation.get("fieldPath"))))


@cache
def _cel() -> Any:
    """The CEL library; loaded late because it takes 0.1 s and only custom kinds need it."""
    return importlib.import_module("cel")


@lru_cache(maxsize=4096)
def _program(rule: str) -> Any:
    return _cel().compile(rule)


def _message(validation: Mapping[str, Any], known: Any, rule: str) -> str:
    if isinstance(validation.get("messageExpression"), str):
        try:
            message = _program(validation["messageExpression"]).execute(known)
            if isinstance(message, str) and message:
                return message
        except Exception:  # noqa: S110 - the API server falls back to the message as well
            pass
    return str(validation.get("message") or f"the rule does not hold: {rule}").strip()


def _field_path(text: Any) -> Path:
    """A fieldPath of a CEL rule as a path.

    >>> _field_path(".spec.list[0].name"), _field_path(".spec['a']")
    (('spec', 'list', 0, 'name'), ('spec', 'a'))
    """
    parts = re.findall(r"\.([\w-]+)|\[(\d+)\]|\['([^']+)'\]", text) if isinstance(text, str) else []
    return tuple(int(index) if index else name or key for name, index, key in parts)


def _cel_value(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value as CEL sees it: typed by its schema, with escaped field names."""
    if isinstance(value, Mapping):
        properties, more = mapping(schema.get("properties")), mapping(schema.get("additionalProperties"))
        return {
            _escaped(name) if name in properties else name: _cel_value(
                item, mapping(properties.get(name, more))
            )
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_cel_value(item, mapping(schema.get("items"))) for item in value]
    # JSON has 1 for 1.0, and a field of the type number is a double in CEL.
    if schema.get("type") == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and schema.get("format") == "date-time":
        return datetime.fromisoformat(value)
    if isinstance(value, str) and schema.get("format") == "duration":
        return _duration(value)
    return value


def _escaped(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    for character, words in _ESCAPES:
        name = name.replace(character, words)
    return name


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(text: str) -> timedelta | str:
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", text)
    # Go's duration: parts without anything between them, such as 1h30m.
    if "".join(number + unit for number, unit in parts) != text.lstrip("+-"):
        return text
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return timedelta(seconds=-seconds if text.startswith("-") else seconds)
