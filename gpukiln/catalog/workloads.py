"""What programs need of a driver and a GPU."""

import re
from functools import cache
from typing import Literal

from gpukiln.catalog import cuda as catalog_cuda
from gpukiln.catalog.load import data
from gpukiln.compatibility import GUIDE
from gpukiln.typed import load, strict, unknown


@strict
class WorkloadRequirements:
    """What a program needs; the fields are explained in data/workloads.yaml."""

    title: str
    source: str
    status: Literal["confirmed", "secondary", "memory"]
    cuda: str | None = None
    least_driver: str | None = None
    # From the workload's own documentation; built_for is what its binaries have code for.
    least_cc: str | None = None
    built_for: tuple[str, ...] = ()
    built_for_arm64: tuple[str, ...] = ()
    ptx: str | None = None
    arch: tuple[Literal["x86_64", "arm64"], ...] = ("x86_64", "arm64")
    note: str = ""


@cache
def workloads() -> dict[str, WorkloadRequirements]:
    """Every workload of the catalogue by its name."""
    return load(dict[str, WorkloadRequirements], data("workloads")["workloads"], where="workloads.yaml")


def workload(name: str) -> WorkloadRequirements:
    """One workload.

    Args:
        name: One of the catalogue, or cuda-12.4 for any container with that CUDA version.

    Raises:
        UsageError: The catalogue does not know it.

    >>> workload("cuda-12.4").title
    'a container with CUDA 12.4'
    >>> workload("cuda-12.4").cuda
    '12.4'
    """
    # Any CUDA version is a workload, so that a container needs no entry of its own.
    if cuda_match := re.fullmatch(r"cuda-?(\d+\.\d+(?:\.\d+)?)", name):
        # Raises an error where the catalogue does not know the version.
        catalog_cuda.needs(cuda_match[1])
        return cuda_workload(cuda_match[1])
    if name not in workloads():
        raise unknown("workload", name, [*workloads(), "cuda-12.4"])
    return workloads()[name]


def cuda_workload(version: str) -> WorkloadRequirements:
    """A container with a CUDA version."""
    return WorkloadRequirements(f"a container with CUDA {version}", GUIDE, "confirmed", cuda=version)
