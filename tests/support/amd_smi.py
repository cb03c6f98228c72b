"""A double of AMD's `amd-smi`: a script that prints what real ones of several versions print.

Forms and values are from outputs that people quote, shortened; serial numbers are made up:

    6.2  henrygd/beszel#737 (metric, a list), jurkovic-nikola/OpenLinkHub#117 (static, a list),
         amd/node-scraper's tests (limit.socket_power), ROCm/amdsmi#130 (process)
    7.0  nathaninline/ajean#39 (static and metric with gpu_data, an asic_serial), ROCm/amdsmi CHANGELOG.md
         (limit.ppt0), ROCm/rocm-systems#2987 (ifwi, an MI350X), ROCm/rocm-systems#2720 (usage "N/A")
    5.6  ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py of 2023: limit.power, temperature_junction, driver_version
"""

import json
from pathlib import Path
from typing import Any

VERSIONS = ("5.6", "6.2", "7.0")
NAMES = {"5.6": "AMD Instinct MI250X", "6.2": "AMD Instinct MI300X", "7.0": "AMD Instinct MI350X"}
Rows = list[dict[str, Any]]


def unit(value: object, name: str) -> dict[str, object]:
    return {"value": value, "unit": name}


def serial(index: int) -> str:
    return f"0x{index + 4:X}162405E51BB99B0"


def uuid(index: int) -> str:
    return f"GPU-{index + 4:x}162405e51bb99b0"


def address(index: int) -> str:
    return f"0000:{5 + 32 * index:02x}:00.0"


def outputs(version: str, count: int, pids: dict[int, int] | None = None) -> dict[str, Any]:
    """What each question prints.

    Args:
        pids: Processes by the GPU that has their memory; each is listed on all GPUs.
    """
    gpus = range(count)
    listed: Rows = [
        {"gpu": n, "bdf": address(n), "uuid": f"{n + 4:x}1ff74a1-0000-1000-8062-405e51bb99b0"} for n in gpus
    ]
    static = [_static(version, n) for n in gpus]
    metric = [_metric(version, n) for n in gpus]
    jobs = [{"gpu": n, "process_list": _process_list(version, n, pids or {})} for n in gpus]
    whole = version == "7.0"
    return {
        "list": listed,
        "static": {"gpu_data": static} if whole else static,
        "metric": {"gpu_data": metric} if whole else metric,
        "process": jobs,
    }


