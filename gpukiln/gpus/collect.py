"""Makes the snapshot of this machine. One GPU that hangs costs its own row, and some seconds."""

from __future__ import annotations

import datetime
import re
import socket
from typing import Any

from gpukiln.gpus import health, processes
from gpukiln.gpus.facts import facts, version_key
from gpukiln.gpus.gpu_facts import P2P_STATUS, TOPOLOGY
from gpukiln.gpus.model import Device, Driver, Peer, Problem, Snapshot
from gpukiln.probe.base import amd_gpus, bus_gpus, given_gpus, in_container, read
from gpukiln.probe.child import Hang, Tell, in_child
from gpukiln.probe.nvml import address, read_gpus
from gpukiln.probe.simulated import is_simulated

LIMIT_S = 10.0  # for one GPU: one whose firmware hangs takes tens of seconds for a call
NVIDIA_VERSION = "/proc/driver/nvidia/version"
MODULE_VERSION = "/sys/module/nvidia/version"
PCI = "/sys/bus/pci/devices"
# nvmlReturn_t, without NVML_ERROR_ (nvml.h)
CODES = {
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    3: "NOT_SUPPORTED",
    4: "NO_PERMISSION",
    6: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    9: "DRIVER_NOT_LOADED",
    10: "TIMEOUT",
    11: "IRQ_ISSUE",
    12: "LIBRARY_NOT_FOUND",
    13: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    15: "GPU_IS_LOST",
    16: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    18: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    21: "NO_DATA",
    23: "INSUFFICIENT_RESOURCES",
    25: "ARGUMENT_VERSION_MISMATCH",
    27: "NOT_READY",
    28: "GPU_NOT_FOUND",
    999: "UNKNOWN",
}
NO_LIBRARY, NO_DRIVER, MISMATCH, NO_PERMISSION = 12, 9, 18, 4
FABRIC = {0: "none", 1: "not started", 2: "in progress", 3: "completed"}
# A device's field and where the collector has it.
FIELDS = {
    "pci_id": "more.pci_id",
    "minor": "more.minor",
    "name": "name",
    "architecture": "more.architecture",
    "compute_capability": "more.compute_capability",
    "serial": "serial",
    "vbios": "more.vbios",
    "board_part_number": "more.board_part_number",
    "gsp_firmware": "more.gsp_firmware",
    "numa_node": "more.numa_node",
    "memory_total_mib": "more.memory.total",
    "memory_used_mib": "more.memory.used",
    "memory_reserved_mib": "more.memory.reserved",
    "memory_free_mib": "more.memory.free",
    "bar1_total_mib": "more.bar1.total",
    "bar1_used_mib": "more.bar1.used",
    "utilization_percent": "more.utilization.gpu",
    "memory_utilization_percent": "more.utilization.memory",
    "encoder_percent": "more.utilization.encoder",
    "decoder_percent": "more.utilization.decoder",
    "temperature_c": "temperature.gpu",
    "temperature_slowdown_c": "temperature.slowdown",
    "temperature_margin_c": "temperature.margin",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "energy_joules": "more.energy",
    "clock_sm_mhz": "clocks.sm",
    "clock_sm_max_mhz": "clocks.max_sm",
    "clock_memory_mhz": "clocks.mem",
    "clock_memory_max_mhz": "clocks.max_mem",
    "clock_events": "throttle.names",
    "pcie_generation": "pcie.gen",
    "pcie_generation_max": "pcie.max_gen",
    "pcie_width": "pcie.width",
    "pcie_width_max": "pcie.max_width",
    "persistence": "persistence",
    "compute_mode": "more.compute_mode",
    "ecc_enabled": "ecc.current",
    "ecc_pending": "ecc.pending",
    "ecc_uncorrected": "ecc.volatile_uncorrected",
    "ecc_corrected": "ecc.volatile_corrected",
    "ecc_uncorrected_lifetime": "ecc.aggregate_uncorrected",
    "ecc_corrected_lifetime": "ecc.aggregate_corrected",
    "remapped_rows_correctable": "remapped_rows.correctable",
    "remapped_rows_uncorrectable": "remapped_rows.uncorrectable",
    "remap_pending": "remapped_rows.pending",
    "remap_failed": "remapped_rows.failed",
    "pages_pending": "retired_pages_pending",
    "recovery_action": "more.recovery_action",
    "mig_enabled": "mig.current",
    "mig_pending": "mig.pending",
    "fabric_state": "fabric.state",
}
OF_MIG = {  # what a MIG device has of its own
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "memory_reserved_mib": "memory.reserved",
    "memory_free_mib": "memory.free",
    "name": "name",
    "profile": "profile",
}
# What a MIG device has from its GPU.
OF_PARENT = (
    "architecture",
    "compute_capability",
    "numa_node",
    "cpus",
    "temperature_c",
    "temperature_margin_c",
)
DERIVED = ("cpus", "nvlinks_active", "nvlinks_total", "profile", "bus_id")


