"""The form of objects: Kubernetes' own for its kinds, `custom_schemas.py` for others, both by jsonschema.

kubernetes-validate compiles a schema again for each object, 200 ms; here each kind's is made once, with every
reference replaced by what it refers to, and an object takes half a millisecond.
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
MOST_VIOLATIONS = 20  # faults told of one object: what is of another form altogether has hundreds
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
    """Read versions of Kubernetes, `1.34` or `1.34,1.36` or `1.34..1.37`, as minors in order.

    Raises:
        UsageError: One is none, or there is no schema of it.
    """
    numbers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if not (match := re.fullmatch(r"v?1\.(\d{1,4})(?:\.\d+)?(?:\.\.v?1\.(\d{1,4}))?", part)):
            raise UsageError(
                f"{part!r} is no version of Kubernetes", hint="wanted: 1.35, 1.34,1.36 or 1.34..1.37"
            )
        first, last = int(match[1]), int(match[2] or match[1])
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
            if name.endswith(f".{version_kind['kind']}"):
                definitions[f"{group}{version_kind['version']}", version_kind["kind"]] = name
    return definitions


@cache
def _resolver(minor: int) -> Callable[[Any], Any]:
    """Replaces references by what they refer to, the same object each time: some refer to themselves."""
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
        # a text is about the schema, anything else a field of that name
        kept = {key: part for key, part in value.items() if key != "description" or not isinstance(part, str)}
        return {key: resolve(part) for key, part in kept.items()}

    return resolve


@cache
def _validator(minor: int, api: str, kind: str) -> Any:
    """None where there is no form of the kind."""
    if (form := SCHEMAS.get((api, kind))) is None:
        name = _kinds(minor).get((api, kind))
        if name is None:
            return None
        form = {"$ref": name}
    return ServerValidator(_resolver(minor)(form))


@cache
def _part_validator(minor: int, of: str, key: str) -> Any:
    """Of one key of a pod's spec or of a container."""
    whole = _resolver(minor)({"$ref": f"{_PREFIX}core.v1.{of}"})
    return ServerValidator(whole["properties"][key])


def has_schema(resource: Resource, minor: int) -> bool:
    """Whether there is a form of a resource's kind."""
    return (resource.api, resource.kind) in SCHEMAS or (resource.api, resource.kind) in _kinds(minor)


def has_custom_schema(resource: Resource) -> bool:
    return (resource.api, resource.kind) in SCHEMAS


def is_builtin(api: str) -> bool:
    """Whether a group is one of Kubernetes' own: no project beside it has."""
    group, slash, _ = api.rpartition("/")
    return not slash or "." not in group or group in _groups()


@cache
def _groups() -> frozenset[str]:
    return frozenset(api.rpartition("/")[0] for api, _ in _kinds(NEWEST))


def api_versions(kind: str, minor: int) -> tuple[str, ...]:
    """The apiVersions that a kind has."""
    return tuple(sorted(api for api, known_kind in _kinds(minor) if known_kind == kind))


def nearest_kind(kind: str, minor: int) -> str:
    """What may have been meant by a kind that there is not; empty where nothing is near."""
    return unknown("kind", kind, {known_kind for _, known_kind in _kinds(minor)}).hint


def custom_violations(resource: Resource, definition: Definition) -> tuple[list[Violation], list[str]]:
    """Where a custom object has not the form of its CRD, and what of that could not be checked."""
    value = defaulted(resource.object, definition.schema)
    violations_of_schema = list(
        _schema_violations(definition.form, value, (), NEWEST, resource.written, whole=True)
    )
    not_checked = list(definition.left_out)
    if not violations_of_schema:  # as the API server: rules are evaluated on what has the form
        violations_of_schema = list(cel_violations(definition.schema, value, (), not_checked))
    return violations_of_schema, not_checked


def violations(resource: Resource, minor: int) -> Iterator[Violation]:
    """Where a resource has not the form that its kind has; nothing of a kind that has none here."""
    if resource.role == "object":
        yield from _object_violations(resource, minor)
    elif resource.role in ("fragment", "values") and not resource.chart:
        for of, keys in (("PodSpec", POD_KEYS), ("Container", CONTAINER_KEYS)):
            for key in sorted(keys & resource.object.keys()):
                if key == "image" and isinstance(resource.object[key], Mapping):
                    continue  # a chart's, in parts
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
        key=lambda error: [str(step) for step in error.absolute_path],
    )
    for error in errors[:MOST_VIOLATIONS]:
        for path, text in _error_texts(error, written((*above, *error.absolute_path))):
            yield Violation(f"{text} (Kubernetes 1.{minor})" if minor != NEWEST else text, (*above, *path))
    if len(errors) > MOST_VIOLATIONS:
        yield Violation(f"{len(errors) - MOST_VIOLATIONS} more faults of form", above)


def _is_refused(error: ValidationError, *, whole: bool) -> bool:
    """Whether the API server would refuse it: it does not validate a status, and a part is not all there."""
    if error.validator in KEYWORDS and error.absolute_path and error.absolute_path[0] == "status":
        return False
    return whole or error.validator not in WHOLE_OBJECT_KEYWORDS


def _error_texts(error: ValidationError, written: str) -> Iterator[tuple[Path, str]]:
    """The path and the words of each fault.

    Args:
        written: The value as it stands in the file, where it is a scalar.
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
        key = error.message.split("'")[1]  # jsonschema gives one error a key, and tells it there alone
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
        if value is None:  # a quantity of null is 0 (k8s.io/apimachinery/pkg/api/resource, UnmarshalJSON)
            return
        yield path, f"{where}found {short(value)}, wanted a text or a number"
    else:
        yield path, where + str(error.message)


def _unknown_field(key: str, fields: Any) -> str:
    hint = unknown("field", key, fields).hint
    return f"unknown field {key}" + (f"; {hint}" if hint else "")
