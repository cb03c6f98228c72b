"""AMD's GPUs, which NVML does not list: `amd-smi ... --json` makes them devices of the same snapshot.

The keys changed between versions: a list of GPUs became {"gpu_data": [...]} with ROCm 7, the power limit
moved into `ppt0`, `vbios` became `ifwi`, `driver_version` became `version`. Both forms are read.
Sources: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py and CHANGELOG.md; outputs that people quote, which
tests/support/amd_smi.py names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpukiln.gpus import health, processes
from gpukiln.gpus.model import Device, Driver, Snapshot, unreadable_finding
from gpukiln.parsing import check_depth
from gpukiln.probe import base
from gpukiln.probe.base import HungError, NotReachedError, read, run_unrecorded

# amd-smi asks every GPU in one call, and a GPU that hangs keeps it.
LIMIT_S = 30.0
# ROCm's packages put it below /opt/rocm and not on root's PATH.
TOOL, ROCM_TOOL = "amd-smi", "/opt/rocm/bin"
MODULE = "/sys/module/amdgpu"
DRI = "/dev/dri"
# PCI vendor and device, with 0x in some versions and without in others.
HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}")
NOT_REPORTED = "amd-smi does not report it"
MIB = {"B": 2.0**-20, "KB": 2.0**-10, "MB": 1.0, "GB": 1024.0, "TB": 1024.0**2}  # amd-smi's MB are MiB
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s of a PCIe link
# Field of a device -> paths of the answers, the newest version's first; one table for each type of value.
TEXT_FIELDS = {
    "name": ("static.asic.market_name", "static.board.product_name"),
    "architecture": ("static.asic.target_graphics_version",),
    "serial": ("static.board.product_serial",),
    "vbios": ("static.vbios.version", "static.ifwi.version"),
    "board_part_number": ("static.board.model_number",),
}
INTEGER_FIELDS = {
    "numa_node": ("static.numa.node",),
    "utilization_percent": ("metric.usage.gfx_activity",),
    "memory_utilization_percent": ("metric.usage.umc_activity",),
    "temperature_c": (
        "metric.temperature.hotspot",
        "metric.temperature.junction",
        "metric.temperature.edge",
    ),
    "temperature_slowdown_c": (
        "static.limit.slowdown_hotspot_temperature",
        "static.limit.temperature_junction",
    ),
    "clock_sm_mhz": ("metric.clock.gfx_0.clk", "metric.clock.gfx.cur_clk"),
    "clock_sm_max_mhz": ("metric.clock.gfx_0.max_clk", "metric.clock.gfx.max_clk"),
    "clock_memory_mhz": ("metric.clock.mem_0.clk", "metric.clock.mem.cur_clk"),
    "clock_memory_max_mhz": ("metric.clock.mem_0.max_clk", "metric.clock.mem.max_clk"),
    "pcie_width": ("metric.pcie.width", "metric.pcie.pcie_width"),
    "pcie_width_max": ("static.bus.max_pcie_width", "static.bus.max_pcie_lanes"),
    "ecc_uncorrected": ("metric.ecc.total_uncorrectable_count", "metric.ecc.total_uncorrect_count"),
    "ecc_corrected": ("metric.ecc.total_correctable_count", "metric.ecc.total_correct_count"),
}
FLOAT_FIELDS = {
    "power_watts": (
        "metric.power.socket_power",
        "metric.power.current_socket_power",
        "metric.power.average_socket_power",
    ),
    "power_limit_watts": (
        "static.limit.ppt0.socket_power_limit",
        "static.limit.socket_power",
        "static.limit.power",
    ),
    "energy_joules": ("metric.energy.total_energy_consumption",),
}
MEMORY_FIELDS = {
    "memory_total_mib": ("metric.mem_usage.total_vram", "static.vram.size", "static.vram.vram_size_mb"),
    "memory_used_mib": ("metric.mem_usage.used_vram",),
    "memory_free_mib": ("metric.mem_usage.free_vram",),
}
SPEED_FIELDS = {
    "pcie_generation": ("metric.pcie.speed", "metric.pcie.pcie_speed"),
    "pcie_generation_max": ("static.bus.max_pcie_speed",),
}
# Fields that do not come from a driver, so that null needs no reason.
NOT_FROM_DRIVER = ("uuid", "kind", "index", "vendor", "peers", "health", "findings", "leases", "allocatable")
FIELDS_WITHOUT_REASON = (*NOT_FROM_DRIVER, "not_allocatable_because", "error", "unavailable")


@dataclass
class AmdAnswer:
    """What amd-smi answered.

    Args:
        state: `Snapshot.state`, with message and fix.
        rows: By amd-smi's index: {list, static, metric, process}, the answer to each question.
        failed: By question, why it has no answer.
    """

    state: str = "ok"
    message: str = ""
    fix: str = ""
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def add_amd_gpus(
    snapshot: Snapshot, gpus: Sequence[dict[str, str]], nvidia: Sequence[dict[str, str]], contained: bool
) -> Snapshot:
    """The snapshot with AMD's GPUs.

    Args:
        snapshot: The one with NVIDIA's GPUs.
        gpus: AMD's GPUs on the PCI bus.
        nvidia: NVIDIA's GPUs on the bus.
        contained: Whether this is a container, which can use only the GPUs whose device nodes it has.
    """
    given = [gpu for gpu in gpus if _can_open_render_node(gpu["address"])] if contained else list(gpus)
    alone = snapshot.state in ("no-device", "not-granted")
    there = f"{len(given)} AMD GPU{'s' * (len(given) != 1)} on the PCI bus"
    if not given:
        if alone:
            message = f"this container was granted none of its host's {len(gpus)} AMD GPUs"
            fix = "start it with /dev/kfd and with /dev/dri/renderD* of the GPUs that it may use"
            return dataclasses.replace(snapshot, source=TOOL, state="not-granted", message=message, fix=fix)
        return snapshot
    look = _query_amd_smi(there)
    devices = [health.with_health(device) for device in _devices(look, given)] if look.state == "ok" else []
    problems = [unreadable_finding(look.state, look.message)] if look.message else []
    problems += [unreadable_finding("FAILED", f"{name}: {why}") for name, why in look.failed.items()]
    problems += [
        unreadable_finding("FAILED", device.error, device.title) for device in devices if device.error
    ]
    jobs = processes.describe(_processes(look, devices))
    if alone:
        return dataclasses.replace(
            snapshot,
            source=TOOL,
            state=look.state,
            message=look.message,
            fix=look.fix,
            driver=_driver(look),
            devices=tuple(devices),
            processes=jobs,
            errors=tuple(problems),
        )
    if look.state == "no-library":
        # Processors have an integrated GPU for screens: no ROCm there is no error.
        info = unreadable_finding(look.state, look.message, severity="info")
        return dataclasses.replace(snapshot, errors=(*snapshot.errors, info))
    if look.state != "ok":
        devices = [_unreadable("amd", n, gpu, look.message) for n, gpu in enumerate(given)]
    whole = list(snapshot.devices)
    if snapshot.state != "ok":
        if look.state != "ok":
            return dataclasses.replace(snapshot, source=f"nvml, {TOOL}", errors=(*snapshot.errors, *problems))
        whole = [_unreadable("nvidia", n, gpu, snapshot.message) for n, gpu in enumerate(nvidia)]
    return dataclasses.replace(
        snapshot,
        source=f"nvml, {TOOL}",
        state="ok",
        message="",
        fix="",
        devices=(*whole, *devices),
        processes=(*(snapshot.processes or ()), *jobs),
        errors=(*snapshot.errors, *problems),
    )


def _can_open_render_node(address: str) -> bool:
    """Whether this process can open a GPU's render node."""
    try:
        nodes = os.listdir(os.path.join(base.PCI, address, "drm"))  # noqa: PTH118, PTH208 - as probe.base
    except OSError:
        return False
    paths = [f"{DRI}/{node}" for node in nodes if node.startswith("renderD")]
    return any(os.access(path, os.R_OK | os.W_OK) for path in paths)