def collect() -> Snapshot:
    """The GPUs of this machine now; `gpukiln.gpus.marks.snapshot` has the leases too."""
    pci, contained = bus_gpus(), in_container()
    given = given_gpus() if contained else pci
    simulated = is_simulated()
    head: dict[str, Any] = {}
    gpus: list[dict[str, Any]] = []
    why = ""
    if given or simulated:
        head, gpus, why = _ask()
    state, message, fix = _state(pci, given, contained, simulated, head, gpus, why)
    driver = _driver(head)
    devices: list[Device] = []
    found: list[tuple[str | None, dict[str, Any]]] = []
    for gpu in sorted(gpus, key=lambda one: int(one["index"])):
        rows = _devices(gpu, gpus, {p["address"] for p in given})
        devices += rows
        found += _processes_of(gpu, rows)
    healthy = tuple(health.judged(one) for one in devices)
    whole = Snapshot(
        node=socket.gethostname(),
        taken_at=now(),
        source="nvml",
        # A machine of the embedded cloud that is a container has its simulated GPUs for itself.
        scope="container" if contained and not simulated else "host",
        simulated=simulated,
        state=state,
        message=message,
        fix=fix,
        driver=driver,
        devices=healthy,
        processes=processes.described(found) if head else (),
        errors=tuple(_problems(head, gpus, why)),
    )
    others = amd_gpus()
    if not others:
        return whole
    from gpukiln.gpus import amd  # noqa: PLC0415 - few machines have one

    return amd.joined(whole, others, pci, contained)


