"""JSON Schema of the types that commands print, with the texts of their docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import TypeAdapter

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = "#/$defs/"


class ObjectSchema:
    """An object of a document.

    Args:
        kind: The dataclass whose fields it has; None: only the fields that are named.
        about: Its description, where no dataclass's docstring is one.
        fields: Further fields, each as `SchemaBuilder.of` takes it; they replace those of the dataclass.
    """

    def __init__(self, kind: type | None = None, about: str = "", /, **fields: Any) -> None:
        self.kind, self.about, self.fields = kind, about, fields


class SchemaBuilder:
    """The definitions of one schema.

    Args:
        added: Fields that a type's own serializer writes in addition to those of the type.
        written: A type that people write: they may leave out each field with a default, in its parts too.
    """

    def __init__(self, added: Mapping[type, Mapping[str, Any]], written: type | None = None) -> None:
        self.defs: dict[str, Any] = {}
        self._added, self._written = added, set(_dataclasses(written))
        self._names: dict[type, str] = {}

    def of(self, what: Any) -> dict[str, Any]:
        """The schema of a type, of an `ObjectSchema`, of `[items of a list]`, or of `(an, alternative)`.

        Dataclasses become references; they and the dataclasses of their fields become definitions.
        """
        if isinstance(what, ObjectSchema):
            return self._object(what)
        if isinstance(what, list):
            return {"type": "array", "items": self.of(what[0])}
        if isinstance(what, tuple):
            return {"anyOf": [self.of(kind) for kind in what]}
        mode: Literal["validation", "serialization"] = "serialization"
        if what in self._added:
            # Pydantic knows no fields of what a serializer of one's own returns (model_serializer): in this
            # mode it describes the fields of the type, and `added` has the others.
            mode = "validation"
        # A tuple of it has every dataclass in $defs, while that of the type itself would be at the top.
        schema = TypeAdapter(tuple[what, ...]).json_schema(mode=mode, ref_template=REFERENCE + "{model}")
        types = {**_by_long_name(what), **{kind.__name__: kind for kind in _dataclasses(what)}}
        names = {name: self.name(types[name]) for name in schema.get("$defs", {})}
        for name, definition in schema.get("$defs", {}).items():
            self._define(types[name], _renamed(definition, names))
        items: dict[str, Any] = _renamed(schema["items"], names)
        return items

    def name(self, kind: type) -> str:
        """The name of a dataclass in the definitions; its module's name precedes one that is taken."""
        if kind not in self._names:
            long = kind.__module__.rpartition(".")[2].title().replace("_", "") + kind.__name__
            taken = kind.__name__ in self._names.values()
            self._names[kind] = long if taken else kind.__name__
        return self._names[kind]

    def _define(self, kind: type, schema: dict[str, Any]) -> None:
        if kind in self._added and "properties" not in schema:
            self.of(kind)
        elif (name := self.name(kind)) not in self.defs:
            definition = self.defs[name] = _described(schema, kind, written=kind in self._written)
            for field, what in self._added.get(kind, {}).items():
                definition["properties"][field] = self.of(what) | _words(getattr(kind, field, None))
                definition["required"].append(field)

    def _object(self, schema: ObjectSchema) -> dict[str, Any]:
        base: dict[str, Any] = {"properties": {}, "required": []}
        if schema.kind:
            self.of(schema.kind)
            base = self.defs[self.name(schema.kind)]
        fields = base["properties"] | {name: self.of(what) for name, what in schema.fields.items()}
        about = schema.about or base.get("description", "")
        return {
            "type": "object",
            **({"description": about} if about else {}),
            "properties": fields,
            "required": list(dict.fromkeys([*base["required"], *schema.fields])),
            "additionalProperties": False,
        }

    def used_by(self, schemas: list[dict[str, Any]]) -> dict[str, Any]:
        """The definitions that some schemas refer to, sorted by name."""
        todo, used = [schemas], set[str]()
        while todo:
            # References stand in texts of every depth, so the printed form is searched.
            new = set(re.findall(f"{re.escape(REFERENCE)}([^']+)'", str(todo.pop()))) - used
            used |= new
            todo += [self.defs[name] for name in new]
        return {name: self.defs[name] for name in sorted(used)}


def _dataclasses(hint: Any) -> Iterator[type]:
    """The dataclasses in a type, and those in their fields."""
    todo, seen = [hint], set[type]()
    while todo:
        kind = todo.pop()
        todo += typing.get_args(kind)
        if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__") and kind not in seen:
            seen.add(kind)
            yield kind
            todo += typing.get_type_hints(kind).values()


def _by_long_name(hint: Any) -> dict[str, type]:
    """Dataclasses by the names that pydantic gives where two have the same name."""
    return {f"{kind.__module__}.{kind.__qualname__}".replace(".", "__"): kind for kind in _dataclasses(hint)}


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """A schema with other names in its references."""
    if isinstance(schema, list):
        return [_renamed(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if set(schema) == {"$ref"}:
        return {"$ref": REFERENCE + names[schema["$ref"].removeprefix(REFERENCE)]}
    return {key: _renamed(item, names) for key, item in schema.items()}


def _words(value: object) -> dict[str, str]:
    text = (inspect.getdoc(value) or "").partition("\n")[0] if isinstance(value, property) else ""
    return {"description": text} if text else {}


def _described(schema: dict[str, Any], of: type, *, written: bool) -> dict[str, Any]:
    """The schema of one type: its fields and no others, with the texts of its docstring."""
    text = inspect.getdoc(of) or ""
    described: dict[str, str] = {}
    for kind in reversed(of.__mro__):  # a base describes the fields that it declares
        arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
        # Of Google's style: NAME: TEXT, indented by four, up to the next name.
        described |= dict(re.findall(r"(?ms)^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", arguments))
    fields = {}
    for name, field in schema["properties"].items():
        field.pop("title", None)
        if not written:
            field.pop("default", None)
        words = {"description": " ".join(described[name].split())} if name in described else {}
        fields[name] = {**field, **words}
    return {
        "type": "object",
        "description": text.partition("\n")[0],
        "properties": fields,
        "required": schema.get("required", []) if written else list(fields),
        "additionalProperties": False,
    }
