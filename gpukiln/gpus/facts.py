"""The part of the catalogue that machines have (`gpukiln.catalog.shipped` generates facts.json)."""

from __future__ import annotations

import json
import pkgutil
from functools import cache
from typing import Any


@cache
def facts() -> dict[str, Any]:
    """{branches, cuda, architectures, gpus, prices, environments, xids}."""
    text = pkgutil.get_data("gpukiln.gpus", "facts.json")  # works for a file and for a member of the zipapp
    if text is None:
        raise RuntimeError("gpukiln/gpus/facts.json is missing from the installation")
    return dict(json.loads(text))
