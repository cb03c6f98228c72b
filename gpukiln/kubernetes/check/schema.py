"""Schema validation: Kubernetes' own schemas for its kinds, `custom_schemas.py` for others.

kubernetes-validate compiles a schema for each object, which takes 200 ms. Here the schema of each kind is
compiled once with all references resolved, and an object takes half a millisecond.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import ValidationError  # type: ignore[import-untyped]

from gpukiln.errors import UsageError
from gpukiln.kubernetes.check.crds import Definition, cel_violations, defaulted, without_nulls
from gpukiln.kubernetes.check.custom_schemas import SCHEMA_RELEASES, SCHEMAS, Schema
from gpukiln.kubernetes.check.keywords import (
    KEYWORDS,
    WHOLE_OBJECT_KEYWORDS,
    ServerValidator,
    with_server_rules,
)
from gpukiln.kubernetes.check.rules import NEWEST
from gpukiln.kubernetes.check.workload import (
    CONTAINER_KEYS,
    POD_KEYS,
    Path,
    Resource,
    Violation,
    at,
    dotted,
    is_placeholder,
    mapping,
)
from gpukiln.typed import short, unknown

OLDEST = 25  # the first minor whose schemas kubernetes-validate 1.37 has
MOST_VIOLATIONS = 20  # for one object: an object of another kind would have hundreds
_PREFIX = "io.k8s.api."
_TYPE_NAMES = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "keys with values",
}


def minors(text: str) -> tuple[int, ...]:
    """Read versions of Kubernetes; returns the minor versions in ascending order.

    >>> minors("1.34"), minors("1.34,1.36"), minors("1.34..1.37")
    ((34,), (34, 36), (34, 35, 36, 37))

    Raises:
        UsageError: A version has another form, or has no schema.
    """
    numbers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if not (match := re.fullmatch(r"v?1\.(\d{1,4})(?:\.\d+)?(?:\.\.v?1\.(\d{1,4}))?", part)):
            raise UsageError(
                f"{part!r} is no version of Kubernetes", hint="wanted: 1.35, 1.34,1.36 or 1.34..1.37"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        # Both ends: the numbers between them are inside the range, too.
        for minor in (first, last):
            if not OLDEST <= minor <= NEWEST:
                raise UsageError(
                    f"Kubernetes 1.{minor} has no schema here", hint=f"1.{OLDEST} to 1.{NEWEST} have one"
                )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


@cache
def _definitions(minor: int) -> Mapping[str, Schema]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v1.{minor}.0-local-strict"
    definitions: dict[str, Schema] = json.loads((folder / "_definitions.json").read_bytes())["$defs"]
    return definitions


@cache
def _kinds(minor: int) -> Mapping[tuple[str, str], str]:
    """(apiVersion, kind) -> the name of its definition."""
    definitions = {}
    for name, definition in _definitions(minor).items():
        for version_kind in definition.get("x-kubernetes-group-version-kind", ()):
            group = f"{version_kind['group']}/" if version_kind["group"] else ""
            # Definitions such as DeleteOptions list every group; only the one of the kind itself counts.
            if name.endswith(f".{version_kind['kind']}"):
                definitions[f"{group}{version_kind['version']}", version_kind["kind"]] = name
    return definitions


@cache
def _resolver(minor: int) -> Callable[[Any], Any]:
    """A function that resolves references, each to one object: some definitions refer to themselves."""
    resolved: dict[str, Schema] = {}

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(reference := value.get("$ref"), str):
            name = reference.rpartition("/")[2]
            if name not in resolved:
                resolved[name] = {}
                resolved[name].update(with_server_rules(name, resolve(_definitions(minor)[name])))
            return resolved[name]
        # A text is the description of the schema; a mapping is a field with the name `description`.
        kept = {key: part for key, part in value.items() if key != "description" or not isinstance(part, str)}
        return {key: resolve(part) for key, part in kept.items()}

    return resolve


@cache
def _validator(minor: int, api: str, kind: str) -> Any:
    """The validator of a kind; None if it has no schema."""
    if (form := SCHEMAS.get((api, kind))) is None:
        name = _kinds(minor).get((api, kind))
        if name is None:
            return None
        form = {"$ref": name}
    return ServerValidator(_resolver(minor)(form))


@cache
def _part_validator(minor: int, of: str, key: str) -> Any:
    """The validator of one key of a pod spec or a container."""
    whole = _resolver(minor)({"$ref": f"{_PREFIX}core.v1.{of}"})
    return ServerValidator(whole["properties"][key])


def has_schema(resource: Resource, minor: int) -> bool:
    """Whether there is a schema of a resource's kind."""
    return (resource.api, resource.kind) in SCHEMAS or (resource.api, resource.kind) in _kinds(minor)


def has_custom_schema(resource: Resource) -> bool:
    return (resource.api, resource.kind) in SCHEMAS


def is_builtin(api: str) -> bool:
    """Whether an API group belongs to Kubernetes itself.

    >>> is_builtin("apps/v1"), is_builtin("v1"), is_builtin("ray.io/v1")
    (True, True, False)
    """
    # Groups without a domain are Kubernetes' own, and so are known ones with a domain, such as node.k8s.io.
    group, slash, _ = api.rpartition("/")
    return not slash or "." not in group or group in _groups()


@cache
def _groups() -> frozenset[str]:
    return frozenset(api.rpartition("/")[0] for api, _ in _kinds(NEWEST))


def api_versions(kind: str, minor: int) -> tuple[str, ...]:
    """The apiVersions of a kind."""
    return tuple(sorted(api for api, known_kind in _kinds(minor) if known_kind == kind))


def nearest_kind(kind: str, minor: int) -> str:
    """A hint for a kind that does not exist; empty if no similar kind exists."""
    return unknown("kind", kind, {known_kind for _, known_kind in _kinds(minor)}).hint


