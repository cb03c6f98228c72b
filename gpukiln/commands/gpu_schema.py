"""The form of what gpu.* prints with --json. `python -m gpukiln.commands.gpu_schema > docs/gpu.schema.json`.

Made of the types that are written: a field that they gain or lose is one here.
"""

from __future__ import annotations

import json
import sys
import typing
from typing import Any

from gpukiln.commands.forms import form_of
from gpukiln.gpus.sampling import Tick
from gpukiln.gpus.verb import Failure, Verb
from gpukiln.gpus.verbs import verbs
from gpukiln.gpus.verbs.watch import TICK


def schema() -> dict[str, Any]:
    """One schema of all documents; `schema` in a document says which it is."""
    defs: dict[str, Any] = {}
    failure = form_of(Failure, defs)
    documents = []
    for verb in verbs().values():
        answer = typing.get_type_hints(verb.answer)["return"]
        documents.append(_document(verb, form_of(answer, defs), failure))
    documents.append(_line(TICK, "tick", form_of(Tick, defs), "A line of gpu.watch without --json."))
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
