"""Which CUDA a driver runs, and which one compiles for a GPU: the catalogue asks here, and so do machines.

Both have the same tables: the catalogue's, of which machines get a copy (gpukiln/gpus/facts.json). Runs on
machines: Python 3.9, and nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NATIVE, MINOR_VERSION, FORWARD_COMPAT, NO = "native", "minor-version", "forward-compat", "no"
GUIDE = "CUDA Compatibility"
RELEASE_NOTES = "CUDA Toolkit Release Notes, table CUDA Toolkit and Corresponding Driver Versions"


def version_key(text: str) -> tuple[int, ...]:
    """A version such as 535.309.01 as a tuple that compares, without parts that are no numbers.

    The catalogue's (`gpukiln.catalog.load.version_key`) refuses those, for people type its versions; what a
    driver reports of itself must not end the view of a machine.
    """
    return tuple(int(part) for part in text.split(".") if part.isdigit())


@dataclass(frozen=True)
class CudaSupport:
    """Whether a driver runs what was built with a CUDA version.

    Args:
        way: native, minor-version (with limits), forward-compat (with a package in the container, on
            data-centre boards) or no.
        message: The rule that decides, with the versions it compares.
        limits: What does not work, or what would be needed, in words; empty for native.
        package: The forward-compatibility package that helps, or None.
        source: Where the rule comes from.
    """

    way: str
    message: str
    limits: str
    package: str | None
    source: str

    @property
    def runs(self) -> bool:
        """Whether it runs as it is, with limits or without."""
        return self.way in (NATIVE, MINOR_VERSION)


class RequiredDrivers(NamedTuple):
    """The driver that came with a CUDA version, which runs all of it, and the first that runs it at all."""

    native: str
    first: str


def required_drivers(
    cuda: str, toolkits: Mapping[str, str], floors: Mapping[str, str]
) -> RequiredDrivers | None:
    """What a CUDA version asks of drivers; None where the tables do not have it.

    Releases of one minor version differ in nothing that a driver must know: the first of them counts, and
    one that is not in the table yet is decided as the others.

    Args:
        cuda: For example 12.1 or 12.1.1.
        toolkits: Every toolkit, and the driver released with it.
        floors: For each CUDA major version the first driver that runs its applications.
    """
    minor = version_key(cuda)[:2]
    released = [driver for full, driver in toolkits.items() if version_key(full)[:2] == minor]
    first = floors.get(str(minor[0])) if len(minor) == 2 else None
    return RequiredDrivers(min(released, key=version_key), first) if released and first else None


def driver_support(
    cuda: str, needed: RequiredDrivers, driver: str, others: Sequence[str] = ()
) -> CudaSupport:
    """Whether a driver runs what was built with a CUDA version, and by which rule.

    Args:
        needed: What the CUDA version asks for.
        others: Names of its GPUs that are no data-centre boards, for which forward compatibility is not.
    """
    has, first = version_key(driver), needed.first
    major, minor = version_key(cuda)[:2]
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
    """The CUDA versions that compile for a GPU's architecture, in words; None where this one does.

    Args:
        first: The first toolkit that does.
        last: The last major version that does; None while it goes on.
    """
    version = version_key(cuda)
    if version[:2] < version_key(first):
        return f"CUDA {first} or later"
    return f"CUDA {last}.x or earlier" if last and version[0] > last else None
