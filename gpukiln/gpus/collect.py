"""Collects the snapshot of this machine: a failed call of NVML costs its field, a lost GPU its row."""

from __future__ import annotations

import datetime
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from gpukiln.compatibility import version_key
from gpukiln.findings import Finding
from gpukiln.gpus import health, processes
from gpukiln.gpus.facts import facts
from gpukiln.gpus.gpu_facts import FIELDS, P2P_STATUS, TOPOLOGY, clock_events, fabric_state, nvlinks_between
from gpukiln.gpus.model import Device, Driver, Peer, Snapshot, unreadable_finding
from gpukiln.probe.base import DRIVER_GPUS, accessible_gpus, amd_gpus, bus_gpus, in_container, read
from gpukiln.probe.child import SlowCall
from gpukiln.probe.gpus import pci_state
from gpukiln.probe.nvml import HUNG, SLOW, SLOW_S, address, ask_nvml
from gpukiln.probe.simulated import is_simulated
from gpukiln.units import is_whole

NVIDIA_VERSION = "/proc/driver/nvidia/version"
MODULE_VERSION = "/sys/module/nvidia/version"
PCI = "/sys/bus/pci/devices"
NUMA_NODES = "/sys/devices/system/node/online"
# nvmlReturn_t: names without NVML_ERROR_ (nvml.h).
NVML_CODES = {
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
# NVML may still give a handle and some values of such a GPU; none of them is reliable.
LOST_CODES = ("GPU_IS_LOST", "GPU_NOT_FOUND", "RESET_REQUIRED")
NO_LIBRARY, NO_DRIVER, MISMATCH, NO_PERMISSION = 12, 9, 18, 4
# Fields that NVML reads from the handle of a MIG device.
MIG_FIELDS = ("memory_total_mib", "memory_used_mib", "memory_reserved_mib", "memory_free_mib", "name")
# Fields that a MIG device takes from its GPU.
PARENT_FIELDS = (
    "architecture",
    "compute_capability",
    "numa_node",
    "cpus",
    "temperature_c",
    "temperature_margin_c",
)
# Fields that the collector computes of several values; `FIELDS` has those that are one value each.
DERIVED_FIELDS = ("cpus", "numa_node", "nvlinks_active", "nvlinks_total", "fabric_state", "profile", "bus_id")
PASSTHROUGH_DRIVERS = ("vfio-pci", "pci-stub", "xen-pciback")  # the GPU belongs to a virtual machine


def collect() -> Snapshot:
    """The GPUs of this machine now, without leases (`gpukiln.gpus.lease_overlay.snapshot` adds them)."""
    pci, contained = bus_gpus(), in_container()
    given = accessible_gpus() if contained else pci
    simulated = is_simulated()
    head: dict[str, Any] = {}
    gpus: list[dict[str, Any]] = []
    why = ""
    if given or simulated:
        answer = ask_nvml(shown=True, silent=_print_waiting)
        head, gpus, why = answer.head, answer.gpus, answer.why
        # Where NVML itself failed, every GPU of the bus is unlisted, and the state says so once.
        if gpus or not (why or head.get("error")):
            gpus = [*gpus, *_unlisted(given, gpus)]
    state, message, fix = _state(pci, given, contained, simulated, head, gpus, why)
    driver = _driver(head)
    devices: list[Device] = []
    listed: list[tuple[str | None, dict[str, Any]]] = []
    for gpu in sorted(gpus, key=lambda gpu: int(gpu["index"])):
        rows = _devices(gpu, gpus, {p["address"] for p in given})
        devices += rows
        listed += _processes_of(gpu, rows)
    healthy = tuple(health.with_health(device) for device in devices)
    whole = Snapshot(
        node=socket.gethostname(),
        taken_at=now(),
        source="nvml",
        # A machine of the embedded cloud may be a container; its simulated GPUs are not shared with a host.
        scope="container" if contained and not simulated else "host",
        simulated=simulated,
        state=state,
        message=message,
        fix=fix,
        driver=driver,
        devices=healthy,
        processes=processes.describe(listed, simulated=simulated) if head else (),
        errors=tuple(_problems(head, gpus, why)),
    )
    others = amd_gpus()
    if not others:
        return whole
    from gpukiln.gpus import amd  # noqa: PLC0415 - few machines have AMD GPUs

    return amd.add_amd_gpus(whole, others, pci, contained)


def now() -> str:
    """The current time, RFC 3339 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _print_waiting(seconds: float, at: str, state: str) -> None:
    """Print what NVML waits for to standard error, once every SLOW_S seconds."""
    if seconds >= SLOW_S and int(seconds) % SLOW_S == 0:
        print(f"waiting for the driver since {seconds:.0f} s: {at}; {state}", file=sys.stderr, flush=True)


def _state(
    pci: list[Any],
    given: list[Any],
    contained: bool,
    simulated: bool,
    head: dict[str, Any],
    gpus: list[Any],
    why: str,
) -> tuple[str, str, str]:
    """`Snapshot.state`, `message` and `fix`."""
    if not (given or simulated):
        return _state_without_gpu(pci, contained)
    there = f"{gpu_count(given)} on the PCI bus" if given else "simulated GPUs"
    error = head.get("error")
    if error:
        return _state_of_error(error, there, contained)
    if gpus:
        return "ok", "", ""
    # Without persistence mode eight A100 need more than 25 s to start (Azure/AgentBaker#2829): slow is not
    # hung.
    if isinstance(why, SlowCall):
        fix = (
            "try again in some minutes; without persistence mode the driver starts every GPU for each "
            "program: enable nvidia-persistenced"
        )
        return "starting", f"NVML is still starting: {why}", fix
    if why:
        fix = "`dmesg` shows what the driver waits for; follow the remedy of that fault, then try again"
        return "hung", f"NVML does not answer: {why}", fix
    return "failed", f"{there}, but NVML lists none", "`dmesg` says why the driver refuses them"


def gpu_count(gpus: list[Any]) -> str:
    """The number of GPUs in words.

    >>> gpu_count([{}]), gpu_count([{}, {}])
    ('1 NVIDIA GPU', '2 NVIDIA GPUs')
    """
    return f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) != 1)}"


def _state_without_gpu(pci: list[Any], contained: bool) -> tuple[str, str, str]:
    """State, message and fix of a machine or a container without a GPU."""
    if contained and (pci or read(MODULE_VERSION)):
        return (
            "not-granted",
            f"this container was granted none of its host's {gpu_count(pci) if pci else 'NVIDIA GPUs'}",
            "start it with GPUs: `docker run --gpus all`, or `--device nvidia.com/gpu=all`; "
            "on Kubernetes set the limit nvidia.com/gpu",
        )
    return (
        "no-device",
        "this container sees no NVIDIA GPU" if contained else "no NVIDIA GPU is on the PCI bus",
        "`lspci -d 10de:` lists NVIDIA's devices; a virtual machine needs a GPU by passthrough",
    )


def _unlisted(given: list[Any], gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row with an error for each GPU of the bus that NVML does not list.

    The driver leaves out a GPU that it could not start.
    """
    # A lost GPU may report no address: it could be any of those on the bus.
    if any(_has_no_address(gpu) for gpu in gpus):
        return []
    listed = {address(gpu["bus_id"]) for gpu in gpus if isinstance(gpu["bus_id"], str)}
    rows: list[dict[str, Any]] = []
    for place in sorted(gpu["address"] for gpu in given if gpu["address"].lower() not in listed):
        if re.search(r"(?m)^GPU Excluded:\s*Yes", read(f"{DRIVER_GPUS}/{place}/information") or ""):
            continue  # excluded by the module's parameter NVreg_ExcludedGpus
        driver = pci_state(place)
        if driver["driver"] in PASSTHROUGH_DRIVERS:
            continue
        why = "it does not answer on the bus" if driver["lost"] else f"driver {driver['driver'] or 'none'}"
        error = {
            "_error": f"NVML does not list the GPU at {place} ({why})",
            "code": None,
            "name": "NOT_LISTED",
        }
        rows.append({"index": len(gpus) + len(rows), "bus_id": place, "error": error})
    return rows


def _has_no_address(gpu: dict[str, Any]) -> bool:
    """Whether NVML does not report a GPU's PCI address."""
    return not isinstance(gpu.get("bus_id"), str)


def _state_of_error(error: dict[str, Any], there: str, contained: bool) -> tuple[str, str, str]:
    """State, message and fix of a machine on which NVML does not initialize."""
    module = _stripped(read(MODULE_VERSION))
    code = error.get("code")
    why = error.get("library", "")
    # dlopen found the library and could not load it: a broken file, or one of another architecture.
    if why and "No such file" not in why:
        fix = "reinstall the driver's libnvidia-ml1 in the version of the loaded module"
        return "no-library", f"{there}, but libnvidia-ml.so.1 can't be loaded: {why}", fix
    if code == NO_LIBRARY:
        fix = "install the driver: the role nvidia_driver, or the package with libnvidia-ml.so.1"
        if contained:
            fix = "start it with the driver's capability utility: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        state = "no-library" if contained or module else "no-driver"
        return state, f"{there}, but libnvidia-ml.so.1 is missing", fix
    states = {
        NO_DRIVER: (
            "no-driver",
            f"{there}, but the kernel module nvidia is not loaded",
            "run `modprobe nvidia`; if it fails, `dmesg` says why: no module for this kernel, Secure Boot, "
            "another driver",
        ),
        MISMATCH: (
            "mismatch",
            f"libnvidia-ml.so.1 has another version than the loaded kernel module {module or 'nvidia'}",
            "an upgrade has replaced the library while the module was loaded: reboot, or stop every program "
            "that uses the GPUs and reload the nvidia modules",
        ),
        NO_PERMISSION: (
            "no-permission",
            f"{there}, but this user has no permission to use them",
            "give this user access to /dev/nvidia*, for example through the group that owns them",
        ),
    }
    otherwise = ("failed", f"NVML does not start: {error['_error']}", "`dmesg` has the driver's messages")
    return states.get(code or 0, otherwise)


def _driver(head: dict[str, Any]) -> Driver:
    text = read(NVIDIA_VERSION) or ""
    module = _stripped(read(MODULE_VERSION))
    unavailable: dict[str, str] = {}
    silent = "the driver did not answer"
    version = _value(head.get("driver"), "version", unavailable, nothing=silent)
    cuda = _value(head.get("cuda_driver"), "cuda", unavailable, nothing=silent)
    if module is None:
        unavailable["module"] = "no module nvidia is loaded"
    flavour = None
    # "NVIDIA UNIX Open Kernel Module" and "NVIDIA UNIX x86_64 Kernel Module" are the two kinds.
    if match := re.search(r"NVRM version:.*?(Open )?Kernel Module", text):
        flavour = "open" if match[1] else "proprietary"
    else:
        unavailable["flavour"] = f"{NVIDIA_VERSION} does not say"
    known = version or module
    # The branch is the first part of the version: 535 of 535.309.01.
    number = version_key(known)[0] if known and version_key(known) else None
    branch = facts()["branches"].get(str(number)) if number else None
    if branch is None:
        for name in ("branch_type", "supported_until", "ended"):
            unavailable[name] = "no driver" if number is None else f"branch {number} is not in the catalogue"
    elif branch["eol"] is None:
        unavailable["supported_until"] = unavailable["ended"] = "NVIDIA has not published the date"
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
    """An error of the collector as the reason of a null: NVML's constant, or the error's text."""
    return str(error.get("name") or NVML_CODES.get(error.get("code") or 0) or error["_error"])


def _value(value: Any, name: str, unavailable: dict[str, str], nothing: str = "NOT_SUPPORTED") -> Any:
    """A value; or None, with the reason added to `unavailable`."""
    if isinstance(value, dict) and "_error" in value:
        unavailable[name] = reason(value)
        return None
    if value is None:
        unavailable[name] = nothing
    return value


def _value_at(data: dict[str, Any], path: str) -> Any:
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, dict) or "_error" in value:
            return value
        value = value.get(key)
    return value


