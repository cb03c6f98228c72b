"""The GPUs of an instance type, idle and healthy, as the document that the double of NVML answers from."""

import uuid
from typing import Any

from gpukiln.catalog.boards import Board, Layout, board, divisions, layout
from gpukiln.catalog.compat import check_driver_knows
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import InstanceType, instance_type
from gpukiln.errors import IncompatibleError, UsageError

Data = dict[str, Any]
UUIDS = uuid.UUID("6f2f5c0e-5a4e-4a0e-9d63-0d8b1c0f7a11")
WORKSTATION_BRAND = 10  # NVML_BRAND_NVIDIA_VWS, as EC2's fractions say
ARCHITECTURES = {"Volta": 5, "Turing": 6, "Ampere": 7, "Ada": 8, "Hopper": 9, "Blackwell": 10}  # NVML's
IDLE = 1  # of the reasons why clocks are low
COMPLETED = 3  # of a fabric's states
TO_GPU, TO_SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t
SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 20, 30, 40, 50  # nvmlGpuTopologyLevel_t
OK, CHIPSET, UNSUPPORTED = 0, 1, 5  # nvmlGpuP2PStatus_t
COUNTERS = ("replay", "recovery", "crc_flit", "crc_data")
FABRIC = ("state", "status", "cluster", "clique", "health")
NVLINK_5 = 7  # NVML's number of it; only its recoveries are counted for each link
TWO_NODES = 8  # from so many GPUs on, half are at each of two NUMA nodes


def make_profile(name: str, *, seed: str, driver: str, cuda: str) -> Data:
    """The state of a simulated machine that has just booted.

    A superset of the facts' section `nvml` (gpukiln/probe/nvml.py), in its units; null is what such a GPU
    does not tell, or what nobody shows of it.

    Args:
        name: The instance type.
        seed: What UUIDs and serial numbers come from, such as the instance's id.
        driver: The driver's version.
        cuda: The CUDA version that it brings, for example 12.2.

    Raises:
        UsageError: The type is unknown, retired, or has no GPU of NVIDIA.
        IncompatibleError: The driver does not know its GPU.
    """
    machine = instance_type(name)
    model = gpu(machine.gpu)
    others = ", ".join(machine.alternatives) or "g4dn.xlarge"
    if model.manufacturer != "NVIDIA":
        message = f"{name} has no GPU of NVIDIA, but {model.manufacturer}'s {model.name}: nothing to simulate"
        raise UsageError(message, hint=f"take {others}")
    if machine.status == "retired":
        raise UsageError(f"EC2 has retired {name}: nothing to simulate", hint=f"take {others}")
    what = f"the {model.name} of {name}"
    if findings := check_driver_knows(driver, machine.gpu, what=what, way_out="another instance type"):
        raise IncompatibleError(findings[0].message, hint=findings[0].hint)
    kind, place = board(machine.gpu), layout(name)
    virtual = machine.gpu_fraction < 1
    make = _fraction if virtual else _whole
    rows = [make(machine, kind, place, index, seed) for index in range(machine.gpus)]
    for row in rows:
        row["peers"] = [_way(machine, place, row["index"], n) for n in range(len(rows)) if n != row["index"]]
    off = None if virtual or ARCHITECTURES[str(model.arch)] < ARCHITECTURES["Ampere"] else False
    return {
        "available": True,
        "error": None,
        "driver": driver,
        "nvml": f"{cuda.partition('.')[0]}.{driver}",
        "cuda_driver": cuda,
        "confidential": {"on": off, "ready": off},
        "gpus": rows,
    }


def bus_id(address: str) -> str:
    """[domain:]bus:device of the catalogue as NVML writes it: 00:1e is 00000000:00:1E.0."""
    *domain, bus, device = address.split(":")
    return f"{int(domain[0], 16) if domain else 0:08X}:{bus.upper()}:{device.upper()}.0"


def _named(row: Data, machine: InstanceType, kind: Board, place: Layout, seed: str) -> Data:
    """What every GPU tells, a fraction too."""
    index, model = row["index"], gpu(machine.gpu)
    return row | {
        "minor": index,
        "error": None,
        "bus_id": bus_id(place.buses[index]),
        "uuid": f"GPU-{uuid.uuid5(UUIDS, f'{seed}/{index}')}",
        "persistence": True,
        "architecture": ARCHITECTURES[str(model.arch)],
        "compute_capability": model.cc,
        "cores": kind.cores,
        "pci_device_id": int(kind.device, 16),
        "memory_bus_width": kind.bus_width,
        "utilization": {"gpu": 0, "memory": 0, "encoder": 0, "decoder": 0},
        "compute_mode": 0,
        "processes": [],
        "peers": [],
    }