def _static(version: str, index: int) -> dict[str, Any]:
    asic = {
        "market_name": NAMES[version],
        "vendor_id": "0x1002",
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "device_id": "0x74a1",
        "rev_id": "0x00",
        "asic_serial": serial(index),
    }
    board = {"model_number": "102-G36212-0C", "product_serial": f"69231900000{index}", "fru_id": "N/A"}
    if version == "5.6":
        return {
            "gpu": index,
            "asic": asic,
            "bus": {"bdf": address(index), "max_pcie_speed": "16 GT/s", "max_pcie_lanes": 16},
            "vbios": {"name": "N/A", "version": "113-D65209-073"},
            "board": board,
            "limit": {"power": "560 W", "temperature_edge": "N/A", "temperature_junction": "110 C"},
            "driver": {"driver_version": "6.1.5"},
            "numa": {"node": 0, "affinity": -1},
        }
    told = {
        "gpu": index,
        "asic": {**asic, "oam_id": index, "target_graphics_version": "gfx942"},
        "bus": {
            "bdf": address(index),
            "max_pcie_width": 16,
            "max_pcie_speed": unit(32, "GT/s"),
            "pcie_interface_version": "Gen 5",
            "slot_type": "OAM",
        },
        "board": board,
        "driver": {"name": "amdgpu", "version": "6.8.5" if version == "6.2" else "6.16.6"},
        "numa": {"node": index // 4, "affinity": 0},
        "vram": {"type": "HBM", "size": unit(196592, "MB")},
    }
    heat = {"slowdown_edge_temperature": "N/A", "slowdown_hotspot_temperature": unit(100, "C")}
    if version == "6.2":
        limit: dict[str, Any] = {"max_power": unit(750, "W"), "socket_power": unit(750, "W"), **heat}
        return {**told, "vbios": {"name": "MI300X", "version": "022.040.003.041.000001"}, "limit": limit}
    power = {"max_power_limit": unit(1000, "W"), "socket_power_limit": unit(1000, "W")}
    nothing = {"max_power_limit": "N/A", "socket_power_limit": "N/A"}
    limit = {"ppt0": power, "ppt1": nothing, **heat}
    return {**told, "ifwi": {"name": "AMD MI350X", "version": "00154951"}, "limit": limit}


def _metric(version: str, index: int) -> dict[str, Any]:
    used = 283 + index
    clocks = ("gfx_0", "mem_0") if version != "7.0" else ("GFX_0", "MEM_0")
    told = {
        "gpu": index,
        "usage": {"gfx_activity": unit(42, "%"), "umc_activity": unit(1, "%"), "mm_activity": "N/A"},
        "power": {
            "socket_power": unit(141, "W"),
            "gfx_voltage": unit("N/A", "mV"),
            "throttle_status": "UNTHROTTLED",
            "power_management": "ENABLED",
        },
        "clock": {
            clocks[0]: {"clk": unit(132, "MHz"), "min_clk": unit(500, "MHz"), "max_clk": unit(2100, "MHz")},
            clocks[1]: {"clk": unit(900, "MHz"), "min_clk": unit(900, "MHz"), "max_clk": unit(1300, "MHz")},
        },
        "temperature": {"edge": "N/A", "hotspot": unit(38, "C"), "mem": unit(33, "C")},
        "pcie": {"width": 16, "speed": unit(32, "GT/s"), "bandwidth": "N/A"},
        "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": 0},
        "energy": {"total_energy_consumption": unit(1234567.8, "J")},
        "mem_usage": {
            "total_vram": unit(196592, "MB"),
            "used_vram": unit(used, "MB"),
            "free_vram": unit(196592 - used, "MB"),
        },
    }
    if version == "5.6":
        del told["energy"], told["ecc"]
        told["power"] = {"average_socket_power": "141 W"}
        told["temperature"] = {"edge": "35 C", "junction": "38 C", "mem": "N/A"}
    if version == "7.0" and index == 1:
        told["usage"] = "N/A"
    return told


def _process_list(version: str, index: int, pids: dict[int, int]) -> Rows:
    rows: Rows = []
    for gpu, pid in pids.items():
        vram = 2_353_860_608 if gpu == index else 0
        info: dict[str, Any] = {"name": "python3", "pid": pid, "mem_usage": unit(0, "B")}
        if version == "5.6":
            info["mem_usage"] = unit(vram, "B")
        else:
            info["memory_usage"] = {
                "gtt_mem": unit(0, "B"),
                "cpu_mem": unit(0, "B"),
                "vram_mem": unit(vram, "B"),
            }
        rows.append({"process_info": info})
    return rows or [{"process_info": "No running processes detected"}]


def install(folder: Path, told: dict[str, Any], *, before: str = "") -> Path:
    """Write the script and what it prints; returns the folder to be looked in.

    Args:
        before: Lines of shell that it runs first, for what goes wrong.
    """
    folder.mkdir(exist_ok=True)
    for question, document in told.items():
        text = document if isinstance(document, str) else json.dumps(document, indent=4)
        (folder / f"{question}.json").write_text(text)
    script = folder / "amd-smi"
    script.write_text(f'#!/bin/sh\n{before}\nexec cat "{folder}/$1.json"\n')
    script.chmod(0o755)
    return folder


def bus(folder: Path, count: int) -> Path:
    """A PCI bus with so many accelerators of AMD."""
    for index in range(count):
        gpu = folder / address(index)
        (gpu / "drm" / f"renderD{128 + index}").mkdir(parents=True, exist_ok=True)
        for name, text in (("vendor", "0x1002"), ("class", "0x120000"), ("device", "0x74a1")):
            (gpu / name).write_text(f"{text}\n")
        (gpu / "local_cpulist").write_text("0-47\n")
    return folder