def values_of(gpu: dict[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of a device from the collector's facts of a GPU, and the reason for each null."""
    unavailable: dict[str, str] = {}
    values = {name: _value(_value_at(gpu, FIELDS[name]), name, unavailable) for name in names}
    if "clock_events" in values:
        values["clock_events"] = clock_events(values["clock_events"])
    return values, unavailable


def lost_reason(unavailable: Mapping[str, str]) -> str | None:
    """The code by which a GPU counts as lost, from the reasons of its nulls; None where it is not lost."""
    return next((why for why in unavailable.values() if why in LOST_CODES), None)


def _devices(gpu: dict[str, Any], gpus: list[dict[str, Any]], given: set[str]) -> list[Device]:
    """The device of a GPU, then those of its MIG devices."""
    index = int(gpu["index"])
    if gpu["error"]:
        return [_unreadable(gpu, gpus, given)]
    values, unavailable = values_of(gpu, FIELDS)
    bus_id = _value(gpu["bus_id"], "bus_id", unavailable)
    place = address(bus_id) if bus_id else None
    cpus = _stripped(read(f"{PCI}/{place}/local_cpulist")) if place else None
    if cpus is None:
        unavailable["cpus"] = "the kernel does not report it"
    fabric = _value(gpu["fabric"]["state"], "fabric_state", unavailable)
    links = _value(gpu["nvlinks"], "nvlinks_total", unavailable)
    if links is None:
        unavailable["nvlinks_active"] = unavailable["nvlinks_total"]
    unavailable["profile"] = unavailable["mig_index"] = unavailable["parent"] = "it is not a MIG device"
    uuid = _value(gpu["uuid"], "uuid", unavailable) or _uuid_of(place)
    if uuid:
        unavailable.pop("uuid", None)
    parent = Device(
        uuid=uuid,
        kind="gpu",
        index=index,
        bus_id=place,
        cpus=cpus,
        numa_node=_numa_node(gpu, place, unavailable),
        fabric_state=fabric_state(gpu) if fabric is not None else None,
        nvlinks_total=len(links) if links is not None else None,
        nvlinks_active=sum(1 for link in links if link["state"] is True) if links is not None else None,
        peers=tuple(_peer(gpu, row, gpus) for row in gpu["peers"]),
        unavailable=unavailable,
        **values,
    )
    gone = [name for name, why in unavailable.items() if why in LOST_CODES]
    if why := lost_reason(unavailable):
        error = {"_error": f"{why}: {', '.join(gone[:3])} can't be read", "code": None, "name": why}
        return [_unreadable({**gpu, "bus_id": place, "error": error}, gpus, given)]
    parts = _value_at(gpu, "more.mig_devices")
    if not isinstance(parts, list):
        return [parent]
    return [parent, *(_mig_device(part, parent) for part in parts if not part["error"])]


def _numa_node(gpu: dict[str, Any], place: str | None, unavailable: dict[str, str]) -> int | None:
    """The nearest NUMA node: of the PCI device, else the only one of NVML's memory affinity."""
    # Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory on Grace, unsupported elsewhere.
    # The kernel reports -1 where the firmware reports nothing (Linux, Documentation/ABI, sysfs-bus-pci).
    text = _stripped(read(f"{PCI}/{place}/numa_node")) if place else None
    if text and is_whole(text):
        return int(text)
    # A machine with a single node needs no answer from firmware or driver.
    if _stripped(read(NUMA_NODES)) == "0":
        return 0
    nodes = _value(_value_at(gpu, "more.memory_nodes"), "numa_node", unavailable)
    if nodes is None:
        return None
    if len(nodes) != 1:
        unavailable["numa_node"] = f"the kernel says {text or 'nothing'}, and NVML {len(nodes)} nodes"
        return None
    return int(nodes[0])


def _uuid_of(place: str | None) -> str | None:
    """The UUID of a GPU from the driver's folder in /proc, which also has GPUs that NVML calls lost."""
    text = read(f"{DRIVER_GPUS}/{place}/information") or "" if place else ""
    match = re.search(r"(?m)^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", text)
    return match[1] if match else None


def _unreadable(gpu: dict[str, Any], gpus: list[dict[str, Any]], given: set[str]) -> Device:
    """A GPU that is lost or hangs, with its address and UUID where the kernel still has them."""
    error = gpu["error"]
    name = reason(error)
    known = {address(gpu["bus_id"]) for gpu in gpus if not _has_no_address(gpu)}
    left = [gpu["bus_id"]] if not _has_no_address(gpu) else sorted(given - known)
    # A row without an address has the one address of the bus that no other row has, if there is only one.
    alone = not _has_no_address(gpu) or (sum(map(_has_no_address, gpus)) == 1 and len(left) == 1)
    uuid = _uuid_of(left[0]) if alone else None
    names = [*FIELDS, *DERIVED_FIELDS, "uuid", "mig_index", "parent"]
    unavailable = dict.fromkeys(names, name)
    if alone:
        del unavailable["bus_id"]
    if uuid:
        del unavailable["uuid"]
    return Device(
        uuid=uuid,
        kind="gpu",
        index=int(gpu["index"]),
        bus_id=left[0] if alone else None,
        error=f"{name}: {error['_error']}" if name not in error["_error"] else error["_error"],
        unavailable=unavailable,
    )


def _mig_device(part: dict[str, Any], parent: Device) -> Device:
    nothing = "it is a MIG device: see its GPU"
    values, unavailable = values_of(part, MIG_FIELDS)
    values["profile"] = _value(part["profile"], "profile", unavailable)
    for name in PARENT_FIELDS:
        values[name] = getattr(parent, name)
        if name in parent.unavailable:
            unavailable[name] = parent.unavailable[name]
    for name in (*FIELDS, *DERIVED_FIELDS):
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
    other = next((gpu for gpu in gpus if gpu["index"] == row["index"] and not gpu["error"]), None)
    uuid = other.get("uuid") if other else None
    ancestor, p2p = row["ancestor"], row["p2p"]["read"]
    return Peer(
        uuid=uuid if isinstance(uuid, str) else None,
        index=int(row["index"]),
        nvlinks=nvlinks_between(gpu, other, gpus) if other else 0,
        ancestor=TOPOLOGY.get(ancestor, str(ancestor)) if isinstance(ancestor, int) else None,
        p2p=P2P_STATUS.get(p2p, str(p2p)) if isinstance(p2p, int) else None,
    )


def _processes_of(gpu: dict[str, Any], rows: list[Device]) -> list[tuple[str | None, dict[str, Any]]]:
    """The processes that the driver lists, with the UUID of their GPU or MIG device."""
    if gpu["error"]:
        return []
    parts = _value_at(gpu, "more.mig_devices")
    # With MIG on, NVML lists processes on the handles of the MIG devices.
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


def _problems(head: dict[str, Any], gpus: list[dict[str, Any]], why: str) -> list[Finding]:
    findings = []
    if why:
        slow = isinstance(why, SlowCall)
        findings.append(
            unreadable_finding(SLOW if slow else HUNG, why, severity="warning" if slow else "error")
        )
    if head.get("error"):
        error = head["error"]
        findings.append(unreadable_finding(reason(error), error["_error"], code=error.get("code")))
    for gpu in gpus:
        if gpu["error"]:
            error = gpu["error"]
            title = f"GPU {gpu['index']}"
            findings.append(unreadable_finding(reason(error), error["_error"], title, code=error.get("code")))
    return findings