def _query_amd_smi(there: str) -> AmdAnswer:
    """Ask amd-smi every question."""
    if not os.path.isdir(MODULE):  # noqa: PTH112 - as probe.base
        message = f"{there}, but the kernel module amdgpu is not loaded"
        return AmdAnswer("no-driver", message, "run `modprobe amdgpu`; if it fails, `dmesg` says why")
    tool = shutil.which(TOOL, path=f"{base.PATH}:{ROCM_TOOL}")
    if tool is None:
        fix = "install ROCm's package amd-smi-lib, which has amd-smi"
        return AmdAnswer("no-library", f"{there}, but {TOOL} is not installed", fix)
    look = AmdAnswer()
    for question in ("list", "static", "metric", "process"):
        try:
            rows = _rows(tool, question)
        except (NotReachedError, ValueError) as error:
            why = str(error)
            if question == "list":
                return _failed_query(there, why, isinstance(error, HungError))
            look.failed[question] = why
            # A driver that hangs would hold each further question for LIMIT_S.
            if isinstance(error, NotReachedError):
                look.failed.update(dict.fromkeys({"static", "metric", "process"} - {"list", question}, why))
                break
            continue
        for row in rows:
            if type(row.get("gpu")) is int:
                look.rows.setdefault(row["gpu"], {})[question] = row
    return look


