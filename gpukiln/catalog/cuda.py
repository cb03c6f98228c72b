"""CUDA toolkits, the drivers they need, and the GPUs they compile for."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gpukiln.catalog import drivers
from gpukiln.catalog.gpus import architectures, gpu
from gpukiln.catalog.load import data, version_key
from gpukiln.typed import load, unknown

GUIDE = "CUDA Compatibility"
RELEASE_NOTES = "CUDA Toolkit Release Notes, table CUDA Toolkit and Corresponding Driver Versions"
ARCHITECTURE_MATRIX = "CUDA Toolkit, Driver, and Architecture Matrix"


@dataclass(frozen=True)
class Support:
    """Whether a driver runs what was built with a CUDA version.

    Args:
        way: native, minor-version (with limits), forward-compat (with a package in the container, on
            data-centre boards) or no.
        message: The rule that decides, with the versions it compares.
        limits: What does not work, or what would be needed, in words; empty for native.
        package: The forward-compatibility package that helps, or None.
        source: Where the rule comes from.
    """

    way: Literal["native", "minor-version", "forward-compat", "no"]
    message: str
    limits: str
    package: str | None
    source: str


@cache
def toolkits() -> dict[str, str]:
    """Every CUDA toolkit of the catalogue, and the driver released with it."""
    return load(
        dict[str, str], data("nvidia_matrix")["cuda_toolkits"], where="nvidia_matrix.yaml: cuda_toolkits"
    )


@cache
def floors() -> dict[int, str]:
    """For each CUDA major version the first driver that runs its applications."""
    return load(dict[int, str], data("nvidia_matrix")["cuda_floor"], where="nvidia_matrix.yaml: cuda_floor")


def floor(cuda: str) -> str:
    """The first driver that runs what was built with a CUDA version.

    Args:
        cuda: For example "12.1" or "12.1.1".

    Returns:
        A driver version.

    Raises:
        UsageError: The catalogue knows no such toolkit.
    """
    known = {version for full in toolkits() for version in (full, full.rpartition(".")[0])}
    major = version_key(cuda)[0]
    if cuda not in known or major not in floors():
        raise unknown("CUDA version", cuda, {version for version in known if version.count(".") == 1})
    return floors()[major]


def released_with(cuda: str) -> str:
    """The driver that came with a CUDA version: this one and every later one runs it without limits.

    Args:
        cuda: For example "12.1" or "12.1.1"; releases of one minor version differ in nothing that a driver
            must know, so the first of them counts.

    Returns:
        A driver version.

    Raises:
        UsageError: The catalogue knows no such toolkit.
    """
    floor(cuda)
    minor = version_key(cuda)[:2]
    return min((row for full, row in toolkits().items() if version_key(full)[:2] == minor), key=version_key)


def support(cuda: str, driver: str, gpus: Iterable[str] = ()) -> Support:
    """Whether a driver runs what was built with a CUDA version, and by which rule.

    Args:
        cuda: The CUDA version, for example "12.1".
        driver: The driver's version.
        gpus: Keys of the GPUs it is to run on, as far as they are known.

    Returns:
        The way and its limits.

    Raises:
        UsageError: The catalogue does not know the CUDA version, the driver's branch or a GPU.
    """
    native, first, row = released_with(cuda), floor(cuda), drivers.branch(version_key(driver)[0])
    major, minor = version_key(cuda)[:2]
    package = f"cuda-compat-{major}-{minor}"
    if version_key(driver) >= version_key(native):
        message = f"driver {driver} is as new as the one released with CUDA {cuda} ({native}), or newer"
        return Support("native", message, "", None, RELEASE_NOTES)
    if version_key(driver) >= version_key(first):
        message = f"CUDA {cuda} is newer than the {row.native_cuda} of driver branch {row.branch}"
        message += f"; every driver from {first} on runs CUDA {major}"
        limits = "it runs, but nothing that is compiled at run time (PTX), nor features of newer drivers"
        return Support(
            "minor-version", message, limits, package, f"{GUIDE}, chapter Minor Version Compatibility"
        )
    message = f"CUDA {cuda} needs driver {first} or later; found {driver}"
    source = f"{GUIDE}, chapter Forward Compatibility"
    if others := [gpu(key).name for key in gpus if not gpu(key).data_center]:
        limits = f"{package} would help on data-centre boards, which {', '.join(others)} is not"
        return Support("no", message, limits, None, source)
    limits = f"{package} in the container, on data-centre boards, if NVIDIA lists branch {row.branch} for it"
    return Support("forward-compat", message, limits, package, source)


def compile_problem(cuda: str, key: str) -> str | None:
    """Why a CUDA version can't compile for a GPU.

    Args:
        cuda: The CUDA version.
        key: The GPU, for example a10g.

    Returns:
        The CUDA versions that can, in words; None when this one can, or the GPU is not NVIDIA's.

    Raises:
        UsageError: The catalogue does not know the GPU.
    """
    board = gpu(key)
    if board.arch is None:
        return None
    row, wanted = architectures()[board.arch], version_key(cuda)
    if wanted[:2] < version_key(row.first_cuda):
        return f"CUDA {row.first_cuda} or later"
    if row.last_cuda and wanted[0] > row.last_cuda:
        return f"CUDA {row.last_cuda}.x or earlier"
    return None
