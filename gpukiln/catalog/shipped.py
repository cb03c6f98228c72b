"""The part of the catalogue that goes to machines.

`python -m gpukiln.catalog.shipped > gpukiln/gpus/facts.json` writes it.
Machines have neither YAML nor pydantic; they evaluate their driver, prices and Xids with these facts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpukiln.catalog import cuda, drivers, gpus, xid
from gpukiln.catalog.components import load_environments
from gpukiln.catalog.load import data

PRICES_OF = "us-east-1"  # a machine does not know its region, and this one's prices are the newest and most


def shipped() -> dict[str, Any]:
    """Branches, CUDA toolkits, boards, prices and Xids as plain data."""
    return {
        "_": "Generated: python -m gpukiln.catalog.shipped > gpukiln/gpus/facts.json",
        "branches": {
            str(number): {
                "type": row.type,
                "eol": row.eol and row.eol.isoformat(),
                "native_cuda": row.native_cuda,
                "latest": row.latest,
            }
            for number, row in drivers.branches().items()
        },
        "cuda": {"toolkits": cuda.toolkits(), "floors": cuda.floors()},
        "architectures": {
            name: {"first_cuda": row.first_cuda, "last_cuda": row.last_cuda, "last_driver": row.last_driver}
            for name, row in gpus.architectures().items()
        },
        # Only NVIDIA's: gpukiln-gpu asks NVML, which knows no other boards.
        "gpus": {
            key: {"name": row.name, "arch": row.arch, "cc": row.cc, "data_center": row.data_center}
            for key, row in gpus.gpus().items()
            if row.manufacturer == "NVIDIA"
        },
        "environments": {
            framework: [
                {
                    "version": row.version,
                    "cuda": row.cuda,
                    "least_driver": row.least_driver,
                    "image": row.image,
                    # The node pulls by digest; the tag is for the user.
                    "digest": row.digest,
                    "wheels": row.wheels,
                }
                for row in rows
            ]
            for framework, rows in load_environments().items()
        },
        "prices": [row for row in data("prices")["machines"] if row["region"] == PRICES_OF],
        "xids": {str(number): row for number, row in xid.xid_rules().items()},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(shipped(), indent=1) + "\n")