def _failed_query(there: str, why: str, hung: bool) -> AmdAnswer:
    if hung:
        return AmdAnswer(
            "hung", f"{there}, but {why}", "read the kernel's log (dmesg), then reboot the machine"
        )
    if re.search(r"(?i)permission|required groups", why):
        fix = "add this user to the groups that own /dev/kfd and /dev/dri/*, such as render and video"
        return AmdAnswer("no-permission", f"{there}, but this user has no permission to use them: {why}", fix)
    return AmdAnswer("failed", f"{there}, but {TOOL} does not list them: {why}", f"run `{TOOL} list --json`")


def _rows(tool: str, question: str) -> list[dict[str, Any]]:
    """The answer to one question, a row for each GPU.

    Raises:
        NotReachedError: amd-smi did not answer in time.
        ValueError: The answer is not JSON.
    """
    done = run_unrecorded(tool, question, "--json", timeout=LIMIT_S)
    # amd-smi prints warnings before the document, also on standard output.
    begin = re.search(r"(?m)^\s*[\[{]", done["out"])
    output = f"{done['err']} {done['out'][:300]}".strip()
    if done["rc"] != 0 or begin is None:
        raise ValueError(f"`{TOOL} {question} --json` exits with {done['rc']}: {output[:300]}")
    try:
        document = json.JSONDecoder().raw_decode(done["out"][begin.start() :].lstrip())[0]
        check_depth(document)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{TOOL} {question} --json` does not print JSON: {error}") from error
    if isinstance(document, dict):
        # ROCm 7; a list of GPUs before.
        document = document.get("gpu_data", [document])
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else []


def _driver(look: AmdAnswer) -> Driver:
    nothing = f"{TOOL} does not answer" if look.state != "ok" else NOT_REPORTED
    first = next(iter(look.rows.values()), {})
    version_value, _ = _first_value(first, ("static.driver.version", "static.driver.driver_version"))
    module = (read(f"{MODULE}/version") or "").strip() or None
    unavailable = dict.fromkeys(
        ("branch", "branch_type", "supported_until", "ended", "cuda"), "it is not an NVIDIA driver"
    )
    version = str(version_value) if version_value is not None else None
    if version is None:
        unavailable["version"] = nothing
    if module is None:
        unavailable["module"] = "the kernel's own module has no version"
    # NVIDIA's driver has open and proprietary modules; amdgpu is in the kernel's source.
    unavailable["flavour"] = "amdgpu is open"
    return Driver(version=version, module=module, unavailable=unavailable)


def _first_value(rows: dict[str, Any], paths: Sequence[str]) -> tuple[Any, str]:
    """The first value of several paths, {value, unit}, a text or a number; or None and the reason."""
    why = NOT_REPORTED
    for path in paths:
        value: Any = rows
        for key in path.split("."):
            if isinstance(value, dict):
                # Some versions write keys in capital letters.
                value = value.get(key, value.get(key.upper()))
        content = value.get("value") if isinstance(value, dict) else value
        if content in (None, "", "N/A") or isinstance(content, (dict, list)):
            continue
        if isinstance(content, str) and content.startswith("AMDSMI_STATUS"):
            why = content.removeprefix("AMDSMI_STATUS_")
            continue
        return value, ""
    return None, why


def _number(value: Any) -> tuple[float, str] | None:
    """A number and its unit; None for anything else.

    >>> _number({"value": 35, "unit": "W"})
    (35.0, 'W')
    >>> _number("16.0 GT/s"), _number("N/A")
    ((16.0, 'GT/s'), None)
    """
    unit = str(value.get("unit", "")) if isinstance(value, dict) else ""
    content = value.get("value") if isinstance(value, dict) else value
    if isinstance(content, bool):
        return None
    match = re.fullmatch(r"\s*(-?\d{1,18}(?:\.\d{1,18})?)\s*([^\s\d.]*)\s*", str(content))
    if isinstance(content, float) and math.isfinite(content):
        return content, unit
    return (float(match[1]), match[2] or unit) if match else None


def _mib(value: Any) -> int | None:
    """MiB of an amount of memory.

    >>> _mib({"value": 196592, "unit": "MB"})
    196592
    >>> _mib("16 GB")
    16384
    """
    number = _number(value)
    if number is None:
        return None
    amount = number[0] * MIB.get(number[1].upper().replace("IB", "B") or "MB", 1.0)
    return round(amount) if math.isfinite(amount) else None


def _generation(value: Any) -> int | None:
    number = _number(value)
    return GENERATIONS.get(number[0]) if number else None


def _integer(value: Any) -> int | None:
    number = _number(value)
    return round(number[0]) if number else None


def _float(value: Any) -> float | None:
    number = _number(value)
    return number[0] if number else None


def _text(value: Any) -> str | None:
    return str(value)


def _devices(look: AmdAnswer, given: Sequence[dict[str, str]]) -> list[Device]:
    """A device for each GPU of the bus; a GPU that amd-smi does not list becomes a device with an error."""
    serials = Counter(_serial(rows) for rows in look.rows.values())
    devices = [_device(look, index, rows, serials) for index, rows in sorted(look.rows.items())]
    listed = {device.bus_id for device in devices}
    missing = [gpu for gpu in given if gpu["address"] not in listed]
    if any(device.bus_id is None for device in devices):
        # Which of the bus's GPUs a row without an address is, nobody can say.
        missing = []
    for gpu in missing:
        driver = os.path.basename(os.path.realpath(f"{base.PCI}/{gpu['address']}/driver"))  # noqa: PTH119
        if driver != "vfio-pci":  # else a virtual machine has it
            why = f"{TOOL} does not list it; it is bound to the driver {driver}"
            devices.append(_unreadable("amd", len(devices), gpu, why))
    return devices


def _serial(rows: dict[str, Any]) -> str | None:
    """The 16 digits by which the kernel and ROCr name a GPU; None where it has none."""
    serial, _ = _first_value(rows, ("static.asic.asic_serial",))
    match = re.fullmatch(r"0x([0-9a-f]{1,16})", str(serial).lower())
    return match[1].zfill(16) if match and int(match[1], 16) else None


def _device(look: AmdAnswer, index: int, rows: dict[str, Any], serials: Counter[str | None]) -> Device:
    unavailable: dict[str, str] = {}
    values: dict[str, Any] = {}
    readers: tuple[tuple[dict[str, tuple[str, ...]], Callable[[Any], Any]], ...] = (
        (TEXT_FIELDS, _text),
        (INTEGER_FIELDS, _integer),
        (FLOAT_FIELDS, _float),
        (MEMORY_FIELDS, _mib),
        (SPEED_FIELDS, _generation),
    )
    for table, reader in readers:
        for name, paths in table.items():
            content, why = _first_value(rows, paths)
            values[name] = reader(content) if content is not None else None
            if values[name] is None:
                asked = {path.partition(".")[0] for path in paths} & set(look.failed)
                unavailable[name] = look.failed[asked.pop()] if asked else why
    # GPUs without the counter report 0 J instead of N/A.
    if values["energy_joules"] == 0.0:
        values["energy_joules"], unavailable["energy_joules"] = None, NOT_REPORTED
    hot, limit = values["temperature_c"], values["temperature_slowdown_c"]
    if hot is not None and limit is not None:
        values["temperature_margin_c"] = limit - hot
    throttle, _ = _first_value(rows, ("metric.power.throttle_status",))
    if throttle is not None:
        values["clock_events"] = () if str(throttle) == "UNTHROTTLED" else (str(throttle).lower(),)
    address, _ = _first_value(rows, ("list.bdf", "static.bus.bdf"))
    bus_id = str(address).lower() if address is not None else None
    if bus_id is not None:
        values["cpus"] = (read(f"{base.PCI}/{bus_id}/local_cpulist") or "").strip() or None
    vendor, device = (_first_value(rows, (f"static.asic.{name}",))[0] for name in ("vendor_id", "device_id"))
    if HEX.fullmatch(str(vendor)) and HEX.fullmatch(str(device)):
        values["pci_id"] = f"0x{int(str(device), 16):04X}{int(str(vendor), 16):04X}"
    # ROCR_VISIBLE_DEVICES takes GPU-<these digits>; amd-smi's own `uuid` is another number, which no program
    # accepts.
    serial = _serial(rows)
    if serial is None:
        unavailable["uuid"] = look.failed.get("static") or "it has no serial number, by which ROCr names GPUs"
    elif serials[serial] > 1:
        unavailable["uuid"] = (
            f"{serials[serial]} partitions of one GPU have this number: not supported for AMD yet"
        )
        serial = None
    return _complete(
        Device(
            uuid=f"GPU-{serial}" if serial else None,
            kind="gpu",
            index=index,
            vendor="amd",
            bus_id=bus_id,
            unavailable=unavailable,
            **values,
        ),
        NOT_REPORTED,
    )


def _complete(device: Device, why: str) -> Device:
    """The device with a reason for each null."""
    reasons = {**device.unavailable}
    for entry in dataclasses.fields(Device):
        if (
            getattr(device, entry.name) is None
            and entry.name not in reasons
            and entry.name not in FIELDS_WITHOUT_REASON
        ):
            reasons[entry.name] = why
    if device.uuid is None:
        reasons.setdefault("uuid", why)
    return dataclasses.replace(device, unavailable=reasons)


def _unreadable(vendor: str, index: int, gpu: dict[str, str], why: str) -> Device:
    device = Device(uuid=None, kind="gpu", index=index, vendor=vendor, bus_id=gpu["address"], error=why)
    return health.with_health(_complete(device, why))


def _processes(look: AmdAnswer, devices: Sequence[Device]) -> list[tuple[str | None, dict[str, Any]]]:
    """The processes on each GPU: the device's UUID, and a row as the NVML collector's."""
    rows = []
    for device in devices:
        answer = look.rows.get(device.index, {}).get("process", {}) if device.readable else {}
        listed = answer.get("process_list", answer.get("process_info", []))
        for row in listed if isinstance(listed, list) else []:
            info = row.get("process_info", row) if isinstance(row, dict) else row
            pid = _integer(info.get("pid")) if isinstance(info, dict) else None
            if pid is None:  # a text: "No running processes detected"
                continue
            memory, _ = _first_value(info, ("memory_usage.vram_mem", "mem_usage", "mem"))
            amount = _mib(memory) if memory is not None else None
            exact = _number(memory) if memory is not None else None
            # A program has every GPU open, and amd-smi lists it on each (ROCm/legacy-rocm-build#2292):
            # without memory on a GPU it is not there.
            if exact is None or exact[0]:
                rows.append((device.uuid, {"pid": pid, "kind": "compute", "memory": amount}))
    return rows
