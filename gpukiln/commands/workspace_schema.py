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

from gpukiln.commands.forms import of_documents
from gpukiln.workspaces.contract import Outputs, Workspace
from gpukiln.workspaces.preview import PLAN, Preview
from gpukiln.workspaces.usage import USAGE, Usage
from gpukiln.workspaces.view import LIST, SHOW, STATUS, Listing, Shown, Status

DOCUMENTS = {LIST: Listing, PLAN: Preview, SHOW: Shown, STATUS: Status, USAGE: Usage}


def schema() -> dict[str, Any]:
    """One schema of the contract and of all documents."""
    title = "What a workspace is asked for, and what invoke workspace.* prints with --json"
    return of_documents("workspace", title, DOCUMENTS, read=(Outputs,), written=(Workspace,))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
