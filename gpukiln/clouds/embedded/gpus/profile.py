"""Makes the document that the double of NVML answers from: a machine's GPUs, idle and healthy."""

import uuid
from dataclasses import dataclass
from typing import Any, Literal

from gpukiln.catalog.boards import Board, BoardLayout, board, divisions, layout
from gpukiln.catalog.compat import check_driver_range
from gpukiln.catalog.gpus import gpu, gpus
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.load import version_key
from gpukiln.errors import IncompatibleError, UsageError

Data = dict[str, Any]
# An arbitrary namespace; a change would change the UUIDs of all simulated machines.
UUIDS = uuid.UUID("6f2f5c0e-5a4e-4a0e-9d63-0d8b1c0f7a11")
WORKSTATION_BRAND = 10  # NVML_BRAND_NVIDIA_VWS, the brand of EC2's fractional GPUs
ARCHITECTURES = {  # nvmlDeviceArchitecture_t
    "Kepler": 2,
    "Maxwell": 3,
    "Pascal": 4,
    "Volta": 5,
    "Turing": 6,
    "Ampere": 7,
    "Ada": 8,
    "Hopper": 9,
    "Blackwell": 10,
}
# nvmlMemoryLocation_t of the memories for which a board counts errors. From Turing on `nvidia-smi -q` has
# only DRAM (2) and SRAM (7); before that, those for which it has a number: P100 in NVIDIA/dcgm-exporter#16,
# K80 and V100 from memory.
DRAM_AND_SRAM = "2 7"
LOCATIONS = {"Kepler": "0 1 2 3 4", "Maxwell": "0 1 2 3 4", "Pascal": "1 2 3 4 5", "Volta": "0 1 2 3 6"}
IDLE = 1  # clock event reason: idle
COMPLETED = 3  # a state of the fabric
TO_GPU, TO_SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t
SWITCH, SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 10, 20, 30, 40, 50  # nvmlGpuTopologyLevel_t
OK, CHIPSET, UNSUPPORTED = 0, 1, 5  # nvmlGpuP2PStatus_t
COUNTERS = ("replay", "recovery", "crc_flit", "crc_data")
FABRIC = ("state", "status", "cluster", "clique", "health")
NVLINK_5 = 7  # NVML's version number; it counts only recoveries for each link
NVLINK_3 = 4  # the first version of machines with NVSwitch, except the DGX-2
TWO_NODES = 8  # with this many GPUs, each of two NUMA nodes has half
BARE_METAL, PASSED_THROUGH = 0, 1  # nvmlGpuVirtualizationMode_t
EVERY_ATOMIC = 0x3F  # NVML_PCIE_ATOMICS_CAP_*: fetch and add, swap, compare and swap, of 32 and 64 bits
SWITCH_CONNECTED = 1  # a peer type of the platform info
NODES_OF_A_GPU = 8  # NUMA nodes that Linux reserves for each GPU of Grace machines, for MIG
# NVML_ERROR_DEPRECATED.
DEPRECATED = {"_error": "Requested functionality has been deprecated", "code": 26}
NO_DISPLAY_MODE = 580  # the first branch without it (sources EXP and QX of gpu_boards.yaml); 570 has it


@dataclass(frozen=True)
class GpuHardware:
    """The hardware and driver that a profile describes.

    Args:
        kind: The board of all GPUs.
        arch: Their architecture.
        cc: Their compute capability.
        count: Number of GPUs, or of fractions of one where `fraction` is below 1.
        interconnect: How they are linked.
        bare: Whether the machine has no hypervisor.
        driver: The driver's version.
    """

    kind: Board
    arch: str
    cc: str
    place: BoardLayout
    count: int
    interconnect: Literal["none", "nvlink", "nvswitch"]
    bare: bool
    driver: str
    seed: str
    fraction: float = 1.0

    @property
    def branch(self) -> int:
        """The driver's branch."""
        return version_key(self.driver)[0]

    def is_from(self, arch: str) -> bool:
        """Whether the GPUs have an architecture or a later one."""
        return ARCHITECTURES[self.arch] >= ARCHITECTURES[arch]


