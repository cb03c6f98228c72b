"""The form of a workspace's contract, and of what workspace.* prints with --json.

`python -m gpukiln.commands.workspace_schema > docs/workspace.schema.json`

Made of the types that are read and written: a field that they gain or lose is one here. What people write is
`Workspace`; `Outputs` is what Terraform's module answers, too; every other document says by `schema` which it
is. Money is a text, as AWS has it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukiln.commands.forms import form_of
from gpukiln.workspaces.contract import Outputs, Workspace
from gpukiln.workspaces.usage import USAGE, Usage
from gpukiln.workspaces.view import LIST, SHOW, STATUS, Listing, Shown, Status

DOCUMENTS = {LIST: Listing, SHOW: Shown, STATUS: Status, USAGE: Usage}


def schema() -> dict[str, Any]:
    """One schema of the contract and of all documents."""
    defs: dict[str, Any] = {}
    references = [form_of(kind, defs) for kind in (Outputs, *DOCUMENTS.values())]
    for name, kind in DOCUMENTS.items():
        defs[kind.__name__]["properties"]["schema"] = {"const": name}
    # The last: where a document shows what was asked for, it is in the form that people write.
    references.insert(0, form_of(Workspace, defs, written=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Generated: python -m gpukiln.commands.workspace_schema > docs/workspace.schema.json",
        "title": "What a workspace is asked for, and what invoke workspace.* prints with --json",
        "oneOf": references,
        "$defs": dict(sorted(defs.items())),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
