"""The metrics that there are: the exporter's and kube-state-metrics'."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from gpukiln.catalog.load import read_yaml
from gpukiln.typed import load, strict

FILE = Path(__file__).with_name("metrics.yaml")


@strict
class Metric:
    """One of the exporter's.

    Args:
        type: Of Prometheus; a label is put on all of the GPU's metrics.
        default: Whether the exporter gives it when nobody asks.
    """

    type: Literal["gauge", "counter", "label"]
    help: str
    unit: str = ""
    default: bool = False


@cache
def metrics() -> dict[str, Metric]:
    return load(dict[str, Metric], read_yaml(FILE)["metrics"], where=FILE.name)


@cache
def state() -> tuple[str, ...]:
    """Names of kube-state-metrics' that rules and dashboard ask for."""
    return load(tuple[str, ...], read_yaml(FILE)["state"], where=FILE.name)


def counters() -> str:
    """The exporter's CSV: complete, for it adds nothing of its own then."""
    head = "# DCGM FIELD, Prometheus metric type, help message\n"
    rows = (
        f"{name}, {one.type}, {one.help}" + (f" (in {one.unit})." if one.unit else ".")
        for name, one in metrics().items()
    )
    return head + "".join(f"{row}\n" for row in rows)