def make_profile(name: str, *, seed: str, driver: str, cuda: str) -> Data:
    """The document of an instance type's machine that has just booted.

    A superset of the facts' section `nvml` (gpukiln/probe/nvml.py), in its units. Null: such a GPU does not
    have the value, or no public capture shows it.

    Args:
        name: The instance type.
        seed: Seed of UUIDs and serial numbers, such as the instance's id.
        driver: The driver's version.
        cuda: The driver's CUDA version, for example 12.2.

    Raises:
        UsageError: The type is unknown, retired, or has no NVIDIA GPU.
        IncompatibleError: The driver does not support its GPU.
    """
    kind = instance_type(name)
    model = gpu(kind.gpu)
    others = ", ".join(kind.alternatives) or "g4dn.xlarge"
    if model.manufacturer != "NVIDIA":
        message = f"{name} has {model.manufacturer}'s {model.name}, not an NVIDIA GPU: nothing to simulate"
        raise UsageError(message, hint=f"use {others}")
    if kind.status == "retired":
        raise UsageError(f"EC2 has retired {name}, so it is not simulated", hint=f"use {others}")
    arch, cc = _architecture_of(kind.gpu, driver, what=f"the {model.name} of {name}")
    machine = GpuHardware(
        kind=board(kind.gpu),
        arch=arch,
        cc=cc,
        place=layout(name),
        count=kind.gpus,
        interconnect=kind.interconnect,
        bare=kind.hypervisor == "none",
        driver=driver,
        seed=seed,
        fraction=kind.gpu_fraction,
    )
    return _document(machine, cuda)


def make_machine(
    key: str,
    count: int,
    *,
    seed: str,
    driver: str,
    cuda: str,
    place: BoardLayout | None = None,
    bare: bool = True,
) -> Data:
    """As `make_profile`, for a machine that is not an instance type.

    Args:
        key: The board, for example rtx-4090.
        count: Number of GPUs.
        place: Their PCI layout; None: in sequence behind one host bridge, with the board's links.
        bare: Whether the machine has no hypervisor.

    Raises:
        UsageError: The catalogue does not have the board.
        IncompatibleError: The driver does not support it.
    """
    kind = board(key)
    arch, cc = _architecture_of(key, driver, what=f"the {kind.name}")
    links = kind.nvlink
    linked = links is not None and (count > 1 or kind.grace > 0)
    interconnect: Literal["none", "nvlink", "nvswitch"] = "none"
    if links and linked:
        interconnect = "nvswitch" if links.version >= NVLINK_3 and not links.bridge else "nvlink"
    machine = GpuHardware(
        kind=kind,
        arch=arch,
        cc=cc,
        place=place or _layout(kind, count),
        count=count,
        interconnect=interconnect,
        bare=bare,
        driver=driver,
        seed=seed,
    )
    return _document(machine, cuda)


def _architecture_of(key: str, driver: str, *, what: str) -> tuple[str, str]:
    """Architecture and compute capability of a GPU; raises where the driver does not support it."""
    kind, model = board(key), gpus().get(key)
    arch = model.arch if model else kind.architecture
    cc = model.cc if model else kind.compute_capability
    if arch is None or cc is None:
        raise UsageError(f"gpu_boards.yaml has no architecture of {key}", hint="add it there")
    findings = check_driver_range(
        driver,
        arch,
        first=model.min_driver if model else kind.min_driver,
        what=what,
        alternative="another instance type",
        source=model.source if model else kind.source,
    )
    if findings:
        raise IncompatibleError(findings[0].message, hint=findings[0].remedy)
    return arch, cc


def _layout(kind: Board, count: int) -> BoardLayout:
    """The default layout: in sequence; Grace's GPUs each in its own PCI domain, bridged boards in pairs."""
    if kind.grace:
        places = [f"{8 * n + 1:04x}" for n in range(count)]
        return BoardLayout(
            buses=tuple(f"{place}:01:00" for place in places),
            roots=tuple(f"{place}:00" for place in places),
            status="memory",
            source="one PCI domain each, as QX of GB300 has them",
        )
    pairs = count // 2 * 2 if kind.nvlink and kind.nvlink.bridge else 0
    links = kind.nvlink.links if kind.nvlink else 0
    return BoardLayout(
        buses=tuple(f"{n + 1:02x}:00" for n in range(count)),
        # n ^ 1: the neighbour in a pair.
        mesh=tuple((n ^ 1,) * links if n < pairs else () for n in range(count)) if pairs else (),
        status="memory",
        source="one after the other",
    )


def _document(machine: GpuHardware, cuda: str) -> Data:
    virtual = machine.fraction < 1
    make = _fractional_gpu if virtual else _whole_gpu
    rows = [make(machine, index) for index in range(machine.count)]
    for row in rows:
        row["peers"] = [
            _path_between(machine, row["index"], n) for n in range(len(rows)) if n != row["index"]
        ]
    off = False if machine.is_from("Ampere") and not virtual else None
    return {
        "available": True,
        "error": None,
        "driver": machine.driver,
        "nvml": f"{cuda.partition('.')[0]}.{machine.driver}",
        "cuda_driver": cuda,
        "confidential": {"on": off, "ready": off},
        "gpus": rows,
    }


