"""What commands print with --json, held against its published schema."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from gpukiln.cli import schemas
from gpukiln.cli.json_schema import DIALECT

# A document is of the command that its name begins with; these are printed by others, too.
ALSO = {
    "k8s.rules/1": ("k8s.check",),
    "offer.list/1": ("offer.size",),
    "workspace.plan/1": ("workspace.up",),
    "workspace.show/1": ("workspace.up", "workspace.start", "workspace.stop"),
}


@cache
def validator(name: str) -> Draft202012Validator:
    """Of the document whose `schema` says the name."""
    found, builder = schemas.schemas_of(name.partition(".")[0])
    schema = {"$schema": DIALECT, **found[name], "$defs": builder.used_by([found[name]])}
    return Draft202012Validator(schema)


def commands_of(document: str) -> tuple[str, ...]:
    """The commands that print a document, by its `schema`: that of its name, and others."""
    return (".".join(document.partition("/")[0].split(".")[:2]), *ALSO.get(document, ()))


def check(document: Any) -> None:
    """Fail where a document has no published schema, or another form."""
    assert isinstance(document, dict), f"a document is an object, this is {document!r:.80}"
    assert "schema" in document, f"a document says its schema, this has {', '.join(document)}"
    name = document["schema"]
    assert isinstance(name, str), f"its schema is a name, such as ami.list/1, and no {name!r}"
    known, _ = schemas.schemas_of(name.partition(".")[0])
    assert name in known, f"{name} is not in gpukiln.cli.schemas"
    if error := best_match(validator(name).iter_errors(document)):
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        raise AssertionError(f"{name}{where}: {error.message:.400}")


def read(text: str) -> dict[str, Any]:
    """The document that a command has printed, of its published form."""
    document: dict[str, Any] = json.loads(text)
    check(document)
    return document