def now() -> str:
    """The time, RFC 3339 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _ask() -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """What NVML says in general and of each GPU, and why it says nothing in general."""
    head: dict[str, Any] = {}
    found: dict[int, dict[str, Any]] = {}
    at: int | None = None

    def hear(message: dict[str, Any]) -> None:
        nonlocal at
        head.update(message.get("head", {}))
        at = message.get("index", at)
        if "gpu" in message:
            found[message["index"]] = message["gpu"]

    def work(tell: Tell) -> None:
        read_gpus(tell, tuple(found), LIMIT_S)

    while True:
        at = None
        ended = in_child(work, hear)
        if not ended:
            return head, list(found.values()), ""
        if at is None or at in found:
            return head, list(found.values()), ended
        # This one hangs, or kills who asks it: the others are asked again without it.
        name = "HUNG" if isinstance(ended, Hang) else "FAILED"
        found[at] = {"index": at, "error": {"_error": str(ended), "code": None, "name": name}}


def _state(
    pci: list[Any],
    given: list[Any],
    contained: bool,
    simulated: bool,
    head: dict[str, Any],
    gpus: list[Any],
    why: str,
) -> tuple[str, str, str]:
    """Snapshot.state, message and fix."""
    if not (given or simulated):
        return _nothing(pci, contained)
    there = f"{counted(given)} on the PCI bus" if given else "simulated GPUs"
    error = head.get("error")
    if error:
        return _no_answer(error, there, contained)
    if gpus:
        return "ok", "", ""
    if why:
        return "hung", f"NVML gives no answer: {why}", "read the kernel's log (dmesg), and reboot the machine"
    return "failed", f"{there}, and NVML lists none", "dmesg says why the driver refuses them"


def counted(gpus: list[Any]) -> str:
    """Such as `2 NVIDIA GPUs`."""
    return f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) != 1)}"


def _nothing(pci: list[Any], contained: bool) -> tuple[str, str, str]:
    """The state of a machine, or a container, that has no GPU."""
    if contained and (pci or read(MODULE_VERSION)):
        return (
            "not-granted",
            f"this container was granted none of its host's {counted(pci) if pci else 'NVIDIA GPUs'}",
            "start it with GPUs: docker run --gpus all, or --device nvidia.com/gpu=all; "
            "on Kubernetes a limit nvidia.com/gpu",
        )
    return (
        "no-device",
        "this container sees no NVIDIA GPU" if contained else "no NVIDIA GPU is on the PCI bus",
        "`lspci -d 10de:` lists what NVIDIA made; a virtual machine needs one passed through",
    )


def _no_answer(error: dict[str, Any], there: str, contained: bool) -> tuple[str, str, str]:
    """The state of a machine whose driver does not answer."""
    module = _stripped(read(MODULE_VERSION))
    code = error.get("code")
    if code == NO_LIBRARY:
        fix = "install the driver: the role nvidia_driver, or the package with libnvidia-ml.so.1"
        if contained:
            fix = "give it the driver's capability utility: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        state = "no-library" if contained or module else "no-driver"
        return state, f"{there}, and no libnvidia-ml.so.1", fix
    told = {
        NO_DRIVER: (
            "no-driver",
            f"{there}, and the kernel module nvidia is not loaded",
            "`modprobe nvidia`; if it fails, dmesg says why: no module for this kernel, Secure Boot, "
            "another driver",
        ),
        MISMATCH: (
            "mismatch",
            f"libnvidia-ml.so.1 does not fit the loaded kernel module {module or 'nvidia'}",
            "an upgrade ran under the loaded module: reboot, or stop what uses the GPUs and reload the "
            "nvidia modules",
        ),
        NO_PERMISSION: (
            "no-permission",
            f"{there}, and this user may not use them",
            "let this user open /dev/nvidia*, for example by the group that owns them",
        ),
    }
    otherwise = ("failed", f"NVML does not start: {error['_error']}", "dmesg has what the driver says")
    return told.get(code or 0, otherwise)


def _driver(head: dict[str, Any]) -> Driver:
    said = read(NVIDIA_VERSION) or ""
    module = _stripped(read(MODULE_VERSION))
    unavailable: dict[str, str] = {}
    silent = "the driver did not answer"
    version = _value(head.get("driver"), "version", unavailable, nothing=silent)
    cuda = _value(head.get("cuda_driver"), "cuda", unavailable, nothing=silent)
    if module is None:
        unavailable["module"] = "no module nvidia is loaded"
    flavour = None
    if found := re.search(r"NVRM version:.*?(Open )?Kernel Module", said):
        flavour = "open" if found[1] else "proprietary"
    else:
        unavailable["flavour"] = f"{NVIDIA_VERSION} does not tell"
    known = version or module
    number = version_key(known)[0] if known and version_key(known) else None
    branch = facts()["branches"].get(str(number)) if number else None
    if branch is None:
        for name in ("branch_type", "supported_until", "ended"):
            unavailable[name] = "no driver" if number is None else f"branch {number} is not in the catalogue"
    elif branch["eol"] is None:
        unavailable["supported_until"] = unavailable["ended"] = "NVIDIA has not told the day"
    if number is None:
        unavailable["branch"] = "no driver"
    eol = branch and branch["eol"]
    return Driver(
        version=version,
        module=module,
        flavour=flavour,
        branch=number,
        branch_type=branch["type"] if branch else None,
        supported_until=eol,
        ended=eol < datetime.date.today().isoformat() if eol else None,
        cuda=cuda,
        unavailable=unavailable,
    )


def _stripped(text: str | None) -> str | None:
    return text.strip() if text else None


def reason(error: dict[str, Any]) -> str:
    """An error of the collector as the reason of a null."""
    return str(error.get("name") or CODES.get(error.get("code") or 0) or error["_error"])


def _value(value: Any, name: str, unavailable: dict[str, str], nothing: str = "NOT_SUPPORTED") -> Any:
    """A value, or None with its reason."""
    if isinstance(value, dict) and "_error" in value:
        unavailable[name] = reason(value)
        return None
    if value is None:
        unavailable[name] = nothing
    return value


def _dig(data: dict[str, Any], path: str) -> Any:
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, dict) or "_error" in value:
            return value
        value = value.get(key)
    return value


def _devices(gpu: dict[str, Any], gpus: list[dict[str, Any]], given: set[str]) -> list[Device]:
    """A GPU and its MIG devices."""
    index = int(gpu["index"])
    if gpu["error"]:
        return [_unreadable(gpu, gpus, given)]
    unavailable: dict[str, str] = {}
    values = {name: _value(_dig(gpu, path), name, unavailable) for name, path in FIELDS.items()}
    bus_id = _value(gpu["bus_id"], "bus_id", unavailable)
    place = address(bus_id) if bus_id else None
    values["fabric_state"] = FABRIC.get(values["fabric_state"], values["fabric_state"])
    if values["clock_events"] is not None:
        values["clock_events"] = tuple(values["clock_events"])
    cpus = _stripped(read(f"{PCI}/{place}/local_cpulist")) if place else None
    if cpus is None:
        unavailable["cpus"] = "the kernel does not tell"
    links = _value(gpu["nvlinks"], "nvlinks_total", unavailable)
    if links is None:
        unavailable["nvlinks_active"] = unavailable["nvlinks_total"]
    unavailable["profile"] = unavailable["mig_index"] = unavailable["parent"] = "it is no MIG device"
    parent = Device(
        uuid=_value(gpu["uuid"], "uuid", unavailable),
        kind="gpu",
        index=index,
        bus_id=place,
        cpus=cpus,
        nvlinks_total=len(links) if links is not None else None,
        nvlinks_active=sum(1 for link in links if link["state"] is True) if links is not None else None,
        peers=tuple(_peer(gpu, row, gpus) for row in gpu["peers"]),
        unavailable=unavailable,
        **values,
    )
    parts = _dig(gpu, "more.mig_devices")
    if not isinstance(parts, list):
        return [parent]
    return [parent, *(_mig_device(part, parent) for part in parts if not part["error"])]


def _unreadable(gpu: dict[str, Any], gpus: list[dict[str, Any]], given: set[str]) -> Device:
    """A GPU that is lost or hangs: a row like every other, with what the kernel still knows."""
    error = gpu["error"]
    told = reason(error)
    known = {
        address(one["bus_id"]) for one in gpus if not one["error"] and isinstance(one.get("bus_id"), str)
    }
    left = sorted(given - known)
    alone = sum(1 for one in gpus if one["error"]) == 1 and len(left) == 1
    said = read(f"/proc/driver/nvidia/gpus/{left[0]}/information") or "" if alone else ""
    uuid = re.search(r"(?m)^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", said)
    names = [*FIELDS, *DERIVED, "uuid", "mig_index", "parent"]
    unavailable = dict.fromkeys(names, told)
    if alone:
        del unavailable["bus_id"]
    if uuid:
        del unavailable["uuid"]
    return Device(
        uuid=uuid[1] if uuid else None,
        kind="gpu",
        index=int(gpu["index"]),
        bus_id=left[0] if alone else None,
        error=f"{told}: {error['_error']}" if told not in error["_error"] else error["_error"],
        unavailable=unavailable,
    )


def _mig_device(part: dict[str, Any], parent: Device) -> Device:
    nothing = "it is a MIG device: its GPU tells"
    unavailable: dict[str, str] = {}
    values = {name: _value(_dig(part, path), name, unavailable) for name, path in OF_MIG.items()}
    for name in OF_PARENT:
        values[name] = getattr(parent, name)
        if name in parent.unavailable:
            unavailable[name] = parent.unavailable[name]
    for name in (*FIELDS, *DERIVED):
        if name not in values and name != "bus_id":
            unavailable[name] = nothing
    return Device(
        uuid=_value(part["uuid"], "uuid", unavailable),
        kind="mig",
        index=parent.index,
        mig_index=int(part["index"]),
        parent=parent.uuid,
        bus_id=parent.bus_id,
        unavailable=unavailable,
        **values,
    )


def _peer(gpu: dict[str, Any], row: dict[str, Any], gpus: list[dict[str, Any]]) -> Peer:
    other = next((one for one in gpus if one["index"] == row["index"] and not one["error"]), None)
    uuid = other.get("uuid") if other else None
    ancestor, p2p = row["ancestor"], row["p2p"]["read"]
    return Peer(
        uuid=uuid if isinstance(uuid, str) else None,
        index=int(row["index"]),
        nvlinks=_nvlinks(gpu, other, gpus) if other else 0,
        ancestor=TOPOLOGY.get(ancestor, str(ancestor)) if isinstance(ancestor, int) else None,
        p2p=P2P_STATUS.get(p2p, str(p2p)) if isinstance(p2p, int) else None,
    )


def _nvlinks(one: dict[str, Any], other: dict[str, Any], gpus: list[dict[str, Any]]) -> int:
    """Active NVLinks from one GPU towards another: directly, or to switches or a fabric that both are on."""

    def ends(gpu: dict[str, Any]) -> list[str]:
        links = gpu["nvlinks"] if isinstance(gpu["nvlinks"], list) else []
        return [
            str(link["remote_bus_id"]).lower()
            for link in links
            if link["state"] is True and isinstance(link["remote_bus_id"], str)
        ]

    def fabric(gpu: dict[str, Any]) -> tuple[Any, Any] | None:
        told = gpu["fabric"]
        return (told["cluster"], told["clique"]) if told["state"] == 3 else None

    own = {str(gpu["bus_id"]).lower() for gpu in gpus if not gpu["error"]}
    direct = ends(one).count(str(other["bus_id"]).lower())
    if direct:
        return direct
    shared = set(ends(other)) - own
    through = sum(1 for end in ends(one) if end in shared)
    if through:
        return through
    if fabric(one) is not None and fabric(one) == fabric(other):
        links = one["nvlinks"] if isinstance(one["nvlinks"], list) else []
        return sum(1 for link in links if link["state"] is True)
    return 0


def _processes_of(gpu: dict[str, Any], rows: list[Device]) -> list[tuple[str | None, dict[str, Any]]]:
    """What the driver lists, with the device each is on: that of MIG, where it is on."""
    if gpu["error"]:
        return []
    parts = _dig(gpu, "more.mig_devices")
    if isinstance(parts, list) and parts:
        sources = [(part.get("uuid"), part.get("processes")) for part in parts if not part["error"]]
    else:
        sources = [(rows[0].uuid, gpu["processes"])]
    return [
        (uuid if isinstance(uuid, str) else None, process)
        for uuid, listed in sources
        if isinstance(listed, list)
        for process in listed
    ]


def _problems(head: dict[str, Any], gpus: list[dict[str, Any]], why: str) -> list[Problem]:
    found = []
    if why:
        found.append(Problem(None, None, None, "HUNG", why))
    if head.get("error"):
        error = head["error"]
        found.append(Problem(None, None, error.get("code"), reason(error), error["_error"]))
    for gpu in gpus:
        if gpu["error"]:
            error = gpu["error"]
            found.append(Problem(None, int(gpu["index"]), error.get("code"), reason(error), error["_error"]))
    return found
