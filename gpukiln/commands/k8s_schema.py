"""The form of what k8s.* prints with --json.

`python -m gpukiln.commands.k8s_schema > docs/k8s.schema.json`

Made of the types that are written: a field that they gain or lose is one here. What `k8s.test` prints is a
verdict, whose form is docs/verdict.schema.json; what `k8s.rbac` prints are manifests.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukiln.commands.forms import of_documents
from gpukiln.kubernetes import doctor
from gpukiln.kubernetes.addons.listing import ADDONS, AddOns
from gpukiln.kubernetes.check import judging, registry
from gpukiln.kubernetes.jobs.document import JOB, Document
from gpukiln.kubernetes.nodes import rendered

DOCUMENTS = {
    ADDONS: AddOns,
    judging.SCHEMA: judging.Report,
    registry.SCHEMA: registry.Listing,
    doctor.SCHEMA: doctor.Diagnosis,
    JOB: Document,
    rendered.SCHEMA: rendered.Nodes,
}


def schema() -> dict[str, Any]:
    """One schema of all documents; `schema` in a document says which it is."""
    return of_documents("k8s", "What invoke k8s.* prints with --json", DOCUMENTS)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
