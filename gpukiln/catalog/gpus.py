"""GPUs and their architectures: which driver and which CUDA know them."""

from functools import cache
from typing import Literal

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict, unknown


@strict
class GpuArchitecture:
    """A GPU architecture.

    Args:
        name: For example Turing.
        first_cuda: The first CUDA toolkit that compiles for it.
        last_cuda: The last CUDA major version that does, or None while it goes on.
        last_driver: The last driver branch, or None while it goes on.
        note: What else to know.
    """

    name: str
    first_cuda: str
    last_cuda: int | None = None
    last_driver: int | None = None
    note: str = ""


@strict
class Gpu:
    """A GPU or another accelerator.

    Args:
        name: As the field calls it, for example A10G.
        status: How well the facts are known: confirmed, secondary, memory.
        source: Where they come from.
        manufacturer: NVIDIA, or another one whose boards the driver can't drive.
        arch: The name of its architecture, None for other manufacturers.
        cc: Compute capability, for example "8.6".
        pci_ids: Device ids below vendor 10DE.
        min_driver: The first driver that names it; None: older than every branch of the catalogue.
        open_first: The first driver whose open modules list it; None: none of them does.
        modules: The kind of kernel module that can drive it.
        nvswitch: Whether machines of eight have NVSwitch, and with it need the fabric manager.
        nvlsm: Whether those are no PCI devices, and need NVLink's subnet manager (NVLSM) as well.
        ec2_name: What EC2's API calls it where that is not its name; boards of one such name differ.
        memory_gb: As it is sold, in GB; several where boards of one name differ; empty: no source says.
        data_center: Whether NVIDIA counts it as a data-centre board, for which forward compatibility exists.
    """

    name: str
    status: str
    source: str
    manufacturer: str = "NVIDIA"
    arch: str | None = None
    # Text, compared by `version_key`: as a float 12.10 would be 12.1.
    cc: str | None = None
    # Several: memory sizes and form factors of one name have ids of their own.
    pci_ids: tuple[str, ...] = ()
    min_driver: str | None = None
    open_first: str | None = None
    modules: Literal["proprietary", "open", "either"] = "either"
    nvswitch: bool = False
    # HGX B200 and B300: their NVSwitches are no PCI devices, so that no probe of the bus finds them.
    nvlsm: bool = False
    ec2_name: str = ""
    memory_gb: tuple[int, ...] = ()
    # False for the boards of workstations and games, which EC2 has none of but users do.
    data_center: bool = True


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the catalogue by its key, for example a10g."""
    return load(dict[str, Gpu], data("nvidia_matrix")["gpus"], where="nvidia_matrix.yaml: gpus")


@cache
def architectures() -> dict[str, GpuArchitecture]:
    """Every architecture of the catalogue by its name."""
    rows = load(
        tuple[GpuArchitecture, ...],
        data("nvidia_matrix")["architectures"],
        where="nvidia_matrix.yaml: architectures",
    )
    return {row.name: row for row in rows}


def gpu(key: str) -> Gpu:
    """One GPU.

    Args:
        key: For example a10g.

    Raises:
        UsageError: The catalogue does not know it.
    """
    if known_gpu := gpus().get(key):
        return known_gpu
    raise unknown("GPU", key, gpus())
