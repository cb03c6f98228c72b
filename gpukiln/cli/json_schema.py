"""JSON Schema of the types that are printed, with the words of their docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import TypeAdapter

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = "#/$defs/"


class Form:
    """An object of a document.

    Args:
        kind: The dataclass whose fields it has; None: only the fields that are named.
        about: What it is, where no dataclass's docstring says so.
        fields: Its other fields, each as `Forms.of` takes it; one of the dataclass's is replaced.
    """

    def __init__(self, kind: type | None = None, about: str = "", /, **fields: Any) -> None:
        self.kind, self.about, self.fields = kind, about, fields


class Forms:
    """The definitions of one schema.

    Args:
        added: Fields that a type with a serializer of its own writes besides those that it has.
        written: A type that people write: what has a default may be left out of it and of its parts.
    """

    def __init__(self, added: Mapping[type, Mapping[str, Any]], written: type | None = None) -> None:
        self.defs: dict[str, Any] = {}
        self._added, self._written = added, set(_dataclasses(written))
        self._names: dict[type, str] = {}

    def of(self, what: Any) -> dict[str, Any]:
        """The schema of a type, of a `Form`, of `[a list of one]`, or of `(one, of, several)`.

        Dataclasses become references, and are added to the definitions with all that they are made of.
        """
        if isinstance(what, Form):
            return self._object(what)
        if isinstance(what, list):
            return {"type": "array", "items": self.of(what[0])}
        if isinstance(what, tuple):
            return {"anyOf": [self.of(one) for one in what]}
        mode: Literal["validation", "serialization"] = "serialization"
        if what in self._added:  # of which its own serializer says nothing
            mode = "validation"
        made = TypeAdapter(tuple[what, ...]).json_schema(mode=mode, ref_template=REFERENCE + "{model}")
        types = {**_by_long_name(what), **{kind.__name__: kind for kind in _dataclasses(what)}}
        names = {name: self.name(types[name]) for name in made.get("$defs", {})}
        for name, form in made.get("$defs", {}).items():
            self._define(types[name], _renamed(form, names))
        items: dict[str, Any] = _renamed(made["items"], names)
        return items

    def name(self, kind: type) -> str:
        """What a dataclass is called here: its name, with its module's where another has it already."""
        if kind not in self._names:
            long = kind.__module__.rpartition(".")[2].title().replace("_", "") + kind.__name__
            taken = kind.__name__ in self._names.values()
            self._names[kind] = long if taken else kind.__name__
        return self._names[kind]

    def _define(self, kind: type, form: dict[str, Any]) -> None:
        if kind in self._added and "properties" not in form:
            self.of(kind)
        elif (name := self.name(kind)) not in self.defs:
            found = self.defs[name] = _described(form, kind, written=kind in self._written)
            for field, what in self._added.get(kind, {}).items():
                found["properties"][field] = self.of(what) | _words(getattr(kind, field, None))
                found["required"].append(field)

    def _object(self, form: Form) -> dict[str, Any]:
        base: dict[str, Any] = {"properties": {}, "required": []}
        if form.kind:
            self.of(form.kind)
            base = self.defs[self.name(form.kind)]
        fields = base["properties"] | {name: self.of(what) for name, what in form.fields.items()}
        about = form.about or base.get("description", "")
        return {
            "type": "object",
            **({"description": about} if about else {}),
            "properties": fields,
            "required": list(dict.fromkeys([*base["required"], *form.fields])),
            "additionalProperties": False,
        }

    def used_by(self, forms: list[dict[str, Any]]) -> dict[str, Any]:
        """The definitions that some schemas refer to, sorted."""
        todo, used = [forms], set[str]()
        while todo:
            new = set(re.findall(f"{re.escape(REFERENCE)}([^']+)'", str(todo.pop()))) - used
            used |= new
            todo += [self.defs[name] for name in new]
        return {name: self.defs[name] for name in sorted(used)}


def _dataclasses(hint: Any) -> Iterator[type]:
    """The dataclasses that a type is made of."""
    todo, seen = [hint], set[type]()
    while todo:
        one = todo.pop()
        todo += typing.get_args(one)
        if isinstance(one, type) and hasattr(one, "__dataclass_fields__") and one not in seen:
            seen.add(one)
            yield one
            todo += typing.get_type_hints(one).values()


def _by_long_name(hint: Any) -> dict[str, type]:
    """Dataclasses by what pydantic calls two of one name."""
    return {f"{kind.__module__}.{kind.__qualname__}".replace(".", "__"): kind for kind in _dataclasses(hint)}


def _renamed(form: Any, names: Mapping[str, str]) -> Any:
    """A schema whose references have other names."""
    if isinstance(form, list):
        return [_renamed(one, names) for one in form]
    if not isinstance(form, dict):
        return form
    if set(form) == {"$ref"}:
        return {"$ref": REFERENCE + names[form["$ref"].removeprefix(REFERENCE)]}
    return {key: _renamed(one, names) for key, one in form.items()}


def _words(value: object) -> dict[str, str]:
    text = (inspect.getdoc(value) or "").partition("\n")[0] if isinstance(value, property) else ""
    return {"description": text} if text else {}


def _described(form: dict[str, Any], of: type, *, written: bool) -> dict[str, Any]:
    """The schema of one type: its fields and nothing else, with its docstring's words."""
    text = inspect.getdoc(of) or ""
    described: dict[str, str] = {}
    for kind in reversed(of.__mro__):  # a field may be of a base, which describes it
        arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
        described |= dict(re.findall(r"(?ms)^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", arguments))
    fields = {}
    for name, field in form["properties"].items():
        field.pop("title", None)
        if not written:
            field.pop("default", None)
        words = {"description": " ".join(described[name].split())} if name in described else {}
        fields[name] = {**field, **words}
    return {
        "type": "object",
        "description": text.partition("\n")[0],
        "properties": fields,
        "required": form.get("required", []) if written else list(fields),
        "additionalProperties": False,
    }
