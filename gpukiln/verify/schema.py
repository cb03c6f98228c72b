"""The form of results.json as JSON Schema. `python -m gpukiln.verify.schema > docs/verdict.schema.json`.

Made of the types that are written: a field that they gain or lose is one here.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

from pydantic import TypeAdapter

from gpukiln.verify.checks import LAYERS, PROFILES
from gpukiln.verify.verdict import OUTCOMES, SCHEMA, CheckResult, Verdict


def verdict_schema() -> dict[str, Any]:
    """The schema of what is written of a verdict; every field that it always writes is required."""
    schema = TypeAdapter(Verdict).json_schema(mode="validation", ref_template="#/$defs/{model}")
    check = schema["$defs"]["CheckResult"]
    _describe(schema, Verdict)
    _describe(check, CheckResult)
    fields = schema["properties"]
    fields["schema"] |= {"const": SCHEMA}
    fields["started_at"] |= {"format": "date-time"}
    fields["profile"] |= {"enum": list(PROFILES)}
    fields["passed"] = {"type": "boolean", "description": _summary(Verdict.passed)}
    fields["counts"] = {
        "type": "object",
        "description": _summary(Verdict.counts),
        "properties": {outcome: {"type": "integer", "minimum": 0} for outcome in OUTCOMES},
        "required": list(OUTCOMES),
        "additionalProperties": False,
    }
    check["properties"]["layer"] |= {"enum": list(LAYERS)}
    check["properties"]["id"] |= {"pattern": r"^[a-z-]+\.[a-z0-9-]+$"}
    for form in (schema, check):
        form["properties"]["duration_s"] |= {"minimum": 0}
        form["required"] = list(form["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Generated: python -m gpukiln.verify.schema > docs/verdict.schema.json",
        **schema,
    }


def _summary(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _describe(schema: dict[str, Any], of: type) -> None:
    """Put the docstring's arguments beside the fields; pydantic's titles and defaults say nothing here."""
    schema["description"] = _summary(of)
    _head, _, args = (inspect.getdoc(of) or "").partition("Args:\n")
    told = dict(re.findall(r"(?ms)^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", args))
    for name, field in schema["properties"].items():
        field.pop("title", None)
        field.pop("default", None)
        field["description"] = " ".join(told[name].split())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(verdict_schema(), indent=2) + "\n")
