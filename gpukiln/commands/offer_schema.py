"""The form of what offer.* prints with --json.

`python -m gpukiln.commands.offer_schema > docs/offer.schema.json`

Made of the types that are written: a field that they gain or lose is one here. Money is a text, as AWS has
it: a number of JSON would lose digits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukiln.commands.forms import of_documents
from gpukiln.offers.listing import CHECK, LIST, SHOW, Checked, Listing, Shown
from gpukiln.offers.refresh import REFRESH, Document

DOCUMENTS = {LIST: Listing, SHOW: Shown, CHECK: Checked, REFRESH: Document}


def schema() -> dict[str, Any]:
    """One schema of all documents; `schema` in a document says which it is."""
    return of_documents("offer", "What invoke offer.* prints with --json", DOCUMENTS)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
