"""What commands print with --json, held against its published schema."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from gpukiln.commands import schemas


@cache
def validator(name: str) -> Draft202012Validator:
    """Of the document whose `schema` says the name."""
    return Draft202012Validator(schemas.document_schema(name))


def check(document: Any) -> None:
    """Fail where a document has no published schema, or another form."""
    assert isinstance(document, dict), f"a document is an object, this is {document!r:.80}"
    assert "schema" in document, f"a document says its schema, this has {', '.join(document)}"
    name = document["schema"]
    assert isinstance(name, str), f"its schema is a name, such as ami.list/1, and no {name!r}"
    known, _ = schemas.forms_of(name.partition(".")[0])
    assert name in known, f"{name} is not in gpukiln.commands.schemas"
    if error := best_match(validator(name).iter_errors(document)):
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        raise AssertionError(f"{name}{where}: {error.message:.400}")


def read(text: str) -> dict[str, Any]:
    """The document that a command has printed, of its published form."""
    document: dict[str, Any] = json.loads(text)
    check(document)
    return document
