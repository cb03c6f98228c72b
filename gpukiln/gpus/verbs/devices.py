"""The verbs that show GPUs: list, show, memory, processes, topology."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.text import gib, short_uuid, table, value_text
from gpukiln.gpus.topology import GpuGroup, best_group
from gpukiln.gpus.verb import Options, Verb
from gpukiln.options import Option
from gpukiln.units import Duration

# `print` of the caller: cli.py replaces control characters in everything that users have typed.
Print = Callable[[str], None]
GPU_OPTION = Option(
    "gpu", "only this GPU: its UUID or the beginning of it, its index or its PCI address", first=True
)


@dataclass(frozen=True)
class DevicesReport(Snapshot):
    """Some devices of a machine, as in a snapshot.

    Args:
        processes: The processes on these devices; null where the verb does not show them.
        best: The group of --best; null without that option.
    """

    best: GpuGroup | None = None
    exit_code: int = 0


def select_devices(snap: Snapshot, name: str) -> tuple[Device, ...]:
    """The device of a name, a GPU with its MIG devices; all devices for an empty name.

    Raises:
        UsageError: No device, or several, have that name.
    """
    if not name:
        return snap.devices
    named = snap.device(name)
    if named is None:
        there = [f"{device.index}: {device.title}" for device in snap.devices if device.kind == "gpu"]
        raise UsageError(
            f"--gpu {name!r} matches none of this machine's {len(there)} GPUs, or several of them",
            details=tuple(there),
            hint="pass its UUID or the beginning of it, its index or its PCI address",
        )
    return (named, *(part for part in snap.devices if part.parent and part.parent == named.uuid))


def _report(
    snap: Snapshot, devices: tuple[Device, ...], *, processes: bool = False, best: GpuGroup | None = None
) -> DevicesReport:
    uuids = {device.uuid for device in devices}
    listed = tuple(p for p in snap.processes or () if p.device in uuids) if processes else None
    fields = {**vars(snap), "devices": devices, "processes": listed}
    return DevicesReport(**fields, best=best, exit_code=snap.code)


def _list(options: Options) -> DevicesReport:
    snap = snapshot()
    devices = select_devices(snap, options.gpu)
    if options.free:
        devices = tuple(device for device in devices if device.allocatable)
    return _report(snap, devices)


def _show(options: Options) -> DevicesReport:
    snap = snapshot()
    return _report(snap, select_devices(snap, options.gpu), processes=True)


def _topology(options: Options) -> DevicesReport:
    snap = snapshot()
    if snap.source == "amd-smi":
        raise IncompatibleError("topology does not support AMD's GPUs yet", hint="run `amd-smi topology`")
    best = best_group(snap.devices, options.best, free=options.free) if options.best else None
    return _report(snap, tuple(device for device in snap.devices if device.kind == "gpu"), best=best)


def print_head(node: dict[str, Any], print: Print) -> bool:
    """Print the machine and its driver; returns whether there are devices to show."""
    driver = node["driver"]
    parts = [f"node {node['node']}"]
    if driver["version"] or driver["module"]:
        kind = driver["branch_type"]
        life = ""
        if driver["supported_until"]:
            life = f", {'ended' if driver['ended'] else 'supported until'} {driver['supported_until']}"
        parts.append(f"driver {driver['version'] or driver['module']}" + (f" ({kind}{life})" if kind else ""))
    if driver["cuda"]:
        parts.append(f"CUDA {driver['cuda']}")
    gpus = [device for device in node["devices"] if device["kind"] == "gpu"]
    unreadable = sum(1 for gpu in gpus if gpu["error"])
    counted = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    if unreadable:
        counted += f", {unreadable} unreadable"
    if node["simulated"]:
        counted += ", SIMULATED"
    if node["scope"] == "container":
        counted += ", as this container sees them"
    parts.append(counted)
    print("   ".join(parts))
    if node["message"]:
        print(f"{node['state']}: {node['message']}")
    if node["fix"]:
        print(f"next: {node['fix']}")
    return bool(node["devices"])


def lease_holders(device: dict[str, Any]) -> str:
    """The leases on a device with their users, for a table."""
    return ", ".join(
        f"{mark['id']} {mark['user']}"
        + (f" {Duration(mark['expires_in_s']).shown}" if mark["expires_in_s"] is not None else "")
        for mark in device["leases"]
    )


def device_number(device: dict[str, Any]) -> str:
    """The index of a device, for a table; indented for a MIG device."""
    return str(device["index"]) if device["kind"] == "gpu" else f"  {device['index']}:{device['mig_index']}"


def _show_list(node: dict[str, Any], _: Options, print: Print) -> None:
    if not print_head(node, print):
        return
    rows = []
    for device in node["devices"]:
        model = device["name"] or "-"
        if device["kind"] == "mig":
            model = device["profile"] or model
        elif device["compute_capability"]:
            # As CUDA's compilers name the architecture: -arch=sm_80.
            model += f" sm_{device['compute_capability'].replace('.', '')}"
        memory = (
            f"{gib(device['memory_used_mib'])}/{gib(device['memory_total_mib'])} GiB"
            if device["memory_total_mib"] is not None
            else "-"
        )
        power = (
            f"{value_text(device['power_watts'])}/{value_text(device['power_limit_watts'], 'W')}"
            if device["power_watts"] is not None
            else "-"
        )
        mig = {None: "-", True: "on", False: "off"}[device["mig_enabled"]]
        names = list(dict.fromkeys(finding["id"] for finding in device["findings"]))
        word = ", ".join(name for name in names if name != device["health"])
        # States in which the GPU gets no work are in capital letters: they must not be overlooked in a long
        # table.
        if device["health"] not in ("ok", "warning"):
            word = device["health"].upper() + (f" ({word})" if word else "")
        rows.append(
            (
                device_number(device),
                short_uuid(device["uuid"]),
                model.replace("NVIDIA ", ""),
                memory,
                value_text(device["utilization_percent"], "%"),
                value_text(device["temperature_c"], "C"),
                power,
                mig,
                word or device["health"],
                lease_holders(device) or "-",
            )
        )
    titles = ("#", "UUID", "MODEL", "MEM USED/TOTAL", "UTIL", "TEMP", "POWER", "MIG", "HEALTH", "LEASE")
    for line in table(titles, rows, "UTIL TEMP POWER"):
        print(line)
    # One line for each remedy, however many GPUs have the fault.
    remedies: dict[str, None] = {}
    for device in node["devices"]:
        for finding in device["findings"]:
            print(f"{device['uuid'] or 'GPU ' + str(device['index'])}: {finding['message']}")
            remedies[f"next, {finding['id']}: {finding['remedy']}"] = None
    for line in remedies:
        print(line)


# Every field of `Device` that `show` prints, in its order; what is null is left out and listed at the end.
SHOWN_FIELDS = (
    (
        "identity",
        ("uuid", "index", "bus_id", "minor", "parent", "profile", "architecture", "compute_capability"),
    ),
    ("board", ("serial", "vbios", "board_part_number", "gsp_firmware", "numa_node", "cpus")),
    ("memory (MiB)", ("memory_total_mib", "memory_used_mib", "memory_reserved_mib", "memory_free_mib")),
    ("BAR1 (MiB)", ("bar1_total_mib", "bar1_used_mib")),
    ("use (%)", ("utilization_percent", "memory_utilization_percent", "encoder_percent", "decoder_percent")),
    ("temperature (C)", ("temperature_c", "temperature_slowdown_c", "temperature_margin_c")),
    ("power (W, J)", ("power_watts", "power_limit_watts", "energy_joules")),
    ("clocks (MHz)", ("clock_sm_mhz", "clock_sm_max_mhz", "clock_memory_mhz", "clock_memory_max_mhz")),
    ("clock events", ("clock_events",)),
    ("PCIe", ("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max")),
    ("NVLink", ("nvlinks_active", "nvlinks_total", "fabric_state")),
    ("modes", ("persistence", "compute_mode", "mig_enabled", "mig_pending", "ecc_enabled", "ecc_pending")),
    (
        "ECC errors",
        ("ecc_uncorrected", "ecc_corrected", "ecc_uncorrected_lifetime", "ecc_corrected_lifetime"),
    ),
    (
        "memory repair",
        (
            "remapped_rows_correctable",
            "remapped_rows_uncorrectable",
            "remap_pending",
            "remap_failed",
            "pages_pending",
        ),
    ),
    ("recovery", ("recovery_action",)),
)


def _show_devices(node: dict[str, Any], _: Options, print: Print) -> None:
    if not print_head(node, print):
        return
    for device in node["devices"]:
        print("")
        name = device["name"] or device["uuid"] or "GPU"
        print(f"{device_number(device).strip()}  {name}   {device['health']}")
        for title, names in SHOWN_FIELDS:
            cells = [
                f"{_plain_name(name)} {_word(device[name])}" for name in names if device[name] is not None
            ]
            if cells:
                print(f"  {title:17} {', '.join(cells)}")
        for finding in device["findings"]:
            print(f"  {finding['severity']:17} {finding['id']}: {finding['message']}")
        print(f"  {'lease':17} {lease_holders(device) or 'none'}")
        if device["not_allocatable_because"]:
            print(f"  {'not allocatable':17} {'; '.join(device['not_allocatable_because'])}")
        mine = [p for p in node["processes"] or () if p["device"] == device["uuid"]]
        for process in mine:
            whose = process["user"] or process["state"]
            print(f"  {'process':17} {process['pid']} {whose} {process['command'] or ''}")
        # Grouped by reason: a lost GPU has the same reason for sixty fields.
        missing: dict[str, list[str]] = {}
        for name, why in device["unavailable"].items():
            # "it is not a MIG device" and such are no missing values.
            if not why.startswith("it is "):
                missing.setdefault(why, []).append(name)
        for why, fields in missing.items():
            print(f"  {'not reported':17} {', '.join(sorted(fields))} ({why})")


def _plain_name(name: str) -> str:
    for unit in ("_mib", "_mhz", "_percent", "_c", "_watts", "_joules"):
        name = name[: -len(unit)] if name.endswith(unit) else name
    return name.replace("_", " ")


def _word(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else value_text(value)


def _show_memory(node: dict[str, Any], _: Options, print: Print) -> None:
    if not print_head(node, print):
        return
    rows = []
    for device in node["devices"]:
        rows.append(
            (
                device_number(device),
                short_uuid(device["uuid"]),
                *(gib(device[f"memory_{name}_mib"]) for name in ("total", "used", "reserved", "free")),
                gib(device["bar1_used_mib"]),
                lease_holders(device) or "-",
            )
        )
        for process in node["processes"] or ():
            if process["device"] == device["uuid"]:
                name = f"pid {process['pid']} {process['user'] or process['state']}"
                rows.append(
                    (
                        "",
                        f"  {name}",
                        "",
                        gib(process["memory_mib"]),
                        "",
                        "",
                        "",
                        process["lease"] or "no lease",
                    )
                )
    titles = ("#", "UUID", "TOTAL", "USED", "RESERVED", "FREE", "BAR1", "LEASE")
    for line in table(titles, rows, "TOTAL USED RESERVED FREE BAR1"):
        print(line)
    print("Amounts in GiB. RESERVED is memory of the driver.")


def _show_processes(node: dict[str, Any], _: Options, print: Print) -> None:
    if not print_head(node, print):
        return
    if not node["processes"]:
        print("no process uses a GPU")
        return
    rows = []
    for process in node["processes"]:
        box = process["container"]
        where = (
            f"{box['engine']} {box['id'][:12]}" + (f" pod {box['pod']}" if box["pod"] else "") if box else "-"
        )
        rows.append(
            (
                str(process["pid"]),
                process["user"] or "-",
                short_uuid(process["device"]),
                gib(process["memory_mib"]),
                where,
                process["lease"] or "no lease",
                process["command"] or f"({process['state']})",
            )
        )
    titles = ("PID", "USER", "DEVICE", "GiB", "CONTAINER", "LEASE", "COMMAND")
    for line in table(titles, rows, "PID GiB"):
        print(line)


def _show_topology(node: dict[str, Any], _: Options, print: Print) -> None:
    if not print_head(node, print):
        return
    indices = [gpu["index"] for gpu in node["devices"]]
    rows = []
    for gpu in node["devices"]:
        # By index, not by UUID: a lost peer has no UUID.
        ways = {peer["index"]: peer for peer in gpu["peers"]}
        cells = ["self" if n == gpu["index"] else _link_text(ways.get(n)) for n in indices]
        rows.append((f"GPU {gpu['index']}", *cells, value_text(gpu["numa_node"]), gpu["cpus"] or "-"))
    titles = ("", *(f"GPU {n}" for n in indices), "NUMA", "CPUS")
    for line in table(titles, rows):
        print(line)
    print("NV12: joined by 12 NVLinks; else the nearest common ancestor. *: no peer access to memory.")
    if node["best"]:
        print(f"best {len(node['best']['uuids'])}: {','.join(node['best']['uuids'])}")
        print(f"  {node['best']['why']}")


SHORT_ANCESTORS = {
    "one board": "board",
    "one switch": "switch",
    "several switches": "switches",
    "one host bridge": "bridge",
    "one NUMA node": "node",
    "across NUMA nodes": "system",
}


def _link_text(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return "-"
    way = (
        f"NV{peer['nvlinks']}"
        if peer["nvlinks"]
        else SHORT_ANCESTORS.get(peer["ancestor"], peer["ancestor"] or "?")
    )
    return way + ("" if peer["p2p"] in ("ok", None) else "*")


FREE_OPTION = Option("free", "only devices that can be leased now", default=False)
VERBS = (
    Verb(
        "list",
        "List GPUs and MIG devices: model, memory, utilization, temperature, power, health and leases.",
        (GPU_OPTION, FREE_OPTION),
        _list,
        _show_list,
        examples=("--free", "--json"),
    ),
    Verb("show", "Show every known value of the GPUs.", (GPU_OPTION,), _show, _show_devices),
    Verb("memory", "Show how much memory of each GPU its processes use.", (GPU_OPTION,), _show, _show_memory),
    Verb(
        "processes",
        "List the processes on the GPUs with user, container and lease.",
        (GPU_OPTION,),
        _show,
        _show_processes,
    ),
    Verb(
        "topology",
        "Show the links between GPUs, and the best linked group.",
        (
            Option("best", "also print the best linked group of this many GPUs", default=0, value="N"),
            FREE_OPTION,
        ),
        _topology,
        _show_topology,
    ),
)
