"""CUDA toolkits and the drivers they need."""

from functools import cache

from gpukiln.catalog.load import data, unknown, validate, version_key


@cache
def toolkits() -> dict[str, str]:
    """Every CUDA toolkit of the catalogue, and the driver released with it."""
    return validate(dict[str, str], data("nvidia_matrix")["cuda_toolkits"], where="cuda_toolkits")


@cache
def floors() -> dict[int, str]:
    """For each CUDA major version the first driver that runs its applications."""
    return validate(dict[int, str], data("nvidia_matrix")["cuda_floor"], where="cuda_floor")


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
