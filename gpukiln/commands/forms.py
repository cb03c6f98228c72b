"""JSON Schema of the dataclasses that are printed, with the words of their docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter


def form_of(kind: type, defs: dict[str, Any], *, written: bool = False) -> dict[str, Any]:
    """A reference to a dataclass, which is added to the definitions with all that it is made of.

    Args:
        defs: `$defs` of the schema.
        written: Whether people write it: what has a default may be left out.
    """
    made = TypeAdapter(kind).json_schema(mode="serialization", ref_template="#/$defs/{model}")
    inner = made.pop("$defs", {})
    types = _types(kind)
    for name, form in {**inner, kind.__name__: made}.items():
        found = _described(form, types[name], written=written)
        if not written and defs.get(name, found) != found:
            raise ValueError(f"two types of one schema are called {name}")
        defs[name] = found
    return {"$ref": f"#/$defs/{kind.__name__}"}


def of_documents(
    noun: str,
    title: str,
    documents: Mapping[str, type],
    *,
    read: Iterable[type] = (),
    written: Iterable[type] = (),
) -> dict[str, Any]:
    """One schema of all documents of a noun's commands.

    Args:
        documents: By what their `schema` says.
        read: Types that are told elsewhere, written: that people write; neither says its schema.
    """
    defs: dict[str, Any] = {}
    references = [form_of(kind, defs) for kind in (*read, *documents.values())]
    for name, kind in documents.items():
        defs[kind.__name__]["properties"]["schema"] = {"const": name}
    # The last: where a document shows what was asked for, it is in the form that people write.
    references = [*(form_of(kind, defs, written=True) for kind in written), *references]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Generated: python -m gpukiln.commands.{noun}_schema > docs/{noun}.schema.json",
        "title": title,
        "oneOf": references,
        "$defs": dict(sorted(defs.items())),
    }


def _types(kind: type, found: dict[str, type] | None = None) -> dict[str, type]:
    """The dataclasses that one is made of, by name."""
    found = {} if found is None else found
    found[kind.__name__] = kind
    for hint in typing.get_type_hints(kind).values():
        todo = [hint]
        while todo:
            one = todo.pop()
            todo += typing.get_args(one)
            if hasattr(one, "__dataclass_fields__") and one.__name__ not in found:
                _types(one, found)
    return found


def _described(form: dict[str, Any], of: type, *, written: bool) -> dict[str, Any]:
    """The schema of one type: its fields and nothing else, with its docstring's words."""
    text = inspect.getdoc(of) or ""
    told = dict(re.findall(r"(?ms)^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", text.partition("Args:\n")[2]))
    if "properties" not in form:  # it is written by its own schema, as a verdict is
        return {**form, "description": text.partition("\n")[0]}
    fields = {}
    for name, field in form["properties"].items():
        field.pop("title", None)
        if not written:
            field.pop("default", None)
        fields[name] = {**field, **({"description": " ".join(told[name].split())} if name in told else {})}
    return {
        "type": "object",
        "description": text.partition("\n")[0],
        "properties": fields,
        "required": form.get("required", []) if written else list(fields),
        "additionalProperties": False,
    }
