"""The form of what node.passthrough prints with --json, and of its undo file.

`python -m gpukiln.commands.node_schema > docs/node.schema.json`

Made of the types that are written: a field that they gain or lose is one here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukiln.commands.forms import of_documents
from gpukiln.nodes.passthrough.model import CREATE, LOOK, UNDO, UNDONE, Created, Passthrough, Undo, Undone

DOCUMENTS = {LOOK: Passthrough, UNDO: Undo, UNDONE: Undone, CREATE: Created}


def schema() -> dict[str, Any]:
    """One schema of all documents; `schema` in a document says which it is."""
    return of_documents(
        "node", "What invoke node.passthrough prints with --json, and its undo file", DOCUMENTS
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
