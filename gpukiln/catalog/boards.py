"""Boards as NVML describes them, how they can be divided, and where EC2's instance types have them."""

from dataclasses import field
from functools import cache
from typing import Literal

from gpukiln.catalog.instance_types import InstanceType, instance_type
from gpukiln.catalog.load import data
from gpukiln.typed import load, strict, unknown

# How well a fact is known; gpu_boards.yaml explains the words.
Status = Literal["confirmed", "secondary", "memory"]
LAST_SLOT = 0x1E  # of a Nitro machine whose GPUs are all below 0000:00


@strict
class Power:
    """Limits of power, in W."""

    limit: float
    min: float | None = None
    max: float | None = None


@strict
class Clocks:
    """The highest clocks, in MHz."""

    sm: int | None = None
    mem: int | None = None
    video: int | None = None
    app_sm: int | None = None


@strict
class IdleReadings:
    """What a board says that does nothing: W, degrees Celsius, MHz, a fan in percent.

    Args:
        memory: Temperature of its memory.
        memory_power: Power of its memory; module_power: of a Grace module.
        pcie_gen: Generation of the link, where it is slower then.
    """

    power: float
    temperature: int
    pstate: int
    margin: int | None = None
    sm: int | None = None
    mem: int | None = None
    video: int | None = None
    fan: int | None = None
    memory: int | None = None
    memory_power: float | None = None
    module_power: float | None = None
    pcie_gen: int | None = None


@strict
class Tlimit:
    """Margins in degrees at which something is done."""

    shutdown: int | None = None
    slowdown: int | None = None
    memory: int | None = None
    gpu: int | None = None


@strict
class Temperature:
    """Thresholds in degrees Celsius, or since Ada the margins instead."""

    slowdown: int | None = None
    shutdown: int | None = None
    gpu_max: int | None = None
    memory_max: int | None = None
    target: int | None = None
    tlimit: Tlimit = Tlimit()


@strict
class Pcie:
    """A board's PCIe.

    Args:
        virtual_width: The lanes that a virtual machine is shown, where they are fewer.
        board_gen: The generation that the board has, where its machine has less.
        atomics_out: Whether it sends every atomic operation; atomics_in: whether it takes them.
    """

    gen: int
    width: int
    virtual_width: int | None = None
    board_gen: int | None = None
    atomics_out: bool = False
    atomics_in: bool = False


@strict
class Nvlink:
    """A GPU's NVLinks.

    Args:
        version: NVML's number of it.
        mbps: Speed of one link.
        bridge: Whether they go to one other board, by a bridge.
    """

    version: int
    links: int
    mbps: int | None = None
    bridge: bool = False


@strict
class Rack:
    """Where a board of a rack is."""

    slot: int
    tray: int
    host: int


@strict
class Board:
    """A board; gpukiln/catalog/data/gpu_boards.yaml says what each field is. None: no source shows it."""

    name: str
    brand: int
    device: str
    memory_mib: int
    cores: int
    power: Power
    clocks: Clocks
    idle: IdleReadings
    temperature: Temperature
    pcie: Pcie
    status: Status
    source: str
    architecture: str | None = None
    compute_capability: str | None = None
    # None: every branch of the catalogue knows the board.
    min_driver: str | None = None
    ecc: bool | None = None
    # Row remapping since Ampere; older boards retire pages (NVIDIA GPU Memory Error Management).
    repair: Literal["rows", "pages"] | None = None
    subsystem: str | None = None
    reserved_mib: int | None = None
    bus_width: int | None = None
    vbios: str | None = None
    part_number: str | None = None
    nvlink: Nvlink | None = None
    fabric: bool = False
    fabric_health: int | None = None
    mig: str | None = None
    mig_unknown: bool = False
    bar1_mib: int | None = None
    banks: int | None = None
    inforom: tuple[str, ...] = ()
    supported: tuple[tuple[int, float, int, float], ...] = ()
    display: bool = False
    fans: int | None = None
    card: int = 1
    addressing: int | None = None
    c2c: bool | None = None
    # Grace modules: the GPU is a NUMA node of its own there.
    grace: int = 0
    module: Power | None = None
    edpp: int | None = None
    rack: Rack | None = None


# number, id, name, slices, memory slices, multiprocessors, MiB, instances, copy engines, decoders, encoders,
# jpegs, ofas, starts of placements
# A tuple, because the rows of gpu_boards.yaml are tables of numbers as nvidia-smi mig -lgip prints them.
MigRow = tuple[int, int, str, int, int, int, int, int, int, int, int, int, int, tuple[int, ...]]


@strict
class Division:
    """How a GPU can be divided by MIG."""

    slices: int
    memory_slices: int
    profiles: tuple[MigRow, ...]
    status: Status
    source: str


@strict
class BoardLayout:
    """Where the GPUs of an instance type are; gpu_boards.yaml says what each field is."""

    buses: tuple[str, ...]
    status: Status
    source: str
    roots: tuple[str, ...] = ()
    flat: bool = True
    switches: dict[str, int] = field(default_factory=dict)
    mesh: tuple[tuple[int, ...], ...] = ()
    modules: tuple[int, ...] = ()
    memory_mib: int | None = None
    ecc: bool | None = None


@cache
def boards() -> dict[str, Board]:
    """Every board, by the key of its GPU in nvidia_matrix.yaml where that has it."""
    return load(dict[str, Board], data("gpu_boards")["boards"], where="gpu_boards.yaml: boards")


@cache
def divisions() -> dict[str, Division]:
    """Every kind of division that a board's `mig` names."""
    return load(dict[str, Division], data("gpu_boards")["mig"], where="gpu_boards.yaml: mig")


@cache
def _layouts() -> dict[str, BoardLayout]:
    return load(dict[str, BoardLayout], data("gpu_boards")["layouts"], where="gpu_boards.yaml: layouts")


def board(key: str) -> Board:
    """One board.

    Args:
        key: For example a10g.

    Raises:
        UsageError: The catalogue has none for this GPU.
    """
    if existing_board := boards().get(key):
        return existing_board
    raise unknown("GPU board", key, boards())


def layout(name: str) -> BoardLayout:
    """Where an instance type has its GPUs.

    Raises:
        UsageError: The catalogue does not know the type.
    """
    machine: InstanceType = instance_type(name)
    # Machines without a capture get consecutive slots that end at the last one.
    first = LAST_SLOT + 1 - machine.gpus
    rule = BoardLayout(
        buses=tuple(f"00:{slot:02x}" for slot in range(first, LAST_SLOT + 1)),
        status="secondary",
        source="the last at 00:1e, as g4dn.xlarge, g5.xlarge and g5.12xlarge show",
    )
    # A layout of its own comes from a capture of that type, and takes precedence over the rule.
    return _layouts().get(name, rule)