def bus_id(address: str) -> str:
    """[domain:]bus:device of the catalogue, as NVML writes it.

    >>> bus_id("00:1e")
    '00000000:00:1E.0'
    >>> bus_id("0009:01:00")
    '00000009:01:00.0'
    """
    *domain, bus, device = address.split(":")
    return f"{int(domain[0], 16) if domain else 0:08X}:{bus.upper()}:{device.upper()}.0"


def _stable_number(machine: GpuHardware, index: int, what: str, bits: int) -> int:
    """A pseudo-random number that is the same for a GPU in every start."""
    return uuid.uuid5(UUIDS, f"{machine.seed}/{index}/{what}").int % (1 << bits)


def _identity(machine: GpuHardware, index: int) -> Data:
    """The values that every GPU has, a fractional one too."""
    kind = machine.kind
    modules = machine.place.modules
    engine = 0 if machine.is_from("Turing") else None
    return {
        "index": index,
        "minor": index,
        "error": None,
        "bus_id": bus_id(machine.place.buses[index]),
        "uuid": f"GPU-{uuid.uuid5(UUIDS, f'{machine.seed}/{index}')}",
        "persistence": True,
        "architecture": ARCHITECTURES[machine.arch],
        "compute_capability": machine.cc,
        "cores": kind.cores,
        "pci_device_id": int(kind.device, 16),
        "memory_bus_width": kind.bus_width,
        "utilization": {
            "gpu": 0,
            "memory": 0,
            "encoder": 0,
            "decoder": 0,
            "jpeg": engine,
            "ofa": engine,
        },
        "compute_mode": 0,
        "accounting": False,
        "virtualization": BARE_METAL if machine.bare else PASSED_THROUGH,
        "module_id": modules[index] if modules else index + 1,
        "memory_node": _numa_node(machine, index),
        "numa_node": None,
        "recovery_action": 0,
        "processes": [],
        "peers": [],
    }


def _whole_gpu(machine: GpuHardware, index: int) -> Data:
    """The values of a whole GPU."""
    kind, place = machine.kind, machine.place
    power, clocks, idle, limits = kind.power, kind.clocks, kind.idle, kind.temperature
    ecc = kind.ecc if place.ecc is None else place.ecc
    rows = 0 if kind.repair == "rows" else None
    width = kind.pcie.width if machine.bare else kind.pcie.virtual_width or kind.pcie.width
    counters = ("volatile_uncorrected", "volatile_corrected", "aggregate_uncorrected", "aggregate_corrected")
    fan = idle.fan
    return (
        _identity(machine, index)
        | _board_identity(machine, index)
        | {
            "pstate": idle.pstate,
            "fan": fan,
            "fans": kind.fans or (None if fan is None else 1),
            "ecc": {
                "current": ecc,
                "pending": ecc,
                "default": kind.ecc,
                **dict.fromkeys(counters, 0 if ecc else None),
                "locations": LOCATIONS.get(machine.arch, DRAM_AND_SRAM) if ecc else None,
                "sram": True if ecc and machine.is_from("Ampere") else None,
            },
            "remapped_rows": {
                "correctable": rows,
                "uncorrectable": rows,
                "pending": None if rows is None else False,
                "failed": None if rows is None else False,
                "inactive": rows,
                "banks": kind.banks,
            },
            "retired_pages_pending": False if kind.repair == "pages" else None,
            "repair": dict.fromkeys(("channel", "tpc"), False if machine.is_from("Ampere") else None),
            "unrepairable_memory": False if machine.is_from("Hopper") and kind.repair else None,
            "clocks": {
                "graphics": idle.sm,
                "sm": idle.sm,
                "mem": idle.mem,
                "video": idle.video,
                "max_graphics": clocks.sm,
                "max_sm": clocks.sm,
                "max_mem": clocks.mem,
                "max_video": clocks.video,
                "default_app": clocks.app_sm,
                "supported": [
                    dict(zip(("memory", "max", "min", "step"), row, strict=True)) for row in kind.supported
                ],
            },
            "throttle": {"mask": IDLE, "names": ["idle"]},
            "temperature": {
                "gpu": idle.temperature,
                "memory": idle.memory,
                "slowdown": limits.slowdown,
                "shutdown": limits.shutdown,
                "gpu_max": limits.gpu_max,
                "memory_max": limits.memory_max,
                "acoustic_target": limits.target,
                "margin": idle.margin,
                "tlimit": {
                    "shutdown": limits.tlimit.shutdown,
                    "slowdown": limits.tlimit.slowdown,
                    "memory": limits.tlimit.memory,
                    "gpu": limits.tlimit.gpu,
                },
            },
            "power": {
                "draw": idle.power,
                "limit": power.limit,
                "default_limit": power.limit,
                "min_limit": power.min,
                "max_limit": power.max,
                "idle": idle.power,
                # GA100 (8.0) reports instant power; from Ampere on other GPUs report a one-second average
                # (nvml.h, nvmlDeviceGetPowerUsage).
                "averaged": machine.is_from("Ampere") and machine.cc != "8.0",
                "memory": {"draw": idle.memory_power},
                "module": {
                    "draw": idle.module_power,
                    "limit": kind.module.limit if kind.module else None,
                    "default_limit": kind.module.limit if kind.module else None,
                    "min_limit": kind.module.min if kind.module else None,
                    "max_limit": kind.module.max if kind.module else None,
                },
            },
            "pcie": {
                "gen": idle.pcie_gen or kind.pcie.gen,
                "width": width,
                "max_gen": kind.pcie.gen,
                "max_width": kind.pcie.width,
                "board_max_gen": kind.pcie.board_gen,
                "atomics_out": EVERY_ATOMIC if kind.pcie.atomics_out else None,
                "atomics_in": EVERY_ATOMIC if kind.pcie.atomics_in else None,
            },
            "mig": _mig(kind),
            "memory": {
                "total": place.memory_mib or kind.memory_mib,
                "used": 0,
                "reserved": kind.reserved_mib,
            },
            "bar1": kind.bar1_mib,
            "edpp_multiplier": kind.edpp,
            "nvlinks": _links(machine, index),
            "nvlink_mbps": kind.nvlink.mbps if kind.nvlink else None,
            "fabric": _fabric(machine),
        }
    )