def _whole(machine: InstanceType, kind: Board, place: Layout, index: int, seed: str) -> Data:
    """One GPU of a board."""
    power, clocks, idle, heat = kind.power, kind.clocks, kind.idle, kind.temperature
    ecc = kind.ecc if place.ecc is None else place.ecc
    rows = 0 if kind.repair == "rows" else None
    width = kind.pcie.width if machine.hypervisor == "none" else kind.pcie.virtual_width or kind.pcie.width
    errors = dict.fromkeys(
        ("volatile_uncorrected", "volatile_corrected", "aggregate_uncorrected", "aggregate_corrected"),
        0 if ecc else None,
    )
    return _named({"index": index}, machine, kind, place, seed) | {
        "name": kind.name,
        "brand": kind.brand,
        "serial": f"1{uuid.uuid5(UUIDS, f'{seed}/{index}/serial').int % 10**12:012d}",
        "pci_subsystem_id": int(kind.subsystem, 16) if kind.subsystem else None,
        "vbios": kind.vbios,
        "board_part_number": kind.part_number,
        "fan": idle.fan,
        "pstate": idle.pstate,
        "numa_node": _node(machine, index),
        "ecc": {"current": ecc, "pending": ecc, **errors},
        "remapped_rows": {
            "correctable": rows,
            "uncorrectable": rows,
            "pending": None if rows is None else False,
            "failed": None if rows is None else False,
        },
        "retired_pages_pending": False if kind.repair == "pages" else None,
        "clocks": {
            "graphics": idle.sm,
            "sm": idle.sm,
            "mem": idle.mem,
            "video": idle.video,
            "max_graphics": clocks.sm,
            "max_sm": clocks.sm,
            "max_mem": clocks.mem,
            "max_video": clocks.video,
        },
        "throttle": {"mask": IDLE, "names": ["idle"]},
        "temperature": {
            "gpu": idle.temperature,
            "slowdown": heat.slowdown,
            "shutdown": heat.shutdown,
            "margin": idle.margin,
            "tlimit": {
                "shutdown": heat.tlimit.shutdown,
                "slowdown": heat.tlimit.slowdown,
                "memory": heat.tlimit.memory,
                "gpu": heat.tlimit.gpu,
            },
        },
        "power": {
            "draw": idle.power,
            "limit": power.limit,
            "default_limit": power.limit,
            "min_limit": power.min,
            "max_limit": power.max,
            "idle": idle.power,
        },
        "pcie": {
            "gen": kind.pcie.gen,
            "width": width,
            "max_gen": kind.pcie.gen,
            "max_width": kind.pcie.width,
        },
        "mig": _mig(kind),
        "memory": {
            "total": place.memory_mib or kind.memory_mib,
            "used": 0,
            "reserved": kind.reserved_mib,
        },
        "nvlinks": _links(machine, kind, place, index),
        "fabric": _fabric(machine, kind),
    }


def _fraction(machine: InstanceType, kind: Board, place: Layout, index: int, seed: str) -> Data:
    """A virtual GPU of the licence class Q: its clocks, heat and power are the hypervisor's."""
    whole = _whole(machine, kind, place, index, seed)
    gib = round(24 * machine.gpu_fraction)  # of an L4, the only one that EC2 divides
    untold = {
        key: dict.fromkeys(whole[key])
        for key in ("ecc", "remapped_rows", "clocks", "throttle", "power", "pcie", "fabric")
    }
    return _named({"index": index}, machine, kind, place, seed) | {
        **untold,
        "name": f"{kind.name}-{gib}Q",
        "brand": WORKSTATION_BRAND,
        "serial": None,
        "pci_subsystem_id": None,
        "vbios": None,
        "board_part_number": None,
        "fan": None,
        "pstate": whole["pstate"],
        "numa_node": whole["numa_node"],
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
    """{current, pending, slices, memory_slices, profiles, instances}; all null and empty where it can't."""
    if kind.mig is None:
        empty = dict.fromkeys(("current", "pending", "slices", "memory_slices"))
        return {**empty, "profiles": [], "instances": []}
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


def _links(machine: InstanceType, kind: Board, place: Layout, index: int) -> list[Data] | None:
    """NVLinks to the other GPUs of a mesh, to NVSwitches, or to what no PCI bus shows."""
    if kind.nvlink is None or machine.interconnect == "none":
        return None
    if place.mesh:
        ends: list[str | None] = [bus_id(place.buses[n]) for n in place.mesh[index]]
    elif place.switches:
        ends = [bus_id(at) for at, links in place.switches.items() for _ in range(links)]
    else:
        ends = [None] * kind.nvlink.links
    counted = {name: 0 if kind.nvlink.version < NVLINK_5 or name == "recovery" else None for name in COUNTERS}
    return [
        {
            "link": number,
            "state": True,
            "version": kind.nvlink.version,
            "remote_bus_id": end,
            "remote_type": TO_GPU if place.mesh else TO_SWITCH,
            "errors": dict(counted),
        }
        for number, end in enumerate(ends)
    ]


def _fabric(machine: InstanceType, kind: Board) -> Data:
    """A100 has none to tell (qx-a100.xml of gpu_boards.yaml's source QX)."""
    if not kind.fabric or machine.interconnect != "nvswitch":
        return dict.fromkeys(FABRIC)
    return dict(zip(FABRIC, (COMPLETED, 0, "0" * 32, 0, kind.fabric_health), strict=True))


def _node(machine: InstanceType, index: int) -> int:
    return index // (machine.gpus // 2) if machine.gpus >= TWO_NODES else 0


def _way(machine: InstanceType, place: Layout, one: int, other: int) -> Data:
    """How one GPU reaches another: GPUs of EC2's machines do so by NVLink alone."""
    roots = place.roots or ("00",) * machine.gpus
    if roots[one] == roots[other]:
        ancestor = HOST_BRIDGE if place.flat else SWITCHES
    else:
        ancestor = NODE if _node(machine, one) == _node(machine, other) else SYSTEM
    linked = other in place.mesh[one] if place.mesh else machine.interconnect == "nvswitch"
    known = OK if linked else CHIPSET
    p2p = {"read": known, "write": known, "nvlink": OK if linked else UNSUPPORTED, "atomics": known}
    return {"index": other, "ancestor": ancestor, "p2p": {**p2p, "pci": None}}
