"""The form of what gpu.* prints with --json. `python -m gpukiln.commands.gpu_schema > docs/gpu.schema.json`.

Made of the types that are written: a field that they gain or lose is one here.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from typing import Any

from pydantic import TypeAdapter

from gpukiln.gpus.sampling import Tick
from gpukiln.gpus.verb import Failure, Verb
from gpukiln.gpus.verbs import verbs
from gpukiln.gpus.verbs.watch import TICK


def schema() -> dict[str, Any]:
    """One schema of all documents; `schema` in a document says which it is."""
    defs: dict[str, Any] = {}
    failure = _of(Failure, defs)
    documents = []
    for verb in verbs().values():
        answer = typing.get_type_hints(verb.answer)["return"]
        documents.append(_document(verb, _of(answer, defs), failure))
    documents.append(_line(TICK, "tick", _of(Tick, defs), "A line of gpu.watch without --json."))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Generated: python -m gpukiln.commands.gpu_schema > docs/gpu.schema.json",
        "title": "What gpukiln-gpu and invoke gpu.* print with --json",
        "oneOf": documents,
        "$defs": dict(sorted(defs.items())),
    }


def _document(verb: Verb, answer: dict[str, Any], failure: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": verb.help,
        "properties": {
            "schema": {"const": verb.schema},
            "nodes": {"type": "array", "items": answer, "description": "machines that answered"},
            "failed": {"type": "array", "items": failure, "description": "machines that did not"},
        },
        "required": ["schema", "nodes", "failed"],
        "additionalProperties": False,
    }


def _line(name: str, field: str, form: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": text,
        "properties": {"schema": {"const": name}, "node": {"type": "string"}, field: form},
        "required": ["schema", "node", field],
        "additionalProperties": False,
    }


def _of(kind: type, defs: dict[str, Any]) -> dict[str, Any]:
    """A reference to a type, which is added to the definitions with all that it is made of."""
    made = TypeAdapter(kind).json_schema(mode="serialization", ref_template="#/$defs/{model}")
    inner = made.pop("$defs", {})
    types = _types(kind)
    for name, form in {**inner, kind.__name__: made}.items():
        defs[name] = _described(form, types[name])
    return {"$ref": f"#/$defs/{kind.__name__}"}


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


def _described(form: dict[str, Any], of: type) -> dict[str, Any]:
    """The schema of one type: every field is always there, and nothing else; with its docstring's words."""
    text = inspect.getdoc(of) or ""
    told = dict(re.findall(r"(?ms)^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", text.partition("Args:\n")[2]))
    fields = {}
    for name, field in form["properties"].items():
        field.pop("title", None)
        field.pop("default", None)
        fields[name] = {**field, **({"description": " ".join(told[name].split())} if name in told else {})}
    return {
        "type": "object",
        "description": text.partition("\n")[0],
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