def custom_violations(resource: Resource, definition: Definition) -> tuple[list[Violation], list[str]]:
    """Violations of a custom object's CRD, and what could not be checked."""
    value = defaulted(resource.object, definition.schema)
    violations_of_schema = list(
        _schema_violations(definition.form, value, (), NEWEST, resource.written, whole=True)
    )
    not_checked = list(definition.left_out)
    # Like the API server, which evaluates CEL rules only on a structurally valid object.
    if not violations_of_schema:
        violations_of_schema = list(cel_violations(definition.schema, value, (), not_checked))
    return violations_of_schema, not_checked


def violations(resource: Resource, minor: int) -> Iterator[Violation]:
    """Violations of a resource's schema; none for a kind without a schema."""
    if resource.role == "object":
        yield from _object_violations(resource, minor)
    elif resource.role in ("fragment", "values") and not resource.chart:
        for of, keys in (("PodSpec", POD_KEYS), ("Container", CONTAINER_KEYS)):
            for key in sorted(keys & resource.object.keys()):
                if key == "image" and isinstance(resource.object[key], Mapping):
                    continue  # image of a chart, with repository and tag
                if resource.role == "fragment" and resource.object[key] is not None:
                    yield from _schema_violations(
                        _part_validator(minor, of, key), resource.object[key], (key,), minor, resource.written
                    )
    elif resource.chart == "gha-runner-scale-set":
        fields = _definitions(minor)[f"{_PREFIX}core.v1.PodSpec"]["properties"]
        for key, value in mapping(at(resource.object, ("template", "spec"))).items():
            path = ("template", "spec", key)
            if key in fields:
                yield from _schema_violations(
                    _part_validator(minor, "PodSpec", key), value, path, minor, resource.written
                )
            else:
                yield Violation(f"template.spec: {_unknown_field(key, fields)}", path)


def _object_violations(resource: Resource, minor: int) -> Iterator[Violation]:
    validator = _validator(minor, resource.api, resource.kind)
    if validator is None:
        return
    if not has_custom_schema(resource):
        yield from _schema_violations(validator, resource.object, (), minor, resource.written, whole=True)
        return
    release = SCHEMA_RELEASES[resource.api.partition("/")[0]]
    fix = f"write it as {release} defines it, or check by the CRD of another release (--crd FILE)"
    for violation in _schema_violations(
        validator, without_nulls(resource.object), (), minor, resource.written
    ):
        yield dataclasses.replace(violation, fix=fix)


def _schema_violations(
    validator: Any,
    value: Any,
    above: Path,
    minor: int,
    written: Callable[[Path], str],
    *,
    whole: bool = False,
) -> Iterator[Violation]:
    errors = sorted(
        (error for error in validator.iter_errors(value) if _is_refused(error, whole=whole)),
        # Sorted by path, so that reports are the same in each run.
        key=lambda error: [str(step) for step in error.absolute_path],
    )
    for error in errors[:MOST_VIOLATIONS]:
        for path, text in _error_texts(error, written((*above, *error.absolute_path))):
            yield Violation(f"{text} (Kubernetes 1.{minor})" if minor != NEWEST else text, (*above, *path))
    if len(errors) > MOST_VIOLATIONS:
        yield Violation(f"{len(errors) - MOST_VIOLATIONS} more schema violations", above)


def _is_refused(error: ValidationError, *, whole: bool) -> bool:
    """Whether the API server would reject it: it ignores a status, and a part may lack required keys."""
    # Controllers write the status by a subresource; in a manifest it is dropped.
    if error.validator in KEYWORDS and error.absolute_path and error.absolute_path[0] == "status":
        return False
    return whole or error.validator not in WHOLE_OBJECT_KEYWORDS


def _error_texts(error: ValidationError, written: str) -> Iterator[tuple[Path, str]]:
    """Path and message of each violation.

    Args:
        written: The text of a scalar value in the file.
    """
    path: Path = tuple(error.absolute_path)
    where = f"{dotted(path)}: " if path else ""
    value: Any = error.instance
    if is_placeholder(value):
        return
    if error.validator == "additionalProperties" and isinstance(error.validator_value, bool):
        fields = error.schema.get("properties", {})
        for key in value:
            if key not in fields:
                yield (*path, key), where + _unknown_field(key, fields)
    elif error.validator == "required":
        # jsonschema has one error for each key, and names the key only in the message.
        key = error.message.split("'")[1]
        yield path, f"{where}{key} is missing"
    elif error.validator == "type":
        wants: Any = error.validator_value
        kinds: list[str] = wants if isinstance(wants, list) else [wants]
        type_names = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in kinds if kind != "null")
        shown = str(value).lower() if isinstance(value, bool) else short(value)
        quotes = ""
        if "string" in kinds and isinstance(value, bool | int | float):
            quotes = f': put it in quotes, "{written or shown}"'
            if written and written != shown:
                shown = f"{written}, which is {shown} in Kubernetes' YAML"
        yield path, f"{where}found {shown}, wanted {type_names}{quotes}"
    elif error.validator == "enum":
        choices = [str(choice) for choice in error.validator_value]
        yield path, f"{where}found {short(value)}, wanted {' or '.join(choices)}"
    elif error.validator == "oneOf":
        # The API server reads a null quantity as 0 (k8s.io/apimachinery/pkg/api/resource, UnmarshalJSON).
        if value is None:
            return
        yield path, f"{where}found {short(value)}, wanted a text or a number"
    else:
        yield path, where + str(error.message)


def _unknown_field(key: str, fields: Any) -> str:
    hint = unknown("field", key, fields).hint
    return f"unknown field {key}" + (f"; {hint}" if hint else "")
