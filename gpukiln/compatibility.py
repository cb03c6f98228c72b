"""Which CUDA versions a driver runs, and which compile for a GPU: the rules of the catalogue and of nodes.

Both use the catalogue's tables, of which nodes have a copy (gpukiln/gpus/facts.json). Standard library,
Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NATIVE, MINOR_VERSION, FORWARD_COMPAT, NO = "native", "minor-version", "forward-compat", "no"
GUIDE = "CUDA Compatibility"
RELEASE_NOTES = "CUDA Toolkit Release Notes, table CUDA Toolkit and Corresponding Driver Versions"


def version_key(text: str) -> tuple[int, ...]:
    """A version as a tuple that compares, without parts that are not numbers.

    >>> version_key("535.309.01")
    (535, 309, 1)
    >>> version_key("12.x")
    (12,)
    """
    # gpukiln.catalog.load.version_key refuses such parts, for people type the catalogue's versions. A
    # driver's version comes from the driver, and must not end the view of a machine.
    return tuple(int(part) for part in text.split(".") if part.isdigit())


@dataclass(frozen=True)
class CudaSupport:
    """Whether a driver runs what was built with a CUDA version.

    Args:
        way: native, minor-version (with limits), forward-compat (with a package in the container, on
            data-centre boards) or no.
        message: The rule that applies, with the compared versions.
        limits: What does not work, or what is needed, in words; empty for native.
        package: The forward-compatibility package that makes it run, or None.
        source: The document with the rule.
    """

    way: str
    message: str
    limits: str
    package: str | None
    source: str

    @property
    def runs(self) -> bool:
        """Whether it runs without a package, with or without limits."""
        return self.way in (NATIVE, MINOR_VERSION)


class RequiredDrivers(NamedTuple):
    """The driver that was released with a CUDA version, and the first driver that runs it at all."""

    native: str
    first: str


def required_drivers(
    cuda: str, toolkits: Mapping[str, str], floors: Mapping[str, str]
) -> RequiredDrivers | None:
    """The drivers that a CUDA version requires; None where the tables do not have it.

    >>> required_drivers("12.1.1", {"12.1.0": "530.30.02", "12.1.1": "530.30.02"}, {"12": "525.60.13"})
    RequiredDrivers(native='530.30.02', first='525.60.13')
    >>> required_drivers("9.2", {"12.1.0": "530.30.02"}, {"12": "525.60.13"})

    Args:
        cuda: For example 12.1 or 12.1.1.
        toolkits: Every toolkit, and the driver released with it.
        floors: The first driver that runs applications of each CUDA major version.
    """
    # Releases of one minor version have the same requirements: the first of them counts, and one that is not
    # in the table yet is decided like the others.
    minor = version_key(cuda)[:2]
    released = [driver for full, driver in toolkits.items() if version_key(full)[:2] == minor]
    first = floors.get(str(minor[0])) if len(minor) == 2 else None
    return RequiredDrivers(min(released, key=version_key), first) if released and first else None


def driver_support(
    cuda: str, needed: RequiredDrivers, driver: str, others: Sequence[str] = ()
) -> CudaSupport:
    """Whether a driver runs what was built with a CUDA version, and by which rule.

    Args:
        needed: The result of `required_drivers`.
        others: Names of GPUs that are not data-centre boards, which forward compatibility does not support.
    """
    has, first = version_key(driver), needed.first
    major, minor = version_key(cuda)[:2]
    # NVIDIA's package names: cuda-compat-12-1.
    package, branch = f"cuda-compat-{major}-{minor}", has[0] if has else driver
    if has >= version_key(needed.native):
        message = f"driver {driver} is as new as CUDA {cuda}'s {needed.native}, or newer"
        return CudaSupport(NATIVE, message, "", None, RELEASE_NOTES)
    if has >= version_key(first):
        message = f"driver {driver} is older than CUDA {cuda}'s {needed.native}"
        message += f"; every driver from {first} on runs CUDA {major}"
        limits = "it runs, but nothing that is compiled at run time (PTX), nor features of newer drivers"
        source = f"{GUIDE}, chapter Minor Version Compatibility"
        return CudaSupport(MINOR_VERSION, message, limits, package, source)
    message = f"CUDA {cuda} needs driver {first} or later, found {driver}"
    source = f"{GUIDE}, chapter Forward Compatibility"
    if others:
        limits = f"{package} would help on data-centre boards, which {', '.join(others)} is not"
        return CudaSupport(NO, message, limits, None, source)
    limits = f"{package} in the container, on data-centre boards, if NVIDIA lists branch {branch} for it"
    return CudaSupport(FORWARD_COMPAT, message, limits, package, source)


def compilers(cuda: str, first: str, last: int | None) -> str | None:
    """The CUDA versions that compile for a GPU's architecture, in words; None where this version does.

    >>> compilers("11.8", "12.8", None)
    'CUDA 12.8 or later'
    >>> compilers("12.4", "9.0", 12)

    Args:
        first: The first toolkit that compiles for it.
        last: The last major version that compiles for it; None while every new version does.
    """
    version = version_key(cuda)
    if version[:2] < version_key(first):
        return f"CUDA {first} or later"
    return f"CUDA {last}.x or earlier" if last and version[0] > last else None