def _board_identity(machine: GpuHardware, index: int) -> Data:
    """The identity of a board, and of the card, rack or tray that it is part of."""
    kind = machine.kind
    image, oem, ecc = (*kind.inforom, None, None, None)[:3]
    gsp = machine.is_from("Turing")  # every capture in gpu_boards.yaml's sources has it from Turing on
    serial = f"1{uuid.uuid5(UUIDS, f'{machine.seed}/{index}/serial').int % 10**12:012d}"
    platform = None
    if kind.rack:
        rack = kind.rack
        platform = {
            "slot": rack.slot,
            "tray": rack.tray,
            "host": rack.host,
            "peer_type": SWITCH_CONNECTED,
            "chassis": f"18200000{_stable_number(machine, 0, 'chassis', 16):05d}",
        }
    nodes = -(-machine.count // kind.grace) if kind.grace else 0
    return {
        "name": kind.name,
        "brand": kind.brand,
        "serial": None if kind.display and kind.part_number is None else serial,
        "pci_subsystem_id": int(kind.subsystem, 16) if kind.subsystem else None,
        "pci_class": 0x300 if kind.display else 0x302,
        "vbios": kind.vbios,
        "board_part_number": kind.part_number,
        "multi_gpu_board": kind.card > 1,
        "board_id": _board_id(machine, index) if kind.card > 1 else None,
        "pdi": hex(_stable_number(machine, index, "pdi", 64)),
        "inforom": image,
        "inforom_objects": {"oem": oem, "ecc": ecc, "power": None},
        "inforom_checksum": _stable_number(machine, index, "inforom", 32) if image else None,
        "gsp_firmware": machine.driver if gsp else None,
        "gsp_enabled": True if gsp else None,
        "gsp_default": True if gsp else None,
        "addressing_mode": kind.addressing,
        "c2c": kind.c2c,
        "platform": platform,
        "numa_node": nodes + NODES_OF_A_GPU * index if kind.grace else None,
        "display_mode": dict(DEPRECATED) if machine.branch >= NO_DISPLAY_MODE else True,
        "display_active": False,
    }


def _board_id(machine: GpuHardware, index: int) -> int:
    """The board id that the GPUs of one card share: the address of the first."""
    first = bus_id(machine.place.buses[index // machine.kind.card * machine.kind.card])
    domain, bus, device = (int(part, 16) for part in first.rpartition(".")[0].split(":"))
    return domain << 16 | bus << 8 | device


def _fractional_gpu(machine: GpuHardware, index: int) -> Data:
    """A virtual GPU of licence class Q; only the hypervisor has its clocks, temperature and power."""
    whole = _whole_gpu(machine, index)
    gib = round(24 * machine.fraction)  # of an L4, the only GPU that EC2 divides
    hidden = {
        key: dict.fromkeys(whole[key])
        for key in ("ecc", "remapped_rows", "clocks", "throttle", "power", "pcie", "fabric")
    }
    return _identity(machine, index) | {
        **hidden,
        "name": f"{machine.kind.name}-{gib}Q",
        "brand": WORKSTATION_BRAND,
        "serial": None,
        "pci_subsystem_id": None,
        "vbios": None,
        "board_part_number": None,
        "fan": None,
        "pstate": whole["pstate"],
        "retired_pages_pending": None,
        "temperature": {
            **dict.fromkeys(whole["temperature"]),
            "tlimit": dict.fromkeys(whole["temperature"]["tlimit"]),
        },
        "mig": {**dict.fromkeys(whole["mig"]), "profiles": [], "instances": []},
        "memory": {"total": gib << 10, "used": 0, "reserved": None},
        "nvlinks": None,
    }


def _mig(kind: Board) -> Data:
    """The section mig; null and empty values where the GPU has no MIG."""
    if kind.mig is None:
        mode = dict.fromkeys(("current", "pending"), False if kind.mig_unknown else None)
        return {**mode, "slices": None, "memory_slices": None, "profiles": [], "instances": []}
    division = divisions()[kind.mig]
    names = (
        "number",
        "id",
        "name",
        "slices",
        "memory_slices",
        "multiprocessors",
        "memory",
        "instances",
        "copy_engines",
        "decoders",
        "encoders",
        "jpegs",
        "ofas",
    )
    profiles = [
        {**dict(zip(names, row[:-1], strict=True)), "placements": list(row[-1]), "size": row[4]}
        for row in division.profiles
    ]
    return {
        "current": False,
        "pending": False,
        "slices": division.slices,
        "memory_slices": division.memory_slices,
        "profiles": profiles,
        "instances": [],
    }


def _links(machine: GpuHardware, index: int) -> list[Data] | None:
    """NVLinks to other GPUs of a mesh, to NVSwitches, or to peers without a PCI address.

    A board for an NVLink bridge has its links without a bridge too; they are inactive.
    """
    kind, place = machine.kind, machine.place
    if kind.nvlink is None or (machine.interconnect == "none" and not kind.nvlink.bridge):
        return None
    ends: list[str | None] = [None] * kind.nvlink.links
    if place.mesh and place.mesh[index]:
        ends = [bus_id(place.buses[n]) for n in place.mesh[index]]
    elif place.switches:
        ends = [bus_id(at) for at, links in place.switches.items() for _ in range(links)]
    up = not kind.nvlink.bridge or ends[0] is not None
    counted = {name: 0 if kind.nvlink.version < NVLINK_5 or name == "recovery" else None for name in COUNTERS}
    return [
        {
            "link": number,
            "state": up,
            "version": kind.nvlink.version,
            "remote_bus_id": end,
            "remote_type": TO_GPU if place.mesh else TO_SWITCH,
            "errors": dict(counted),
        }
        for number, end in enumerate(ends)
    ]


def _fabric(machine: GpuHardware) -> Data:
    """The section fabric; an A100 has none (qx-a100.xml of gpu_boards.yaml's source QX)."""
    if not machine.kind.fabric or machine.interconnect != "nvswitch":
        return dict.fromkeys(FABRIC)
    cluster, clique = ("0" * 32, 0)
    if machine.kind.rack:  # the machine is one of several in a rack
        cluster, clique = uuid.uuid5(UUIDS, f"{machine.seed}/cluster").hex, 1
    return dict(zip(FABRIC, (COMPLETED, 0, cluster, clique, machine.kind.fabric_health), strict=True))


def _numa_node(machine: GpuHardware, index: int) -> int:
    """The NUMA node of a GPU."""
    if machine.kind.grace:
        return index // machine.kind.grace
    return index // (machine.count // 2) if machine.count >= TWO_NODES else 0


def _path_between(machine: GpuHardware, index: int, other: int) -> Data:
    """The path from one GPU to another; on EC2's machines peer access works by NVLink only."""
    place = machine.place
    roots, card = place.roots or ("00",) * machine.count, machine.kind.card
    if card > 1 and index // card == other // card:
        ancestor = SWITCH
    elif roots[index] == roots[other]:
        ancestor = HOST_BRIDGE if place.flat else SWITCHES
    else:
        ancestor = NODE if _numa_node(machine, index) == _numa_node(machine, other) else SYSTEM
    linked = other in place.mesh[index] if place.mesh else machine.interconnect == "nvswitch"
    known = OK if linked or ancestor == SWITCH else CHIPSET
    p2p = {"read": known, "write": known, "nvlink": OK if linked else UNSUPPORTED, "atomics": known}
    return {"index": other, "ancestor": ancestor, "p2p": {**p2p, "pci": None}}
