"""CUDA toolkits, the drivers they need, and the GPUs they compile for."""

from collections.abc import Iterable
from functools import cache

from gpukiln import compatibility
from gpukiln.catalog import drivers
from gpukiln.catalog.gpus import architectures, gpu
from gpukiln.catalog.load import data, version_key
from gpukiln.compatibility import CudaSupport, RequiredDrivers
from gpukiln.typed import load, unknown

ARCHITECTURE_MATRIX = "CUDA Toolkit, Driver, and Architecture Matrix"


@cache
def toolkits() -> dict[str, str]:
    """Every CUDA toolkit of the catalogue, and the driver released with it."""
    return load(
        dict[str, str], data("nvidia_matrix")["cuda_toolkits"], where="nvidia_matrix.yaml: cuda_toolkits"
    )


@cache
def floors() -> dict[str, str]:
    """For each CUDA major version the first driver that runs its applications."""
    # Keys of YAML are numbers there, and the rest of the catalogue has versions as texts.
    rows = load(dict[int, str], data("nvidia_matrix")["cuda_floor"], where="nvidia_matrix.yaml: cuda_floor")
    return {str(major): driver for major, driver in rows.items()}


def needs(cuda: str) -> RequiredDrivers:
    """The drivers that a CUDA version asks for.

    Args:
        cuda: For example "12.1" or "12.1.1".

    Raises:
        UsageError: The catalogue knows no such toolkit.

    >>> needs("12.1").first
    '525.60.13'
    >>> needs("12.1").native
    '530.30.02'
    """
    version_key(cuda)  # refuses what is no version
    if known_needs := compatibility.required_drivers(cuda, toolkits(), floors()):
        return known_needs
    raise unknown("CUDA version", cuda, {full.rpartition(".")[0] for full in toolkits()})


def support(cuda: str, driver: str, gpus: Iterable[str] = ()) -> CudaSupport:
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
    drivers.branch(version_key(driver)[0])
    # Forward compatibility exists for data-centre boards only (CUDA Compatibility guide).
    others = [gpu(key).name for key in gpus if not gpu(key).data_center]
    return compatibility.driver_support(cuda, needs(cuda), driver, others)


def compile_problem(cuda: str, key: str) -> str | None:
    """Why a CUDA version can't compile for a GPU.

    Args:
        cuda: The CUDA version.
        key: The GPU, for example a10g.

    Returns:
        The CUDA versions that can, in words; None when this one can, or the GPU is not NVIDIA's.

    Raises:
        UsageError: The catalogue does not know the GPU.

    >>> compile_problem("11.0", "l4")
    'CUDA 11.8 or later'
    >>> compile_problem("12.4", "t4") is None
    True
    """
    board = gpu(key)
    if board.arch is None:
        return None
    # Every GPU of an architecture is compiled for alike; minor capabilities need no other toolkit.
    row = architectures()[board.arch]
    return compatibility.compilers(cuda, row.first_cuda, row.last_cuda)
