"""Facts of the catalogue, as they are sent to machines (`gpukiln.catalog.shipped` makes the file)."""

from __future__ import annotations

import json
import pkgutil
from functools import cache
from typing import Any


@cache
def facts() -> dict[str, Any]:
    """{branches, cuda, architectures, gpus, prices, xids}."""
    text = pkgutil.get_data("gpukiln.gpus", "facts.json")  # a file, or a member of the zipapp
    if text is None:
        raise RuntimeError("gpukiln/gpus/facts.json is missing from the installation")
    return dict(json.loads(text))
